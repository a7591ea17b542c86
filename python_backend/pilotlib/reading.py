"""What text is on these pages? Detection, crops and recognition over the pages of all callers together.

    reader = Reader(ReadingRules(), characters, detect, recognise)
    reader.read([page, other_page])          -> [PageText, error of the other page]
    reader.close()

`detect` and `recognise` run the two networks: in a server by calls to other models, in an export script in the process itself.
Both are called from several threads. A page's text does not depend on the pages that it is read with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pilotlib import crops
from pilotlib.boxes import BoxRules, find_boxes, reading_order
from pilotlib.ctc import Line, spell
from pilotlib.verbs import InferError

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
T = TypeVar("T")
R = TypeVar("R")

Detect = Callable[[Pixels], Floats]
"""Pages UINT8[n,h,w,3] with sides of multiples of 32 -> probability FP32[n,1,h,w]. Raises InferError."""
Recognise = Callable[[Pixels], tuple[npt.NDArray[np.int32], Floats]]
"""Lines UINT8[n,height,w,3] -> best class INT32[n,t] and its probability FP32[n,t]. Raises InferError."""


class TooManyLines(ValueError):  # noqa: N818  names what is wrong with the page
    """A page has more lines than are allowed."""


@dataclass(frozen=True)
class ReadingRules:
    """How pages are read."""

    boxes: BoxRules = field(default_factory=BoxRules)
    side_limit: int = 960
    """Longest side that the detector sees; larger pages are shrunk for it. Lines are cut from the page as it is."""
    line_height: int = 48
    """Height of the recogniser's input."""
    max_line_width: int = 3200
    max_lines: int = 1000
    """Most lines of a page; it bounds what one page costs."""
    min_score: float = 0.5
    """Lines read with less confidence are dropped: patterns that only look like text."""
    detect_batch: int = 4
    recognise_batch: int = 8
    workers: int = 4
    """Most calls of the networks at a time."""


class ReadLine(NamedTuple):
    """One line of a page."""

    text: str
    score: float
    corners: Floats
    """FP32[4,2]: x, y in pixels of the page; top left, top right, bottom right, bottom left"""


class PageText(NamedTuple):
    """What is written on a page, in reading order."""

    height: int
    width: int
    lines: tuple[ReadLine, ...]


class Found(NamedTuple):
    """Where a page's lines are, and what the recogniser is to see of them."""

    corners: Floats
    crops: list[Pixels]


class Reader:
    """Reads pages with two networks, on a few threads of its own."""

    def __init__(
        self, rules: ReadingRules, characters: npt.NDArray[np.object_], blank: int, detect: Detect, recognise: Recognise
    ) -> None:
        self._rules, self._characters, self._blank = rules, characters, blank
        self._detect, self._recognise = detect, recognise
        self._pool = ThreadPoolExecutor(rules.workers, "reader")

    def read(self, pages: Sequence[Pixels]) -> list[PageText | TooManyLines | InferError]:
        """Pages UINT8[h,w,3], RGB, of any sizes -> the text of each, or why that page has none."""
        found: list[Found | TooManyLines | InferError] = [InferError("not detected")] * len(pages)
        for place, boxes in self._detected(pages):
            found[place] = boxes
        texts = self._recognised(found)
        return [
            each if isinstance(each, Exception) else self._page_text(page, each, text)
            for page, each, text in zip(pages, found, texts, strict=True)
        ]

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _detected(self, pages: Sequence[Pixels]) -> Iterator[tuple[int, Found | TooManyLines | InferError]]:
        """Lines of each page, by its place; pages of one size go through the detector together."""
        places: dict[tuple[int, int], list[int]] = {}
        for place, page in enumerate(pages):
            size = crops.detector_size(page.shape[0], page.shape[1], self._rules.side_limit)
            places.setdefault(size, []).append(place)
        parts = [
            (size, same[start : start + self._rules.detect_batch])
            for size, same in places.items()
            for start in range(0, len(same), self._rules.detect_batch)
        ]

        def detect(part: tuple[tuple[int, int], list[int]]) -> Floats:
            size, members = part
            return self._detect(np.stack([crops.shrink_to(pages[place], size) for place in members]))

        # One part's lines are cut here while the next part is in the network.
        for (_, members), maps in zip(parts, self._attempts(detect, parts), strict=True):
            for row, place in enumerate(members):
                yield place, maps if isinstance(maps, InferError) else self._lines(pages[place], maps[row, 0])

    def _lines(self, page: Pixels, probability: Floats) -> Found | TooManyLines:
        rules = self._rules
        corners = find_boxes(probability, rules.boxes).corners
        if len(corners) > rules.max_lines:
            return TooManyLines(f"has {len(corners)} lines of text, max_lines is {rules.max_lines}")
        height, width = page.shape[:2]
        corners = corners * np.array([width / probability.shape[1], height / probability.shape[0]], np.float32)
        corners = corners[reading_order(corners)]
        cut = [crops.cut_line(page, each, rules.line_height, rules.max_line_width) for each in corners]
        return Found(corners, cut)

    def _recognised(self, found: list[Found | TooManyLines | InferError]) -> list[list[Line]]:
        """The texts of each page's lines. A page whose recognition failed gets the error in `found`."""
        owners = [
            (page, line)
            for page, each in enumerate(found)
            if isinstance(each, Found)
            for line in range(len(each.crops))
        ]
        lines = [crop for each in found if isinstance(each, Found) for crop in each.crops]
        parts = crops.groups([line.shape[1] for line in lines], self._rules.recognise_batch)

        def recognise(part: crops.Group) -> list[Line]:
            index, confidence = self._recognise(crops.pad_lines([lines[i] for i in part.members], part.width))
            return spell(index, confidence, self._characters, self._blank)

        texts = [[Line("", 0.0)] * (len(each.crops) if isinstance(each, Found) else 0) for each in found]
        for part, read in zip(parts, self._attempts(recognise, parts), strict=True):
            for row, member in enumerate(part.members):
                page, line = owners[member]
                if isinstance(read, InferError):
                    found[page] = read
                else:
                    texts[page][line] = read[row]
        return texts

    def _page_text(self, page: Pixels, found: Found, texts: Sequence[Line]) -> PageText:
        kept = tuple(
            ReadLine(line.text, line.score, corners)
            for line, corners in zip(texts, found.corners, strict=True)
            if line.text.strip() and line.score >= self._rules.min_score
        )
        return PageText(page.shape[0], page.shape[1], kept)

    def _attempts(self, call: Callable[[T], R], parts: Sequence[T]) -> Iterator[R | InferError]:
        def attempt(part: T) -> R | InferError:
            try:
                return call(part)
            except InferError as error:
                return error

        return map(attempt, parts) if len(parts) < 2 else self._pool.map(attempt, parts)
