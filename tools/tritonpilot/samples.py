"""Real rows of a service's inputs: an .npz with one array per input, all with the same number of rows.

    rows = read(Path("models/ctr/build/samples.npz"))     # {"dense": float32[n, 28], "categorical": int64[n, 8]}

They become warmup data, perf_analyzer's input and the first inference of a started server.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpilot import assets
from tritonpilot.errors import ModelError

#: numpy's names of Triton's data types; BYTES are numpy strings and BF16 the bit pattern as uint16.
NUMPY_TYPES: Mapping[str, str] = {
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
    "BF16": "uint16",
    "FP32": "float32",
    "FP64": "float64",
}


def read(path: Path, names: Collection[str] | None = None) -> dict[str, NDArray[Any]]:
    """The arrays of a samples file: input name -> [rows, ...]; of `names` alone, where they are given, as far as they are there.

    Raises ModelError when the file is missing, damaged, without rows, or its arrays differ in their number of rows.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if names is None or name in names}
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("it holds a file that is no array")
    except FileNotFoundError as error:
        raise ModelError(
            f"The samples {path} do not exist. Nothing was changed. Make them (for the examples: "
            "`tritonpilot build --prepare`) or correct model.samples."
        ) from error
    except Exception as error:  # what numpy, zipfile and its decompressors meet in a damaged file is of any type
        raise ModelError(
            f"{path} is not an .npz archive of plain arrays: {assets.reason(error)}. Nothing was changed. Make it again "
            "(strings: not as object arrays, but as `array.astype(str)` or `array.astype(bytes)`)."
        ) from error
    rows = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if (not rows and names is None) or 0 in rows.values():
        raise ModelError(f"{path} holds no rows. Nothing was changed. Make it again.")
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ModelError(f"The arrays of {path} differ in their rows ({counts}). Nothing was changed. Make it again.")
    return arrays


def fits(array: NDArray[Any], data_type: str, shape: Sequence[int]) -> bool:
    """Whether rows `array[rows, ...]` have Triton's `data_type` and the row shape `shape` (-1 is any size)."""
    is_text = array.dtype.kind in "SU"
    right_type = is_text if data_type == "BYTES" else array.dtype == np.dtype(NUMPY_TYPES[data_type])
    row = array.shape[1:]
    return (
        right_type and len(row) == len(shape) and all(want in (-1, got) for want, got in zip(shape, row, strict=True))
    )


def first_request(arrays: Mapping[str, NDArray[Any]], *, is_batched: bool) -> dict[str, NDArray[Any]]:
    """The first row as the inputs of one request: with a leading dimension of 1 where the model has a batch dimension.

    Strings become object arrays of UTF-8 bytes, as tritonclient takes them; a row without dimensions becomes [1], since
    Triton has no scalars.
    """
    return {name: _for_client(_row(array)[np.newaxis] if is_batched else _row(array)) for name, array in arrays.items()}


def _row(array: NDArray[Any]) -> NDArray[Any]:
    return array[0] if array.ndim > 1 else array[:1]


def _for_client(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    return array.astype(np.object_) if array.dtype.kind == "S" else array


def raw(array: NDArray[Any]) -> bytes:
    """Triton's binary tensor data: little-endian, row-major; each string after its length in 4 bytes."""
    if array.dtype.kind not in "SU":
        return np.ascontiguousarray(array).tobytes()
    elements = (value.encode() if isinstance(value, str) else value for value in array.ravel().tolist())
    return b"".join(len(value).to_bytes(4, "little") + value for value in elements)
