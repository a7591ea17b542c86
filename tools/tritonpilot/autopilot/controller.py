"""Which queue delay, how many instances and which class limits should a model have now? Pure: no clock, no I/O.

state, decision = decide(policy, state, observation, model)      # once an interval
state = after(state, decision, knobs, observation.at_s)          # what is true once the decision was carried out
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tritonpilot.autopilot import choose
from tritonpilot.autopilot.choose import Outlook, Wish, lost_of, slo_of
from tritonpilot.autopilot.policy import ModelPolicy
from tritonpilot.autopilot.state import MOST_SAMPLES, SAME_LOAD, Avoided, Sample, State, Trial, is_close
from tritonpilot.autopilot.terms import Action, Decision, Demand, Knobs, Model, Observation, Prediction, Way

__all__ = [
    "Action", "Decision", "Demand", "Knobs", "Model", "Observation", "Prediction", "State", "Way", "after", "decide",
]  # fmt: skip

MINUTE_S = 60.0
TAIL = 3.0  # P99 of the time in the queue, in means of it: between a constant time (1) and an exponential one (4.6)
WORSE_LOST, WORSE_LATE = (
    0.02,
    1.3,
)  # a change that loses so much more, or is so much later and beyond the SLO, is taken back
HELPED = 1.03  # times as many answers, or as much sooner: what an instance more has to bring when the SLO is broken
LEARN_FROM = 100  # answers of an interval, before its figures correct the model
SURE = 3.0  # standard deviations of Poisson arrivals that a rise exceeds which is none of chance
SETTLED = 0.5  # of an interval after a change, before one begins that tells of it
FAILED_REST_S, FAILED_AVOID_S = 15.0, 600.0  # after a change that could not be made
FACTOR_LEAST, FACTOR_MOST = 0.5, 2.5


def decide(policy: ModelPolicy, state: State, seen: Observation, model: Model | None = None) -> tuple[State, Decision]:
    """What to do after one interval. Growing is never put off by a cool-down; whatever is not known keeps what is there."""
    if policy.policy == "off":
        return replace(state, wanted=seen.knobs, trial=None), Decision("keep", reason="the policy is off")
    state = replace(state, has_restarted=state.has_restarted or seen.restarted)
    if seen.problem:
        return state, Decision("keep", reason=f"nothing is changed: {seen.problem}")
    state = _remember(policy, state, seen)
    state, settled = _settle(policy, state, seen)
    if settled is not None:
        return state, settled
    if seen.at_s < state.paused_until_s:
        left_s = state.paused_until_s - seen.at_s
        return state, Decision("keep", reason=f"{state.pause}; what is there is left alone for {left_s:.0f} s more")
    inside = _within(policy, seen.knobs)
    if inside != seen.knobs:
        wish = Wish(inside, f"{seen.knobs.describe()} is outside the bounds", is_urgent=True)
        return _gate(policy, state, seen, wish)
    if policy.policy == "queue_depth":
        return _gate(policy, state, seen, choose.by_queue_depth(policy, seen.knobs, seen))
    if policy.slo_ms is None:
        return state, Decision("keep", reason="no SLO is known: neither the policy nor the model's config says one")
    state, reverted = _judge(policy, state, seen)
    if reverted is not None:
        return state, reverted
    if policy.policy == "model" and model is not None:
        state = _learn(policy, state, seen, model)
    demand = _demand(policy, state, seen)
    wish = _wish(policy, state, seen, demand, model)
    return _gate(policy, state, seen, wish)


def after(state: State, decision: Decision, knobs: Knobs, at_s: float) -> State:
    """What is true once a decision was carried out, or was not: `knobs` is what the server has now.

    A target that could not be reached is tried again after a pause, which doubles.
    """
    if decision.target is None:
        return state
    if same(knobs, decision.target):
        done_s = (*state.changed_s[:-1], at_s)  # a change may have taken seconds
        trial = None if state.trial is None else replace(state.trial, at_s=at_s)
        return replace(state, wanted=knobs, previous=None, failures=0, changed_s=done_s, trial=trial)
    return state.failed(decision.target, knobs, at_s, FAILED_REST_S, FAILED_AVOID_S)


def same(one: Knobs, other: Knobs) -> bool:
    """Whether two settings are the same, as far as both say."""
    shared = set(one.max_queue_sizes) & set(other.max_queue_sizes)
    return (one.queue_delay_us, one.instances) == (other.queue_delay_us, other.instances) and all(
        one.max_queue_sizes[name] == other.max_queue_sizes[name] for name in shared
    )


def _remember(policy: ModelPolicy, state: State, seen: Observation) -> State:
    """With this interval, without what is over. A clock that went back says nothing of what was before."""
    if state.samples and seen.at_s < state.samples[-1].at_s:
        state = State(wanted=state.wanted, load_factor=state.load_factor, tail_factor=state.tail_factor)
    now = Sample(seen.at_s, seen.arrivals_per_s, _lateness(policy, seen), seen.utilisation)
    kept = [each for each in state.samples if each.at_s > seen.at_s - max(policy.shrink_after_s, 5 * seen.seconds)]
    recent = [at_s for at_s in state.changed_s if at_s > seen.at_s - MINUTE_S]
    return replace(
        state,
        samples=(*kept, now)[-MOST_SAMPLES:],
        changed_s=tuple(recent or state.changed_s[-1:]),
        avoided=tuple(each for each in state.avoided if each.until_s > seen.at_s),
        shrunk=state.shrunk if state.shrunk is not None and state.shrunk.until_s > seen.at_s else None,
    )


def _lateness(policy: ModelPolicy, seen: Observation) -> float | None:
    """P99 divided by the SLO; where nobody measures P99 of this interval, about what queue and executions make of it."""
    if policy.slo_ms is None:
        return None
    if seen.p99_ms is not None and seen.p99_over_s <= 1.5 * seen.seconds:
        return seen.p99_ms / policy.slo_ms
    if math.isnan(seen.queue_us):
        return None
    executions = sum(seen.batch_sizes.values())
    execution_us = (seen.utilisation or 0.0) * seen.knobs.instances * 1e6 / executions if executions else 0.0
    waits_us = seen.waiting / seen.answered_per_s * 1e6 if seen.answered_per_s > 0 else 0.0
    return (max(TAIL * seen.queue_us, waits_us) + execution_us) / 1e3 / policy.slo_ms


def _settle(policy: ModelPolicy, state: State, seen: Observation) -> tuple[State, Decision | None]:
    """Whether the server has what it should; a Decision when it has not."""
    wanted = state.wanted
    if wanted is None or same(seen.knobs, wanted):
        came_about = state.previous is not None
        failures = 0 if came_about else state.failures
        return replace(state, wanted=seen.knobs, previous=None, has_restarted=False, failures=failures), None
    if state.has_restarted:
        state = replace(state, has_restarted=False)
        wish = Wish(wanted, f"Triton came back with {seen.knobs.describe()}", is_urgent=True)
        return _gate(policy, state, seen, wish)
    last_s = state.changed_s[-1] if state.changed_s else -math.inf
    if state.previous is not None and same(seen.knobs, state.previous):
        if seen.at_s - last_s <= 1.5 * seen.seconds:
            return state, Decision("keep", reason=f"the change to {wanted.describe()} is being carried out")
        reason = f"the change to {wanted.describe()} did not come about; {seen.knobs.describe()} stays"
        failed = state.failed(wanted, seen.knobs, seen.at_s, FAILED_REST_S, policy.avoid_s)
        return failed, Decision("adopt", reason=reason)
    if state.previous is not None and _is_on_the_way(state.previous, seen.knobs, wanted):
        state = replace(state, wanted=seen.knobs, previous=None, trial=None, shrunk=None)
        reason = f"the change to {wanted.describe()} was broken off at {seen.knobs.describe()}; it is gone on from"
        return state, Decision("adopt", reason=reason)
    if policy.on_foreign_change == "reclaim":
        wish = Wish(wanted, f"someone set {seen.knobs.describe()}; it is set back", is_urgent=True)
        return _gate(policy, state, seen, wish)
    pause_s = seen.at_s + policy.cooldown_s
    state = replace(state, wanted=seen.knobs, previous=None, trial=None, shrunk=None)
    state = replace(state, paused_until_s=pause_s, pause="someone changed the settings")
    reason = f"someone set {seen.knobs.describe()}; it is left alone for {policy.cooldown_s:g} s and gone on from"
    return state, Decision("adopt", reason=reason)


def _is_on_the_way(before: Knobs, now: Knobs, wanted: Knobs) -> bool:
    """Whether an own change that was broken off can have left this: instances come one at a time, and a reload has one to spare."""
    reloads = replace(before, instances=0) != replace(wanted, instances=0)
    fewest, most = sorted((before.instances, wanted.instances))
    sizes = ((before.max_queue_sizes.get(name), wanted.max_queue_sizes.get(name)) for name in now.max_queue_sizes)
    return (
        fewest <= now.instances <= most + reloads
        and now.queue_delay_us in (0, before.queue_delay_us, wanted.queue_delay_us)
        and all(size in pair for size, pair in zip(now.max_queue_sizes.values(), sizes, strict=True))
    )


def _judge(policy: ModelPolicy, state: State, seen: Observation) -> tuple[State, Decision | None]:
    """Whether the last change made things worse, once a whole interval after it was seen; then it is taken back.

    Nothing is concluded when the traffic changed too.
    """
    trial = state.trial
    if trial is None or not _is_whole(seen, (trial.at_s,)):
        return state, None
    state = replace(state, trial=None)
    if not is_close(seen.arrivals_per_s, trial.arrivals_per_s, SAME_LOAD):
        return state, None
    late, lost = state.samples[-1].lateness, lost_of(seen)
    was_late = trial.lateness
    answers_more = seen.answered_per_s > HELPED * trial.answered_per_s
    why = ""
    if lost > trial.lost + WORSE_LOST and not answers_more:
        why = f"{lost:.1%} of requests are lost and {trial.lost:.1%} were"
    elif late is not None and was_late is not None and not answers_more:
        slo_ms = slo_of(policy)
        if late > 1 and late > WORSE_LATE * was_late and seen.waiting <= seen.arrivals_per_s * slo_ms / 1e3:
            why = f"P99 is about {late * slo_ms:.0f} ms and was {was_late * slo_ms:.0f}"
        elif seen.knobs.instances > trial.before.instances and was_late > 1 and late * HELPED > was_late:
            why = f"P99 is about {late * slo_ms:.0f} ms as before, so more instances do not help"
    if not why:
        return state, None
    state = state.with_avoided(Avoided(seen.knobs, seen.at_s + policy.avoid_s, seen.arrivals_per_s))
    before = _within(policy, trial.before)
    wish = Wish(before, f"with {seen.knobs.brief()} {why}; back", is_urgent=True)
    state, decision = _gate(policy, state, seen, wish)
    if decision.action == "change":
        decision = replace(decision, action="revert")
        state = replace(state, trial=None, shrunk=None)
    return state, decision


def _is_whole(seen: Observation, changed_s: Sequence[float]) -> bool:
    """Whether it shows the present settings alone: one interval after a change still has the queue, or the loading, of it."""
    return not changed_s or seen.at_s - seen.seconds >= changed_s[-1] + SETTLED * seen.seconds


def _learn(policy: ModelPolicy, state: State, seen: Observation, model: Model) -> State:
    """With the model's expectations corrected by what an undisturbed interval showed."""
    if not _is_whole(seen, state.changed_s) or seen.answered_per_s * seen.seconds < LEARN_FROM:
        return state
    demand = Demand(seen.arrivals_per_s, seen.rows_per_request, seen.arrivals_by_class)
    found = Outlook(policy, state, model, demand).expect(seen.knobs)
    late, load, tail = state.samples[-1].lateness, state.load_factor, state.tail_factor
    if seen.utilisation is not None and 0.05 < seen.utilisation < 0.95 and 0.05 < found.utilisation < 0.95:
        load *= (seen.utilisation / found.utilisation) ** 0.2
    elif late is not None and late > 1 and found.p99_ms <= slo_of(policy):
        load *= 1.2  # saturated, which the model does not know
    was_late = state.samples[-2].lateness if len(state.samples) > 1 else None
    is_measured = seen.p99_ms is not None and seen.p99_over_s <= 1.5 * seen.seconds
    is_at_ease = was_late is not None and was_late <= 1  # else the queue of before is in it
    if (
        is_measured
        and is_at_ease
        and late is not None
        and found.goodput_share >= choose.GOODPUT_LEAST
        and found.p99_ms > 0
    ):
        ratio = late * slo_of(policy) / found.p99_ms
        tail *= ratio ** (0.4 if ratio > 1 else 0.15)
    return replace(state, load_factor=_clamp(load), tail_factor=_clamp(tail))


def _demand(policy: ModelPolicy, state: State, seen: Observation) -> Demand:
    """The traffic to be ready for: the most of the last while, or what is coming, and some more.

    A rise that chance does not explain goes on as it began; a queue that stands has to be worked off.
    """
    before = state.samples[-2].arrivals_per_s if len(state.samples) > 1 else seen.arrivals_per_s
    known = max(
        (each.arrivals_per_s for each in state.samples[:-1]), default=0.0
    )  # a burst that comes again ends where it did
    rise = seen.arrivals_per_s - before if seen.arrivals_per_s > known else 0.0
    chance = SURE * math.sqrt(max(seen.arrivals_per_s, 1.0) / seen.seconds)
    coming = seen.arrivals_per_s + (rise if rise > chance else 0.0)
    coming += min(seen.waiting / seen.seconds, seen.arrivals_per_s)
    planned = max(coming, state.load_over(seen.at_s - policy.shrink_after_s)) * (1 + policy.headroom)
    scale = planned / seen.arrivals_per_s if seen.arrivals_per_s > 0 else 0.0
    by_class = {name: rate * scale for name, rate in seen.arrivals_by_class.items()}
    rows = seen.rows_per_request if seen.rows_per_request > 0 else 1.0
    return Demand(planned, rows, by_class)


def _wish(policy: ModelPolicy, state: State, seen: Observation, demand: Demand, model: Model | None) -> Wish:
    """The policy's settings, class limits with them."""
    if policy.policy == "model" and model is not None:
        outlook = Outlook(policy, state, model, demand)
        wish = choose.by_model(outlook, seen.knobs, delay_is_live=_is_live(policy, seen))
        capacity_per_s = outlook.expect(wish.knobs).capacity_per_s if policy.max_queue_sizes else math.inf
    else:
        wish = choose.by_feedback(policy, state, seen.knobs, seen, demand)
        busy = (seen.utilisation or 0.0) * seen.knobs.instances / wish.knobs.instances
        capacity_per_s = seen.answered_per_s / busy if busy > 0 else math.inf
    sizes = choose.limits(policy, seen.knobs, seen, capacity_per_s)
    if sizes == dict(seen.knobs.max_queue_sizes):
        return wish
    knobs = replace(wish.knobs, max_queue_sizes=sizes)
    if wish.knobs == seen.knobs:
        return Wish(knobs, f"about {capacity_per_s:.0f} requests/s can be answered")
    if wish.is_urgent and wish.knobs.instances != seen.knobs.instances:
        return wish  # NOTE: instances first, in place; limits need a reload and can wait
    return replace(wish, knobs=knobs)


def _gate(policy: ModelPolicy, state: State, seen: Observation, wish: Wish) -> tuple[State, Decision]:
    """The wish as a decision, or why it has to wait."""
    if same(wish.knobs, seen.knobs):
        return state, Decision("keep", reason=wish.reason)
    minute = [at_s for at_s in state.changed_s if at_s > seen.at_s - MINUTE_S]
    wait = ""
    if policy.policy == "queue_depth":
        pass  # as simple as it is known
    elif len(minute) >= policy.max_changes_per_minute:
        wait = f"{len(minute)} changes within a minute are enough"
    elif not wish.is_urgent:
        wait = _waits(policy, state, seen, wish)
    if wait:
        return state, Decision("keep", reason=f"{wish.reason}; but {wait}")
    return _changed(policy, state, seen, wish.knobs), Decision(
        "change", wish.knobs, f"{wish.reason}: {seen.knobs.change_to(wish.knobs)}", _way(policy, seen, wish.knobs)
    )


def _waits(policy: ModelPolicy, state: State, seen: Observation, wish: Wish) -> str:
    """Why a wish that is not urgent waits; empty when it does not."""
    if state.trial is not None:
        return "it is not seen yet what the last change brought"
    if state.avoids(wish.knobs, seen.arrivals_per_s):
        return f"{wish.knobs.brief()} made things worse a while ago"
    last_s = state.changed_s[-1] if state.changed_s else -math.inf
    rest_s = policy.cooldown_s
    if is_close(seen.arrivals_per_s, state.changed_load, SAME_LOAD):
        rest_s = max(rest_s, policy.steady_s)
    left_s = last_s + rest_s - seen.at_s
    return f"the last change is {seen.at_s - last_s:.0f} s ago, {left_s:.0f} s too few" if left_s > 0 else ""


def _changed(policy: ModelPolicy, state: State, seen: Observation, target: Knobs) -> State:
    """What is remembered of a change."""
    load = seen.arrivals_per_s
    shrunk = state.shrunk
    if target.instances > seen.knobs.instances:
        if shrunk is not None and is_close(load, shrunk.arrivals_per_s, SAME_LOAD):
            too_few = Avoided(shrunk.knobs, seen.at_s + policy.avoid_s, shrunk.arrivals_per_s, is_too_few=True)
            state = state.with_avoided(too_few)
        shrunk = None
    elif target.instances < seen.knobs.instances:
        shrunk = Avoided(target, seen.at_s + 2 * max(policy.steady_s, policy.shrink_after_s), load)
    late = state.samples[-1].lateness if state.samples else None
    return replace(
        state,
        wanted=target,
        previous=seen.knobs,
        changed_s=(*state.changed_s, seen.at_s),
        changed_load=load,
        shrunk=shrunk,
        trial=Trial(seen.knobs, seen.at_s, load, seen.answered_per_s, lost_of(seen), late),
    )


def _way(policy: ModelPolicy, seen: Observation, target: Knobs) -> Way:
    if target.max_queue_sizes != seen.knobs.max_queue_sizes:
        return "reload"
    if target.queue_delay_us != seen.knobs.queue_delay_us:
        return "live" if _is_live(policy, seen) else "reload"
    return "instances"


def _is_live(policy: ModelPolicy, seen: Observation) -> bool:
    return policy.delay_by == "live" and seen.delay_is_live


def _within(policy: ModelPolicy, knobs: Knobs) -> Knobs:
    """The nearest settings within the bounds."""
    delay, bounds = policy.queue_delay_us, policy.instances
    delay_us = knobs.queue_delay_us
    if delay is not None and policy.delay_by != "never":
        delay_us = min(delay.max, max(delay.min, delay_us))
    return replace(knobs, instances=min(bounds.max, max(bounds.min, knobs.instances)), queue_delay_us=delay_us)


def _clamp(factor: float) -> float:
    return min(FACTOR_MOST, max(FACTOR_LEAST, factor))
