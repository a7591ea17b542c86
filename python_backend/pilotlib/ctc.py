"""Which text do a recogniser's classes spell? CTC by the best path: repeats are one, blanks are none.

    characters = read_characters(folder / "characters.txt", blank=0)     # by class; "" for the blank
    index, confidence = best(probabilities)                              # FP32[n,t,c] -> INT64[n,t], FP32[n,t]
    lines = spell(index, confidence, characters, blank=0)                # [Line("text", 0.98), ...], n of them

Source of the rule: Graves et al. 2006, connectionist temporal classification.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


class Line(NamedTuple):
    """One line as read."""

    text: str
    score: float
    """Mean confidence of its characters, 0 when there are none."""


def read_characters(path: Path, blank: int = 0) -> npt.NDArray[np.object_]:
    """What each class spells, from a UTF-8 file of one character per line in the order of the classes without the blank.

    Only a line feed ends a line: a character may be a space or one of Unicode's other separators. Raises ValueError or OSError.
    """
    lines = path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    if "" in lines:
        raise ValueError(f"{path.name}: line {lines.index('') + 1} is empty; each line must hold a class's character")
    if not 0 <= blank <= len(lines):
        raise ValueError(f"{path.name} has {len(lines)} lines, so there is no class {blank} for the blank")
    return np.array([*lines[:blank], "", *lines[blank:]], dtype=np.object_)


def best(scores: Floats, *, are_logits: bool = False) -> tuple[npt.NDArray[np.int64], Floats]:
    """The best class of each step and its probability: FP32[..., t, c] -> INT64[..., t], FP32[..., t]."""
    index = scores.argmax(axis=-1)
    highest = np.take_along_axis(scores, index[..., None], axis=-1)
    if not are_logits:
        return index, highest[..., 0]
    return index, 1.0 / np.exp(scores - highest).sum(axis=-1)


def spell(
    index: npt.NDArray[np.signedinteger[Any]], confidence: Floats, characters: npt.NDArray[np.object_], blank: int = 0
) -> list[Line]:
    """Best classes INT[n,t] and their probabilities FP32[n,t] -> n lines.

    Raises ValueError when there is a class that `characters` lacks: model and file do not belong together.
    """
    if index.size and (index.min() < 0 or index.max() >= len(characters)):
        raise ValueError(f"class {index.max()} has no character: the file has {len(characters)}, with the blank")
    spelled = index != blank
    spelled[:, 1:] &= index[:, 1:] != index[:, :-1]
    counts = spelled.sum(axis=1)
    scores = np.where(spelled, confidence, 0.0).sum(axis=1) / np.maximum(counts, 1)
    letters = characters[index[spelled]].tolist()
    ends = np.cumsum(counts).tolist()
    starts = [0, *ends]
    return [
        Line("".join(letters[start:end]), score)
        for start, end, score in zip(starts, ends, scores.tolist(), strict=False)
    ]
