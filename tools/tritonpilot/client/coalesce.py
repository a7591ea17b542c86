"""Which calls travel together, when do they leave, and whose rows are whose? Pure decisions.

A lane is a queue of calls that may share a request. The first call of an idle lane leaves at once: nothing is gained by
waiting. While requests are on the way, the next one gathers until one of them is answered, it is full, or its
oldest call has waited long enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """What one joined request may hold, and how long its oldest call may wait for company."""

    rows: int
    bytes: int = 1 << 20
    wait_s: float = 0.001


@dataclass(frozen=True)
class Size:
    """Of one call."""

    rows: int
    bytes: int


@dataclass(frozen=True)
class Decision:
    """Send the first `count` calls now, or (0) look again after `wait_s`."""

    count: int
    wait_s: float
    reason: str


def decide(sizes: Iterable[Size], *, oldest_age_s: float, in_flight: int, limits: Limits) -> Decision:
    """What to do with the calls that wait in a lane, oldest first, while `in_flight` of its requests are unanswered."""
    count = rows = total = 0
    is_full = False
    for size in sizes:
        if count and (rows + size.rows > limits.rows or total + size.bytes > limits.bytes):
            is_full = True
            break
        count, rows, total = count + 1, rows + size.rows, total + size.bytes
    if not count:
        return Decision(0, math.inf, "nobody waits")
    if is_full or rows >= limits.rows or total >= limits.bytes:
        return Decision(count, 0.0, "full")
    if not in_flight:
        return Decision(count, 0.0, "nothing is on the way")
    left_s = limits.wait_s - oldest_age_s
    if left_s <= 0:
        return Decision(count, 0.0, "the oldest call has waited long enough")
    return Decision(0, left_s, "gathering while a request is on the way")


def spans(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Where each call's rows lie in the joined request: [(start, stop), ...]."""
    found, start = [], 0
    for count in rows:
        found.append((start, start + count))
        start += count
    return found


def halves(calls: Sequence[T]) -> tuple[list[T], list[T]]:
    """The two requests that replace a refused one, so that a bad call ends up alone: 2n - 1 requests at most for n calls."""
    middle = len(calls) // 2
    return list(calls[:middle]), list(calls[middle:])


def deadline_band(left_s: float) -> int:
    """Calls of one band may share a request: their time left differs by less than a factor of two."""
    return math.frexp(max(left_s, 1e-6))[1]
