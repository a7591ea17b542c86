"""Real rows for the examples: what a caller's own feature code would produce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = Path(__file__).parents[1] / "models" / "ctr" / "build" / "samples.npz"


def first_rows(count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """`count` rows: dense FP32 [count, 28] and categorical INT64 [count, 8]."""
    with np.load(SAMPLES) as samples:
        return samples["dense"][:count], samples["categorical"][:count]
