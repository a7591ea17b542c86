"""What does serving photos cost? As tensors against ONNX Runtime alone, as JPEG bytes against a plain loop around it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from models.image import data
from perf.closed_loop import ClosedLoop
from perf.efficiency import against_alone
from perf.frame import Bench, Outcome
from perf.inprocess import InProcess, run_tensors
from perf.subjects import Arrays, cut, model_file, part, priority, sample_rows, serving

CALLERS = 8
TURN_S = 0.5  # some 50 photos
BEST = 5


def image_efficiency(bench: Bench) -> Outcome:
    """Requests of one row of image_net (600 KB) over HTTP."""
    return _efficiency(bench, "image_net", sample_rows(part("image_net")), run_tensors)


def jpeg_efficiency(bench: Bench) -> Outcome:
    """Photos through the pipeline image over HTTP, to labels; the details have the CPU time of each step's process."""
    return _efficiency(bench, "image", data.requests(), label_photos)


def label_photos(model: Any, batch: dict[str, npt.NDArray[Any]]) -> list[tuple[list[str], npt.NDArray[np.float32]]]:
    """What the pipeline does, as one writes it without a server: decode, run, softmax, the best labels with their scores."""
    found = []
    for photo in batch["photo"].ravel().tolist():
        logits = model.run(None, {"image": data.preprocess(photo)[np.newaxis]})[0][0]
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        best = np.argsort(-shares)[:BEST]
        found.append(([_names()[each] for each in best], shares[best]))
    return found


def _efficiency(bench: Bench, model: str, rows: Arrays, work: Any) -> Outcome:
    batches = [cut(rows, start, 1) for start in range(len(next(iter(rows.values()))))]
    with (
        serving(bench, ["image"], is_pinned=True) as served,
        InProcess(model_file(part("image_net")), bench.cores.server, work) as alone,
        ClosedLoop(
            served.server.endpoints.http, model, batches, CALLERS, priority=priority(part("image"), "batch")
        ) as callers,
    ):
        alone.prepare(batches)
        return against_alone(bench, served.server, callers, alone, rows_per_request=1, turn_s=TURN_S)


@cache
def _names() -> tuple[str, ...]:
    return data.class_names()
