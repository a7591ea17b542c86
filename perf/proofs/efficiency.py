"""What does the server cost? Rows per CPU second served, against ONNX Runtime alone on the same core in the same run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from perf import machine
from perf.frame import Bench, Outcome, median, spread
from perf.inprocess import InProcess
from perf.subjects import Served, cut, model_file, sample_rows, services, serving
from tritonpilot import metrics, perf_analyzer
from tritonpilot.perf_analyzer import Load

ROWS = 64
CONCURRENCY = 4  # one executes, one is being prepared, two travel: the core is never idle
ROUNDS = 5
QUICK_ROUNDS = 2
SERVED_WINDOW_MS = 800
ALONE_S = 2.0


@dataclass(frozen=True)
class Round:
    """Rows per CPU second, and how busy the server's core was while serving."""

    served: float
    alone: float
    busy: float

    @property
    def ratio(self) -> float:
        return self.served / self.alone


def ctr64_efficiency(bench: Bench) -> Outcome:
    """Median over rounds of served / alone; each round measures one after the other, by turns in either order."""
    service = services(["ctr"])["ctr"]
    rows = sample_rows(service)
    batch = cut(rows, 0, ROWS)
    turns = iter(range(10**6))
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        input_data = Path(folder, "input.json")
        perf_analyzer.write_input_data(input_data, rows)
        with (
            serving(bench, ["ctr"], is_pinned=True) as served,
            InProcess(model_file(service), bench.cores.server) as alone,
        ):

            def measure() -> Round:
                if next(turns) % 2:
                    before = alone.rows_per_cpu_s(batch, ALONE_S)
                    rate, busy = _serve(served, input_data, bench.cores.client)
                    return Round(rate, before, busy)
                rate, busy = _serve(served, input_data, bench.cores.client)
                return Round(rate, alone.rows_per_cpu_s(batch, ALONE_S), busy)

            rounds = bench.rounds(QUICK_ROUNDS if bench.quick else ROUNDS, measure, check=served.server.check_alive)
    ratios = [found.ratio for found in rounds]
    return Outcome(
        median(ratios),
        spread(ratios),
        len(rounds),
        details={
            "ratios": [round(ratio, 4) for ratio in ratios],
            "served_rows_per_cpu_s": round(median([found.served for found in rounds])),
            "alone_rows_per_cpu_s": round(median([found.alone for found in rounds])),
            "server_core_busy": round(median([found.busy for found in rounds]), 3),
            "protocol": "http",
            "concurrency": CONCURRENCY,
        },
    )


def _serve(served: Served, input_data: Path, client_core: int) -> tuple[float, float]:
    """(rows per CPU second of tritonserver and its stubs, share of the wall time that they ran)."""
    endpoints = served.server.endpoints
    load = Load(
        "ctr", endpoints.http, protocol="http", batch=ROWS, concurrency=CONCURRENCY, window_ms=SERVED_WINDOW_MS,
        accepts_unstable=True, max_windows=perf_analyzer.WINDOWS, input_data=input_data,
    )  # fmt: skip
    before, cpu_before = metrics.statistics(endpoints.grpc, "ctr"), machine.tree_cpu_s(served.server.pid)
    reading = perf_analyzer.run(load, cpus=[client_core])
    cpu_s = machine.tree_cpu_s(served.server.pid) - cpu_before
    delta = metrics.statistics(endpoints.grpc, "ctr") - before
    return delta.inferences / cpu_s, cpu_s / reading.wall_s
