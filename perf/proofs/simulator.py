"""How much traffic does the simulator serve in a second? Ordinary cases through `simulate()`, from arrivals to the outcome."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from perf.frame import Bench, Outcome, median, spread
from perf.machine import pinned
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.costs import Costs
from tritonpilot.simulate import Batcher, Level, simulate

ROUNDS, QUICK_ROUNDS = 5, 2
REQUESTS, QUICK_REQUESTS = 1_000_000, 200_000
FACTOR = tuple(float(value) for value in np.linspace(0.8, 1.2, 101))
#: A device whose executions take 2 ms to 10 ms, and a small model on the server's own core.
DEVICE = Costs((1, 64), (2000.0, 10_000.0), 2.0, FACTOR, 20.0, 1.0, 10.0, 150.0, is_on_cpu=False, cores=2, host_us=50.0)
SMALL = Costs((1, 256), (150.0, 5000.0), 5.0, FACTOR, 40.0, 0.5, 20.0, 150.0)


@dataclass(frozen=True)
class Case:
    """A batcher, costs, and a rate that keeps it busy but not overloaded."""

    name: str
    batcher: Batcher
    costs: Costs
    rate_per_s: float


CASES = (
    Case("device, delay 2 ms", Batcher(2000, 64), DEVICE, 4000),
    Case("device, no delay, 2 instances", Batcher(0, 64, instances=2), DEVICE, 8000),
    Case(
        "device, classes", Batcher(500, 64, levels=(Level("high", 1000, 150_000), Level("low", 10_000))), DEVICE, 4000
    ),
    Case("core, delay 0.5 ms", Batcher(500, 256), SMALL, 7000),
)


def simulator_speed(bench: Bench) -> Outcome:
    """Million requests simulated per second: of each round all cases together, the median of the rounds."""
    requests = QUICK_REQUESTS if bench.quick else REQUESTS
    loads = {}
    for case in CASES:
        streams = [
            Stream(f"{level.name or 'all'}", case.rate_per_s / len(case.batcher.levels), slo_ms=50, priority=place)
            for place, level in enumerate(case.batcher.levels, 1)
        ]
        loads[case.name] = (streams, traffic(streams, requests / case.rate_per_s, 7))
    by_case: dict[str, list[float]] = {case.name: [] for case in CASES}

    def once() -> float:
        count, taken_s = 0, 0.0
        for case in CASES:
            streams, load = loads[case.name]
            begin = time.perf_counter()
            found = simulate(case.batcher, case.costs, load, streams, seed=7)
            seconds = time.perf_counter() - begin
            if found.outcome.answered != len(load):
                raise RuntimeError(f"{case.name}: {len(load) - found.outcome.answered} requests were not answered")
            by_case[case.name].append(len(load) / seconds / 1e6)
            count, taken_s = count + len(load), taken_s + seconds
        return count / taken_s / 1e6

    with pinned(bench.cores.server):
        for case in CASES:  # load or compile the kernel
            streams, _ = loads[case.name]
            simulate(case.batcher, case.costs, traffic(streams, 0.1, 1), streams)
        rounds = bench.rounds(QUICK_ROUNDS if bench.quick else ROUNDS, once, check=lambda: None)
    return Outcome(
        median(rounds),
        spread(rounds),
        len(rounds),
        details={
            "requests_of_a_round": sum(len(load) for _, load in loads.values()),
            "by_case": {name: round(median(values), 3) for name, values in by_case.items()},
        },
    )
