"""The whole way in one go: train what is missing, build, serve, infer, measure.

result = run(Path("models"), Path("model_repository"), narrate=print)
show(result)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tritonclient.grpc
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from tritonpilot import build, optimized, repository, samples, spec, sweep
from tritonpilot.errors import ServerError
from tritonpilot.measurement import Point
from tritonpilot.server import EmbeddedServer
from tritonpilot.spec import Service

SERVICES = ("ctr", "image")
MEASURED = "ctr"
CONCURRENCIES = (1, 4, 16, 64)


@dataclass(frozen=True)
class Answer:
    """What one service answered to its first sample row."""

    service: str
    output: str
    values: list[float | str]
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
    services = spec.load_services(models, SERVICES)
    (measured,) = spec.load_services(models, [MEASURED])
    build.prepare(services, "auto", narrate)
    plans = build.plan(services)
    for change in repository.publish(root, build.folders(plans, root)):
        narrate(change.describe())
    for note in optimized.write(root, [plan.folder.name for plan in plans]):
        narrate(note)
    names = [service.service for service in services]
    probes = build.probe_inputs(models, root)
    with EmbeddedServer(root, models=names, probe_inputs=probes, on_progress=narrate) as server:
        answers = [_first_answer(server, name, probes[name]) for name in names]
        for answer in answers:
            values = ", ".join(value if isinstance(value, str) else f"{value:.4f}" for value in answer.values)
            narrate(f"{answer.service}: answered {answer.output} = {values} in {answer.latency_ms:.1f} ms")
        points = list(
            sweep.measure(
                server.endpoints.grpc,
                MEASURED,
                samples.read(_samples(measured)),
                concurrencies=CONCURRENCIES,
                budget_s=30,
                on_progress=narrate,
            )
        )
        server.check_alive()
        reason = server.installation.reason
    return Result(reason, answers, points, time.monotonic() - started)


def _first_answer(server: EmbeddedServer, name: str, inputs: Mapping[str, NDArray[Any]]) -> Answer:
    tensors = []
    for key, array in inputs.items():
        tensors.append(tritonclient.grpc.InferInput(key, array.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as client:
        begin = time.perf_counter()
        try:
            answer = client.infer(name, tensors)
        except tritonclient.grpc.InferenceServerException as error:
            raise ServerError(
                f"{name} refused its own sample: {error}. The server stops now. Build it again."
            ) from error
        latency_ms = (time.perf_counter() - begin) * 1e3
    output = answer.get_response().outputs[0].name
    values = answer.as_numpy(output).ravel()[:4].tolist()
    return Answer(name, output, [v.decode(errors="replace") if isinstance(v, bytes) else v for v in values], latency_ms)


def _samples(service: Service) -> Path:
    assert service.samples is not None
    return service.samples
