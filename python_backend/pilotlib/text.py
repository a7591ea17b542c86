"""How do strings become the token ids that a text model takes? With the model's own tokenizer.json, all rows in one call.

    tokenizer = Tokenizer(Path("tokenizer.json"), max_tokens=256, pad_to_multiple=16)
    first, second = tokenizer.encode([["a text", "another one"], ["of another caller"]])
    first.input_ids, first.attention_mask               # INT64[2,16], INT64[2,16]: padded to the longest of that request

Padding to a multiple gives the requests of different callers equal shapes, which is what Triton's batcher asks for. Texts are
cut off after `max_tokens`. Used when a model is exported too, so that it is served what it was checked with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

Tensor = npt.NDArray[np.int64]

# A text of more characters than this for each token that is kept is first read up to there: a token of prose has five.
HEAD_CHARACTERS = 16
# What makes the tokens before a space independent of what follows it, so that reading the head of a text is enough.
LOCAL_NORMALIZERS = {"BertNormalizer", "Lowercase", "StripAccents", "NFC", "NFD", "NFKC", "NFKD"}
SPACE_SPLITTERS = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}


class TextError(ValueError):
    """A text that is not tokenised: "row 3 ..."."""


@dataclass(frozen=True)
class Tokens:
    """One request's tensors, INT64[rows, tokens]. They lie in buffers that the next `encode` overwrites."""

    input_ids: Tensor
    attention_mask: Tensor  # 1 for a token, 0 for padding
    token_type_ids: Tensor | None = None  # when asked for


def decoded(texts: Sequence[bytes], max_bytes: int) -> list[str]:
    """The texts of one request as `str`. Raises TextError for one that is too long or not UTF-8, naming its row."""
    found = []
    for row, text in enumerate(texts):
        if len(text) > max_bytes:
            raise TextError(f"row {row} has {len(text)} bytes, more than the {max_bytes} that max_bytes allows")
        try:
            found.append(text.decode())
        except UnicodeDecodeError as error:
            raise TextError(f"row {row} is not UTF-8: {error.reason} at byte {error.start}") from None
    return found


def use_threads(count: int) -> None:
    """How many threads this process tokenises on. To be said before the first `encode`, when the threads are started."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(count)


class Tokenizer:
    """A tokenizer with its padding and truncation. `rows`: for how many rows together buffers are made beforehand."""

    def __init__(
        self, path: Path, *, max_tokens: int, pad_to_multiple: int = 1, rows: int = 1, has_types: bool = False
    ) -> None:
        """Raises OSError when the file cannot be read, ValueError when it is no tokenizer or `max_tokens` holds no token."""
        self._tokenizer = _load(path)
        specials = self._tokenizer.num_special_tokens_to_add(False)
        if max_tokens <= specials:
            raise ValueError(
                f"max_tokens {max_tokens} leaves no room for a text: {path.name} adds {specials} tokens of its own"
            )
        described = json.loads(self._tokenizer.to_str())
        padding = self._tokenizer.padding or {}
        self._pad_id = int(padding.get("pad_id", _pad_id(self._tokenizer)))
        self._pad_type_id = int(padding.get("pad_type_id", 0))
        self._pads_left = str(padding.get("direction", "right")).lower() == "left"
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(max_tokens)
        self._head = HEAD_CHARACTERS * max_tokens if _is_local(described) else 0
        self._max_tokens = max_tokens
        self._multiple = pad_to_multiple
        self._has_types = has_types
        self._buffers = np.zeros((3 if has_types else 2, rows * max_tokens), np.int64)

    def encode(self, requests: Sequence[Sequence[str]]) -> list[Tokens]:
        """The tensors of each request, every one as wide as its longest text needs. A request has one row or more."""
        rows = [len(texts) for texts in requests]
        encodings = self._read(list(chain.from_iterable(requests)))
        ids = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        starts = np.cumsum([0, *rows[:-1]])
        widths = self._padded(np.maximum.reduceat(lengths, starts))
        row_widths = np.repeat(widths, rows)
        ends = np.cumsum(row_widths)
        total = int(ends[-1])
        buffers = self._buffers
        if total > buffers.shape[1]:
            buffers = np.empty((len(buffers), total), np.int64)

        # Where each token goes in the flat buffer: the place of its row, and how far inside.
        first = ends - (lengths if self._pads_left else row_widths)
        ranks = np.cumsum(lengths)
        count = int(ranks[-1])
        places = np.repeat(first - ranks + lengths, lengths) + np.arange(count)
        buffers[0, :total] = self._pad_id
        buffers[0, places] = np.fromiter(chain.from_iterable(ids), np.int64, count)
        buffers[1, :total] = 0
        buffers[1, places] = 1
        if self._has_types:
            buffers[2, :total] = self._pad_type_id
            buffers[2, places] = np.fromiter(chain.from_iterable(e.type_ids for e in encodings), np.int64, count)

        found = []
        stop = 0
        for height, width in zip(rows, widths.tolist(), strict=True):
            start, stop = stop, stop + height * width
            found.append(Tokens(*(buffer[start:stop].reshape(height, width) for buffer in buffers)))
        return found

    def _padded(self, lengths: Tensor) -> Tensor:
        return np.minimum(-(-lengths // self._multiple) * self._multiple, np.maximum(lengths, self._max_tokens))

    def _read(self, texts: list[str]) -> list[Any]:
        """One encoding per text. A long text is read up to a space first, and in full only when that gave too few tokens.

        100 KB of prose take 50 ms in full, 1.5 ms so, and 99 letter words ten times as long: neighbours would wait for it.
        """
        heads = [self._head_of(text) for text in texts]
        encodings: list[Any] = self._tokenizer.encode_batch_fast(heads)
        again = [
            place
            for place, (head, text) in enumerate(zip(heads, texts, strict=True))
            if head is not text and len(encodings[place].ids) < self._max_tokens
        ]
        if again:
            whole = self._tokenizer.encode_batch_fast([texts[place] for place in again])
            for place, encoding in zip(again, whole, strict=True):
                encodings[place] = encoding
        return encodings

    def _head_of(self, text: str) -> str:
        if not self._head or len(text) <= self._head:
            return text
        stop = text.rfind(" ", 0, self._head)
        return text[:stop] if stop > 0 else text


def _load(path: Path) -> tokenizers.Tokenizer:
    written = path.read_bytes()
    try:
        return tokenizers.Tokenizer.from_buffer(written)
    except Exception as error:  # the library raises bare exceptions
        raise ValueError(f"{path.name} is no tokenizer in the form of the library tokenizers: {error}") from error


def _pad_id(tokenizer: tokenizers.Tokenizer) -> int:
    """For a file that does not say how to pad."""
    known = (tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>"))
    return next((found for found in known if found is not None), 0)


def _is_local(described: dict[str, Any]) -> bool:
    """Whether no token depends on what stands behind the space that follows it."""
    return (
        _types(described["normalizer"], "normalizers") <= LOCAL_NORMALIZERS
        and bool(_types(described["pre_tokenizer"], "pretokenizers") & SPACE_SPLITTERS)
        and not any(" " in token["content"] for token in described["added_tokens"])
    )


def _types(described: dict[str, Any] | None, members: str) -> set[str]:
    if described is None:
        return set()
    if described["type"] == "Sequence":
        return set().union(*(_types(member, members) for member in described[members]))
    return {described["type"]}
