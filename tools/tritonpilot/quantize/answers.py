"""How right are answers, by which metric, and how alike are the answers of two models?

    statistic = METRICS["auc"].prepare(Answers(reference, candidate, label))
    statistic(np.ones((1, rows)))                # the AUC of both, [2,1]
    statistic(weights)                           # the same of many resamples [resamples, rows] at a time, [2,resamples]
    agreement(reference, candidate).cosine       # without labels

A resample is a weight for each row: how often it was drawn. So no metric is computed by copying rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpilot.errors import MeasurementError, ModelError

Floats = NDArray[np.float64]
#: Weights [resamples, rows] -> the metric [2, resamples]: of the reference, of the candidate.
Statistic = Callable[[Floats], Floats]

LEAST_OF_CLASS = 10  # of a slice under auc: with fewer the order of a handful of rows decides
PROBABILITY_SUM = 1e-3


@dataclass(frozen=True)
class Agreement:
    """How alike two models answer, without labels. A value is None where it has no meaning for the output."""

    cosine: float | None
    """Mean over rows of the cosine of the two answers; rows of two numbers or more"""
    cosine_min: float | None
    kl: float | None
    """Mean Kullback-Leibler divergence in nats of the candidate's class probabilities (softmax, if the output is not already
    probabilities) from the reference's; outputs [n,classes] and [n,steps,classes], and [n,1] when within 0 to 1"""
    max_difference: float | None
    """Largest absolute difference of any number"""
    argmax: float | None
    """Share of rows (steps) whose largest class is the same; outputs [n,classes] and [n,steps,classes]"""
    r2: float | None
    """1 - squared difference / variance of the reference; one number a row that is not the same in all"""
    equal: float
    """Share of equal elements"""


@dataclass(frozen=True)
class Answers:
    """Answers [n, ...] of both models to the same n rows, and their label."""

    reference: NDArray[Any]
    candidate: NDArray[Any]
    label: NDArray[Any] | None
    is_pairwise: bool = False
    """The label is [n,n]: of pairs of rows"""

    def take(self, rows: NDArray[np.int64]) -> Answers:
        """The answers to some of the rows."""
        label = self.label
        if label is not None:
            label = label[np.ix_(rows, rows)] if self.is_pairwise else label[rows]
        return Answers(self.reference[rows], self.candidate[rows], label, self.is_pairwise)


@dataclass(frozen=True)
class Metric:
    """How answers are judged."""

    meaning: str
    label: str | None
    """What the label must be; None: not needed"""
    prepare: Callable[[Answers], Statistic]
    fitted: Callable[[Answers, str], Answers]
    """Answers in the form that `prepare` takes; raises when outputs or label do not fit. The text says where they are from."""
    is_enough: Callable[[Answers], bool] = lambda _: True
    """Whether a slice of enough rows can be judged alone"""
    by_class: bool = False
    """Rows are drawn within each class of the label, so that no resample lacks one"""


def agreement(reference: NDArray[Any], candidate: NDArray[Any]) -> Agreement:
    """How alike two arrays of answers [n, ...] are."""
    equal = float((reference == candidate).mean())
    if reference.dtype.kind not in "fiu":
        return Agreement(None, None, None, None, None, None, equal)
    ours, theirs = reference.astype(np.float64), candidate.astype(np.float64)
    largest = float(np.abs(ours - theirs).max())
    if reference.dtype.kind != "f":
        return Agreement(None, None, None, largest, None, None, equal)
    cosines = _cosines(ours, theirs) if ours[0].size > 1 else None
    return Agreement(
        None if cosines is None else float(cosines.mean()),
        None if cosines is None else float(cosines.min()),
        _divergence(ours, theirs),
        largest,
        float((ours.argmax(-1) == theirs.argmax(-1)).mean()) if _has_classes(ours) else None,
        float(_determination(ours, theirs)(np.ones((1, len(ours))))[1, 0]) if _can_determine(ours) else None,
        equal,
    )


def is_constant(array: NDArray[Any]) -> bool:
    """Whether all rows are the same."""
    return bool((array == array[:1]).all())


def _fitted_auc(answers: Answers, where: str) -> Answers:
    label = _flat_label(answers, where)
    classes = np.unique(label)
    if not np.isin(classes, (0, 1)).all():
        raise ModelError(f"{where}: labels must be 0 or 1, and there are {_some(classes)}. Nothing was changed.")
    if len(classes) < 2:
        raise MeasurementError(
            f"{where}: all {len(label)} labels are {classes[0]:g}, and an AUC compares two classes. Nothing was changed. Take rows "
            "of both."
        )
    return Answers(*_one_number(answers, where), label == 1)


def _auc(answers: Answers) -> Statistic:
    assert answers.label is not None
    ours, theirs = (_ranked(answers.label, scores) for scores in (answers.reference, answers.candidate))
    return lambda weights: np.stack([ours(weights), theirs(weights)])


def _ranked(is_positive: NDArray[np.bool_], scores: NDArray[Any]) -> Callable[[Floats], Floats]:
    """Weights -> area under the ROC curve: the chance that a positive ranks above a negative, ties counting half. Sorted once."""
    positives, negatives = np.flatnonzero(is_positive), np.flatnonzero(~is_positive)
    negatives = negatives[np.argsort(scores[negatives], kind="stable")]
    below, upto = (np.searchsorted(scores[negatives], scores[positives], side) for side in ("left", "right"))

    def area(weights: Floats) -> Floats:
        passed = np.zeros((len(weights), len(negatives) + 1))  # the weight of the first 0, 1, 2 ... negatives
        np.cumsum(np.take(weights, negatives, axis=1), axis=1, out=passed[:, 1:])
        own = np.take(weights, positives, axis=1)
        won = np.einsum("ij,ij->i", own, np.take(passed, below, axis=1) + np.take(passed, upto, axis=1)) / 2
        found: Floats = won / (own.sum(axis=1) * passed[:, -1])
        return found

    return area


def _both_classes(answers: Answers) -> bool:
    assert answers.label is not None
    positive = int(answers.label.sum())
    return min(positive, len(answers.label) - positive) >= LEAST_OF_CLASS


def _fitted_top1(answers: Answers, where: str) -> Answers:
    label = _flat_label(answers, where)
    classes = answers.reference.shape[-1]
    if answers.reference.ndim != 2 or classes < 2 or answers.reference.dtype.kind != "f":
        raise ModelError(
            f"{where}: scores [n,classes] are needed, not {_kind(answers.reference)}. Nothing was changed."
        )
    if label.dtype.kind not in "iu" or label.min() < 0 or label.max() >= classes:
        raise ModelError(
            f"{where}: labels must be class indices 0 to {classes - 1}, and there are {_some(np.unique(label))} "
            f"({label.dtype}). Nothing was changed."
        )
    return Answers(answers.reference, answers.candidate, label)


def _top1(answers: Answers) -> Statistic:
    return _mean(answers.reference.argmax(1) == answers.label, answers.candidate.argmax(1) == answers.label)


def _fitted_exact(answers: Answers, where: str) -> Answers:
    assert answers.label is not None
    label, ours, theirs = (_as_text(each) for each in (answers.label, answers.reference, answers.candidate))
    if ours.dtype.kind == "f" and ours.ndim == label.ndim + 1 and ours.shape[-1] > 1:
        ours, theirs = ours.argmax(-1), theirs.argmax(-1)
    if ours.shape != label.shape or (ours.dtype.kind == "U") != (label.dtype.kind == "U"):
        raise ModelError(
            f"{where}: a label {_kind(label)} cannot equal answers {_kind(answers.reference)}. Nothing was changed. A label has "
            "the shape of the answers, or of their largest classes."
        )
    return Answers(ours, theirs, label)


def _exact(answers: Answers) -> Statistic:
    return _mean(_row_equal(answers.reference, answers.label), _row_equal(answers.candidate, answers.label))


def _as_text(array: NDArray[Any]) -> NDArray[Any]:
    """Strings of any kind as numpy's; numbers as they are."""
    if array.dtype.kind == "S":
        return np.char.decode(array, "utf-8")
    return array.astype(np.str_) if array.dtype.kind == "O" else array


def _row_equal(array: NDArray[Any], other: Any) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (array == other).reshape(len(array), -1).all(axis=1)
    return found


def _fitted_pearson(answers: Answers, where: str) -> Answers:
    label = answers.label
    assert label is not None
    count = len(label)
    if label.dtype.kind not in "fiub":
        raise ModelError(f"{where}: labels must be numbers, not {label.dtype}. Nothing was changed.")
    if answers.reference[0].size > 1 or label[0].size > 1:
        if label.shape != (count, count) or answers.reference.ndim != 2:
            raise ModelError(
                f"{where}: embeddings [n,d] are judged by the similarity of each pair of rows, a label [n,n] (negative: not "
                f"rated); there are answers {_kind(answers.reference)} and a label {_kind(label)}. Nothing was changed. Some "
                "rows of a file need the label of their own pairs only."
            )
        if (label != label.T).any():
            raise ModelError(
                f"{where}: the label of a pair must be the same in both orders, and {int((label != label.T).sum())} of "
                f"{count * count} differ. Nothing was changed. Fill both halves of the label [n,n]."
            )
        found = Answers(answers.reference, answers.candidate, label.astype(np.float64), is_pairwise=True)
    else:
        found = Answers(*_one_number(answers, where), label.reshape(count).astype(np.float64))
    if not _varies(found):
        raise MeasurementError(
            f"{where}: the labels of these {count} rows are all the same, so nothing can correlate with them. Nothing was "
            "changed. Take rows whose labels differ."
        )
    return found


def _varies(answers: Answers) -> bool:
    label = answers.label
    assert label is not None
    rated = label[_rated(label)] if answers.is_pairwise else label
    return bool(rated.size and rated.min() < rated.max())


def _rated(label: Floats) -> NDArray[np.bool_]:
    return (label >= 0) & ~np.eye(len(label), dtype=bool)


def _pearson(answers: Answers) -> Statistic:
    assert answers.label is not None
    if not answers.is_pairwise:
        both = [(answers.label, scores.astype(np.float64)) for scores in (answers.reference, answers.candidate)]
        return lambda weights: np.stack([_correlation(lambda x: weights @ x, *each) for each in both])
    # A pair counts as often as its rows were drawn together; a row drawn twice makes no pair with itself.
    rated = _rated(answers.label)
    pairs = [(answers.label, _similarities(each)) for each in (answers.reference, answers.candidate)]

    def values(weights: Floats) -> Floats:
        def total(x: Floats) -> Floats:
            found: Floats = np.einsum("bj,bj->b", weights @ np.where(rated, x, 0.0), weights)
            return found

        return np.stack([_correlation(total, *each) for each in pairs])

    return values


def _correlation(total: Callable[[Floats], Floats], x: Floats, y: Floats) -> Floats:
    """Pearson's r by sums over the rows or pairs as drawn; 0 where one of them does not vary."""
    x, y = x - x.mean(), y - y.mean()
    n, sum_x, sum_y = total(np.ones_like(x)), total(x), total(y)
    n = np.maximum(n, 1)
    across = total(x * y) - sum_x * sum_y / n
    along = (total(x * x) - sum_x**2 / n) * (total(y * y) - sum_y**2 / n)
    found: Floats = np.where(along > 0, across / np.sqrt(np.maximum(along, 1e-300)), 0.0)
    return found


def _similarities(embeddings: NDArray[Any]) -> Floats:
    """The cosines of all pairs, [n,n]."""
    rows = embeddings.astype(np.float64)
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    found: Floats = rows @ rows.T
    return found


def _fitted_agreement(answers: Answers, where: str) -> Answers:
    ours = answers.reference
    if ours.dtype.kind == "f" and ours[0].size == 1 and not _can_determine(ours):
        raise MeasurementError(f"{where}: the reference gives all rows the same number. Take rows that differ.")
    return answers


def _agreement(answers: Answers) -> Statistic:
    ours, theirs = answers.reference, answers.candidate
    if ours.dtype.kind != "f":
        return _mean(None, (ours == theirs).reshape(len(ours), -1).mean(axis=1))
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    if ours[0].size > 1:
        return _mean(None, _cosines(ours, theirs))
    return _determination(ours, theirs)


def _determination(ours: Floats, theirs: Floats) -> Statistic:
    """R2 of one number a row: 1 - squared difference / variance of the reference."""
    centred, squared = ours.reshape(-1) - ours.mean(), ((ours - theirs) ** 2).reshape(-1)

    def determination(weights: Floats) -> Floats:
        spread = weights @ centred**2 - (weights @ centred) ** 2 / weights.sum(axis=1)
        found = 1.0 - weights @ squared / np.maximum(spread, 1e-300)
        return np.stack([np.ones_like(found), found])

    return determination


def _can_determine(ours: NDArray[Any]) -> bool:
    return ours[0].size == 1 and not is_constant(ours)


def _fitted_argmax(answers: Answers, where: str) -> Answers:
    if answers.reference.dtype.kind != "f" or not _has_classes(answers.reference):
        raise ModelError(
            f"{where}: scores [n,classes] or [n,steps,classes] are needed, not {_kind(answers.reference)}. Nothing was changed."
        )
    return answers


def _argmax(answers: Answers) -> Statistic:
    same = answers.reference.argmax(-1) == answers.candidate.argmax(-1)
    return _mean(None, same.reshape(len(same), -1).mean(axis=1))


def _mean(ours: NDArray[Any] | None, theirs: NDArray[Any]) -> Statistic:
    """The weighted mean of a number a row; `ours` None: 1 throughout, what the reference agrees with itself."""
    columns = np.stack([np.ones(len(theirs)) if ours is None else ours, theirs], axis=1).astype(np.float64)

    def mean(weights: Floats) -> Floats:
        found: Floats = (weights @ columns).T / weights.sum(axis=1)
        return found

    return mean


def _flat_label(answers: Answers, where: str) -> NDArray[Any]:
    label = answers.label
    assert label is not None
    if label.size != len(label) or label.dtype.kind not in "fiub":
        raise ModelError(f"{where}: one number a row is needed as label, not {_kind(label)}. Nothing was changed.")
    return label.reshape(-1)


def _one_number(answers: Answers, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    if answers.reference[0].size != 1 or answers.reference.dtype.kind not in "fiu":
        raise ModelError(f"{where}: one score a row is needed, not {_kind(answers.reference)}. Nothing was changed.")
    return answers.reference.reshape(-1), answers.candidate.reshape(-1)


def _cosines(ours: Floats, theirs: Floats) -> Floats:
    """Of each row; two rows of zeros are alike."""
    ours, theirs = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    products = np.einsum("ij,ij->i", ours, theirs)
    found: Floats = np.where(lengths > 0, products / np.maximum(lengths, 1e-300), (ours == theirs).all(axis=1))
    return found


def _has_classes(array: NDArray[Any]) -> bool:
    return array.ndim in (2, 3) and array.shape[-1] > 1


def _divergence(ours: Floats, theirs: Floats) -> float | None:
    if ours.shape[1:] == (1,) and min(ours.min(), theirs.min()) >= 0 and max(ours.max(), theirs.max()) <= 1:
        ours, theirs = np.concatenate([ours, 1 - ours], axis=1), np.concatenate([theirs, 1 - theirs], axis=1)
    elif not _has_classes(ours):
        return None
    p, q = (np.maximum(_probabilities(each), 1e-12) for each in (ours, theirs))
    return float((p * np.log(p / q)).sum(-1).mean())


def _probabilities(array: Floats) -> Floats:
    if array.min() >= 0 and (np.abs(array.sum(-1) - 1) <= PROBABILITY_SUM).all():
        return array
    powers = np.exp(array - array.max(-1, keepdims=True))
    found: Floats = powers / powers.sum(-1, keepdims=True)
    return found


def _kind(array: NDArray[Any]) -> str:
    return f"{array.dtype}{list(array.shape)}"


def _some(values: NDArray[Any]) -> str:
    return ", ".join(map(str, values[:4].tolist())) + (" ..." if len(values) > 4 else "")


METRICS: Mapping[str, Metric] = {
    "auc": Metric(
        "area under the ROC curve of one score a row", "0 or 1 [n]", _auc, _fitted_auc, _both_classes, by_class=True
    ),
    "top1": Metric("share of rows whose highest score is the label's class", "class index [n]", _top1, _fitted_top1),
    "pearson": Metric(
        "correlation of one score a row, or of the cosines of all pairs of embeddings, with the label",
        "number [n], or of each pair [n,n]",
        _pearson,
        _fitted_pearson,
        _varies,
    ),
    "exact": Metric("share of rows that equal their label throughout", "as the answers", _exact, _fitted_exact),
    "agreement": Metric(
        "with the reference: mean cosine of rows of numbers; R2, 1 - squared difference / variance, of one number a row; share of "
        "equal elements of integers and strings",
        None,
        _agreement,
        _fitted_agreement,
        lambda answers: (
            answers.reference.dtype.kind != "f" or answers.reference[0].size > 1 or _can_determine(answers.reference)
        ),
    ),
    "argmax": Metric("share of rows whose highest score is that of the reference", None, _argmax, _fitted_argmax),
}
