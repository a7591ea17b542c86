"""Which few input channels of a linear layer stretch its range, and how does the model look that computes them in FP32?

    found = split_outliers(prepared, rows, output)       # [Split(node="node_linear_5", channels=(417,), gain=4.1), ...]
    QdqOptions(exclude=frozenset(split.beside for split in found))

x @ W becomes (x * keep) @ W + x[:, channels] @ W[channels], the same sum in another order: `keep` is 0 for the channels that are
far larger than the rest and 1 elsewhere. INT8 then spends its 256 steps on the range of the rest, and the second product, which
stays FP32, is as small as the channels are few. It is LLM.int8()'s decomposition (Dettmers et al., 2022,
https://arxiv.org/abs/2208.07339) with channels that calibration has fixed, so an answer does not depend on its batch-mates.

SmoothQuant moves such a channel into the weights, which suits many channels above the rest; for one alone, of a kind that a GELU
lets through for a single token, the weights of that channel then stretch the scale of every output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tritonpilot.quantize.data import Rows

#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

MOST_CHANNELS = 16
LEAST_GAIN = 1.5
#: What one more channel must gain: the range has to shrink by this share, or the channel stays with the rest.
COST_OF_CHANNEL = 0.02


@dataclass(frozen=True)
class Split:
    """A linear layer whose `channels` were taken out; `beside` is the node that computes them in FP32.

    `gain` is the range of the input with the channels over that without.
    """

    node: str
    beside: str
    channels: tuple[int, ...]
    gain: float


def split_outliers(
    model: Path,
    rows: Rows,
    output: Path,
    *,
    most_channels: int = MOST_CHANNELS,
    least_gain: float = LEAST_GAIN,
    batch: int = 16,
    exclude: frozenset[str] = frozenset(),
    progress: Progress | None = None,
) -> list[Split]:
    """Write `output`, which answers as `model` does (up to the order of sums), and say what was split; nothing is when no layer
    gains `least_gain`. `rows` are the calibration rows, `exclude` the nodes that stay FP32 anyway."""
    proto = onnx.load(str(model))
    graph = proto.graph
    weights = {each.name: each for each in graph.initializer if each.data_type == TensorProto.FLOAT}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if _is_linear(node, weights) and node.name not in exclude:
            readers.setdefault(node.input[0], []).append(node)
    found: list[Split] = []
    for name, peaks in _peaks(proto, list(readers), rows, batch, progress).items():
        channels, gain = outliers(peaks, most_channels)
        if gain >= least_gain:
            found += _split(graph, name, readers[name], channels, gain, weights)
    used = {name for node in graph.node for name in node.input}
    for tensor in [each for each in graph.initializer if each.name not in used]:
        graph.initializer.remove(tensor)
    onnx.save(proto, str(output))
    return found


def outliers(peaks: NDArray[np.floating[Any]], most_channels: int = MOST_CHANNELS) -> tuple[tuple[int, ...], float]:
    """The channels to take out, of the largest absolute value of each, and how many times smaller the rest's range is.

    outliers(np.array([1.0, 25.0, 1.2, 0.9])) == ((1,), 20.8...)
    """
    order = np.argsort(-peaks, kind="stable")
    most = min(most_channels, len(peaks) // 8 if len(peaks) >= 8 else len(peaks) - 1)
    left = np.maximum(peaks[order[: most + 1]], np.finfo(np.float32).tiny)
    count = int(np.argmin(left * (1 + COST_OF_CHANNEL * np.arange(most + 1))))
    return tuple(sorted(int(place) for place in order[:count])), float(left[0] / left[count])


def _is_linear(node: onnx.NodeProto, weights: dict[str, TensorProto]) -> bool:
    if node.op_type not in ("Gemm", "MatMul") or node.input[1] not in weights or len(weights[node.input[1]].dims) != 2:
        return False
    return not any(entry.name == "transA" and entry.i for entry in node.attribute)


def _peaks(
    proto: onnx.ModelProto, names: list[str], rows: Rows, batch: int, progress: Progress | None
) -> dict[str, NDArray[np.float32]]:
    """The largest absolute value of each channel (last axis) of these tensors over all rows."""
    inputs = {value.name for value in proto.graph.input}
    seen = onnx.ModelProto()
    seen.CopyFrom(proto)
    known = {value.name for value in seen.graph.output}
    inner = [name for name in names if name not in inputs]
    seen.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in inner if name not in known
    )
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(seen.SerializeToString(), options, providers=["CPUExecutionProvider"])
    peaks: dict[str, NDArray[np.float32]] = {}
    total = -(-rows.count // batch)
    for done, feed in enumerate(rows.batches(batch)):
        if progress is not None:
            progress("looking for outlier channels", done, total)
        values = {**feed, **(dict(zip(inner, session.run(inner, feed), strict=True)) if inner else {})}
        for name in names:
            peak = np.abs(values[name].reshape(-1, values[name].shape[-1])).max(axis=0, initial=0)
            peaks[name] = np.maximum(peaks[name], peak) if name in peaks else peak
    return {name: peaks[name] for name in names}


def _split(
    graph: onnx.GraphProto,
    name: str,
    nodes: list[onnx.NodeProto],
    channels: tuple[int, ...],
    gain: float,
    weights: dict[str, TensorProto],
) -> list[Split]:
    keep = np.ones(_inputs(nodes[0], weights), np.float32)
    keep[list(channels)] = 0
    rest, few = f"{name}/rest", f"{name}/outliers"
    graph.initializer.append(numpy_helper.from_array(keep, f"{rest}/keep"))
    graph.initializer.append(numpy_helper.from_array(np.array(channels, np.int64), f"{few}/channels"))
    made = [
        helper.make_node("Mul", [name, f"{rest}/keep"], [rest], rest),
        helper.make_node("Gather", [name, f"{few}/channels"], [few], few, axis=-1),
    ]
    place = min(list(graph.node).index(node) for node in nodes)
    for each in reversed(made):
        graph.node.insert(place, each)
    _describe(graph, name, rest)
    found = []
    for node in nodes:
        by_channel, scale = _by_channel(node, weights)
        apart = f"{node.name}/outliers"
        graph.initializer.append(
            numpy_helper.from_array(by_channel[list(channels)] * np.float32(scale), f"{apart}/weight")
        )
        left = by_channel * keep[:, None]
        _set_weight(graph, node, left)
        node.input[0] = rest
        whole = node.output[0]
        node.output[0] = f"{whole}/rest"
        _describe(graph, whole, node.output[0])
        place = list(graph.node).index(node) + 1
        graph.node.insert(place, helper.make_node("Add", [f"{whole}/rest", apart], [whole], f"{apart}/add"))
        graph.node.insert(place, helper.make_node("MatMul", [few, f"{apart}/weight"], [apart], apart))
        found.append(Split(node.name, apart, channels, gain))
    return found


def _describe(graph: onnx.GraphProto, like: str, name: str) -> None:
    """Say that the tensor `name` is what `like` is: quantisation wants the type of every tensor."""
    described = next((value for value in [*graph.value_info, *graph.input, *graph.output] if value.name == like), None)
    if described is None:
        graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
        return
    copied = graph.value_info.add()
    copied.CopyFrom(described)
    copied.name = name


def _inputs(node: onnx.NodeProto, weights: dict[str, TensorProto]) -> int:
    return len(_by_channel(node, weights)[0])


def _by_channel(node: onnx.NodeProto, weights: dict[str, TensorProto]) -> tuple[NDArray[np.float32], float]:
    """The weight as [inputs, outputs], and the factor of a Gemm's product."""
    attributes = {entry.name: helper.get_attribute_value(entry) for entry in node.attribute}
    weight = numpy_helper.to_array(weights[node.input[1]])
    return (weight.T if attributes.get("transB") else weight), float(attributes.get("alpha", 1.0))


def _set_weight(graph: onnx.GraphProto, node: onnx.NodeProto, by_channel: NDArray[np.float32]) -> None:
    """Give the node a weight of its own: others may share the one that it has."""
    turned = any(entry.name == "transB" and entry.i for entry in node.attribute)
    name = f"{node.name}/rest/weight"
    graph.initializer.append(
        numpy_helper.from_array(np.ascontiguousarray(by_channel.T if turned else by_channel), name)
    )
    node.input[1] = name
