"""How does a model's output become an embedding that is compared by its cosine? Pooled over tokens, cut to size, normalised.

pooled = pool(token_embeddings, attention_mask, "mean")      # FP32[r,s,d], INT64[r,s] -> FP32[r,d]
normalise(pooled[:, :128])                                   # Matryoshka: the first dims are an embedding of their own
not_finite(pooled)                                           # the first row with NaN or Inf, or None
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Pooling = Literal["mean", "cls"]


def pool(tokens: Floats, mask: npt.NDArray[np.int64], how: Pooling, out: Floats | None = None) -> Floats:
    """FP32[r,d] of token embeddings FP32[r,s,d] and their mask INT64[r,s] of 0 and 1.

    "mean": over the unmasked tokens, zeros for a row without any (as sentence-transformers); "cls": the first token.
    """
    if out is None:
        out = np.empty((tokens.shape[0], tokens.shape[2]), np.float32)
    if how == "cls":
        out[...] = tokens[:, 0]
        return out
    np.matmul(mask[:, np.newaxis].astype(np.float32), tokens, out=out[:, np.newaxis])
    out /= np.maximum(mask.sum(1, dtype=np.float32), 1)[:, np.newaxis]
    return out


def normalise(embeddings: Floats) -> None:
    """Divide each row by its length, in place; a row of zeros stays one."""
    # In 64 bits: the square of 1e20 is infinite in 32, and the row would become zeros.
    lengths = np.sqrt(np.einsum("rd,rd->r", embeddings, embeddings, dtype=np.float64))
    lengths[lengths == 0] = 1
    np.divide(embeddings, lengths[:, np.newaxis], out=embeddings, casting="same_kind")


def not_finite(embeddings: Floats) -> int | None:
    """The first row that has a NaN or an infinity."""
    if np.isfinite(embeddings).all():
        return None
    return int(np.argmin(np.isfinite(embeddings).all(1)))
