"""tritonpilot/quantize/accuracy.py and answers.py: metrics against scikit-learn, the gate, and batch-mates of real models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnx_files
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from sklearn.metrics import roc_auc_score

from models.ctr import evaluation as ctr_evaluation
from tritonpilot import build, spec
from tritonpilot.errors import MeasurementError, ModelError
from tritonpilot.quantize import accuracy
from tritonpilot.quantize.answers import METRICS, Answers, agreement
from tritonpilot.quantize.data import Rows

ROOT = Path(__file__).resolve().parents[2]
Array = npt.NDArray[Any]


def rows(count: int, label: Array | None = None, **slices: Array) -> Rows:
    return Rows({"x": np.zeros((count, 1), np.float32)}, slices, label)


def clicks(count: int = 400, noise: float = 0.0, seed: int = 1) -> tuple[Array, Array, Array]:
    """Labels, scores [count,1] that have some ties, and the scores with noise."""
    random = np.random.default_rng(seed)
    label = (random.random(count) < 0.3).astype(np.float32)
    scores = np.round(label + random.normal(0, 1, count), 1).astype(np.float32)[:, None]
    return label, scores, (scores + random.normal(0, noise, (count, 1))).astype(np.float32)


# Metrics


def test_auc_is_that_of_scikit_learn_ties_included() -> None:
    label, scores, other = clicks(noise=0.5)
    verdict = accuracy.gate({"prob": scores}, {"prob": other}, rows(400, label), "auc")
    assert verdict.reference == pytest.approx(roc_auc_score(label, scores[:, 0]), abs=1e-12)
    assert verdict.candidate == pytest.approx(roc_auc_score(label, other[:, 0]), abs=1e-12)
    assert verdict.loss == pytest.approx(1 - verdict.candidate / verdict.reference)


def similarities(embeddings: Array) -> Array:
    lengths = np.linalg.norm(embeddings, axis=1, keepdims=True)
    found: Array = (embeddings / lengths) @ (embeddings / lengths).T
    return found


def test_pearson_of_embeddings_is_that_of_the_cosines_of_rated_pairs() -> None:
    random = np.random.default_rng(2)
    ours, theirs = (random.normal(size=(30, 8)).astype(np.float32) for _ in range(2))
    label = np.abs(1 + similarities(ours) + random.normal(0, 0.2, (30, 30)))
    label = (label + label.T) / 2
    label[:5] = label[:, :5] = -1  # nobody rated these
    above = np.triu_indices(30, 1)
    rated = label[above] >= 0
    verdict = accuracy.gate({"e": ours}, {"e": theirs}, rows(30, label), "pearson")
    for found, embeddings in ((verdict.reference, ours), (verdict.candidate, theirs)):
        expected = np.corrcoef(similarities(embeddings)[above][rated], label[above][rated])[0, 1]
        assert found == pytest.approx(expected, abs=1e-6)
    assert not verdict.passed


def test_pearson_of_scores_is_that_of_numpy() -> None:
    random = np.random.default_rng(3)
    label = random.normal(size=60)
    scores = (label + random.normal(size=60)).astype(np.float32)[:, None]
    verdict = accuracy.gate({"s": scores}, {"s": scores * 2 + 1}, rows(60, label), "pearson")
    assert verdict.reference == pytest.approx(np.corrcoef(label, scores[:, 0])[0, 1], abs=1e-6)
    assert verdict.loss == pytest.approx(0, abs=1e-6)


def test_top1_exact_and_argmax_are_shares_of_rows() -> None:
    scores = np.eye(4, dtype=np.float32)[[0, 1, 2, 3, 0]]
    other = np.eye(4, dtype=np.float32)[[0, 1, 2, 0, 1]]
    label = np.array([0, 1, 2, 3, 3])
    top1 = accuracy.gate({"logits": scores}, {"logits": other}, rows(5, label), "top1")
    assert (top1.reference, top1.candidate, top1.loss) == (0.8, 0.6, pytest.approx(0.25))
    exact = accuracy.gate({"logits": scores}, {"logits": other}, rows(5, label), "exact")
    assert (exact.reference, exact.candidate) == (0.8, 0.6)
    same = accuracy.gate({"logits": scores}, {"logits": other}, rows(5), "argmax")
    assert (same.reference, same.candidate, same.loss) == (1.0, 0.6, pytest.approx(0.4))


def test_exact_compares_strings_of_every_kind() -> None:
    label = np.array(["Bergen", "Ünï"])
    read = {"text": np.array(["Bergen", "Ünï"], np.object_)}
    misread = {"text": np.char.encode(np.array(["Berqen", "Ünï"]), "utf-8")}
    verdict = accuracy.gate(read, misread, rows(2, label), "exact")
    assert (verdict.reference, verdict.candidate, verdict.passed) == (1.0, 0.5, False)


def test_agreement_is_cosine_r2_or_the_share_of_equal_elements() -> None:
    ours = np.array([[3, 4], [1, 0], [0, 2]], np.float32)
    theirs = np.array([[4, 3], [2, 0], [0, 1]], np.float32)
    verdict = accuracy.gate({"e": ours}, {"e": theirs}, rows(3), "agreement")
    assert verdict.candidate == pytest.approx((0.96 + 1 + 1) / 3)
    number = np.array([[0.0], [1.0], [2.0]], np.float32)
    verdict = accuracy.gate({"p": number}, {"p": number + 0.5}, rows(3), "agreement")
    assert verdict.candidate == pytest.approx(1 - 0.75 / 2)
    index = np.array([[1, 2, 3, 4]] * 3, np.int32)
    verdict = accuracy.gate({"i": index}, {"i": np.where(index == 4, 5, index)}, rows(3), "agreement")
    assert verdict.candidate == pytest.approx(0.75)


def test_agreement_tells_divergence_largest_difference_and_argmax() -> None:
    found = agreement(np.log(np.array([[0.5, 0.5], [0.9, 0.1]])), np.log(np.array([[0.5, 0.5], [0.4, 0.6]])))
    assert found.kl == pytest.approx((0.9 * np.log(0.9 / 0.4) + 0.1 * np.log(0.1 / 0.6)) / 2)
    assert found.argmax == 0.5
    assert found.max_difference == pytest.approx(np.log(6))
    one = agreement(np.array([[0.9], [0.2]]), np.array([[0.4], [0.2]]))  # the same as two classes
    assert one.kl == pytest.approx(found.kl)
    assert one.cosine is None
    zeros = agreement(np.zeros((2, 3)), np.array([[0, 0, 0], [0, 1, 0]]))
    assert (zeros.cosine, zeros.cosine_min) == (0.5, 0)


@pytest.mark.parametrize("name", sorted(METRICS))
def test_weights_count_as_copies_of_the_rows(name: str) -> None:
    """A resample is computed without copying; with copies the same must come out (but no pair of a text with itself)."""
    random = np.random.default_rng(5)
    label, scores, other = clicks(40, noise=0.3)
    many, others = random.normal(size=(40, 5)).astype(np.float32), random.normal(size=(40, 5)).astype(np.float32)
    given = {
        "auc": Answers(scores[:, 0], other[:, 0], label == 1),
        "pearson": Answers(scores[:, 0], other[:, 0], random.normal(size=40)),
        "top1": Answers(many, others, random.integers(5, size=40)),
        "exact": Answers(many.argmax(1), others.argmax(1), random.integers(5, size=40)),
        "agreement": Answers(scores, other, None),
        "argmax": Answers(many, others, None),
    }[name]
    weights = random.integers(0, 4, (6, 40)).astype(np.float64)
    found = METRICS[name].prepare(given)(weights)
    for column, times in zip(found.T, weights.astype(int), strict=True):
        copies = METRICS[name].prepare(given.take(np.repeat(np.arange(40), times)))
        assert column == pytest.approx(copies(np.ones((1, times.sum())))[:, 0], abs=1e-9)


# Gate


def test_gate_passes_equal_answers_and_says_what_the_rows_could_miss() -> None:
    label, scores, _ = clicks()
    verdict = accuracy.gate({"prob": scores}, {"prob": scores}, rows(400, label), "auc")
    assert (verdict.loss, verdict.ci95, verdict.passed, verdict.worst_slice) == (0, (0, 0), True, None)
    assert verdict.reason.endswith("which happens once in 20 times when 0.75 % of all rows do")


def test_gate_fails_when_the_upper_end_exceeds_the_limit_although_the_loss_does_not() -> None:
    label, scores, other = clicks(noise=0.25)
    verdict = accuracy.gate({"prob": scores}, {"prob": other}, rows(400, label), "auc", max_loss=0.01)
    assert verdict.loss < 0.01 < verdict.ci95[1]
    assert not verdict.passed
    assert "may exceed the limit" in verdict.reason
    assert accuracy.gate({"prob": scores}, {"prob": other}, rows(400, label), "auc", max_loss=0.1).passed


def test_interval_is_paired_and_narrows_with_the_rows() -> None:
    widths = []
    for count in (400, 6400):
        label, scores, other = clicks(count, noise=0.1)
        low, high = accuracy.gate({"p": scores}, {"p": other}, rows(count, label), "auc").ci95
        widths.append(high - low)
    # Unpaired, the AUC of 400 rows alone spreads by more than 0.1.
    assert widths[0] < 0.02
    assert 2.5 < widths[0] / widths[1] < 6


def test_same_seed_gives_the_same_interval() -> None:
    label, scores, other = clicks(noise=0.3)
    first, second, third = (
        accuracy.gate({"p": scores}, {"p": other}, rows(400, label), "auc", seed=seed).ci95 for seed in (4, 4, 5)
    )
    assert first == second != third


def test_slice_that_loses_is_named_and_fails_the_whole() -> None:
    random = np.random.default_rng(7)
    classes = random.integers(10, size=2000)
    right = np.eye(10, dtype=np.float32)[classes]
    wrong = right.copy()
    night = np.flatnonzero(np.arange(2000) % 20 == 0)
    wrong[night[:10]] = np.roll(wrong[night[:10]], 1, axis=1)
    hours = np.where(np.arange(2000) % 20 == 0, "night", "day")
    verdict = accuracy.gate({"l": right}, {"l": wrong}, rows(2000, classes, hour=hours), "top1", max_loss=0.02)
    worst = verdict.worst_slice
    assert worst is not None
    assert (worst.name, worst.value, worst.rows, worst.loss) == ("hour", "night", 100, pytest.approx(0.1))
    assert verdict.ci95[1] < 0.02
    assert not verdict.passed
    assert "worst slice hour=night: 10.00 % on 100 rows, more than its limit 2.00 %" in verdict.reason
    lenient = accuracy.gate(
        {"l": right}, {"l": wrong}, rows(2000, classes, hour=hours), "top1", max_loss=0.02, max_slice_loss=0.2
    )
    assert lenient.passed


def test_a_lossless_slice_may_lose_nothing_however_small_it_is() -> None:
    classes = np.random.default_rng(7).integers(10, size=400)
    right = np.eye(10, dtype=np.float32)[classes]
    wrong = right.copy()
    wrong[3] = np.roll(wrong[3], 1)
    view = np.where(np.arange(400) < 20, "whole", "part")
    judged = rows(400, classes, view=view)
    assert accuracy.gate({"l": right}, {"l": wrong}, judged, "top1", max_loss=0.04).passed
    verdict = accuracy.gate({"l": right}, {"l": wrong}, judged, "top1", max_loss=0.04, lossless={"view": "whole"})
    assert not verdict.passed
    assert "view=whole must lose nothing, and loses 5.00 % on 20 rows" in verdict.reason
    assert accuracy.gate({"l": right}, {"l": right}, judged, "top1", lossless={"view": "whole"}).passed
    with pytest.raises(MeasurementError, match=r"No row has view=half.*slices are view"):
        accuracy.gate({"l": right}, {"l": right}, judged, "top1", lossless={"view": "half"})


def test_small_slices_are_judged_together_and_listed() -> None:
    label, scores, other = clicks(noise=0.1)
    country = np.array(["no"] * 300 + ["se"] * 30 + ["dk"] * 70)
    label[330:], label[330] = 0, 1  # one click in dk: too little for an AUC, though there are 70 rows
    verdict = accuracy.gate({"p": scores}, {"p": other}, rows(400, label, country=country), "auc", max_loss=1)
    assert [(each.value, each.rows) for each in verdict.slices] == [("no", 300), ("(small ones)", 100)]
    assert verdict.left_out == (
        "country=dk: too little to judge alone in 70 rows, judged together as country=(small ones)",
        "country=se: too little to judge alone in 30 rows, judged together as country=(small ones)",
    )


def test_slice_in_which_the_reference_has_nothing_right_is_left_out() -> None:
    scores = np.eye(2, dtype=np.float32)[[0, 1] * 60]
    label = np.array([0, 1] * 30 + [1, 0] * 30)
    half = np.array(["good"] * 60 + ["bad"] * 60)
    verdict = accuracy.gate({"l": scores}, {"l": scores}, rows(120, label, half=half), "top1")
    assert [each.value for each in verdict.slices] == ["good"]
    assert verdict.left_out == ("half=bad: the reference has nothing right in 60 rows, not judged",)


# Bad input


@pytest.mark.parametrize(
    ("change", "metric", "error", "message"),
    [
        ({"nan": 5}, "auc", ModelError, "candidate answers NaN or infinity in p of 1 of 400 rows, first in row 5"),
        ({"constant": 1}, "auc", ModelError, "candidate answers all 400 rows with the same p"),
        ({"labels": 399}, "auc", ModelError, "400 rows and 399 labels"),
        ({"one_class": 1}, "auc", MeasurementError, "all 400 labels are 1, and an AUC compares two classes"),
        ({"three_classes": 1}, "auc", ModelError, r"labels must be 0 or 1, and there are 0\.0, 1\.0, 2\.0"),
        ({"no_label": 1}, "auc", ModelError, "needs a label .* the metric agreement"),
        ({"rows": 390}, "auc", ModelError, "candidate has 390 answers p to 400 rows"),
        ({"name": "q"}, "auc", ModelError, "candidate has no output p, only q"),
        ({"wide": 1}, "auc", ModelError, r"reference answers with p \[400, 1\], the candidate with \[400, 2\]"),
        ({}, "top1", ModelError, r"scores \[n,classes\] are needed, not float32\[400, 1\]"),
        ({}, "exact", ModelError, r"a label float32\[400\] cannot equal answers float32\[400, 1\]"),
        ({"one_class": 1}, "pearson", MeasurementError, "are all the same"),
        ({"pairs": 1}, "pearson", ModelError, r"a label \[n,n\]"),
    ],
)
def test_what_cannot_be_judged_is_said(
    change: dict[str, Any], metric: str, error: type[Exception], message: str
) -> None:
    label, scores, other = clicks(noise=0.1)
    if "nan" in change:
        other[change["nan"]] = np.nan
    if "constant" in change:
        other[:] = 0.5
    if "one_class" in change:
        label[:] = 1
    if "three_classes" in change:
        label[0] = 2
    if "wide" in change:
        other = np.repeat(other, 2, axis=1)
    if "pairs" in change:
        label = np.repeat(label[:, None], 7, axis=1)
    given = rows(400, None if "no_label" in change else label[: change.get("labels", 400)])
    with pytest.raises(error, match=message):
        accuracy.gate({"p": scores}, {change.get("name", "p"): other[: change.get("rows", 400)]}, given, metric)


def test_reference_without_skill_and_labels_out_of_range_are_said() -> None:
    scores = np.eye(3, dtype=np.float32)[[0, 1, 2] * 20]
    with pytest.raises(MeasurementError, match="reference itself scores 0 on these 60 rows"):
        accuracy.gate({"l": scores}, {"l": scores}, rows(60, np.array([1, 2, 0] * 20)), "top1")
    with pytest.raises(ModelError, match=r"class indices 0 to 2, and there are 3 \(int64\)"):
        accuracy.gate({"l": scores}, {"l": scores}, rows(60, np.full(60, 3)), "top1")
    with pytest.raises(ModelError, match="The reference and the candidate answer all 60 rows with the same l"):
        accuracy.gate({"l": scores[:1].repeat(60, 0)}, {"l": scores[:1].repeat(60, 0)}, rows(60), "agreement")
    lopsided = np.triu(np.ones((60, 60)))
    with pytest.raises(ModelError, match="same in both orders, and 3540 of 3600 differ"):
        accuracy.gate({"l": scores}, {"l": scores}, rows(60, lopsided), "pearson")
    with pytest.raises(ValueError, match="'f1' is no metric; there are auc, top1"):
        accuracy.gate({"l": scores}, {"l": scores}, rows(60), "f1")


def test_predict_answers_in_batches_and_names_what_does_not_fit(tmp_path: Path) -> None:
    model = onnx_files.identity(tmp_path / "identity.onnx")
    given = Rows({"x": np.arange(40, dtype=np.float32).reshape(10, 4)})
    np.testing.assert_array_equal(accuracy.predict(model, given, batch=3)["y"], given.inputs["x"])
    with pytest.raises(ModelError, match=r"does not run .*identity.onnx on these 2 rows"):
        accuracy.predict(model, rows(2))
    with pytest.raises(ModelError, match="does not run .*absent.onnx"):
        accuracy.predict(tmp_path / "absent.onnx", given)


# Batch-mates


class Models(NamedTuple):
    fp32: Path
    static: Path
    dynamic: Path
    rows: Rows


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, rows: Rows) -> None:
        self._feeds: Iterator[dict[str, Array]] = rows.batches(16)

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


@pytest.fixture(scope="module")
def ctr(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The click model as ONNX Runtime's own tools quantise it, and rows for evaluation."""
    build.prepare(spec.load_services(ROOT / "models", ["ctr"]), "auto", lambda _: None)
    folder = tmp_path_factory.mktemp("ctr")
    found = Models(ROOT / "models" / "ctr" / "build" / "model.onnx", folder / "s.onnx", folder / "d.onnx", rows(1))
    pool, evaluation = ctr_evaluation.make()
    calibration = Calibration(pool.take(np.arange(0, pool.count, 78)))
    quantize_static(found.fp32, found.static, calibration, quant_format=QuantFormat.QDQ, per_channel=True)
    quantize_dynamic(found.fp32, found.dynamic)
    return found._replace(rows=evaluation)


@pytest.mark.slow
def test_dynamic_answers_depend_on_batch_mates_and_static_ones_do_not(ctr: Models) -> None:
    assert accuracy.check_batch_mates(ctr.static, ctr.rows) == 0
    assert accuracy.check_batch_mates(ctr.dynamic, ctr.rows) > 0.001
    assert accuracy.check_batch_mates(ctr.fp32, ctr.rows) < 1e-6


@pytest.mark.slow
def test_dynamic_quantisation_is_found_and_refused(ctr: Models) -> None:
    assert not accuracy.is_dynamically_quantised(ctr.fp32)
    assert not accuracy.is_dynamically_quantised(ctr.static)
    accuracy.refuse_dynamic(ctr.static)
    with pytest.raises(ModelError, match="depends on the requests that Triton happens to batch it with"):
        accuracy.refuse_dynamic(ctr.dynamic)


@pytest.mark.slow
def test_static_click_model_loses_less_than_a_hundredth_of_its_auc(ctr: Models) -> None:
    fp32, int8 = (accuracy.predict(model, ctr.rows) for model in (ctr.fp32, ctr.static))
    verdict = accuracy.gate(fp32, int8, ctr.rows, "auc", max_slice_loss=0.1)
    assert verdict.reference == pytest.approx(0.77, abs=0.01)
    assert verdict.passed, verdict.reason
    assert {each.name for each in verdict.slices} == {"hour", "user", "age_group"}
    assert verdict.agreement.r2 is not None
    assert verdict.agreement.r2 > 0.99


def quantised_by(path: Path, scale_input: bool) -> Path:
    """x -> QuantizeLinear -> DequantizeLinear -> y, inside an If, its scale a constant or the largest number of the batch."""
    scale = "largest" if scale_input else "scale"
    inner = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("QuantizeLinear", ["x", scale], ["q"]),
        helper.make_node("DequantizeLinear", ["q", scale], ["z"]),
    ]
    branch = helper.make_graph(
        inner,
        "branch",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(np.array(0.1, np.float32), "scale")],
    )
    nodes = [
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
    return onnx_files.save(path, helper.make_graph(nodes, "quantised", ends[:1], ends[1:]))


def test_a_scale_that_is_computed_is_dynamic_and_a_constant_one_is_not(tmp_path: Path) -> None:
    assert accuracy.is_dynamically_quantised(quantised_by(tmp_path / "computed.onnx", scale_input=True))
    assert not accuracy.is_dynamically_quantised(quantised_by(tmp_path / "constant.onnx", scale_input=False))
    onnx.checker.check_model(str(tmp_path / "computed.onnx"), full_check=True)
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "computed.onnx").read_bytes()[:50])
    with pytest.raises(ModelError, match="cut.onnx is not a valid ONNX model"):
        accuracy.is_dynamically_quantised(tmp_path / "cut.onnx")
