"""Backend "embedding": a model's output as an embedding of length 1. `token_embeddings` FP32[-1,d] + `attention_mask` INT64[-1],
or `embedding` FP32[d], -> `embedding` FP32[d'].

Pooling over the tokens that the mask leaves, Matryoshka truncation to the first `dims`, L2 normalisation (pilotlib.embedding). A
row with NaN or Inf gets its request an error that names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pilotlib import config_tensors
from pilotlib.embedding import normalise, not_finite, pool
from pilotlib.parameters import parameter
from pilotlib.tensors import Array
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context


@dataclass(frozen=True)
class Parameters:
    """What the backend embedding reads."""

    pooling: str = parameter(
        "mean",
        "how tokens become one vector: mean over those that the mask leaves, cls: the first; none: the model has done it",
        choices=("mean", "cls", "none"),
    )
    normalize: bool = parameter(True, "divide by the length (L2); zeros stay zeros")
    dims: int = parameter(0, "keep the first so many dimensions (Matryoshka models); 0 = all", minimum=0)


class Embedding(Backend[Parameters, tuple[Array, ...], Array]):
    """Pools, cuts and normalises."""

    parameters = Parameters

    def set_up(self, context: Context[Parameters]) -> None:
        """Check the config, make the buffer."""
        asked = context.parameters
        self._pooling = asked.pooling
        self._normalises = asked.normalize
        self._dims = asked.dims
        self._source = "embedding" if asked.pooling == "none" else "token_embeddings"
        width = config_tensors.dims(context.config, self._source)[-1]
        if asked.dims > width > 0:
            raise ValueError(
                f'parameter "dims" is {asked.dims}, but "{self._source}" has {width} dimensions only. The model is not '
                "loaded: correct one of the two"
            )
        made = {"embedding": ("TYPE_FP32", (asked.dims or width,))}
        if asked.pooling == "none":
            config_tensors.check(context.config, {"embedding": ("TYPE_FP32", (-1,))}, made)
        else:
            taken = {"token_embeddings": ("TYPE_FP32", (-1, -1)), "attention_mask": ("TYPE_INT64", (-1,))}
            config_tensors.check(context.config, taken, made)
        rows = context.config.get("max_batch_size", 0)
        self._is_batched = rows > 0
        self._buffer = np.zeros((max(1, rows), max(1, width)), np.float32)

    def decode(self, inputs: Mapping[str, Array]) -> tuple[Array, ...]:
        """The tensors of one request, rows first."""
        arrays = tuple(
            inputs[name] if self._is_batched else inputs[name][np.newaxis]
            for name in ((self._source, "attention_mask") if self._pooling != "none" else (self._source,))
        )
        source = arrays[0]
        if not all(source.shape):
            raise BadRequest(self._source, f"is empty: its shape is {list(source.shape)}")
        if source.shape[-1] < self._dims:
            raise BadRequest(
                self._source, f"has {source.shape[-1]} dimensions, fewer than the {self._dims} that are kept"
            )
        if len(arrays) > 1:
            mask = arrays[1]
            if mask.shape != source.shape[:2]:
                raise BadRequest(
                    "attention_mask", f"has shape {list(mask.shape)}, but the tokens have {list(source.shape[:2])}"
                )
            strange = ((mask != 0) & (mask != 1)).any(1)
            if strange.any():
                raise BadRequest("attention_mask", f"row {int(strange.argmax())} has other values than 0 and 1")
        return arrays

    def predict(self, items: Sequence[tuple[Array, ...]]) -> Sequence[Array | BadRequest]:
        """Pool each request for itself (their tokens differ in number), then cut and normalise all rows at once."""
        width = max(arrays[0].shape[-1] for arrays in items)
        rows = sum(len(arrays[0]) for arrays in items)
        if width > self._buffer.shape[1] or rows > len(self._buffer):
            self._buffer = np.zeros((max(rows, len(self._buffer)), max(width, self._buffer.shape[1])), np.float32)
        found: list[Array | BadRequest] = []
        start = 0
        for arrays in items:
            stop = start + len(arrays[0])
            place = self._buffer[start:stop, : arrays[0].shape[-1]]
            if self._pooling == "none":
                place[...] = arrays[0]
            else:
                pool(arrays[0], arrays[1], self._pooling, place)
            bad = not_finite(place)
            if bad is not None:
                found.append(BadRequest(self._source, f"row {bad} has NaN or infinity"))
            else:
                kept = place[:, : self._dims or None]
                if self._normalises:
                    normalise(kept)
                found.append(kept)
            start = stop
        return found

    def encode(self, result: Array) -> Mapping[str, Array]:
        """The embeddings of one request."""
        return {"embedding": result if self._is_batched else result[0]}


TritonPythonModel = triton_model(Embedding)
