"""What does the server cost? Rows per CPU second served, against ONNX Runtime alone on the same core in the same run."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
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
ALONE_S = 1.0


@dataclass(frozen=True)
class Round:
    """Rows per CPU second, how busy the server's core was while serving, and where the time of a request went."""

    served: float
    alone: float
    busy: float
    front_us: float  # in tritonserver
    stub_us: float  # in the backend's process, the model included

    @property
    def ratio(self) -> float:
        return self.served / self.alone


def ctr64_efficiency(bench: Bench) -> Outcome:
    """Median over rounds of served / alone, measured by turns on one core."""
    service = services(["ctr"])["ctr"]
    rows = sample_rows(service)
    # The rows that perf_analyzer sends, in its order: other rows would find other embeddings in the cache.
    sent = cut(rows, 0, perf_analyzer.INPUT_ROWS)
    batches = [cut(sent, start, ROWS) for start in range(0, ROWS * perf_analyzer.INPUT_ROWS, ROWS)]
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        input_data = Path(folder, "input.json")
        perf_analyzer.write_input_data(input_data, rows)
        with (
            serving(bench, ["ctr"], is_pinned=True) as served,
            InProcess(model_file(service), bench.cores.server) as alone,
        ):

            def measure() -> Round:
                # Alone, served, alone: a drift of the processor's speed within the round cancels.
                before = alone.rows_per_cpu_s(batches, ALONE_S)
                found = _serve(served, input_data, bench.cores.client)
                return replace(found, alone=(before + alone.rows_per_cpu_s(batches, ALONE_S)) / 2)

            rounds = bench.rounds(QUICK_ROUNDS if bench.quick else ROUNDS, measure, check=served.server.check_alive)
    ratios = [found.ratio for found in rounds]
    return Outcome(
        median(ratios),
        spread(ratios),
        len(rounds),
        details={
            "ratios": [round(ratio, 4) for ratio in ratios],
            "served_rows_per_cpu_s": [round(found.served) for found in rounds],
            "alone_rows_per_cpu_s": [round(found.alone) for found in rounds],
            "server_core_busy": round(median([found.busy for found in rounds]), 3),
            "tritonserver_us_per_request": round(median([found.front_us for found in rounds])),
            "stub_us_per_request": round(median([found.stub_us for found in rounds])),
            "alone_us_per_request": round(1e6 * ROWS / median([found.alone for found in rounds])),
            "protocol": "http",
            "concurrency": CONCURRENCY,
        },
    )


def _serve(served: Served, input_data: Path, client_core: int) -> Round:
    """What tritonserver and its stubs did while perf_analyzer kept them busy; `alone` is not known yet."""
    endpoints, pid = served.server.endpoints, served.server.pid
    load = Load(
        "ctr", endpoints.http, protocol="http", batch=ROWS, concurrency=CONCURRENCY, window_ms=SERVED_WINDOW_MS,
        accepts_unstable=True, max_windows=perf_analyzer.WINDOWS, input_data=input_data,
    )  # fmt: skip
    before = metrics.statistics(endpoints.grpc, "ctr")
    all_before, front_before = machine.tree_cpu_s(pid), machine.process_cpu_s(pid)
    reading = perf_analyzer.run(load, cpus=[client_core])
    all_s, front_s = machine.tree_cpu_s(pid) - all_before, machine.process_cpu_s(pid) - front_before
    delta = metrics.statistics(endpoints.grpc, "ctr") - before
    each_us = 1e6 / delta.success
    return Round(
        served=delta.inferences / all_s,
        alone=float("nan"),
        busy=all_s / reading.wall_s,
        front_us=front_s * each_us,
        stub_us=(all_s - front_s) * each_us,
    )
