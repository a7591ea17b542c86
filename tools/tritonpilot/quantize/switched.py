"""What does each node cost in accuracy when it is quantised, alone or together with others, without quantising the model each time?

    model = Switched(prepared, ranges, options)                 # FP32, with a switch at each node that can be quantised
    exact = model.answers(rows)
    alone = model.answers(rows, quantised={"node_linear_5"})
    noise(exact, alone)                                         # squared error over variance: 0 equal, 1 useless

A node that is switched on sees its input and its weights rounded as the INT8 model has them. So one session answers for every
subset of the nodes, and a search over them costs a run each instead of a quantised file.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tritonpilot.quantize.data import Rows
from tritonpilot.quantize.qdq import WEIGHTS, QdqOptions, Ranges, quantizable_nodes

SWITCHES = "tritonpilot/switches"


class Switched:
    """The prepared FP32 `model` with a switch at each node that `options` would quantise."""

    def __init__(self, model: Path, ranges: Ranges, options: QdqOptions, threads: int = 1) -> None:
        self.nodes = quantizable_nodes(model, options)
        proto = onnx.load(str(model))
        _insert_switches(proto, [node.name for node in self.nodes], ranges, options)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.log_severity_level = 3
        # Not further: rounding that a switch may skip must not be taken for that of a quantised model.
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        self._session = ort.InferenceSession(proto.SerializeToString(), settings, providers=["CPUExecutionProvider"])
        self._output = self._session.get_outputs()[0].name

    def answers(self, rows: Rows, quantised: Iterable[str] = (), batch: int = 16) -> NDArray[Any]:
        """The first output for all rows, with these nodes quantised."""
        names = frozenset(quantised)
        switches = np.array([node.name in names for node in self.nodes])
        feeds = rows.batches(batch)
        parts = [self._session.run([self._output], {**feed, SWITCHES: switches})[0] for feed in feeds]
        return np.concatenate(parts)


def noise(reference: NDArray[Any], candidate: NDArray[Any]) -> float:
    """Squared error of the candidate's answers over the variance of the reference's: 0 where they are equal.

    For vectors of length 1 that point everywhere it is twice their mean distance by cosine.
    """
    exact = reference.astype(np.float64)
    error = float(np.square(candidate - exact).sum())
    spread = float(np.square(exact - exact.mean(axis=0)).sum())
    return error / spread if spread > 0 else float(error > 0)


def time_shares(model: Path, rows: Rows, batch: int = 16, threads: int = 1) -> dict[str, float]:
    """Which share of the FP32 model's time each node takes: the larger of what ONNX Runtime's profile of a few batches says and of
    its share of all multiplications.

    Nodes keep their names only where nothing is optimised, and there depthwise convolutions take far longer than they do when
    served: what they take says too little of the others.
    """
    multiplications = _multiplications(model)
    with tempfile.TemporaryDirectory() as folder:
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.log_severity_level = 3
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # nodes keep their names
        settings.enable_profiling = True
        settings.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(str(model), settings, providers=["CPUExecutionProvider"])
        for _, feed in zip(range(3), rows.batches(batch), strict=False):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    spent: dict[str, float] = {}
    work: dict[str, float] = {}
    for event in events:
        name = str(event.get("name", ""))
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            node = name.removesuffix("_kernel_time")
            spent[node] = spent.get(node, 0.0) + float(event["dur"])
            shapes = [math.prod(*each.values()) for each in event["args"]["output_type_shape"]]
            work[node] = work.get(node, 0.0) + multiplications.get(node, 0) * sum(shapes)
    time, all_work = sum(spent.values()) or 1.0, sum(work.values()) or 1.0
    return {node: max(duration / time, work[node] / all_work) for node, duration in spent.items()}


def _multiplications(model: Path) -> dict[str, float]:
    """For each element of a node's output, where its weights are constant."""
    graph = onnx.load(str(model), load_external_data=False).graph
    dims = {tensor.name: tensor.dims for tensor in graph.initializer}
    found: dict[str, float] = {}
    for node in graph.node:
        weight = next((dims[name] for name in node.input[1:2] if name in dims), None)
        if weight is None or node.op_type not in WEIGHTS:
            continue
        turned = any(entry.name == "transB" and entry.i for entry in node.attribute)
        by_filter = math.prod(weight[1:])
        found[node.name] = {
            "Conv": by_filter,
            "ConvTranspose": weight[0],
            "Gemm": by_filter if turned else weight[0],
        }.get(node.op_type, weight[-2] if len(weight) > 1 else 0)
    return found


def _insert_switches(proto: onnx.ModelProto, names: list[str], ranges: Ranges, options: QdqOptions) -> None:
    graph = proto.graph
    weights = {each.name: each for each in graph.initializer}
    graph.input.append(helper.make_tensor_value_info(SWITCHES, TensorProto.BOOL, [len(names)]))
    places = {name: place for place, name in enumerate(names)}
    nodes: list[onnx.NodeProto] = []
    for original in graph.node:
        node = onnx.NodeProto()
        node.CopyFrom(original)
        if node.name not in places:
            nodes.append(node)
            continue
        at = f"{node.name}/switch"
        graph.initializer.append(numpy_helper.from_array(np.array(places[node.name], np.int64), f"{at}/place"))
        nodes.append(helper.make_node("Gather", [SWITCHES, f"{at}/place"], [at], at, axis=0))
        index = WEIGHTS[node.op_type]
        weight = numpy_helper.to_array(weights[node.input[index]])
        rounded = f"{at}/weight"
        graph.initializer.append(numpy_helper.from_array(rounded_weight(weight, node, options), rounded))
        if node.op_type == "Gather":  # a choice between rows, not between tables: they are large
            other = onnx.NodeProto()
            other.CopyFrom(node)
            other.name, other.input[0], other.output[0] = f"{at}/quantised", rounded, f"{at}/quantised"
            whole = node.output[0]
            node.output[0] = f"{at}/exact"
            nodes += [
                node,
                other,
                helper.make_node("Where", [at, other.output[0], node.output[0]], [whole], f"{at}/choice"),
            ]
            continue
        nodes.append(helper.make_node("Where", [at, rounded, node.input[index]], [f"{at}/weights"], f"{at}/weights"))
        node.input[index] = f"{at}/weights"
        data = 1 - index if node.op_type == "MatMul" else 0
        if node.input[data] in ranges:
            nodes += _rounded_input(graph, node, data, at, ranges[node.input[data]], options)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _rounded_input(
    graph: onnx.GraphProto, node: onnx.NodeProto, index: int, at: str, bounds: tuple[float, float], options: QdqOptions
) -> list[onnx.NodeProto]:
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    if options.activation == "int8":
        scale, zero = max(-low, high) / 127, np.array(0, np.int8)
    else:
        scale = (high - low) / 255
        zero = np.array(round(-low / scale) if scale else 0, np.uint8)
    if scale < np.finfo(np.float32).tiny:
        return []
    graph.initializer.append(numpy_helper.from_array(np.array(scale, np.float32), f"{at}/scale"))
    graph.initializer.append(numpy_helper.from_array(zero, f"{at}/zero"))
    source, quantised, rounded = node.input[index], f"{at}/input8", f"{at}/rounded"
    node.input[index] = f"{at}/input"
    return [
        helper.make_node("QuantizeLinear", [source, f"{at}/scale", f"{at}/zero"], [quantised], quantised),
        helper.make_node("DequantizeLinear", [quantised, f"{at}/scale", f"{at}/zero"], [rounded], rounded),
        helper.make_node("Where", [at, rounded, source], [f"{at}/input"], f"{at}/input"),
    ]


def rounded_weight(weight: NDArray[Any], node: onnx.NodeProto, options: QdqOptions) -> NDArray[np.float32]:
    """The weight as INT8 has it: symmetric, one scale for each output where `options` say so (a table has one)."""
    turned = any(entry.name == "transB" and entry.i for entry in node.attribute)
    axis = {"Conv": 0, "ConvTranspose": 1, "Gemm": 0 if turned else 1, "MatMul": weight.ndim - 1}.get(node.op_type)
    others = tuple(each for each in range(weight.ndim) if each != axis)
    peak = np.abs(weight).max(axis=others if options.per_channel and axis is not None else None, keepdims=True)
    scale = np.where(peak > 0, peak, 1) / (64 if options.reduce_range else 127)
    return np.asarray(np.rint(weight / scale) * scale, np.float32)
