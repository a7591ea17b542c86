"""How fast does a model work, and how long would a new request wait? Estimates from what was seen; pure.

pace = Pace(now_s, [Turn()])                      # classes in the order in which they are served
pace.finished(now_s, rows=8, seconds=0.05, in_flight=32)
pace.wait_s(now_s, turn=0, in_flight=32, above=0, own=40, floors=0.1)

Capacity is what leaves a full window. By Little's law (rows in flight = rate * seconds in Triton)

    rate = sum(rows * in_flight) / sum(rows * seconds)

over the requests that came from the queue into a window that was full then; other requests say nothing about capacity and change
nothing. (Rows per second of "full" time would be wrong by up to the batch size: a batch that is answered frees much of the window
at once.) Both sums decay with exp(-t / max(0.3 s, 1.5 * mean seconds)): a change of capacity is followed within a second, a slow
model is not judged by a fraction of a batch, and after a pause the first new requests count alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Time constant of the estimates.
MEMORY_S = 0.3
#: The same in mean times in Triton, for models whose requests take long.
MEMORY_REQUESTS = 1.5
#: Sums are folded into the estimates no more often than this.
SLICE_S = 0.03
#: A class is assumed to get at least this part of the capacity: the rest of the estimate is not better than that.
LEAST_PART = 0.01
#: Part of the rows that requests may take which go first because of their long wait.
PROMOTED_PART = 0.5


class Turn:
    """What one class, and the others before it, got of the model."""

    __slots__ = ("horizon_s", "others_rows_per_s", "promoted_rows", "started_rows", "total_rows_per_s")

    def __init__(self, horizon_s: float = MEMORY_S) -> None:
        self.horizon_s = horizon_s
        """Over which time the rates below are averaged: a class that may wait long looks at what others take in the long run."""
        self.started_rows = 0
        """Rows of this class that started since the last fold, and those of them that went before a class above."""
        self.promoted_rows = 0
        self.others_rows_per_s = 0.0
        """Rows that go before this class: those of the classes above, and promoted ones of the classes below."""
        self.total_rows_per_s = 0.0


class Pace:
    """Of one model."""

    __slots__ = (
        "_area",
        "_folded_s",
        "_new_area",
        "_new_rows",
        "_new_time",
        "_rows",
        "_time",
        "progress_s",
        "rate_rows_per_s",
        "seconds",
        "turns",
    )

    def __init__(self, now_s: float, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.rate_rows_per_s = 0.0
        """0: not known yet."""
        self.seconds = 0.0
        """Mean time in Triton of a request in a full window, weighted by rows."""
        self.progress_s = now_s
        """When Triton last answered, or got the first request after a pause."""
        self._folded_s = now_s
        self._area = self._time = self._rows = 0.0
        self._new_area = self._new_time = 0.0
        self._new_rows = 0

    def finished(self, now_s: float, rows: int, seconds: float, in_flight: int) -> None:
        """Triton answered after `seconds`; `in_flight` rows were there when the request started (0: the window was not full)."""
        before_s, self.progress_s = self.progress_s, now_s
        if self._new_rows and now_s - before_s > SLICE_S and before_s > self._folded_s:
            self._fold(before_s)  # what was seen before a pause must not count as new
        if in_flight:
            self._new_area += rows * in_flight
            self._new_time += rows * seconds
            self._new_rows += rows
        if now_s - self._folded_s >= SLICE_S:
            self._fold(now_s)

    def wait_s(
        self,
        now_s: float,
        *,
        turn: int,
        in_flight: int,
        above: int,
        own: int,
        floors: float = 0.0,
        share: float = 0.0,
        max_wait_s: float | None = None,
    ) -> float:
        """Seconds until a new request of class `turn` would execute, with `above` and `own` rows waiting before it.

            in_flight / rate + the least of (above + own) / (rate * what the others leave, at most 1 - floors)
                                            own / (rate * share)
                                            max_wait_s + own / (rate * 0.5)

        `floors` is the part that the classes below take now. While Triton has been silent for longer than a request takes, the
        rate is lowered in proportion. 0.0: not known.
        """
        rate = self.rate_rows_per_s
        if not rate:
            return 0.0
        silent_s = now_s - self.progress_s
        if silent_s > self.seconds:
            rate *= self.seconds / silent_s
        seen = self.turns[turn]
        left = 1.0 - seen.others_rows_per_s / max(seen.total_rows_per_s, rate)
        wait_s = (above + own) / (rate * max(min(left, 1.0 - floors), LEAST_PART))
        if share:
            wait_s = min(wait_s, own / (rate * share))
        if max_wait_s is not None:
            wait_s = min(wait_s, max_wait_s + own / (rate * PROMOTED_PART))
        return in_flight / rate + wait_s

    def _fold(self, now_s: float) -> None:
        passed_s = now_s - self._folded_s
        self._folded_s = now_s
        keep = math.exp(-passed_s / max(MEMORY_S, MEMORY_REQUESTS * self.seconds))
        self._area = self._area * keep + self._new_area
        self._time = self._time * keep + self._new_time
        self._rows = self._rows * keep + self._new_rows
        if self._new_rows and self._time:
            self.rate_rows_per_s = self._area / self._time
            self.seconds = self._time / self._rows
        self._new_area = self._new_time = 0.0
        self._new_rows = 0
        turns = self.turns
        if len(turns) > 1:
            above, promoted_below = 0, sum(turn.promoted_rows for turn in turns)
            total = sum(turn.started_rows for turn in turns)
            for turn in turns:
                promoted_below -= turn.promoted_rows
                keep = math.exp(-passed_s / turn.horizon_s)
                new = (1 - keep) / passed_s
                turn.others_rows_per_s = turn.others_rows_per_s * keep + (above + promoted_below) * new
                turn.total_rows_per_s = turn.total_rows_per_s * keep + total * new
                above += turn.started_rows
            for turn in turns:
                turn.started_rows = turn.promoted_rows = 0
