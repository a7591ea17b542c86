"""What does it cost to keep Triton's batcher awake? CPU time with and without the waker and the companion, at three loads.

The same model, which sleeps, four times: with its own waker and without, on a server with the companion and on one without, in
turn in every round. What waking takes is a few thousandths of a core, which drowns in the difference of two loads, so it is
counted: wakes at what one costs an idle server and its sender, the companion's stub, and the server's thread that serves
metrics. The differences are in the details.
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
from pilotlib.loopback import Line, Zeros, wake_request
from pilotlib.waker import EXPIRED, WAKE_ID
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
WAKE_LEVEL = 2
WAKES, WAKE_GAP_S = 100, 0.02
SCRAPES = 200

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
    wake_s: float  # CPU time of one wake: the server's, and the sender's where that is not counted in itself
    wakes_family: str = ""
    companion: int = 0  # its stub, and the server's thread that serves it metrics
    metrics_thread: int = 0

    def waking_s(self) -> float:
        """CPU seconds that its waking has taken so far."""
        wakes = sum(
            found.value
            for found in metrics.scrape(self.server.endpoints.metrics)
            if found.name == self.wakes_family and found.labels.get("model") == self.model
        )
        used_s = wakes * self.wake_s
        if self.companion:
            used_s += time.clock_gettime(_clock(self.companion)) + _thread_s(self.server.pid, self.metrics_thread)
        return used_s

    def cpu_s(self) -> float:
        """CPU seconds of the server, the model's stub and the companion's."""
        return sum(time.clock_gettime(_clock(pid)) for pid in self.pids)


@dataclass(frozen=True)
class Used:
    """What a load took: CPU seconds in all and of waking (counted), of how many seconds; latencies of its answers."""

    cpu_s: float
    waking_s: float
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
    shares = {
        (kind, load): [100 * found[load, with_it].waking_s / found[load, with_it].elapsed_s for found in rounds]
        for kind, (with_it, _) in MODELS.items()
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
            "difference_of_loads_percent": {
                kind: {
                    load: round(median([100 * _difference(found[load, a], found[load, b]) for found in rounds]), 3)
                    for load in LOADS
                }
                for kind, (a, b) in MODELS.items()
            },
            "wake_us": {kind: round(1e6 * subjects[with_it].wake_s) for kind, (with_it, _) in MODELS.items()},
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


def _difference(with_it: Used, without: Used) -> float:
    """Cores more with it: both answered the same requests, in times that stalls may lengthen."""
    return (with_it.cpu_s - without.cpu_s) / with_it.elapsed_s


def _use(subject: Subject, load: str, seconds: float) -> Used:
    before, waking_before, began = subject.cpu_s(), subject.waking_s(), time.perf_counter()
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
    used_s, waking_s = subject.cpu_s() - before, subject.waking_s() - waking_before
    elapsed_s = time.perf_counter() - began
    return Used(used_s, waking_s, elapsed_s, tuple(answer.latency_ms for answer in answers))


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
            stubs = {instance.rpartition("_0_0")[0]: stub for instance, stub in memory.stubs(server.pid).items()}
            companion = stubs.pop(model_config.COMPANION, 0)
            thread = 0
            if companion:
                _wait_until_probed(server)
                thread = _metrics_thread(server)
            server_s, own_s = _wake_s(server, names[0], is_kept=not companion)
            for name in stubs:
                pids = (server.pid, stubs[name], *([companion] if companion else []))
                wake_s = server_s if companion else server_s + own_s
                family = {"woken": "pilot_wakes_total", "companied": "pilot_companion_wakes_total"}.get(name, "")
                found[name] = Subject(name, server, sender, pids, wake_s, family, companion, thread)
        yield found


def _wake_s(server: EmbeddedServer, model: str, *, is_kept: bool) -> tuple[float, float]:
    """CPU seconds of one wake among few, as they are sent: the server's and the sender's. The waker keeps its connection."""
    host, _, port = server.endpoints.http.rpartition(":")
    wake = wake_request(WAKE_ID, model, 1, [Zeros("x", "FP32", (1, 1), 4)], "y", WAKE_LEVEL, is_kept=is_kept)
    line = Line((host, int(port)))
    before_s, own_before_s = time.clock_gettime(_clock(server.pid)), time.thread_time()
    for _ in range(WAKES):
        answered = line.answer(line.post(wake))
        if not is_kept:
            line.rest()
        if EXPIRED not in answered:
            raise MeasurementError(
                f"A wake of {model} was answered {answered!r}. Nothing is reported. See the server's log."
            )
        time.sleep(WAKE_GAP_S)
    used_s, own_s = time.clock_gettime(_clock(server.pid)) - before_s, time.thread_time() - own_before_s
    line.rest()
    return used_s / WAKES, own_s / WAKES


def _metrics_thread(server: EmbeddedServer) -> int:
    """The thread of tritonserver that serves its metrics: the one that is busy while they are asked for."""

    def used() -> dict[int, float]:
        threads = (int(entry.name) for entry in Path(f"/proc/{server.pid}/task").iterdir())
        return {thread: _thread_s(server.pid, thread) for thread in threads}

    before = used()
    for _ in range(SCRAPES):
        metrics.scrape(server.endpoints.metrics)
    after = used()
    return max(after, key=lambda thread: after[thread] - before.get(thread, 0.0))


def _thread_s(pid: int, thread: int) -> float:
    return int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def _clock(pid: int) -> int:
    """The CPU time of another process, as of clock_getcpuclockid(3): to the nanosecond."""
    return ~pid << 3 | 2


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
