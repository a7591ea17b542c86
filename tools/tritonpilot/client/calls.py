"""Calls that wait, what they have in common, and what carries them. Bookkeeping of one event loop; decisions are in coalesce.py."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tritonpilot.client import coalesce, served
from tritonpilot.client.errors import DeadlineError
from tritonpilot.client.served import Array, Checked, Served

DOUBTFUL_S = 60.0  # a request whose tensors lie in shared memory is waited for that long after its callers left

Key = tuple[Served, int, str, tuple[str, ...], tuple[Any, ...], int]


class Route:
    """What every call of a request has in common."""

    __slots__ = ("caller_class", "level", "outputs", "served")

    def __init__(self, model: Served, level: int, caller_class: str, outputs: tuple[str, ...]) -> None:
        self.served = model
        self.level = level
        self.caller_class = caller_class
        self.outputs = outputs


class Call:
    """One prediction that somebody waits for."""

    __slots__ = ("arrays", "asked_s", "bytes", "deadline", "errand", "future", "is_single", "since", "size")

    def __init__(
        self, checked: Checked, future: asyncio.Future[dict[str, Array]], deadline: float, asked_s: float
    ) -> None:
        self.arrays = checked.arrays
        self.is_single = checked.is_single
        self.bytes = served.size_of(checked.arrays)
        self.size = coalesce.Size(checked.rows, self.bytes)
        self.future = future
        self.deadline = deadline
        self.asked_s = asked_s
        self.since = 0.0
        self.errand: Errand | None = None

    def shapes(self) -> tuple[Any, ...]:
        """Names and row shapes of the inputs: calls that agree in them can be joined."""
        return tuple([(name, array.shape[1:]) for name, array in self.arrays.items()])

    def answer(self, found: Mapping[str, Array], start: int, stop: int, *, is_shared: bool, is_batched: bool) -> None:
        """Give the caller its rows of the outputs; `is_shared` when others have rows of them too."""
        if self.future.done():
            return
        if not is_batched:
            self.future.set_result(dict(found))
            return
        part: Any = start if self.is_single else slice(start, stop)
        # A copy: nobody's answer keeps the rows of others in memory.
        self.future.set_result(
            {name: np.array(array[part]) if is_shared else array[part] for name, array in found.items()}
        )

    def fail(self, error: BaseException) -> None:
        """Raise the error in the caller, unless it has an answer or went."""
        if not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        """The deadline is here."""
        self.fail(self.late())

    def late(self, more: str = "") -> DeadlineError:
        """What a call raises at its deadline."""
        return DeadlineError(
            f"There was no answer within {self.asked_s * 1e3:g} ms{more}. Ask for more time, or send less."
        )


class Errand:
    """The calls that were sent together; it ends when none of them waits any more."""

    __slots__ = ("calls", "is_doubtful", "task")

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = calls
        self.task: asyncio.Task[None] | None = None
        self.is_doubtful = False
        for call in calls:
            call.errand = self

    def left(self) -> None:
        """A caller went, with an answer or without: nobody needs the request when all are gone."""
        if self.task is None or self.task.done() or not all(call.future.done() for call in self.calls):
            return
        if self.is_doubtful:
            self.task.get_loop().call_later(DOUBTFUL_S, self.task.cancel)
        else:
            self.task.cancel()


class Lane:
    """Calls that may share a request, and how many of its requests are on the way."""

    __slots__ = ("in_flight", "is_looked_at", "key", "limits", "route", "timer", "waiting")

    def __init__(self, key: Key, route: Route, limits: coalesce.Limits) -> None:
        self.key = key
        self.route = route
        self.limits = limits
        self.waiting: deque[Call] = deque()
        self.in_flight = 0
        self.is_looked_at = False
        self.timer: asyncio.TimerHandle | None = None
