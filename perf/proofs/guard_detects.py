"""Does the guard find what is wrong with a model's answers, and nothing where nothing is? Real Triton, entry and Prometheus.

A model that errs in one of a thousand executions, on inputs that never repeat and on inputs that do; one whose answers become
distributed differently; and an hour of a real day on `ctr`, replayed faster: the guard's windows count answers, not seconds.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perf import callers, day, subjects
from perf.callers import Body, Due
from perf.frame import PROJECT, Bench, Outcome
from perf.open_loop import Sender
from perf.prometheus import Prometheus, scraping
from perf.subjects import Served, entered
from tritonpilot import build, metrics, repository
from tritonpilot.arrivals import read_recording
from tritonpilot.errors import MeasurementError
from tritonpilot.guard.findings import read
from tritonpilot.guard.terms import Guard
from tritonpilot.server import EmbeddedServer
from tritonpilot.spec import Service, load_services

UNIQUE, REPEATED, DRIFTING, REAL = "unique", "repeated", "drifting", "ctr"
GUARDS = {
    UNIQUE: "{share: 0.5, distribution: false}",
    REPEATED: "{share: 0, distribution: false}",
    DRIFTING: "{share: 0, rows_per_s: 500}",
}
REAL_GUARD = Guard(share=0.5, rows_per_s=500)
SERVICE = """\
service: {name}
model:
  backend: python
  file: serving.py
  parameters: {{fault: "{fault}"}}
  inputs: [{{name: x, data_type: FP32, dims: [4]}}]
  outputs: [{{name: p, data_type: FP32, dims: [1]}}]
batching: {{max_batch_size: 8}}
guard: {guard}
"""
RATE_PER_S = 250.0
DRIFT_RATE_PER_S, QUICK_DRIFT_RATE_PER_S = 20.0, 60.0
MOST_REQUESTS = 20_000
INPUTS = 1000  # that repeat, by Zipf's law
ZIPF = 1.1
SCRAPE_S = 5.0  # as deployed
PATIENCE_S = 120.0
DRIFT_WITHIN_S = 60.0
SPEED, QUICK_SPEED = 60.0, 200.0
HOUR_S, QUICK_HOUR_S = 3600.0, 1800.0
ROUNDS, QUICK_ROUNDS = 3, 1
_OF_REAL = f',model="{REAL}"'
ALERTS = 'ALERTS{alertname=~"Guard.*",alertstate="firing"%s}'


@dataclass(frozen=True)
class Rig:
    """What is asked and looked at."""

    server: EmbeddedServer
    entry: subjects.Entry
    prometheus: Prometheus
    folder: Path
    random: np.random.Generator

    def fails(self, model: str, how: str) -> None:
        """From the next execution on."""
        written = self.folder / f"{model}.new"
        written.write_text(how, encoding="ascii")
        written.replace(self.folder / model)

    def send(self, model: str, bodies: Sequence[Body], at_s: Sequence[float]) -> None:
        """All at their times. Raises MeasurementError when one is not answered."""
        calls = callers.on_schedule(
            self.entry.http, [Due(moment, model, body) for moment, body in zip(at_s, bodies, strict=True)]
        )
        failed = [call for call in calls if not call.ok]
        if failed:
            raise MeasurementError(
                f"{len(failed)} of {len(calls)} requests to {model} failed, the first with {failed[0].status} {failed[0].text}. "
                "Nothing is reported."
            )

    def body(self, model: str) -> Body:
        """A request that was never made before."""
        return callers.body(model, {"x": self.random.normal(0, 0.7, (1, 4)).astype(np.float32)})

    def different(self, model: str) -> int:
        """Comparisons that failed."""
        return next((each.different for each in read(metrics.scrape(self.entry.metrics)) if each.model == model), 0)

    def compared(self, model: str) -> dict[str, int]:
        """Comparisons by what came of them."""
        samples = metrics.scrape(self.entry.metrics)
        return {
            f"{kind} {result}": int(value)
            for kind in ("again", "batch", "repeat")
            for result in ("same", "different", "changed", "failed", "dropped")
            if (value := metrics.value(samples, "pilot_guard_comparisons_total", model=model, kind=kind, result=result))
        }


def guard_detects(bench: Bench) -> Outcome:
    """Requests until a model that errs once in 1000 executions is found, at most; ok: drift within a minute, no false alarm."""
    rounds = QUICK_ROUNDS if bench.quick else ROUNDS
    with _rig(bench) as rig:
        unique = [_until_found(bench, rig, UNIQUE, lambda: rig.body(UNIQUE)) for _ in range(rounds)]
        asked = [rig.body(REPEATED) for _ in range(INPUTS)]
        shares = np.arange(1, INPUTS + 1) ** -ZIPF
        shares /= shares.sum()
        repeated = [
            _until_found(bench, rig, REPEATED, lambda: asked[int(rig.random.choice(INPUTS, p=shares))])
            for _ in range(rounds)
        ]
        drift_s = _drift(bench, rig)
        hour = _hour(bench, rig)
        rig.server.check_alive()
    found = [*unique, *repeated]
    return Outcome(
        float(max(found)),
        spread=float(max(found) - min(found)),
        rounds=len(found),
        ok=drift_s <= DRIFT_WITHIN_S and not hour["alarms"],
        details={
            "requests_until_found_unique_inputs_share_0.5": unique,
            "requests_until_found_zipf_inputs_share_0": repeated,
            "drift_alert_after_s": round(drift_s, 1),
            "drift_at_requests_per_s": _drift_rate_per_s(bench),
            "real_hour": hour,
        },
    )


def _until_found(bench: Bench, rig: Rig, model: str, body: Callable[[], Body]) -> int:
    """Requests from the fault's beginning until the entry's metrics tell of it."""
    _settle(rig, model, body)
    before = rig.different(model)
    rig.fails(model, "one_in_1000")
    sent = 0
    while rig.different(model) == before:
        if sent >= MOST_REQUESTS:
            raise MeasurementError(
                f"After {sent} requests to {model} nothing was found: {rig.compared(model)}. Nothing is reported."
            )
        count = round(RATE_PER_S)
        rig.send(
            model, [body() for _ in range(count)], np.sort(rig.random.uniform(0, count / RATE_PER_S, count)).tolist()
        )
        sent += count
    rig.fails(model, "")
    bench.say(f"{model}: found after {sent} requests, {rig.compared(model)}")
    return sent


def _settle(rig: Rig, model: str, body: Callable[[], Body]) -> None:
    """Good answers until what was in doubt is known, and some more."""
    for _ in range(3):
        rig.send(model, [body() for _ in range(100)], np.linspace(0, 0.9, 100).tolist())


def _drift(bench: Bench, rig: Rig) -> float:
    """Seconds from the drift's beginning until Prometheus fires."""

    def second() -> None:
        count = round(_drift_rate_per_s(bench))
        rig.send(
            DRIFTING, [rig.body(DRIFTING) for _ in range(count)], np.linspace(0, 1, count, endpoint=False).tolist()
        )

    # The reference of a thousand rows is learned quickly; the window then is filled at the rate of callers.
    rig.send(DRIFTING, [rig.body(DRIFTING) for _ in range(1300)], np.linspace(0, 6, 1300).tolist())
    for _ in range(3 if bench.quick else 20):
        second()
    if wrong := rig.prometheus.at(ALERTS % f',model="{DRIFTING}"'):
        raise MeasurementError(f"Without a drift {wrong[0].labels['alertname']} fires. Nothing is reported.")
    rig.fails(DRIFTING, "drift")
    began = time.monotonic()
    while not rig.prometheus.at(ALERTS % f',model="{DRIFTING}"'):
        if time.monotonic() - began > PATIENCE_S:
            raise MeasurementError(f"A drift was not found within {PATIENCE_S:g} s. Nothing is reported.")
        second()
    seconds = time.monotonic() - began
    bench.say(f"drift: an alert fires after {seconds:.1f} s")
    return seconds


def _drift_rate_per_s(bench: Bench) -> float:
    return QUICK_DRIFT_RATE_PER_S if bench.quick else DRIFT_RATE_PER_S


def _hour(bench: Bench, rig: Rig) -> dict[str, object]:
    """The busiest hour of the real day on `ctr`, with real rows."""
    at_s = read_recording(day.recording()).at_s
    speed, length_s = (QUICK_SPEED, QUICK_HOUR_S) if bench.quick else (SPEED, HOUR_S)
    start_s = float(np.bincount((at_s // HOUR_S).astype(np.intp)).argmax()) * HOUR_S
    at_s = (at_s[(at_s >= start_s) & (at_s < start_s + length_s)] - start_s) / speed
    rows = subjects.sample_rows(subjects.services([REAL])[REAL])
    count = len(next(iter(rows.values())))
    bodies = [
        callers.body(REAL, {name: array[place : place + 1] for name, array in rows.items()})
        for place in rig.random.integers(0, count, min(count, 2000))
    ]
    chosen = [bodies[place] for place in rig.random.integers(0, len(bodies), len(at_s))]
    bench.say(f"{len(at_s)} requests of an hour in {at_s[-1]:.0f} s")
    alarms: set[str] = set()
    for start in range(0, len(at_s), 500):
        part = at_s[start : start + 500]
        rig.send(REAL, chosen[start : start + 500], (part - part[0]).tolist())
        for each in read(metrics.scrape(rig.entry.metrics)):
            if each.model == REAL:
                alarms |= {finding.what for finding in each.findings}
    alarms |= {series.labels["alertname"] for series in rig.prometheus.at(f"last_over_time({ALERTS % _OF_REAL}[1h])")}
    state = next(each for each in read(metrics.scrape(rig.entry.metrics)) if each.model == REAL)
    if state.is_learning or not state.compared:
        raise MeasurementError(f"The guard had no reference, or compared nothing: {state}. Nothing is reported.")
    return {
        "requests": len(at_s),
        "of_seconds": length_s,
        "replayed_times_faster": speed,
        "alarms": len(alarms),
        "which": sorted(alarms),
        "rows_watched": state.rows,
        "compared": rig.compared(REAL),
    }


@contextmanager
def _rig(bench: Bench) -> Iterator[Rig]:
    real = subjects.services([REAL])[REAL]
    build.prepare([real], "auto", bench.say)
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name, ExitStack() as stack:
        folder = Path(name)
        services = [real.model_copy(update={"guard": REAL_GUARD}), *_flawed(folder)]
        root = folder / "model_repository"
        root.mkdir()
        repository.publish(root, [plan.folder for plan in build.plan(services, "auto")])
        probes = build.probe_inputs(PROJECT / "models", root)
        server = stack.enter_context(EmbeddedServer(root, on_progress=bench.say, probe_inputs=probes))
        sender = stack.enter_context(Sender(server.endpoints.grpc))
        entry = stack.enter_context(entered(Served(server, sender)))
        prometheus = stack.enter_context(scraping(folder, {"entry": entry.metrics}, SCRAPE_S))
        yield Rig(server, entry, prometheus, folder, np.random.default_rng(9))


def _flawed(folder: Path) -> list[Service]:
    for name, guard in GUARDS.items():
        (folder / name).write_text("", encoding="ascii")
        service = folder / "models" / name
        service.mkdir(parents=True)
        text = SERVICE.format(name=name, fault=folder / name, guard=guard)
        (service / "service.yaml").write_text(text, encoding="utf-8")
        shutil.copy(PROJECT / "perf/flawed/serving.py", service)
    return load_services(folder / "models")
