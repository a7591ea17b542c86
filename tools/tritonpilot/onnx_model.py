"""What an ONNX file says of itself: its inputs and outputs in Triton's terms, and the files that it consists of.

signature = read_signature(Path("model.onnx"))
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from tritonpilot import assets
from tritonpilot.errors import ModelError
from tritonpilot.spec import DataType

#: ONNX element types that Triton knows, by TensorProto.DataType name.
DATA_TYPES: dict[str, DataType] = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "UINT16": "UINT16",
    "UINT32": "UINT32",
    "UINT64": "UINT64",
    "INT8": "INT8",
    "INT16": "INT16",
    "INT32": "INT32",
    "INT64": "INT64",
    "FLOAT16": "FP16",
    "BFLOAT16": "BF16",
    "FLOAT": "FP32",
    "DOUBLE": "FP64",
    "STRING": "BYTES",
}


@dataclass(frozen=True)
class TensorSignature:
    """Name, Triton data type and full shape (batch dimension included; -1 is variable) of a model's tensor."""

    name: str
    data_type: DataType
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model in the model's order."""

    inputs: tuple[TensorSignature, ...]
    outputs: tuple[TensorSignature, ...]


def read_signature(path: Path) -> Signature:
    """Read the inputs and outputs of an ONNX file, without loading its weights into a runtime.

    Raises ModelError when the file is no valid ONNX model or has inputs or outputs that Triton cannot carry.
    """
    model = _load(path)
    try:
        weights = {initializer.name for initializer in model.graph.initializer}
        return Signature(
            inputs=tuple(_tensor(path, value) for value in model.graph.input if value.name not in weights),
            outputs=tuple(_tensor(path, value) for value in model.graph.output),
        )
    except UnicodeDecodeError as error:  # a damaged name
        raise _invalid(path, assets.reason(error)) from error


def external_files(path: Path) -> list[str]:
    """Names, relative to the model file, of the external weight files that it refers to, sorted.

    Raises ModelError when one is missing or lies outside the model file's folder.
    """
    names: set[str] = set()
    for tensor in _tensors(_load(path).graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            names.update(entry.value for entry in tensor.external_data if entry.key == "location")
    for name in names:
        outside = Path(name).is_absolute() or ".." in Path(name).parts
        if outside or not (path.parent / name).is_file():
            why = "lies outside the model's folder" if outside else "does not exist"
            raise ModelError(
                f"{path} keeps weights in {name}, which {why}. Nothing was changed. "
                "Export the model again with its external data beside it."
            )
    return sorted(names)


def _load(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(str(path), load_external_data=False)
        onnx.checker.check_model(str(path))
    except (DecodeError, onnx.checker.ValidationError, ValueError, OSError) as error:
        lines = "" if isinstance(error, UnicodeDecodeError) else str(error).strip()
        reason = lines.splitlines()[0].rstrip(".") if lines and lines.splitlines()[0].isprintable() else ""
        raise _invalid(path, reason or assets.reason(error)) from error
    return model


def _invalid(path: Path, reason: str) -> ModelError:
    return ModelError(
        f"{path} is not a valid ONNX model: {reason}. Nothing was changed. Export it again, or check that the file was "
        "copied whole."
    )


def _tensor(path: Path, value: onnx.ValueInfoProto) -> TensorSignature:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise ModelError(
            f"{path}: {value.name} is a {kind or 'value without type'}, and Triton carries only tensors. Nothing was "
            "changed. Export the model so that its inputs and outputs are tensors (scikit-learn: zipmap=False)."
        )
    element = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    if element not in DATA_TYPES:
        raise ModelError(
            f"{path}: {value.name} has the ONNX type {element}, which Triton does not know. Nothing was changed. "
            f"Cast it inside the model to one of {', '.join(DATA_TYPES)}."
        )
    if not value.type.tensor_type.HasField("shape"):
        raise ModelError(
            f"{path}: {value.name} has no shape, not even a rank. Nothing was changed. Export the model with shapes."
        )
    dims = value.type.tensor_type.shape.dim
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)
    return TensorSignature(value.name, DATA_TYPES[element], shape)


def _tensors(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    found = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            found += [attribute.t, *attribute.tensors]
            for inner in [attribute.g, *attribute.graphs]:
                found += _tensors(inner) if inner.ByteSize() else []
    return found
