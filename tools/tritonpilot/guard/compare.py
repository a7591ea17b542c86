"""Are two answers to the same request the same? Arrays in, the largest difference out.

tolerance = Tolerance(1e-4, {"prob": 1e-6})
found = difference({"prob": a}, {"prob": b}, tolerance)      # Difference(0.3, "prob", ok=False)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Tolerance:
    """How far floats may be apart: as they are up to 1, as a part of the value above. Everything else must be equal."""

    otherwise: float
    of: Mapping[str, float] = field(default_factory=dict)

    def limit(self, output: str) -> float:
        """That of one output."""
        return self.of.get(output, self.otherwise)


@dataclass(frozen=True)
class Difference:
    """The largest difference of two answers, and in which output; inf where no number tells it."""

    value: float
    output: str
    ok: bool


def difference(first: Arrays, second: Arrays, tolerance: Tolerance) -> Difference:
    """The output that goes farthest beyond its tolerance, or farthest at all."""
    worst = Difference(0.0, "", ok=True)
    for name in [*first, *(name for name in second if name not in first)]:
        value = _difference(first.get(name), second.get(name))
        found = Difference(value, name, ok=value <= tolerance.limit(name))
        if (worst.ok, -worst.value) > (found.ok, -found.value):
            worst = found
    return worst


def first_rows(answer: Arrays, rows: int) -> dict[str, NDArray[Any]]:
    """The first rows of an answer."""
    return {name: array[:rows] for name, array in answer.items()}


def last_rows(answer: Arrays, rows: int) -> dict[str, NDArray[Any]]:
    """The last rows of an answer."""
    return {name: array[-rows:] for name, array in answer.items()}


def _difference(first: NDArray[Any] | None, second: NDArray[Any] | None) -> float:
    if first is None or second is None or first.shape != second.shape or first.dtype.kind != second.dtype.kind:
        return math.inf
    if first.dtype.kind != "f":
        return 0.0 if bool((first == second).all()) else math.inf
    ours, theirs = first.astype(np.float64), second.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found = np.abs(ours - theirs) / np.maximum(1.0, np.abs(ours))
    found[(ours == theirs) | (np.isnan(ours) & np.isnan(theirs))] = 0.0  # infinities, and NaN where there was NaN
    found[np.isnan(found)] = math.inf
    return float(found.max(initial=0.0))
