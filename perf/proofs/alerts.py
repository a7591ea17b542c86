"""How soon do people hear of a fault, and of its end? Faults are made for real under a Prometheus with the deployed rules.

Three models in one Triton with an entry and a watch: one becomes slow, one is flooded, the stub of one is killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perf import callers, machine
from perf.callers import Body, Due
from perf.frame import PROJECT, Bench, Outcome
from perf.open_loop import Sender
from perf.prometheus import Prometheus, scraping
from perf.subjects import Served, entered, watched
from tritonpilot import build, repository
from tritonpilot.errors import MeasurementError
from tritonpilot.ports import choose_ports
from tritonpilot.server import EmbeddedServer
from tritonpilot.spec import load_services

SCRAPE_S = 5.0  # as deployed
HISTORY_S = 330.0  # of good answers: a window that is full of them is the slowest to notice
QUICK_HISTORY_S = 15.0
PATIENCE_S = 180.0
POLL_S = 0.25
FLOODED, SLOW, KILLED = "flooded", "slow", "killed"
#: Seconds an execution of one row takes, without a fault and, of the slow model, with one.
PACE_S = {FLOODED: 0.05, SLOW: 0.01, KILLED: 0.01}
SLOW_S = 0.15
STEADY_PER_S = {FLOODED: 2.0, SLOW: 5.0, KILLED: 2.0}
FLOOD_PER_S = 60.0  # three times what the model can do
SERVICE = """\
service: {name}
slo: {{p99_ms: {slo_ms}, rate_per_s: 10}}
model:
  backend: python
  file: serving.py
  parameters: {{pace: "{pace}"}}
  inputs: [{{name: x, data_type: FP32, dims: [4]}}]
  outputs: [{{name: y, data_type: FP32, dims: [4]}}]
batching: {{max_batch_size: 1}}
classes: [{{name: only, priority: 1}}]
"""
SLO_MS = {FLOODED: 1000, SLOW: 100, KILLED: 500}


@dataclass(frozen=True)
class Alert:
    """An alert that a fault has to raise."""

    fault: str
    name: str
    model: str

    @property
    def query(self) -> str:
        return f'ALERTS{{alertname="{self.name}",model="{self.model}",alertstate="firing"}}'


SLOW_MODEL = (Alert("slow model", "SloBurnFast", SLOW),)
FLOOD = (Alert("flood", "QueueGrowth", FLOODED), Alert("flood", "RequestsRejected", FLOODED))
KILLED_STUB = (Alert("killed stub", "DeadStub", KILLED),)


def alerts(bench: Bench) -> Outcome:
    """Seconds until the last alert fired after its fault began, or was resolved after it ended; the larger of both."""
    history_s = QUICK_HISTORY_S if bench.quick else HISTORY_S
    body = callers.body(SLOW, {"x": np.zeros((1, 4), np.float32)})
    bodies = {name: Body(body.path.replace(SLOW, name), body.content, body.headers) for name in PACE_S}
    fired: dict[Alert, float] = {}
    resolved: dict[Alert, float] = {}
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name, ExitStack() as stack:
        folder = Path(name)
        http, grpc, metrics = choose_ports([0, 0, 0])
        server = EmbeddedServer(_repository(folder), http_port=http, grpc_port=grpc, metrics_port=metrics)
        server.start()
        stack.callback(server.stop)
        sender = stack.enter_context(Sender(server.endpoints.grpc))
        entry = stack.enter_context(entered(Served(server, sender)))
        watch = stack.enter_context(watched(server, server.repository))
        targets = {"triton": server.endpoints.metrics, "entry": entry.metrics, "watch": watch}
        prometheus = stack.enter_context(scraping(folder, targets, SCRAPE_S))
        for model in PACE_S:
            stack.enter_context(_calling(entry.http, bodies[model], STEADY_PER_S[model]))
        prometheus.wait_for("min(model_probe_success) == 1", PATIENCE_S)
        bench.say(f"{history_s:g} s of good answers")
        time.sleep(history_s)
        _none_fires(prometheus)

        with _calling(entry.http, bodies[FLOODED], FLOOD_PER_S):
            _set_pace(folder, SLOW, SLOW_S)
            _wait(bench, prometheus, (*SLOW_MODEL, *FLOOD), fired, is_firing=True)
            _set_pace(folder, SLOW, PACE_S[SLOW])
        _wait(bench, prometheus, (*SLOW_MODEL, *FLOOD), resolved, is_firing=False)

        server.check_alive()
        os.kill(_stub_of(server, KILLED), signal.SIGKILL)
        _wait(bench, prometheus, KILLED_STUB, fired, is_firing=True)
        server.check_alive()
        began = time.monotonic()
        server.stop()
        server.start()
        restart_s = time.monotonic() - began
        _wait(bench, prometheus, KILLED_STUB, resolved, is_firing=False, since=began)
        server.check_alive()
        others = {
            series.labels["alertname"] for series in prometheus.at('last_over_time(ALERTS{alertstate="firing"}[1h])')
        }
    seconds = [*fired.values(), *resolved.values()]
    return Outcome(
        max(seconds),
        spread=max(seconds) - min(seconds),
        rounds=len(seconds),
        details={
            "fired_s": {f"{alert.fault}: {alert.name}": round(s, 1) for alert, s in fired.items()},
            "resolved_s": {f"{alert.fault}: {alert.name}": round(s, 1) for alert, s in resolved.items()},
            "fired_besides": sorted(others - {alert.name for alert in fired}),
            "good_answers_before_s": history_s,
            "scrape_every_s": SCRAPE_S,
            "restart_of_triton_s": round(restart_s, 1),
        },
    )


def _repository(folder: Path) -> Path:
    for name, seconds in PACE_S.items():
        _set_pace(folder, name, seconds)
        service = folder / "models" / name
        service.mkdir(parents=True)
        text = SERVICE.format(name=name, slo_ms=SLO_MS[name], pace=folder / name)
        (service / "service.yaml").write_text(text, encoding="utf-8")
        shutil.copy(PROJECT / "perf/paced/serving.py", service)
    root = folder / "model_repository"
    root.mkdir()
    repository.publish(root, [plan.folder for plan in build.plan(load_services(folder / "models"), "auto")])
    return root


def _set_pace(folder: Path, model: str, seconds: float) -> None:
    """How long the model takes from now on; a reader sees the old or the new number."""
    written = folder / f"{model}.new"
    written.write_text(str(seconds), encoding="ascii")
    written.replace(folder / model)


@contextmanager
def _calling(http_url: str, body: Body, rate_per_s: float) -> Iterator[None]:
    """Calls at about that rate while the block lasts, whatever becomes of them."""
    over = threading.Event()
    second = [Due(number / rate_per_s, "", body) for number in range(max(1, round(rate_per_s)))]

    def call() -> None:
        while not over.is_set():
            began = time.monotonic()
            callers.on_schedule(http_url, second)
            over.wait(max(0.0, began + 1.0 - time.monotonic()))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _wait(
    bench: Bench,
    prometheus: Prometheus,
    wanted: Sequence[Alert],
    found: dict[Alert, float],
    *,
    is_firing: bool,
    since: float | None = None,
) -> None:
    """Note the seconds from `since` (now) until each of the alerts fires, or does not any more."""
    began = time.monotonic() if since is None else since
    word = "fires" if is_firing else "is resolved"
    while missing := [alert for alert in wanted if alert not in found]:
        for alert in missing:
            if bool(prometheus.at(alert.query)) == is_firing:
                found[alert] = time.monotonic() - began
                bench.say(f"{alert.fault}: {alert.name} {word} after {found[alert]:.1f} s")
        if time.monotonic() - began > PATIENCE_S:
            raise MeasurementError(
                f"{', '.join(f'{alert.name} of {alert.model}' for alert in missing)}: none {word} within {PATIENCE_S:g} s. "
                "Nothing is reported. Look at the rules in deploy/prometheus/rules."
            )
        time.sleep(POLL_S)


def _none_fires(prometheus: Prometheus) -> None:
    firing = [series.labels["alertname"] for series in prometheus.at('ALERTS{alertstate="firing"}')]
    if firing:
        raise MeasurementError(f"Without a fault {', '.join(firing)} fires. Nothing is reported. Look at the rules.")


def _stub_of(server: EmbeddedServer, model: str) -> int:
    """The process of the model's only instance."""
    for pid in machine.tree_pids(server.pid):
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended in between
            continue
        if f"{model}_0_0".encode() in argv:
            return pid
    raise MeasurementError(f"There is no stub of {model} to kill. Nothing is reported. Look at the server's log.")
