"""Which input does ONNX Runtime complain about? It names nodes of the graph, and a caller knows inputs.

name = input_at_fault("... indices element out of data bounds, idx=99 must be within ...", {"ids": array})      # "ids" or None
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pilotlib.tensors import Array

_VALUE = re.compile(r"\bidx=(-?\d+)")


def input_at_fault(said: str, inputs: Mapping[str, Array]) -> str | None:
    """The one integer input that holds the value which the message names; None when none or several do."""
    found = _VALUE.search(said)
    if found is None:
        return None
    value = int(found[1])
    holders = [name for name, array in inputs.items() if array.dtype.kind in "iu" and (array == value).any()]
    return holders[0] if len(holders) == 1 else None
