"""Which of ONNX's own conformance cases can a Triton serve, and what do they expect? The cases that the onnx package carries.

for case in cases():                      # node cases and the "simple" models, in the order of their names
    obstacle(case)                        # "" or why no Triton could carry its tensors
    fault(case, answer)                   # "" or how an answer differs from what the case expects
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf import text_format
from onnx import TensorProto, numpy_helper
from onnx.backend.test.loader import load_model_tests
from tritonclient.grpc import model_config_pb2

Arrays = dict[str, npt.NDArray[Any]]
KINDS = ("node", "simple")
SETS = "test_data_set_*"

TRITON_TYPES: Mapping[int, str] = {
    TensorProto.BOOL: "TYPE_BOOL",
    TensorProto.UINT8: "TYPE_UINT8",
    TensorProto.UINT16: "TYPE_UINT16",
    TensorProto.UINT32: "TYPE_UINT32",
    TensorProto.UINT64: "TYPE_UINT64",
    TensorProto.INT8: "TYPE_INT8",
    TensorProto.INT16: "TYPE_INT16",
    TensorProto.INT32: "TYPE_INT32",
    TensorProto.INT64: "TYPE_INT64",
    TensorProto.FLOAT16: "TYPE_FP16",
    TensorProto.BFLOAT16: "TYPE_BF16",
    TensorProto.FLOAT: "TYPE_FP32",
    TensorProto.DOUBLE: "TYPE_FP64",
    TensorProto.STRING: "TYPE_STRING",
}


@dataclass(frozen=True)
class Tensor:
    """One input or output as the model's file declares it; -1 for a dynamic dim, () for a scalar."""

    name: str
    element: int  # TensorProto.DataType
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One model with its data sets, in a folder of the onnx package."""

    name: str
    folder: Path
    rtol: float
    atol: float

    @property
    def model_file(self) -> Path:
        return self.folder / "model.onnx"

    def data_sets(self) -> list[tuple[Arrays, Arrays]]:
        """(inputs, expected outputs) each; strings as objects of `str`, BF16 as uint16 bit patterns."""
        graph = onnx.load(self.model_file, load_external_data=False).graph
        return [
            (_arrays(folder, "input", graph.input), _arrays(folder, "output", graph.output))
            for folder in sorted(self.folder.glob(SETS))
        ]

    def signature(self) -> tuple[list[Tensor], list[Tensor]]:
        """Inputs and outputs. Raises KeyError when one is no tensor."""
        graph = onnx.load(self.model_file, load_external_data=False).graph
        return [_tensor(each) for each in graph.input], [_tensor(each) for each in graph.output]

    def defaults(self) -> frozenset[str]:
        """Inputs that have a value of their own, so that a request may leave them out."""
        graph = onnx.load(self.model_file, load_external_data=False).graph
        return frozenset(each.name for each in graph.initializer) & {each.name for each in graph.input}


def cases(kinds: Sequence[str] = KINDS) -> list[Case]:
    """All cases of these kinds, by name."""
    found = [
        Case(each.name, Path(each.model_dir), each.rtol, each.atol)
        for kind in kinds
        for each in load_model_tests(kind=kind)
        if each.model_dir is not None
    ]
    return sorted(found, key=lambda case: case.name)


def obstacle(case: Case) -> str:
    """Why no Triton can carry this case's tensors: a sequence, an optional, or an element type that it lacks; else ""."""
    graph = onnx.load(case.model_file, load_external_data=False).graph
    for each in (*graph.input, *graph.output):
        kind = each.type.WhichOneof("value")
        if kind != "tensor_type":
            return f"Triton has no {kind.removesuffix('_type')} tensors"
        if each.type.tensor_type.elem_type not in TRITON_TYPES:
            return f"Triton has no element type {TensorProto.DataType.Name(each.type.tensor_type.elem_type)}"
    return ""


def fault(case: Case, expected: Arrays, found: Mapping[str, npt.NDArray[Any]], *, scalars_as_one: bool = False) -> str:
    """How an answer differs from what is expected, within the case's tolerances, or "".

    `scalars_as_one`: a scalar comes as shape [1], because Triton knows no tensor without dimensions.
    """
    for name, wanted in expected.items():
        array = found.get(name)
        if array is None:
            return f'no output "{name}"'
        shape = (1,) if scalars_as_one and not wanted.shape else wanted.shape
        if array.shape != shape:
            return f'output "{name}" has shape {list(array.shape)}, expected {list(shape)}'
        if wanted.dtype == np.object_:
            if _texts(array) != _texts(wanted):
                return f'output "{name}" has other strings'
        elif array.dtype != wanted.dtype:
            return f'output "{name}" is {array.dtype}, expected {wanted.dtype}'
        elif not np.allclose(
            _wide(array, case), _wide(wanted, case).reshape(shape), rtol=case.rtol, atol=case.atol, equal_nan=True
        ):
            return f'output "{name}" differs by more than rtol {case.rtol:g}, atol {case.atol:g}'
    return ""


def config(case: Case, model: str) -> str:
    """The config.pbtxt of a case: max_batch_size 0, one CPU instance; a scalar has dims [1], as Triton demands."""
    message: Any = model_config_pb2.ModelConfig(name=model, backend="onnxruntime", max_batch_size=0)
    message.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    for key, value in (("intra_op_thread_count", "1"), ("inter_op_thread_count", "1")):
        message.parameters[key].string_value = value
    defaults = case.defaults()
    for entries, tensors in zip((message.input, message.output), case.signature(), strict=True):
        for tensor in tensors:
            # Triton's config knows no 0: a dim of that size is a dynamic one.
            entries.add(
                name=tensor.name,
                data_type=model_config_pb2.DataType.Value(TRITON_TYPES[tensor.element]),
                dims=[dim or -1 for dim in tensor.dims] or [1],
            )
            if tensor.name in defaults:
                entries[-1].optional = True
    return str(text_format.MessageToString(message))


def _tensor(info: onnx.ValueInfoProto) -> Tensor:
    kind = info.type.tensor_type
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in kind.shape.dim)
    return Tensor(info.name, kind.elem_type, dims)


def _arrays(folder: Path, kind: str, infos: Sequence[onnx.ValueInfoProto]) -> Arrays:
    arrays = {}
    for place, info in enumerate(infos):
        path = folder / f"{kind}_{place}.pb"
        if path.exists():  # optional inputs have none
            arrays[info.name] = _array(onnx.load_tensor(path))
    return arrays


def _array(tensor: TensorProto) -> npt.NDArray[Any]:
    array = numpy_helper.to_array(tensor)
    if tensor.data_type == TensorProto.BFLOAT16:
        return array.view(np.uint16)
    if tensor.data_type == TensorProto.STRING:
        texts = np.empty(array.shape, np.object_)
        for place, text in np.ndenumerate(array):
            texts[place] = text.decode() if isinstance(text, bytes) else str(text)
        return texts
    return array


def _texts(array: npt.NDArray[Any]) -> list[str]:
    return [each.decode() if isinstance(each, bytes) else str(each) for each in array.ravel().tolist()]


def _wide(array: npt.NDArray[Any], case: Case) -> npt.NDArray[Any]:
    """As numbers that can be subtracted: bit patterns of BF16 as what they mean."""
    if array.dtype == np.uint16 and "BFLOAT16" in case.name.upper():
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array if array.dtype.kind in "iub" else array.astype(np.float64)
