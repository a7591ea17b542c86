"""How do ways of scaling replicas on Kubernetes keep a promise? `python -m perf.scaling` prints the table of docs/kubernetes.md.

The HPA's real formula (tritonpilot.hpa) and its delays, on a day with bursts. Replicas are fluid: what they serve within the SLO,
and how long requests wait at which load, comes from the simulated batcher (tritonpilot.simulate) with the published times of a GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perf.frame import PROJECT
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.costs import Costs
from tritonpilot.hpa import DEFAULT_DOWN, DEFAULT_UP, SYNC_S, Autoscaler, Metric, Policy, Rules, per_pod, total, whole
from tritonpilot.simulate import Batcher, simulate

CURVE = PROJECT / "perf" / "curves" / "resnet50_t4_amp.json"
SLO_S = 0.1
REPLICAS = 12  # most
HOURS = 24
START_S = 90  # from the HPA's decision to a pod that is ready: image there, model loaded and warmed up
SEEN_S = 20  # how old what the HPA reads is: scrapes of 5 s, KEDA's or the adapter's polling of 15 s
WINDOW_S = 60  # of rate(...[1m])
PATIENCE_S = 1.0  # what would wait longer is refused
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)  # of capacity
#: `behavior` of the chart.
CHART_UP = Rules(0.0, (Policy("Percent", 100, 60), Policy("Pods", 2, 60)))
CHART_DOWN = Rules(300.0, (Policy("Pods", 1, 60),))


@dataclass(frozen=True)
class Replica:
    """What one replica does: at most `capacity_per_s`; mean wait and P99 at shares of it."""

    capacity_per_s: float
    shares: tuple[float, ...]
    wait_s: tuple[float, ...]
    p99_s: tuple[float, ...]
    busy: tuple[float, ...]


@dataclass(frozen=True)
class Seen:
    """What the HPA reads: means over the window."""

    rate_per_s: float
    wait_s: float
    busy: float  # of the ready pods
    replicas: int
    ready: int


@dataclass(frozen=True)
class Row:
    """What a way of scaling brought."""

    name: str
    kept: float  # share of the requests within the SLO
    replica_hours: float
    changes: int
    most: int


Ask = Callable[[Seen], Sequence[Metric]]


def replica(seed: int = 0) -> Replica:
    """A replica with one T4 and the published times of ResNet-50, batches of 32 at most, 2 ms delay."""
    curve = json.loads(CURVE.read_text())
    costs = Costs(tuple(curve["rows"]), tuple(curve["execution_us"]), 0.0, cores=2, is_on_cpu=False)
    batcher = Batcher(queue_delay_us=2000, max_batch_size=32)
    capacity = 32 / (costs.execution_mean_us(32, 32) / 1e6)
    found = []
    for share in SHARES:
        streams = [Stream("all", capacity * share)]
        seconds = 60_000 / streams[0].rate_per_s
        found.append(simulate(batcher, costs, traffic(streams, seconds, seed), streams, seed))
    return Replica(
        capacity,
        SHARES,
        tuple(each.queue_us / 1e6 for each in found),
        tuple(each.outcome.p_ms(0.99) / 1e3 for each in found),
        tuple(each.utilisation for each in found),
    )


def day(capacity_per_s: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Requests/s in each second of a day: from 0.8 to 5 replicas' capacity; every two hours twice that for 5 minutes."""
    at_s = np.arange(HOURS * 3600)
    wave = 0.8 + 4.2 * np.sin(np.pi * at_s / at_s[-1]) ** 2
    burst = (at_s % 7200 >= 3600) & (at_s % 7200 < 3900)
    rates: np.ndarray[tuple[int], np.dtype[np.float64]] = capacity_per_s * wave * np.where(burst, 2.0, 1.0)
    return rates


def fleet(name: str, one: Replica, rates: Sequence[float], scaler: Autoscaler, ask: Ask, begin: int) -> Row:
    """Serve the day, second by second."""
    replicas, ready_at = begin, [0.0] * begin
    backlog = served = kept = seconds = 0.0
    changes, most = 0, begin
    history: list[Seen] = []
    for now, rate in enumerate(rates):
        if now % SYNC_S == 0 and len(history) > SEEN_S + WINDOW_S:
            wanted = scaler.step(now, replicas, ask(_window(history, replicas, sum(at <= now for at in ready_at))))
            changes += wanted != replicas
            ready_at = sorted(ready_at)[:wanted] + [now + START_S] * max(0, wanted - replicas)
            replicas, most = wanted, max(most, wanted)
        ready = sum(at <= now for at in ready_at)
        capacity = one.capacity_per_s * ready
        backlog = max(0.0, backlog + rate - capacity)
        refused = max(0.0, backlog - capacity * PATIENCE_S)
        backlog -= refused
        share = min(rate / capacity, SHARES[-1])
        wait = backlog / capacity + float(np.interp(share, one.shares, one.wait_s))
        p99 = backlog / capacity + float(np.interp(share, one.shares, one.p99_s))
        served += rate
        kept += (rate - refused) if p99 <= SLO_S else 0.0
        seconds += replicas
        busy = 1.0 if backlog else float(np.interp(share, one.shares, one.busy))
        history.append(Seen(rate, wait, busy, replicas, ready))
    return Row(name, kept / served, seconds / 3600, changes, most)


def _window(history: Sequence[Seen], replicas: int, ready: int) -> Seen:
    seen = history[-SEEN_S - WINDOW_S : -SEEN_S]
    rate = sum(each.rate_per_s for each in seen)
    return Seen(
        rate / len(seen),
        sum(each.wait_s * each.rate_per_s for each in seen) / rate,
        sum(each.busy for each in seen) / len(seen),
        replicas,
        ready,
    )


def table() -> list[Row]:
    """Every way of scaling, on the same day."""
    one = replica()
    rates = day(one.capacity_per_s).tolist()
    good = max(share for share, p99 in zip(one.shares, one.p99_s, strict=True) if p99 <= SLO_S)
    per_replica = 0.7 * good * one.capacity_per_s

    def pods(value: Callable[[Seen], float], target: float) -> Ask:
        # Pods that are starting have an entry, which has no traffic: they report 0.
        return lambda seen: [
            per_pod([value(seen)] * seen.ready + [0.0] * (seen.replicas - seen.ready), target, replicas=seen.replicas)
        ]

    def requests(seen: Seen) -> Metric:
        return total(seen.rate_per_s, per_replica, replicas=seen.replicas)

    def wait(seen: Seen) -> Metric:
        return whole(seen.wait_s, 0.02, replicas=seen.replicas, ready=seen.ready)

    def fixed(count: int) -> Row:
        return fleet(f"{count} replicas, fixed", one, rates, Autoscaler(count, count), lambda _: [], count)

    peak = math.ceil(max(rates) / (good * one.capacity_per_s))
    chart = Autoscaler(1, REPLICAS, CHART_UP, CHART_DOWN)

    def scaled(name: str, ask: Ask, scaler: Autoscaler = chart) -> Row:
        return fleet(name, one, rates, replace(scaler, _recommended=[], _changes=[]), ask, 2)

    default = Autoscaler(1, REPLICAS, DEFAULT_UP, DEFAULT_DOWN)
    return [
        fixed(peak),
        fixed(math.ceil(peak / 2)),
        scaled("HPA, busy 70 %, Kubernetes' behavior", pods(lambda seen: seen.busy, 0.7), default),
        scaled("HPA, wait 20 ms, Kubernetes' behavior", pods(lambda seen: seen.wait_s, 0.02), default),
        scaled("HPA, wait 20 ms (`kind: hpa`)", pods(lambda seen: seen.wait_s, 0.02)),
        scaled("KEDA, requests", lambda seen: [requests(seen)]),
        scaled("KEDA, requests and wait (`kind: keda`)", lambda seen: [requests(seen), wait(seen)]),
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/kubernetes.md."""
    lines = ["| Scaling | Within the SLO | Replica-hours | Changes | Most replicas |", "|---|---|---|---|---|"]
    return "\n".join(
        lines + [f"| {r.name} | {r.kept:.2%} | {r.replica_hours:.0f} | {r.changes} | {r.most} |" for r in rows]
    )


if __name__ == "__main__":
    print(markdown(table()))
