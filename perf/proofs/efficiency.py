"""What does the server cost, model by model? Rows per CPU second served, against ONNX Runtime alone (perf.efficiency)."""

from __future__ import annotations

from perf.closed_loop import ClosedLoop
from perf.efficiency import against_alone
from perf.frame import Bench, Outcome
from perf.inprocess import InProcess
from perf.subjects import cut, model_file, sample_rows, services, serving

ROWS = 64
BATCHES = 61
CALLERS = 8  # saturation: four requests execute (max_batch_size 256), four wait or travel, so every execution is full


def ctr64_efficiency(bench: Bench) -> Outcome:
    """64-row ctr requests over HTTP; one HTTP thread, as fits one core."""
    service = services(["ctr"])["ctr"]
    rows = sample_rows(service)
    batches = [cut(rows, start, ROWS) for start in range(0, ROWS * BATCHES, ROWS)]
    with (
        serving(bench, ["ctr"], is_pinned=True, http_threads=1) as served,
        InProcess(model_file(service), bench.cores.server) as alone,
        ClosedLoop(served.server.endpoints.http, "ctr", batches, CALLERS) as callers,
    ):
        alone.prepare(batches)
        return against_alone(bench, served.server, callers, alone, rows_per_request=ROWS)
