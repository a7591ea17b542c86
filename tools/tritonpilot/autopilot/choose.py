"""Which settings does a policy wish for, whatever may have to wait? By a model, by what is seen, or by the queue's length.

wish = by_model(Outlook(policy, state, model, demand), now, delay_is_live=True)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tritonpilot.autopilot.policy import ModelPolicy
from tritonpilot.autopilot.state import SAME_LOAD, State, Trial
from tritonpilot.autopilot.terms import Demand, Knobs, Model, Observation, Prediction

#: Queue delays that are tried, us; those that leave no time within the SLO are left out.
DELAYS_US = (0, 500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 128_000)
DELAY_OF_SLO = 0.6  # a request that waits longer for company has no time left for its execution
GOODPUT_LEAST = 0.99
FULL_MOST = 0.95  # part of the capacity; busy instances alone are no sign, as their batches grow
OVERLOAD_GAIN = 0.02  # of all requests, that another setting must answer more in time
LIVE_GAIN, RELOAD_GAIN = 0.1, 0.25  # of the SLO, that another delay must save
LIMIT_GAIN = 1.5  # times that a class's limit must be off
PRESSURE = 0.25  # of its limit, that must wait before a limit matters

# Without a model
GROW_BUSY, SHRINK_BUSY = 0.9, 0.65  # utilisation
RELAXED = 0.5  # part of what a setting may use of the SLO, that leaves room for an instance less
IDLE_BUSY = 0.3  # below it there is no company to wait for
GROW_MOST = 2.0  # times as many instances at once


@dataclass(frozen=True)
class Wish:
    """The settings to have, and why. An urgent one waits for no cool-down."""

    knobs: Knobs
    reason: str
    is_urgent: bool = False


@dataclass(frozen=True)
class Outlook:
    """What a model expects of settings under a demand, corrected by what was seen."""

    policy: ModelPolicy
    state: State
    model: Model
    demand: Demand

    def expect(self, knobs: Knobs) -> Prediction:
        """P99 and the rest."""
        factor = self.state.load_factor
        demand = replace(
            self.demand,
            arrivals_per_s=self.demand.arrivals_per_s * factor,
            by_class={name: rate * factor for name, rate in self.demand.by_class.items()},
        )
        found = self.model.predict(knobs, demand)
        return replace(
            found, p99_ms=found.p99_ms * self.state.tail_factor, capacity_per_s=found.capacity_per_s / factor
        )

    def fits(self, knobs: Knobs) -> bool:
        """Whether the SLO is kept with what it may use."""
        found = self.expect(knobs)
        return (
            found.p99_ms <= slo_of(self.policy) * self.policy.slo_share
            and found.goodput_share >= GOODPUT_LEAST
            and self.demand.arrivals_per_s <= FULL_MOST * found.capacity_per_s
        )

    def holds(self, knobs: Knobs) -> bool:
        """Whether the SLO is kept at all, with nothing to spare."""
        found = self.expect(knobs)
        return found.p99_ms <= slo_of(self.policy) and found.goodput_share >= GOODPUT_LEAST

    def fitting(self, now: Knobs, instances: int, delays_us: tuple[int, ...]) -> Knobs | None:
        """So many instances with the first of the delays that keeps the SLO."""
        for delay_us in delays_us:
            knobs = replace(now, instances=instances, queue_delay_us=delay_us)
            if not self.is_avoided(knobs) and self.fits(knobs):
                return knobs
        return None

    def is_avoided(self, knobs: Knobs) -> bool:
        """Whether it made things worse under about the traffic that there is."""
        return self.state.avoids(knobs, self.state.samples[-1].arrivals_per_s if self.state.samples else 0.0)

    def more(self, by: float) -> Outlook:
        """The same for so much more traffic."""
        demand = replace(
            self.demand,
            arrivals_per_s=self.demand.arrivals_per_s * (1 + by),
            by_class={name: rate * (1 + by) for name, rate in self.demand.by_class.items()},
        )
        return replace(self, demand=demand)


def by_model(outlook: Outlook, now: Knobs, *, delay_is_live: bool) -> Wish:
    """The fewest instances that keep the SLO under the demand, with the delay that serves it best.

    Where none keeps it: what answers most in time. `now` is within the bounds.
    """
    policy, delays_us = outlook.policy, delays(outlook.policy, now)
    demand = f"{outlook.demand.arrivals_per_s:.0f} requests/s planned for"
    fitting = outlook.fitting(now, now.instances, delays_us)
    if fitting is None:
        for instances in range(now.instances + 1, policy.instances.max + 1):
            found = outlook.fitting(now, instances, delays_us)
            if found is not None:
                return Wish(found, f"{demand}: {_say(outlook, now)}, {_say(outlook, found)}", is_urgent=True)
        return _most_in_time(outlook, now, delays_us, demand)
    if fitting != now and not outlook.holds(now):
        return Wish(fitting, f"{demand}: {_say(outlook, now)}, {_say(outlook, fitting)}", is_urgent=True)
    wider, fewer = outlook.more(policy.hysteresis), now
    least = policy.instances.min if outlook.state.spans(policy.shrink_after_s) else now.instances
    for instances in range(now.instances - 1, least - 1, -1):
        found = wider.fitting(now, instances, delays_us)
        if found is None:
            break
        fewer = found
    if fewer != now:
        return Wish(fewer, f"{demand}: {_say(outlook, fewer)}, which is enough")
    return _better_delay(outlook, now, delays_us, demand, LIVE_GAIN if delay_is_live else RELOAD_GAIN)


def by_feedback(policy: ModelPolicy, state: State, now: Knobs, seen: Observation, demand: Demand) -> Wish:
    """More instances where the SLO is in danger, fewer where all was easy for a while; no waiting for company when idle."""
    last = state.samples[-1]
    lost = lost_of(seen)
    late, busy, share = last.lateness, last.utilisation, policy.slo_share
    growth = demand.arrivals_per_s / (1 + policy.headroom) / max(seen.arrivals_per_s, 1e-9)  # expected
    # Busy instances alone are no danger: their batches grow. Busy and late, or busy and more to come, are.
    coming = busy is not None and busy * min(growth, GROW_MOST) > GROW_BUSY and (late or 0.0) > RELAXED * share
    is_late = late is not None and late > share
    if is_late or lost > 1 - GOODPUT_LEAST or coming:
        why = (
            f"P99 is about {late * slo_of(policy):.0f} ms of {slo_of(policy):g}"
            if is_late and late is not None
            else f"{lost:.1%} of requests are refused"
            if lost > 1 - GOODPUT_LEAST
            else f"instances are {busy:.0%} busy and traffic rises"
        )
        # A delay that takes most of the time is the cause, and not a lack of instances.
        least_us = min(delays(policy, now))
        if is_late and busy is not None and busy < GROW_BUSY * 0.6 and now.queue_delay_us > least_us:
            delay_us = max(least_us, now.queue_delay_us // 4)
            return Wish(
                replace(now, queue_delay_us=delay_us), f"{why} though instances are {busy:.0%} busy: less delay", True
            )
        trial = state.trial
        if trial is not None and now.instances > trial.before.instances and _is_as_before(trial, seen):
            return Wish(now, f"{why}, and it is not seen yet what the last instances brought")
        factor = min(GROW_MOST, max(growth, (late or 0.0) / share, 1.0))
        count = min(policy.instances.max, max(now.instances + 1, math.ceil(now.instances * factor)))
        options = [replace(now, instances=n) for n in range(count, now.instances, -1)]
        found = next((each for each in options if not state.avoids(each, last.arrivals_per_s)), None)
        if found is None:
            return Wish(now, f"{why}, and more instances are not allowed or did not help")
        return Wish(found, f"{why}: {found.instances} instances", is_urgent=True)
    since = [each for each in state.samples if each.at_s > seen.at_s - policy.shrink_after_s]
    most_late = max((each.lateness for each in since if each.lateness is not None), default=0.0)
    most_busy = max((each.utilisation for each in since if each.utilisation is not None), default=math.nan)
    spans = state.spans(policy.shrink_after_s)
    fewer = max(policy.instances.min, math.ceil(now.instances * most_busy / SHRINK_BUSY)) if most_busy >= 0 else 0
    if 0 < fewer < now.instances and most_late < RELAXED * share and spans:
        found = replace(now, instances=max(fewer, now.instances // 2))
        if not state.avoids(found, last.arrivals_per_s):
            words = f"at most {most_busy:.0%} busy for {policy.shrink_after_s:g} s"
            return Wish(found, f"instances were {words}: {found.instances} are enough")
    if most_busy < IDLE_BUSY and now.queue_delay_us > min(delays(policy, now)) and most_late > LIVE_GAIN and spans:
        found = replace(now, queue_delay_us=min(delays(policy, now)))
        if not state.avoids(found, last.arrivals_per_s):
            return Wish(found, f"instances are {most_busy:.0%} busy: no company is worth waiting for")
    return Wish(now, "the SLO is kept, and no instance is spare")


def by_queue_depth(policy: ModelPolicy, now: Knobs, seen: Observation) -> Wish:
    """An instance more above `grow_above` waiting requests, one less below `shrink_below`."""
    bounds, limits = policy.instances, policy.queue_depth
    if seen.waiting > limits.grow_above and now.instances < bounds.max:
        more = replace(now, instances=now.instances + 1)
        return Wish(more, f"{seen.waiting:.0f} requests wait, more than {limits.grow_above:g}", is_urgent=True)
    if seen.waiting < limits.shrink_below and now.instances > bounds.min:
        less = replace(now, instances=now.instances - 1)
        return Wish(less, f"{seen.waiting:.0f} requests wait, fewer than {limits.shrink_below:g}", is_urgent=True)
    return Wish(now, f"{seen.waiting:.0f} requests wait")


def limits(policy: ModelPolicy, now: Knobs, seen: Observation, capacity_per_s: float) -> dict[str, int]:
    """The limits of waiting requests: what can be answered within each class's patience.

    A limit that is not far off, or does not matter now as hardly anybody waits, stays.
    """
    found = dict(now.max_queue_sizes)
    if not math.isfinite(capacity_per_s) or capacity_per_s <= 0:
        return found
    for name, bounds in policy.max_queue_sizes.items():
        if bounds.patience_ms is None or name not in found:
            continue
        size = min(bounds.max, max(bounds.min, round(capacity_per_s * bounds.patience_ms / 1e3)))
        was = found[name] or math.inf
        matters = seen.refused_per_s > 0 or seen.waiting > PRESSURE * min(was, size)
        if matters and not 1 / LIMIT_GAIN <= size / was <= LIMIT_GAIN:
            found[name] = size
    return found


def delays(policy: ModelPolicy, now: Knobs) -> tuple[int, ...]:
    """Queue delays to choose from, us: the present one first, then from the shortest."""
    bounds = policy.queue_delay_us
    if bounds is None or policy.delay_by == "never":
        return (now.queue_delay_us,)
    longest_us = min(bounds.max, max(bounds.min, slo_of(policy) * 1e3 * DELAY_OF_SLO))
    steps = {delay for delay in (*DELAYS_US, bounds.min, bounds.max) if bounds.min <= delay <= longest_us}
    return tuple(dict.fromkeys([now.queue_delay_us, *sorted(steps)]))


def slo_of(policy: ModelPolicy) -> float:
    """Its SLO in ms; infinite where none is known."""
    return policy.slo_ms or math.inf


def lost_of(seen: Observation) -> float:
    """The share of requests that were refused or failed."""
    return min(1.0, (seen.refused_per_s + seen.failed_per_s) / max(seen.arrivals_per_s, 1e-9))


def _is_as_before(trial: Trial, seen: Observation) -> bool:
    return seen.arrivals_per_s <= trial.arrivals_per_s * (1 + SAME_LOAD)


def _most_in_time(outlook: Outlook, now: Knobs, delays_us: tuple[int, ...], demand: str) -> Wish:
    """The setting that answers most in time, of the traffic that there is and of what is planned for."""
    there_is = outlook.more(1 / (1 + outlook.policy.headroom) - 1)

    def in_time(knobs: Knobs) -> float:
        return (there_is.expect(knobs).goodput_share + outlook.expect(knobs).goodput_share) / 2

    few = tuple(dict.fromkeys([*delays_us[:2], *delays_us[2::3]]))
    here = most = in_time(now)
    best = now
    for knobs in _grid(outlook, now, few):
        share = in_time(knobs)
        if share > most + OVERLOAD_GAIN:
            best, most = knobs, share
    if best == now:
        return Wish(now, f"{demand}: {_say(outlook, now)}, and nothing within the bounds answers more in time")
    words = f"no setting keeps the SLO; {here:.0%} would be in time, {most:.0%} with {best.brief()}"
    return Wish(best, f"{demand}: {words}", is_urgent=True)


def _grid(outlook: Outlook, now: Knobs, delays_us: tuple[int, ...]) -> Iterator[Knobs]:
    bounds = outlook.policy.instances
    for instances in range(bounds.min, bounds.max + 1):
        for delay_us in delays_us:
            knobs = replace(now, instances=instances, queue_delay_us=delay_us)
            if not outlook.is_avoided(knobs):
                yield knobs


def _better_delay(outlook: Outlook, now: Knobs, delays_us: tuple[int, ...], demand: str, gain: float) -> Wish:
    here = outlook.expect(now).p99_ms
    options = [replace(now, queue_delay_us=delay_us) for delay_us in delays_us[1:]]
    found = [
        (outlook.expect(each).p99_ms, each) for each in options if not outlook.is_avoided(each) and outlook.fits(each)
    ]
    least_ms, best = min(found, key=lambda pair: pair[0], default=(here, now))
    if here - least_ms > max(gain * slo_of(outlook.policy), outlook.policy.hysteresis * here):
        return Wish(best, f"{demand}: P99 {here:.1f} ms with {now.brief()}, {least_ms:.1f} ms with {best.brief()}")
    return Wish(now, f"{demand}: {_say(outlook, now)}")


def _say(outlook: Outlook, knobs: Knobs) -> str:
    found = outlook.expect(knobs)
    missed = f", {1 - found.goodput_share:.0%} not in time" if found.goodput_share < GOODPUT_LEAST else ""
    return f"{knobs.brief()} {'keep' if outlook.fits(knobs) else 'would not keep'} the SLO (P99 {found.p99_ms:.0f} ms{missed})"
