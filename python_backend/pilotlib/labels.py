"""What are the best classes of these logits, and how sure is the model? All rows of an execution at once.

ranking = Ranking(classes=1000, k=5, activation="softmax", max_rows=64)
index, score = ranking.best(logits)              # INT32[rows, 5], FP32[rows, 5], best first
names("labels.txt")[index]                       # their labels, as bytes
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

ACTIVATIONS = ("softmax", "sigmoid", "none")

Floats = npt.NDArray[np.float32]


class Ranking:
    """The k best of `classes`. Its scratch memory is made once, for `max_rows` rows; more rows get their own."""

    def __init__(self, classes: int, k: int, activation: str = "softmax", max_rows: int = 1) -> None:
        if not 1 <= k <= classes:
            raise ValueError(f"k is {k}, but must be from 1 to {classes}, the number of classes")
        self._k = k
        self._activation = activation
        self._scratch = np.zeros((max(1, max_rows), classes), np.float32)

    def best(self, logits: Floats) -> tuple[npt.NDArray[np.int32], Floats]:
        """(classes INT32[rows, k], scores FP32[rows, k]) of logits [rows, classes], best first, equal ones by their number.

        softmax: shares of 1 over all classes; sigmoid: each class by itself; none: the logits. No logit overflows.
        """
        k, rows = self._k, np.arange(len(logits))[:, np.newaxis]
        if k < logits.shape[1]:  # noqa: SIM108
            chosen = np.argpartition(logits, -k, axis=1)[:, -k:]
        else:
            chosen = np.broadcast_to(np.arange(k), logits.shape)
        values = logits[rows, chosen]
        order = np.lexsort((chosen, -values))
        index, best = chosen[rows, order], values[rows, order]
        # Partition chooses as it likes among equal ones at the edge, and logits of INT8 models are often equal.
        for row in np.flatnonzero(np.count_nonzero(logits >= best[:, -1:], axis=1) > k):
            index[row] = np.argsort(-logits[row], kind="stable")[:k]
        return index.astype(np.int32), self._scores(logits, best)

    def _scores(self, logits: Floats, best: Floats) -> Floats:
        if self._activation == "sigmoid":
            # exp of what is never positive: 1 / (1 + exp(-x)) for x above 0, exp(x) / (1 + exp(x)) below.
            small = np.exp(-np.abs(best))
            scores: Floats = np.where(best >= 0, 1, small).astype(np.float32) / (1 + small)
            return scores
        if self._activation == "none":
            return best
        rows = len(logits)
        scratch: Floats = self._scratch[:rows] if rows <= len(self._scratch) else np.empty_like(logits)
        highest = best[:, :1]
        # -inf where the difference leaves the range of FP32 (3e38 less -3e38): its exp is the right 0. NaN: the caller's matter.
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(logits, highest, out=scratch)
            np.exp(scratch, out=scratch)
            shares = np.exp(best - highest) / scratch.sum(axis=1, keepdims=True)
        return np.asarray(shares, np.float32)


def first_not_finite(logits: Floats) -> tuple[int, int] | None:
    """(row, class) of the first NaN or infinity in [rows, classes], None when all is well."""
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(
            logits.sum()
        ):  # an infinity or NaN anywhere makes the sum one: 5 times faster than looking at each
            return None
    bad = np.argwhere(~np.isfinite(logits))
    return (int(bad[0][0]), int(bad[0][1])) if len(bad) else None


def names(path: Path) -> npt.NDArray[np.object_]:
    """The labels of a file, one a line in UTF-8, as an array of bytes; class 0 is the first. Raises OSError and ValueError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path.name} is not UTF-8 text: {error}") from None
    found = np.empty(len(lines), np.object_)
    found[:] = [line.strip().encode() for line in lines]
    return found
