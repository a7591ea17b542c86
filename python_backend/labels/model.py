"""Backend "labels": what a classifier's logits say, in words.

`logits` FP32[n] -> `label` BYTES[k], `score` FP32[k], `index` INT32[k], best first. The labels are in a file of the version folder,
one a line. A row with a NaN or an infinity among its logits gets its request an error that names row and class.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pilotlib import config_tensors
from pilotlib.labels import ACTIVATIONS, Ranking, first_not_finite, names
from pilotlib.parameters import parameter
from pilotlib.tensors import Array
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context


@dataclass(frozen=True)
class Parameters:
    """What the backend labels reads."""

    k: int = parameter(5, "how many labels, best first", minimum=1)
    activation: str = parameter(
        "softmax",
        "scores from logits: softmax (shares of 1), sigmoid (each class by itself), none (logits)",
        choices=ACTIVATIONS,
    )
    labels: str = parameter("labels.txt", "file with the labels, one a line, in the version folder")
    threshold: float | None = parameter(
        None, 'least score: what is below gets the label "" and the index -1; unset = the k best whatever their scores'
    )


class Ranked(NamedTuple):
    """One request's rows of the three outputs."""

    label: Array
    score: Array
    index: Array


class Labels(Backend[Parameters, Array, Ranked]):
    """Names the best classes of logits."""

    parameters = Parameters

    def set_up(self, context: Context[Parameters]) -> None:
        """Read the labels; refuse a config whose class count is another one."""
        asked = context.parameters
        labels = names(context.version_folder / asked.labels)
        k, classes = asked.k, len(labels)
        self._is_batched = context.config.get("max_batch_size", 0) > 0
        said = config_tensors.dims(context.config, "logits")
        if said != (classes,):
            raise ValueError(
                f'{asked.labels} has {classes} labels, but config.pbtxt says that "logits" is {list(said)}. The model is not '
                "loaded: take the labels that belong to the model"
            )
        config_tensors.check(
            context.config,
            {"logits": ("TYPE_FP32", (classes,))},
            {"label": ("TYPE_STRING", (k,)), "score": ("TYPE_FP32", (k,)), "index": ("TYPE_INT32", (k,))},
            may_lack=("label", "score", "index"),
        )
        self._ranking = Ranking(classes, k, asked.activation, context.config.get("max_batch_size", 0))
        self._labels = np.append(labels, [b""])  # the last one, -1, stands for "none"
        self._threshold = asked.threshold
        self.predict([np.zeros((1, classes), np.float32)])

    def decode(self, inputs: Mapping[str, Array]) -> Array:
        """The logits [rows, classes]."""
        logits = inputs["logits"]
        return logits if self._is_batched else logits[np.newaxis]

    def predict(self, items: Sequence[Array]) -> Sequence[Ranked | BadRequest]:
        """Rank all rows of all requests together; a request with a bad row is refused."""
        logits = items[0] if len(items) == 1 else np.concatenate(items)
        index, score = self._ranking.best(logits)
        if self._threshold is not None:
            index[score < self._threshold] = -1
        label = self._labels[index]
        refused = {} if first_not_finite(logits) is None else _refusals(items)
        found: list[Ranked | BadRequest] = []
        start = 0
        for place, item in enumerate(items):
            stop = start + len(item)
            found.append(refused.get(place) or Ranked(label[start:stop], score[start:stop], index[start:stop]))
            start = stop
        return found

    def encode(self, result: Ranked) -> Mapping[str, Array]:
        """The three outputs."""
        return result._asdict() if self._is_batched else {name: array[0] for name, array in result._asdict().items()}


def _refusals(items: Sequence[Array]) -> dict[int, BadRequest]:
    found = {}
    for place, item in enumerate(items):
        if (bad := first_not_finite(item)) is not None:
            row, column = bad
            found[place] = BadRequest(
                "logits", f"row {row}: class {column} is {item[row, column]}, which is no finite number"
            )
    return found


TritonPythonModel = triton_model(Labels)
