"""Which pixels does a text detector see of a page, and which does a recogniser see of a line?

    seen = shrink_to(page, detector_size(*page.shape[:2], side_limit=960))        # UINT8[h,w,3], sides multiples of 32
    line = cut_line(page, corners, height=48, max_width=3200)                     # UINT8[48,w,3], upright
    for group in groups([line.shape[1] for line in lines], most=8):                       # lines of similar width
        pad_lines([lines[i] for i in group.members], group.width)                 # UINT8[n,48,group.width,3]

A line is padded to the next width of `bucket_width`, which depends on its own width alone: so what is read in it does not
depend on the lines of other callers that it is recognised together with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

STRIDE = 32  # the detector halves its input five times
UPRIGHT_RATIO = 1.5  # a box this much higher than wide holds a line turned by 90 degrees
PADDING = 128  # what normalisation turns into (nearly) zero, as in training
NARROWEST = 96
SHRINKS = 1.5  # from here on plain interpolation skips pixels


class Group(NamedTuple):
    """Lines to recognise together."""

    width: int
    members: tuple[int, ...]


def detector_size(height: int, width: int, side_limit: int) -> tuple[int, int]:
    """(height, width) for the detector: at most `side_limit` on the longer side, both multiples of 32, never enlarged more
    than that takes."""
    ratio = min(1.0, side_limit / max(height, width))
    most = max(STRIDE, side_limit // STRIDE * STRIDE)
    fitted = (min(most, max(STRIDE, round(side * ratio / STRIDE) * STRIDE)) for side in (height, width))
    return (next(fitted), next(fitted))


def shrink_to(page: Pixels, size: tuple[int, int]) -> Pixels:
    """A page UINT8[h,w,3] at `size` (height, width)."""
    height, width = page.shape[:2]
    if (height, width) == size:
        return page
    by_area = height > SHRINKS * size[0] or width > SHRINKS * size[1]
    resized = cv2.resize(page, (size[1], size[0]), interpolation=cv2.INTER_AREA if by_area else cv2.INTER_LINEAR)
    return resized.astype(np.uint8, copy=False)


def cut_line(page: Pixels, corners: npt.NDArray[np.float32], height: int, max_width: int) -> Pixels:
    """The line inside a box FP32[4,2] (top left, top right, bottom right, bottom left), upright, `height` pixels high.

    Its width follows from the box, at most `max_width`; what is beyond is squeezed. Outside of the page its edge is repeated.
    """
    top, right, bottom, left = np.linalg.norm(np.roll(corners, -1, axis=0) - corners, axis=1).tolist()
    across, down = max(top, bottom, 1.0), max(left, right, 1.0)
    if down >= UPRIGHT_RATIO * across:
        corners = np.roll(corners, -1, axis=0)  # turned a quarter anticlockwise: the right edge becomes the top
        across, down = down, across
    width = min(max_width, max(1, round(height * across / down)))
    if down <= SHRINKS * height:
        return _warped(page, corners, height, width)
    native = _warped(page, corners, round(down), round(across))
    return cv2.resize(native, (width, height), interpolation=cv2.INTER_AREA).astype(np.uint8, copy=False)


def bucket_width(width: int) -> int:
    """The width that a line of `width` pixels is padded to: the next of 96, 128, 160 ... 320, 384, 448, 512, 608 ...: multiples of
    32, each at most a fifth wider than the one before (or 32), so a tenth of all pixels is padding and many lines share a width."""
    bucket = NARROWEST
    while bucket < width:
        bucket = (bucket + max(STRIDE, bucket // 5)) // STRIDE * STRIDE
    return bucket


def groups(widths: Sequence[int], most: int) -> list[Group]:
    """Lines of equal bucket together, at most `most` in a group, narrow ones first."""
    members: dict[int, list[int]] = {}
    for line in sorted(range(len(widths)), key=widths.__getitem__):
        members.setdefault(bucket_width(widths[line]), []).append(line)
    return [
        Group(width, tuple(lines[start : start + most]))
        for width, lines in members.items()
        for start in range(0, len(lines), most)
    ]


def pad_lines(lines: Sequence[Pixels], width: int) -> Pixels:
    """Lines UINT8[height,<=width,3] of one height -> UINT8[n,height,width,3], padded on the right."""
    padded = np.full((len(lines), lines[0].shape[0], width, 3), PADDING, np.uint8)
    for row, line in zip(padded, lines, strict=True):
        row[:, : line.shape[1]] = line
    return padded


def _warped(page: Pixels, corners: npt.NDArray[np.float32], height: int, width: int) -> Pixels:
    target = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    transform = cv2.getPerspectiveTransform(np.ascontiguousarray(corners, np.float32), target)
    line = cv2.warpPerspective(page, transform, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    return line.astype(np.uint8, copy=False)
