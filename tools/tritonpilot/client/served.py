"""What does a served model take, and do a caller's inputs fit it? From its config, read once.

served = from_config(config)                      # Triton's ModelConfig in JSON form
call = check(served, {"dense": ..., "categorical": ...})
call.arrays, call.rows, call.is_single
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tritonpilot.client.errors import InputError

Array = npt.NDArray[Any]

#: tritonclient's arrays for Triton's data types; BF16 travels as float32 on this side.
DTYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(numpy_name)
    for name, numpy_name in {
        "BOOL": "bool",
        "UINT8": "uint8",
        "UINT16": "uint16",
        "UINT32": "uint32",
        "UINT64": "uint64",
        "INT8": "int8",
        "INT16": "int16",
        "INT32": "int32",
        "INT64": "int64",
        "FP16": "float16",
        "BF16": "float32",
        "FP32": "float32",
        "FP64": "float64",
        "BYTES": "object",
    }.items()
}
CLASSES = "pilot_classes"
ANY_ROWS = 1 << 31


@dataclass(frozen=True)
class Tensor:
    """An input or output; `dims` without the batch dimension, -1 is any size."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    is_optional: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        return DTYPES[self.data_type]

    def describe(self, is_batched: bool) -> str:
        """For messages: the shapes that are accepted."""
        row = ", ".join("any" if dim < 0 else str(dim) for dim in self.dims)
        return f"[{row}] (one row) or [rows, {row}]" if is_batched else f"[{row}]"


@dataclass(frozen=True, eq=False)
class Served:
    """A model as its server describes it."""

    name: str
    version: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    max_batch_size: int
    classes: Mapping[str, int] | None
    """Name -> priority level; None: the server does not tell."""
    may_join: bool
    """Whether rows of several calls may share a request without changing each other's answers."""
    is_limit_known: bool = True
    """Whether max_batch_size is the model's; otherwise it only says that every tensor seems to have rows."""


@dataclass(frozen=True)
class Checked:
    """Inputs as they are sent: arrays with their batch dimension where the model has one."""

    arrays: Mapping[str, Array]
    rows: int
    is_single: bool  # one row without a batch dimension was given, and is given back


def from_config(config: Mapping[str, Any], version: str = "") -> Served:
    """Read Triton's ModelConfig in JSON form (over HTTP numbers are numbers, over gRPC strings).

    Raises InputError for a model that takes no calls like ours; what is no ModelConfig raises what Python raises there.
    """
    name = str(config["name"])
    inputs = {each.name: each for each in map(_tensor, config.get("input", ()))}
    outputs = {each.name: each for each in map(_tensor, config.get("output", ()))}
    if config.get("model_transaction_policy", {}).get("decoupled"):
        raise InputError(
            f"The model {name} is decoupled: it sends any number of answers to a request, and a prediction has one. Nothing "
            "was sent. Use tritonclient's streams for it.",
            "model",
        )
    largest = int(config.get("max_batch_size", 0))
    if largest < 0:
        raise ValueError(f"max_batch_size is {largest}")
    stated = config.get("parameters", {}).get(CLASSES, {}).get("string_value", "")
    classes = {label: int(level) for label, _, level in (part.partition(":") for part in stated.split(",") if part)}
    may_join = largest > 1 and not _is_padded(inputs, outputs) and "sequence_batching" not in config
    return Served(name, version, inputs, outputs, largest, classes, may_join)


def from_metadata(metadata: Mapping[str, Any], version: str = "") -> Served:
    """Read Triton's model metadata, of a server that shows no config: neither classes nor max_batch_size, nor what is optional.

    A first dimension of any size in every tensor is taken for the rows.
    """
    name = str(metadata["name"])
    entries = {kind: metadata.get(kind, ()) for kind in ("inputs", "outputs")}
    shapes = [[int(dim) for dim in entry.get("shape", ())] for kind in entries for entry in entries[kind]]
    is_batched = bool(shapes) and all(shape[:1] == [-1] for shape in shapes)
    inputs, outputs = (
        {
            each.name: each
            for each in (
                _made(entry, entry["datatype"], entry.get("shape", ())[1 if is_batched else 0 :], is_optional=True)
                for entry in entries[kind]
            )
        }
        for kind in entries
    )
    may_join = is_batched and not _is_padded(inputs, outputs)
    return Served(name, version, inputs, outputs, ANY_ROWS if is_batched else 0, None, may_join, is_limit_known=False)


def level(served: Served, caller_class: str | None, priority: int | None) -> int:
    """The priority level of a call, 0 for the model's default. Raises InputError for a class or level it lacks."""
    if priority is not None:
        # Triton silently takes a level that it does not have for the default one.
        known = served.classes or {}
        if priority < 0 or (known and priority > max(known.values())):
            raise InputError(
                f"The model {served.name} has no priority {priority}. Nothing was sent. Its classes are "
                f"{', '.join(f'{name} ({number})' for name, number in known.items()) or 'not stated'}.",
                "priority",
            )
        return priority
    if caller_class is None or served.classes is None:
        return 0
    if caller_class not in served.classes:
        raise InputError(
            f"The model {served.name} has no class of callers {caller_class!r}. Nothing was sent. Its classes are "
            f"{', '.join(served.classes) or 'not stated'}.",
            "caller_class",
        )
    return served.classes[caller_class]


def check(served: Served, inputs: Mapping[str, Any]) -> Checked:
    """The inputs as the model takes them; raises InputError that names the first input which does not fit.

    An array of the model's rank without the batch dimension is one row. Lists are converted where no value changes; arrays
    must have the model's type already, since a silent conversion of a big one is a cost and a wrong one a bug. Strings are
    `str` (sent as UTF-8), `bytes`, or arrays or lists of them.
    """
    for name in inputs:
        if name not in served.inputs:
            raise InputError(
                f'"{name}": the model {served.name} has no such input. Nothing was sent. Its inputs are '
                f"{', '.join(served.inputs)}.",
                name,
            )
    arrays: dict[str, Array] = {}
    rows, is_single, first = 0, False, ""
    for name, tensor in served.inputs.items():
        if name not in inputs:
            if tensor.is_optional:
                continue
            raise InputError(
                f'"{name}": this input of the model {served.name} is missing. Nothing was sent. Add it.', name
            )
        array = _array(served, tensor, inputs[name])
        array, alone = _with_rows(served, tensor, array)
        if served.max_batch_size:
            if first and (len(array) != rows or alone != is_single):
                raise InputError(
                    f'"{name}": {len(array)} rows, but "{first}" has {rows}'
                    + (" and only one of the two has a batch dimension" if alone != is_single else "")
                    + ". Nothing was sent. Give every input the same rows.",
                    name,
                )
            first, rows, is_single = first or name, len(array), alone
        arrays[name] = array
    if served.max_batch_size and not 0 < rows <= served.max_batch_size:
        raise InputError(
            f'"{first}": {rows} rows, but the model {served.name} takes 1 to {served.max_batch_size} in a request. Nothing '
            "was sent. Split it into several calls."
            if rows
            else f'"{first}": no rows. Nothing was sent. Give one row at least.',
            first,
        )
    return Checked(arrays, rows or 1, is_single)


def size_of(arrays: Mapping[str, Array]) -> int:
    """Bytes of the tensors on the wire."""
    return sum(_wire_bytes(array) for array in arrays.values())


def output_bytes(tensor: Tensor, rows: int, is_batched: bool) -> int:
    """Bytes of an output, 0 when only the answer tells."""
    if tensor.data_type == "BYTES" or -1 in tensor.dims:
        return 0
    item = 2 if tensor.data_type == "BF16" else tensor.dtype.itemsize
    count = rows if is_batched else 1
    for dim in tensor.dims:
        count *= dim
    return count * item


def _is_padded(inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> bool:
    """The length of a text's answer may be that of the longest text beside it: such rows must not share a request."""
    return any(each.data_type == "BYTES" for each in inputs.values()) and any(
        -1 in each.dims for each in outputs.values()
    )


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    data_type = str(entry["data_type"]).removeprefix("TYPE_")
    return _made(
        entry,
        "BYTES" if data_type == "STRING" else data_type,
        entry.get("dims", ()),
        is_optional=bool(entry.get("optional", False)),
    )


def _made(entry: Mapping[str, Any], data_type: str, shape: Sequence[Any], *, is_optional: bool) -> Tensor:
    name, dims = str(entry["name"]), tuple(int(dim) for dim in shape)
    if data_type not in DTYPES or any(dim < -1 for dim in dims):
        raise ValueError(f"the tensor {name} is {data_type} {list(dims)}")
    return Tensor(name, data_type, dims, is_optional)


def _array(served: Served, tensor: Tensor, value: Any) -> Array:
    if tensor.data_type == "BYTES":
        return _strings(tensor, value)
    dtype = tensor.dtype
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype != dtype:
            raise InputError(
                f'"{tensor.name}": {value.dtype}, but the model {served.name} takes {tensor.data_type} ({dtype}). Nothing was '
                f"sent. Convert it with .astype(np.{dtype}).",
                tensor.name,
            )
        return np.asarray(value)
    try:
        given = np.asarray(value)
        array = (
            given.astype(dtype, casting="same_kind" if given.dtype.kind == dtype.kind else "safe")
            if (given.dtype.kind != "i" or dtype.kind not in "uf")
            else given.astype(dtype)
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f'"{tensor.name}": not {tensor.data_type}: {error}. Nothing was sent. Give numbers of that type.',
            tensor.name,
        ) from None
    if dtype.kind in "iu" and not np.array_equal(array, given):
        raise InputError(
            f'"{tensor.name}": a value is outside {tensor.data_type}. Nothing was sent. Give numbers of that type.',
            tensor.name,
        )
    return array


def _strings(tensor: Tensor, value: Any) -> Array:
    if isinstance(value, np.ndarray) and value.dtype.kind == "S":
        return value.astype(np.object_)
    array = value if isinstance(value, np.ndarray) else _objects(value)
    if array.dtype.kind == "U":
        array = array.astype(np.object_)
    flat = array.ravel()
    if array.dtype.kind != "O" or not all(isinstance(each, (str, bytes)) for each in flat):
        raise InputError(
            f'"{tensor.name}": holds something else than strings. Nothing was sent. Give str, bytes, or lists or arrays of '
            "them.",
            tensor.name,
        )
    try:
        encoded = [each.encode() if isinstance(each, str) else each for each in flat]
    except UnicodeEncodeError as error:
        raise InputError(
            f'"{tensor.name}": a str cannot be written as UTF-8 ({error.reason}). Nothing was sent. Give bytes instead.',
            tensor.name,
        ) from None
    found = np.empty(len(encoded), np.object_)
    found[:] = encoded
    return found.reshape(array.shape)


def _objects(value: Any) -> Array:
    """Nested lists of strings as an object array; numpy would cut the zero bytes at the end of `bytes`."""
    if isinstance(value, (str, bytes)):
        array: Array = np.empty((), np.object_)
        array[()] = value
        return array
    return np.array(value, dtype=np.object_)


def _with_rows(served: Served, tensor: Tensor, array: Array) -> tuple[Array, bool]:
    """(the array with its batch dimension where the model has one, whether that was added here)."""
    shape = array.shape
    if not served.max_batch_size:
        if _fits(shape, tensor.dims):
            return array, False
    elif _fits(shape[1:], tensor.dims) and len(shape) == len(tensor.dims) + 1:
        return array, False
    elif _fits(shape, tensor.dims):
        return array[np.newaxis], True
    elif not shape and tensor.dims == (1,):
        return array.reshape(1, 1), True
    raise InputError(
        f'"{tensor.name}": shape {list(shape)}, but the model {served.name} takes '
        f"{tensor.describe(served.max_batch_size > 0)}. Nothing was sent. Reshape it.",
        tensor.name,
    )


def _fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    return len(shape) == len(dims) and all(want in (-1, got) for want, got in zip(dims, shape, strict=True))


def _wire_bytes(array: Array) -> int:
    if array.dtype.kind == "O":
        return sum(4 + len(each) for each in array.ravel())
    return array.nbytes
