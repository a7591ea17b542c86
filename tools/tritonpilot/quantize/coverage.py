"""Which 100 to 200 rows stand for all of production, and do these rows do so?

    chosen = choose(pool, 128)                         # indices into the pool, the same for the same pool and seed
    report(pool, chosen).ensure()                      # ModelError that names what is not covered
    report(pool, other_rows).verdict()                 # [Uncovered("slice hour", "no row of 0, 1, 2, ...; PSI 4.1 ..."), ...]

A feature is a column of a numeric input (each integer column holds categories, as indices of an embedding do), a summary of an
input that is wider or of variable size (mean, standard deviation, lowest and highest value of an image; length and distinct values
of a sequence), a slice, or a pair of these (strata). Its values fall into cells: ten quantile bins of the pool, a category, a slice
value. A set covers a feature when

- every cell that holds a certain share of the pool has a row;
- 99 % of the pool lies between the set's lowest and highest value: what lies outside is clipped by the quantised model;
- the set is distributed as the pool is, by the population stability index (PSI) and the two-sample Kolmogorov-Smirnov distance
  (KS): entropy and percentile calibration and bias correction weigh values by how often they come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tritonpilot.errors import ModelError
from tritonpilot.quantize.data import Rows

Kind = Literal["number", "category", "summary", "slice", "strata"]
Indices = NDArray[np.int64]
TAKEN = -1_000_000  # below any number of cells that a row fills

LEAST_INSIDE = 0.99
"""Values outside the range are clipped; the accuracy that may be lost is 1 %, so no more than 1 % of them."""
LARGEST_PSI = 0.25
"""The usual line between a moderate and a major shift: N. Siddiqi, Credit Risk Scorecards, Wiley 2006, chapter 8."""
LARGEST_KS = 0.2
"""No quantile of the pool is off by more than two of its ten bins."""
CHANCE = 0.001
"""How often a random draw from the pool exceeds the limit of PSI, or that of KS, of a feature, at most."""
NORMAL_QUANTILE = 3.0902  # at 1 - CHANCE

BINS = 10
WIDEST = 256  # columns of an input that are looked at one by one
TAIL_SHARE = 0.001  # of the pool at either end of a number; a row of each is chosen, so 99.8 % lie inside
CATEGORY_SHARE = (
    0.01  # of a category or bin that must have a row: at most 100 in a feature, so that 100 rows can hold them
)
SLICE_SHARE = 0.002  # of a slice value that must: slices are few, and named because the rare ones matter
STRATUM_SHARE = 0.05  # of a pair of values that must: at most 20 of each two features
LEAST_EXPECTED = 5.0  # rows in a cell of its own in PSI; W. G. Cochran, Biometrics 10 (1954)
STRATUM_BINS = 3
STRATIFIED = (" mean", " std", " length")  # summaries that are paired with each other and with slices
OTHERS = "others"
NAMED = 8  # cells and features in a message


@dataclass(frozen=True)
class Feature:
    """How a set of rows covers one feature of the pool. Shares are of the pool's rows.

    `inside` lies between the set's lowest and highest value (numbers and summaries) or has a value that the set has; `missing`
    are the cells without a row; `ks` is None where values have no order.
    """

    name: str
    kind: Kind
    inside: float
    psi: float
    psi_limit: float
    ks: float | None
    ks_limit: float
    missing: tuple[str, ...]


@dataclass(frozen=True)
class Uncovered:
    """A feature that is not covered, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class CoverageReport:
    """How `count` rows cover a pool of `pool_count`, feature by feature: slices first, then inputs, then strata."""

    features: tuple[Feature, ...]
    count: int
    pool_count: int

    def verdict(self, threshold: float = LEAST_INSIDE) -> list[Uncovered]:
        """The features that are not covered, where `threshold` of the pool must lie inside the range; empty: all are."""
        reasons = ((feature.name, _reasons(feature, threshold)) for feature in self.features)
        return [Uncovered(name, "; ".join(why)) for name, why in reasons if why]

    def ensure(self, threshold: float = LEAST_INSIDE) -> None:
        """Raises ModelError naming the features that are not covered."""
        if uncovered := self.verdict(threshold):
            shown = "\n".join(f"  {entry}" for entry in uncovered[:NAMED])
            more = f"\n  and {len(uncovered) - NAMED} more" if len(uncovered) > NAMED else ""
            raise ModelError(
                f"{self.count} calibration rows do not cover {len(uncovered)} of {len(self.features)} features of the "
                f"{self.pool_count} rows that stand for production:\n{shown}{more}\nNothing was written. Let the rows be chosen "
                "from the whole pool, or choose more of them; where the pool itself is one-sided, collect it over all hours, "
                "groups and classes."
            )

    def summary(self, threshold: float = LEAST_INSIDE) -> dict[str, Any]:
        """The figures in short, as JSON has them."""
        ranged = [feature.inside for feature in self.features if feature.ks is not None]
        return {
            "rows": self.count,
            "pool_rows": self.pool_count,
            "features": len(self.features),
            "least_inside": min(ranged, default=1.0),
            "largest_psi": max((feature.psi for feature in self.features), default=0.0),
            "largest_ks": max((feature.ks for feature in self.features if feature.ks is not None), default=0.0),
            "uncovered": [str(entry) for entry in self.verdict(threshold)],
            "by_feature": {
                feature.name: {"inside": feature.inside, "psi": feature.psi, "ks": feature.ks}
                for feature in self.features
            },
        }


def choose(pool: Rows, n: int, seed: int = 0) -> Indices:
    """Indices of `n` rows of the pool that cover it, rising; the same for the same pool, n and seed.

    First, while a cell that must have a row has none, the row that fills most of them (greedy set cover), where either end of a
    number is a cell too. Then, and among equals before, the row that brings the cells' counts nearest to the pool's shares: the
    one that lowers Pearson's chi-square most, to which PSI is equal in second order. A second for 50,000 rows of 40 features.

    Raises ModelError when the pool has fewer rows than asked, or NaN or infinite values.
    """
    if n < 1:
        raise ValueError(f"one row or more is chosen, not {n}")
    if n > pool.count:
        raise ModelError(
            f"{n} calibration rows are asked for, and there are {pool.count} to choose from. Nothing was changed. Ask for "
            "fewer, or make the calibration data again with more rows."
        )
    columns = _columns(pool)
    cells = _partitions(columns, n)
    wanted = [_Members(part.codes, part.is_demanded) for part in cells]
    wanted += [_Members(codes, np.array([True, True])) for codes in _tails(columns)]
    balance = [(_Members(part.codes), np.maximum(n * part.shares, 0.5)) for part in cells if part.kind != "strata"]
    # A cell with `count` of `expected` rows adds (count - expected)^2 / expected to chi-square: the first row lowers it by
    # 2 - 1 / expected, each further one by 2 / expected less.
    gain = np.random.default_rng(seed).uniform(0, 1e-6, pool.count)  # decides between equals
    for members, expected in balance:
        gain += (2 - 1 / expected)[members.codes]
    filled = np.sum([members.is_open[members.codes] for members in wanted], axis=0, dtype=np.int64)
    chosen = np.empty(n, np.int64)
    for step in range(n):
        row = int(np.argmax(np.where(filled == filled.max(), gain, -np.inf)))
        chosen[step] = row
        for members in wanted:
            code = members.codes[row]
            if members.is_open[code]:
                members.is_open[code] = False
                filled[members.rows(code)] -= 1
        for members, expected in balance:
            code = members.codes[row]
            gain[members.rows(code)] -= 2 / expected[code]
        filled[row] = TAKEN
    return np.sort(chosen)


def report(pool: Rows, chosen: Indices | Rows) -> CoverageReport:
    """How a set covers the pool: `chosen` rows of it, or rows from elsewhere with the same inputs and slices. A slice that these
    do not tell is not covered.

    Raises ModelError when either has NaN or infinite values, or the rows lack an input of the pool.
    """
    columns = _columns(pool)
    if isinstance(chosen, Rows):
        count, theirs = chosen.count, _columns(chosen)
        if lacking := [name for name, column in columns.items() if name not in theirs and column.kind != "slice"]:
            raise ModelError(
                f"The calibration rows lack {', '.join(lacking[:NAMED])}, which the rows that stand for production have. Nothing "
                "was written. Make both for the same model."
            )
    else:
        count, theirs = len(chosen), {name: column.take(chosen) for name, column in columns.items()}
    if not count:
        raise ValueError("no row covers nothing: give one or more")
    return CoverageReport(
        tuple(_feature(part, columns, theirs, count) for part in _partitions(columns, count)), count, pool.count
    )


def psi(shares: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """Population stability index of cells with these `shares` of the pool and `counts` of the set: the sum of
    (q - p) ln(q / p) over the cells, q being the set's share (Siddiqi 2006; the symmetric divergence of Jeffreys 1946).

    Half a row for each cell, spread as the pool is, is counted with the set: an empty cell stays finite, and random draws exceed
    `psi_limit` as seldom as it says (one row for all would let 20 in 1000 exceed it at 60 rows in ten cells).
    """
    prior = len(shares) / 2
    actual = (counts + prior * shares) / (counts.sum() + prior)
    return float(((actual - shares) * np.log(actual / shares)).sum())


def psi_limit(cells: int, count: int, pool_count: int) -> float:
    """LARGEST_PSI, or more where chance alone makes more: PSI of a random draw is (1/n + 1/N) chi-square with cells - 1 degrees of
    freedom (B. Yurdakul and J. Naranjo, Journal of Risk Model Validation 14(4), 2020), whose quantile is that of
    E. B. Wilson and M. M. Hilferty, PNAS 17 (1931)."""
    freedom = max(cells - 1, 1)
    spread = 2 / (9 * freedom)
    quantile = freedom * (1 - spread + NORMAL_QUANTILE * math.sqrt(spread)) ** 3
    return max(LARGEST_PSI, quantile * (1 / count + 1 / pool_count))


def ks(pool: NDArray[np.float64], rows: NDArray[np.float64]) -> float:
    """Two-sample Kolmogorov-Smirnov distance: the largest gap between the two distribution functions."""
    pool, rows = np.sort(pool), np.sort(rows)
    values = np.concatenate([pool, rows])
    below_pool = np.searchsorted(pool, values, side="right") / len(pool)
    below_rows = np.searchsorted(rows, values, side="right") / len(rows)
    return float(np.abs(below_pool - below_rows).max())


def ks_limit(count: int, pool_count: int) -> float:
    """LARGEST_KS, or more where chance alone makes more: sqrt(-ln(CHANCE / 2) / 2) sqrt(1/n + 1/N), Smirnov's asymptotic value
    (N. Smirnov, Annals of Mathematical Statistics 19, 1948)."""
    return max(LARGEST_KS, math.sqrt(-math.log(CHANCE / 2) / 2) * math.sqrt(1 / count + 1 / pool_count))


@dataclass(frozen=True)
class _Column:
    """The values of a feature, one for each row: float64 where they have an order, else integers or strings."""

    kind: Kind
    values: NDArray[Any]

    @property
    def is_ordered(self) -> bool:
        return self.kind in ("number", "summary")

    def take(self, rows: Indices) -> _Column:
        return _Column(self.kind, self.values[rows])


_Columns = Mapping[str, _Column]
_Codes = NDArray[np.int64]


@dataclass(frozen=True)
class _Partition:
    """The cells of one feature, or of two (strata). The last one holds the values that have no cell of their own."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    encode: Callable[[_Columns, int], _Codes]
    """The cell of each of so many rows."""
    codes: _Codes
    """Those of the pool."""
    is_demanded: NDArray[np.bool_]
    """The cells that must have a row."""

    @property
    def shares(self) -> NDArray[np.float64]:
        return np.bincount(self.codes, minlength=len(self.labels)) / len(self.codes)


class _Members:
    """The rows of the pool in each cell, and which cells want one; -1 is the code of rows in none."""

    def __init__(self, codes: _Codes, is_wanted: NDArray[np.bool_] | None = None) -> None:
        self.codes = codes
        self.is_open = np.append(np.zeros(0, np.bool_) if is_wanted is None else is_wanted, False)
        self._order = np.argsort(codes, kind="stable")
        self._sorted = codes[self._order]

    def rows(self, code: int) -> Indices:
        start, stop = np.searchsorted(self._sorted, [code, code + 1])
        return self._order[start:stop]


def _columns(rows: Rows) -> dict[str, _Column]:
    found = {f"slice {name}": _Column("slice", values.astype(str)) for name, values in rows.slices.items()}
    for name, array in rows.inputs.items():
        flat = array.reshape(len(array), -1)
        if array.dtype.kind == "f":
            _refuse_infinite(name, flat)
        if name in rows.sequences or flat.shape[1] > WIDEST:
            found |= {f"{name} {what}": _Column("summary", values) for what, values in _summaries(name, flat, rows)}
        else:
            names = _column_names(name, array, rows)
            is_number = array.dtype.kind == "f"
            found |= {
                label: _Column("number", flat[:, place].astype(np.float64))
                if is_number
                else _Column("category", flat[:, place])
                for place, label in enumerate(names)
            }
    return found


def _refuse_infinite(name: str, flat: NDArray[Any]) -> None:
    bad = np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if len(bad):
        raise ModelError(
            f"{name} has NaN or infinite values in row {bad[0]}, counted from 0 ({len(bad)} of {len(flat)} rows have some). "
            "Nothing was changed. A range with them in it calibrates nothing: leave the rows out, or fill them as serving does."
        )


def _column_names(name: str, array: NDArray[Any], rows: Rows) -> list[str]:
    if name in rows.columns:
        return [f"{name}.{column}" for column in rows.columns[name]]
    if array.ndim == 1 or array[0].size == 1:
        return [name]
    return [f"{name}[{','.join(map(str, place))}]" for place in np.ndindex(array.shape[1:])]


def _summaries(name: str, flat: NDArray[Any], rows: Rows) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """(what, [n]): brightness of images, length of sequences, whose rows are padded with zeros or empty strings."""
    is_picture = flat.dtype.kind == "f" or flat.dtype.itemsize == 1
    if is_picture:
        for what in (np.mean, np.std):
            yield what.__name__, np.array([what(row, dtype=np.float64) for row in flat])
        yield "min", flat.min(axis=1).astype(np.float64)
        yield "max", flat.max(axis=1).astype(np.float64)
    if name in rows.sequences or not is_picture:
        yield "length", np.count_nonzero(flat, axis=1).astype(np.float64)
    if not is_picture:
        yield "distinct values", np.array([len(np.unique(row)) for row in flat], np.float64)


def _partitions(columns: _Columns, count: int) -> list[_Partition]:
    """The cells of every feature; which of them must have a row depends on how many rows there are."""
    found = [
        _bins(name, column, BINS, count) if column.is_ordered else _values(name, column, count)
        for name, column in columns.items()
    ]
    layers = [part for part in found if part.kind == "slice"]
    for name, column in columns.items():
        if column.kind == "summary" and name.endswith(STRATIFIED):
            layers.append(_bins(name, column, STRATUM_BINS, count))
    layers = [part for place, part in enumerate(layers) if _is_new(part, layers[:place])]
    return found + [_pair(one, other, count) for one, other in combinations(layers, 2)]


def _is_new(part: _Partition, others: Sequence[_Partition]) -> bool:
    """Not constant, and not the same as another (a mask has the length of the ids that it masks)."""
    return len(np.unique(part.codes)) > 1 and not any(np.array_equal(part.codes, other.codes) for other in others)


def _bins(name: str, column: _Column, bins: int, count: int) -> _Partition:
    """Quantile bins, closed above; a cell for each value where there are no more values than bins."""
    distinct = np.unique(column.values)
    if len(distinct) <= bins:
        edges = distinct[:-1]
        labels = [f"{value:g}" for value in distinct]
    else:
        edges = np.unique(np.quantile(column.values, np.arange(1, bins) / bins, method="inverted_cdf"))
        edges = edges[edges < distinct[-1]]
        inner = [f"{low:g} to {high:g}" for low, high in pairwise(edges)]
        labels = [f"up to {edges[0]:g}", *inner, f"above {edges[-1]:g}"] if len(edges) else ["all"]

    def encode(columns: _Columns, _: int) -> _Codes:
        return np.searchsorted(edges, columns[name].values, side="left").astype(np.int64)

    codes = encode({name: column}, 0)
    is_demanded = np.bincount(codes, minlength=len(labels)) >= max(CATEGORY_SHARE, 1 / count) * len(codes)
    return _Partition(name, column.kind, tuple(labels), encode, codes, is_demanded)


def _values(name: str, column: _Column, count: int) -> _Partition:
    """A cell for each value with a certain share of the pool, and one for all others."""
    values, counts = np.unique(column.values, return_counts=True)
    if column.kind == "slice":  # more than half as many values as rows could not have one each beside everything else
        rank = np.argsort(np.argsort(-counts, kind="stable"), kind="stable")
        own = values[(counts >= SLICE_SHARE * len(column.values)) & (rank < max(1, count // 2))]
    else:
        own = values[counts >= max(CATEGORY_SHARE, 1 / count) * len(column.values)]

    def encode(columns: _Columns, rows: int) -> _Codes:
        if name not in columns or not len(own):
            return np.full(rows, len(own), np.int64)
        theirs = columns[name].values
        place = np.minimum(np.searchsorted(own, theirs), len(own) - 1)
        return np.where(own[place] == theirs, place, len(own)).astype(np.int64)

    codes = encode({name: column}, len(column.values))
    is_demanded = np.arange(len(own) + 1) < len(own)
    return _Partition(name, column.kind, (*map(str, own.tolist()), OTHERS), encode, codes, is_demanded)


def _pair(one: _Partition, other: _Partition, count: int) -> _Partition:
    """A cell for each pair of cells."""
    labels = tuple(f"{left} with {right}" for left, right in product(one.labels, other.labels))

    def encode(columns: _Columns, rows: int) -> _Codes:
        return one.encode(columns, rows) * len(other.labels) + other.encode(columns, rows)

    codes = one.codes * len(other.labels) + other.codes
    is_demanded = np.bincount(codes, minlength=len(labels)) >= max(STRATUM_SHARE, 1 / count) * len(codes)
    return _Partition(f"{one.name} with {other.name}", "strata", labels, encode, codes, is_demanded)


def _tails(columns: _Columns) -> Iterator[_Codes]:
    """For each number: 0 for the rows with its lowest values, 1 for those with its highest, -1 for the others."""
    for column in columns.values():
        if column.is_ordered:
            rank = max(1, int(TAIL_SHARE * len(column.values)))
            ordered = np.sort(column.values)
            low, high = ordered[rank - 1], ordered[-rank]
            if low < high:
                yield np.where(column.values <= low, 0, np.where(column.values >= high, 1, -1)).astype(np.int64)


def _feature(part: _Partition, ours: _Columns, theirs: _Columns, count: int) -> Feature:
    codes = part.encode(theirs, count)
    counts = np.bincount(codes, minlength=len(part.labels)).astype(np.float64)
    missing = tuple(part.labels[place] for place in np.flatnonzero(part.is_demanded & (counts == 0)))
    shares, counts = _joined(part.shares, counts, len(part.codes))
    limits = psi_limit(len(shares), count, len(part.codes)), ks_limit(count, len(part.codes))
    distance = None
    if part.kind == "strata":
        inside = float(np.isin(part.codes, codes).mean())
    elif part.name not in theirs:
        inside = 0.0
    else:
        values, chosen = ours[part.name].values, theirs[part.name].values
        if ours[part.name].is_ordered:
            inside = float(((values >= chosen.min()) & (values <= chosen.max())).mean())
            distance = ks(values, chosen)
        else:
            inside = float(np.isin(values, chosen).mean())
    return Feature(part.name, part.kind, inside, psi(shares, counts), limits[0], distance, limits[1], missing)


def _joined(
    shares: NDArray[np.float64], counts: NDArray[np.float64], pool_count: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The cells where LEAST_EXPECTED rows or more are expected, and one of all smaller ones, which alone would measure chance."""
    is_large = shares * counts.sum() >= LEAST_EXPECTED
    share, count = shares[~is_large].sum(), counts[~is_large].sum()
    if not share and not count:
        return shares[is_large], counts[is_large]
    # What the pool does not have counts as half a row of it, so that PSI stays finite
    return np.append(shares[is_large], max(share, 0.5 / pool_count)), np.append(counts[is_large], count)


def _reasons(feature: Feature, threshold: float) -> list[str]:
    found = []
    if feature.missing:
        named = ", ".join(feature.missing[:NAMED])
        more = f" and {len(feature.missing) - NAMED} more" if len(feature.missing) > NAMED else ""
        found.append(f"no row of {named}{more}")
    if feature.kind == "strata":
        return found
    if feature.ks is not None and feature.inside < threshold:
        found.append(f"{feature.inside:.2%} of production lies inside the range, {threshold:.2%} must")
    if feature.psi > feature.psi_limit:
        found.append(f"PSI {feature.psi:.2f}, at most {feature.psi_limit:.2f}")
    if feature.ks is not None and feature.ks > feature.ks_limit:
        found.append(f"KS {feature.ks:.2f}, at most {feature.ks_limit:.2f}")
    return found
