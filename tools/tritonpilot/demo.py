"""The whole way in one go: train what is missing, build, serve, infer, measure.

result = run(Path("models"), Path("model_repository"), narrate=print)
show(result)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc
from numpy.typing import NDArray

from tritonpilot import build, repository, samples, spec, sweep
from tritonpilot.errors import ServerError
from tritonpilot.measurement import Point
from tritonpilot.server import EmbeddedServer
from tritonpilot.spec import Service

CONCURRENCIES = (1, 4, 16, 64)
MEASURED = "ctr"


@dataclass(frozen=True)
class Answer:
    """What one service answered to its first sample row."""

    service: str
    output: str
    values: list[float]
    """The first values of the first output."""
    latency_ms: float


@dataclass(frozen=True)
class Result:
    """Everything that the demo saw."""

    tritonserver: str
    answers: list[Answer]
    points: list[Point]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run(models: Path, root: Path, narrate: Callable[[str], None]) -> Result:
    """Run the demo; raises PilotError with the step that failed."""
    started = time.monotonic()
    services = spec.load_services(models)
    build.prepare(services, "auto", narrate)
    plans = build.plan(services)
    for change in repository.publish(root, [plan.folder for plan in plans]):
        narrate(change.describe())
    names = [service.service for service in services]
    with EmbeddedServer(root, models=names, probe_inputs=probe_inputs(models, root), on_progress=narrate) as server:
        answers = [_first_answer(server, service) for service in services if _samples_file(service)]
        for answer in answers:
            values = " ".join(f"{value:.4f}" for value in answer.values)
            narrate(f"{answer.service}: answered {answer.output} = {values} in {answer.latency_ms:.1f} ms")
        measured = next(service for service in services if service.service == MEASURED)
        points = list(
            sweep.measure(
                server.endpoints.grpc,
                MEASURED,
                samples.read(_samples_file(measured)),
                concurrencies=CONCURRENCIES,
                budget_s=30,
                on_progress=narrate,
            )
        )
        server.check_alive()
        reason = server.installation.reason
    return Result(reason, answers, points, time.monotonic() - started)


def probe_inputs(models: Path, root: Path) -> dict[str, dict[str, NDArray[Any]]]:
    """One real row per model of the repository whose service has samples: what proves that a model answers.

    A repository without service files beside it gets none; its models are probed with zeros.
    """
    if not any(models.glob(f"*/{spec.SERVICE_FILE}")):
        return {}
    served = set(repository.models(root))
    found = {}
    for service in spec.load_services(models):
        path = _samples_file(service)
        if path is not None and path.is_file() and service.service in served:
            found[service.service] = _first_row(path)
    return found


def _first_answer(server: EmbeddedServer, service: Service) -> Answer:
    rows = _first_row(_samples_file(service))
    inputs = []
    for name, array in rows.items():
        tensor = tritonclient.grpc.InferInput(name, array.shape, _triton_type(array))
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as client:
        begin = time.perf_counter()
        try:
            answer = client.infer(service.service, inputs)
        except tritonclient.grpc.InferenceServerException as error:
            raise ServerError(
                f"{service.service} refused its own sample: {error}. The server stops now. Build it again."
            ) from error
        latency_ms = (time.perf_counter() - begin) * 1e3
    output = answer.get_response().outputs[0].name
    values: Sequence[float] = answer.as_numpy(output).ravel()[:4].tolist()
    return Answer(service.service, output, list(values), latency_ms)


def _first_row(path: Path | None) -> dict[str, NDArray[Any]]:
    assert path is not None
    return {name: array[:1] for name, array in samples.read(path).items()}


def _samples_file(service: Service) -> Any:
    return service.folder / service.model.samples if service.model and service.model.samples else None


def _triton_type(array: NDArray[Any]) -> str:
    if array.dtype.kind in "SU":
        return "BYTES"
    return next(name for name, kind in samples.NUMPY_TYPES.items() if np.dtype(kind) == array.dtype)
