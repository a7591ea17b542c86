"""What does it cost to keep Triton's batcher awake? CPU time with and without the waker and the companion, at three loads.

The same model, which sleeps, four times: with its own waker and without, on a server with the companion and on one without. It
uses no CPU time itself, so that the difference is the waking's. All are measured in turn in every round, server and stubs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perf import memory
from perf.frame import Bench, Outcome, median, spread
from perf.open_loop import Request, Sender
from tritonpilot import metrics, model_config
from tritonpilot.errors import MeasurementError
from tritonpilot.server import EmbeddedServer

MODEL_MS = 20.0
BATCH = 8
IN_FLIGHT = 2 * BATCH
LOADS = ("idle", "30 %", "saturated")
MODELS = {"waker": ("woken", "unwoken"), "companion": ("companied", "alone")}  # with and without it
SECONDS, QUICK_SECONDS = 10.0, 4.0
ROUNDS, QUICK_ROUNDS = 3, 1
PROBED_WITHIN_S = 60.0

CONFIG = f"""
backend: "python"
max_batch_size: {BATCH}
input [{{ name: "x" data_type: TYPE_FP32 dims: [1] }}]
output [{{ name: "y" data_type: TYPE_FP32 dims: [1] }}]
instance_group [{{ kind: KIND_CPU }}]
dynamic_batching {{
  priority_levels: 2
  default_priority_level: 1
  priority_queue_policy {{ key: 2 value {{ timeout_action: REJECT default_timeout_microseconds: 1 }} }}
}}
parameters {{ key: "pilot_wake_priority" value {{ string_value: "2" }} }}
"""
OFF = 'parameters { key: "pilot_waker" value { string_value: "off" } }\n'
#: A backend of ours, which has the waker.
OURS = f"""
import time

from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend


class Sleep(Backend):
    def decode(self, inputs):
        return inputs["x"]

    def predict(self, items):
        time.sleep({MODEL_MS / 1e3})
        return items

    def encode(self, result):
        return {{"y": result}}


TritonPythonModel = triton_model(Sleep)
"""
#: Somebody else's, which has none: what the companion is for.
OTHERS = f"""
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({MODEL_MS / 1e3})
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in inputs]
"""


@dataclass(frozen=True)
class Subject:
    """One model on its server, and the processes whose CPU time counts."""

    model: str
    server: EmbeddedServer
    sender: Sender
    pids: tuple[int, ...]

    def cpu_s(self) -> float:
        """CPU seconds of the server, the model's stub and the companion's."""
        return sum(time.clock_gettime(~pid << 3 | 2) for pid in self.pids)  # clock_getcpuclockid(3): to the nanosecond


@dataclass(frozen=True)
class Used:
    """What a load took: CPU seconds, of how many seconds; latencies of its answers."""

    cpu_s: float
    elapsed_s: float
    latencies_ms: tuple[float, ...] = ()


def waker_cost(bench: Bench) -> Outcome:
    """Largest share of a core, in %, that waking costs: of waker and companion at each load the median of the rounds."""
    seconds = QUICK_SECONDS if bench.quick else SECONDS
    with _subjects(bench) as subjects:
        rounds = bench.rounds(
            QUICK_ROUNDS if bench.quick else ROUNDS,
            lambda: {(load, name): _use(subjects[name], load, seconds) for load in LOADS for name in subjects},
            check=lambda: _check(subjects.values()),
        )
        wakes = {
            name: metrics.value(metrics.scrape(subjects[model].server.endpoints.metrics), family, model=model)
            for name, model, family in (
                ("waker", "woken", "pilot_wakes_total"),
                ("companion", "companied", "pilot_companion_wakes_total"),
            )
        }
    shares = {
        (kind, load): [100 * _cost(found[load, with_it], found[load, without]) for found in rounds]
        for kind, (with_it, without) in MODELS.items()
        for load in LOADS
    }
    kind, load = max(shares, key=lambda key: median(shares[key]))
    return Outcome(
        median(shares[kind, load]),
        spread=spread(shares[kind, load]),
        rounds=len(rounds),
        details={
            "largest": f"{kind} at {load}",
            "model_ms": MODEL_MS,
            "seconds_per_load": seconds,
            "share_of_a_core_percent": {
                kind: {load: round(median(shares[kind, load]), 3) for load in LOADS} for kind in MODELS
            },
            "wakes": wakes,
            "latency_ms": {
                name: {
                    load: _quantiles([ms for found in rounds for ms in found[load, name].latencies_ms])
                    for load in LOADS[1:]
                }
                for name in subjects
            },
        },
    )


def _check(subjects: Iterable[Subject]) -> None:
    for subject in subjects:
        subject.server.check_alive()


def _cost(with_it: Used, without: Used) -> float:
    """Cores that waking takes: both answered the same requests, in times that stalls may lengthen."""
    return (with_it.cpu_s - without.cpu_s) / with_it.elapsed_s


def _use(subject: Subject, load: str, seconds: float) -> Used:
    before, began = subject.cpu_s(), time.perf_counter()
    request = Request(subject.model, {"x": np.zeros((1, 1), np.float32)})
    if load == "idle":
        time.sleep(seconds)
        answers = []
    elif load == "saturated":
        answers = subject.sender.send([request] * int(seconds * 1e3 / MODEL_MS * BATCH), in_flight=IN_FLIGHT)
    else:
        gaps = np.random.default_rng(3).exponential(MODEL_MS / 1e3 / 0.3, int(seconds * 1e3 / MODEL_MS * 0.3))
        answers = subject.sender.send([request] * len(gaps), at_s=np.cumsum(gaps).tolist())
    if failed := [answer.error for answer in answers if answer.error]:
        raise MeasurementError(
            f"A request to {subject.model} failed: {failed[0]}. Nothing is reported. See the server's log."
        )
    used_s, elapsed_s = subject.cpu_s() - before, time.perf_counter() - began
    return Used(used_s, elapsed_s, tuple(answer.latency_ms for answer in answers))


@contextmanager
def _subjects(bench: Bench) -> Iterator[dict[str, Subject]]:
    """The four, ready: the companion has found that this server needs it."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder, ExitStack() as stack:
        codes = {"woken": OURS, "unwoken": OURS, "alone": OTHERS, "companied": OTHERS}
        for name, code in codes.items():
            _write(Path(folder, name), CONFIG + (OFF if name == "unwoken" else ""), code)
        _write(Path(folder, model_config.COMPANION), model_config.companion_text(), None)
        found = {}
        for names in (("woken", "unwoken", "alone"), ("companied", model_config.COMPANION)):
            server = stack.enter_context(EmbeddedServer(Path(folder), models=names, on_progress=bench.say))
            sender = stack.enter_context(Sender(server.endpoints.grpc))
            stubs = memory.stubs(server.pid)
            for name in names:
                counted = [
                    stub for instance, stub in stubs.items() if instance.startswith((f"{name}_", "pilot_companion_"))
                ]
                found[name] = Subject(name, server, sender, (server.pid, *counted))
        companion = found.pop(model_config.COMPANION)
        _wait_until_probed(companion.server)
        yield found


def _write(model: Path, config: str, code: str | None) -> None:
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config, encoding="utf-8")
    if code is not None:
        (model / "1" / "model.py").write_text(code, encoding="utf-8")


def _wait_until_probed(server: EmbeddedServer) -> None:
    deadline = time.monotonic() + PROBED_WITHIN_S
    while "has the 500 ms stall" not in server.log_tail(1000):
        if time.monotonic() > deadline:
            raise MeasurementError(
                "The companion did not find the stall that it is for. Nothing is reported. Look at the server's log: is this a "
                "Triton without it?"
            )
        time.sleep(0.1)


def _quantiles(latencies_ms: list[float]) -> dict[str, float]:
    return {
        name: round(float(np.quantile(latencies_ms, q)), 1) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
