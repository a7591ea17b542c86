"""How far apart are two samples of one number? PSI and KS, and how far apart chance alone brings them.

psi([90, 10], [50, 50])                   # 0.69: counts in the same bins; above 0.25 is a major shift
ks(np.sort(before), np.sort(now))          # largest gap between the two distribution functions, 0 to 1
psi_of_chance(300, 1000, bins=10)          # 0.19: two samples of these sizes from the same source stay below
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: Windows are judged every second, for days: of a million of them one may be wrong.
CHANCE = 1e-6


def psi(before: ArrayLike, now: ArrayLike) -> float:
    """Population stability index of two lists of counts in the same bins; half a count is added to each, so that none is empty."""
    shares = []
    for counts in (before, now):
        smoothed = np.asarray(counts, np.float64) + 0.5
        shares.append(smoothed / smoothed.sum())
    return float(((shares[1] - shares[0]) * np.log(shares[1] / shares[0])).sum())


def psi_of_chance(rows_before: int, rows_now: int, bins: int, chance: float = CHANCE) -> float:
    """What the PSI of two samples from one source exceeds with this chance.

    PSI / (1/n + 1/m) follows chi-square with bins - 1 degrees of freedom (B. Yurdakul, Statistical Properties of Population
    Stability Index, 2018), whose quantile is Wilson's and Hilferty's.
    """
    degrees = bins - 1
    if degrees < 1:
        return 0.0
    part = 2 / (9 * degrees)
    quantile = degrees * (1 - part + NormalDist().inv_cdf(1 - chance) * math.sqrt(part)) ** 3
    return quantile * (1 / rows_before + 1 / rows_now)


def ks(before: NDArray[Any], now: NDArray[Any]) -> float:
    """Kolmogorov's and Smirnov's statistic of two sorted samples."""
    places = np.concatenate([before, now])
    gaps = np.searchsorted(before, places, "right") / len(before) - np.searchsorted(now, places, "right") / len(now)
    return float(np.abs(gaps).max())


def ks_of_chance(rows_before: int, rows_now: int, chance: float = CHANCE) -> float:
    """What the statistic of two samples from one source exceeds with this chance, at most (Smirnov's limit)."""
    return math.sqrt(-math.log(chance / 2) / 2 * (1 / rows_before + 1 / rows_now))


def counts_between(values: NDArray[Any], edges: Sequence[float]) -> NDArray[np.intp]:
    """How many values lie up to the first edge, up to the second one, ..., above the last one."""
    return np.bincount(np.searchsorted(np.asarray(edges), values, "left"), minlength=len(edges) + 1)
