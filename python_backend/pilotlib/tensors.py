"""Which element types travel between Triton, numpy and ONNX Runtime? One row per type.

    DTYPES_BY_CONFIG["TYPE_FP32"].numpy  -> dtype('float32')
    DTYPES_BY_ONNX["tensor(float)"].config  -> 'TYPE_FP32'

numpy has no bfloat16: a BF16 tensor is held as its bit pattern in uint16 (see bf16.py). Strings are numpy object arrays:
`bytes` on Triton's side, `str` on ONNX Runtime's, whose Python interface only knows text; so strings must be UTF-8 here,
while Triton's C++ backend passes any bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Dtype:
    """One element type under the names that Triton's config, numpy and ONNX give it."""

    config: str  # in config.pbtxt
    numpy: np.dtype[np.generic]  # what holds it here
    onnx: str  # ONNX Runtime's type string
    onnx_code: int  # onnx.TensorProto.DataType


DTYPES = (
    Dtype("TYPE_BOOL", np.dtype(np.bool_), "tensor(bool)", 9),
    Dtype("TYPE_UINT8", np.dtype(np.uint8), "tensor(uint8)", 2),
    Dtype("TYPE_UINT16", np.dtype(np.uint16), "tensor(uint16)", 4),
    Dtype("TYPE_UINT32", np.dtype(np.uint32), "tensor(uint32)", 12),
    Dtype("TYPE_UINT64", np.dtype(np.uint64), "tensor(uint64)", 13),
    Dtype("TYPE_INT8", np.dtype(np.int8), "tensor(int8)", 3),
    Dtype("TYPE_INT16", np.dtype(np.int16), "tensor(int16)", 5),
    Dtype("TYPE_INT32", np.dtype(np.int32), "tensor(int32)", 6),
    Dtype("TYPE_INT64", np.dtype(np.int64), "tensor(int64)", 7),
    Dtype("TYPE_FP16", np.dtype(np.float16), "tensor(float16)", 10),
    Dtype("TYPE_BF16", np.dtype(np.uint16), "tensor(bfloat16)", 16),
    Dtype("TYPE_FP32", np.dtype(np.float32), "tensor(float)", 1),
    Dtype("TYPE_FP64", np.dtype(np.float64), "tensor(double)", 11),
    Dtype("TYPE_STRING", np.dtype(np.object_), "tensor(string)", 8),
)
DTYPES_BY_CONFIG = {dtype.config: dtype for dtype in DTYPES}
DTYPES_BY_ONNX = {dtype.onnx: dtype for dtype in DTYPES}
BF16 = DTYPES_BY_CONFIG["TYPE_BF16"]
STRING = DTYPES_BY_CONFIG["TYPE_STRING"]


def text_from_bytes(array: Array) -> Array:
    """The same object array with every `bytes` decoded as UTF-8, for ONNX Runtime.

    Raises UnicodeDecodeError when an element is not UTF-8.
    """
    text = np.empty(array.size, dtype=np.object_)
    text[:] = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
    return text.reshape(array.shape)
