"""How long would an accelerator take for so many rows? Its curve, measured or published, from a JSON file.

    curve = read(Path("curve.json"))
    curve.mean_us(48)                          # between the known sizes in proportion
    Draws(curve, seed=0).next_us(48)           # with its spread: the same seed, the same times

    {"name": "...", "source": "...", "rows": [1, 8, 64], "execution_us": [900, 1000, 4100], "spread": 0.05}

`source` says where the figures come from. `spread` is the standard deviation of the logarithm of an execution's time (lognormal,
its mean kept); 0 is a device that always takes the mean.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN = ("name", "source", "rows", "execution_us", "spread")
MOST_ROWS = 2**31 - 1
MOST_SPREAD = 2.0
HOUR_US = 3.6e9


class CurveError(ValueError):
    """A curve file cannot be read or says what cannot be; the model is not loaded."""


@dataclass(frozen=True)
class Curve:
    """Mean time of an execution, us, for each number of rows."""

    name: str
    source: str
    rows: tuple[int, ...]
    execution_us: tuple[float, ...]
    spread: float = 0.0

    def mean_us(self, rows: int) -> float:
        """Linear between the known sizes; below the first as the first, beyond the last as between the last two."""
        known, times = self.rows, self.execution_us
        if rows <= known[0] or len(known) == 1:
            return times[0] * max(1.0, rows / known[0]) if len(known) == 1 else times[0]
        right = min(max(bisect_left(known, rows), 1), len(known) - 1)
        left = right - 1
        slope = (times[right] - times[left]) / (known[right] - known[left])
        return times[left] + (max(slope, 0.0) if rows > known[-1] else slope) * (rows - known[left])


class Draws:
    """Times of one execution after the other, us."""

    def __init__(self, curve: Curve, seed: int | str) -> None:
        self._curve = curve
        self._random = random.Random(seed)
        self._centre = -(curve.spread**2) / 2  # so that the mean stays the curve's

    def next_us(self, rows: int) -> float:
        """The time of the next execution."""
        mean = self._curve.mean_us(rows)
        return mean * math.exp(self._random.gauss(self._centre, self._curve.spread)) if self._curve.spread else mean


def read(path: Path) -> Curve:
    """The curve in a file. Raises CurveError that names the file and what is wrong with it."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _error(path, f"cannot be read: {error}") from None
    if not isinstance(said, dict):
        raise _error(path, "holds no JSON object")
    strange = sorted(set(said) - set(KNOWN))
    missing = [name for name in KNOWN[:-1] if name not in said]
    if strange or missing:
        raise _error(path, f'names "{strange[0]}"' if strange else f'does not say "{missing[0]}"')
    rows, times, spread = said["rows"], said["execution_us"], said.get("spread", 0.0)
    if not (isinstance(rows, list) and isinstance(times, list) and rows and len(rows) == len(times)):
        raise _error(path, '"rows" and "execution_us" are not two lists of as many numbers')
    if not all(type(row) is int and 1 <= row <= MOST_ROWS for row in rows) or any(
        a >= b for a, b in itertools.pairwise(rows)
    ):
        raise _error(path, f'"rows" are not whole numbers that rise from 1 on (to {MOST_ROWS}): {rows}')
    if not all(_is_within(time, HOUR_US) and time > 0 for time in times):
        raise _error(path, f'"execution_us" are not times above 0 and up to an hour: {times}')
    if not _is_within(spread, MOST_SPREAD):
        raise _error(path, f'"spread" is {spread!r}, not a number from 0 to {MOST_SPREAD:g}')
    return Curve(str(said["name"]), str(said["source"]), tuple(rows), tuple(map(float, times)), float(spread))


def _is_within(value: Any, most: float) -> bool:
    """Whether it is a number from 0 to `most`; whole numbers may be too large for a float."""
    return type(value) in (int, float) and 0 <= value <= most


def _error(path: Path, what: str) -> CurveError:
    return CurveError(
        f"the curve {path.name} {what}. The model is not loaded: a curve says {', '.join(KNOWN[:-1])} and perhaps {KNOWN[-1]}"
    )
