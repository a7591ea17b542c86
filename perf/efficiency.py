"""What does serving cost? Rows per CPU second served at saturation, against the same work in a process alone, same core, same run.

    with serving(bench, ["ctr"], is_pinned=True) as served, ClosedLoop(...) as callers, InProcess(...) as alone:
        outcome = against_alone(bench, served.server, callers, alone, rows_per_request=64)

A virtual core's speed drifts by a third within seconds without any steal shown, so both sides take turns of a quarter second.
Every process of the server counts: tritonserver itself, and the stub of each instance.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from perf import machine
from perf.frame import Bench, NoisyRoundError, Outcome, median, spread
from tritonpilot.server import EmbeddedServer

ROUNDS = 5
QUICK_ROUNDS = 2
TURNS = 10
TURN_S = 0.25
CALIBRATION_TURNS = 12
SLOWED = 0.85  # of the fastest turn; a round is a mean of ten, so an undisturbed one reaches some 0.95
RETRIES = 20
FRONT = "tritonserver"


class Callers(Protocol):
    """Who keeps the server busy (perf.closed_loop.ClosedLoop)."""

    def run(self, seconds: float) -> int:
        """Rows answered."""


class Alone(Protocol):
    """The same work without a server (perf.inprocess.InProcess)."""

    def run(self, seconds: float) -> tuple[int, float]:
        """(rows, CPU seconds)."""


@dataclass(frozen=True)
class Round:
    """Sums over the turns of one round."""

    served_rows: int
    served_s: Mapping[str, float]  # CPU seconds by process: FRONT, and the stubs by model; models run in their stubs
    served_wall_s: float
    alone_rows: int
    alone_s: float

    @property
    def served_rate(self) -> float:
        return self.served_rows / sum(self.served_s.values())

    @property
    def alone_rate(self) -> float:
        return self.alone_rows / self.alone_s

    @property
    def ratio(self) -> float:
        return self.served_rate / self.alone_rate


def against_alone(
    bench: Bench,
    server: EmbeddedServer,
    callers: Callers,
    alone: Alone,
    *,
    rows_per_request: int,
    turn_s: float = TURN_S,
) -> Outcome:
    """Median over rounds of served / alone in rows per CPU second; the details say where the CPU time of a request went."""
    callers.run(turn_s)  # unmeasured: what the first requests allocate, they allocate once
    fastest = max(rows / cpu_s for rows, cpu_s in (alone.run(turn_s) for _ in range(CALIBRATION_TURNS)))
    rounds = bench.rounds(
        QUICK_ROUNDS if bench.quick else ROUNDS,
        lambda: not_slowed(measure(server.pid, callers, alone, turn_s), fastest),
        check=server.check_alive,
        retries=QUICK_ROUNDS if bench.quick else RETRIES,
    )
    ratios = [found.ratio for found in rounds]
    return Outcome(
        median(ratios),
        spread(ratios),
        len(rounds),
        details={
            "ratios": [round(ratio, 4) for ratio in ratios],
            "served_rows_per_cpu_s": [round(found.served_rate, 1) for found in rounds],
            "alone_rows_per_cpu_s": [round(found.alone_rate, 1) for found in rounds],
            "rows_per_request": rows_per_request,
            "served_us_per_request": {
                name: _us(rows_per_request * found.served_s.get(name, 0.0) / found.served_rows for found in rounds)
                for name in sorted({name for found in rounds for name in found.served_s})
            },
            "alone_us_per_request": _us(rows_per_request / found.alone_rate for found in rounds),
            "server_core_busy": round(
                median([sum(found.served_s.values()) / found.served_wall_s for found in rounds]), 3
            ),
        },
    )


def measure(pid: int, callers: Callers, alone: Alone, turn_s: float = TURN_S, turns: int = TURNS) -> Round:
    """One round: server and process alone in turns."""
    served_rows = alone_rows = 0
    served_wall_s = alone_s = 0.0
    served_s: dict[str, float] = {}
    for _ in range(turns):
        before, began = _by_process(pid), time.monotonic()
        served_rows += callers.run(turn_s)
        served_wall_s += time.monotonic() - began
        for name, seconds in _by_process(pid).items():
            served_s[name] = served_s.get(name, 0.0) + seconds - before.get(name, 0.0)
        done, cpu_s = alone.run(turn_s)
        alone_rows += done
        alone_s += cpu_s
    return Round(served_rows, served_s, served_wall_s, alone_rows, alone_s)


def not_slowed(found: Round, fastest: float) -> Round:
    """The round. Raises NoisyRoundError when the process alone ran well below `fastest` (rows per CPU second, one turn's).

    A neighbour of the host on the same physical core takes cache and execution units away, which no steal shows and which
    costs a server, whose code and data are larger, more than it costs a loop.
    """
    if found.alone_rate < SLOWED * fastest:
        raise NoisyRoundError(
            f"the core ran at {found.alone_rate / fastest:.0%} of the speed that it had at calibration (at least {SLOWED:.0%} "
            "are needed)"
        )
    return found


def _by_process(pid: int) -> dict[str, float]:
    """CPU seconds so far: FRONT, and the stubs by the model that they run."""
    return {FRONT: machine.process_cpu_s(pid), **machine.stub_cpu_s(pid)}


def _us(seconds: Iterable[float]) -> int:
    return round(median(list(seconds)) * 1e6)
