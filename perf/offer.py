"""Send a load to a service on a Stage, and say what came of it or that the sender was what was measured.

offered = offer(stage, traffic(streams, 5, seed=1), streams, cpus=[bench.cores.client])
offered.undisturbed().goodput_per_s
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perf.frame import NoisyRoundError
from tritonpilot import load
from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.errors import MeasurementError
from tritonpilot.load.run import BUSY_CORES
from tritonpilot.outcome import Outcome
from tritonpilot.stage import Stage

GROWTH = 1.25
MOST_CHANGE = 64.0  # from where a search for a rate begins


@dataclass(frozen=True)
class Offered:
    """What became of a load, and how well it was sent."""

    answers: Outcome
    sender: load.SenderFacts

    def undisturbed(self, *, may_be_behind: bool = False) -> Outcome:
        """The answers. Raises NoisyRoundError when the sender was the limit.

        With `may_be_behind` the load may be more than the server stands. A sender that waited for its connections then waited
        for the server, and was itself the limit only when it had no CPU time left.
        """
        if self.sender.is_limit and (not may_be_behind or self.sender.busiest_core > BUSY_CORES):
            raise NoisyRoundError(f"the sender was the limit: {self.sender.reason}")
        return self.answers


def offer(stage: Stage, arrivals: Traffic, streams: Sequence[Stream], *, cpus: Sequence[int] | None = None) -> Offered:
    """Send `arrivals` over HTTP, from `cpus`. Raises what `load.run` raises, and DiedError when the server did not survive."""
    answers, sender = load.run(
        load.Target(stage.endpoints.http, "http"), stage.model, stage.samples, arrivals, streams, cpus=cpus
    )
    stage.server.check_alive()
    return Offered(answers, sender)


def highest_rate(keeps: Callable[[float], bool], start_per_s: float, *, step: float) -> float:
    """The highest rate that `keeps` says yes to, to within a factor of `step`: from `start_per_s` up or down until a yes and a no
    are found, then halving between them. Raises MeasurementError when that is farther than a factor of 64 away.
    """
    low, high, rate = 0.0, math.inf, start_per_s
    while low == 0 or high / low > step:
        if not start_per_s / MOST_CHANGE <= rate <= start_per_s * MOST_CHANGE:
            raise MeasurementError(
                f"The highest rate is not within a factor of {MOST_CHANGE:g} of {start_per_s:.3g} requests/s: {low:.3g} is kept, "
                f"{high:.3g} is not. No figure is reported. Stop other work and repeat."
            )
        if keeps(rate):
            low = rate
        else:
            high = rate
        rate = low * GROWTH if high == math.inf else high / GROWTH if low == 0 else math.sqrt(low * high)
    return low
