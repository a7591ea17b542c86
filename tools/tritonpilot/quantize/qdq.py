"""How does an FP32 ONNX model become a static INT8 one in QDQ form?

    options = QdqOptions.for_cpu(model)
    quantize_static(model, rows, output, options)          # rows: data.Rows, the calibration set
    quantizable_nodes(model)                               # [Node(name="/head/Gemm", op_type="Gemm"), ...]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tritonpilot.quantize.data import Rows

Method = Literal["minmax", "entropy", "percentile"]
#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]


class Node(NamedTuple):
    """A node that can be quantised; `name` is what `QdqOptions.exclude` takes."""

    name: str
    op_type: str


@dataclass(frozen=True)
class QdqOptions:
    """How to quantise: how ranges are found, what is quantised, how the loss is made up for."""

    method: Method = "minmax"
    percentile: float = 99.999
    per_channel: bool = True
    reduce_range: bool = False
    activation: Literal["uint8", "int8"] = "uint8"
    exclude: frozenset[str] = frozenset()
    op_types: frozenset[str] = frozenset({"Conv", "Gemm", "MatMul"})
    smooth: float | None = None
    bias_correction: bool = False
    batch: int = 16

    @classmethod
    def for_cpu(cls, model: Path) -> QdqOptions:
        """Options that are fast on x86-64 with VNNI, by the operators of the model."""
        raise NotImplementedError


#: Range of each tensor: name -> (lowest, highest).
Ranges = Mapping[str, tuple[float, float]]


def prepare(model: Path, output: Path) -> None:
    """Write the FP32 model that is quantised: opset 13 or later, folded, every node named. Doing it twice changes nothing."""
    raise NotImplementedError


def quantizable_nodes(model: Path, options: QdqOptions | None = None) -> list[Node]:
    """The nodes that `options` would quantise, in the model's order (names of the prepared model)."""
    raise NotImplementedError


def calibrate(model: Path, rows: Rows, options: QdqOptions, progress: Progress | None = None) -> Ranges:
    """Ranges of the activations over the rows; they depend on method, percentile, smooth and batch of the options only."""
    raise NotImplementedError


def quantize_static(
    model: Path,
    rows: Rows,
    output: Path,
    options: QdqOptions,
    progress: Progress | None = None,
    *,
    ranges: Ranges | None = None,
) -> None:
    """Write the INT8 model `output`; `ranges` of an earlier `calibrate` with the same method save its time."""
    raise NotImplementedError


def is_quantized(model: Path) -> bool:
    """Whether the model already holds quantised operators."""
    raise NotImplementedError
