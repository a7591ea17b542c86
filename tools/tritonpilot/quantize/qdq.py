"""How does an FP32 ONNX model become a static INT8 one in QDQ form?

    options = QdqOptions.for_cpu(model)
    quantize_static(model, rows, output, options)          # rows: data.Rows, the calibration set
    quantizable_nodes(model)                               # [Node(name="node_linear", op_type="Gemm"), ...]

A search quantises one model many times: `prepare` it once, `calibrate` it once per method, and give both to `quantize_static`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationMethod, QDQQuantizer, QuantType, quant_pre_process
from onnxruntime.quantization.calibrate import CalibrationDataReader, TensorsData, create_calibrator

from tritonpilot.errors import HostError, ModelError, PilotError
from tritonpilot.onnx_model import external_files, read_signature
from tritonpilot.quantize.data import Rows

Method = Literal["minmax", "entropy", "percentile"]
#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]
#: Lowest and highest value of each activation, by tensor name.
Ranges = Mapping[str, tuple[float, float]]

#: DequantizeLinear with one scale per channel exists from here on.
LOWEST_OPSET = 13
#: A protobuf message, and with it a model in one file, ends here.
LARGEST_BYTES = 2**31 - 1

#: Operators with constant weights, and which input the weights are.
WEIGHTS: Mapping[str, int] = {"Conv": 1, "ConvTranspose": 1, "Gemm": 1, "MatMul": 1, "Gather": 0}
#: Operators with a bias that can be corrected.
WITH_BIAS = frozenset({"Conv", "Gemm"})
#: Operators that ONNX Runtime folds into a quantised neighbour, or runs on integers as they are.
FOLLOWERS = frozenset({"Clip", "MaxPool", "Relu"})
#: Operators that only a quantised model has, beside those that begin with QLinear.
QUANTIZED = frozenset(
    {
        "ConvInteger",
        "DequantizeLinear",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeLinear",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "QAttention",
        "QGemm",
        "QMoE",
        "QuantizeLinear",
    }
)
_METHODS = {
    "minmax": CalibrationMethod.MinMax,
    "entropy": CalibrationMethod.Entropy,
    "percentile": CalibrationMethod.Percentile,
}
_PREPARED = "tritonpilot.prepared"


class Node(NamedTuple):
    """A node that can be quantised; `name` is what `QdqOptions.exclude` takes."""

    name: str
    op_type: str


@dataclass(frozen=True)
class QdqOptions:
    """How to quantise: how ranges are found, what is quantised, how the loss is made up for.

    `percentile` is the share of values in percent that a range holds (method "percentile" only). `per_channel` gives each output
    channel of a weight its own scale. `reduce_range` (7-bit weights) avoids saturation on CPUs without VNNI. `activation` "uint8"
    is what ONNX Runtime's kernels for x86-64 want; "int8" is symmetric and leaves biases in FP32, as TensorRT wants it. `exclude`
    names nodes that stay FP32. `smooth` is SmoothQuant's alpha: which part of an input's outliers its weights take over.
    `bias_correction` moves each bias by the mean error of its node. `batch` rows are run at once while ranges are found.
    """

    method: Method = "minmax"
    percentile: float = 99.999
    per_channel: bool = True
    reduce_range: bool = False
    activation: Literal["uint8", "int8"] = "uint8"
    exclude: frozenset[str] = frozenset()
    op_types: frozenset[str] = frozenset(WEIGHTS) | FOLLOWERS
    smooth: float | None = None
    bias_correction: bool = False
    batch: int = 16

    def __post_init__(self) -> None:
        if self.method not in _METHODS:
            raise ValueError(f"method is one of {', '.join(_METHODS)}, not {self.method!r}")
        if not 50 < self.percentile <= 100:
            raise ValueError(f"percentile is above 50 and at most 100, not {self.percentile}")
        if self.smooth is not None and not 0 <= self.smooth <= 1:
            raise ValueError(f"smooth is between 0 and 1, not {self.smooth}")
        if self.batch < 1:
            raise ValueError(f"batch is 1 or more, not {self.batch}")

    @classmethod
    def for_cpu(cls, model: Path) -> QdqOptions:
        """Options that are fast on x86-64, by the operators of the model and the instructions of this CPU."""
        with prepared(model, None) as file:
            graph = onnx.load(str(file))
        types = {node.name: node.op_type for node in _targets(graph, cls())}
        few = frozenset(_convolutions_of_few(graph))
        return cls(
            # INT8 activations are converted in front of each operator: MiniLM took five times as long as with UINT8.
            activation="uint8",
            # Without VNNI, products of UINT8 and INT8 saturate in 16 bits.
            reduce_range=not has_vnni(),
            batch=_few_rows(types),
            # Integers are multiplied in fours: over the three colours of a photo INT8 takes 1.3 times as long as FP32.
            exclude=few if few != types.keys() else frozenset(),
        )

    @classmethod
    def for_tensorrt(cls, model: Path) -> QdqOptions:
        """Options that TensorRT takes: signed activations with a zero point of 0, and biases in FP32."""
        types = {node.name: node.op_type for node in quantizable_nodes(model)}
        return cls(activation="int8", batch=_few_rows(types))


def _few_rows(types: Mapping[str, str]) -> int:
    """One photo of 224x224 has intermediate tensors of tens of MB; rows of a table are small."""
    return 4 if "Conv" in types.values() else 64


def _convolutions_of_few(graph: onnx.ModelProto) -> list[str]:
    """The convolutions that sum over fewer input channels than an integer instruction takes at once; depthwise ones only where
    what they read is in FP32 for that reason: then the conversion comes after them."""
    channels = {tensor.name: tensor.dims[1] for tensor in graph.graph.initializer if len(tensor.dims) == 4}
    found: list[str] = []
    floats: set[str] = set()  # what they give, also behind a Relu or Clip
    for node in graph.graph.node:
        is_read = bool(node.input) and node.input[0] in floats
        if node.op_type == "Conv" and channels.get(node.input[1], 4) < 4:
            if is_read or _attribute(node, "group", 1) == 1:
                found.append(node.name)
                floats.update(node.output)
        elif node.op_type in FOLLOWERS and is_read:
            floats.update(node.output)
    return found


def has_vnni() -> bool:
    """Whether this CPU multiplies INT8 into 32 bits in one instruction; True where that cannot be read."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return True
    return "flags" not in flags or not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


def is_quantized(model: Path) -> bool:
    """Whether the model already holds quantised operators. Raises ModelError when it is no ONNX model."""
    return bool(_quantized_operators(_load(model)))


def quantizable_nodes(model: Path, options: QdqOptions | None = None) -> list[Node]:
    """The nodes with constant weights that `options` would quantise, in the model's order.

    Names are those of the prepared model; give a prepared one to save the time of preparing it. Raises ModelError as
    `quantize_static` does, except that the list may be empty.
    """
    with prepared(model, None) as graph_file:
        return _targets(onnx.load(str(graph_file)), options or QdqOptions())


def prepare(model: Path, output: Path, progress: Progress | None = None) -> None:
    """Write the FP32 model that is quantised: opset 13 or later, constants folded, in one file, every node with a name of its own.

    Preparing a prepared model changes nothing. Raises ModelError when the model is already quantised, cannot be brought to opset
    13, or is larger than 2 GB; `output` is then as it was.
    """
    with whole(output) as aside, translated(model):
        _prepare(model, aside, progress)


def calibrate(model: Path, rows: Rows, options: QdqOptions, progress: Progress | None = None) -> Ranges:
    """Ranges of the activations over the rows. They depend on method, percentile, activation, op_types and smooth alone.

    A tensor that is constant over all rows has a range without width and is kept exactly. Raises ModelError when a value is not
    finite: then INT8 cannot hold it.
    """
    with prepared(model, progress) as source, translated(model), tempfile.TemporaryDirectory() as folder:
        graph = onnx.load(str(source))
        if options.smooth is not None:
            _smooth(graph, _targets(graph, options), rows, options, progress)
        return _calibrate(graph, rows, options, Path(folder), progress)


def quantize_static(
    model: Path,
    rows: Rows,
    output: Path,
    options: QdqOptions,
    progress: Progress | None = None,
    *,
    ranges: Ranges | None = None,
) -> None:
    """Write the INT8 model `output`, whole or not at all; `ranges` of an earlier `calibrate` save its time.

    Activations get one scale from the rows, so an answer does not depend on the other rows of its batch. Inputs and outputs keep
    their types. Batches may be ragged, shapes dynamic, weights in external files (the result is one file).

    Raises ModelError when the model is already quantised, too old to be upgraded, larger than 2 GB, has nothing to quantise, or
    has activations that are not finite; HostError when memory runs out. `output` is then as it was, as after Ctrl-C.
    """
    with whole(output) as aside, prepared(model, progress) as source, translated(model):
        graph = onnx.load(str(source))
        targets = _targets(graph, options)
        if not targets:
            raise ModelError(
                f"{model} has no node to quantise: of {', '.join(sorted(options.op_types & WEIGHTS.keys()))} with constant FP32 "
                f"weights, {len(options.exclude)} excluded, none is left. Nothing was changed. Keep FP32, or to_fp16."
            )
        if options.smooth is not None:
            _smooth(graph, targets, rows, options, progress)
        if ranges is None:
            ranges = _calibrate(graph, rows, options, aside.parent, progress)
        if options.bias_correction:
            _correct_biases(graph, targets, rows, ranges, options, progress)
        _insert_qdq(graph, targets, ranges, options, progress)
        onnx.save(graph, str(aside))
        _try(aside, rows)


def _prepare(model: Path, output: Path, progress: Progress | None) -> None:
    graph = _load(model)
    if _is_prepared(graph):
        output.write_bytes(model.read_bytes())
        return
    found = _quantized_operators(graph)
    if found:
        raise ModelError(
            f"{model} is already quantised: it has {', '.join(found)}. Nothing was changed. "
            "Give the FP32 model that it was made from."
        )
    if graph.ByteSize() > LARGEST_BYTES:
        raise ModelError(
            f"{model} is larger than 2 GB, which a model in one file cannot be. Nothing was changed. Quantise it in parts."
        )
    graph = _upgraded(model, graph, progress)
    _tell(progress, "folding constants", 0, 1)
    with tempfile.TemporaryDirectory(dir=output.parent.resolve()) as folder:
        source, folded = Path(folder) / "source.onnx", Path(folder) / "folded.onnx"
        onnx.save(graph, str(source))
        with quiet(), _inside(Path(folder)):
            try:
                quant_pre_process(str(source), str(folded))
            except Exception:  # noqa: BLE001 - symbolic shapes fail in many ways, and are needed for shapes alone
                quant_pre_process(str(source), str(folded), skip_symbolic_shape=True)
        graph = onnx.load(str(folded))
    _name_nodes(graph)
    entry = graph.metadata_props.add()
    entry.key, entry.value = _PREPARED, "1"
    onnx.save(graph, str(output))
    _tell(progress, "folding constants", 1, 1)


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """With `folder` as the working directory, in which ONNX Runtime leaves files when it cannot tell all symbolic shapes."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _upgraded(model: Path, graph: onnx.ModelProto, progress: Progress | None) -> onnx.ModelProto:
    opset = next((entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx")), LOWEST_OPSET)
    if opset >= LOWEST_OPSET:
        return graph
    _tell(progress, f"upgrading opset {opset} to {LOWEST_OPSET}", 0, 1)
    try:
        upgraded = onnx.version_converter.convert_version(graph, LOWEST_OPSET)
        onnx.checker.check_model(upgraded)
    except Exception as error:
        raise ModelError(
            f"{model} has opset {opset}, INT8 with a scale per channel needs {LOWEST_OPSET}, and ONNX's version converter cannot "
            f"upgrade it: {_first_line(error)}. Nothing was changed. Export the model again with opset {LOWEST_OPSET} or later."
        ) from error
    _tell(progress, f"upgrading opset {opset} to {LOWEST_OPSET}", 1, 1)
    return upgraded


def _name_nodes(graph: onnx.ModelProto) -> None:
    taken: set[str] = set()
    for node in graph.graph.node:
        name = node.name or f"{node.op_type}/{next((output for output in node.output if output), len(taken))}"
        unique, count = name, 1
        while unique in taken:
            count += 1
            unique = f"{name}/{count}"
        node.name = unique
        taken.add(unique)


def _load(model: Path) -> onnx.ModelProto:
    read_signature(model)  # says what is wrong with a file that is no ONNX model
    external_files(model)
    return onnx.load(str(model))


def _is_prepared(graph: onnx.ModelProto) -> bool:
    return any(entry.key == _PREPARED for entry in graph.metadata_props) and not _quantized_operators(graph)


def _quantized_operators(graph: onnx.ModelProto) -> list[str]:
    types = {node.op_type for node in graph.graph.node}
    return sorted(name for name in types if name in QUANTIZED or name.startswith("QLinear"))


def _targets(graph: onnx.ModelProto, options: QdqOptions) -> list[Node]:
    weights = {tensor.name: tensor for tensor in graph.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT}
    found = []
    for node in graph.graph.node:
        index = WEIGHTS.get(node.op_type)
        if index is None or node.op_type not in options.op_types or node.name in options.exclude:
            continue
        weight = weights.get(node.input[index])
        # A vector times a matrix, and a table of scalars, gain nothing.
        if weight is not None and len(weight.dims) >= 2:
            found.append(Node(node.name, node.op_type))
    return found


class _Batches(CalibrationDataReader):  # type: ignore[misc]
    """One batch for ONNX Runtime's calibrators, which crash on batches of different sizes when given several."""

    def __init__(self, feed: dict[str, NDArray[Any]]) -> None:
        self._feed: dict[str, NDArray[Any]] | None = feed

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        feed, self._feed = self._feed, None
        return feed


def _calibrate(
    graph: onnx.ModelProto, rows: Rows, options: QdqOptions, folder: Path, progress: Progress | None
) -> dict[str, tuple[float, float]]:
    source = folder / "calibrate.onnx"
    onnx.save(graph, str(source))
    settings: dict[str, Any] = {"symmetric": options.activation == "int8", "percentile": options.percentile}
    if options.method == "entropy":
        settings["num_bins"] = 256  # ORT's 128 bins for 128 levels leave nothing to choose; 1024 take minutes
    with quiet():
        calibrator = create_calibrator(
            source,
            sorted(options.op_types),
            augmented_model_path=str(folder / "augmented.onnx"),
            calibrate_method=_METHODS[options.method],
            extra_options=settings,
        )
        total = -(-rows.count // options.batch)
        for done, feed in enumerate(rows.batches(options.batch)):
            _tell(progress, "calibrating", done, total)
            calibrator.collect_data(_Batches(feed))
        found = calibrator.compute_data()
    _tell(progress, "calibrating", total, total)
    ranges = {name: _bounds(data.range_value) for name, data in found.items()}
    endless = [name for name, bounds in ranges.items() if not np.isfinite(bounds).all()]
    if endless:
        raise ModelError(
            f"The activation {endless[0]} takes the values {ranges[endless[0]]} over the calibration rows, and INT8 holds finite "
            "ones only. Nothing was changed. Look for overflow in the model, or exclude the node that makes it."
        )
    return ranges


def _bounds(value: tuple[Any, Any]) -> tuple[float, float]:
    low, high = value
    return float(np.min(low)), float(np.max(high))


def _insert_qdq(
    graph: onnx.ModelProto, targets: list[Node], ranges: Ranges, options: QdqOptions, progress: Progress | None
) -> None:
    _tell(progress, "quantising", 0, len(targets))
    followers = _followers(graph, targets, options)
    quantized = {node.name for node in targets} | followers
    clipped = {output for node in graph.graph.node if node.name in followers for output in node.output}
    left = [node.name for node in graph.graph.node if node.name not in quantized]
    limits = {name: (np.array(low, np.float32), np.array(high, np.float32)) for name, (low, high) in ranges.items()}
    int8 = options.activation == "int8"
    with quiet():
        quantizer = QDQQuantizer(
            graph,
            options.per_channel,
            options.reduce_range,
            QuantType.QInt8,
            QuantType.QInt8 if int8 else QuantType.QUInt8,
            TensorsData(CalibrationMethod.MinMax, limits),
            [],
            left,
            sorted(options.op_types),
            {"ActivationSymmetric": int8, "WeightSymmetric": True, "MatMulConstBOnly": True, "QuantizeBias": not int8},
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
    graph.CopyFrom(quantizer.model.model)
    _keep_float_outputs(graph, quantized, clipped)
    if not int8:
        _keep_float_weights(graph, quantized)
    del graph.metadata_props[:]
    graph.producer_name = "tritonpilot"
    _tell(progress, "quantising", len(targets), len(targets))


def _followers(graph: onnx.ModelProto, targets: list[Node], options: QdqOptions) -> set[str]:
    """Names of the nodes that are computed on integers because what is before them is.

    NOTE: a Relu behind a Gemm must be among them: left in FP32 it is fused with the Gemm, which then runs in FP32 too.
    """
    producer = {output: node for node in graph.graph.node for output in node.output}
    quantized = {node.name for node in targets}
    found: set[str] = set()
    for node in graph.graph.node:
        source = producer.get(node.input[0]) if node.op_type in FOLLOWERS & options.op_types else None
        if source is not None and node.name not in options.exclude and source.name in quantized | found:
            found.add(node.name)
    return found


def _keep_float_outputs(graph: onnx.ModelProto, quantized: set[str], clipped: set[str]) -> None:
    """Take away pairs behind a Gemm or MatMul that only FP32 operators read.

    ONNX Runtime's kernels give FP32 there for nothing; rounding it to 8 bits cost MiniLM most of its accuracy (mean cosine .936
    instead of .987) and a quarter of its speed. The pair of a `clipped` tensor stays: its range is all that is left of a Relu.
    """
    producer = {output: node for node in graph.graph.node for output in node.output}
    consumers = _consumers(graph)
    outputs = {value.name for value in graph.graph.output}
    for pair in [node for node in graph.graph.node if node.op_type == "DequantizeLinear"]:
        quantize = producer.get(pair.input[0])
        source = producer.get(quantize.input[0]) if quantize is not None else None
        readers = consumers.get(pair.output[0], [])
        if (
            quantize is None
            or source is None
            or source.op_type not in ("Gemm", "MatMul")
            or quantize.input[0] in clipped
            or len(consumers[pair.input[0]]) + len(consumers[quantize.input[0]]) > 2
            or any(reader.name in quantized or reader.op_type == "QuantizeLinear" for reader in readers)
        ):
            continue
        before, after = quantize.input[0], pair.output[0]
        if after in outputs:
            source.output[list(source.output).index(before)] = after
        for reader in readers:
            if after not in outputs:
                _replace(reader.input, after, before)
        graph.graph.node.remove(quantize)
        graph.graph.node.remove(pair)
    _drop_unused(graph)


def _keep_float_weights(graph: onnx.ModelProto, quantized: set[str]) -> None:
    """Let ONNX Runtime compute in FP32 what is left in FP32.

    Its WeightBiasQuantization takes a Conv, ConvTranspose or Gemm between integers for a quantised one and rounds its weights
    itself, with one scale for all channels: EfficientNet-Lite0 lost six times as much with one depthwise convolution left out as
    with none. Inputs that have a scale for each channel, here the same one, it leaves alone.
    """
    producer = {output: node for node in graph.graph.node for output in node.output}
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    outputs = {value.name for value in graph.graph.output}
    for node in list(graph.graph.node):
        is_left = node.op_type in ("Conv", "ConvTranspose", "Gemm") and node.name not in quantized
        pair = producer.get(node.input[0]) if is_left else None
        weight = constants.get(node.input[1]) if pair is not None else None
        if pair is None or weight is None or pair.op_type != "DequantizeLinear":
            continue
        channels = _input_channels(node, weight)
        if channels == 1 or _attribute(node, "transA", 0):
            continue
        each = onnx.NodeProto()
        each.CopyFrom(pair)
        each.name = each.output[0] = node.input[0] = f"{node.name}/input"
        del each.attribute[:]
        each.attribute.append(onnx.helper.make_attribute("axis", 1))
        for place in range(1, len(each.input)):
            value = onnx.numpy_helper.to_array(constants[each.input[place]])
            each.input[place] = f"{node.name}/input/{place}"
            graph.graph.initializer.append(onnx.numpy_helper.from_array(value.repeat(channels), each.input[place]))
        graph.graph.node.insert(list(graph.graph.node).index(pair) + 1, each)
        if pair.output[0] not in _consumers(graph) and pair.output[0] not in outputs:
            graph.graph.node.remove(pair)
    _drop_unused(graph)


def _input_channels(node: onnx.NodeProto, weight: onnx.TensorProto) -> int:
    if node.op_type == "Conv":
        return int(weight.dims[1]) * int(_attribute(node, "group", 1))
    return int(weight.dims[1 if node.op_type == "Gemm" and _attribute(node, "transB", 0) else 0])


def _smooth(
    graph: onnx.ModelProto, targets: list[Node], rows: Rows, options: QdqOptions, progress: Progress | None
) -> None:
    """Divide the channels of the inputs of Gemm and MatMul by factors that their weights take over, in place.

    SmoothQuant (Xiao et al., 2023, https://arxiv.org/abs/2211.10438, equation 4): factor = max|x|^alpha / max|w|^(1 - alpha). The
    division goes into the LayerNormalization or the Gemm (and Relu) before, where nobody else reads it, otherwise into a Mul.
    """
    alpha = options.smooth
    assert alpha is not None
    names = {node.name for node in targets if node.op_type in ("Gemm", "MatMul")}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.graph.node:
        if node.name in names and not _attribute(node, "transA", 0):
            readers.setdefault(node.input[0], []).append(node)
    largest: dict[str, NDArray[np.float32]] = {}
    for found in _activations(graph, list(readers), rows, options.batch, "smoothing", progress):
        for name, value in found.items():
            peak = np.abs(value.reshape(-1, value.shape[-1])).max(axis=0, initial=0)
            largest[name] = np.maximum(largest.get(name, np.zeros_like(peak)), peak)
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in graph.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    outputs = {value.name for value in graph.graph.output}
    for name, nodes in readers.items():
        by_channel = [_by_input_channel(node, weights[node.input[1]]) for node in nodes]
        strongest = np.max([np.abs(weight).max(axis=1) for weight in by_channel], axis=0)
        peak = largest[name]
        usable = (peak > 0) & (strongest > 0)
        factor = np.ones_like(peak)
        factor[usable] = peak[usable] ** alpha / strongest[usable] ** (1 - alpha)
        for node, weight in zip(nodes, by_channel, strict=True):
            scaled = weight * factor[:, None]
            _set_weight(graph, weights, node, 1, scaled.T if _attribute(node, "transB", 0) else scaled, "smooth")
        is_private = name not in outputs and len(_consumers(graph)[name]) == len(nodes)
        if not (is_private and _divided_before(graph, weights, name, factor)):
            _divide(graph, name, nodes, factor)
    _drop_unused(graph)


def _divided_before(
    graph: onnx.ModelProto, weights: dict[str, NDArray[np.float32]], name: str, factor: NDArray[np.float32]
) -> bool:
    """Divide the channels of the tensor `name` in the weights of what makes it, if that can be done; in place."""
    producer = {output: node for node in graph.graph.node for output in node.output}
    source = producer.get(name)
    if source is not None and source.op_type == "Relu" and len(_consumers(graph)[source.input[0]]) == 1:
        source = producer.get(source.input[0])
    if source is None or any(parameter not in weights for parameter in source.input[1:3]):
        return False
    if source.op_type == "LayerNormalization" and weights[source.input[1]].shape == factor.shape:
        for index in range(1, len(source.input)):
            _set_weight(graph, weights, source, index, weights[source.input[index]] / factor, "divided")
        return True
    if source.op_type == "Gemm" and all(weights[bias].shape == factor.shape for bias in source.input[2:3]):
        weight = _by_input_channel(source, weights[source.input[1]]) / factor
        _set_weight(graph, weights, source, 1, weight.T if _attribute(source, "transB", 0) else weight, "divided")
        for bias in source.input[2:3]:
            _set_weight(graph, weights, source, 2, weights[bias] / factor, "divided")
        return True
    return False


def _divide(graph: onnx.ModelProto, name: str, readers: list[onnx.NodeProto], factor: NDArray[np.float32]) -> None:
    """Put a Mul between a tensor and these readers of it."""
    divided = f"{name}/smooth"
    graph.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(1) / factor, f"{divided}/factor"))
    first = next(index for index, node in enumerate(graph.graph.node) if name in node.input)
    multiply = onnx.helper.make_node("Mul", [name, f"{divided}/factor"], [divided], divided)
    for reader in readers:
        reader.input[0] = divided
    graph.graph.node.insert(first, multiply)
    known = [*graph.graph.value_info, *graph.graph.input]
    info = onnx.helper.make_tensor_value_info(divided, onnx.TensorProto.FLOAT, None)
    for value in known:
        if value.name == name:
            info.CopyFrom(value)
            info.name = divided
    graph.graph.value_info.append(info)


def _correct_biases(
    graph: onnx.ModelProto,
    targets: list[Node],
    rows: Rows,
    ranges: Ranges,
    options: QdqOptions,
    progress: Progress | None,
) -> None:
    """Move the bias of each Conv and Gemm by the mean error of its output over the rows, in place.

    Nagel et al., 2019 (https://arxiv.org/abs/1906.04721, section 4.2): E[Wx] - E[W'x'], with W' and x' as INT8 has them. Padding
    counts as if it were an average value.
    """
    names = {node.name for node in targets if node.op_type in WITH_BIAS}
    weights = {
        tensor.name: onnx.numpy_helper.to_array(tensor)
        for tensor in graph.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT
    }
    nodes = [
        node
        for node in graph.graph.node
        if node.name in names
        and node.input[0] in ranges
        and not _attribute(node, "transA", 0)
        and (len(node.input) < 3 or node.input[2] in weights)
    ]
    sums: dict[str, tuple[NDArray[np.float64], NDArray[np.float64], int]] = {}
    for found in _activations(graph, [n.input[0] for n in nodes], rows, options.batch, "correcting biases", progress):
        for name, value in found.items():
            flat = _channels_last(value)
            rounded = _rounded(flat, ranges[name], options)
            exact, inexact, count = sums.get(name, (np.float64(0), np.float64(0), 0))
            sums[name] = (exact + flat.sum(0, np.float64), inexact + rounded.sum(0, np.float64), count + len(flat))
    for node in nodes:
        exact, inexact, count = sums[node.input[0]]
        weight = weights[node.input[1]]
        if node.op_type == "Gemm":
            weight = _by_input_channel(node, weight).T * _attribute(node, "alpha", 1.0)
        groups = _attribute(node, "group", 1)
        kept = weight.reshape(len(weight), weight.shape[1], -1).sum(-1)
        lost = _rounded_weight(weight, options).reshape(len(weight), weight.shape[1], -1).sum(-1)
        of_group = np.repeat(np.arange(groups), len(weight) // groups)
        error = (kept * (exact / count).reshape(groups, -1)[of_group]).sum(1)
        error -= (lost * (inexact / count).reshape(groups, -1)[of_group]).sum(1)
        if len(node.input) > 2:
            bias = weights[node.input[2]]
        else:
            bias = np.zeros(len(weight), np.float32)
            node.input.append("")
        beta = _attribute(node, "beta", 1.0) if node.op_type == "Gemm" else 1.0
        if beta:
            _set_weight(graph, weights, node, 2, bias + error.astype(np.float32) / np.float32(beta), "corrected")
    _drop_unused(graph)


def _activations(
    graph: onnx.ModelProto, names: list[str], rows: Rows, batch: int, doing: str, progress: Progress | None
) -> Iterator[dict[str, NDArray[np.float32]]]:
    """The values of these tensors, batch by batch."""
    names = sorted(set(names))
    inputs = {value.name for value in graph.graph.input}
    seen = onnx.ModelProto()
    seen.CopyFrom(graph)
    del seen.graph.output[:]
    seen.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names if name not in inputs
    )
    if not seen.graph.output:
        seen.graph.output.extend(graph.graph.output)
    runner = session(seen.SerializeToString())
    fetched = [name for name in names if name not in inputs]
    total = -(-rows.count // batch)
    for done, feed in enumerate(rows.batches(batch)):
        _tell(progress, doing, done, total)
        values = runner.run(fetched or None, feed)
        found = dict(zip(fetched, values, strict=False))
        yield {name: feed[name] if name in inputs else found[name] for name in names}
    _tell(progress, doing, total, total)


def _by_input_channel(node: onnx.NodeProto, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """The weight of a Gemm or MatMul as [inputs, outputs]."""
    return weight.T if _attribute(node, "transB", 0) else weight


def _channels_last(value: NDArray[np.float32]) -> NDArray[np.float32]:
    """[b, c, ...] or [b, c] as [n, c]."""
    return np.moveaxis(value, 1, -1).reshape(-1, value.shape[1])


def _rounded(values: NDArray[np.float32], bounds: tuple[float, float], options: QdqOptions) -> NDArray[np.float32]:
    low, high = min(bounds[0], 0.0), max(bounds[1], 0.0)
    if options.activation == "int8":
        scale, zero, first, last = max(-low, high) / 127, 0.0, -128, 127
    else:
        scale = (high - low) / 255
        zero, first, last = round(-low / scale) if scale else 0.0, 0, 255
    if scale < np.finfo(np.float32).tiny:
        return values
    levels = np.clip(np.rint(values / np.float32(scale)) + np.float32(zero), first, last)
    return np.asarray((levels - np.float32(zero)) * np.float32(scale), np.float32)


def _rounded_weight(weight: NDArray[np.float32], options: QdqOptions) -> NDArray[np.float32]:
    """Weights [outputs, ...] as INT8 has them."""
    peak = np.abs(weight.reshape(len(weight), -1)).max(1) if options.per_channel else np.abs(weight).max()
    scale = np.asarray(peak / (64 if options.reduce_range else 127), np.float32)
    scale = np.where(scale > 0, scale, 1).reshape(-1, *[1] * (weight.ndim - 1))
    return np.asarray(np.rint(weight / scale) * scale, np.float32)


def _set_weight(
    graph: onnx.ModelProto,
    weights: dict[str, NDArray[np.float32]],
    node: onnx.NodeProto,
    index: int,
    value: NDArray[np.float32],
    why: str,
) -> None:
    """Give a node a weight of its own: others may share the one that it has."""
    name = f"{node.name}/{index}/{why}"
    weights[name] = np.ascontiguousarray(value, np.float32)
    graph.graph.initializer.append(onnx.numpy_helper.from_array(weights[name], name))
    node.input[index] = name


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((onnx.helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name), default)


def _consumers(graph: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.graph.node:
        for name in node.input:
            found.setdefault(name, []).append(node)
    return found


def _replace(names: Any, old: str, new: str) -> None:
    for index, name in enumerate(names):
        if name == old:
            names[index] = new


def _drop_unused(graph: onnx.ModelProto) -> None:
    used = {name for node in graph.graph.node for name in node.input} | {value.name for value in graph.graph.output}
    used |= {name for node in graph.graph.node for inner in _subgraphs(node) for name in _read_inside(inner)}
    for tensor in [tensor for tensor in graph.graph.initializer if tensor.name not in used]:
        graph.graph.initializer.remove(tensor)


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [inner for entry in node.attribute for inner in (entry.g, *entry.graphs) if inner.node]


def _read_inside(graph: onnx.GraphProto) -> set[str]:
    found = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in graph.node:
        for inner in _subgraphs(node):
            found |= _read_inside(inner)
    return found


def session(model: str | bytes) -> onnxruntime.InferenceSession:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    return onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])


def _try(model: Path, rows: Rows) -> None:
    """Run one row, so that nothing is published that ONNX Runtime refuses."""
    session(str(model)).run(None, next(rows.batches(1)))


@contextlib.contextmanager
def prepared(model: Path, progress: Progress | None = None) -> Iterator[Path]:
    """A prepared form of the model: itself, when it is one."""
    with translated(model), tempfile.TemporaryDirectory() as folder:
        if _is_prepared(_load(model)):
            yield model
        else:
            _prepare(model, Path(folder) / "prepared.onnx", progress)
            yield Path(folder) / "prepared.onnx"


@contextlib.contextmanager
def whole(output: Path) -> Iterator[Path]:
    """A file aside that becomes `output` at the end, in one step; a failure or Ctrl-C leaves nothing."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=".quantize-") as folder:
        aside = Path(folder) / output.name
        yield aside
        aside.replace(output)


@contextlib.contextmanager
def translated(model: Path) -> Iterator[None]:
    """What ONNX and ONNX Runtime raise, in words."""
    try:
        yield
    except PilotError:
        raise
    except MemoryError as error:
        raise _out_of_memory(model) from error
    except OSError as error:
        raise HostError(
            f"Quantising {model} failed on this machine: {error}. Nothing was changed. Make room, or give another folder."
        ) from error
    except Exception as error:
        if "bad_alloc" in str(error) or "Failed to allocate memory" in str(error):
            raise _out_of_memory(model) from error
        raise ModelError(
            f"{model} cannot be quantised: {_first_line(error)}. Nothing was changed. Exclude the node that is named, if one is; "
            "otherwise keep FP32."
        ) from error


def _out_of_memory(model: Path) -> HostError:
    return HostError(
        f"Memory ran out while {model} was quantised. Nothing was changed. Use a smaller batch (all activations of a batch are "
        'held), method "minmax", or a machine with more memory.'
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """ONNX Runtime's quantiser prints, and logs advice that does not hold here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)


def _tell(progress: Progress | None, doing: str, done: int, total: int) -> None:
    if progress is not None:
        progress(doing, done, total)


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
