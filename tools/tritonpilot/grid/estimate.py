"""How well is a mean known that was measured a few times? A 95 % interval by Student's t.

    estimate([1010.0, 1031.0, 996.0])          -> Estimate(mean=1012.3, half_width=43.8, count=3)

Windows that follow each other are not quite independent, so the interval is a little too narrow for slow drifts; what
drifts shows as noise of the machine, or between attempts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: Quantile 0.975 of Student's t for 1, 2, ... degrees of freedom; beyond, the normal distribution's.
STUDENT_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
NORMAL = 1.96


@dataclass(frozen=True)
class Estimate:
    """A mean and half of its 95 % interval, in the unit of the values; the half is infinite for a single value."""

    mean: float
    half_width: float
    count: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    @property
    def pct(self) -> float:
        """Half of the interval in percent of the mean."""
        return 100 * self.half_width / self.mean if self.mean else math.inf


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent measurements of one thing, and how well it is known. Raises ValueError without values."""
    if not values:
        raise ValueError("an estimate needs a value at least")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Estimate(mean, math.inf, 1)
    t = STUDENT_T[len(values) - 2] if len(values) - 2 < len(STUDENT_T) else NORMAL
    return Estimate(mean, t * statistics.stdev(values) / math.sqrt(len(values)), len(values))
