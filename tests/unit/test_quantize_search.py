from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_files
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tritonpilot.quantize import plots, qdq
from tritonpilot.quantize.data import Rows
from tritonpilot.quantize.qdq import QdqOptions
from tritonpilot.quantize.search import (
    Budget,
    Candidate,
    Recipe,
    Result,
    Sensitivity,
    Target,
    choose,
    compensate,
    front,
    least_excluded,
    sensitivity,
    worst_first,
)
from tritonpilot.quantize.speed import Comparison, Speed
from tritonpilot.quantize.split import outliers, split_outliers
from tritonpilot.quantize.switched import Switched, noise

WIDTH, INNER = 32, 64
LOUD = 5  # the inner channel that is far larger than the others, as one in MiniLM's feed-forward layers is


@dataclass
class Kept:
    """A store that counts what it makes."""

    folder: Path
    made: list[str] = field(default_factory=list)

    def get_or_make(self, key: str, make: Callable[[Path], None], suffix: str = "") -> Path:
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}{suffix}"
        if not path.exists():
            make(path)
            self.made.append(key)
        return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x [b,32] -> Gemm -> Elu -> MatMul -> y [b,32], with a channel between them that is 60 times as large as the others."""
    random = np.random.default_rng(1)
    up = random.normal(size=(INNER, WIDTH)).astype(np.float32) / WIDTH**0.5
    up[LOUD] *= 60
    down = random.normal(size=(INNER, WIDTH)).astype(np.float32) / INNER**0.5
    down[LOUD] /= 60
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["x", "layers.0.up.weight", "bias"], ["inner"], "up", transB=1),
            helper.make_node("Elu", ["inner"], ["active"], "elu"),
            helper.make_node("MatMul", ["active", "layers.0.down.weight"], ["y"], "down"),
        ],
        "loud",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [
            numpy_helper.from_array(up, "layers.0.up.weight"),
            numpy_helper.from_array(np.zeros(INNER, np.float32), "bias"),
            numpy_helper.from_array(down, "layers.0.down.weight"),
        ],
    )
    path = onnx_files.save(tmp_path_factory.mktemp("loud") / "model.onnx", graph)
    prepared = path.with_name("prepared.onnx")
    qdq.prepare(path, prepared)
    return prepared


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows({"x": np.random.default_rng(2).normal(size=(120, WIDTH)).astype(np.float32)})


def answers(model: Path, rows: Rows) -> Any:
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return session.run(None, dict(rows.inputs))[0]


def test_outliers_are_the_channels_that_stretch_the_range() -> None:
    peaks = np.ones(32)
    peaks[[7, 20]] = 24.0, 20.0
    assert outliers(peaks) == ((7, 20), 24.0)
    assert outliers(np.ones(32)) == ((), 1.0)


def test_channels_that_fall_off_slowly_are_not_taken_out() -> None:
    channels, gain = outliers(1.0 - np.arange(64) / 1000)
    assert channels == ()
    assert gain == 1.0


def test_never_more_than_an_eighth_of_the_channels() -> None:
    channels, _ = outliers(2.0 ** -np.arange(32))
    assert channels == (0, 1, 2, 3)


def test_splitting_outliers_does_not_change_the_answers(model: Path, rows: Rows, tmp_path: Path) -> None:
    found = split_outliers(model, rows, tmp_path / "split.onnx")

    assert [(each.node, each.beside) for each in found] == [("down", "down/outliers")]
    assert LOUD in found[0].channels
    assert found[0].gain > 10
    assert np.abs(answers(tmp_path / "split.onnx", rows) - answers(model, rows)).max() < 1e-5
    onnx.checker.check_model(str(tmp_path / "split.onnx"), full_check=True)


def test_a_layer_that_stays_fp32_is_not_split(model: Path, rows: Rows, tmp_path: Path) -> None:
    assert split_outliers(model, rows, tmp_path / "split.onnx", exclude=frozenset({"down"})) == []


def test_all_switches_on_answer_as_the_int8_model(model: Path, rows: Rows, tmp_path: Path) -> None:
    options = QdqOptions()
    ranges = qdq.calibrate(model, rows, options)
    qdq.quantize_static(model, rows, tmp_path / "int8.onnx", options, ranges=ranges)
    switched = Switched(model, ranges, options)

    exact, int8 = answers(model, rows), answers(tmp_path / "int8.onnx", rows)

    assert np.abs(switched.answers(rows) - exact).max() < 1e-5
    lost = noise(exact, int8)
    assert noise(exact, switched.answers(rows, ["up", "down"])) == pytest.approx(lost, rel=0.3)
    assert noise(int8, switched.answers(rows, ["up", "down"])) < lost / 2


def test_noise_is_zero_for_equal_and_one_for_the_mean() -> None:
    some = np.random.default_rng(3).normal(size=(50, 4))
    assert noise(some, some) == 0
    assert noise(some, np.broadcast_to(some.mean(0), some.shape)) == pytest.approx(1)
    assert noise(np.ones((3, 2)), np.ones((3, 2))) == 0
    assert noise(np.ones((3, 2)), np.zeros((3, 2))) == 1


def test_sensitivity_finds_the_node_behind_the_loud_channel(model: Path, rows: Rows) -> None:
    options = QdqOptions()
    told: list[tuple[str, int, int]] = []
    found = sensitivity(
        model, qdq.calibrate(model, rows, options), rows, options, progress=lambda *progress: told.append(progress)
    )

    assert [(each.node, each.op_type) for each in found] == [("up", "Gemm"), ("down", "MatMul")]
    assert {each.group for each in found} == {"layers.*.up", "layers.*.down"}
    up, down = found
    assert down.noise > 4 * up.noise
    assert 0 < up.time_share < 1
    assert told[0] == ("quantising up alone", 0, 2)
    assert told[-1] == ("quantising nodes alone", 2, 2)


def test_nodes_that_save_much_time_are_left_out_last() -> None:
    found = [
        Sensitivity("cheap", "Gemm", "a", 0.01, 0.01),
        Sensitivity("dear", "Gemm", "a", 0.02, 0.50),
        Sensitivity("worst", "Gemm", "a", 0.09, 0.02),
    ]
    assert worst_first(found) == ["worst", "cheap", "dear"]


@pytest.mark.parametrize(("most", "wanted"), [(1.0, 0), (0.5, 2), (0.05, 4), (0.0, 5)])
def test_least_excluded_is_found_by_bisection(most: float, wanted: int) -> None:
    costs = {"a": 0.4, "b": 0.2, "c": 0.2, "d": 0.1, "e": 0.05}
    asked: list[int] = []

    def noise_without(left: Sequence[str]) -> float:
        asked.append(len(left))
        return round(sum(cost for name, cost in costs.items() if name not in left), 6)

    assert least_excluded(list(costs), noise_without, most) == wanted
    assert len(asked) <= 3


def test_outliers_apart_make_the_model_accurate_by_itself(model: Path, rows: Rows, tmp_path: Path) -> None:
    store = Kept(tmp_path)
    budget = Budget(rows=40, batch_sizes=(4,), seconds=0.01)
    target = Target(least_cosine=0.9999)

    found = compensate(model, rows, rows, "agreement", target, budget, store=store)

    by_name = {each.name: each for each in found.candidates}
    plain, split = by_name["INT8"], by_name["INT8, outliers apart in 1"]
    assert not plain.is_accurate
    assert split.is_accurate
    assert split.noise < plain.noise / 4
    assert split.split == 1
    assert [each.node for each in found.sensitivities] == ["up", "down"]
    left_out = by_name["INT8, 1 in FP32"]
    assert left_out.left == ("down",)
    assert found.front
    # What ended is not made again; a search that was interrupted goes on.
    made = len(store.made)
    again = compensate(model, rows, rows, "agreement", target, budget, store=store)
    assert len(store.made) == made
    assert [(each.name, each.noise) for each in again.candidates] == [
        (each.name, each.noise) for each in found.candidates
    ]


def test_an_output_beside_the_judged_one_counts_too(rows: Rows, tmp_path: Path) -> None:
    """The second output sums over an input whose range is a million times that of the others: INT8 has nothing left of it."""
    random = np.random.default_rng(2)
    weights = {
        "up": random.normal(size=(WIDTH, WIDTH)).astype(np.float32),
        "large": np.array([1e6] + [1] * (WIDTH - 1), np.float32),
        "other": np.vstack([np.zeros((1, 8)), random.normal(size=(WIDTH - 1, 8))]).astype(np.float32),
    }
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "up"], ["y"], "judged"),
            helper.make_node("Mul", ["x", "large"], ["scaled"], "scale"),
            helper.make_node("MatMul", ["scaled", "other"], ["z"], "beside"),
        ],
        "two",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH]),
            helper.make_tensor_value_info("z", TensorProto.FLOAT, ["batch", 8]),
        ],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), str(tmp_path / "two.onnx"))

    budget = Budget(rows=40, batch_sizes=(4,), seconds=0.01, models=2)
    found = compensate(tmp_path / "two.onnx", rows, rows, "agreement", Target(0.5, 0.9), budget, store=Kept(tmp_path))

    plain = next(each for each in found.candidates if each.name == "INT8")
    assert plain.verdict is not None
    assert plain.verdict.passed
    assert plain.beside > 0.5
    assert not plain.is_accurate


def test_an_int8_that_is_slower_at_one_batch_size_is_not_chosen() -> None:
    found = [FP32, int8("a", 0.01)]
    speeds = [
        Speed(name, batch, rate, rate, 1, 0, (rate,))
        for name, batch, rate in (("FP32", 1, 100.0), ("a", 1, 88.0), ("FP32", 64, 100.0), ("a", 64, 320.0))
    ]
    chosen, reason = choose(found, Comparison(tuple(speeds), threads=1), Target())
    assert chosen is FP32
    assert "0.88 at batch 1" in reason


def test_an_accurate_model_is_not_searched_further(model: Path, rows: Rows, tmp_path: Path) -> None:
    budget = Budget(batch_sizes=(4,), seconds=0.01)
    found = compensate(model, rows, rows, "agreement", Target(0.5, 0.9), budget, store=Kept(tmp_path))
    assert [each.name for each in found.candidates] == ["FP32", "INT8"]
    assert found.sensitivities == ()


@dataclass(frozen=True)
class _Alike:
    cosine: float | None = None


@dataclass(frozen=True)
class _Verdict:
    metric: str = "auc"
    reference: float = 0.76
    candidate: float = 0.758
    loss: float = 0.0026
    agreement: _Alike = _Alike()


FP32 = Candidate("FP32", Path("model.onnx"), None, None, 0.0, True, 5)


def int8(name: str, lost: float, *, is_accurate: bool = True, left: tuple[str, ...] = ()) -> Candidate:
    recipe = Recipe(QdqOptions(exclude=frozenset(left)))
    verdict: Any = _Verdict()
    return Candidate(name, Path(f"{name}.onnx"), recipe, verdict, lost, is_accurate, 5, left)


def measured(**rates: float) -> Comparison:
    return Comparison(
        tuple(Speed(name, 64, rate, rate, 1, 0, (rate,)) for name, rate in {"FP32": 100.0, **rates}.items()), threads=1
    )


def test_the_fastest_accurate_model_is_chosen_and_explained() -> None:
    found = [FP32, int8("a", 0.01, left=("x", "y")), int8("b", 0.001), int8("c", 0.5, is_accurate=False)]
    chosen, reason = choose(found, measured(a=250, b=180, c=400), Target())
    assert chosen is found[1]
    assert reason == (
        "INT8 with 2 of 5 nodes left in FP32: auc 0.7600 -> 0.7580 (loss 0.26 %), "
        "2.50 at batch 64 times the rows per second of FP32"
    )


def test_fp32_stays_when_no_int8_is_faster() -> None:
    chosen, reason = choose([FP32, int8("a", 0.01)], measured(a=103), Target())
    assert chosen is FP32
    assert reason.startswith(
        "FP32 stays: no accurate INT8 model is faster at the service's batch sizes; the fastest is INT8 of all"
    )
    assert "1.03 at batch 64" in reason


def test_fp32_stays_when_no_int8_is_accurate() -> None:
    chosen, reason = choose([FP32, int8("a", 0.3, is_accurate=False)], measured(a=300), Target())
    assert chosen is FP32
    assert reason.startswith(
        "FP32 stays: no INT8 model is accurate enough (limits: loss 1 %, mean cosine 0.99); nearest is"
    )


def test_front_has_what_no_other_beats_in_both() -> None:
    beaten = int8("beaten", 0.02)
    found = [FP32, int8("fast", 0.3, is_accurate=False), int8("good", 0.01), beaten]
    assert [each.name for each in front(found, measured(fast=300, good=200, beaten=150))] == ["FP32", "good", "fast"]


@pytest.fixture
def result() -> Result:
    found = [FP32, int8("<good>", 0.01), int8("bad", 0.3, is_accurate=False)]
    comparison = measured(**{"<good>": 200.0, "bad": 300.0})
    chosen, reason = choose(found, comparison, Target())
    costs = (Sensitivity("down", "MatMul", "layers.*.down", 0.2, 0.4),)
    return Result(tuple(found), comparison, front(found, comparison), chosen, reason, costs)


def test_page_is_one_file_without_scripts(result: Result, tmp_path: Path) -> None:
    plots.html(result, tmp_path / "plots" / "front.html")
    page = (tmp_path / "plots" / "front.html").read_text()
    assert "<script" not in page
    assert "http" not in page
    assert "&lt;good&gt;" in page
    assert "<good>" not in page
    assert page.count("<circle") == 3
    assert escape(result.reason) in page
    assert "layers.*.down" in page
    assert [path.name for path in (tmp_path / "plots").iterdir()] == ["front.html"]


def test_picture_is_a_png(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.png(result, tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["front.png"]


def test_candidate_names_its_options() -> None:
    assert FP32.options is None
    candidate = int8("a", 0.1, left=("x",))
    assert candidate.options == replace(QdqOptions(), exclude=frozenset({"x"}))
