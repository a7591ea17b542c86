"""Does the autopilot serve `ctr` on the CPU as well as the best static setting, phase by phase? On the real server, open loop.

Low, medium and high traffic and bursts follow each other. Each phase has its time to be found, and then a window that is judged.
Static settings are given the very requests of each window, before and the best of them also after.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from perf import machine
from perf.decisions import changes_of
from perf.frame import PROJECT, Bench, NoisyRoundError, Outcome
from perf.offer import highest_rate, offer
from perf.subjects import command, part, services
from tritonpilot import build
from tritonpilot.arrivals import Stream, Traffic, traffic
from tritonpilot.autopilot.model import SimulatedModel
from tritonpilot.costs import Costs
from tritonpilot.load.run import BUSY_CORES
from tritonpilot.outcome import Outcome as Answered
from tritonpilot.profile import profile
from tritonpilot.setting import Setting
from tritonpilot.stage import Stage
from tritonpilot.tune.run import batcher_of

SERVICE, CLASS, SLO_MS, ROWS = "ctr", "realtime", 20.0, 16  # with smaller requests the sender would be the limit
FIND_S, WINDOW_S = 30.0, 10.0
RATE_S, RATE_STEP = 3.0, 1.1  # of the search for the highest rate
STEADY_CHANGES_S = 60.0  # one change within it is no oscillation
#: Of the highest rate that keeps the SLO, which drifts with the machine.
SHARES = {"low": 0.1, "medium": 0.5, "high": 0.8}
BURST_BASE, BURST_PEAK, BURST_EVERY_S, BURST_FOR_S = 0.2, 0.8, 2.5, 0.5
DELAYS_US, INSTANCES = (0, 5000, 20_000), (1, 2)
FIRST_DELAY_US, FIRST_INSTANCES = 20_000, 2  # where the autopilot begins: a setting that keeps the SLO in no phase
WORSE = 0.9
LATE_OF_SLO = 0.1  # that the sender may be late with one of a hundred requests
RETRIES = 3
NICE = 15  # the autopilot shares its core with the sender of the load, which must not wait for it
POLICY = f"""\
interval_s: 2
models:
  - model: {SERVICE}
    policy: model
    slo_ms: {SLO_MS:g}
    costs: costs.json
    instances: {{min: {INSTANCES[0]}, max: {INSTANCES[-1]}}}
    queue_delay_us: {{min: {DELAYS_US[0]}, max: {DELAYS_US[-1]}}}
    cooldown_s: 10
    shrink_after_s: 20
"""


Static = tuple[int, int]  # instances and queue delay, us


@dataclass(frozen=True)
class Phase:
    """One kind of traffic; `window` holds the requests that are judged, from 0 s on."""

    name: str
    stream: Stream
    found: Traffic  # while its setting is sought
    window: Traffic

    @property
    def seconds(self) -> float:
        return self.found.seconds + self.window.seconds


def autopilot_phases(bench: Bench) -> Outcome:
    """Requests answered in time under the autopilot, divided by those under the best static setting; the worst of the phases."""
    build.prepare(list(services([SERVICE]).values()), "auto", bench.say)
    service = part(SERVICE)
    base = replace(Setting.of(service), threads=1)
    with (
        tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name,
        Stage(service, PROJECT / "models", cpus=[bench.cores.server], on_progress=bench.say) as stage,
    ):
        folder = Path(name)
        stage.apply(replace(base, queue_delay_us=500, instances=1))
        with machine.pinned(bench.cores.client):
            costs = profile(
                stage.server,
                SERVICE,
                stage.samples,
                max_batch_size=base.max_batch_size,
                passes=1 if bench.quick else 3,
                on_progress=bench.say,
            ).costs
        model = SimulatedModel(costs, batcher_of(service), SLO_MS)
        capacity_per_s = model.capacity_per_s(1, ROWS)
        rate_per_s = capacity_per_s / 2 if bench.quick else _highest(bench, stage, base, capacity_per_s)
        phases = _phases(rate_per_s, is_quick=bench.quick)
        bench.say(f"the highest rate is about {rate_per_s:.0f} requests/s")
        first = _statics(bench, stage, base, phases, _grid(is_quick=bench.quick))
        (piloted,) = bench.rounds(
            1, lambda: _piloted(bench, stage, base, costs, folder, phases), check=lambda: stage.server.check_alive()
        )
        # Minutes lie between, and the best of many measurements was lucky too: the best of each phase are measured again.
        best = {max(shares.items(), key=lambda item: item[1])[0] for shares in first.values()}
        again = _statics(bench, stage, base, phases, sorted(best))
    return _judged(rate_per_s, phases, first, again, piloted)


@dataclass(frozen=True)
class Piloted:
    """What came of all phases under the autopilot: the share of each window in time, and its changes."""

    shares: Mapping[str, float]
    changes: Sequence[tuple[float, str]]  # s since the load began, and what the log says


def _judged(
    rate_per_s: float,
    phases: Sequence[Phase],
    first: Mapping[str, Mapping[Static, float]],
    again: Mapping[str, Mapping[Static, float]],
    piloted: Piloted,
) -> Outcome:
    means = {
        phase.name: {knobs: (first[phase.name][knobs] + share) / 2 for knobs, share in again[phase.name].items()}
        for phase in phases
    }
    best = {name: max(shares.items(), key=lambda item: item[1]) for name, shares in means.items()}
    ratios = {phase.name: piloted.shares[phase.name] / best[phase.name][1] for phase in phases}
    begins = itertools.accumulate((phase.seconds for phase in phases), initial=0.0)
    late = {
        phase.name: [at_s for at_s, _ in piloted.changes if begin + phase.found.seconds <= at_s < begin + phase.seconds]
        for phase, begin in zip(phases, begins, strict=False)
    }
    is_calm = all(
        later - sooner >= STEADY_CHANGES_S
        for times in late.values()
        for sooner, later in itertools.pairwise(sorted(times))
    )
    return Outcome(
        min(ratios.values()),
        # Where the first setting were as good as any, nothing would have been found.
        ok=is_calm and all(shares[FIRST_INSTANCES, FIRST_DELAY_US] < WORSE for shares in first.values()),
        details={
            "highest_rate_per_s": round(rate_per_s, 1),
            "changes_in_windows": {name: len(times) for name, times in late.items()},
            "phases": {
                phase.name: {
                    "share_of_best_static": round(ratios[phase.name], 4),
                    "in_time": round(piloted.shares[phase.name], 4),
                    "best_static": _shown(*best[phase.name][0]),
                    "best_static_in_time": round(best[phase.name][1], 4),
                    "static_in_time": {_shown(*knobs): round(share, 4) for knobs, share in first[phase.name].items()},
                    "static_in_time_after": {
                        _shown(*knobs): round(share, 4) for knobs, share in again[phase.name].items()
                    },
                }
                for phase in phases
            },
            "changes": [f"{at_s:.0f} s: {said}" for at_s, said in piloted.changes],
        },
    )


def _highest(bench: Bench, stage: Stage, base: Setting, capacity_per_s: float) -> float:
    """The highest rate that one instance without delay keeps the SLO at, about."""
    stage.apply(replace(base, queue_delay_us=0, instances=1))

    def keeps(rate_per_s: float) -> bool:
        stream = _stream(rate_per_s)
        answered = offer(stage, traffic([stream], RATE_S, seed=5), [stream], cpus=[bench.cores.client]).answers
        bench.say(f"{rate_per_s:.0f} requests/s: {answered.attainment:.2%} in time")
        return answered.attainment >= 0.99

    return highest_rate(keeps, 0.8 * capacity_per_s, step=RATE_STEP)


def _stream(rate_per_s: float) -> Stream:
    return Stream("callers", rate_per_s, rows=ROWS, caller_class=CLASS, priority=1, slo_ms=SLO_MS)


def _phases(rate_per_s: float, *, is_quick: bool) -> list[Phase]:
    streams = {name: _stream(rate_per_s * share) for name, share in SHARES.items()}
    streams["burst"] = replace(
        _stream(rate_per_s * BURST_BASE),
        arrivals="burst",
        peak_per_s=rate_per_s * BURST_PEAK,
        every_s=BURST_EVERY_S,
        for_s=BURST_FOR_S,
    )
    if is_quick:
        streams = {name: streams[name] for name in ("low", "high")}
    find_s, window_s = (10.0, 4.0) if is_quick else (FIND_S, WINDOW_S)
    return [
        Phase(name, stream, traffic([stream], find_s, seed=2 * place), traffic([stream], window_s, seed=2 * place + 1))
        for place, (name, stream) in enumerate(streams.items())
    ]


def _grid(*, is_quick: bool) -> list[Static]:
    if is_quick:
        return [(1, 0), (FIRST_INSTANCES, FIRST_DELAY_US)]
    return list(itertools.product(INSTANCES, DELAYS_US))


def _statics(
    bench: Bench, stage: Stage, base: Setting, phases: Sequence[Phase], grid: Sequence[Static]
) -> dict[str, dict[Static, float]]:
    """The share in time of each phase's window, with every static setting."""
    stage.restart()  # the stage does not know what an earlier round has changed
    found: dict[str, dict[Static, float]] = {phase.name: {} for phase in phases}
    for instances, delay_us in grid:
        stage.apply(replace(base, queue_delay_us=delay_us, instances=instances))

        def one() -> dict[str, float]:
            return {phase.name: _sent(bench, stage, phase.window, phase.stream).attainment for phase in phases}

        (shares,) = bench.rounds(1, one, check=lambda: stage.server.check_alive())
        shown = _shown(instances, delay_us)
        bench.say(f"{shown}: {', '.join(f'{name} {share:.2%}' for name, share in shares.items())} in time")
        for name, share in shares.items():
            found[name][instances, delay_us] = share
    return found


def _piloted(bench: Bench, stage: Stage, base: Setting, costs: Costs, folder: Path, phases: Sequence[Phase]) -> Piloted:
    stage.restart()  # the stage does not know what an earlier round has changed
    stage.apply(replace(base, queue_delay_us=FIRST_DELAY_US, instances=FIRST_INSTANCES))
    (folder / "autopilot.yaml").write_text(POLICY, encoding="utf-8")
    costs.write(folder / "costs.json")
    state = Path(tempfile.mkdtemp(prefix="state-", dir=folder))
    endpoints = stage.endpoints
    argv = ["--triton-grpc", endpoints.grpc, "--metrics", endpoints.metrics, "--port", "0", "--state", str(state)]
    sent, places = _joined(phases)
    with (
        machine.pinned(bench.cores.client),
        command("autopilot", [str(folder / "autopilot.yaml"), *argv]) as (_, process),
    ):
        os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        began = time.time()
        answered = _sent(bench, stage, sent, *(phase.stream for phase in places))
    changes = [(at_s, str(each["said"])) for at_s, each in changes_of(state, began)]
    shares = {
        phase.name: answered.by_stream[stream.name].attainment
        for phase, stream in zip(phases, (each.stream for each in places[1::2]), strict=True)
    }
    for at_s, said in changes:
        bench.say(f"{at_s:.0f} s: {said}")
    bench.say(f"autopilot: {', '.join(f'{name} {share:.2%}' for name, share in shares.items())} in time")
    return Piloted(shares, changes)


def _joined(phases: Sequence[Phase]) -> tuple[Traffic, list[Phase]]:
    """All phases one after the other; the traffic of each that is sought for, and its window, is a stream of its own."""
    places: list[Phase] = []
    at_s, rows, stream, begin = [], [], [], 0.0
    for phase in phases:
        for kind, each in (("found", phase.found), ("window", phase.window)):
            at_s.append(each.at_s + begin)
            rows.append(each.rows)
            stream.append(np.full(len(each), len(places), dtype=np.int16))
            places.append(replace(phase, stream=replace(phase.stream, name=f"{phase.name}_{kind}")))
            begin += each.seconds
    return Traffic(np.concatenate(at_s), np.concatenate(rows), np.concatenate(stream), begin), places


def _sent(bench: Bench, stage: Stage, arrivals: Traffic, *streams: Stream) -> Answered:
    """What came of it. Raises NoisyRoundError when the sender was so late that it counts beside the SLO."""
    offered = offer(stage, arrivals, streams, cpus=[bench.cores.client])
    sender = offered.sender
    if (sender.schedule_p99_ms > LATE_OF_SLO * SLO_MS or sender.busiest_core > BUSY_CORES) and not bench.quick:
        raise NoisyRoundError(f"the sender was the limit: {sender.reason}")
    return offered.answers


def _shown(instances: int, delay_us: int) -> str:
    return f"{instances} x, {delay_us} us"
