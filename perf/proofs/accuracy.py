"""Are the served answers the right ones? Against labels, and against ONNX Runtime without a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype

from models.ctr import data as ctr_data
from models.image import data as image_data
from perf.frame import Bench, Outcome
from perf.inprocess import session
from perf.open_loop import Request, outputs_of
from perf.subjects import Served, cut, model_file, part, priority, sample_rows, services, serving
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
    """How many of the labelled photos the service names first, each sent as its JPEG bytes: over gRPC, and over HTTP."""
    labels = [photo.label for photo in image_data.photos()]
    expected = [image_data.class_names()[label] for label in labels]
    with serving(bench, ["image"]) as served:
        found = {"grpc": _first_labels(_answers(served, _photo_requests(), in_flight=4))}
        with httpclient.InferenceServerClient(served.server.endpoints.http) as client:
            found["http"] = _first_labels([_over_http(client, request) for request in _photo_requests()])
        served.server.check_alive()
    right = {how: [name == want for name, want in zip(names, expected, strict=True)] for how, names in found.items()}
    return Outcome(
        float(min(sum(each) for each in right.values())),
        ok=found["grpc"] == found["http"],
        details={
            "photos": len(labels),
            "photos_named_wrongly": {how: np.flatnonzero(~np.array(each)).tolist() for how, each in right.items()},
        },
    )


def served_equals_inprocess(bench: Bench) -> Outcome:
    """The largest difference of any output value: tensors of ctr and image_net at fixed and mixed sizes, photos through image."""
    differences: dict[str, float] = {}
    with serving(bench, ["ctr", "image"]) as served:
        for model in ("ctr", "image_net"):
            differences.update(_differences(bench, served, model, part(model)))
        differences["image photos"] = _photo_difference(served)
        served.server.check_alive()
    worst = max(differences.values())
    return Outcome(
        worst, rounds=len(differences), spread=worst - min(differences.values()), details={"max": differences}
    )


def _photo_requests() -> list[Request]:
    photos = image_data.requests()
    return [Request("image", cut(photos, i, 1)) for i in range(image_data.PHOTO_COUNT)]


def _first_labels(answers: Sequence[Mapping[str, npt.NDArray[Any]]]) -> list[str]:
    return [answer["label"][0, 0].decode() for answer in answers]


def _over_http(client: Any, request: Request) -> dict[str, npt.NDArray[Any]]:
    tensors = []
    for name, array in request.inputs.items():
        tensor = httpclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    answer = client.infer(request.model, tensors)
    return {output["name"]: answer.as_numpy(output["name"]) for output in answer.get_response()["outputs"]}


def _photo_difference(served: Served) -> float:
    """Max abs difference of the scores of each photo's labels to decoding, ONNX Runtime and a softmax in this process."""
    alone = session(model_file(part("image_net")))
    names = np.array(image_data.class_names())
    worst = 0.0
    for photo, answer in zip(image_data.photos(), _answers(served, _photo_requests(), in_flight=4), strict=True):
        logits = alone.run(None, {"image": image_data.preprocess(photo.path)[np.newaxis]})[0][0].astype(np.float64)
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        best = np.argsort(-shares)[: answer["score"].shape[1]]
        if [name.decode() for name in answer["label"][0]] != names[best].tolist():
            return float(np.finfo(np.float64).max)
        worst = max(worst, float(np.abs(shares[best] - answer["score"][0]).max()))
    return worst


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
