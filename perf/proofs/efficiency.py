"""What does the server cost? Rows per CPU second served, against ONNX Runtime alone on the same core in the same run.

A virtual core's speed drifts by a third within seconds without any steal shown, so both sides take turns of a quarter second.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from perf import machine
from perf.closed_loop import ClosedLoop
from perf.frame import Bench, Outcome, median, spread
from perf.inprocess import InProcess
from perf.subjects import cut, model_file, sample_rows, services, serving

ROWS = 64
CALLERS = 4  # one executes, one is being prepared, two travel: the core is never idle
BATCHES = 61
ROUNDS = 5
QUICK_ROUNDS = 2
TURNS = 10
TURN_S = 0.25


@dataclass(frozen=True)
class Round:
    """Sums over the turns of one round."""

    served_rows: int
    front_s: float  # CPU time in tritonserver
    stub_s: float  # CPU time in the backend's process, the model included
    served_wall_s: float
    alone_rows: int
    alone_s: float

    @property
    def served_rate(self) -> float:
        return self.served_rows / (self.front_s + self.stub_s)

    @property
    def alone_rate(self) -> float:
        return self.alone_rows / self.alone_s

    @property
    def ratio(self) -> float:
        return self.served_rate / self.alone_rate


def ctr64_efficiency(bench: Bench) -> Outcome:
    """Median over rounds of served / alone, in rows per CPU second."""
    service = services(["ctr"])["ctr"]
    rows = sample_rows(service)
    batches = [cut(rows, start, ROWS) for start in range(0, ROWS * BATCHES, ROWS)]
    with (
        serving(bench, ["ctr"], is_pinned=True) as served,
        InProcess(model_file(service), bench.cores.server) as alone,
        ClosedLoop(served.server.endpoints.http, "ctr", batches, CALLERS) as callers,
    ):
        alone.prepare(batches)
        rounds = bench.rounds(
            QUICK_ROUNDS if bench.quick else ROUNDS,
            lambda: _round(served.server.pid, callers, alone),
            check=served.server.check_alive,
        )
    ratios = [found.ratio for found in rounds]
    return Outcome(
        median(ratios),
        spread(ratios),
        len(rounds),
        details={
            "ratios": [round(ratio, 4) for ratio in ratios],
            "served_rows_per_cpu_s": [round(found.served_rate) for found in rounds],
            "alone_rows_per_cpu_s": [round(found.alone_rate) for found in rounds],
            "tritonserver_us_per_request": _us_per_request([found.front_s / found.served_rows for found in rounds]),
            "stub_us_per_request": _us_per_request([found.stub_s / found.served_rows for found in rounds]),
            "alone_us_per_request": _us_per_request([1 / found.alone_rate for found in rounds]),
            "server_core_busy": round(
                median([(found.front_s + found.stub_s) / found.served_wall_s for found in rounds]), 3
            ),
            "protocol": "http",
            "callers": CALLERS,
        },
    )


def _round(pid: int, callers: ClosedLoop, alone: InProcess) -> Round:
    served_rows = alone_rows = 0
    front_s = stub_s = served_wall_s = alone_s = 0.0
    for _ in range(TURNS):
        front_before, all_before, began = machine.process_cpu_s(pid), machine.tree_cpu_s(pid), time.monotonic()
        served_rows += callers.run(TURN_S)
        served_wall_s += time.monotonic() - began
        front = machine.process_cpu_s(pid) - front_before
        front_s += front
        stub_s += machine.tree_cpu_s(pid) - all_before - front
        done, cpu_s = alone.run(TURN_S)
        alone_rows += done
        alone_s += cpu_s
    return Round(served_rows, front_s, stub_s, served_wall_s, alone_rows, alone_s)


def _us_per_request(seconds_per_row: list[float]) -> int:
    return round(median(seconds_per_row) * ROWS * 1e6)
