"""Which input does a runtime complain about? It names nodes of its graph, and a caller knows inputs.

name = input_at_fault("... indices element out of data bounds, idx=99 must be within ...", {"ids": array})      # "ids" or None
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pilotlib.tensors import Array

_VALUE = re.compile(r"\bidx=(-?\d+)")  # ONNX Runtime's Gather
_INDEX = "index out of range"  # PyTorch's embedding, which does not say which index


def input_at_fault(said: str, inputs: Mapping[str, Array]) -> str | None:
    """The one integer input that holds the value which the message names, or that alone can hold an index; None otherwise."""
    integers = [name for name, array in inputs.items() if array.dtype.kind in "iu"]
    if (found := _VALUE.search(said)) is not None:
        value = int(found[1])
        integers = [name for name in integers if (inputs[name] == value).any()]
    elif _INDEX not in said:
        return None
    return integers[0] if len(integers) == 1 else None
