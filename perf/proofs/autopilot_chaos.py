"""What does the autopilot do when its world breaks? Seven faults, one after the other, on a real Triton under load.

The command runs as a process and sees Triton through a real Prometheus. During a fault nothing may be changed and no request lost,
after it the settings are those from before, and the log says what happened.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from perf import callers
from perf.callers import Call, Due
from perf.frame import PROJECT, Bench, Outcome
from perf.prometheus import scraping
from perf.relay import Relay, relayed
from perf.subjects import command
from tritonpilot import build, metrics, repository
from tritonpilot.autopilot.act import Actor
from tritonpilot.autopilot.terms import Knobs
from tritonpilot.errors import MeasurementError, PilotError
from tritonpilot.ports import choose_ports
from tritonpilot.server import EmbeddedServer
from tritonpilot.spec import load_services

MODEL = "paced"
PACE_S = 0.05  # of an execution of one row: 20 requests a second and instance
RATE_PER_S = 25.0  # more than one instance can do
HOLD_S, QUICK_HOLD_S = 15.0, 2.0
AFTER_S = 2.0  # whoever thrashes has time to
QUIET_S, QUICK_QUIET_S = 10.0, 4.0  # without a change
PATIENCE_S = 60.0
RECOVERY_S = 20.0
POLL_S = 0.1
MOST_INSTANCES = 2  # what the rate needs: a backlog after a fault must not look like a change
DELAY_BY_HAND_US = 1000
SERVICE = """\
service: paced
slo: {p99_ms: 400, rate_per_s: 25}
model:
  backend: python
  file: serving.py
  parameters: {pace: "%s"}
  inputs: [{name: x, data_type: FP32, dims: [4]}]
  outputs: [{name: y, data_type: FP32, dims: [4]}]
batching: {max_batch_size: 1}
classes: [{name: only, priority: 1}]
"""
POLICY = """\
interval_s: 1
models:
  - {model: paced, policy: feedback, instances: {min: 1, max: 2}, cooldown_s: 2, steady_s: 5, shrink_after_s: 900}
"""


@dataclass(frozen=True)
class Fault:
    """What breaks, and what has to be seen of it: an event of the log whose sentence has these words."""

    name: str
    begin: Callable[[], None]
    end: Callable[[], None]
    event: str
    words: str
    may_lose: bool = False  # requests
    changes_most: int = 0  # until all is well again


@dataclass
class World:
    """Everything that runs, and what came of the requests."""

    server: EmbeddedServer
    policy: Path
    state: Path
    prometheus: Relay
    page: Relay
    calls: list[tuple[float, Call]] = field(default_factory=list)
    endpoint: str = ""
    process: subprocess.Popen[str] | None = None
    autopilot: ExitStack = field(default_factory=ExitStack)

    def start_autopilot(self) -> None:
        options = [
            "--port",
            "0",
            "--triton-grpc",
            self.server.endpoints.grpc,
            "--metrics",
            "",
            "--state",
            str(self.state),
        ]
        options += ["--prometheus", f"http://{self.prometheus.address}"]
        endpoints, self.process = self.autopilot.enter_context(command("autopilot", [str(self.policy), *options]))
        self.endpoint = endpoints["metrics"]

    def kill_autopilot(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_triton(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.wait(10)

    def restart_triton(self) -> None:
        """What a supervisor does."""
        self.server.stop()
        self.server.start()

    def set_by_hand(self) -> None:
        """What a person may do: another delay, which the policy leaves alone."""
        with Actor(self.server.endpoints.grpc, self.server.control_key) as somebody:
            somebody.apply(MODEL, Knobs(DELAY_BY_HAND_US, MOST_INSTANCES))

    def instances(self) -> int:
        """What the server has; 0: it cannot be asked."""
        try:
            with self.server.control() as control:
                return sum(group.count for group in control.config(MODEL, timeout_s=2).instance_group)
        except PilotError:
            return 0

    def log(self) -> list[dict[str, object]]:
        """What the autopilot wrote until now."""
        path = self.state / "decisions.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def is_well(self, instances: int) -> bool:
        """Whether the autopilot decides, on figures that it trusts, and the server has that many instances."""
        try:
            samples = metrics.scrape(self.endpoint)
        except MeasurementError:
            return False
        age_s = time.time() - metrics.value(samples, "autopilot_last_decision_timestamp_seconds")
        said = [sample.value for sample in samples if sample.name == "autopilot_problem"]
        return age_s < 2.5 and said == [0.0] and self.instances() == instances and self.is_answered()

    def is_answered(self) -> bool:
        """Whether the last requests had their answers."""
        last = [call for _, call in self.calls[-10:]]
        return bool(last) and all(call.ok for call in last)


def autopilot_chaos(bench: Bench) -> Outcome:
    """How many of the faults had a consequence that they must not have."""
    hold_s = QUICK_HOLD_S if bench.quick else HOLD_S
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name, ExitStack() as stack:
        world = stack.enter_context(_world(Path(name)))
        settled = _settled(world, QUICK_QUIET_S if bench.quick else QUIET_S)
        bench.say(f"settled at {settled} instances; {hold_s:g} s of each fault")
        details: dict[str, object] = {}
        wrong: dict[str, list[str]] = {}
        for fault in _faults(world):
            found, seconds = _suffered(world, fault, settled, hold_s)
            details[fault.name] = {"recovered_s": round(seconds, 1), "wrong": found}
            bench.say(
                f"{fault.name}: all is well {seconds:.1f} s after its end" + "".join(f"; {each}" for each in found)
            )
            if found:
                wrong[fault.name] = found
        said = [f"{entry['event']}: {entry['said']}" for entry in world.log()]
    return Outcome(
        len(wrong),
        rounds=len(details),
        details={"faults": details, "held_s": hold_s, "requests": len(world.calls), "log": said},
    )


def _faults(world: World) -> list[Fault]:
    def write(text: str) -> Callable[[], None]:
        return lambda: _ignore(world.policy.write_text(text, encoding="utf-8"))

    def cut(is_cut: bool) -> Callable[[], None]:
        return lambda: setattr(world.prometheus, "is_cut", is_cut)

    nothing: Callable[[], None] = lambda: None  # noqa: E731
    return [
        Fault("Triton killed", world.kill_triton, world.restart_triton, "change", "Triton came back with 1 instance",
              may_lose=True, changes_most=1),
        Fault("autopilot killed", world.kill_autopilot, world.start_autopilot, "started", "The autopilot follows paced"),
        Fault("Prometheus cut off", cut(True), cut(False), "problem", "Prometheus at"),
        Fault("metrics frozen", lambda: world.page.freeze("/metrics"), world.page.thaw, "problem", "stand still, but gRPC counted"),
        Fault("settings changed by hand", world.set_by_hand, nothing, "adopt",
              f"someone set 2 instances, delay {DELAY_BY_HAND_US} us"),
        Fault("model unloaded", lambda: world.server.unload(MODEL), lambda: _ignore(world.server.load(MODEL)), "change",
              "Triton came back with 1 instance", may_lose=True, changes_most=1),
        Fault("policy file broken", write("models: [{model: paced, police: off}]"), write(POLICY), "policy",
              "What was read before stays in force"),
    ]  # fmt: skip


def _suffered(world: World, fault: Fault, settled: int, hold_s: float) -> tuple[list[str], float]:
    """What went wrong with one fault, and the seconds from its end until all was well."""
    told, called = len(world.log()), len(world.calls)
    fault.begin()
    time.sleep(hold_s)
    during = world.log()[told:]
    fault.end()
    ended_s = time.monotonic()
    wrong = []
    while not world.is_well(settled):
        if time.monotonic() - ended_s > RECOVERY_S:
            wrong.append(f"not well within {RECOVERY_S:g} s, with {world.instances()} instances")
            break
        time.sleep(POLL_S)
    seconds = time.monotonic() - ended_s
    time.sleep(AFTER_S)
    log = world.log()[told:]
    changes = [entry for entry in log if entry["event"] in ("change", "revert", "failed")]
    early = [entry for entry in during if entry["event"] in ("change", "revert", "failed")]
    if early:
        wrong.append(f"{len(early)} changes during the fault")
    if len(changes) > fault.changes_most:
        wrong.append(f"{len(changes)} changes: {'; '.join(str(entry['said']) for entry in changes)}")
    if not any(entry["event"] == fault.event and fault.words in str(entry["said"]) for entry in log):
        wrong.append(f"the log does not say {fault.words!r}")
    lost = [call for _, call in world.calls[called:] if not call.ok]
    if lost and not fault.may_lose:
        wrong.append(f"{len(lost)} requests lost: {lost[0].text[:100]}")
    if not 1 <= world.instances() <= MOST_INSTANCES:
        wrong.append(f"{world.instances()} instances, out of bounds")
    return wrong, seconds


def _settled(world: World, quiet_s: float) -> int:
    """How many instances the autopilot finds right, when it has not changed them for a while."""
    deadline = time.monotonic() + PATIENCE_S
    quiet_since = time.monotonic()
    changes = 0
    while time.monotonic() < deadline:
        now = sum(entry["event"] == "change" for entry in world.log())
        if now != changes:
            changes, quiet_since = now, time.monotonic()
        instances = world.instances()
        if changes and time.monotonic() - quiet_since > quiet_s and world.is_well(instances):
            return instances
        time.sleep(POLL_S)
    raise MeasurementError(
        f"The autopilot did not settle within {PATIENCE_S:g} s: {[entry['said'] for entry in world.log()]}. Nothing is reported."
    )


@contextmanager
def _world(folder: Path) -> Iterator[World]:
    policy = folder / "autopilot.yaml"
    policy.write_text(POLICY, encoding="utf-8")
    http, grpc, page = choose_ports([0, 0, 0])  # of its own, to come back at the same
    with ExitStack() as stack:
        server = EmbeddedServer(
            _repository(folder), http_port=http, grpc_port=grpc, metrics_port=page, exit_timeout_s=2
        )
        server.start()
        stack.callback(server.stop)
        relay = stack.enter_context(relayed(server.endpoints.metrics))
        (folder / "prometheus").mkdir()
        running = stack.enter_context(scraping(folder / "prometheus", {"triton": relay.address}, 1.0))
        running.wait_for("nv_inference_request_success", PATIENCE_S)
        prometheus = stack.enter_context(relayed(running.url.removeprefix("http://")))
        world = World(server, policy, folder / "state", prometheus, relay)
        stack.enter_context(world.autopilot)
        stack.enter_context(_calling(world))
        world.start_autopilot()
        yield world


def _repository(folder: Path) -> Path:
    (folder / "pace").write_text(str(PACE_S), encoding="ascii")
    service = folder / "models" / MODEL
    service.mkdir(parents=True)
    (service / "service.yaml").write_text(SERVICE % (folder / "pace"), encoding="utf-8")
    shutil.copy(PROJECT / "perf/paced/serving.py", service)
    root = folder / "model_repository"
    root.mkdir()
    repository.publish(root, [plan.folder for plan in build.plan(load_services(folder / "models"), "auto")])
    return root


@contextmanager
def _calling(world: World) -> Iterator[None]:
    """Requests at a steady rate while the block lasts, whatever becomes of them."""
    over = threading.Event()
    body = callers.body(MODEL, {"x": np.zeros((1, 4), np.float32)})
    second: Sequence[Due] = [Due(number / RATE_PER_S, "", body) for number in range(round(RATE_PER_S))]

    def call() -> None:
        while not over.is_set():
            began = time.monotonic()
            world.calls += [(began, each) for each in callers.on_schedule(world.server.endpoints.http, second)]
            over.wait(max(0.0, began + 1.0 - time.monotonic()))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ignore(_: object) -> None:
    """For what returns something that nobody asked for."""
