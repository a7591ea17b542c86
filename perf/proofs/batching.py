"""Does the dynamic batcher batch? The mean executed batch while many callers wait."""

from __future__ import annotations

import tempfile
from pathlib import Path

from perf.frame import Bench, Outcome, median, spread
from perf.subjects import Served, sample_rows, services, serving
from tritonpilot import metrics, perf_analyzer
from tritonpilot.perf_analyzer import Load

REQUESTS = 1000
CONCURRENCY = 64
ROUNDS = 3


def mean_batch(bench: Bench) -> Outcome:
    """Rows per execution from Triton's statistics, around perf_analyzer sending 1000 one-row ctr requests."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        input_data = Path(folder, "input.json")
        perf_analyzer.write_input_data(input_data, sample_rows(services(["ctr"])["ctr"]))
        with serving(bench, ["ctr"], is_pinned=True) as served:
            deltas = bench.rounds(
                1 if bench.quick else ROUNDS,
                lambda: _send(served, input_data, bench.cores.client),
                check=served.server.check_alive,
            )
    batches = [delta.mean_batch for delta in deltas]
    return Outcome(
        median(batches),
        spread(batches),
        len(batches),
        ok=all(delta.success >= REQUESTS for delta in deltas),
        details={"requests": [d.success for d in deltas], "executions": [d.executions for d in deltas]},
    )


def _send(served: Served, input_data: Path, core: int) -> metrics.Statistics:
    url = served.server.endpoints.grpc
    before = metrics.statistics(url, "ctr")
    load = Load("ctr", url, concurrency=CONCURRENCY, request_count=REQUESTS, input_data=input_data)
    perf_analyzer.run(load, cpus=[core])
    return metrics.statistics(url, "ctr") - before
