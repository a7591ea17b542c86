"""How does a bfloat16 tensor get between Triton and numpy, which has no such type? As uint16 bit patterns, through DLPack.

    bits = bits_from_dlpack(tensor.to_dlpack())                     # no copy
    pb_utils.Tensor.from_dlpack("y", dlpack_from_bits(bits))

The layout of the structs is that of dlpack.h, fixed since its version 0.2.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from pilotlib.tensors import Array

UNSIGNED, BFLOAT = 1, 4  # DLDataTypeCode
CPU = 1  # DLDeviceType


NAME = b"dltensor"  # of a capsule that nobody has consumed; its address is kept by the capsule


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_libc = ctypes.CDLL(None)
_malloc = _libc.malloc
_malloc.restype, _malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_free = ctypes.cast(_libc.free, ctypes.c_void_p).value


def bits_from_dlpack(capsule: Any) -> Array:
    """The uint16 bit patterns of the bfloat16 CPU tensor in a capsule, which this consumes; read-only, not copied."""
    tensor = _Tensor.from_address(_pointer(capsule, NAME))
    if (tensor.type_code, tensor.type_bits) != (BFLOAT, 16):
        raise TypeError(f"a DLPack tensor of type code {tensor.type_code} with {tensor.type_bits} bits is no bfloat16")
    tensor.type_code = UNSIGNED
    array: Array = np.from_dlpack(_Held(capsule))  # type: ignore[arg-type]
    return array


def dlpack_from_bits(bits: Array) -> Any:
    """A capsule with a bfloat16 CPU tensor: a copy of these uint16 bit patterns. To be consumed at once.

    Struct, shape and data are one block, and its deleter is `free`: Triton calls that without holding Python's lock, where
    the deleter of a capsule that numpy made has crashed the stub.
    """
    plain = np.ascontiguousarray(bits, np.uint16)
    shape = (ctypes.c_int64 * bits.ndim)(*bits.shape)
    head = ctypes.sizeof(_Managed) + ctypes.sizeof(shape)
    block = _malloc(head + plain.nbytes)
    if block is None:
        raise MemoryError(f"no memory for a bfloat16 tensor of {plain.nbytes} bytes")
    managed = _Managed.from_address(block)
    ctypes.memset(block, 0, head)
    managed.tensor = _Tensor(
        data=block + head,
        device_type=CPU,
        ndim=bits.ndim,
        type_code=BFLOAT,
        type_bits=16,
        type_lanes=1,
        shape=block + ctypes.sizeof(_Managed),
    )
    managed.deleter = _free
    ctypes.memmove(block + ctypes.sizeof(_Managed), shape, ctypes.sizeof(shape))
    ctypes.memmove(block + head, plain.ctypes.data, plain.nbytes)
    return _capsule(block, NAME, None)


def bits_from_float(array: Array) -> Array:
    """float32 -> the uint16 bit patterns of the nearest bfloat16 (ties to even; NaN stays NaN)."""
    wide = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    return np.where(np.isnan(array), np.uint32(0x7FC0), rounded).astype(np.uint16)


def float_from_bits(bits: Array) -> Array:
    """uint16 bit patterns of bfloat16 -> float32, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class _Held:
    """What np.from_dlpack wants to be given."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self) -> Any:
        return self._capsule
