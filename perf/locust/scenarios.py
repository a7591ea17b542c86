"""Who calls how often in a load test, and what must come of it? Without Locust, so that everything may import it.

scenario = scenarios.of("burst", seconds=30)
scenario.callers(("http", "grpc"))[3].due_s(turn=2)     # when that caller is to send its third request, seconds after the start
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

TRANSPORTS = ("http", "grpc")
TIMEOUT_S = 30.0  # of a request
CALLS_PER_S = 5.0  # of one caller at most: so that it has its answer long before its next request is due


@dataclass(frozen=True)
class Stream:
    """The callers of one class."""

    caller_class: str
    level: int
    """Triton's priority level, 1 is served first."""
    rate_per_s: float | None
    """Of all its callers together, whatever becomes of the requests; None: each calls again when it has its answer."""
    callers: int
    rows: int = 1


@dataclass(frozen=True)
class Limits:
    """What a load test must keep: latencies of all that was asked, failures of the first stream."""

    p99_ms: float
    failures: float
    """Largest share of requests without an answer."""
    recover_s: float | None = None
    """Seconds after the start from which on P99 of every second stays below p99_ms; None: P99 of the whole test does."""


@dataclass(frozen=True)
class Scenario:
    """A load test. Its first stream is the class that is judged."""

    name: str
    line: str
    streams: tuple[Stream, ...]
    seconds: float
    limits: Limits
    quiet_s: float = 0.5
    """Callers are there, and do not call yet."""

    @property
    def judged(self) -> str:
        """The class of the first stream."""
        return self.streams[0].caller_class

    @property
    def rate_per_s(self) -> float:
        """Requests a second of all streams that have a rate."""
        return sum(stream.rate_per_s or 0 for stream in self.streams)

    def callers(self, transports: Sequence[str]) -> list[Caller]:
        """All callers; those of a stream use the transports in turn."""
        return [
            Caller(stream, transports[number % len(transports)], number)
            for stream in self.streams
            for number in range(stream.callers)
        ]


@dataclass(frozen=True)
class Caller:
    """One that sends, waits for its answer, and sends again."""

    stream: Stream
    transport: str
    number: int  # in its stream

    def due_s(self, turn: int) -> float | None:
        """When its request number `turn` is due, in seconds after the start; None: when it has the answer before.

        The requests of a stream are evenly spaced, its callers send them in turn.
        """
        if self.stream.rate_per_s is None:
            return None
        return (self.number + turn * self.stream.callers) / self.stream.rate_per_s


def at_rate(caller_class: str, level: int, rate_per_s: float, rows: int = 1) -> Stream:
    """A stream with a rate, and as many callers as that takes."""
    return Stream(caller_class, level, rate_per_s, max(2, math.ceil(rate_per_s / CALLS_PER_S)), rows)


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "constant",
            "100 realtime requests a second",
            (at_rate("realtime", 1, 100),),
            seconds=300,
            limits=Limits(p99_ms=50, failures=0.0002),
        ),
        Scenario(
            "burst",
            "from nothing to 500 requests a second at once, two in five of them realtime",
            (at_rate("realtime", 1, 200), at_rate("batch", 2, 300)),
            seconds=30,
            limits=Limits(p99_ms=50, failures=0, recover_s=5),
            quiet_s=5,
        ),
        Scenario(
            "mixed",
            "100 realtime requests a second beside four batch callers of 64 rows who never rest",
            (at_rate("realtime", 1, 100), Stream("batch", 2, None, callers=4, rows=64)),
            seconds=60,
            limits=Limits(p99_ms=100, failures=0.0002),
        ),
    )
}


def of(name: str, *, rate_per_s: float | None = None, seconds: float | None = None) -> Scenario:
    """A scenario, with another rate of all streams together or another length. Raises KeyError for an unknown name."""
    scenario = SCENARIOS[name]
    if rate_per_s is not None:
        factor = rate_per_s / scenario.rate_per_s
        streams = tuple(
            stream
            if stream.rate_per_s is None
            else at_rate(stream.caller_class, stream.level, stream.rate_per_s * factor, stream.rows)
            for stream in scenario.streams
        )
        scenario = replace(scenario, streams=streams)
    if seconds is not None:
        scenario = replace(scenario, seconds=seconds, quiet_s=min(scenario.quiet_s, seconds))
    return scenario
