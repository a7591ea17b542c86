"""Does a bad request harm anybody but itself? One bad among 31 good ones, to every example model and every backend of ours."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from PIL import Image

from perf import machine, small_models
from perf.bad_inputs import Arrays, Case, cases_of
from perf.frame import Bench, Outcome
from perf.open_loop import Answer, Request, Sender
from perf.subjects import Served, cut, sample_rows, services, serving
from perf.transports import Refusal, Ways
from tritonpilot.client.served import Served as Model
from tritonpilot.client.served import from_config
from tritonpilot.errors import MeasurementError, ServerError
from tritonpilot.pipeline import parts
from tritonpilot.server import EmbeddedServer
from tritonpilot.spec import Service

MATES = 31
TOLERANCE = 1e-5
STUB = "triton_python_b"  # a process name is cut after 15 characters
SEED = 31


@dataclass
class Found:
    """What went wrong, and how much was tried."""

    problems: list[str] = field(default_factory=list)
    cases: int = 0
    refused: int = 0
    answered: int = 0
    mates: int = 0
    per_model: dict[str, int] = field(default_factory=dict)


def bad_inputs_isolated(bench: Bench) -> Outcome:
    """Cases in which the server or a stub died, a neighbour's answer changed, or a refusal named no field.

    Each case is sent alone over HTTP, then over gRPC at once with 31 good requests, whose answers must be those that they
    get alone (numbers within 1e-5, as another batch size may sum in another order).
    """
    found = Found()
    for name, service in services().items():
        if service.samples is None or not service.samples.is_file():
            bench.say(f"{name} is left out: it has no samples yet")
            continue
        with serving(bench, [name]) as served, Ways(served.server) as ways:
            for part in parts(service):
                rows = _good_rows(part)
                if rows is not None:
                    good = [_for_client(cut(rows, start, 1)) for start in range(MATES)]
                    found.per_model[part.service] = _try_model(
                        bench, served, ways, part.service, good, found, _level(part)
                    )
    with _small_models(bench) as (served, names), Ways(served.server) as ways:
        for name in names:
            found.per_model[f"small {name}"] = _try_model(
                bench, served, ways, name, small_models.good_requests(name, MATES), found
            )
    return Outcome(
        float(len(found.problems)),
        rounds=found.cases,
        details={
            "problems": found.problems,
            "cases": found.cases,
            "cases_per_model": found.per_model,
            "refused": found.refused,
            "answered": found.answered,
            "good_answers_compared": found.mates,
            "in_flight_together": MATES + 1,
        },
    )


def _try_model(
    bench: Bench, served: Served, ways: Ways, model: str, good: Sequence[Arrays], found: Found, level: int = 0
) -> int:
    """All cases of a model; returns how many."""
    described = _described(served, model)
    cases = cases_of(described, good[0])
    bench.say(f"{model}: {len(cases)} cases, each alone and among {MATES} good requests")
    try:
        alone = [_outputs(answer) for answer in _send(served.sender, model, good, level, in_flight=1)]
    except MeasurementError as error:
        found.problems.append(f"{model}: good requests have no answers: {error}")
        bench.say(found.problems[-1])
        return 0
    for case in cases:
        found.cases += 1
        stubs = _stubs(served.server.pid)
        try:
            wrong = _try_case(served, ways, model, level, case, good, alone, found)
            served.server.check_alive()
        except (MeasurementError, ServerError) as error:
            found.problems.append(f"{model}, {case.name}: {error}")
            bench.say(found.problems[-1])
            break  # the other cases of a dead server say nothing
        if _stubs(served.server.pid) != stubs:
            wrong = "a stub died"
        if wrong:
            found.problems.append(f"{model}, {case.name}: {wrong}")
            bench.say(found.problems[-1])
    return len(cases)


def _level(part: Service) -> int:
    """The class that waits longest: on a busy machine a good request must not time out for the sake of its class."""
    return max(part.classes, key=lambda each: each.timeout_ms or float("inf")).priority if part.classes else 0


@contextmanager
def _small_models(bench: Bench) -> Iterator[tuple[Served, list[str]]]:
    """A server with one small model per backend, and the names of those that callers ask."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        root = Path(folder, "model_repository")
        root.mkdir()
        models = small_models.write(root)
        probes = {model.name: model.probe for model in models if model.probe is not None}
        with (
            EmbeddedServer(root, on_progress=bench.say, probe_inputs=probes, startup_timeout_s=600) as server,
            Sender(server.endpoints.grpc) as sender,
        ):
            yield Served(server, sender), [model.name for model in models if model.requests]


def _try_case(
    served: Served,
    ways: Ways,
    model: str,
    level: int,
    case: Case,
    good: Sequence[Arrays],
    alone: Sequence[Arrays],
    found: Found,
) -> str:
    """What went wrong, "" when nothing did."""
    try:
        ways.binary(model, case.inputs)
        said = ""
    except Refusal as refusal:
        said = str(refusal)
    wrong = _judge(case, said)
    if wrong:
        return f"alone over HTTP: {wrong}"
    # The bad one in the middle: some are in its batch whichever way batches are formed.
    place = len(good) // 2
    answers = _send(served.sender, model, [*good[:place], case.inputs, *good[place:]], level)
    bad = answers.pop(place)
    wrong = _judge(case, bad.error)
    if wrong:
        return f"among others over gRPC: {wrong}"
    found.refused += bool(bad.error)
    found.answered += not bad.error
    found.mates += len(answers)
    for number, (answer, expected) in enumerate(zip(answers, alone, strict=True)):
        if answer.error:
            return f"the good request {number} beside it failed: {answer.error[:200]}"
        if not _agree(answer.outputs, expected):
            return f"the good request {number} beside it got another answer than alone"
    return ""


def _judge(case: Case, said: str) -> str:
    if said and case.must == "answer":
        return f"refused: {said[:200]}"
    if not said and case.must == "refuse":
        return "answered"
    if said and not case.is_named_by(said):
        return f"the error names none of {', '.join(case.names)}: {said[:300]}"
    return ""


def _send(
    sender: Sender, model: str, requests: Sequence[Arrays], level: int, in_flight: int | None = None
) -> list[Answer]:
    return sender.send([Request(model, inputs, level) for inputs in requests], in_flight=in_flight)


def _outputs(answer: Answer) -> Arrays:
    if answer.error:
        raise MeasurementError(answer.error)
    return answer.outputs


def _agree(answer: Arrays, expected: Arrays) -> bool:
    return set(answer) == set(expected) and all(_same(answer[name], expected[name]) for name in expected)


def _same(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == np.object_:
        return all(a == b or _same_json(a, b) for a, b in zip(one.ravel(), other.ravel(), strict=True))
    return bool(np.allclose(one, other, rtol=0, atol=TOLERANCE, equal_nan=True))


def _same_json(one: bytes, other: bytes) -> bool:
    """Layouts hold scores, which may differ in their last digit."""
    try:
        a, b = json.loads(one), json.loads(other)
    except ValueError:
        return False
    return isinstance(a, (dict, list)) and _same_tree(a, b)


def _same_tree(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_tree(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_tree, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return isinstance(one, (int, float)) and isinstance(other, (int, float)) and abs(one - other) <= 1e-3
    return bool(one == other)


def _described(served: Served, model: str) -> Model:
    with grpcclient.InferenceServerClient(served.server.endpoints.grpc) as client:
        config: Mapping[str, Any] = client.get_model_config(model, as_json=True)["config"]
    return from_config(config)


def _stubs(server: int) -> set[int]:
    return {pid for pid in machine.tree_pids(server) if Path(f"/proc/{pid}/comm").read_text().startswith(STUB)}


# -- good rows ---------------------------------------------------------------------------------------------------------


def _good_rows(part: Service) -> Arrays | None:
    """Rows that the model answers: its samples, or made ones where it has none; None leaves a model out."""
    made = MADE.get(part.service)
    if made is not None:
        return made(part)
    if part.samples is None or not part.samples.is_file():
        return None
    return sample_rows(part)


def _logits(part: Service) -> Arrays:  # noqa: ARG001  one form for all
    return {"logits": np.random.default_rng(SEED).standard_normal((MATES, 1000)).astype(np.float32)}


def _text_requests(part: Service) -> Arrays:
    return _rows_of("text", part)


def _rows_of(service: str, part: Service) -> Arrays:  # noqa: ARG001
    return sample_rows(services([service])[service])


def _strips(part: Service) -> Arrays:
    """Strips of a page: quickly read, and all that a page has."""
    page = Image.open(io.BytesIO(sample_rows(part)["page"].ravel()[0])).convert("RGB")
    width, height = page.size
    strips = []
    for number in range(MATES):
        top = number * (height - height // 8) // MATES
        file = io.BytesIO()
        page.crop((0, top, width, top + height // 8)).save(file, "PNG")
        strips.append(file.getvalue())
    array = np.empty((MATES, 1), np.object_)
    array[:, 0] = strips
    return {"page": array}


#: Models whose good rows are not simply their samples.
MADE: Mapping[str, Callable[[Service], Arrays]] = {
    "image_labels": _logits,
    "text_tokenize": _text_requests,
    "ocr": _strips,
}


def _for_client(arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    """Strings as object arrays of bytes, as tritonclient takes them."""
    return {
        name: array.astype(np.object_)
        if array.dtype.kind == "S"
        else np.char.encode(array, "utf-8").astype(np.object_)
        if array.dtype.kind == "U"
        else array
        for name, array in arrays.items()
    }
