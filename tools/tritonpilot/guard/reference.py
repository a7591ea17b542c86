"""What does a model usually answer? The distribution of each of its series, kept small, in memory or in a file.

reference = Reference.of({Key("prob", "value"): [0.1, 0.7, ...]})
reference.text()                                    # JSON; Reference.parse(text) reads it
reference.series[Key("prob", "value")].distance(window)   # Distance(psi=0.02, ks=0.05, ...)
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from tritonpilot.errors import SpecError
from tritonpilot.guard import distance
from tritonpilot.guard.series import WORDS, Key, What

BINS = 10
POINTS = 201  # of a distribution that are kept: a KS statistic may be wrong by 1/200
MOST_WORDS = 20  # the others are one
FORMAT = "tritonpilot guard reference 1"


@dataclass(frozen=True)
class Distance:
    """How far a window is from the reference, and what chance alone explains; `ks` is 0 for words."""

    psi: float
    ks: float
    psi_of_chance: float
    ks_of_chance: float
    is_constant: bool
    """All rows of the window are alike, which would be a rare chance by the reference."""


@dataclass(frozen=True)
class Numbers:
    """A series of numbers: `points` of its sorted values, evenly taken, of `rows` in all."""

    rows: int
    points: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Numbers:
        """From all values."""
        ordered = np.sort(np.asarray(values, np.float64))
        places = np.linspace(0, len(ordered) - 1, min(POINTS, len(ordered))).round().astype(np.intp)
        return cls(len(values), tuple(float(f"{value:.9g}") for value in ordered[places]))

    def distance(self, window: Sequence[float]) -> Distance:
        """How far the values of a window are from it."""
        before, now = np.asarray(self.points), np.sort(np.asarray(window, np.float64))
        edges = np.unique(np.quantile(before, np.linspace(0, 1, BINS + 1)[1:-1], method="lower"))
        counts = distance.counts_between(before, edges.tolist()) * (self.rows / len(before))
        return Distance(
            distance.psi(counts, distance.counts_between(now, edges.tolist())),
            distance.ks(before, now),
            distance.psi_of_chance(self.rows, len(now), len(edges) + 1),
            distance.ks_of_chance(self.rows, len(now)) + 1 / len(before),
            bool(now[0] == now[-1])
            and _is_rare(int(np.unique(before, return_counts=True)[1].max()), len(before), len(now)),
        )


@dataclass(frozen=True)
class Words:
    """A series of words: how often each was there; `rest`: all others together."""

    rows: int
    counts: Mapping[str, int]
    rest: int = 0

    @classmethod
    def of(cls, values: Sequence[str]) -> Words:
        """From all values."""
        common = dict(Counter(values).most_common(MOST_WORDS))
        return cls(len(values), common, len(values) - sum(common.values()))

    def distance(self, window: Sequence[str]) -> Distance:
        """How far the words of a window are from it."""
        seen = Counter(window)
        now = [seen[word] for word in self.counts]
        before = [*self.counts.values(), self.rest]
        return Distance(
            distance.psi(before, [*now, len(window) - sum(now)]),
            0.0,
            distance.psi_of_chance(self.rows, len(window), len(before)),
            0.0,
            len(seen) == 1 and _is_rare(max(before), self.rows, len(window)),
        )


@dataclass(frozen=True)
class Reference:
    """The series of a model."""

    series: Mapping[Key, Numbers | Words]

    @classmethod
    def of(cls, values: Mapping[Key, Sequence[Any]]) -> Reference:
        """From all values; series without any are left out."""
        return cls(
            {
                key: Words.of(found) if key.what in WORDS else Numbers.of(found)
                for key, found in values.items()
                if len(found)
            }
        )

    def text(self) -> str:
        """As JSON."""
        series = [
            {"output": key.output, "what": key.what, "rows": each.rows}
            | ({"counts": each.counts, "rest": each.rest} if isinstance(each, Words) else {"points": each.points})
            for key, each in self.series.items()
        ]
        return json.dumps({"format": FORMAT, "series": series}, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str, where: str) -> Reference:
        """Raises SpecError naming `where` for what is none."""
        try:
            read = json.loads(text)
            if read["format"] != FORMAT:
                raise ValueError(f"its format is {read['format']!r}")
            found = {Key(str(each["output"]), _what(each["what"])): _series(each) for each in read["series"]}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SpecError(
                f"{where} is no reference of a guard ({error!r}). Nothing was changed. Make it with `tritonpilot guard --learn "
                "SERVICE --output FILE`."
            ) from None
        return cls(found)


def _is_rare(most_common: int, rows_before: int, rows_now: int) -> bool:
    """Whether so many rows alike are no chance, where the most common value was seen so often."""
    return bool(((most_common + 1) / (rows_before + 1)) ** rows_now < distance.CHANCE)


def _series(read: Mapping[str, Any]) -> Numbers | Words:
    rows = _count(read["rows"])
    if not rows:
        raise ValueError("a series has no rows")
    if "counts" in read:
        return Words(rows, {str(word): _count(count) for word, count in read["counts"].items()}, _count(read["rest"]))
    points = tuple(float(point) for point in read["points"])
    if not points or not all(map(math.isfinite, points)) or list(points) != sorted(points):
        raise ValueError("points are no sorted numbers")
    return Numbers(rows, points)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _what(value: str) -> What:
    if value not in get_args(What):
        raise ValueError(f"{value!r} is none of {', '.join(get_args(What))}")
    return value  # type: ignore[return-value]
