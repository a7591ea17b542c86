"""Do changes of a serving model hurt those who use it? Instances come and go and the delay changes, again and again, under load.

The same load twice: first to a model that nobody touches, then while it is changed. Afterwards a few changes of the delay by a
reload, which is what the live delay saves.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from perf.frame import PROJECT, Bench, NoisyRoundError, Outcome, median, spread
from perf.subjects import services
from tritonpilot import load
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.autopilot.act import Actor
from tritonpilot.autopilot.terms import Knobs, Way
from tritonpilot.errors import MeasurementError, ServerError
from tritonpilot.load.run import BUSY_CORES
from tritonpilot.outcome import Outcome as Answers
from tritonpilot.setting import Setting
from tritonpilot.stage import Stage

CHANGES, QUICK_CHANGES = 100, 5
ROUNDS, ROUND_S = 4, 18.0  # of each of the two loads of a round
QUICK_ROUND_S = 8.0
RATE_PER_S = 300.0
REST_S = 0.1  # between changes
SETTLED_S = 5.0
SENDERS = 2  # processes, so that this one is free to change things
#: One cycle: up, live, down, live, two up, live, two down, live.
CYCLE = (
    Knobs(0, 2), Knobs(2000, 2), Knobs(2000, 1), Knobs(500, 1), Knobs(500, 2), Knobs(500, 3), Knobs(1000, 3), Knobs(1000, 2),
    Knobs(1000, 1), Knobs(0, 1),
)  # fmt: skip
RELOADS = (Knobs(500, 1), Knobs(1000, 1))


@dataclass(frozen=True)
class Round:
    """A load while nothing was changed and one while something was."""

    steady: Answers
    changed: Answers
    took_s: dict[str, list[float]] = field(
        default_factory=dict
    )  # kind of change -> from the call until it was verified

    @property
    def ratio(self) -> float:
        return self.changed.p_ms(0.99) / self.steady.p_ms(0.99)

    @property
    def failed(self) -> int:
        return sum(self.changed.errors.values())

    @property
    def unsettled_s(self) -> int:
        """The most seconds in a row with a P99 above 1.5 of the steady one."""
        limit, run, most = 1.5 * self.steady.p_ms(0.99), 0, 0
        for second in self.changed.series:
            run = run + 1 if second.p99_ms > limit else 0
            most = max(most, run)
        return most


def changes_under_load(bench: Bench) -> Outcome:
    """P99 during changes, of the P99 of a load without; no request may fail, and every change is verified within 5 s."""
    service = services(["ctr"])["ctr"]
    with Stage(service, PROJECT / "models", on_progress=bench.say) as stage:
        stage.apply(replace(Setting.of(service), queue_delay_us=0))
        with Actor(
            stage.endpoints.grpc,
            stage.server.control_key,
            metrics=stage.endpoints.metrics,
            repository=stage.server.repository,
            on_progress=bench.say,
        ) as actor:
            rounds = bench.rounds(
                1 if bench.quick else ROUNDS,
                lambda: _round(bench, stage, actor, itertools.cycle(CYCLE)),
                check=stage.server.check_alive,
            )
            actor.apply(stage.model, Knobs(0, 1))
            (reloads,) = bench.rounds(
                1,
                lambda: _round(bench, stage, actor, itertools.cycle(RELOADS), "reload"),
                check=stage.server.check_alive,
            )
    took = {kind: [s for each in rounds for s in each.took_s[kind]] for kind in rounds[0].took_s}
    done = sum(map(len, took.values()))
    slowest_s = max(max(every, default=0.0) for every in took.values())
    failed = sum(each.failed for each in rounds)
    unsettled_s = max(each.unsettled_s for each in rounds)
    ratios = [each.ratio for each in rounds]
    is_enough = done >= (QUICK_CHANGES if bench.quick else CHANGES)
    return Outcome(
        median(ratios),
        spread=spread(ratios),
        rounds=len(rounds),
        ok=is_enough and failed == 0 and max(slowest_s, unsettled_s) < SETTLED_S,
        details={
            "changes": done,
            "failed": failed,
            "requests": sum(each.changed.requests for each in rounds),
            "steady_p99_ms": [round(each.steady.p_ms(0.99), 2) for each in rounds],
            "during_p99_ms": [round(each.changed.p_ms(0.99), 2) for each in rounds],
            "during_max_ms": round(max(each.changed.p_ms(1.0) for each in rounds), 1),
            "verified_s": {kind: _figures(every) for kind, every in took.items()},
            "slow_seconds_in_a_row": unsettled_s,
            "delay_by_reload": {
                "verified_s": _figures(reloads.took_s["delay"]),
                "failed": dict(reloads.changed.errors),
                "steady_p99_ms": round(reloads.steady.p_ms(0.99), 2),
                "during_p99_ms": round(reloads.changed.p_ms(0.99), 2),
                "during_max_ms": round(reloads.changed.p_ms(1.0), 1),
            },
        },
    )


def _round(bench: Bench, stage: Stage, actor: Actor, targets: Iterable[Knobs], way: Way = "") -> Round:
    """A load, and one while the model goes from one target to the next."""
    steady = _load(bench, stage)
    took: dict[str, list[float]] = {"up": [], "down": [], "delay": []}
    trouble: list[ServerError] = []
    is_over = threading.Event()

    def change() -> None:
        now = actor.knobs(stage.model)
        for target in targets:
            if is_over.is_set():
                return
            kind = (
                "delay" if target.instances == now.instances else "up" if target.instances > now.instances else "down"
            )
            began = time.monotonic()
            try:
                now = actor.apply(stage.model, target, way)
            except ServerError as error:
                trouble.append(error)
                return
            took[kind].append(time.monotonic() - began)
            is_over.wait(REST_S)

    changer = threading.Thread(target=change, daemon=True)
    changer.start()
    try:
        changed = _load(bench, stage)
    finally:
        is_over.set()
        changer.join()
    if trouble:
        raise MeasurementError(
            f"A change failed under load: {trouble[0]} Nothing is reported. Look at the server's log."
        )
    actor.apply(stage.model, Knobs(0, 1))
    return Round(steady, changed, took)


def _load(bench: Bench, stage: Stage) -> Answers:
    """One-row requests at random times."""
    streams = [Stream(name="callers", rate_per_s=RATE_PER_S)]
    arrivals = traffic(streams, QUICK_ROUND_S if bench.quick else ROUND_S, seed=1)
    answers, sender = load.run(
        load.Target(stage.endpoints.http, "http"), stage.model, stage.samples, arrivals, streams, processes=SENDERS
    )
    stage.server.check_alive()
    if sender.busiest_core > BUSY_CORES:
        raise NoisyRoundError(f"the sender was the limit: {sender.reason}")
    return answers


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    """How many, and how long they took."""
    if not seconds:
        return {"changes": 0}
    return {"changes": len(seconds), "median": round(median(seconds), 2), "most": round(max(seconds), 2)}
