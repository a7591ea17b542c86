"""What does serving photos cost? As tensors against ONNX Runtime alone, as JPEG bytes against a plain loop around it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import shared_memory

from models.image import data
from perf.closed_loop import ClosedLoop, Fill, set_bytes
from perf.efficiency import against_alone
from perf.frame import Bench, Outcome
from perf.inprocess import InProcess, Work, run_tensors
from perf.subjects import Arrays, Served, cut, model_file, part, priority, sample_rows, serving
from tritonpilot.tritonserver import CONTROL_HEADER

CALLERS = 8
TURN_S = 0.5  # some 50 photos
BEST = 5


def image_efficiency(bench: Bench) -> Outcome:
    """Requests of one row of image_net (600 KB) over HTTP, the tensor in the body; for comparison in shared memory."""
    rows = sample_rows(part("image_net"))
    batches = _single(rows)
    with _both(bench, batches, run_tensors) as (served, alone):
        url, waiting = served.server.endpoints.http, priority(part("image"), "batch")
        found = {}
        with _shared(served, batches) as place:
            for name, fill in (("shared memory", place), ("body", set_bytes)):
                bench.say(f"tensors in {name}")
                with ClosedLoop(url, "image_net", batches, CALLERS, priority=waiting, fill=fill) as callers:
                    found[name] = against_alone(bench, served.server, callers, alone, rows_per_request=1, turn_s=TURN_S)
    in_memory = found["shared memory"]
    details = {**found["body"].details, "in_shared_memory": {"value": in_memory.value, **in_memory.details}}
    return replace(found["body"], details=details)


def jpeg_efficiency(bench: Bench) -> Outcome:
    """Photos through the pipeline image over HTTP, to labels; the details have the CPU time of each step's process."""
    batches = _single(data.requests())
    with _both(bench, batches, label_photos) as (served, alone):
        url, waiting = served.server.endpoints.http, priority(part("image"), "batch")
        with ClosedLoop(url, "image", batches, CALLERS, priority=waiting) as callers:
            return against_alone(bench, served.server, callers, alone, rows_per_request=1, turn_s=TURN_S)


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


def _single(rows: Arrays) -> list[dict[str, npt.NDArray[Any]]]:
    return [cut(rows, start, 1) for start in range(len(next(iter(rows.values()))))]


@contextmanager
def _both(bench: Bench, batches: Sequence[Arrays], work: Work) -> Iterator[tuple[Served, InProcess]]:
    """The service image, and the same work in a process on the same core."""
    with (
        serving(bench, ["image"], is_pinned=True) as served,
        InProcess(model_file(part("image_net")), bench.cores.server, work) as alone,
    ):
        alone.prepare(batches)
        yield served, alone


@contextmanager
def _shared(served: Served, batches: Sequence[Arrays]) -> Iterator[Fill]:
    """All batches in one region of system shared memory; what it gives points a tensor to its place there."""
    arrays = [array for batch in batches for array in batch.values()]
    offsets = dict(
        zip(map(id, arrays), itertools.accumulate([array.nbytes for array in arrays], initial=0), strict=False)
    )
    size, name = sum(array.nbytes for array in arrays), f"tritonpilot-proof-{os.getpid()}"
    region = shared_memory.create_shared_memory_region(name, f"/{name}", size)
    key = {f"triton-grpc-protocol-{CONTROL_HEADER}": served.server.control_key}
    try:
        shared_memory.set_shared_memory_region(region, arrays)
        with grpcclient.InferenceServerClient(served.server.endpoints.grpc) as client:
            client.register_system_shared_memory(name, f"/{name}", size, headers=key)
            yield lambda tensor, array: tensor.set_shared_memory(name, array.nbytes, offsets[id(array)])
            client.unregister_system_shared_memory(name, headers=key)
    finally:
        shared_memory.destroy_shared_memory_region(region)


@cache
def _names() -> tuple[str, ...]:
    return data.class_names()
