"""What of an answer is watched? A few numbers or words of each row of each output.

series_of({"prob": FP32[4,1]}, is_batched=True)      # {("prob", "value"): four numbers}
series_of({"scores": FP32[4,10]}, is_batched=True)   # top (the confidence), class (its column) and mean of each row
series_of({"label": BYTES[4,1]}, is_batched=True)    # text and length of each row
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

What = Literal["value", "top", "class", "mean", "text", "length"]
#: What is told apart, not measured: its distribution is one over words.
WORDS: frozenset[What] = frozenset(("class", "text"))

MOST_ROWS = 64  # of one answer: a request of thousands must not be the window
MOST_CLASSES = 4096
LONGEST_TEXT = 100


class Key(NamedTuple):
    """Which series."""

    output: str
    what: What


class Series(NamedTuple):
    """What the rows of an answer give, and how many rows have NaN or infinity, by output."""

    values: dict[Key, list[Any]]
    not_finite: dict[str, int]
    rows: int


def series_of(answer: Mapping[str, NDArray[Any]], *, is_batched: bool) -> Series:
    """The series of an answer. Rows with NaN or infinity are counted and left out."""
    values: dict[Key, list[Any]] = {}
    not_finite: dict[str, int] = {}
    most = 0
    for name, array in answer.items():
        rows = array if is_batched and array.ndim else array[np.newaxis]
        if not len(rows):
            continue
        if len(rows) > MOST_ROWS:
            rows = rows[np.linspace(0, len(rows) - 1, MOST_ROWS).astype(np.intp)]
        most = max(most, len(rows))
        flat = rows.reshape(len(rows), -1)
        if not flat.shape[1]:
            continue
        if flat.dtype.kind in "OSU":
            texts = [b"\0".join(_bytes(each) for each in row) for row in flat.tolist()]
            values[Key(name, "text")] = [text[:LONGEST_TEXT].decode(errors="replace") for text in texts]
            values[Key(name, "length")] = [float(len(text)) for text in texts]
            continue
        numbers = flat.astype(np.float64)
        is_sound = np.isfinite(numbers).all(axis=1)
        not_finite[name] = int((~is_sound).sum())
        numbers = numbers[is_sound]
        if numbers.shape[1] == 1:
            values[Key(name, "value")] = numbers[:, 0].tolist()
            continue
        values[Key(name, "top")] = numbers.max(axis=1).tolist()
        values[Key(name, "mean")] = numbers.mean(axis=1).tolist()
        if rows.ndim == 2 and numbers.shape[1] <= MOST_CLASSES:
            values[Key(name, "class")] = [str(column) for column in numbers.argmax(axis=1).tolist()]
    return Series(values, not_finite, most)


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()
