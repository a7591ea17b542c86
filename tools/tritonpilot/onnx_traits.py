"""What precision does an ONNX file have, and would TensorRT take its quantisation?

traits = read_traits(Path("model_int8.onnx"))     # Traits(is_quantized=True, half=None, obstacles=())
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import onnx

Half = Literal["FP16", "BF16"]
#: What does the arithmetic in integers itself, where TensorRT wants QuantizeLinear and DequantizeLinear around it.
INTEGER_OPERATORS = frozenset({"DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearConv", "QLinearMatMul"})


@dataclass(frozen=True)
class Traits:
    """What an ONNX file says of its own precision."""

    is_quantized: bool
    half: Half | None
    obstacles: tuple[str, ...]
    """Why TensorRT would refuse its quantisation or operators, one clause for each reason."""


def read_traits(path: Path) -> Traits:
    """What an ONNX file says of its own precision, and what in its quantisation TensorRT refuses.

    TensorRT takes QuantizeLinear and DequantizeLinear with INT8 and a zero point of 0 only
    (https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md).
    """
    model = onnx.load(str(path), load_external_data=False)
    half: Half | None = None
    obstacles: dict[str, list[str]] = {}
    is_quantized = False
    for graph in _graphs(model.graph):
        constants = _constants(graph)
        elements = {tensor.data_type for tensor in constants.values()}
        elements |= {value.type.tensor_type.elem_type for value in [*graph.input, *graph.output]}
        for node in graph.node:
            elements |= {
                attribute.i for attribute in node.attribute if node.op_type == "Cast" and attribute.name == "to"
            }
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                is_quantized = True
                obstacle = _obstacle(node, constants, path.parent)
                if obstacle is not None:
                    obstacles.setdefault(obstacle, []).append(node.name or node.output[0])
            if node.domain not in ("", "ai.onnx"):
                obstacles.setdefault(f"{node.op_type} of the domain {node.domain}", []).append(node.name)
            elif node.op_type in INTEGER_OPERATORS:
                is_quantized = True
                obstacles.setdefault(node.op_type, []).append(node.name)
        if onnx.TensorProto.FLOAT16 in elements:
            half = "FP16"
        elif onnx.TensorProto.BFLOAT16 in elements:
            half = half or "BF16"
    return Traits(
        is_quantized,
        half,
        tuple(
            f"{what} ({len(nodes)} node{'s' * (len(nodes) > 1)}, first {nodes[0]})" for what, nodes in obstacles.items()
        ),
    )


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                if inner.ByteSize():
                    yield from _graphs(inner)


def _constants(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            found.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return found


def _obstacle(node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto], folder: Path) -> str | None:
    """Why TensorRT refuses a QuantizeLinear or DequantizeLinear node, or computes something else than it says."""
    zero_point = constants.get(node.input[2]) if len(node.input) > 2 and node.input[2] else None
    data = constants.get(node.input[0])
    typed = zero_point if zero_point is not None else data
    element = typed.data_type if typed is not None else _output_type(node)
    if element == onnx.TensorProto.INT32:
        return "biases quantised to INT32"
    if element not in (onnx.TensorProto.INT8, onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.INT4):
        return f"quantisation to {onnx.TensorProto.DataType.Name(element)}"
    if zero_point is not None and np.any(onnx.numpy_helper.to_array(zero_point, str(folder)).astype(np.float32)):
        return "zero points other than 0"
    return None


def _output_type(node: onnx.NodeProto) -> int:
    """What QuantizeLinear makes without a zero point."""
    stated = [attribute.i for attribute in node.attribute if attribute.name == "output_dtype" and attribute.i]
    return stated[0] if stated else int(onnx.TensorProto.UINT8)
