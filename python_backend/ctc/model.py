"""Backend "ctc": the text that a recogniser's classes spell. `logits` FP32[t,c] -> `text` BYTES[1], `score` FP32[1].

Characters are in a file of the version folder, one a line, in the order of the classes without the blank (pilotlib.ctc). `score` is
the mean probability of the characters read. A row with a NaN gets its request an error that names it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pilotlib import config_tensors
from pilotlib.ctc import Floats, Line, best, read_characters, spell
from pilotlib.parameters import parameter
from pilotlib.tensors import Array
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context


@dataclass(frozen=True)
class Parameters:
    """What the backend ctc reads."""

    characters: str = parameter(
        "characters.txt", "file with the characters, one a line in the order of the classes without the blank"
    )
    blank: int = parameter(0, "the class that stands for no character", minimum=0)
    activation: str = parameter(
        "none", "none: `logits` holds probabilities already; softmax: it holds logits", choices=("none", "softmax")
    )


class Ctc(Backend[Parameters, Floats, list[Line]]):
    """Spells text from the classes of each step."""

    parameters = Parameters

    def set_up(self, context: Context[Parameters]) -> None:
        """Read the characters; refuse a config with another number of classes."""
        asked = context.parameters
        self._blank, self._are_logits = asked.blank, asked.activation == "softmax"
        self._characters = read_characters(context.version_folder / asked.characters, asked.blank)
        classes = len(self._characters)
        said = config_tensors.dims(context.config, "logits")
        if len(said) == 2 and said[1] not in (-1, classes):
            raise ValueError(
                f'{asked.characters} spells {classes} classes with the blank, but config.pbtxt says that "logits" is {list(said)}. '
                "The model is not loaded: take the characters that belong to the recogniser"
            )
        config_tensors.check(
            context.config,
            {"logits": ("TYPE_FP32", (-1, -1))},
            {"text": ("TYPE_STRING", (1,)), "score": ("TYPE_FP32", (1,))},
            may_lack=("text", "score"),
        )
        self._is_batched = context.config.get("max_batch_size", 0) > 0

    def decode(self, inputs: Mapping[str, Array]) -> Floats:
        """The lines of one request, FP32[rows,t,c]."""
        logits = inputs["logits"] if self._is_batched else inputs["logits"][np.newaxis]
        if logits.shape[2] != len(self._characters):
            raise BadRequest("logits", f"has {logits.shape[2]} classes, {len(self._characters)} are expected")
        return logits.astype(np.float32, copy=False)

    def predict(self, items: Sequence[Floats]) -> Sequence[list[Line] | BadRequest]:
        """Spell all lines of each request. They are not joined: a copy of the logits costs more than a call."""
        return [self._lines(item) for item in items]

    def encode(self, result: list[Line]) -> Mapping[str, Array]:
        """Both outputs."""
        text = np.array([[line.text.encode()] for line in result], np.object_)
        score = np.array([[line.score] for line in result], np.float32)
        return {"text": text, "score": score} if self._is_batched else {"text": text[0], "score": score[0]}

    def _lines(self, logits: Floats) -> list[Line] | BadRequest:
        index, confidence = best(logits, are_logits=self._are_logits)
        # The best class of a step with a NaN is the NaN, so this sees them all.
        bad = np.flatnonzero(np.isnan(confidence).any(axis=1))
        if len(bad):
            return BadRequest("logits", f"row {bad[0]} holds NaN")
        return spell(index, confidence, self._characters, self._blank)


TritonPythonModel = triton_model(Ctc)
