"""Are the answers of a quantised model still right, and could the loss be larger than these rows show?

    rows = data.read(Path("models/ctr/build/evaluation.npz"), read_signature(fp32))
    refuse_dynamic(int8)                                    # its answers would depend on batch-mates
    verdict = gate(predict(fp32, rows), predict(int8, rows), rows, "auc", max_loss=0.002)
    verdict.passed, verdict.reason                          # True, "auc 0.7548 -> 0.7546: loss 0.02 % (95 %: ...), ..."

The loss is judged by the upper end of a bootstrap interval: rows are drawn again and again with replacement, the same ones for
both models (paired), so what makes rows hard for both cancels out. `METRICS` says what each metric measures; a loss is always
(reference - candidate) / reference, with the reference's value on all rows, and for agreement 1 - agreement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from tritonpilot.errors import MeasurementError, ModelError
from tritonpilot.quantize.answers import METRICS, Agreement, Answers, Floats, Metric, agreement, is_constant
from tritonpilot.quantize.data import Rows

Outputs = Mapping[str, NDArray[Any]]

MATE_BATCHES = (1, 7, 64)
MATE_ROWS = 128
LEAST_ROWS = 50  # of a slice; smaller ones are judged together
RESAMPLES = 1000
SMALL = "(small ones)"
WEIGHTS_AT_ONCE = 1_000_000  # bounds memory: about 50 MB
#: Operators that take the range of an activation from the batch that they are given.
DYNAMIC_OPERATORS = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
# ONNX Runtime's exceptions have no base of their own.
ORT_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    *(each for each in vars(ort_state).values() if isinstance(each, type) and issubclass(each, Exception)),
)


@dataclass(frozen=True)
class SliceLoss:
    """What a part of the rows loses: those whose slice `name` has the value `value`."""

    name: str
    value: str
    rows: int
    reference: float
    candidate: float
    loss: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class Verdict:
    """What a candidate loses against the reference by `metric`. Losses are shares: 0.01 is 1 %."""

    metric: str
    rows: int
    reference: float
    candidate: float
    loss: float
    ci95: tuple[float, float]
    """The middle 95 % of the loss over resamples of the rows"""
    limit: float
    slice_limit: float
    worst_slice: SliceLoss | None
    slices: tuple[SliceLoss, ...]
    left_out: tuple[str, ...]
    """Slices that were not judged alone, and why"""
    agreement: Agreement
    passed: bool
    reason: str
    resamples: int
    seed: int


def predict(model: Path, rows: Rows, batch: int = 64, threads: int = 1) -> dict[str, NDArray[Any]]:
    """The model's outputs for all rows, [n, ...] by name, `batch` rows at a time on the CPU. Raises ModelError."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        parts = [session.run(names, feed) for feed in rows.batches(batch)]
        outputs = {name: np.concatenate(arrays) for name, *arrays in zip(names, *parts, strict=True)}
    except ORT_ERRORS as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"ONNX Runtime {ort.__version__} does not run {model} on these {rows.count} rows in batches of {batch}: {reason}. "
            "Nothing was changed. Check that the rows were made for this model; a quantised model: quantise it again."
        ) from error
    for name, array in outputs.items():
        if len(array) != rows.count:
            raise ModelError(
                f"{model} answers {rows.count} rows with {name} {list(array.shape)}, whose first dimension is not the batch. "
                "Nothing was changed. Answers can be compared by row only: export the model with a batch dimension."
            )
    return outputs


def gate(
    reference: Outputs,
    candidate: Outputs,
    rows: Rows,
    metric: str,
    max_loss: float = 0.01,
    *,
    max_slice_loss: float | None = None,
    lossless: Mapping[str, str] = MappingProxyType({}),
    output: str | None = None,
    least_rows: int = LEAST_ROWS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Verdict:
    """Judge the candidate's outputs for the rows against the reference's by one of METRICS, on `output` (default: the first).

    It passes when the upper end of the interval of the loss is within `max_loss` and no slice loses more than `max_slice_loss`
    (default: `max_loss`). A slice has few rows, so its interval is wide: the loss itself counts, the interval is told. Values of
    a slice with less than `least_rows` rows are judged together as one. `lossless` names slices, with a value, that may lose
    nothing, however few rows they have.

    Raises ModelError when outputs are NaN, infinite, constant, or do not fit each other or the label, MeasurementError when the
    label decides nothing (one class, no variance), the reference itself has no right answer or there is no such slice.
    """
    if metric not in METRICS:
        raise ValueError(f"{metric!r} is no metric; there are {', '.join(METRICS)}")
    chosen = METRICS[metric]
    answers = _answers(reference, candidate, rows, chosen, metric, output)
    value, loss, ci95 = _judged(answers, chosen, resamples, seed)
    if not value[0] > 0:
        raise MeasurementError(
            f"By {metric} the reference itself scores {value[0]:.4g} on these {rows.count} rows, so nothing can be lost. "
            "Nothing was changed. Check that label and rows belong together and that the metric fits the model."
        )
    losses, left_out = _slices(answers, rows, chosen, least_rows, resamples, seed)
    worst = max(losses, key=lambda each: each.loss, default=None)
    slice_limit = max_loss if max_slice_loss is None else max_slice_loss
    kept = [_slice(answers, rows, chosen, each, resamples, seed) for each in lossless.items()]
    broken = next((each for each in kept if each.loss > 0), None)
    slices_pass = worst is None or worst.loss <= slice_limit
    verdict = Verdict(
        metric=metric,
        rows=rows.count,
        reference=value[0],
        candidate=value[1],
        loss=loss,
        ci95=ci95,
        limit=max_loss,
        slice_limit=slice_limit,
        worst_slice=worst,
        slices=(*losses, *(each for each in kept if each not in losses)),
        left_out=tuple(left_out),
        agreement=agreement(answers.reference, answers.candidate),
        passed=ci95[1] <= max_loss and slices_pass and broken is None,
        reason="",
        resamples=resamples,
        seed=seed,
    )
    return _with_reason(verdict, slices_pass, broken)


def check_batch_mates(model: Path, rows: Rows, batches: Sequence[int] = MATE_BATCHES, threads: int = 1) -> float:
    """The largest difference of any number of an answer between batch sizes, over MATE_ROWS rows, evenly taken.

    0 for static quantisation in QDQ form, where ranges are constants; rounding (about 1e-6) where floats are left.
    """
    some = rows.take(np.unique(np.linspace(0, rows.count - 1, MATE_ROWS).round().astype(np.int64)))
    first, *others = (predict(model, some, batch, threads) for batch in batches)
    return max(
        (
            float(np.abs(first[name].astype(np.float64) - other[name].astype(np.float64)).max())
            for other in others
            for name in first
            if first[name].dtype.kind in "biuf"
        ),
        default=0.0,
    )


def is_dynamically_quantised(model: Path) -> bool:
    """Whether the range of an activation is computed from the batch at hand: by a dynamic operator, or as a scale of
    QuantizeLinear that is no constant. Raises ModelError when the file is no ONNX model."""
    try:
        proto = onnx.load(str(model), load_external_data=False)
    except (DecodeError, OSError) as error:
        raise ModelError(
            f"{model} is not a valid ONNX model: {error}. Nothing was changed. Check that the file was copied whole."
        ) from error
    functions = (_nodes_with_constants(each.node, frozenset()) for each in proto.functions)
    graphs = [_nodes_with_constants(proto.graph.node, _initialisers(proto.graph)), *functions]
    return any(_is_dynamic(node, constants) for found in graphs for node, constants in found)


def refuse_dynamic(model: Path) -> None:
    """Raise ModelError when the model is quantised dynamically."""
    if is_dynamically_quantised(model):
        raise ModelError(
            f"{model} is quantised dynamically: it takes the range of its activations from the whole batch, so the answer to a "
            "request depends on the requests that Triton happens to batch it with. Nothing was changed. Quantise the FP32 model "
            "statically (`tritonpilot quantize`): ranges are then constants, and answers the same in every batch."
        )


def _answers(
    reference: Outputs, candidate: Outputs, rows: Rows, metric: Metric, name: str, output: str | None
) -> Answers:
    if output is None:
        output = next(iter(reference))
    for owner, outputs in (("reference", reference), ("candidate", candidate)):
        if output not in outputs:
            raise ModelError(f"The {owner} has no output {output}, only {', '.join(outputs)}. Nothing was changed.")
        _check_output(owner, output, outputs[output], rows.count)
    ours, theirs = reference[output], candidate[output]
    if ours.shape != theirs.shape:
        raise ModelError(
            f"The reference answers with {output} {list(ours.shape)}, the candidate with {list(theirs.shape)}. Nothing was "
            "changed. The two are not versions of one model, or were not given the same rows."
        )
    if rows.count > 1 and ours.dtype.kind == "f" and is_constant(theirs):
        both = is_constant(ours)
        raise ModelError(
            f"The {'reference and the candidate answer' if both else 'candidate answers'} all {rows.count} rows with the same "
            f"{output}. Nothing was changed. "
            + (
                "Take rows that differ."
                if both
                else "Its ranges are saturated or its scale is wrong: calibrate with rows like these, or exclude nodes."
            )
        )
    if metric.label is not None:
        if rows.label is None:
            raise ModelError(
                f"The metric {name} needs a label ({metric.label}), and the rows have none. Nothing was changed. Add the array "
                "`label` to the evaluation file, or choose the metric agreement."
            )
        if len(rows.label) != rows.count:
            raise ModelError(
                f"There are {rows.count} rows and {len(rows.label)} labels. Nothing was changed. Give each row its label."
            )
    return metric.fitted(Answers(ours, theirs, rows.label if metric.label else None), f"{name} of {output}")


def _check_output(owner: str, name: str, array: NDArray[Any], count: int) -> None:
    if len(array) != count:
        raise ModelError(f"The {owner} has {len(array)} answers {name} to {count} rows. Nothing was changed.")
    if array.dtype.kind != "f":
        return
    bad = ~np.isfinite(array).reshape(count, -1).all(axis=1)
    if bad.any():
        raise ModelError(
            f"The {owner} answers NaN or infinity in {name} of {int(bad.sum())} of {count} rows, first in row "
            f"{int(bad.argmax())} (counted from 0). Nothing was changed. Half precision overflows beyond 65504: keep the nodes "
            "with large numbers in FP32, or use BF16; in FP32 the model itself is broken for these rows."
        )


def _judged(
    answers: Answers, metric: Metric, resamples: int, seed: int
) -> tuple[tuple[float, float], float, tuple[float, float]]:
    """(values of reference and candidate), loss, interval of the loss."""
    statistic = metric.prepare(answers)
    count = len(answers.reference)
    reference, candidate = statistic(np.ones((1, count)))[:, 0].tolist()
    strata = answers.label if metric.by_class and answers.label is not None else np.zeros(count)
    drawn = np.concatenate([statistic(weights) for weights in _weights(strata, resamples, seed)], axis=1)
    scale = reference if reference > 0 else 1.0
    low, high = np.percentile((drawn[0] - drawn[1]) / scale, (2.5, 97.5)).tolist()
    return (reference, candidate), (reference - candidate) / scale, (low, high)


def _weights(strata: NDArray[Any], resamples: int, seed: int) -> Iterator[Floats]:
    """How often each row is drawn, [some resamples, rows] at a time; within each stratum as many as it has."""
    random = np.random.default_rng(seed)
    members = [np.flatnonzero(strata == value) for value in np.unique(strata)]
    at_once = max(1, WEIGHTS_AT_ONCE // len(strata))
    for start in range(0, resamples, at_once):
        size = min(at_once, resamples - start)
        weights = np.empty((size, len(strata)))
        for rows in members:
            n = len(rows)
            drawn = random.integers(n, size=(size, n)) + n * np.arange(size)[:, None]
            weights[:, rows] = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n)
        yield weights


def _slices(
    answers: Answers, rows: Rows, metric: Metric, least_rows: int, resamples: int, seed: int
) -> tuple[list[SliceLoss], list[str]]:
    found, left_out = [], []
    for name, values in rows.slices.items():
        parts = {str(value): np.flatnonzero(values == value) for value in np.unique(values)}
        small = {
            value: places
            for value, places in parts.items()
            if len(places) < least_rows or not metric.is_enough(answers.take(places))
        }
        if small:
            merged = np.sort(np.concatenate(list(small.values())))
            is_judged = len(merged) >= least_rows and metric.is_enough(answers.take(merged))
            fate = f"judged together as {name}={SMALL}" if is_judged else "not judged"
            left_out += [
                f"{name}={value}: too little to judge alone in {len(at)} rows, {fate}" for value, at in small.items()
            ]
            parts = {value: places for value, places in parts.items() if value not in small}
            if is_judged:
                parts[SMALL] = merged
        for value, places in parts.items():
            (ours, theirs), loss, ci95 = _judged(answers.take(places), metric, resamples, seed)
            if ours > 0:
                found.append(SliceLoss(name, value, len(places), ours, theirs, loss, ci95))
            else:
                left_out.append(f"{name}={value}: the reference has nothing right in {len(places)} rows, not judged")
    return found, left_out


def _slice(
    answers: Answers, rows: Rows, metric: Metric, wanted: tuple[str, str], resamples: int, seed: int
) -> SliceLoss:
    """What the rows whose slice has this value lose."""
    name, value = wanted
    places = np.flatnonzero([str(each) == value for each in rows.slices.get(name, ())])
    if not len(places):
        raise MeasurementError(
            f"No row has {name}={value}, which must lose nothing; slices are {', '.join(rows.slices) or 'absent'}. Nothing was "
            "changed. Correct `lossless`, or make the evaluation rows again."
        )
    (ours, theirs), loss, ci95 = _judged(answers.take(places), metric, resamples, seed)
    return SliceLoss(name, value, len(places), ours, theirs, loss, ci95)


def _with_reason(verdict: Verdict, slices_pass: bool, broken: SliceLoss | None) -> Verdict:
    low, high = verdict.ci95
    said = (
        f"{verdict.metric} {verdict.reference:.4f} -> {verdict.candidate:.4f}: loss {_percent(verdict.loss)} (95 %: "
        f"{_percent(low)} to {_percent(high)}) on {verdict.rows} rows, limit {_percent(verdict.limit)}"
    )
    if high > verdict.limit:
        said += "; the loss may exceed the limit"
    worst = verdict.worst_slice
    if worst is not None:
        said += f"; worst slice {worst.name}={worst.value}: {_percent(worst.loss)} on {worst.rows} rows"
        said += "" if slices_pass else f", more than its limit {_percent(verdict.slice_limit)}"
    if broken is not None:
        said += (
            f"; {broken.name}={broken.value} must lose nothing, and loses {_percent(broken.loss)} on {broken.rows} rows"
        )
    if low == high == 0:
        # No resample of rows that did not change can show a change: the rule of three says what these rows could miss.
        missed = 1 - 0.05 ** (1 / verdict.rows)
        said += f"; no row changed its result, which happens once in 20 times when {_percent(missed)} of all rows do"
    return Verdict(**{**vars(verdict), "reason": said})


def _percent(share: float) -> str:
    return f"{round(100 * share, 2) + 0.0:.2f} %"  # + 0.0: no minus before zero


def _initialisers(graph: onnx.GraphProto) -> frozenset[str]:
    return frozenset(each.name for each in graph.initializer)


def _nodes_with_constants(
    nodes: Sequence[onnx.NodeProto], known: frozenset[str]
) -> Iterator[tuple[onnx.NodeProto, frozenset[str]]]:
    """Each node, also of inner graphs, with the names of all tensors that are constants where it stands."""
    constants = set(known)
    for node in nodes:  # in topological order
        if node.op_type == "Constant" or (node.input and constants.issuperset(node.input)):
            constants.update(node.output)
    frozen = frozenset(constants)
    for node in nodes:
        yield node, frozen
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes_with_constants(graph.node, frozen | _initialisers(graph))


def _is_dynamic(node: onnx.NodeProto, constants: frozenset[str]) -> bool:
    if node.op_type in DYNAMIC_OPERATORS:
        return True
    return node.op_type == "QuantizeLinear" and node.input[0] not in constants and node.input[1] not in constants
