"""FP16 of a real model: half the bytes, the same inputs and outputs, and a clear word where it cannot be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from tritonpilot import build, samples, spec
from tritonpilot.errors import ModelError
from tritonpilot.onnx_model import read_signature
from tritonpilot.quantize.floats import to_bf16, to_fp16
from tritonpilot.quantize.qdq import quantizable_nodes

RISK = Path(__file__).parents[2] / "models" / "risk"


@pytest.fixture(scope="module")
def risk() -> Path:
    build.prepare(spec.load_services(RISK.parent, ["risk"]), "auto", lambda _: None)
    return RISK / "build" / "model.onnx"


def test_fp16_answers_nearly_as_fp32_does(risk: Path, tmp_path: Path) -> None:
    output = tmp_path / "fp16.onnx"
    to_fp16(risk, output)
    feed = {name: array[:50] for name, array in samples.read(risk.parent / "samples.npz").items()}
    exact, found = (
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)[0]
        for path in (risk, output)
    )
    assert 0 < np.abs(exact - found).max() < 2e-3
    assert read_signature(output) == read_signature(risk)
    assert _weight_bytes(output) < 0.55 * _weight_bytes(risk)
    assert [file.name for file in tmp_path.iterdir()] == ["fp16.onnx"]


def test_excluded_nodes_keep_fp32_weights(risk: Path, tmp_path: Path) -> None:
    last = quantizable_nodes(risk)[-1].name
    to_fp16(risk, tmp_path / "mixed.onnx", frozenset({last}))
    graph = onnx.load(tmp_path / "mixed.onnx").graph
    weight = next(node for node in graph.node if node.name == last).input[1]
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert kinds[weight] == onnx.TensorProto.FLOAT
    assert onnx.TensorProto.FLOAT16 in kinds.values()


def test_a_node_that_does_not_exist_is_named(risk: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no node nonesuch to exclude"):
        to_fp16(risk, tmp_path / "fp16.onnx", frozenset({"nonesuch"}))
    assert list(tmp_path.iterdir()) == []


def test_a_weight_beyond_fp16_is_named(risk: Path, tmp_path: Path) -> None:
    model = onnx.load(risk)
    last = quantizable_nodes(risk)[-1].name
    name = next(node for node in model.graph.node if node.name == last).input[1]
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == name)
    tensor.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(tensor) * np.float32(1e7), name))
    onnx.save(model, tmp_path / "large.onnx")
    output = tmp_path / "out" / "fp16.onnx"
    with pytest.raises(ModelError, match=r"FP16 ends at 65504\. .*Exclude that node"):
        to_fp16(tmp_path / "large.onnx", output)
    assert not output.exists()
    to_fp16(tmp_path / "large.onnx", output, frozenset({last}))
    assert output.is_file()


def test_a_file_that_is_no_model_leaves_the_old_output(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    (tmp_path / "fp16.onnx").write_text("old")
    with pytest.raises(ModelError, match="not a valid ONNX model"):
        to_fp16(tmp_path / "broken.onnx", tmp_path / "fp16.onnx")
    assert (tmp_path / "fp16.onnx").read_text() == "old"


def test_bf16_says_why_not(risk: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no BF16 kernels"):
        to_bf16(risk, tmp_path / "bf16.onnx")
    assert list(tmp_path.iterdir()) == []


def _weight_bytes(model: Path) -> int:
    return sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in onnx.load(model).graph.initializer)
