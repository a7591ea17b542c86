"""How do raw columns become what a model takes? Fitted columns, computed by one code for training and for serving.

    table = table_file.read(Path("features.json"))             # fitted by a training script with pilotlib.table_fit
    dense, categorical = table.transform(numbers, texts)       # FP32[b,n], bytes[b,m] -> FP32[b,N], INT64[b,M]

A missing number is NaN, a missing text the empty string. `dense` holds the value of each number column that asks for it, in
their order, then an indicator (1 = missing) of each that asks for one. `categorical` holds the buckets of number columns,
then the indices of all text columns. All rows of an execution go through numpy together; a text costs a look-up in a dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from pilotlib.tensors import Array
from pilotlib.told import in_quotes
from pilotlib.verbs import BadRequest

NUMBERS, TEXTS = "numbers", "texts"
DENSE, CATEGORICAL = "dense", "categorical"
UNKNOWN = 0
SHOWN_CHARACTERS = 40  # of a refused text, in its error
LARGEST = float(np.finfo(np.float32).max)

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class NumberColumn:
    """A number: `(f(clipped) - mean) / deviation` with f = log1p or nothing, a bucket, or both."""

    name: str
    missing: str
    """indicator: fill, and say so in a dense column of its own; fill; refuse: the request is refused."""
    fill: float
    """What stands for a missing value, before clipping."""
    low: float | None
    high: float | None
    log1p: bool
    mean: float
    deviation: float
    as_value: bool
    """Whether the value is a dense column."""
    bounds: tuple[float, ...]
    """None, or rising bounds of buckets, making a categorical column: 0 missing, 1 below the first bound, ..."""

    @property
    def size(self) -> int:
        """How many indices the bucket column has."""
        return len(self.bounds) + 2


@dataclass(frozen=True)
class WordColumn:
    """A text of a vocabulary: 0 unknown, 1 the first of `words`, ...; the index after the last is "missing", when
    that has its own."""

    name: str
    words: tuple[str, ...]
    unknown: str
    """zero: index 0; refuse: the request is refused."""
    missing: str
    """own: an index of its own; unknown: index 0; fill: the index of `fill`; refuse."""
    fill: str

    @property
    def size(self) -> int:
        return len(self.words) + 1 + (self.missing == "own")


@dataclass(frozen=True)
class HashColumn:
    """Any text, into one of `buckets`: 0 missing, otherwise `1 + mixed(crc32(utf-8)) % buckets`."""

    name: str
    buckets: int
    missing: str
    """own: index 0, which no text has; refuse."""

    @property
    def size(self) -> int:
        return self.buckets + 1


TextColumn = WordColumn | HashColumn
Request = tuple[Array | None, Array | None]
"""(numbers, texts)"""
Answer = tuple[npt.NDArray[np.float32], Indices]
"""(dense, categorical)"""


class Fault(NamedTuple):
    """Why a row has no answer."""

    row: int
    input: str
    why: str

    def request_error(self, first_row: int = 0) -> BadRequest:
        """The error of a request whose rows begin at `first_row` of those that were transformed."""
        return BadRequest(self.input, f"row {self.row - first_row}: {self.why}")


class Table:
    """Fitted columns, ready to transform rows."""

    def __init__(self, numbers: Sequence[NumberColumn], texts: Sequence[TextColumn]) -> None:
        self.numbers, self.texts = tuple(numbers), tuple(texts)
        self._fill = np.array([column.fill for column in numbers])
        self._no_fill = np.array([column.missing == "refuse" for column in numbers], dtype=bool)
        self._bucketed = [(place, np.array(c.bounds)) for place, c in enumerate(numbers) if c.bounds]
        self._indicated = [place for place, column in enumerate(numbers) if column.missing == "indicator"]
        self._valued = [place for place, column in enumerate(numbers) if column.as_value]
        self._values = Values([numbers[place] for place in self._valued])
        self._lookups = [_indices_by_word(column) if isinstance(column, WordColumn) else None for column in texts]

    @property
    def dense_names(self) -> tuple[str, ...]:
        """One name for each column of `dense`."""
        names = [self.numbers[place].name for place in self._valued]
        return (*names, *(f"{self.numbers[place].name} is missing" for place in self._indicated))

    @property
    def categorical_sizes(self) -> dict[str, int]:
        """Name -> how many indices there are, of each column of `categorical`: the rows of its embedding."""
        columns = (*(self.numbers[place] for place, _ in self._bucketed), *self.texts)
        return {column.name: column.size for column in columns}

    @property
    def widths(self) -> dict[str, int]:
        """Columns of each input and output."""
        return {
            NUMBERS: len(self.numbers),
            TEXTS: len(self.texts),
            DENSE: len(self._valued) + len(self._indicated),
            CATEGORICAL: len(self._bucketed) + len(self.texts),
        }

    def transform_requests(self, requests: Sequence[Request]) -> list[Answer | BadRequest]:
        """One answer per request, all in one go: its (dense, categorical), or what is wrong with its first bad row.

        Each request is (numbers, texts) that `row_count` has accepted.
        """
        dense, categorical, faults = self.transform_each(
            _joined([numbers for numbers, _ in requests]), _joined([texts for _, texts in requests])
        )
        answers: list[Answer | BadRequest] = []
        start = 0
        for numbers, texts in requests:
            end = start + len(texts if numbers is None else numbers)  # type: ignore[arg-type]  # one of them is there
            answers.append((dense[start:end], categorical[start:end]))
            if faults and (bad := [row for row in faults if start <= row < end]):
                answers[-1] = faults[min(bad)].request_error(start)
            start = end
        return answers

    def row_count(self, numbers: Array | None, texts: Array | None) -> int:
        """How many rows these inputs have. Raises BadRequest when one is absent, or has other columns or rows than it must."""
        rows = []
        for name, array, columns in ((NUMBERS, numbers, self.numbers), (TEXTS, texts, self.texts)):
            if array is None:
                if columns:
                    raise BadRequest(name, f"is missing; it has the columns {_listed(columns)}")
                continue
            if array.ndim != 2 or array.shape[1] != len(columns):
                raise BadRequest(
                    name, f"has shape {list(array.shape)}, but must be [rows, {len(columns)}]: {_listed(columns)}"
                )
            rows.append(len(array))
        if len(set(rows)) > 1:
            raise BadRequest(TEXTS, f"has {rows[1]} rows, {NUMBERS} has {rows[0]}")
        return rows[0] if rows else 0

    def transform(self, numbers: Array | None = None, texts: Array | None = None) -> Answer:
        """(dense FP32[b,N], categorical INT64[b,M]) of b rows; an input without columns may be left out.

        numbers: FP32[b,n], or FP64, which is rounded to FP32 first, as the wire would. texts: object[b,m] of bytes.
        Raises BadRequest for the first row that has no answer: infinite, refused as missing or unknown, not UTF-8.
        """
        dense, categorical, faults = self.transform_each(numbers, texts)
        if faults:
            raise faults[min(faults)].request_error()
        return dense, categorical

    def transform_each(
        self, numbers: Array | None = None, texts: Array | None = None
    ) -> tuple[npt.NDArray[np.float32], Indices, dict[int, Fault]]:
        """As `transform`, but rows without an answer are told, by their number, and the others are right.

        Raises what `row_count` raises.
        """
        rows = self.row_count(numbers, texts)
        faults: dict[int, Fault] = {}
        dense = np.empty((rows, len(self._valued) + len(self._indicated)), np.float32)
        categorical = np.empty((rows, len(self._bucketed) + len(self.texts)), np.int64)
        if numbers is not None and self.numbers:
            self._transform_numbers(numbers, dense, categorical, faults)
        if texts is not None and self.texts:
            self._transform_texts(texts, categorical, faults)
        return dense, categorical, faults

    def _transform_numbers(
        self, numbers: Array, dense: npt.NDArray[np.float32], categorical: Indices, faults: dict[int, Fault]
    ) -> None:
        with np.errstate(over="ignore"):  # an FP64 beyond FP32 becomes infinite, which is refused below
            cells = np.asarray(numbers, dtype=np.float32).astype(np.float64)
        missing = None
        is_finite = np.isfinite(cells)
        if not is_finite.all():
            missing = np.isnan(cells)
            self._refuse_numbers(cells, missing, faults)
            np.copyto(cells, self._fill, where=~is_finite)
        for column, (place, bounds) in enumerate(self._bucketed):
            bucket = np.searchsorted(bounds, cells[:, place], side="right") + 1
            categorical[:, column] = bucket if missing is None else np.where(missing[:, place], 0, bucket)
        values = len(self._valued)
        dense[:, :values] = self._values.scaled(cells if values == len(self.numbers) else cells[:, self._valued])
        dense[:, values:] = 0 if missing is None else missing[:, self._indicated]

    def _refuse_numbers(self, cells: Floats, missing: npt.NDArray[np.bool_], faults: dict[int, Fault]) -> None:
        infinite = np.isinf(cells)
        if infinite.any():
            for row, place in np.argwhere(infinite).tolist():
                why = f"{self.numbers[place].name} is {cells[row, place]}; it must be a number, or NaN where it is missing"
                faults.setdefault(row, Fault(row, NUMBERS, why))
        refused = missing & self._no_fill
        if refused.any():
            for row, place in np.argwhere(refused).tolist():
                why = f"{self.numbers[place].name} is missing (NaN), which is refused"
                faults.setdefault(row, Fault(row, NUMBERS, why))

    def _transform_texts(self, texts: Array, categorical: Indices, faults: dict[int, Fault]) -> None:
        rows, width = texts.shape
        cells: list[Any] = texts.ravel().tolist()
        columns = [cells[place::width] for place in range(width)]
        indices = np.empty((width, rows), np.int64)
        for place, (column, lookup) in enumerate(zip(self.texts, self._lookups, strict=True)):
            if lookup is None:
                indices[place] = _hashed(column, columns[place], faults)
            else:
                indices[place] = np.fromiter(map(lookup.get, columns[place], repeat(-1)), np.int64, rows)
        if indices.min(initial=0) < 0:  # one look for all columns: 3 us
            for place in np.flatnonzero(indices.min(axis=1) < 0).tolist():
                _look_closer(self.texts[place], columns[place], indices[place], faults)
        categorical[:, len(self._bucketed) :] = indices.T


class Values:
    """The dense values of some number columns, all at once."""

    def __init__(self, columns: Sequence[NumberColumn]) -> None:
        lows = [-np.inf if column.low is None else column.low for column in columns]
        highs = [np.inf if column.high is None else column.high for column in columns]
        self._low, self._high = np.array(lows), np.array(highs)
        self._logged = [place for place, column in enumerate(columns) if column.log1p]
        self._mean = np.array([column.mean for column in columns])
        self._deviation = np.array([column.deviation for column in columns])
        self._is_bounded = all(np.isfinite(lows + highs))

    def scaled(self, cells: Floats) -> Floats:
        """FP64[b,k] of finite FP64[b,k]."""
        values = np.minimum(np.maximum(cells, self._low), self._high)
        if self._logged:
            values[:, self._logged] = np.log1p(values[:, self._logged])
        values -= self._mean
        values /= self._deviation
        # Without a clip a value can be larger than FP32 holds.
        return values if self._is_bounded else np.clip(values, -LARGEST, LARGEST)


def mixed(checksum: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Bits of a CRC spread over the whole word: the finaliser of MurmurHash3 (Appleby, 2011, fmix32).

    A CRC is linear: of texts that differ in a digit only, the low bits alone would fill some buckets more than others.
    """
    x: npt.NDArray[np.uint32] = checksum ^ (checksum >> np.uint32(16))
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def _joined(parts: Sequence[Array | None]) -> Array | None:
    there = [part for part in parts if part is not None]
    return there[0] if len(there) == 1 else np.concatenate(there) if there else None


def _hashed(column: TextColumn, words: Sequence[Any], faults: dict[int, Fault]) -> Indices:
    assert isinstance(column, HashColumn)
    try:
        # One check for all: they are UTF-8 together, parted by an ASCII character, only if each one is.
        b"\n".join(words).decode()
    except (UnicodeDecodeError, TypeError):
        words = [word if _is_text(column, row, word, faults) else b"" for row, word in enumerate(words)]
    sums = np.fromiter(map(crc32, words), np.uint32, len(words))
    indices = (mixed(sums) % np.uint32(column.buckets)).astype(np.int64) + 1
    if b"" in words:
        for row, word in enumerate(words):
            if not word:
                indices[row] = 0
                if column.missing == "refuse":
                    faults.setdefault(row, Fault(row, TEXTS, f"{column.name} is missing (empty), which is refused"))
    return indices


def _look_closer(column: TextColumn, words: Sequence[Any], indices: Indices, faults: dict[int, Fault]) -> None:
    """Settle the words that the vocabulary lacks, those with index -1."""
    assert isinstance(column, WordColumn)
    for row in np.flatnonzero(indices < 0).tolist():
        indices[row] = UNKNOWN
        word = words[row]
        if not _is_text(column, row, word, faults):
            continue
        if not word:
            faults.setdefault(row, Fault(row, TEXTS, f"{column.name} is missing (empty), which is refused"))
        elif column.unknown == "refuse":
            faults.setdefault(row, Fault(row, TEXTS, f'{column.name} has no value "{_shown(word)}"'))


def _is_text(column: TextColumn, row: int, word: Any, faults: dict[int, Fault]) -> bool:
    if not isinstance(word, bytes):
        faults.setdefault(row, Fault(row, TEXTS, f"{column.name} is of type {type(word).__name__}, not bytes"))
        return False
    try:
        word.decode()
    except UnicodeDecodeError as error:
        why = f"{column.name} is not UTF-8: {error.reason} at byte {error.start}"
        faults.setdefault(row, Fault(row, TEXTS, why))
        return False
    return True


def _indices_by_word(column: WordColumn) -> Mapping[bytes, int]:
    indices = {word.encode(): index for index, word in enumerate(column.words, 1)}
    missing = {"own": len(column.words) + 1, "unknown": UNKNOWN, "fill": indices.get(column.fill.encode(), UNKNOWN)}
    if column.missing in missing:
        indices[b""] = missing[column.missing]
    return indices


def _shown(word: bytes) -> str:
    text = word[: 4 * SHOWN_CHARACTERS].decode(errors="ignore")
    return in_quotes(text) if len(text) <= SHOWN_CHARACTERS else in_quotes(text[:SHOWN_CHARACTERS]) + "..."


def _listed(columns: Sequence[NumberColumn] | Sequence[TextColumn]) -> str:
    return ", ".join(column.name for column in columns) or "none"
