"""Backend "boxes": lines of text as rotated rectangles, from a detector's map.

`probability` FP32[1,h,w] -> `boxes` FP32[max_boxes,4,2], `scores` FP32[max_boxes], `count` INT32[1]. Boxes stand in reading order,
their corners as x, y in pixels of the map (pilotlib.boxes); what is beyond `count` is zero. Of more than max_boxes the best
scored stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from pilotlib import config_tensors
from pilotlib.boxes import BoxRules, find_boxes, reading_order
from pilotlib.parameters import parameter
from pilotlib.tensors import Array
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context


@dataclass(frozen=True)
class Parameters:
    """What the backend boxes reads."""

    threshold: float = parameter(0.2, "probability from which a pixel belongs to a line", minimum=0)
    box_threshold: float = parameter(0.4, "least mean probability inside a box", minimum=0)
    unclip_ratio: float = parameter(1.4, "how much boxes grow: by area * unclip_ratio / perimeter a side", minimum=0)
    min_side: float = parameter(3.0, "least height of a box before it grows, in pixels of the map", minimum=0)
    max_boxes: int = parameter(100, "most boxes of a map, best scored first", minimum=1)


Rows = Mapping[str, Array]  # one request's outputs


class TextBoxes(Backend[Parameters, Array, Rows]):
    """Finds lines of text in probability maps."""

    parameters = Parameters

    def set_up(self, context: Context[Parameters]) -> None:
        """Check that the config says what follows from the parameters."""
        asked = context.parameters
        self._rules = BoxRules(asked.threshold, asked.box_threshold, asked.unclip_ratio, asked.min_side)
        self._most = asked.max_boxes
        config_tensors.check(
            context.config,
            {"probability": ("TYPE_FP32", (1, -1, -1))},
            {
                "boxes": ("TYPE_FP32", (self._most, 4, 2)),
                "scores": ("TYPE_FP32", (self._most,)),
                "count": ("TYPE_INT32", (1,)),
            },
            may_lack=("boxes", "scores", "count"),
        )
        cv2.setNumThreads(1)  # a model's instances share the cores; OpenCV would start as many threads as there are
        self._is_batched = context.config.get("max_batch_size", 0) > 0

    def decode(self, inputs: Mapping[str, Array]) -> Array:
        """The maps of one request, FP32[rows,1,h,w]."""
        maps = inputs["probability"] if self._is_batched else inputs["probability"][np.newaxis]
        if 0 in maps.shape:
            raise BadRequest("probability", f"shape {list(maps.shape)} holds no pixels")
        return maps

    def predict(self, items: Sequence[Array]) -> Sequence[Rows]:
        """The boxes of every map."""
        return [self._rows(maps) for maps in items]

    def encode(self, result: Rows) -> Mapping[str, Array]:
        """The three outputs."""
        return result if self._is_batched else {name: array[0] for name, array in result.items()}

    def _rows(self, maps: Array) -> Rows:
        boxes = np.zeros((len(maps), self._most, 4, 2), np.float32)
        scores = np.zeros((len(maps), self._most), np.float32)
        count = np.zeros((len(maps), 1), np.int32)
        for row, probability in enumerate(maps[:, 0].astype(np.float32, copy=False)):
            found = find_boxes(probability, self._rules)
            best = np.argsort(-found.scores, kind="stable")[: self._most]
            best = best[reading_order(found.corners[best])]
            boxes[row, : len(best)] = found.corners[best]
            scores[row, : len(best)] = found.scores[best]
            count[row, 0] = len(best)
        return {"boxes": boxes, "scores": scores, "count": count}


TritonPythonModel = triton_model(TextBoxes)
