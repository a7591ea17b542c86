"""Does the dynamic batcher batch? The mean executed batch while many callers wait."""

from __future__ import annotations

from perf.frame import Bench, Outcome, median, spread
from perf.open_loop import Request, outputs_of
from perf.subjects import Served, cut, sample_rows, services, serving
from tritonpilot import metrics

REQUESTS = 1000
CONCURRENCY = 64
ROUNDS = 5


def mean_batch(bench: Bench) -> Outcome:
    """Rows per execution from Triton's statistics, while 1000 one-row ctr requests are sent with 64 in flight."""
    rows = sample_rows(services(["ctr"])["ctr"])
    requests = [Request("ctr", cut(rows, row, 1)) for row in range(REQUESTS)]
    with serving(bench, ["ctr"], is_pinned=True) as served:
        deltas = bench.rounds(
            1 if bench.quick else ROUNDS, lambda: _send(served, requests), check=served.server.check_alive
        )
    batches = [delta.mean_batch for delta in deltas]
    return Outcome(
        median(batches),
        spread(batches),
        len(batches),
        ok=all(delta.success == REQUESTS for delta in deltas),
        details={"requests": [d.success for d in deltas], "executions": [d.executions for d in deltas]},
    )


def _send(served: Served, requests: list[Request]) -> metrics.Statistics:
    url = served.server.endpoints.grpc
    before = metrics.statistics(url, "ctr")
    outputs_of(served.sender.send(requests, in_flight=CONCURRENCY))
    return metrics.statistics(url, "ctr") - before
