"""How does an FP32 ONNX model become an FP16 one, and why not a BF16 one?

    to_fp16(model, output)                                      # inputs and outputs stay FP32
    to_fp16(model, output, exclude=frozenset({"node_norm"}))    # mixed precision: these nodes stay FP32

FP16 halves the file and is fast on GPUs. ONNX Runtime's CPU provider has few FP16 kernels and casts around the others, so that it
is rarely faster there: measure it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization.onnx_model import ONNXModel
from onnxruntime.transformers.float16 import convert_float_to_float16

from tritonpilot.errors import ModelError
from tritonpilot.quantize.qdq import prepared, quiet, session, translated, whole

#: The largest finite number in FP16.
LARGEST = float(np.finfo(np.float16).max)


def to_fp16(model: Path, output: Path, exclude: frozenset[str] = frozenset()) -> None:
    """Write `output` with weights and arithmetic in FP16; the nodes named in `exclude` (see `quantizable_nodes`) stay FP32.

    Raises ModelError when a node to exclude does not exist, the model is already quantised, or a weight that is to become FP16 is
    larger than 65504: exclude its node. `output` is then as it was, as after Ctrl-C.
    """
    with whole(output) as aside, prepared(model) as source, translated(model):
        graph = onnx.load(str(source))
        unknown = sorted(exclude - {node.name for node in graph.graph.node})
        if unknown:
            raise ModelError(
                f"{model} has no node {unknown[0]} to exclude. Nothing was changed. Name nodes as `quantizable_nodes` does."
            )
        _check_weights(model, graph, exclude)
        with quiet():
            graph = convert_float_to_float16(graph, keep_io_types=True, node_block_list=sorted(exclude))
            ONNXModel(graph).topological_sort()  # the conversion appends its casts
        del graph.metadata_props[:]
        graph.producer_name = "tritonpilot"
        onnx.save(graph, str(aside))
        session(str(aside))  # refuses what ONNX Runtime cannot load


def to_bf16(model: Path, output: Path, exclude: frozenset[str] = frozenset()) -> None:
    """Raises ModelError that says why: no runtime here computes BF16 from an ONNX file."""
    raise ModelError(
        f"{model} was not written as BF16 to {output.name}{f', {len(exclude)} nodes excluded' if exclude else ''}: ONNX Runtime "
        "has no BF16 kernels for Conv, Gemm and MatMul on x86-64. Nothing was changed. Use to_fp16, or give TensorRT the FP32 "
        "model, which chooses BF16 itself (trtexec --bf16)."
    )


def _check_weights(model: Path, graph: onnx.ModelProto, exclude: frozenset[str]) -> None:
    readers = {name: node.name for node in graph.graph.node if node.name not in exclude for name in node.input}
    for tensor in graph.graph.initializer:
        if tensor.data_type != onnx.TensorProto.FLOAT or tensor.name not in readers:
            continue
        values = onnx.numpy_helper.to_array(tensor)
        peak = float(np.abs(values[np.isfinite(values)]).max(initial=0))
        if peak > LARGEST:
            raise ModelError(
                f"{model}: the weight {tensor.name} of node {readers[tensor.name]} holds {peak:g}, and FP16 ends at {LARGEST:g}. "
                "Nothing was changed. Exclude that node."
            )
