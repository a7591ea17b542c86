"""Backend "ocr", a driver: reads pages by calling a detector and a recogniser of the same server (BLS).

`page` BYTES[1], an encoded image -> `text` BYTES[1], its lines joined by line feeds, and `layout` BYTES[1], JSON:

    {"width": 640, "height": 480, "lines": [{"text": "...", "score": 0.98, "box": [[x, y], [x, y], [x, y], [x, y]]}]}

The pages of all callers of an execution are read together (pilotlib.reading). What the models behind `det` and `rec` take and make:
det `page` UINT8[h,w,3] -> `probability` FP32[1,h,w]; rec `line` UINT8[48,w,3] -> `index` INT32[t], `confidence` FP32[t].
A page that cannot be read gets its request an error that names its row; when a call fails, only the pages in it do.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from PIL import Image

from pilotlib import config_tensors
from pilotlib.boxes import BoxRules
from pilotlib.ctc import read_characters
from pilotlib.image import PhotoError
from pilotlib.pages import Pixels, read_page
from pilotlib.parameters import parameter
from pilotlib.reading import Floats, PageText, Reader, ReadingRules, TooManyLines
from pilotlib.tensors import Array
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest, Context, Infer, InferError


@dataclass(frozen=True)
class Parameters:
    """What the backend ocr reads. `det` and `rec` are set by the build when they are steps of a pipeline."""

    det: str = parameter("ocr_det", "model that detects lines")
    rec: str = parameter("ocr_rec", "model that reads them")
    characters: str = parameter(
        "characters.txt", "file with the characters, one a line in the order of the classes without the blank"
    )
    blank: int = parameter(0, "the class that stands for no character", minimum=0)
    threshold: float = parameter(0.2, "probability from which a pixel belongs to a line", minimum=0)
    box_threshold: float = parameter(0.4, "least mean probability inside a box", minimum=0)
    unclip_ratio: float = parameter(1.4, "how much boxes grow: by area * unclip_ratio / perimeter a side", minimum=0)
    min_side: float = parameter(3.0, "least height of a box before it grows, in pixels of the detector", minimum=0)
    min_score: float = parameter(0.5, "lines read with less confidence are dropped", minimum=0)
    side_limit: int = parameter(960, "longest side that the detector sees; larger pages are shrunk for it", minimum=32)
    max_line_width: int = parameter(
        3200, "widest line at the recogniser's height; longer ones are squeezed", minimum=96
    )
    max_lines: int = parameter(1000, "a page of more is refused", minimum=1)
    max_pixels: int = parameter(20_000_000, "a page of more is refused before it is decoded", minimum=1)
    max_bytes: int = parameter(20_000_000, "a longer one is refused unread", minimum=1)
    det_batch: int = parameter(4, "most pages of a call of det; at most its max_batch_size", minimum=1)
    rec_batch: int = parameter(8, "most lines of a call of rec; at most its max_batch_size", minimum=1)
    workers: int = parameter(4, "most calls at a time", minimum=1)


class Ocr(Backend[Parameters, list[Pixels], list[PageText] | InferError]):
    """Reads the text of pages."""

    parameters = Parameters

    def set_up(self, context: Context[Parameters]) -> None:
        """Read the characters, start the threads. The models are not called: the server does not listen to a driver yet."""
        asked = context.parameters
        config_tensors.check(
            context.config,
            {"page": ("TYPE_STRING", (1,))},
            {"text": ("TYPE_STRING", (1,)), "layout": ("TYPE_STRING", (1,))},
            may_lack=("text", "layout"),
        )
        # max_pixels counts here, and is checked before decoding; Pillow's own limit would make it a lie above 179 million.
        Image.MAX_IMAGE_PIXELS = None
        cv2.setNumThreads(1)  # the networks have the cores; OpenCV would start as many threads as there are
        self._is_batched = context.config.get("max_batch_size", 0) > 0
        self._max_pixels, self._max_bytes = asked.max_pixels, asked.max_bytes
        rules = ReadingRules(
            boxes=BoxRules(asked.threshold, asked.box_threshold, asked.unclip_ratio, asked.min_side),
            side_limit=asked.side_limit,
            max_line_width=asked.max_line_width,
            max_lines=asked.max_lines,
            min_score=asked.min_score,
            detect_batch=asked.det_batch,
            recognise_batch=asked.rec_batch,
            workers=asked.workers,
        )
        characters = read_characters(context.version_folder / asked.characters, asked.blank)
        det, rec = _calls(context.infer, asked.det, asked.rec)
        self._reader = Reader(rules, characters, asked.blank, det, rec)

    def decode(self, inputs: Mapping[str, Array]) -> list[Pixels]:
        """The pages of one request as pixels."""
        pages = []
        for row, encoded in enumerate(inputs["page"].ravel().tolist()):
            try:
                pages.append(read_page(encoded, self._max_pixels, self._max_bytes))
            except PhotoError as error:
                raise BadRequest("page", f"row {row} {error}") from error
        return pages

    def predict(self, items: Sequence[list[Pixels]]) -> Sequence[list[PageText] | InferError | BadRequest]:
        """Read the pages of all requests together."""
        read = iter(self._reader.read([page for pages in items for page in pages]))
        return [_answer([next(read) for _ in pages]) for pages in items]

    def encode(self, result: list[PageText] | InferError) -> Mapping[str, Array]:
        """Both outputs; raises the error of a call that failed."""
        if isinstance(result, InferError):
            raise result
        text = [["\n".join(line.text for line in page.lines).encode()] for page in result]
        layout = [[json.dumps(_layout(page), ensure_ascii=False).encode()] for page in result]
        outputs = {"text": np.array(text, np.object_), "layout": np.array(layout, np.object_)}
        return outputs if self._is_batched else {name: array[0] for name, array in outputs.items()}

    def tear_down(self) -> None:
        """End the threads."""
        self._reader.close()


def _calls(infer: Infer, det: str, rec: str) -> tuple[Any, Any]:
    """The two networks as the reader calls them."""

    def detect(pages: Pixels) -> Floats:
        probability: Any = infer(det, {"page": pages}, ["probability"])["probability"]
        return probability  # type: ignore[no-any-return]

    def recognise(lines: Pixels) -> tuple[Any, Any]:
        read = infer(rec, {"line": lines}, ["index", "confidence"])
        return read["index"], read["confidence"]

    return detect, recognise


def _answer(rows: list[PageText | TooManyLines | InferError]) -> list[PageText] | InferError | BadRequest:
    """A request's result: all its rows, or the error of the first that has one."""
    read: list[PageText] = []
    for row, found in enumerate(rows):
        if isinstance(found, TooManyLines):
            return BadRequest("page", f"row {row} {found}")
        if isinstance(found, InferError):
            return type(found)(f'"page": row {row} could not be read: {found}')
        read.append(found)
    return read


def _layout(page: PageText) -> dict[str, Any]:
    lines = [
        {
            "text": line.text,
            "score": round(line.score, 4),
            "box": [[round(x, 1), round(y, 1)] for x, y in line.corners.tolist()],
        }
        for line in page.lines
    ]
    return {"width": page.width, "height": page.height, "lines": lines}


TritonPythonModel = triton_model(Ocr)
