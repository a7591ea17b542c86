"""What does a training script say of its columns? What each one is; the numbers and words come from the training rows.

    columns = [Number("income", log1p=True), Words("state", unknown="refuse"), Hashed("zip", buckets=1000)]
    table = fit(columns, train)                                # train: {"income": [...], "state": [...], "zip": [...]}
    dense, categorical = table.transform(*arrays(columns, train))
    table_file.write(table, Path("build/features.json"))       # serving reads this

A missing number is NaN or None, a missing text "" or None. Where training lacks missing values but callers may send them,
blank some cells of the training rows after `fit`: otherwise the model never learns what "missing" means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pilotlib.table import HashColumn, NumberColumn, Table, TextColumn, Values, WordColumn
from pilotlib.tensors import Array


@dataclass(frozen=True)
class Number:
    """A column of numbers."""

    name: str
    missing: Literal["indicator", "fill", "refuse"] = "indicator"
    """Filled with the median; "indicator" says so in a column of its own."""
    clip: tuple[float, float] | None = (0.0, 1.0)
    """Quantiles of the training values that others are brought between; None: no limits."""
    log1p: bool = False
    """For amounts that span powers of ten. Values below 0 count as 0."""
    standardise: bool = True
    """Mean 0 and deviation 1 on the training rows."""
    as_value: bool = True
    """Whether the value becomes a dense column."""
    buckets: int | Sequence[float] = 0
    """Rising bounds, or how many buckets of equally many training rows, for a categorical column; 0: none."""


@dataclass(frozen=True)
class Words:
    """A column of texts, few of them different."""

    name: str
    unknown: Literal["zero", "refuse"] = "zero"
    """What a word that is not in the vocabulary does."""
    missing: Literal["own", "unknown", "fill", "refuse"] = "own"
    """"fill": as the most frequent word."""
    least_count: int = 1
    """Rarer words are not in the vocabulary, so that the model learns what "unknown" means."""


@dataclass(frozen=True)
class Hashed:
    """A column of texts, too many different ones for a vocabulary; some share a bucket."""

    name: str
    buckets: int
    missing: Literal["own", "refuse"] = "own"


Column = Number | Words | Hashed
Data = Mapping[str, Sequence[Any] | Array]


def fit(columns: Sequence[Column], data: Data) -> Table:
    """The table of `columns` for these training rows: {name: one value per row}.

    Raises ValueError naming the column that is missing, doubled, infinite, without any value, or that contradicts itself.
    """
    names = [column.name for column in columns]
    if twins := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f'two columns are named "{twins[0]}"')
    numbers, texts = arrays(columns, data)
    asked_numbers = [column for column in columns if isinstance(column, Number)]
    asked_texts = [column for column in columns if not isinstance(column, Number)]
    return Table(
        [_number_column(column, numbers[:, place]) for place, column in enumerate(asked_numbers)],
        [_text_column(column, texts[:, place].tolist()) for place, column in enumerate(asked_texts)],
    )


def arrays(
    columns: Sequence[Column | NumberColumn | TextColumn], data: Data
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.object_]]:
    """(numbers FP32[rows, n], texts object[rows, m] of bytes): the rows of `data` as requests, in the order of `columns`.

    Raises ValueError when a column is missing, has another number of rows, or holds what is no number or no text.
    """
    rows = {column.name: len(_values(column.name, data)) for column in columns}
    if len(set(rows.values())) > 1:
        raise ValueError(f"columns have different numbers of rows: {rows}")
    count = next(iter(rows.values()), 0)
    numbers = [c.name for c in columns if isinstance(c, (Number, NumberColumn))]
    texts = [c.name for c in columns if not isinstance(c, (Number, NumberColumn))]
    number_array = np.empty((count, len(numbers)), np.float32)
    for place, name in enumerate(numbers):
        try:
            number_array[:, place] = np.asarray(_values(name, data), dtype=np.float64)  # None becomes NaN
        except (TypeError, ValueError) as error:
            raise ValueError(f'column "{name}" is no column of numbers: {error}') from None
    text_array = np.empty((count, len(texts)), np.object_)
    for place, name in enumerate(texts):
        text_array[:, place] = [_as_bytes(name, value) for value in _values(name, data)]
    return number_array, text_array


def _values(name: str, data: Data) -> Sequence[Any] | Array:
    if name not in data:
        raise ValueError(f'there is no column "{name}"; there are: {", ".join(map(str, data))}')
    return data[name]


def _as_bytes(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if value is None or value != value:  # NaN is what pandas has for a missing text
        return b""
    raise ValueError(f'column "{name}" holds {value!r}, which is no text')


def _number_column(column: Number, values: npt.NDArray[np.float32]) -> NumberColumn:
    known = values[~np.isnan(values)].astype(np.float64)
    if not len(known) or not np.isfinite(known).all():
        raise ValueError(
            f'column "{column.name}" {"holds infinity" if len(known) else "has no value"} in the training rows'
        )
    fill = float(np.median(known))
    low, high = (None, None) if column.clip is None else (float(q) for q in np.quantile(known, column.clip))
    if column.log1p:
        low = max(low or 0.0, 0.0)
        high = None if high is None else max(high, low)
    bounds: tuple[float, ...] = ()
    if isinstance(column.buckets, int):
        if column.buckets > 1:
            bounds = tuple(np.unique(np.quantile(known, np.arange(1, column.buckets) / column.buckets)).tolist())
    else:
        bounds = tuple(float(bound) for bound in column.buckets)
        if not bounds or (np.diff(bounds) <= 0).any():
            raise ValueError(f'column "{column.name}": the bounds of its buckets must rise')
    if not column.as_value and not bounds:
        raise ValueError(f'column "{column.name}" is neither a value nor has it buckets')
    fitted = NumberColumn(column.name, column.missing, fill, low, high, column.log1p, 0.0, 1.0, column.as_value, bounds)
    if not column.standardise:
        return fitted
    # Mean and deviation of what the table itself makes of the training rows
    filled = np.where(np.isnan(values), fill, values.astype(np.float64))
    made = Values([fitted]).scaled(filled[:, None])
    mean, deviation = float(made.mean()), float(made.std())
    is_constant = deviation <= 1e-9 * abs(mean)
    return replace(fitted, mean=mean, deviation=1.0 if is_constant else deviation)


def _text_column(column: Words | Hashed, values: Sequence[bytes]) -> TextColumn:
    if isinstance(column, Hashed):
        if column.buckets < 1:
            raise ValueError(f'column "{column.name}" has {column.buckets} buckets; it needs one at least')
        return HashColumn(column.name, column.buckets, column.missing)
    try:
        counts = Counter(value.decode() for value in values if value)
    except UnicodeDecodeError as error:
        raise ValueError(f'column "{column.name}" holds what is not UTF-8: {error}') from None
    words = tuple(sorted(word for word, count in counts.items() if count >= column.least_count))
    if not words:
        raise ValueError(
            f'column "{column.name}" has no word in the training rows that occurs {column.least_count} times'
        )
    most_frequent = max(words, key=lambda word: counts[word])
    return WordColumn(
        column.name, words, column.unknown, column.missing, most_frequent if column.missing == "fill" else ""
    )
