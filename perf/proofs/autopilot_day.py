"""Does the autopilot carry a day on an emulated accelerator as well as the best setting with hindsight, for less?

A real day of 24 hours in 4 minutes, with bursts besides, on the real server. The best and the worst reasonable static settings are
found by replaying the same requests in simulation, and then measured as the autopilot is: same requests, same server.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from perf import day, emulated, machine
from perf.decisions import changes_of
from perf.frame import PROJECT, Bench, NoisyRoundError, Outcome
from perf.subjects import command
from tritonpilot import build, load, model_config
from tritonpilot.arrivals import Stream, Traffic, read_recording, traffic
from tritonpilot.autopilot import policy as policies
from tritonpilot.autopilot.controller import Knobs
from tritonpilot.autopilot.model import SimulatedModel
from tritonpilot.autopilot.picture import Line, png
from tritonpilot.autopilot.policy import ModelPolicy, QueueDelay
from tritonpilot.autopilot.replay import Case, Comparison, Played, capacity_per_s, compare, play
from tritonpilot.costs import Costs
from tritonpilot.load.run import BUSY_CORES
from tritonpilot.outcome import Outcome as Answered
from tritonpilot.profile import profile
from tritonpilot.setting import Setting
from tritonpilot.simulate import Batcher
from tritonpilot.stage import Stage
from tritonpilot.tune.run import batcher_of

NAME = "emulated_v100"
SLO_MS, BATCH, ROWS = 100.0, 64, 16  # a request is 16 photos: one instance answers about 170 of them a second
DAY_S = 240.0
#: Of the day, where only a part is played: about the campaign at 15 o'clock.
FIRST, LAST = 0.6, 0.65
MOST_INSTANCES = 7
STATIC_DELAYS = QueueDelay(min=0, max=20_000)  # that static settings may have
#: Every 100 minutes of the day something else sends for 12 of them, at night four times as much as all others together.
BURST = Stream("bursts", 0.001, "burst", rows=ROWS, slo_ms=SLO_MS, peak_per_s=60, every_s=40, for_s=2)
LEAST, LESS_TIME, TIMES_FEWER = 0.999, 0.25, 3.0
AS_GOOD = 0.0005  # of all requests: half of those that may be missed; what two runs of the same setting differ by
LOOK_S = 0.25
MOST_LATE_MS = 10.0
#: The delay stays 0: held executions count as busy ones in Triton's statistics, and a device as busy as that needs instances.
POLICY = f"""\
interval_s: 1
models:
  - model: {NAME}
    policy: model
    slo_ms: {SLO_MS:g}
    costs: costs.json
    instances: {{min: 1, max: {MOST_INSTANCES}}}
    headroom: 0.8
    cooldown_s: 2
    steady_s: 5
    shrink_after_s: 6
    max_changes_per_minute: 30
"""


@dataclass(frozen=True)
class Day:
    """What came of the day on the real server."""

    name: str
    answered: Answered
    instance_s: float  # stubs that were there
    instances: Sequence[float]  # by second
    delay_ms: Sequence[float]
    changes: int = 0
    decisions: Sequence[str] = ()

    @property
    def violations(self) -> int:
        return self.answered.requests - self.answered.within_slo

    def line(self, is_static: bool) -> Line:
        """For the picture."""
        missed = [second.offered - second.within_slo for second in self.answered.series]
        seconds = len(self.instances)
        missed = [*missed, *[0] * seconds][:seconds]
        return Line(self.name, self.instances, self.delay_ms, missed, is_static)

    def as_dict(self) -> dict[str, object]:
        """For the details."""
        return {
            "attainment": round(self.answered.attainment, 6),
            "violations": self.violations,
            "p99_ms": round(self.answered.p_ms(0.99), 2),
            "instance_s": round(self.instance_s, 1),
            "errors": dict(self.answered.errors),
            "changes": self.changes,
            "decisions": list(self.decisions),
        }


def autopilot_day(bench: Bench) -> Outcome:
    """The share of the day's requests that were answered within the SLO under the autopilot."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name, ExitStack() as stack:
        folder = Path(name)
        text = f"batching: {{max_batch_size: {BATCH}, queue_delay_us: 0}}\nslo: {{p99_ms: {SLO_MS:g}}}"
        service = emulated.services_of(folder, {NAME: text})[NAME]
        stage = stack.enter_context(Stage(service, folder / "models", cpus=[bench.cores.server], on_progress=bench.say))
        one = replace(Setting.of(service), queue_delay_us=500, instances=1)
        stage.apply(one)
        with machine.pinned(bench.cores.client):
            costs = profile(
                stage.server, NAME, stage.samples, max_batch_size=BATCH, is_on_cpu=False, on_progress=bench.say
            ).costs
        sent, streams = _traffic(folder, is_part=bench.quick)
        (folder / "autopilot.yaml").write_text(POLICY, encoding="utf-8")
        costs.write(folder / "costs.json")
        policy = policies.read(folder / "autopilot.yaml")
        case = _case(batcher_of(service), costs, sent, streams, policy.models[0], policy.interval_s)
        any_delay = policy.models[0].model_copy(update={"queue_delay_us": STATIC_DELAYS})
        found = compare(replace(case, policy=any_delay), {}, on_progress=bench.say)
        (config,) = [each.folder.config_text for each in build.plan([service], "auto")]
        model = SimulatedModel.of(policy.models[0], costs, model_config.parse(config, NAME))
        simulated = play(case, policy.models[0], model)

        def measured(run: Callable[[], Day]) -> Day:
            (done,) = bench.rounds(1, run, check=lambda: stage.server.check_alive())
            bench.say(f"{done.name}: {done.answered.attainment:.3%} in time, {done.instance_s:.0f} s of instances")
            return done

        statics = [
            measured(lambda: _static(bench, stage, one, knobs, kind, sent, streams))  # noqa: B023 -- called here
            for kind, knobs in (("best", found.best.first), ("worst", found.worst.first))
        ]
        ours = measured(lambda: _piloted(bench, stage, one, case.knobs, folder, sent, streams))
    return _judged(bench, ours, statics, sent, found, simulated)


def _judged(
    bench: Bench, ours: Day, statics: Sequence[Day], sent: Traffic, found: Comparison, simulated: Played
) -> Outcome:
    best, worst = statics
    saved = 1 - ours.instance_s / best.instance_s
    fewer = worst.violations / max(ours.violations, 1)
    if not bench.quick:
        drawn = [*(each.line(is_static=True) for each in statics), ours.line(is_static=False)]
        title = f"A day in {sent.seconds:g} s on an emulated V100, SLO {SLO_MS:g} ms: measured on the real server"
        (PROJECT / "perf" / "results" / "autopilot_day.png").write_bytes(png(title, sent, 1.0, drawn))
    is_as_good = ours.answered.attainment >= best.answered.attainment - AS_GOOD
    return Outcome(
        ours.answered.attainment,
        ok=is_as_good and saved >= LESS_TIME and fewer >= TIMES_FEWER,
        details={
            "requests": len(sent),
            "seconds": sent.seconds,
            "instance_time_saved": round(saved, 4),
            "times_fewer_violations_than_worst": round(fewer, 1),
            "autopilot": ours.as_dict(),
            "best_static": {"setting": found.best.first.describe(), **best.as_dict()},
            "worst_static": {"setting": found.worst.first.describe(), **worst.as_dict()},
            "simulated": {
                name: {
                    "violations": each.violations,
                    "instance_s": round(each.found.instance_s, 1),
                    "changes": each.changes,
                }
                for name, each in (("best_static", found.best), ("worst_static", found.worst), ("autopilot", simulated))
            },
            "static_settings": found.settings,
        },
    )


def _traffic(folder: Path, *, is_part: bool) -> tuple[Traffic, list[Stream]]:
    """The day with its bursts, or a part of it at the same pace."""
    recorded, seconds, bursts = day.recording(), DAY_S, BURST
    if is_part:
        recorded, seconds = day.part(recorded, folder, FIRST, LAST), DAY_S * (LAST - FIRST)
        bursts = replace(BURST, every_s=seconds / 2)
    rate_per_s = len(read_recording(recorded).at_s) / seconds
    real = Stream("day", rate_per_s, "recorded", rows=ROWS, slo_ms=SLO_MS, recording=recorded)
    streams = [real, bursts]
    return traffic(streams, seconds, seed=0), streams


def _case(
    batcher: Batcher, costs: Costs, sent: Traffic, streams: Sequence[Stream], policy: ModelPolicy, interval_s: float
) -> Case:
    """As it begins: with what serves the mean of the day."""
    case = Case(batcher, costs, sent, streams, policy, interval_s=interval_s)
    mean_per_s = len(sent) / sent.seconds
    least = next(n for n in range(1, MOST_INSTANCES + 1) if capacity_per_s(case, n) > mean_per_s)
    return replace(case, batcher=replace(batcher, instances=least))


def _static(
    bench: Bench, stage: Stage, base: Setting, knobs: Knobs, kind: str, sent: Traffic, streams: Sequence[Stream]
) -> Day:
    stage.apply(replace(base, queue_delay_us=knobs.queue_delay_us, instances=knobs.instances))
    with _counted(stage) as seen:
        answered = _send(bench, stage, sent, streams, may_be_behind=kind == "worst")
    by_second = _by_second(seen, sent.seconds)
    return Day(f"{kind} static", answered, sum(by_second), by_second, [knobs.queue_delay_us / 1e3] * len(by_second))


def _piloted(
    bench: Bench,
    stage: Stage,
    base: Setting,
    first: Knobs,
    folder: Path,
    sent: Traffic,
    streams: Sequence[Stream],
) -> Day:
    stage.restart()  # the stage does not know what an earlier round has changed
    stage.apply(replace(base, queue_delay_us=first.queue_delay_us, instances=first.instances))
    endpoints = stage.endpoints
    argv = ["--triton-grpc", endpoints.grpc, "--metrics", endpoints.metrics, "--port", "0"]
    state = Path(tempfile.mkdtemp(prefix="state-", dir=folder))
    with (
        machine.pinned(bench.cores.client),
        command("autopilot", [str(folder / "autopilot.yaml"), "--state", str(state), *argv]),
        _counted(stage) as seen,
    ):
        began = time.time()
        answered = _send(bench, stage, sent, streams)
    changes = changes_of(state, began)
    by_second = _by_second(seen, sent.seconds)
    delays_us = [
        next(
            (each["now"]["queue_delay_us"] for at_s, each in reversed(changes) if at_s <= second), first.queue_delay_us
        )
        for second in range(len(by_second))
    ]
    return Day(
        "autopilot",
        answered,
        sum(by_second),
        by_second,
        [each / 1e3 for each in delays_us],
        changes=len(changes),
        decisions=[f"{at_s:.0f} s: {each['said']}" for at_s, each in changes],
    )


def _send(
    bench: Bench, stage: Stage, sent: Traffic, streams: Sequence[Stream], *, may_be_behind: bool = False
) -> Answered:
    """What came of it. Raises NoisyRoundError when the sender was late by what counts beside the SLO.

    One that waits for connections because the server is behind (`may_be_behind`) is not the cause, as long as it has CPU time.
    """
    answered, facts = load.run(
        load.Target(stage.endpoints.http, "http"),
        stage.model,
        stage.samples,
        sent,
        streams,
        cpus=[bench.cores.client],
        on_progress=bench.say,
    )
    # The autopilot shares the sender's core, as it would a server's; latencies count from the scheduled times even so.
    is_excused = may_be_behind and facts.busiest_core <= BUSY_CORES
    if facts.schedule_p99_ms > MOST_LATE_MS and not is_excused and not bench.quick:
        raise NoisyRoundError(facts.reason)
    return answered


@contextmanager
def _counted(stage: Stage) -> Iterator[list[tuple[float, int]]]:
    """How many instances there are, from moment to moment, by the processes that they are."""
    seen: list[tuple[float, int]] = []
    stop = threading.Event()
    pid, began = stage.server.pid, time.monotonic()

    def look() -> None:
        while not stop.wait(LOOK_S):
            seen.append((time.monotonic() - began, len(machine.stub_pids(pid).get(NAME, ()))))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def _by_second(seen: Sequence[tuple[float, int]], seconds: float) -> list[float]:
    """The mean number of instances in each second of the load."""
    found: list[float] = []
    for second in range(int(seconds)):
        counts = [count for at_s, count in seen if second <= at_s < second + 1]
        found.append(sum(counts) / len(counts) if counts else (found[-1] if found else 0.0))
    return found
