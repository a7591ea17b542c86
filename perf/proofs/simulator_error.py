"""How far is the simulator from the real server? Random settings and loads, the same arrivals sent to one and given to the other.

Half of them on an emulated accelerator, half on `ctr` with requests of mixed sizes; with classes and without, one instance and two,
20 to 85 % of what the setting can do. Costs are measured in a few seconds beforehand (on the CPU again for each setting), never
from the load that is predicted. How fast the machine is just then, which changes on shared hosts, is looked at before and after
each load; a load during which it changed much is sent again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perf import emulated, machine
from perf.frame import PROJECT, Bench, NoisyRoundError, Outcome, median, spread
from perf.offer import offer
from perf.subjects import services
from tritonpilot import machine as tools_machine
from tritonpilot import metrics
from tritonpilot.arrivals import Stream, Traffic, traffic
from tritonpilot.control import Control, ModelStatistics
from tritonpilot.costs import Costs
from tritonpilot.outcome import Outcome as Answers
from tritonpilot.profile import Profile, profile, speed
from tritonpilot.setting import Setting
from tritonpilot.simulate import Batcher, simulate
from tritonpilot.spec import Service
from tritonpilot.stage import Stage
from tritonpilot.tune.run import batcher_of

SETTINGS, LOADS = 4, 2  # of each subject
ROUNDS, SECONDS = 3, 4.0  # of each load; the median of the rounds counts, so that one pause of the host does not decide
MOST_REQUESTS_PER_S = 2500.0  # a sender on one core must not be what is measured
LEAST_REQUESTS = 500  # for a P99
TOO_MANY, CAPACITY_S = 1.3, 3.0  # times what the costs let hope for, to see what is answered of it
MOST_SENT_PER_S = 4500.0
LOAD_LEAST, LOAD_MOST = 0.2, 0.85
SPEED_CHANGE = 1.6  # since the profile; half a second of looking tells no less
THROUGHPUT_ERROR = 0.05
DELAYS_US = (0, 500, 1000, 2000, 5000)
EMULATED_CLASSES = """\
batching: {max_batch_size: 64}
classes:
  - {name: high, priority: 1, max_queue_size: 2000}
  - {name: low, priority: 2, max_queue_size: 2000}
"""


@dataclass(frozen=True)
class Subject:
    """A service under test, and what is asked of it."""

    name: str
    service: Service
    is_on_cpu: bool
    batch_sizes: tuple[int, ...]
    instances: tuple[int, ...]
    rows: Mapping[int, float]  # size of a request -> weight
    classes: Mapping[str, float]  # class -> its part of the requests; "" is none


@dataclass(frozen=True)
class Trial:
    """One load, measured and simulated."""

    subject: str
    setting: str
    load: float
    rate_per_s: float
    requests: int
    p50_ms: float
    p99_ms: float
    throughput_per_s: float
    mean_batch: float
    queue_us: float
    execution_us: float  # mean of executions
    cpu_cores: float
    simulated_p50_ms: float
    simulated_p99_ms: float
    simulated_throughput_per_s: float
    simulated_mean_batch: float
    simulated_queue_us: float
    simulated_execution_us: float
    simulated_cpu_cores: float
    speed: float
    p99_ms_by_class: Mapping[str, tuple[float, float]]  # measured and simulated

    @property
    def p99_error(self) -> float:
        return self.simulated_p99_ms / self.p99_ms - 1

    @property
    def throughput_error(self) -> float:
        return self.simulated_throughput_per_s / self.throughput_per_s - 1


def simulator_error(bench: Bench) -> Outcome:
    """Median of the absolute relative errors of P99."""
    random = np.random.default_rng(11)
    trials: list[Trial] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tritonpilot-proof-")))
        core = bench.cores.server
        for subject in _subjects(folder):
            # On virtual machines a core that was at rest is up to twice as slow for the next moments, and how often it rests
            # depends on the host. Ours are to be compared, not the host's.
            with Stage(
                subject.service, PROJECT / "models", cpus=[core], stays_awake=True, on_progress=bench.say
            ) as stage:
                trials += _trials(bench, subject, stage, random)
    errors = [abs(trial.p99_error) for trial in trials]
    throughput = [abs(trial.throughput_error) for trial in trials]
    by_subject = {
        name: round(median([abs(t.p99_error) for t in trials if t.subject == name]), 4)
        for name in dict.fromkeys(t.subject for t in trials)
    }
    return Outcome(
        median(errors),
        spread=spread(errors),
        rounds=len(trials),
        ok=median(throughput) <= THROUGHPUT_ERROR,
        details={
            "throughput_error": round(median(throughput), 4),
            "p99_error_quartiles": [round(float(value), 4) for value in np.quantile(errors, (0.25, 0.75, 1.0))],
            "p99_error_by_subject": by_subject,
            "trials": [_shown(trial) for trial in trials],
        },
    )


def _subjects(folder: Path) -> list[Subject]:
    accelerators = emulated.services_of(
        folder, {"emulated_v100": "batching: {max_batch_size: 64}", "emulated_v100_classes": EMULATED_CLASSES}
    )
    ctr = services(["ctr"])["ctr"]
    plain = ctr.model_copy(update={"classes": (), "default_class": None})
    two = {"high": 0.3, "low": 0.7}
    one_row, mixed = {1: 0.7, 2: 0.2, 8: 0.1}, {1: 0.5, 4: 0.2, 16: 0.2, 64: 0.1}
    return [
        Subject("emulated", accelerators["emulated_v100"], False, (8, 16, 32, 64), (1, 2), one_row, {"": 1}),
        Subject("emulated, classes", accelerators["emulated_v100_classes"], False, (8, 16, 32, 64), (1,), one_row, two),
        Subject("ctr", plain, True, (64, 128, 256), (1,), mixed, {"": 1}),
        Subject("ctr, classes", ctr, True, (64, 128, 256), (1,), mixed, {"realtime": 0.9, "batch": 0.1}),
    ]


def _trials(bench: Bench, subject: Subject, stage: Stage, random: np.random.Generator) -> list[Trial]:
    settings, loads = (1, 2) if bench.quick else (SETTINGS, LOADS)
    known: Profile | None = None
    found = []
    for _ in range(settings):
        setting = Setting(
            queue_delay_us=int(random.choice(DELAYS_US)),
            max_batch_size=int(random.choice(subject.batch_sizes)),
            instances=int(random.choice(subject.instances)),
        )
        if known is None or subject.is_on_cpu:  # the speed of a shared core changes from minute to minute
            known = _profile(bench, subject, stage)
        stage.apply(setting)
        batcher, profiled = batcher_of(setting.applied(subject.service)), known
        with machine.pinned(bench.cores.client):
            capacity_per_s = _capacity_per_s(stage, subject, known.costs, setting)
        bench.say(f"{subject.name}, {setting.describe()}: answers at most {capacity_per_s:.0f} requests/s")
        for _ in range(loads):
            wanted, seed = float(random.uniform(LOAD_LEAST, LOAD_MOST)), int(random.integers(1 << 30))
            with machine.pinned(bench.cores.client):
                found += bench.rounds(
                    1,
                    lambda: _trial(bench, subject, stage, setting, batcher, profiled, wanted, capacity_per_s, seed),  # noqa: B023
                    check=stage.server.check_alive,
                    retries=bench.noisy_rounds + 4,
                )
            last = found[-1]
            bench.say(
                f"{last.subject}, {last.setting}, load {last.load:.2f} of {last.rate_per_s:.0f}/s, measured and simulated: "
                f"P99 {last.p99_ms:.1f}, {last.simulated_p99_ms:.1f} ms ({last.p99_error:+.1%}), "
                f"P50 {last.p50_ms:.1f}, {last.simulated_p50_ms:.1f} ms, "
                f"{last.mean_batch:.1f}, {last.simulated_mean_batch:.1f} rows a batch, "
                f"execution {last.execution_us:.0f}, {last.simulated_execution_us:.0f} us, "
                f"CPU {last.cpu_cores:.2f}, {last.simulated_cpu_cores:.2f} cores, "
                f"speed {last.speed:.2f}, P99 by class {dict(last.p99_ms_by_class)}"
            )
    return found


def _profile(bench: Bench, subject: Subject, stage: Stage) -> Profile:
    largest = max(subject.batch_sizes)
    stage.apply(Setting(queue_delay_us=500, max_batch_size=largest))
    with machine.pinned(bench.cores.client):
        return profile(
            stage.server,
            stage.model,
            stage.samples,
            max_batch_size=largest,
            is_on_cpu=subject.is_on_cpu,
            on_progress=bench.say,
        )


def _trial(
    bench: Bench,
    subject: Subject,
    stage: Stage,
    setting: Setting,
    batcher: Batcher,
    known: Profile,
    wanted: float,
    capacity_per_s: float,
    seed: int,
) -> Trial:
    max_rows = min(64, setting.max_batch_size)
    before = speed(stage.server, stage.model, stage.samples, known, max_rows=max_rows)
    rate = min(wanted * capacity_per_s, MOST_REQUESTS_PER_S)
    streams = _streams(subject, rate)
    rounds, seconds = (1, 2.0) if bench.quick else (ROUNDS, max(SECONDS, LEAST_REQUESTS / rate))
    sent = [traffic(streams, seconds, seed + number) for number in range(rounds)]
    earlier, cpu_s = _statistics(stage), tools_machine.tree_cpu_s(stage.server.pid)
    real = [_send(stage, each, streams) for each in sent]
    later, cpu_s = _statistics(stage), tools_machine.tree_cpu_s(stage.server.pid) - cpu_s
    after = speed(stage.server, stage.model, stage.samples, known, max_rows=max_rows)
    if subject.is_on_cpu and max(before, after, 1 / before, 1 / after) > SPEED_CHANGE:
        raise NoisyRoundError(
            f"the core's speed changed: things took {before:.2f} times as long as in the profile before the load, {after:.2f} after"
        )
    costs = known.costs
    simulated = [simulate(batcher, costs, each, streams, seed=number) for number, each in enumerate(sent)]
    delta = metrics.total([later]) - metrics.total([earlier])
    return Trial(
        subject=subject.name,
        setting=setting.describe(),
        load=rate / capacity_per_s,
        rate_per_s=rate,
        requests=sum(map(len, sent)),
        p50_ms=median([each.p_ms(0.5) for each in real]),
        p99_ms=median([each.p_ms(0.99) for each in real]),
        throughput_per_s=median([each.throughput_per_s for each in real]),
        mean_batch=delta.mean_batch,
        queue_us=delta.queue_us,
        execution_us=(sum(later.batch_ns.values()) - sum(earlier.batch_ns.values())) / 1e3 / delta.executions,
        cpu_cores=cpu_s / sum(max(each.seconds, each.last_answer_s) for each in real),
        simulated_p50_ms=median([each.outcome.p_ms(0.5) for each in simulated]),
        simulated_p99_ms=median([each.outcome.p_ms(0.99) for each in simulated]),
        simulated_throughput_per_s=median([each.outcome.throughput_per_s for each in simulated]),
        simulated_mean_batch=median([each.mean_rows for each in simulated]),
        simulated_queue_us=median([each.queue_us for each in simulated]),
        simulated_execution_us=median([each.execution_us for each in simulated]),
        simulated_cpu_cores=median([each.cpu_cores for each in simulated]),
        speed=(before + after) / 2,
        p99_ms_by_class={
            stream.name: (
                round(median([each.by_stream[stream.name].p_ms(0.99) for each in real]), 2),
                round(median([each.outcome.by_stream[stream.name].p_ms(0.99) for each in simulated]), 2),
            )
            for stream in streams
        },
    )


def _send(stage: Stage, sent: Traffic, streams: Sequence[Stream]) -> Answers:
    """What came of it. Raises NoisyRoundError when the sender could not keep up."""
    real = offer(stage, sent, streams).undisturbed()
    if real.errors:
        raise NoisyRoundError(f"requests failed: {dict(real.errors)}")
    return real


def _streams(subject: Subject, rate_per_s: float) -> list[Stream]:
    return [
        Stream(
            name or "all", rate_per_s * part, rows=dict(subject.rows), caller_class=name, priority=place if name else 0
        )
        for place, (name, part) in enumerate(subject.classes.items(), start=1)
    ]


def _capacity_per_s(stage: Stage, subject: Subject, costs: Costs, setting: Setting) -> float:
    """Requests per second that the setting answers when more come than it can: measured, so that the loads are what they are
    called also where the costs are wrong.
    """
    streams = _streams(subject, min(TOO_MANY * _hoped_per_s(subject, costs, setting), MOST_SENT_PER_S))
    answers = offer(stage, traffic(streams, CAPACITY_S, seed=1), streams).answers
    return answers.answered / max(answers.seconds, answers.last_answer_s)


def _hoped_per_s(subject: Subject, costs: Costs, setting: Setting) -> float:
    """Requests per second by the costs: full batches back to back, and the cores that requests need besides."""
    size = sum(rows * part for rows, part in subject.rows.items())
    batch = setting.max_batch_size
    requests = batch / size
    execution_us = costs.execution_mean_us(batch, requests)
    each_us = costs.front_us + costs.front_row_us * size + costs.reply_us
    if costs.is_on_cpu:
        return requests / (execution_us + requests * each_us) * 1e6 * costs.cores
    cpu_us = each_us + (costs.host_us + costs.host_request_us * requests) / requests
    return min(setting.instances * requests / execution_us, costs.cores / cpu_us) * 1e6


def _statistics(stage: Stage) -> ModelStatistics:
    with Control(stage.endpoints.grpc) as control:
        return control.statistics(stage.model)[-1]


def _shown(trial: Trial) -> dict[str, Any]:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(trial).items()}
    return {
        **rounded,
        "p99_error": round(trial.p99_error, 4),
        "throughput_error": round(trial.throughput_error, 4),
    }
