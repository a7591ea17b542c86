"""What is one request to the gate, and how does it end?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tritonpilot.entry.terms import ModelTerms

if TYPE_CHECKING:
    from tritonpilot.entry.order import Model, Queue

Kind = Literal["rate", "concurrency", "queue_full", "wait", "deadline", "unknown_class"]
Status = Literal["ok", "error", "rejected", "unavailable"]
DoneStatus = Literal["ok", "error", "rejected", "unavailable", "cancelled", "timeout"]

#: Where a ticket is: not submitted, waiting, in Triton, in Triton although it has its outcome, at its end.
NEW, WAITING, RUNNING, ABANDONED, OVER = range(5)


class Bucket(Protocol):
    """A token bucket of rows."""

    @property
    def level(self) -> float: ...
    @property
    def burst(self) -> float: ...
    @property
    def rate_per_s(self) -> float: ...

    def take(self, n: int) -> float:
        """0.0: taken; otherwise seconds until it could be."""
        ...


class Tenant(Protocol):
    """What the gate asks of a tenant (tritonpilot.entry.tenants.Tenant)."""

    in_entry: int
    """Its requests that wait or are in Triton; the gate counts."""

    @property
    def name(self) -> str: ...
    @property
    def bucket(self) -> Bucket | None: ...
    @property
    def concurrency(self) -> int | None: ...
    @property
    def queue_share(self) -> float | None: ...


@dataclass(frozen=True)
class Refusal:
    """Why a request is not served, and when it is worth to come back."""

    kind: Kind
    message: str
    retry_after_s: float = 0.0


class Ticket:
    """One request. `level`, `timeout_us` and `started_s` are set before start() is called, which must not raise."""

    __slots__ = (
        "_due",
        "_in_flight",
        "_model",
        "_queue",
        "_state",
        "_waits_until_s",
        "arrived_s",
        "class_name",
        "deadline_s",
        "is_promoted",
        "level",
        "model",
        "refuse",
        "rows",
        "start",
        "started_s",
        "tenant",
        "timeout_us",
    )
    _model: Model
    _queue: Queue

    def __init__(
        self,
        model: ModelTerms,
        class_name: str,
        rows: int,
        tenant: Tenant | None,
        deadline_s: float | None,
        start: Callable[[Ticket], None],
        refuse: Callable[[Ticket, Refusal], None],
    ) -> None:
        self.model = model
        self.class_name = class_name
        self.rows = rows if rows > 0 else 1
        self.tenant = tenant
        self.deadline_s = deadline_s
        self.start = start
        self.refuse = refuse
        self.level = 0
        """Triton's priority; 0: none is set."""
        self.timeout_us = 0
        """What is left of its class's timeout and its deadline; 0: neither is set."""
        self.arrived_s = 0.0
        self.started_s = 0.0
        """0: it never went to Triton."""
        self.is_promoted = False
        """It went before a waiting request of a class above its own."""
        self._state = NEW
        self._due: list[Any] | None = None  # its entry in the heap of due times
        self._in_flight = 0  # rows in flight when it started, if the window was full then
        self._waits_until_s = math.inf


class Watcher(Protocol):
    """Who is told what happens, for metrics. Each ticket ends in one refused() or one done()."""

    def refused(self, ticket: Ticket, refusal: Refusal) -> None:
        """submit() did not accept it."""
        ...

    def started(self, ticket: Ticket) -> None:
        """It goes to Triton."""
        ...

    def done(self, ticket: Ticket, status: DoneStatus, seconds: float) -> None:
        """An accepted ticket has its outcome, `seconds` after its arrival.

        "timeout": its deadline passed, or its class timeout while it waited (started_s is 0 if it waited); "cancelled": the caller
        went. Triton's answer to such a ticket changes nothing.
        """
        ...
