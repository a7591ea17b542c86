"""How does an FP32 ONNX model become an FP16 or BF16 one?

    to_fp16(model, output)                                  # inputs and outputs stay FP32
    to_fp16(model, output, exclude=frozenset({"/norm"}))    # mixed precision: these nodes stay FP32
"""

from __future__ import annotations

from pathlib import Path


def to_fp16(model: Path, output: Path, exclude: frozenset[str] = frozenset()) -> None:
    """Write `output` with weights and arithmetic in FP16; the nodes named in `exclude` stay FP32."""
    raise NotImplementedError


def to_bf16(model: Path, output: Path, exclude: frozenset[str] = frozenset()) -> None:
    """Write `output` with weights and arithmetic in BF16, or ModelError that says why this runtime cannot run it."""
    raise NotImplementedError
