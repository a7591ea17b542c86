"""How are many latencies spread? A histogram with three significant digits that adds up over processes, runs and machines.

    histogram = Histogram()
    histogram.record(latencies_us)                    # vectorised
    histogram.quantile_us(0.999)
    Histogram.of_dict(json.loads(text)).merge(histogram)

Log-linear buckets as in HdrHistogram: 1,024 of equal width per power of two, so a bucket is at most 0.1 % wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
PER_OCTAVE = 1024
OCTAVES = 36  # 1 us to 19 hours
FORM = "log-linear 1024"  # named in files, so that no other form is merged with this one


class Histogram:
    """Counts of values in us. Below 1 us and above 19 hours a value counts in the outermost bucket; min and max stay exact."""

    def __init__(self) -> None:
        self._counts = np.zeros(OCTAVES * PER_OCTAVE, dtype=np.int64)
        self._sum_us = 0.0
        self._min_us = float("inf")
        self._max_us = float("-inf")

    @property
    def count(self) -> int:
        """How many values were recorded."""
        return int(self._counts.sum())

    @property
    def mean_us(self) -> float:
        """The exact mean; nan when empty."""
        return self._sum_us / self.count if self.count else float("nan")

    @property
    def max_us(self) -> float:
        """The exact largest value; nan when empty."""
        return self._max_us if self.count else float("nan")

    @property
    def min_us(self) -> float:
        """The exact smallest value; nan when empty."""
        return self._min_us if self.count else float("nan")

    def record(self, values_us: npt.ArrayLike) -> None:
        """Count every value. Raises ValueError for one that is negative, infinite or no number; then none is counted."""
        values = np.asarray(values_us, dtype=np.float64).ravel()
        if not values.size:
            return
        if not np.isfinite(values).all() or values.min() < 0:
            raise ValueError("a histogram of latencies takes finite values from 0 on")
        self._counts += np.bincount(_places(values), minlength=len(self._counts))
        self._sum_us += float(values.sum())
        self._min_us = min(self._min_us, float(values.min()))
        self._max_us = max(self._max_us, float(values.max()))

    def merge(self, other: Histogram) -> None:
        """Add what another one counted."""
        self._counts += other._counts
        self._sum_us += other._sum_us
        self._min_us = min(self._min_us, other._min_us)
        self._max_us = max(self._max_us, other._max_us)

    def quantile_us(self, share: float) -> float:
        """The value that `share` (0 to 1) of the values do not exceed, within 0.05 %; exact at 0 and 1; nan when empty."""
        count = self.count
        if not 0 <= share <= 1:
            raise ValueError(f"a share lies between 0 and 1, not at {share}")
        if not count:
            return float("nan")
        rank = int(np.ceil(share * count))
        if rank <= 1 or rank >= count:
            return self._min_us if rank <= 1 and count > 1 else self._max_us
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(min(max(_middle_us(place), self._min_us), self._max_us))

    def share_within(self, limit_us: float) -> float:
        """The share of values up to a limit, within the width of its bucket; nan when empty."""
        count = self.count
        if not count:
            return float("nan")
        if limit_us >= self._max_us:
            return 1.0
        return float(self._counts[: int(_places(np.array([max(0.0, limit_us)]))[0]) + 1].sum()) / count

    def as_dict(self) -> dict[str, Any]:
        """For a file: the buckets in use as [index, count]; bucket i begins at 2**(i // 1024) * (1 + i % 1024 / 1024) us."""
        used = np.flatnonzero(self._counts)
        return {
            "form": FORM,
            "unit": "us",
            "count": self.count,
            "sum_us": self._sum_us,
            "min_us": self._min_us if len(used) else None,
            "max_us": self._max_us if len(used) else None,
            "buckets": [[int(place), int(self._counts[place])] for place in used],
        }

    @classmethod
    def of_dict(cls, content: Mapping[str, Any]) -> Histogram:
        """The histogram that as_dict() wrote. Raises ValueError when it is none, or damaged."""
        if not isinstance(content, Mapping) or content.get("form") != FORM:
            raise ValueError(f"it is no histogram of the form {FORM!r}")
        found = cls()
        try:
            pairs = np.array(content["buckets"], dtype=np.int64).reshape(-1, 2)
            if pairs.size and (pairs.min() < 0 or pairs[:, 0].max() >= len(found._counts)):
                raise ValueError("a bucket is outside the range")
            np.add.at(found._counts, pairs[:, 0], pairs[:, 1])
            if found.count != content["count"]:
                raise ValueError(f"its buckets hold {found.count} values and it says {content['count']}")
            if found.count:
                found._sum_us, found._min_us, found._max_us = (
                    float(content[name]) for name in ("sum_us", "min_us", "max_us")
                )
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"it is a damaged histogram ({error!r})") from error
        return found


def _places(values: FloatArray) -> npt.NDArray[np.int64]:
    """The bucket of each value: its power of two, and the next ten bits."""
    fraction, exponent = np.frexp(np.maximum(values, 1.0))  # fraction in [0.5, 1)
    places = (exponent.astype(np.int64) - 1) * PER_OCTAVE + ((fraction * 2 - 1) * PER_OCTAVE).astype(np.int64)
    found: npt.NDArray[np.int64] = np.minimum(places, OCTAVES * PER_OCTAVE - 1)
    return found


def _middle_us(place: int) -> float:
    octave, step = divmod(place, PER_OCTAVE)
    return float(2.0**octave * (1 + (step + 0.5) / PER_OCTAVE))
