"""Where are the lines of text, when a detector gives each pixel's probability of being inside one?

    found = find_boxes(probability, BoxRules(threshold=0.2))      # FP32[h,w] -> Boxes(corners FP32[n,4,2], scores FP32[n])
    corners = found.corners[reading_order(found.corners)]         # from the top, rows from the left

The detector is a differentiable binarisation network (DB, https://arxiv.org/abs/1911.08947): it marks shrunken lines, so a
box found in its map is grown again by area * unclip_ratio / perimeter on each side. Corners are x, y in pixels of the
map: top left, top right, bottom right, bottom left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class BoxRules:
    """What counts as a line of text. The defaults suit PP-OCR's small detectors."""

    threshold: float = 0.2
    """Probability from which a pixel belongs to a line."""
    box_threshold: float = 0.4
    """Least mean probability inside a box."""
    unclip_ratio: float = 1.4
    min_side: float = 3.0
    """Least height of a box before it is grown, in pixels of the map."""


class Boxes(NamedTuple):
    """Rotated rectangles, in no particular order."""

    corners: Floats
    """FP32[n,4,2]"""
    scores: Floats
    """FP32[n]: mean probability inside each before it was grown"""


def find_boxes(probability: Floats, rules: BoxRules = BoxRules()) -> Boxes:
    """Rotated rectangles around what the map marks: FP32[h,w] -> Boxes. A map that marks nothing gives none."""
    marked = (probability > rules.threshold).view(np.uint8)
    contours, _ = cv2.findContours(marked, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    corners, scores = [], []
    for contour in contours:
        center, (width, height), angle = cv2.minAreaRect(contour)
        if min(width, height) < rules.min_side:
            continue
        rectangle = cv2.boxPoints((center, (width, height), angle)).astype(np.float32, copy=False)
        score = _mean_inside(probability, rectangle)
        if not score >= rules.box_threshold:  # so that NaN is dropped too
            continue
        # A rectangle's offset by d has sides longer by 2 d: no polygon clipping is needed.
        grown = width * height * rules.unclip_ratio / (width + height)
        corners.append(cv2.boxPoints((center, (width + grown, height + grown), angle)))
        scores.append(score)
    if not corners:
        return Boxes(np.empty((0, 4, 2), np.float32), np.empty(0, np.float32))
    return Boxes(order_corners(np.stack(corners)), np.array(scores, np.float32))


def order_corners(rectangles: Floats) -> Floats:
    """Top left, top right, bottom right, bottom left: FP32[n,4,2] with corners in any order -> the same, in this one.

    Of the two corners furthest left the upper one is the top left, as PaddleOCR has it.
    """
    by_x = np.take_along_axis(rectangles, np.argsort(rectangles[:, :, :1], axis=1, kind="stable"), axis=1)
    left, right = by_x[:, :2], by_x[:, 2:]
    left = np.take_along_axis(left, np.argsort(left[:, :, 1:], axis=1, kind="stable"), axis=1)
    right = np.take_along_axis(right, np.argsort(right[:, :, 1:], axis=1, kind="stable"), axis=1)
    return np.stack([left[:, 0], right[:, 0], right[:, 1], left[:, 1]], axis=1)


def reading_order(corners: Floats) -> npt.NDArray[np.intp]:
    """Indices of boxes FP32[n,4,2] as one reads a page of one column: rows from the top, each from the left.

    A box is in the row above it when their middles are closer than half of the smaller height. The second
    column of a page with columns is read into the first one's rows.
    """
    middle_x, middle_y = corners[:, :, 0].mean(axis=1), corners[:, :, 1].mean(axis=1)
    heights = np.linalg.norm(corners[:, 3] - corners[:, 0], axis=1)
    rows = np.zeros(len(corners), np.intp)
    row, first = -1, -1
    by_y = np.argsort(middle_y, kind="stable")
    for box in by_y:
        if first < 0 or middle_y[box] - middle_y[first] > 0.5 * min(heights[box], heights[first]):
            row, first = row + 1, box
        rows[box] = row
    order: npt.NDArray[np.intp] = np.lexsort((middle_x, rows))
    return order


def _mean_inside(probability: Floats, rectangle: Floats) -> float:
    """Mean of the map inside a rotated rectangle; only the part around it is looked at."""
    height, width = probability.shape
    left, top = np.clip(np.floor(rectangle.min(axis=0)), 0, (width - 1, height - 1)).astype(int)
    right, bottom = np.clip(np.ceil(rectangle.max(axis=0)), 0, (width - 1, height - 1)).astype(int)
    inside = np.zeros((bottom - top + 1, right - left + 1), np.uint8)
    outline = (rectangle - np.array([left, top], np.float32)).astype(np.int32)
    cv2.fillPoly(inside, [outline], (1.0,))
    return float(cv2.mean(probability[top : bottom + 1, left : right + 1], inside)[0])
