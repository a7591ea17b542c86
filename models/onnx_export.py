"""How does a torch module become the ONNX file that Triton serves, and does it still give the same answers?

write_onnx(module, {"dense": dense, "categorical": categorical}, "prob", path)
answers = run(session(path), inputs)                            # one output, by ONNX Runtime
difference = largest_difference(module, path, inputs)           # at batch 1, 7 and 64
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import torch
from torch import nn

from tritonpilot.errors import ModelError

OPSET = 18  # read by TensorRT 10.5 and ONNX Runtime 1.19, those of Triton's 24.10 container
NEWEST_IR = 10  # that ONNX Runtime 1.19 reads
CHECKED_BATCHES = (1, 7, 64)

Arrays = Mapping[str, npt.NDArray[np.generic]]


def write_onnx(module: nn.Module, example: Arrays, output: str, path: Path, free: Sequence[str] = ("batch",)) -> None:
    """Export `module` with weights inside and free first dimensions, named by `free`.

    `example` holds one array per input in the order of the module's arguments; its free dimensions are two or more.
    The bytes depend on the weights and on the versions of torch, onnx and onnxscript only.
    """
    dims = {place: torch.export.Dim(name) for place, name in enumerate(free)}
    # The exporter logs about operators of packages that are not installed, and warns of its own deprecated calls
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            tuple(torch.from_numpy(np.array(array)) for array in example.values()),
            input_names=list(example),
            output_names=[output],
            dynamic_shapes=tuple(dims for _ in example),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _forget_origin(model)
    if model.ir_version > NEWEST_IR:
        raise ModelError(
            f"torch wrote ONNX IR version {model.ir_version}; Triton's 24.10 container reads up to {NEWEST_IR}. "
            "Nothing has been published. Install the pinned versions with `make setup`."
        )
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def session(path: Path, threads: int = 1) -> ort.InferenceSession:
    """An ONNX Runtime session on the CPU."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run(model: ort.InferenceSession, inputs: Arrays, batch: int = 512) -> npt.NDArray[np.float32]:
    """The model's only output for n rows, `batch` rows at a time."""
    rows = len(next(iter(inputs.values())))
    parts = [
        model.run(None, {name: array[start : start + batch] for name, array in inputs.items()})[0]
        for start in range(0, rows, batch)
    ]
    return np.concatenate(parts)


def largest_difference(module: nn.Module, path: Path, inputs: Arrays, tolerance: float) -> float:
    """Largest absolute difference between torch and ONNX Runtime over the batch sizes of CHECKED_BATCHES, filled
    from `inputs` (repeated when there are fewer rows). Raises ModelError when it exceeds `tolerance`."""
    model = session(path)
    worst = 0.0
    for batch in CHECKED_BATCHES:
        rows = {name: np.resize(array, (batch, *array.shape[1:])) for name, array in inputs.items()}
        with torch.inference_mode():
            expected = module.eval()(*(torch.from_numpy(array) for array in rows.values())).numpy()
        answer = run(model, rows, batch)
        if answer.shape != expected.shape:
            raise ModelError(
                f"At batch {batch} the exported model answers with shape {answer.shape}, torch with "
                f"{expected.shape}. Nothing has been published. This is a fault of the export: report it."
            )
        worst = max(worst, float(np.abs(answer - expected).max()))
    if not worst <= tolerance:
        raise ModelError(
            f"The exported model differs from torch by {worst:.2e} (allowed: {tolerance:.0e}) at batch sizes "
            f"{', '.join(map(str, CHECKED_BATCHES))}. Nothing has been published; what was there is still there. "
            "Install the pinned versions with `make setup` and start this again."
        )
    return worst


def _forget_origin(model: onnx.ModelProto) -> None:
    """Drop what names source files of this machine and differs between runs: stack traces and scopes."""
    graph = model.graph
    for part in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    for function in model.functions:
        for part in (function, *function.node, *function.value_info):
            part.ClearField("metadata_props")
            part.ClearField("doc_string")
