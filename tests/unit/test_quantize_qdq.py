"""Static INT8 of real models: right, small, the same in every batch; and nothing half-written when it cannot be made."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from tritonpilot import build, samples, spec
from tritonpilot.errors import HostError, ModelError
from tritonpilot.onnx_traits import read_traits
from tritonpilot.quantize import qdq
from tritonpilot.quantize.data import Rows
from tritonpilot.quantize.qdq import Node, QdqOptions, quantize_static

MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    build.prepare(spec.load_services(MODELS, ["ctr", "risk"]), "auto", lambda _: None)
    return {name: MODELS / name / "build" for name in ("ctr", "risk")}


@pytest.fixture(scope="module")
def risk(folders: dict[str, Path]) -> Path:
    return folders["risk"] / "model.onnx"


@pytest.fixture(scope="module")
def risk_rows(folders: dict[str, Path]) -> Rows:
    return Rows({name: array[:100] for name, array in samples.read(folders["risk"] / "samples.npz").items()})


@pytest.fixture(scope="module")
def ctr(folders: dict[str, Path]) -> Path:
    return folders["ctr"] / "model.onnx"


@pytest.fixture(scope="module")
def ctr_rows(folders: dict[str, Path]) -> Rows:
    return Rows({name: array[:150] for name, array in samples.read(folders["ctr"] / "samples.npz").items()})


@pytest.fixture(scope="module")
def ctr_int8(ctr: Path, ctr_rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("int8") / "model.onnx"
    quantize_static(ctr, ctr_rows, output, QdqOptions.for_cpu(ctr))
    return output


def test_ctr_answers_as_fp32_does_in_little_more_than_a_quarter_of_the_bytes(
    ctr: Path, ctr_rows: Rows, ctr_int8: Path
) -> None:
    difference = np.abs(_answer(ctr_int8, ctr_rows, 64) - _answer(ctr, ctr_rows, 64))
    assert difference.max() < 0.02
    assert difference.mean() < 0.004
    assert ctr_int8.stat().st_size < 0.3 * ctr.stat().st_size


def test_an_answer_does_not_depend_on_its_batch_mates(ctr_rows: Rows, ctr_int8: Path) -> None:
    alone = _answer(ctr_int8, ctr_rows, 1)
    assert np.array_equal(alone, _answer(ctr_int8, ctr_rows, 7))
    assert np.array_equal(alone, _answer(ctr_int8, ctr_rows, 64))


def test_onnx_runtime_runs_every_gemm_of_ctr_on_integers(ctr_int8: Path, tmp_path: Path) -> None:
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    settings.log_severity_level = 3
    onnxruntime.InferenceSession(str(ctr_int8), settings, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node)
    assert kinds["QGemm"] == 5
    assert kinds["Gemm"] + kinds["FusedGemm"] == 0


def test_inputs_and_outputs_keep_names_and_types(ctr: Path, ctr_int8: Path) -> None:
    assert qdq.read_signature(ctr_int8) == qdq.read_signature(ctr)


def test_quantizable_nodes_are_those_with_constant_weights(ctr: Path) -> None:
    nodes = qdq.quantizable_nodes(ctr)
    assert Counter(node.op_type for node in nodes) == {"Gemm": 5, "Gather": 1}
    excluded = QdqOptions(exclude=frozenset({nodes[1].name}))
    assert qdq.quantizable_nodes(ctr, excluded) == [node for node in nodes if node != nodes[1]]
    gemm = QdqOptions(op_types=frozenset({"Gemm"}))
    assert qdq.quantizable_nodes(ctr, gemm) == [node for node in nodes if node.op_type == "Gemm"]


@pytest.mark.parametrize(
    "options",
    [
        QdqOptions(method="percentile"),
        QdqOptions(method="entropy", exclude=frozenset()),
        QdqOptions(per_channel=False),
        QdqOptions(reduce_range=True),
        QdqOptions(activation="int8"),
        QdqOptions(smooth=0.5),
        QdqOptions(bias_correction=True),
        QdqOptions(smooth=0.5, bias_correction=True, activation="int8"),
        QdqOptions(batch=64),  # the last batch is ragged
    ],
    ids=lambda options: ",".join(
        f"{field.name}={getattr(options, field.name)}"
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    ),
)
def test_risk_answers_nearly_as_fp32_does(options: QdqOptions, risk: Path, risk_rows: Rows, tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    quantize_static(risk, risk_rows, output, options)
    difference = np.abs(_answer(output, risk_rows, 100) - _answer(risk, risk_rows, 100))
    assert 0 < difference.mean() < 0.02
    assert difference.max() < 0.1
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_smoothing_and_bias_correction_bring_risk_nearer_to_fp32(risk: Path, risk_rows: Rows, tmp_path: Path) -> None:
    exact = _answer(risk, risk_rows, 100)
    errors = []
    for options in (QdqOptions(), QdqOptions(smooth=0.5, bias_correction=True)):
        quantize_static(risk, risk_rows, tmp_path / "model.onnx", options)
        errors.append(np.abs(_answer(tmp_path / "model.onnx", risk_rows, 100) - exact).mean())
    assert errors[1] < 0.9 * errors[0]


def test_ranges_found_once_give_the_same_model(risk: Path, risk_rows: Rows, tmp_path: Path) -> None:
    options = QdqOptions(method="percentile", exclude=frozenset({qdq.quantizable_nodes(risk)[-1].name}))
    prepared = tmp_path / "prepared.onnx"
    qdq.prepare(risk, prepared)
    ranges = qdq.calibrate(prepared, risk_rows, options)
    quantize_static(prepared, risk_rows, tmp_path / "a.onnx", options, ranges=ranges)
    quantize_static(risk, risk_rows, tmp_path / "b.onnx", options)
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_preparing_twice_changes_nothing(risk: Path, tmp_path: Path) -> None:
    qdq.prepare(risk, tmp_path / "once.onnx")
    qdq.prepare(tmp_path / "once.onnx", tmp_path / "twice.onnx")
    assert (tmp_path / "once.onnx").read_bytes() == (tmp_path / "twice.onnx").read_bytes()


def test_what_onnx_runtime_leaves_in_the_working_directory_goes(
    risk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = qdq.quant_pre_process

    def littering(source: str, folded: str, **how: Any) -> None:
        Path("sym_shape_infer_temp.onnx").touch()
        real(source, folded, **how)

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(qdq, "quant_pre_process", littering)
    qdq.prepare(risk, Path("..", "prepared.onnx"))

    assert {path.name for path in tmp_path.rglob("*")} == {"work", "prepared.onnx"}
    assert Path.cwd() == tmp_path / "work"


def test_progress_is_told_and_ends(risk: Path, risk_rows: Rows, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    options = QdqOptions(smooth=0.5, bias_correction=True, batch=30)
    quantize_static(risk, risk_rows, tmp_path / "model.onnx", options, lambda *step: told.append(step))
    last = {doing: (done, total) for doing, done, total in told}
    assert last["calibrating"] == last["smoothing"] == last["correcting biases"] == (4, 4)
    assert all(done == total for done, total in last.values())


def test_a_quantised_model_is_refused(ctr_int8: Path, ctr_rows: Rows, tmp_path: Path) -> None:
    assert qdq.is_quantized(ctr_int8)
    with pytest.raises(ModelError, match="already quantised: it has DequantizeLinear, QuantizeLinear"):
        quantize_static(ctr_int8, ctr_rows, tmp_path / "model.onnx", QdqOptions())
    assert list(tmp_path.iterdir()) == []


def test_an_old_opset_is_upgraded_and_said(tmp_path: Path) -> None:
    model = _dense_model(tmp_path / "old.onnx", opset=11)
    rows = _dense_rows(40)
    told: list[str] = []
    output = tmp_path / "out" / "model.onnx"
    quantize_static(model, rows, output, QdqOptions(), lambda *step: told.append(step[0]))
    assert "upgrading opset 11 to 13" in told
    assert onnx.load(output).opset_import[0].version == 13
    np.testing.assert_allclose(_answer(output, rows, 8), _answer(model, rows, 8), atol=0.2)


def test_weights_in_external_files_are_read_and_the_result_is_one_file(tmp_path: Path) -> None:
    model = _dense_model(tmp_path / "model.onnx")
    onnx.save(onnx.load(model), model, save_as_external_data=True, location="weights.bin", size_threshold=0)
    rows = _dense_rows(20)
    quantize_static(model, rows, tmp_path / "out" / "model.onnx", QdqOptions())
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.onnx"]
    np.testing.assert_allclose(_answer(tmp_path / "out" / "model.onnx", rows, 20), _answer(model, rows, 20), atol=0.2)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weights\.bin"):
        quantize_static(model, rows, tmp_path / "out" / "other.onnx", QdqOptions())


def test_a_model_without_quantisable_nodes_is_refused(risk: Path, risk_rows: Rows, tmp_path: Path) -> None:
    everything = frozenset(node.name for node in qdq.quantizable_nodes(risk))
    with pytest.raises(ModelError, match="8 excluded, none is left"):
        quantize_static(risk, risk_rows, tmp_path / "model.onnx", QdqOptions(exclude=everything))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 3, 17])
def test_fewer_rows_than_a_batch_are_enough(count: int, risk: Path, risk_rows: Rows, tmp_path: Path) -> None:
    quantize_static(risk, risk_rows.take(range(count)), tmp_path / "model.onnx", QdqOptions(method="percentile"))
    assert qdq.is_quantized(tmp_path / "model.onnx")


@pytest.mark.parametrize("method", ["minmax", "percentile", "entropy"])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_constant_input_is_kept(method: Any, value: float, tmp_path: Path) -> None:
    model = _dense_model(tmp_path / "fp32.onnx")
    rows = Rows({"x": np.full((12, 6), value, np.float32)})
    output = tmp_path / "out" / "model.onnx"
    quantize_static(model, rows, output, QdqOptions(method=method, smooth=0.5, bias_correction=True))
    found = _answer(output, rows, 5)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, _answer(model, rows, 5), atol=0.15)


def test_activations_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = _dense_model(tmp_path / "fp32.onnx")
    rows = Rows({"x": np.full((4, 6), 3e38, np.float32)})
    with pytest.raises(ModelError, match="INT8 holds finite ones only"):
        quantize_static(model, rows, tmp_path / "out" / "model.onnx", QdqOptions())


def test_rows_that_do_not_fit_are_refused(risk: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be quantised"):
        quantize_static(risk, _dense_rows(4), tmp_path / "model.onnx", QdqOptions())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("failure", "seen"), [(MemoryError, HostError), (KeyboardInterrupt, KeyboardInterrupt), (OSError, HostError)]
)
def test_a_failure_half_way_leaves_the_old_file_and_nothing_else(
    failure: type[BaseException], seen: type[BaseException], risk: Path, risk_rows: Rows, tmp_path: Path
) -> None:
    output = tmp_path / "model.onnx"
    output.write_text("old")

    def fail(doing: str, done: int, _: int) -> None:
        if doing == "calibrating" and done == 3:
            raise failure("half-way")

    with pytest.raises(seen):
        quantize_static(risk, risk_rows, output, QdqOptions(), fail)
    assert output.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("field", "value"), [("method", "mean"), ("percentile", 50), ("smooth", 1.5), ("batch", 0), ("percentile", 101)]
)
def test_options_without_meaning_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        QdqOptions(**{field: value})


def test_nodes_without_names_get_them(tmp_path: Path) -> None:
    model = _dense_model(tmp_path / "model.onnx")
    graph = onnx.load(model)
    for node in graph.graph.node:
        node.name = ""
    onnx.save(graph, model)
    assert qdq.quantizable_nodes(model) == [Node("Gemm/h", "Gemm"), Node("Gemm/y", "Gemm")]


def test_what_is_made_for_tensorrt_has_nothing_that_it_refuses(ctr: Path, ctr_rows: Rows, tmp_path: Path) -> None:
    output = tmp_path / "model.onnx"
    quantize_static(ctr, ctr_rows, output, QdqOptions.for_tensorrt(ctr))

    traits = read_traits(output)
    assert traits.is_quantized
    assert traits.obstacles == ()
    np.testing.assert_allclose(_answer(output, ctr_rows, 64), _answer(ctr, ctr_rows, 64), atol=0.02)


@pytest.mark.parametrize("groups", [1, 8])
def test_onnx_runtime_does_not_round_what_stays_fp32(groups: int, tmp_path: Path) -> None:
    """Its WeightBiasQuantization would give a convolution between integers one scale for all channels."""
    random = np.random.default_rng(3)
    spread = np.geomspace(1, 100, 8, dtype=np.float32)[:, None, None, None]
    weights = {
        "first": random.standard_normal((8, 4, 3, 3)).astype(np.float32),
        "left": random.standard_normal((8, 8 // groups, 3, 3)).astype(np.float32) * spread,
        "last": random.standard_normal((4, 8, 1, 1)).astype(np.float32),
    }
    nodes, before = [], "x"
    for name in weights:
        group = groups if name == "left" else 1
        nodes.append(onnx.helper.make_node("Conv", [before, f"{name}.w"], [name], name, group=group))
        before = name
    batch = ("b", 4, 9, 9)
    graph = onnx.helper.make_graph(
        nodes,
        "three",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, batch)],
        [onnx.helper.make_tensor_value_info("last", onnx.TensorProto.FLOAT, ("b", 4, 5, 5))],
        [onnx.numpy_helper.from_array(weight, f"{name}.w") for name, weight in weights.items()],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "m.onnx")
    rows = Rows({"x": random.standard_normal((16, 4, 9, 9)).astype(np.float32)})
    quantize_static(tmp_path / "m.onnx", rows, tmp_path / "int8.onnx", QdqOptions(exclude=frozenset({"left"})))

    as_written = onnxruntime.SessionOptions()
    as_written.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    exact, served = (
        onnxruntime.InferenceSession(tmp_path / "int8.onnx", options).run(None, dict(rows.inputs))[0]
        for options in (as_written, onnxruntime.SessionOptions())
    )
    step = np.ptp(exact) / 255  # of the last convolution's output
    assert np.abs(served - exact).max() < 1.5 * step


@pytest.mark.parametrize(
    ("channels", "groups", "excluded"), [(3, 1, {"conv", "depthwise"}), (4, 1, set()), (8, 8, set())]
)
def test_convolutions_over_few_channels_stay_fp32(
    channels: int, groups: int, excluded: set[str], tmp_path: Path
) -> None:
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(8, channels // groups, 3, 3)).astype(np.float32),
        "u": random.normal(size=(8, 1, 1, 1)).astype(np.float32),
        "v": random.normal(size=(8, 8, 1, 1)).astype(np.float32),
    }
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Conv", ["x", "w"], ["h"], "conv", group=groups),
            onnx.helper.make_node("Relu", ["h"], ["r"], "relu"),
            onnx.helper.make_node("Conv", ["r", "u"], ["d"], "depthwise", group=8),
            onnx.helper.make_node("Conv", ["d", "v"], ["y"], "after"),
        ],
        "two",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", channels, 8, 8])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 8, 6, 6])],
        [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]), str(tmp_path / "m.onnx"))

    assert QdqOptions.for_cpu(tmp_path / "m.onnx").exclude == excluded


def _dense_model(path: Path, opset: int = 18) -> Path:
    """Two layers with a Relu between them; random weights."""
    random = np.random.default_rng(7)
    arrays = {
        "w": random.normal(size=(6, 8)),
        "b": random.normal(size=8),
        "v": random.normal(size=(8, 3)),
        "c": random.normal(size=3),
    }
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "w", "b"], ["h"], "first"),
        onnx.helper.make_node("Relu", ["h"], ["r"], "relu"),
        onnx.helper.make_node("Gemm", ["r", "v", "c"], ["y"], "second"),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "dense",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", 6])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["batch", 3])],
        [onnx.numpy_helper.from_array(array.astype(np.float32), name) for name, array in arrays.items()],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def _dense_rows(count: int) -> Rows:
    return Rows({"x": np.random.default_rng(3).normal(size=(count, 6)).astype(np.float32)})


def _answer(model: Path, rows: Rows, batch: int) -> NDArray[Any]:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, feed)[0] for feed in rows.batches(batch)])
