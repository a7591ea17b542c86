"""What comes of traffic, given a batcher's settings and what requests and executions cost?

found = simulate(batcher, costs, traffic, streams, seed=1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.costs import Costs
from tritonpilot.outcome import Outcome
from tritonpilot.simulate.batcher import Batcher


@dataclass(frozen=True)
class Simulated:
    """What came of simulated traffic."""

    outcome: Outcome
    batch_sizes: Mapping[int, int]  # rows of an execution -> executions
    utilisation: float  # share of the time that an instance executes, mean of the instances
    queue_us: float  # mean time from arrival in the queue to the begin of the execution, of answered requests
    execution_us: float  # mean time of an execution
    mean_rows: float  # of an execution
    cpu_cores: float  # busy cores of the server, mean


def simulate(
    batcher: Batcher, costs: Costs, traffic: Traffic, streams: Sequence[Stream], seed: int = 0
) -> Simulated:
    """Serve `traffic` and say what came of it; the same seed gives the same answer."""
    raise NotImplementedError
