"""What would the autopilot have made of this traffic, and what the best and the worst settings that never change?

    case = Case(batcher, costs, traffic, streams, policy, interval_s=5)
    played = play(case, policy)                       # the same `decide` as live, on a simulated Triton
    comparison = compare(case)                        # beside static settings and the other policies
    comparison.best.violations, comparison.table()

Nothing waits: a day of traffic takes as long as its requests take to simulate, a second per million.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.autopilot import controller
from tritonpilot.autopilot.controller import Decision, Knobs, Model, Observation, State
from tritonpilot.autopilot.model import SimulatedModel
from tritonpilot.autopilot.policy import ModelPolicy
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.outcome import Outcome
from tritonpilot.simulate import Batcher, Run, Simulated, Window

Policies = Literal["model", "feedback", "queue_depth"]
DELAYS_US = (0, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
PROMISE = 0.999  # of the requests, that a static setting has to answer in time to be called good enough
MOST_STATIC = 400  # static settings that are tried; of more, only every so many numbers of instances


@dataclass(frozen=True)
class Case:
    """Traffic and the server that it comes to. `policy` has the bounds, `batcher` the settings at the beginning.

    An instance serves `start_s` after it is asked for; a reload takes `reload_s`, a change of the delay at run time no time. P99
    is seen over the interval, or over `p99_over_s` where that is longer, as in Triton's summaries.
    """

    batcher: Batcher
    costs: Costs
    traffic: Traffic
    streams: Sequence[Stream]
    policy: ModelPolicy
    interval_s: float = 5.0
    start_s: float = 0.5
    reload_s: float = 1.5
    p99_over_s: float = 0.0
    seed: int = 0

    @property
    def knobs(self) -> Knobs:
        """What is set at the beginning: what the batcher has, within the bounds of the instances."""
        bounds = self.policy.instances
        return Knobs(
            queue_delay_us=self.batcher.queue_delay_us,
            instances=min(max(self.batcher.instances, bounds.min), bounds.max),
            max_queue_sizes={
                level.name: level.max_queue_size
                for level in self.batcher.levels
                if level.name in self.policy.max_queue_sizes
            },
        )


@dataclass(frozen=True)
class Step:
    """An interval: what was seen at its end, and what was decided then."""

    seen: Observation
    decision: Decision


@dataclass(frozen=True)
class Played:
    """What came of one way to set the server."""

    name: str
    first: Knobs
    found: Simulated
    missed: Sequence[int] = field(repr=False)  # requests due in each interval that were not answered in time
    steps: Sequence[Step] = field(default=(), repr=False)

    @property
    def outcome(self) -> Outcome:
        return self.found.outcome

    @property
    def violations(self) -> int:
        """Requests that were not answered within the SLO: late, refused or failed."""
        return self.outcome.requests - self.outcome.within_slo

    @property
    def changes(self) -> int:
        return sum(step.decision.target is not None for step in self.steps)

    def row(self) -> dict[str, Any]:
        """The figures of the table."""
        return {
            "name": self.name,
            "attainment": self.outcome.attainment,
            "violations": self.violations,
            "p99_ms": self.outcome.p_ms(0.99),
            "instance_s": self.found.instance_s,
            "instances": self.found.instance_s / self.outcome.answering_s,
            "changes": self.changes,
        }


@dataclass(frozen=True)
class Comparison:
    """The best static setting with hindsight, the worst reasonable one, and policies."""

    best: Played
    worst: Played
    policies: Sequence[Played]
    settings: int  # static ones that were tried

    @property
    def all(self) -> list[Played]:
        return [self.best, self.worst, *self.policies]

    def rows(self) -> list[dict[str, Any]]:
        """A row each, with what it saves against the best static setting."""
        spent = self.best.found.instance_s
        return [{**each.row(), "saved": 1 - each.found.instance_s / spent} for each in self.all]


def play(case: Case, policy: ModelPolicy, model: Model | None = None, name: str = "") -> Played:
    """Let a policy set the server, interval by interval. `model` is what `policy: model` asks."""
    knobs = case.knobs
    run = _run(case, knobs, policy.instances.max)
    state, steps = State(), []
    pending: tuple[float, Knobs] | None = None  # a reload, and when it is over
    recent: deque[Window] = deque()
    for end_s in _ends(case):
        if pending is not None and pending[0] <= end_s:
            run.advance(pending[0])
            _set(run, pending[1], case.start_s)
            pending = None
        run.advance(end_s)
        recent.append(run.look())
        while len(recent) > 1 and recent[-1].to_s - recent[1].from_s >= max(case.p99_over_s, case.interval_s):
            recent.popleft()
        seen = _observed(case, policy, knobs, recent)
        state, decision = controller.decide(policy, state, seen, model)
        if decision.target is not None:
            knobs = decision.target
            if decision.way == "reload":
                pending = (end_s + case.reload_s, knobs)
            else:
                _set(run, knobs, case.start_s)
            state = controller.after(state, decision, knobs, end_s)
        steps.append(Step(seen, decision))
    found = run.finish()
    return Played(name or policy.policy, case.knobs, found, _missed(case, run), steps)


def static(case: Case, knobs: Knobs, name: str = "") -> Played:
    """A setting that never changes."""
    run = _run(case, knobs, knobs.instances)
    found = run.finish()
    return Played(name or f"static: {knobs.describe()}", knobs, found, _missed(case, run))


def compare(
    case: Case,
    policies: Mapping[str, Model | None],
    *,
    on_progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Static settings within the bounds of the policy, and the policies of these names.

    The best with hindsight is the one with the fewest instances of those that answer PROMISE of all requests in time, else the one
    with the fewest violations; the worst reasonable one has the most violations of those whose capacity is above the mean load.
    Raises SpecError where no setting's is.
    """
    say = on_progress or (lambda _: None)
    every = [static(case, knobs) for knobs in settings(case)]
    mean_per_s = len(case.traffic) / case.traffic.seconds
    reasonable = [each for each in every if capacity_per_s(case, each.first.instances) > mean_per_s]
    if not reasonable:
        raise SpecError(
            f"{case.policy.instances.max} instances cannot serve the mean of this traffic, {len(case.traffic):,} requests in "
            f"{case.traffic.seconds:g} s. Nothing is compared. Raise instances.max, or replay less traffic."
        )
    best, worst = best_of(every), max(reasonable, key=lambda each: each.violations)
    say(f"{len(every)} static settings: the best is {best.first.describe()}, with {best.violations} violations")
    played = []
    for name, model in policies.items():
        played.append(play(case, case.policy.model_copy(update={"policy": name}), model, name))
        say(f"{name}: {played[-1].violations} violations, {played[-1].changes} changes")
    return Comparison(
        replace(best, name=f"best static: {best.first.describe()}"),
        replace(worst, name=f"worst static: {worst.first.describe()}"),
        played,
        len(every),
    )


def best_of(every: Sequence[Played]) -> Played:
    """The best of static settings: see `compare`."""
    good = [each for each in every if each.outcome.attainment >= PROMISE]
    if not good:
        return min(every, key=lambda each: (each.violations, each.first.instances, each.first.queue_delay_us))
    fewest = min(each.first.instances for each in good)
    return min(
        (each for each in good if each.first.instances == fewest),
        key=lambda each: (each.violations, each.first.queue_delay_us),
    )


def settings(case: Case) -> list[Knobs]:
    """Static settings: every number of instances with every delay that the policy allows (without bounds, the present one)."""
    now, instances, delay = case.knobs, case.policy.instances, case.policy.queue_delay_us
    delays = {now.queue_delay_us}
    if delay is not None:
        delays = {delay.min, delay.max, *(each for each in DELAYS_US if delay.min <= each <= delay.max)}
    counts = range(instances.min, instances.max + 1)
    step = math.ceil(len(counts) * len(delays) / MOST_STATIC)
    return [
        replace(now, instances=count, queue_delay_us=delay_us)
        for count, delay_us in itertools.product(sorted({*counts[::step], instances.max}), sorted(delays))
    ]


def capacity_per_s(case: Case, instances: int) -> float:
    """Requests of this traffic that so many instances can answer in a second, at most."""
    return SimulatedModel(case.costs, case.batcher, math.inf).capacity_per_s(instances, float(case.traffic.rows.mean()))


def _run(case: Case, knobs: Knobs, most: int) -> Run:
    batcher = replace(case.batcher, queue_delay_us=knobs.queue_delay_us, instances=knobs.instances)
    return Run(batcher, case.costs, case.traffic, case.streams, case.seed, most_instances=max(most, knobs.instances))


def _set(run: Run, knobs: Knobs, start_s: float) -> None:
    run.change(
        queue_delay_us=knobs.queue_delay_us,
        instances=knobs.instances,
        max_queue_sizes=knobs.max_queue_sizes,
        start_s=start_s,
    )


def _observed(case: Case, policy: ModelPolicy, knobs: Knobs, recent: Sequence[Window]) -> Observation:
    """What the autopilot would have seen of a Triton in the last of these intervals."""
    window = recent[-1]
    seconds = window.seconds
    executions = sum(window.batch_sizes.values())
    rows = sum(size * count for size, count in window.batch_sizes.items())
    classes: dict[str, float] = {}
    for stream in case.streams:
        if stream.caller_class:
            classes[stream.caller_class] = (
                classes.get(stream.caller_class, 0.0) + window.by_stream[stream.name] / seconds
            )
    latencies = np.concatenate([each.latency_ms for each in recent])
    return Observation(
        at_s=window.to_s,
        seconds=seconds,
        knobs=knobs,
        arrivals_per_s=window.arrived / seconds,
        rows_per_request=window.rows / window.arrived if window.arrived else math.nan,
        answered_per_s=window.answered / seconds,
        refused_per_s=window.refused / seconds,
        failed_per_s=window.failed / seconds,
        waiting=float(window.waiting),
        queue_us=window.queue_us,
        mean_batch=rows / executions if executions else math.nan,
        batch_sizes={size: count / seconds for size, count in window.batch_sizes.items()},
        p99_ms=float(np.quantile(latencies, 0.99)) if len(latencies) else None,
        utilisation=window.busy_us / 1e6 / (knobs.instances * seconds),
        arrivals_by_class=classes,
        p99_over_s=case.p99_over_s if case.p99_over_s > case.interval_s else 0.0,
        max_batch_size=case.batcher.max_batch_size,
        delay_is_live=policy.delay_by == "live",
    )


def _ends(case: Case) -> list[float]:
    """The end of each interval, s."""
    found = np.arange(case.interval_s, case.traffic.seconds, case.interval_s)
    return [*found.tolist(), case.traffic.seconds]


def _missed(case: Case, run: Run) -> list[int]:
    """How many requests of each interval were not answered in time."""
    latency_us, code = run.latencies()
    slo_us = np.array([stream.slo_ms for stream in case.streams])[case.traffic.stream] * 1e3
    at_s = case.traffic.at_s[(code != 0) | ~(latency_us <= slo_us)]
    edges = np.searchsorted(at_s, [0.0, *_ends(case)[:-1], np.inf])
    return [int(count) for count in np.diff(edges)]
