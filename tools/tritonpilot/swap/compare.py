"""Are the answers of two models to the same rows alike? Pure: arrays in, verdicts out.

    tolerances = {"prob": Tolerance.parse("0.01"), "label": Tolerance.parse("5%")}
    compare(old, new, tolerances, Tolerance(0.5, is_share=True))   # [Verdict("prob", ok=True, what="prob: differs by 3 %, ...")]

`old` and `new` are the answers to the same requests, in their order: output name -> array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpilot.errors import SpecError

Array = NDArray[Any]
Outputs = Mapping[str, Array]
Floats = NDArray[np.float64]

LEAST_ROWS = 8  # of which it is strange that all are answered alike
LEAST_ROWS_OF_COLUMNS = 16  # from which columns of answers are told apart
MOST_COLUMNS = 1024
MOVED_BY, MOVED_TO = 0.5, 0.7  # correlations
NOTABLE_SPREAD = 0.25  # of the widest column's


@dataclass(frozen=True)
class Tolerance:
    """How far answers may be apart. A share is one of the spread of the old answers (root mean square), and of unequal elements
    where these are no floats; otherwise no number may differ by more than `limit`."""

    limit: float
    is_share: bool = False

    @classmethod
    def parse(cls, text: str) -> Tolerance:
        """ "0.01" or "5%". Raises SpecError."""
        is_share = text.endswith("%")
        try:
            limit = float(text.removesuffix("%")) / (100 if is_share else 1)
        except ValueError:
            limit = math.nan
        if not 0 <= limit < math.inf:
            raise SpecError(
                f"The tolerance {text!r} is neither a number from 0 on, as 0.01, nor a share, as 5%. Nothing was changed."
            )
        return cls(limit, is_share)

    def __str__(self) -> str:
        return f"{100 * self.limit:g} %" if self.is_share else f"{self.limit:g}"


@dataclass(frozen=True)
class Verdict:
    """What is said of one output. `difference` is what was held against the tolerance; nan: it did not come to that."""

    output: str
    ok: bool
    what: str
    difference: float = math.nan


def compare(
    old: Sequence[Outputs],
    new: Sequence[Outputs],
    tolerances: Mapping[str, Tolerance],
    otherwise: Tolerance,
    free: frozenset[str] = frozenset(),
) -> list[Verdict]:
    """A verdict on each output. `free` are those whose answers have no fixed size: another size is another answer there, and
    nothing worse. Raises SpecError for a tolerance of an output that does not exist."""
    names = list(old[0]) if old else []
    if strange := [name for name in tolerances if name not in names]:
        raise SpecError(
            f"There is a tolerance for {strange[0]}, which is no output of the model ({', '.join(names)}). Nothing was changed."
        )
    absent = sorted({name for answer in new for name in names if name not in answer})
    found = [Verdict(name, ok=False, what=f"{name}: the new version does not answer with it") for name in absent]
    for name in names:
        if name not in absent:
            ours, theirs = [answer[name] for answer in old], [answer[name] for answer in new]
            found.append(_judge(name, ours, theirs, tolerances.get(name, otherwise), is_free=name in free))
    return found


def spread_of(old: Floats) -> float:
    """Root mean square of the answers [rows, columns] around the mean of each column; of all of them where nothing varies."""
    centred = old - old.mean(axis=0)
    around = float(np.sqrt(np.mean(centred**2)))
    size = float(np.sqrt(np.mean(old**2)))
    return around if around > 1e-6 * size else size or 1.0


def _judge(name: str, old: list[Array], new: list[Array], tolerance: Tolerance, *, is_free: bool) -> Verdict:
    kinds = {_kind(array) for array in old}, {_kind(array) for array in new}
    if kinds[0] != kinds[1]:
        return Verdict(
            name,
            ok=False,
            what=f"{name}: the new version answers with {_words(new[0])}, the old one with {_words(old[0])}",
        )
    misfit = [(a, b) for a, b in zip(old, new, strict=True) if a.shape != b.shape]
    if misfit and not is_free:
        was, now = misfit[0]
        return Verdict(
            name,
            ok=False,
            what=f"{name}: the new version answers {list(now.shape)} where the old one {list(was.shape)}",
        )
    if kinds[0] != {"f"} or is_free:
        return _judge_equality(name, old, new, tolerance)
    ours, theirs = _stacked(old), _stacked(new)
    broken = np.isfinite(ours) & ~np.isfinite(theirs)
    if broken.any():
        rows = broken.any(axis=1)
        what = f"{name}: the new version answers NaN or infinity in {int(rows.sum())} of {len(rows)} rows"
        return Verdict(name, ok=False, what=f"{what}, first in row {int(rows.argmax())} (counted from 0)")
    is_sound = np.isfinite(ours).all(axis=1)
    ours, theirs = ours[is_sound], theirs[is_sound]
    if not len(ours):
        return Verdict(name, ok=True, what=f"{name}: the old version answers NaN or infinity only, which says nothing")
    if len(ours) >= LEAST_ROWS and _is_constant(theirs) and not _is_constant(ours):
        return Verdict(
            name, ok=False, what=f"{name}: the new version answers all {len(ours)} rows alike, the old one does not"
        )
    if moved := _moved(ours, theirs):
        where, whence = moved
        return Verdict(
            name,
            ok=False,
            what=f"{name}: the new version's column {where} is the old one's column {whence}: are classes swapped?",
        )
    return _judge_floats(name, ours, theirs, tolerance)


def _judge_floats(name: str, old: Floats, new: Floats, tolerance: Tolerance) -> Verdict:
    if tolerance.is_share:
        difference = float(np.sqrt(np.mean((new - old) ** 2))) / spread_of(old)
        said = f"differs by {100 * difference:.3g} % of the spread of the old answers"
    else:
        difference = float(np.abs(new - old).max())
        said = f"differs by at most {difference:.3g}"
    ok = difference <= tolerance.limit
    return Verdict(name, ok, f"{name}: {said}, {'within' if ok else 'more than'} {tolerance}", difference)


def _judge_equality(name: str, old: list[Array], new: list[Array], tolerance: Tolerance) -> Verdict:
    unequal, count = 0.0, 0
    for ours, theirs in zip(old, new, strict=True):
        count += ours.size
        unequal += ours.size if ours.shape != theirs.shape else int((ours != theirs).sum())
    difference = unequal / count if count else 0.0
    ok = difference <= tolerance.limit
    said = f"{100 * difference:.3g} % of {count} elements differ"
    return Verdict(name, ok, f"{name}: {said}, {'within' if ok else 'more than'} {tolerance}", difference)


def _moved(old: Floats, new: Floats) -> tuple[int, int] | None:
    """(column, column of the old answers that it has become), where a column follows another old one much better than its own."""
    if len(old) < LEAST_ROWS_OF_COLUMNS or not 2 <= old.shape[1] <= MOST_COLUMNS:
        return None
    spreads = old.std(axis=0)
    if not spreads.max():
        return None
    ours, theirs = _standardised(old), _standardised(new)
    correlations = ours.T @ theirs / len(old)
    own, best = np.diag(correlations), correlations.max(axis=0)
    notable = (spreads >= NOTABLE_SPREAD * spreads.max()) & (best > MOVED_TO) & (best - own > MOVED_BY)
    if not notable.any():
        return None
    where = int(notable.argmax())
    return where, int(correlations[:, where].argmax())


def _standardised(array: Floats) -> Floats:
    spread = array.std(axis=0)
    found: Floats = (array - array.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return found


def _is_constant(array: Floats) -> bool:
    return bool((array == array[:1]).all())


def _stacked(arrays: list[Array]) -> Floats:
    """[rows, columns]; of answers without a batch dimension each is a row."""
    found: Floats
    if len({array.shape[1:] for array in arrays}) == 1 and all(array.ndim > 1 for array in arrays):
        found = np.concatenate([array.reshape(len(array), -1) for array in arrays]).astype(np.float64)
    elif len({array.shape for array in arrays}) == 1:
        found = np.stack([array.ravel() for array in arrays]).astype(np.float64)
    else:
        found = np.concatenate([array.ravel() for array in arrays]).astype(np.float64)[:, np.newaxis]
    return found


def _kind(array: Array) -> str:
    return "f" if array.dtype.kind == "f" else "i" if array.dtype.kind in "iub" else "S"


def _words(array: Array) -> str:
    return {"f": "floats", "i": "whole numbers", "S": "strings"}[_kind(array)]
