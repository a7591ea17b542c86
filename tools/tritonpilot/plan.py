"""How many replicas does a load need, also one that no test machine can make, and what does it cost?

    found = plan(batcher, costs, wish, rates_per_s=(1e3, 1e6), fleet=Fleet(burst=1.5), cost_per_hour=0.4)
    found.rows[1].replicas, found.rows[1].cost_per_million

A replica is what `costs` were measured on. The number of replicas is the smallest with which the busiest one keeps every promise
in the simulator, at its own share of the load: no figure of one replica is multiplied up. All shares are served with the same
arrivals, stretched, so that a difference between two numbers of replicas is theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tritonpilot.arrivals import Traffic, check_sizes, read_recording, traffic
from tritonpilot.columns import Column, finite
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.simulate import Batcher, Simulated, simulate
from tritonpilot.tune.search import KEPT
from tritonpilot.tune.wish import Wish

REQUESTS = 200_000  # that a share is judged by: its P99 then has 2,000 above it
EXACTNESS = 0.002  # of the highest rate that one replica serves within the SLO
LONE_SHARE = 0.01  # of the time that a lone request takes: so rarely that none meets another
OVERLOADS = (1.25, 1.5, 2.0)  # in times what a replica serves within the SLO, for the most that it answers
RATE_MOST = 1e12
HOUR_S = 3600.0
PEAK_S = 60.0  # of a trace, whose busiest one is the burst


@dataclass(frozen=True)
class Fleet:
    """How a load reaches its replicas.

    `burst` is how many times the mean rate it may be for a while, with all promises kept, and with `spare` replicas down.
    A balancer that chooses anew for each request gives every replica the same share and random arrivals. Otherwise the busiest
    gets `imbalance` times the mean share; or, where callers keep a connection to one replica, as gRPC's do,
    each of `rate_per_connection` requests/s, what chance makes of it.
    """

    burst: float = 1.0
    imbalance: float = 1.0
    rate_per_connection: float = 0.0
    spare: int = 0

    def __post_init__(self) -> None:
        """Raises SpecError for what cannot be."""
        wrong = {
            f"a burst is at least as high as the mean, so burst is 1 or more, not {self.burst:g}": (
                not 1 <= self.burst < 1e6
            ),
            f"the busiest replica gets at least the mean share, so imbalance is 1 or more, not {self.imbalance:g}": (
                not 1 <= self.imbalance < 1e6
            ),
            f"a connection cannot have {self.rate_per_connection:g} requests/s": (
                not 0 <= self.rate_per_connection < math.inf
            ),
            f"{self.spare} spare replicas cannot be": self.spare < 0,
            "imbalance and rate_per_connection say the same thing; give one of them": (
                self.imbalance != 1 and self.rate_per_connection > 0
            ),
        }
        if said := [what for what, is_so in wrong.items() if is_so]:
            raise SpecError(f"This load cannot be planned for: {'; '.join(said)}. Nothing was simulated.")

    def busiest_per_s(self, rate_per_s: float, replicas: int) -> float:
        """Requests/s of the busiest of so many replicas."""
        share = rate_per_s / replicas
        if not self.rate_per_connection or replicas == 1:
            return share * self.imbalance
        return self.rate_per_connection * fullest(share / self.rate_per_connection, replicas)


@dataclass(frozen=True)
class Row:
    """One rate of a plan. `replicas` has the spare ones in it; a value per replica is the mean one's, a P99 the busiest one's."""

    rate_per_s: float
    replicas: int
    replica_per_s: float
    imbalance: float  # the busiest replica's share, in times the mean
    utilisation: float  # of the replicas' scarcest part, instances or cores, at the rate
    p99_ms: float  # at the rate
    burst_p99_ms: float  # at the burst, with the spare ones down
    headroom: float  # how much more than the rate is served within the SLO by all replicas: 0.5 is half as much again
    burst_headroom: float  # how much more than the burst, with the spare ones down
    naive_replicas: int  # the burst divided by what a saturated replica answers, for comparison: mostly too few
    cost_per_hour: float | None = None
    cost_per_million: float | None = None  # requests


@dataclass(frozen=True)
class Plan:
    """Replicas for each rate. One replica serves at most `capacity_per_s` within the SLO, and `saturated_per_s` without one."""

    rows: tuple[Row, ...]
    capacity_per_s: float
    saturated_per_s: float
    slo_ms: float
    fleet: Fleet
    reason: str
    simulations: int
    simulated_requests: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "slo_ms": self.slo_ms if math.isfinite(self.slo_ms) else None,
            "capacity_per_s": self.capacity_per_s,
            "saturated_per_s": self.saturated_per_s,
            "fleet": asdict(self.fleet),
            "reason": self.reason,
            "simulations": self.simulations,
            "simulated_requests": self.simulated_requests,
            "rows": [finite(asdict(row)) for row in self.rows],
        }


COLUMNS = (
    Column("rate_per_s", "rate", "1/s", "{:,.10g}"),
    Column("replicas", "replicas", "", "{:,}"),
    Column("replica_per_s", "each", "1/s", "{:,.0f}"),
    Column("utilisation", "utilisation", "", "{:.0%}"),
    Column("p99_ms", "P99", "ms", "{:,.1f}"),
    Column("headroom", "headroom", "", "{:+.0%}"),
    Column("burst_p99_ms", "P99 at burst", "ms", "{:,.1f}", rank=1),
    Column("burst_headroom", "headroom at burst", "", "{:+.1%}", rank=2),
    Column("imbalance", "busiest", "x mean", "{:.3f}", rank=3),
    Column("cost_per_hour", "cost", "per hour", "{:,.2f}"),
    Column("cost_per_million", "cost", "per million", "{:,.4f}"),
)


def plan(
    batcher: Batcher,
    costs: Costs,
    wish: Wish,
    rates_per_s: Sequence[float],
    *,
    fleet: Fleet | None = None,
    cost_per_hour: float | None = None,
    seed: int = 0,
    requests: int = REQUESTS,
    on_progress: Callable[[str], None] | None = None,
) -> Plan:
    """The smallest fleet for each rate, whose parts of classes and sizes are those of `wish`.

    `cost_per_hour` is a replica's, in any currency; every share is judged by `requests` requests. Raises SpecError for a rate or
    cost that cannot be, for requests larger than a batch, and when one replica misses the promises even for a lone request, or
    one connection sends more than a replica serves.
    """
    fleet = fleet or Fleet()
    say = on_progress or (lambda _: None)
    check(batcher, wish, rates_per_s, cost_per_hour)
    replica = Replica(batcher, costs, wish, seed, requests)
    capacity = replica.capacity_per_s()
    saturated = replica.saturated_per_s(capacity)
    say(f"one replica serves up to {capacity:,.0f} requests/s within the SLO, and at most {saturated:,.0f} without one")
    rows = []
    for rate in rates_per_s:
        rows.append(_row(replica, rate, fleet, capacity, saturated, cost_per_hour))
        say(f"{rate:,.10g} requests/s: {_replicas_in_words(rows[-1].replicas)}")
    return Plan(
        rows=tuple(rows),
        capacity_per_s=capacity,
        saturated_per_s=saturated,
        slo_ms=wish.slo_ms,
        fleet=fleet,
        reason=_reason(replica, rows[-1], fleet, capacity, saturated),
        simulations=replica.simulations,
        simulated_requests=replica.simulations * len(replica.arrivals),
    )


def check(batcher: Batcher, wish: Wish, rates_per_s: Sequence[float], cost_per_hour: float | None = None) -> None:
    """Raise SpecError for what cannot be planned for, before anything is measured or simulated."""
    check_sizes(wish.streams, batcher.max_batch_size)
    wrong = [rate for rate in rates_per_s if not 0 < rate < RATE_MOST]
    if wrong or not rates_per_s:
        what = f"{wrong[0]:g} requests/s cannot be planned for" if wrong else "There is no rate to plan for"
        raise SpecError(f"{what}. Nothing was simulated. Give rates above 0 and below {RATE_MOST:g}.")
    if cost_per_hour is not None and not 0 <= cost_per_hour < math.inf:
        raise SpecError(
            f"A replica cannot cost {cost_per_hour:g} an hour. Nothing was simulated. Give a number of 0 or more."
        )


@dataclass
class Replica:
    """One replica, and what comes of every rate that it was asked to serve."""

    batcher: Batcher
    costs: Costs
    wish: Wish
    seed: int = 0
    requests: int = REQUESTS
    arrivals: Traffic = field(init=False)
    _found: dict[float, Simulated] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.arrivals = traffic(self.wish.streams, self.requests / self.wish.rate_per_s, self.seed)

    @property
    def simulations(self) -> int:
        """How many rates were simulated."""
        return len(self._found)

    def serve(self, rate_per_s: float) -> Simulated:
        """Serve the wish's requests at another rate: the same ones, closer together or further apart."""
        if rate_per_s not in self._found:
            factor = rate_per_s / self.wish.rate_per_s
            stretched = replace(self.arrivals, at_s=self.arrivals.at_s / factor, seconds=self.arrivals.seconds / factor)
            self._found[rate_per_s] = simulate(self.batcher, self.costs, stretched, self.wish.streams, self.seed)
        return self._found[rate_per_s]

    def keeps(self, rate_per_s: float) -> bool:
        """Whether every promise is kept: of all requests of a stream, refused ones too, 99 % are answered within its SLO."""
        by_stream = self.serve(rate_per_s).outcome.by_stream
        return all(not each.attainment < KEPT for each in by_stream.values())

    def capacity_per_s(self) -> float:
        """The highest rate at which it keeps every promise. Raises SpecError where it keeps them at none."""
        low = 1e6 * LONE_SHARE / max(1.0, self._lone_us())
        if not self.keeps(low):
            raise self._out_of_reach(low)
        high = 2 * low
        while self.keeps(high):
            low, high = high, 2 * high
            if high > RATE_MOST:
                raise SpecError(
                    "With these costs one replica serves any rate within its promises, which cannot be. No plan was made. "
                    "Measure the costs again."
                )
        while high / low > 1 + EXACTNESS:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.keeps(middle) else (low, middle)
        return low

    def saturated_per_s(self, capacity_per_s: float) -> float:
        """The most that it answers, in time or not. Offering more can lower it: the front end takes cores from executions."""
        for factor in OVERLOADS:
            self.serve(factor * capacity_per_s)
        return max(capacity_per_s, *(found.outcome.throughput_per_s for found in self._found.values()))

    def _lone_us(self) -> float:
        costs = self.costs
        rows = float(np.mean(self.arrivals.rows))
        around = costs.front_us + costs.front_row_us * rows + costs.reply_us + costs.wire_us
        return around + costs.execution_mean_us(rows) + self.batcher.queue_delay_us

    def _out_of_reach(self, low: float) -> SpecError:
        outcome = self.serve(low).outcome
        missed = [
            f"stream {stream.name} is promised {stream.slo_ms:g} ms and gets "
            f"{outcome.by_stream[stream.name].p_ms(0.99):.3g} ms"
            for stream in self.wish.streams
            if outcome.by_stream[stream.name].attainment < KEPT
        ]
        return SpecError(
            f"No number of replicas keeps the promises: even requests that meet no others miss them ({'; '.join(missed)} at P99). "
            "No plan was made. Promise less, or choose another setting: `tritonpilot tune`."
        )


def fullest(mean: float, replicas: int) -> float:
    """How many of the connections that chance spreads over `replicas`, `mean` on each, are on the fullest one.

    The number that at most one replica among all is expected to reach, by Chernoff's bound for Poisson variables,
    P(X >= k) <= exp(k - mean) (mean / k)^k (Mitzenmacher and Upfal, Probability and Computing, theorem 5.4): rather too high.
    """

    def is_rare(k: float) -> bool:
        return k - mean + k * math.log(mean / k) < -math.log(replicas)

    low, high = mean, 2 * mean + 1
    while not is_rare(high):
        high *= 2
    while high - low > max(1e-9 * high, 1e-6):
        middle = (low + high) / 2
        low, high = (low, middle) if is_rare(middle) else (middle, high)
    return min(high, mean * replicas)  # no more than there are


def burst_of(path: Path, window_s: float) -> float:
    """The busiest `window_s` of recorded arrivals, in times their mean rate. Raises SpecError for a bad recording or window."""
    recording = read_recording(path)
    if not 0 < window_s <= recording.length_s / 2:
        raise SpecError(
            f"A window of {window_s:g} s cannot be looked for in {path}, which is {recording.length_s:,.0f} s long. Nothing was "
            "simulated. Give a window of at most half of that."
        )
    at_s = recording.at_s
    within = np.searchsorted(at_s, at_s + window_s, side="left") - np.arange(len(at_s))
    mean = len(at_s) / recording.length_s
    return max(1.0, float(within.max()) / window_s / mean)


def _row(
    replica: Replica, rate: float, fleet: Fleet, capacity: float, saturated: float, cost_per_hour: float | None
) -> Row:
    needed = _replicas(replica, rate, fleet, capacity)
    replicas = needed + fleet.spare
    mean = replica.serve(rate / replicas)
    busiest_per_s = fleet.busiest_per_s(rate, replicas)
    burst_per_s = fleet.busiest_per_s(rate, needed) * fleet.burst
    hourly = None if cost_per_hour is None else cost_per_hour * replicas
    return Row(
        rate_per_s=rate,
        replicas=replicas,
        replica_per_s=rate / replicas,
        imbalance=busiest_per_s / (rate / replicas),
        utilisation=max(mean.utilisation, mean.cpu_cores / replica.costs.cores),
        p99_ms=replica.serve(busiest_per_s).outcome.p_ms(0.99),
        burst_p99_ms=replica.serve(burst_per_s).outcome.p_ms(0.99),
        headroom=max(0.0, capacity / busiest_per_s - 1),
        burst_headroom=max(0.0, capacity / burst_per_s - 1),
        naive_replicas=max(1, math.ceil(rate * fleet.burst / saturated)),
        cost_per_hour=hourly,
        cost_per_million=None if hourly is None else hourly / (rate * HOUR_S) * 1e6,
    )


def _replicas(replica: Replica, rate: float, fleet: Fleet, capacity: float) -> int:
    """The smallest number whose busiest replica keeps the promises at the burst, as the simulator says for its very share."""
    if (connection := fleet.rate_per_connection * fleet.burst) > capacity:
        raise SpecError(
            f"One connection sends up to {connection:,.0f} requests/s, and a replica serves {capacity:,.0f} within the SLO, "
            "so no number of replicas is enough. No plan was made. Spread its requests over several connections."
        )

    def fits(count: int) -> bool:
        share = fleet.busiest_per_s(rate, count) * fleet.burst
        if capacity < share < capacity * (1 + EXACTNESS):  # nobody has asked yet
            return replica.keeps(share)
        return share <= capacity

    low, high = 0, max(1, math.ceil(rate * fleet.burst / capacity))
    while not fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    while not replica.keeps(fleet.busiest_per_s(rate, high) * fleet.burst):
        high += max(1, high // 1000)
    return high


def _reason(replica: Replica, row: Row, fleet: Fleet, capacity: float, saturated: float) -> str:
    burst = f"a burst of {fleet.burst:g} times the rate" if fleet.burst > 1 else "the rate"
    down = f" with {_replicas_in_words(fleet.spare)} down" if fleet.spare else ""
    whose = f"the busiest one, with {row.imbalance:.3g} times the mean share," if row.imbalance > 1 else "each"
    at_rate = f", and {row.p99_ms:.3g} ms at the rate itself, where replicas are {row.utilisation:.0%} busy"
    words = [
        f"One replica keeps the promises up to {capacity:,.0f} requests/s; saturated it answers {saturated:,.0f}, too late.",
        f"For {row.rate_per_s:,.10g} requests/s {_replicas_in_words(row.replicas)} {'is' if row.replicas == 1 else 'are'} needed "
        f"so that {whose} keeps them at {burst}{down}: P99 is then {row.burst_p99_ms:.3g} ms"
        f"{at_rate if fleet.burst > 1 or fleet.spare else ''}.",
    ]
    if row.naive_replicas < row.replicas:
        share = fleet.busiest_per_s(row.rate_per_s, row.naive_replicas) * fleet.burst
        outcome = replica.serve(share).outcome
        late = 1 - min((each.attainment for each in outcome.by_stream.values()), default=0.0)
        words.append(
            f"Dividing by the throughput of a saturated replica would give {row.naive_replicas:,}, with which {late:.0%} of the "
            "busiest one's requests would be late or refused."
        )
    return " ".join(words)


def _replicas_in_words(count: int) -> str:
    return f"{count:,} replica{'s' * (count != 1)}"
