"""Which tensors of a request go through shared memory, and where do they lie? Pure.

plan = place({"pixels": 602112}, {"logits": 0}, threshold=1 << 20)       # bytes by name -> offsets by name
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(frozen=True)
class Placement:
    """Offsets in one region of `bytes` bytes; a tensor that is in neither map travels in the body."""

    inputs: Mapping[str, int]
    outputs: Mapping[str, int]
    bytes: int


def place(inputs: Mapping[str, int], outputs: Mapping[str, int], threshold: int) -> Placement:
    """Place every tensor of at least `threshold` bytes; one whose size is not known before (0) never is."""
    end = 0
    found: list[dict[str, int]] = []
    for sizes in (inputs, outputs):
        offsets = {}
        for name, size in sizes.items():
            if size and size >= threshold:
                offsets[name] = end
                end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
        found.append(offsets)
    return Placement(found[0], found[1], end)
