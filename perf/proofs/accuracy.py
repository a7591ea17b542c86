"""Are the served answers the right ones? Against labels, and against ONNX Runtime without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from models.ctr import data as ctr_data
from models.image import data as image_data
from perf.frame import Bench, Outcome
from perf.inprocess import session
from perf.open_loop import Request, outputs_of
from perf.subjects import Served, cut, model_file, priority, sample_rows, services, serving
from tritonpilot.spec import Service

SIZES = (1, 7, 64)
MIXED_REQUESTS = 200
IN_FLIGHT = 32
SEED = 20


def ctr_auc(bench: Bench) -> Outcome:
    """AUC over the whole temporal test split, in requests of the model's largest batch, of class batch."""
    inputs, clicks = ctr_data.test_split()
    service = services(["ctr"])["ctr"]
    size = service.batching.max_batch_size
    with serving(bench, ["ctr"]) as served:
        bench.say(f"sending {len(clicks)} test rows in requests of {size}")
        requests = [
            Request("ctr", {name: array[i : i + size] for name, array in inputs.items()}, priority(service, "batch"))
            for i in range(0, len(clicks), size)
        ]
        answers = outputs_of(served.sender.send(requests, in_flight=IN_FLIGHT))
        served.server.check_alive()
    scores = np.concatenate([answer["prob"] for answer in answers]).ravel()
    return Outcome(ctr_data.auc(clicks, scores), details={"rows": len(clicks), "click_share": float(clicks.mean())})


def image_top1(bench: Bench) -> Outcome:
    """How many of the labelled photos the served network names first, each in a request of its own."""
    inputs, labels = image_data.labelled_photos()
    with serving(bench, ["image"]) as served:
        requests = [Request("image", cut(inputs, i, 1)) for i in range(len(labels))]
        answers = outputs_of(served.sender.send(requests, in_flight=4))
        served.server.check_alive()
    first = np.concatenate([next(iter(answer.values())) for answer in answers]).argmax(axis=1)
    wrong = [int(i) for i in np.flatnonzero(first != labels)]
    return Outcome(float((first == labels).sum()), details={"photos": len(labels), "photos_named_wrongly": wrong})


def served_equals_inprocess(bench: Bench) -> Outcome:
    """The largest difference of any output value, over both services, fixed sizes and mixed sizes in flight."""
    differences: dict[str, float] = {}
    with serving(bench, ["ctr", "image"]) as served:
        for name, service in services(["ctr", "image"]).items():
            differences.update(_differences(bench, served, name, service))
        served.server.check_alive()
    worst = max(differences.values())
    return Outcome(
        worst, rounds=len(differences), spread=worst - min(differences.values()), details={"max": differences}
    )


def _differences(bench: Bench, served: Served, name: str, service: Service) -> dict[str, float]:
    rows = sample_rows(service)
    alone = session(model_file(service))
    largest = service.batching.max_batch_size
    sizes = sorted({min(size, largest) for size in SIZES})
    found = {}
    for size in sizes:
        requests = [Request(name, cut(rows, start, size)) for start in range(0, 3 * size, size)]
        found[f"{name} batch {size}"] = _worst(alone, requests, _answers(served, requests, in_flight=1))
    random = np.random.default_rng(SEED)
    count = MIXED_REQUESTS if largest >= max(SIZES) else MIXED_REQUESTS // 5
    if bench.quick:
        count //= 2
    mixed = [
        Request(
            name,
            cut(rows, int(random.integers(len(next(iter(rows.values()))))), int(random.integers(1, largest + 1))),
            priority(service, "batch"),
        )
        for _ in range(count)
    ]
    bench.say(f"{name}: {count} requests of 1 to {largest} rows, {IN_FLIGHT} in flight")
    found[f"{name} mixed in flight"] = _worst(alone, mixed, _answers(served, mixed, in_flight=IN_FLIGHT))
    return found


def _answers(served: Served, requests: Sequence[Request], in_flight: int) -> list[Mapping[str, npt.NDArray[Any]]]:
    return outputs_of(served.sender.send(requests, in_flight=in_flight))


def _worst(alone: Any, requests: Sequence[Request], answers: Sequence[Mapping[str, npt.NDArray[Any]]]) -> float:
    """Max abs difference to the same rows run alone, in a batch of their request's size."""
    names = [output.name for output in alone.get_outputs()]
    worst = 0.0
    for request, answer in zip(requests, answers, strict=True):
        for name, expected in zip(names, alone.run(names, dict(request.inputs)), strict=True):
            if answer[name].shape != expected.shape or not np.isfinite(answer[name]).all():
                return float(np.finfo(np.float64).max)
            worst = max(worst, float(np.abs(answer[name].astype(np.float64) - expected).max()))
    return worst
