"""Which of thousands of settings answers most requests within their SLO? Decided in the simulator alone.

    judge = Judge(Batcher.of(config), costs, wish)       # costs: (precision, threads) -> Costs
    ranked = search(judge, settings)                     # best first
    reachable(judge, settings)                           # when the best does not keep the promises

All settings see the same arrivals, so that a difference between two is theirs. First each serves a short time; the better ones
then serve longer, and the last few are asked how much more they would stand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tritonpilot.arrivals import Stream, Traffic, traffic
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.setting import Precision, Setting
from tritonpilot.simulate import Batcher, Level, Simulated, simulate
from tritonpilot.tune.wish import Wish, scaled

Kind = tuple[Precision, int]  # precision and threads: what costs are measured for

KEPT = 0.99  # a promise is a P99: so many of all requests, the refused ones too, are answered within the SLO
EQUAL_GOODPUT = 0.005  # below this goodputs are the same: what 20,000 requests cannot tell apart
EQUAL_ROOM = 0.03
ENOUGH_ROOM = 2.0  # times the rate: more room for growth and bursts decides nothing
#: (requests a setting serves, how exactly its room is found, most settings that go on)
TIERS = ((3_000, 1.2, 100), (12_000, 1.06, 24), (40_000, 1.03, 24))
RATES = ((3_000, 1.1, 24), (20_000, 1.03, 24))  # the same, where the highest rate is sought
SMALLER = 8  # of settings with smaller batches than may be chosen, that are looked at again
LONGEST_OF_SLO = 10.0  # serve at least so many SLOs: an overload needs time to show
REQUESTS_MOST = 200_000
LEAST_OF_CEILING = 1000.0  # lower rates than this part of what full batches would serve are not asked for
OVERLOAD = 1.5  # times the highest rate: where a queue's limit matters
LIMITS = tuple(2**k for k in range(3, 17))  # of a queue, that are tried
LIMIT_REQUESTS = 20_000
LIMIT_GAIN = 0.01  # a limit is changed for at least so much goodput


@dataclass(frozen=True)
class Judged:
    """A setting and what the simulator says of it. `room`: how many times the rate it stands with all promises kept (at most
    ENOUGH_ROOM; None: not asked)."""

    setting: Setting
    simulated: Simulated
    kept: tuple[bool, ...]  # the promises, in the order of the streams
    room: float | None = None

    @property
    def goodput_per_s(self) -> float:
        return self.simulated.outcome.goodput_per_s

    @property
    def keeps_all(self) -> bool:
        return all(self.kept)


@dataclass(frozen=True)
class Reachable:
    """What can be had where the wish cannot: the highest rate within the SLO, and the shortest P99 at the rate."""

    rate_per_s: float
    at_rate: Setting | None  # None: the SLO is missed by a lone request
    p99_ms: float
    at_p99: Setting


@dataclass
class Judge:
    """Simulates settings under the wish's traffic, and counts what that took."""

    batcher: Batcher  # of the service as it is: its levels, ordering and limits
    costs: Mapping[Kind, Costs]
    wish: Wish
    seed: int = 0
    simulations: int = 0
    requests: int = 0
    _traffic: dict[tuple[float, int], tuple[Traffic, tuple[Stream, ...]]] = field(default_factory=dict)

    def batcher_of(self, setting: Setting) -> Batcher:
        """The batcher with this setting."""
        names = {level.name for level in self.batcher.levels}
        unknown = [name for name in setting.max_queue_sizes if name not in names]
        if unknown:
            raise SpecError(
                f"There is no class {unknown[0]} to limit. Nothing was simulated. Known are {sorted(names)}."
            )
        return replace(
            self.batcher,
            queue_delay_us=setting.queue_delay_us,
            max_batch_size=max(1, setting.max_batch_size),
            preferred_batch_sizes=tuple(
                size for size in self.batcher.preferred_batch_sizes if size <= setting.max_batch_size
            ),
            instances=setting.instances,
            levels=tuple(_limited(level, setting.max_queue_sizes) for level in self.batcher.levels),
        )

    def judge(self, setting: Setting, requests: int, factor: float = 1.0) -> Judged:
        """Serve about `requests` requests at `factor` times the wish's rate."""
        arrivals, streams = self._arrivals(factor, requests)
        costs = self.costs[(setting.precision, setting.threads)]
        found = simulate(self.batcher_of(setting), costs, arrivals, streams, self.seed)
        self.simulations += 1
        self.requests += len(arrivals.at_s)
        by_stream = found.outcome.by_stream
        kept = tuple(stream.name not in by_stream or not by_stream[stream.name].attainment < KEPT for stream in streams)
        return Judged(setting, found, kept)

    def with_room(self, setting: Setting, requests: int, step: float) -> Judged:
        """As `judge`; a setting that keeps its promises is also asked for its room, with half as many requests."""
        found = self.judge(setting, requests)
        if not found.keeps_all:
            return found
        return replace(found, room=self.highest_factor(setting, requests // 2, step, ENOUGH_ROOM))

    def highest_factor(self, setting: Setting, requests: int, step: float, most: float = math.inf) -> float:
        """The highest multiple of the rate at which the setting keeps every promise, to within a factor of `step`; 0: at none
        that is worth asking. With `most` it is known to keep them at the rate itself, and more than `most` is not asked.
        """

        def keeps(factor: float) -> bool:
            return self.judge(setting, requests, factor).keeps_all

        if most < math.inf:
            if keeps(most):
                return most
            low, high = 1.0, most
        else:
            if not self.answers_in_time(setting):
                return 0.0
            high = self._ceiling(setting)
            low, least = high / 2, high / LEAST_OF_CEILING
            while not keeps(low):
                low, high = low / 2, low
                if low < least:
                    return 0.0
        while high / low > step:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low

    def _ceiling(self, setting: Setting) -> float:
        """The multiple of the rate that full batches without a pause would serve."""
        costs = self.costs[(setting.precision, setting.threads)]
        rows = max(1, setting.max_batch_size)
        rows_per_s = setting.instances * rows / costs.execution_mean_us(rows, 0) * 1e6
        return rows_per_s / self.wish.rows_per_s

    def answers_in_time(self, setting: Setting) -> bool:
        """Whether a lone request of one row can be answered within the shortest SLO: it waits for the whole queue delay."""
        delay_us = setting.queue_delay_us if setting.max_batch_size > 1 else 0
        costs = self.costs[(setting.precision, setting.threads)]
        return delay_us + costs.execution_mean_us(1) <= self.wish.slo_ms * 1e3

    def _arrivals(self, factor: float, requests: int) -> tuple[Traffic, tuple[Stream, ...]]:
        if (factor, requests) not in self._traffic:
            streams = scaled(self.wish.streams, factor)
            rate = self.wish.rate_per_s * factor
            seconds = max(requests / rate, LONGEST_OF_SLO * _longest_slo_s(streams))
            self._traffic[factor, requests] = (
                traffic(streams, min(seconds, REQUESTS_MOST / rate), self.seed),
                streams,
            )
        return self._traffic[factor, requests]


def search(judge: Judge, settings: Sequence[Setting], on_progress: Callable[[str], None] | None = None) -> list[Judged]:
    """The settings that served longest, best first; see `order`."""
    say = on_progress or (lambda _: None)
    going = list(settings)
    found: list[Judged] = []
    for requests, step, most in TIERS:
        found = order([judge.with_room(setting, requests, step) for setting in going], judge.wish)
        say(f"simulated {len(going)} settings with {requests} requests each; best so far {found[0].setting.describe()}")
        going = [each.setting for each in found[:most]]
    return found


def order(found: Sequence[Judged], wish: Wish) -> list[Judged]:
    """Best first. A better class's promise goes before everything; then goodput; then, among equals, room up to twice the rate;
    then what costs less: instances and threads, an INT8 model, latency.
    """
    ranks = sorted(range(len(wish.streams)), key=lambda place: wish.streams[place].priority)

    def promises(each: Judged) -> tuple[bool, ...]:
        return tuple(each.kept[place] for place in ranks)

    ordered: list[Judged] = []
    left = list(found)
    for kept in sorted({promises(each) for each in left}, reverse=True):
        group = [each for each in left if promises(each) == kept]
        best = max(each.goodput_per_s for each in group)
        equal = [each for each in group if each.goodput_per_s >= (1 - EQUAL_GOODPUT) * best]
        roomiest = max(each.room or 0.0 for each in equal)
        ahead = [each for each in equal if (each.room or 0.0) >= (1 - EQUAL_ROOM) * roomiest]
        behind = [each for each in equal if (each.room or 0.0) < (1 - EQUAL_ROOM) * roomiest]
        ordered += sorted(ahead, key=_cost)
        ordered += sorted(behind, key=lambda each: -(each.room or 0.0))
        lesser = [each for each in group if each.goodput_per_s < (1 - EQUAL_GOODPUT) * best]
        ordered += sorted(lesser, key=lambda each: -each.goodput_per_s)
    return ordered


def differing(ranked: Sequence[Judged], count: int) -> list[Judged]:
    """The first `count` that are worth telling apart by measuring: no two within one step of delay and batch size."""
    chosen: list[Judged] = []
    for each in ranked:
        if all(_is_apart(each.setting, other.setting) for other in chosen):
            chosen.append(each)
        if len(chosen) == count:
            break
    return chosen


def highest_rates(
    judge: Judge, settings: Sequence[Setting], on_progress: Callable[[str], None] | None = None
) -> list[tuple[float, Setting]]:
    """(multiple of the wish's rate, setting) of the settings that stand most with all promises kept, most first."""
    say = on_progress or (lambda _: None)
    found = [(1.0, setting) for setting in settings]
    for requests, step, most in RATES:
        found = sorted(
            ((judge.highest_factor(setting, requests, step), setting) for _, setting in found),
            key=lambda pair: (-pair[0], pair[1].instances * pair[1].threads, pair[1].queue_delay_us),
        )[:most]
        best, setting = found[0]
        say(f"at most {best * judge.wish.rate_per_s:.0f} requests/s within the SLO, with {setting.describe()}")
    return found


def reachable(judge: Judge, settings: Sequence[Setting]) -> Reachable:
    """What can be promised instead: of a few settings of each kind, for an SLO that no setting keeps."""
    some = differing(order([judge.judge(setting, TIERS[0][0]) for setting in settings], judge.wish), 12)
    factor, at_rate = max(
        ((judge.highest_factor(each.setting, *RATES[0][:2]), each.setting) for each in some), key=lambda pair: pair[0]
    )
    quick = [judge.judge(setting, TIERS[0][0]) for setting in settings]
    answered = [each for each in quick if not _lost_share(each) > 1 - KEPT] or quick
    best = min(answered, key=_p99_ms)
    return Reachable(factor * judge.wish.rate_per_s, at_rate if factor else None, _p99_ms(best), best.setting)


def smaller_would_do_better(judge: Judge, chosen: Judged, smaller: Sequence[Setting]) -> Judged | None:
    """The best of settings with smaller batches than may be chosen, where it keeps promises that the chosen one does not, or
    answers or stands clearly more; else None."""
    (requests, step, _), (again, finer, _) = TIERS[:2]
    going = order([judge.with_room(setting, requests, step) for setting in smaller], judge.wish)[:SMALLER]
    if not going:
        return None
    best = order([judge.with_room(each.setting, again, finer) for each in going], judge.wish)[0]
    mine = judge.with_room(chosen.setting, again, finer)
    if best.keeps_all != mine.keeps_all:
        return best if best.keeps_all else None
    room = max(mine.room or 0.0, chosen.room or 0.0)
    gains = (
        best.goodput_per_s > (1 + EQUAL_GOODPUT) * mine.goodput_per_s or (best.room or 0.0) > (1 + EQUAL_ROOM) * room,
        best.goodput_per_s >= (1 - EQUAL_GOODPUT) * mine.goodput_per_s,
    )
    return best if all(gains) else None


def with_limits(judge: Judge, best: Judged) -> Judged:
    """The setting with the queue limits that answer most in time when half as much again comes as it can stand.

    A limit is left as it is where another one gains less than 1 %, or costs anything at the wish's own rate.
    """
    streams = judge.wish.streams
    named = {level.name for level in judge.batcher.levels} - {
        ""
    }  # a service without classes has one queue, without a limit
    classes = [s.caller_class for s in streams if s.caller_class in named]
    if not classes:
        return best
    setting = best.setting
    overload = OVERLOAD * max(1.0, judge.highest_factor(setting, *RATES[0][:2]))
    for name in reversed(classes):  # the least important first: its limit shields the others
        tried = [(judge.judge(setting, LIMIT_REQUESTS, overload).goodput_per_s, setting)]
        for size in LIMITS:
            other = replace(setting, max_queue_sizes={**setting.max_queue_sizes, name: size})
            tried.append((judge.judge(other, LIMIT_REQUESTS, overload).goodput_per_s, other))
        goodput, chosen = max(tried, key=lambda pair: pair[0])
        if goodput > (1 + LIMIT_GAIN) * tried[0][0]:
            setting = chosen
    if setting == best.setting:
        return best
    again = judge.judge(setting, TIERS[-1][0])
    is_harmless = again.kept == best.kept and again.goodput_per_s >= (1 - EQUAL_GOODPUT) * best.goodput_per_s
    return replace(again, room=best.room) if is_harmless else best


def _limited(level: Level, sizes: Mapping[str, int]) -> Level:
    return replace(level, max_queue_size=sizes[level.name]) if level.name in sizes else level


def _longest_slo_s(streams: Sequence[Stream]) -> float:
    return max((stream.slo_ms / 1e3 for stream in streams if math.isfinite(stream.slo_ms)), default=0.0)


def _cost(each: Judged) -> tuple[float, ...]:
    setting = each.setting
    return (setting.instances * setting.threads, setting.precision != "fp32", _p99_ms(each), setting.max_batch_size)


def _p99_ms(each: Judged) -> float:
    found = each.simulated.outcome.p_ms(0.99)
    return found if math.isfinite(found) else math.inf


def _lost_share(each: Judged) -> float:
    outcome = each.simulated.outcome
    return sum(outcome.errors.values()) / outcome.requests if outcome.requests else 0.0


def _is_apart(one: Setting, other: Setting) -> bool:
    if (one.instances, one.threads, one.precision) != (other.instances, other.threads, other.precision):
        return True
    sizes = sorted((max(1, one.max_batch_size), max(1, other.max_batch_size)))
    delays = sorted((max(100, one.queue_delay_us), max(100, other.queue_delay_us)))
    return sizes[1] > 2 * sizes[0] or delays[1] > 2 * delays[0]
