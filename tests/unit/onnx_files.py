"""Small ONNX files for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

Dims = Sequence[int | str]


def identity(path: Path, dims: Dims = ("batch", 4), element: int = TensorProto.FLOAT) -> Path:
    """A model x -> y of one Identity node."""
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])],
        "identity",
        [helper.make_tensor_value_info("x", element, dims)],
        [helper.make_tensor_value_info("y", element, dims)],
    )
    return save(path, graph)


def save(path: Path, graph: onnx.GraphProto) -> Path:
    """Write a graph as a model file that every supported ONNX Runtime reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path))
    return path
