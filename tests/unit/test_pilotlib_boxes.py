"""pilotlib.boxes and the backend boxes: from a map to lines of text in reading order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from pilotlib import testkit
from pilotlib.boxes import BoxRules, find_boxes, order_corners, reading_order
from pilotlib.testkit import Case, check, check_mates, in_process

BACKEND = Path(__file__).parents[2] / "python_backend" / "boxes" / "model.py"


def marked(*rectangles: tuple[float, float, float, float, float], value: float = 0.9) -> npt.NDArray[np.float32]:
    """A map of 200 x 300 with rotated rectangles: (middle x, middle y, width, height, degrees)."""
    found = np.zeros((200, 300), np.float32)
    for x, y, width, height, degrees in rectangles:
        outline = cv2.boxPoints(((x, y), (width, height), degrees)).astype(np.int32)
        cv2.fillPoly(found, [outline], (value,))
    return found


def sides(corners: npt.NDArray[np.float32]) -> tuple[float, float]:
    return float(np.linalg.norm(corners[1] - corners[0])), float(np.linalg.norm(corners[3] - corners[0]))


def test_a_blank_map_has_no_boxes() -> None:
    found = find_boxes(np.zeros((64, 96), np.float32))
    assert found.corners.shape == (0, 4, 2)
    assert found.scores.shape == (0,)
    assert reading_order(found.corners).tolist() == []


def test_a_box_is_grown_by_area_times_ratio_over_perimeter_on_each_side() -> None:
    found = find_boxes(marked((150, 100, 100, 20, 0)), BoxRules(unclip_ratio=1.5))
    (corners,) = found.corners
    grown = 2 * (100 * 20 * 1.5) / (2 * (100 + 20))
    assert sides(corners) == pytest.approx((100 + grown, 20 + grown), abs=1.5)
    assert corners.mean(axis=0) == pytest.approx([150, 100], abs=1)
    assert found.scores == pytest.approx([0.9], abs=0.02)


@pytest.mark.parametrize("degrees", [-30, -7, 0, 3, 25])
def test_corners_start_at_the_top_left_and_go_clockwise(degrees: float) -> None:
    (corners,) = find_boxes(marked((150, 100, 120, 24, degrees)), BoxRules(unclip_ratio=0)).corners
    along = corners[1] - corners[0]
    assert math.degrees(math.atan2(along[1], along[0])) == pytest.approx(degrees, abs=2)
    assert np.cross(along, corners[3] - corners[0]) > 0
    assert sides(corners) == pytest.approx((120, 24), abs=2.5)


def test_order_of_corners_does_not_depend_on_where_they_started() -> None:
    box = np.array([[10, 20], [60, 22], [59, 40], [9, 38]], np.float32)
    turned = np.stack([np.roll(box, shift, axis=0) for shift in range(4)] + [box[::-1]])
    np.testing.assert_array_equal(order_corners(turned), np.stack([box] * 5))


def test_faint_small_and_unreadable_marks_are_dropped() -> None:
    assert len(find_boxes(marked((150, 100, 80, 20, 0), value=0.3)).scores) == 0  # above threshold, below box_threshold
    assert len(find_boxes(marked((150, 100, 80, 1, 0))).scores) == 0
    unknown = marked((150, 100, 80, 20, 0))
    unknown[95:105] = np.nan
    assert len(find_boxes(unknown).scores) <= 2


def test_boxes_at_the_edge_of_the_map_are_found() -> None:
    assert len(find_boxes(marked((0, 0, 100, 30, 0), (299, 199, 100, 30, 0))).scores) == 2
    assert len(find_boxes(np.ones((32, 32), np.float32)).scores) == 1


def test_reading_order_goes_by_rows_even_when_they_are_slightly_tilted() -> None:
    # Two rows of three words, each word 2 pixels higher than the one left of it.
    words = [(50 + 90 * column, 60 + 40 * row - 2 * column, 70, 20, 0.0) for row in range(2) for column in range(3)]
    shuffled = [words[i] for i in (4, 0, 5, 2, 3, 1)]
    corners = np.stack([cv2.boxPoints(((x, y), (w, h), a)) for x, y, w, h, a in shuffled]).astype(np.float32)
    corners = order_corners(corners)
    assert reading_order(corners).tolist() == [1, 5, 3, 4, 0, 2]


def test_a_lower_line_that_starts_further_left_stays_below() -> None:
    corners = order_corners(
        np.stack([cv2.boxPoints(((200, 50), (100, 20), 0)), cv2.boxPoints(((60, 70), (100, 20), 0))]).astype(np.float32)
    )
    assert reading_order(corners).tolist() == [0, 1]


# -- the backend -------------------------------------------------------------------------------------------------------


def config(most: int = 3, max_batch_size: int = 8, **parameters: Any) -> dict[str, Any]:
    return testkit.config(
        inputs=[{"name": "probability", "data_type": "FP32", "dims": [1, -1, -1]}],
        outputs=[
            {"name": "boxes", "data_type": "FP32", "dims": [most, 4, 2]},
            {"name": "scores", "data_type": "FP32", "dims": [most]},
            {"name": "count", "data_type": "INT32", "dims": [1]},
        ],
        parameters={"max_boxes": most, **parameters},
        max_batch_size=max_batch_size,
    )


def counted(*counts: int) -> dict[str, npt.NDArray[Any]]:
    return {"count": np.array(counts, np.int32)[:, None]}


def test_backend_answers_rows_of_several_requests() -> None:
    one = marked((150, 100, 80, 20, 0))[None, None]
    two = marked((150, 50, 80, 20, 0), (150, 150, 80, 20, 0))[None, None]
    cases = [
        Case("a line", {"probability": one}, counted(1)),
        Case("rows", {"probability": np.concatenate([two, np.zeros_like(one), one])}, counted(2, 0, 1)),
        Case("another size", {"probability": one[:, :, :128, :256]}, counted(1)),
        Case("no pixels", {"probability": one[:, :, :0]}, error='"probability": shape [1, 1, 0, 300] holds no pixels'),
    ]
    with in_process(BACKEND, config()) as ask:
        for case in cases:
            check(ask, case)
        check_mates(ask, cases)
        answer = ask({"probability": two})
        assert (np.diff(answer["boxes"][0, :2, 0, 1]) > 0).all()  # from the top
        assert not answer["boxes"][0, 2:].any()


def test_backend_keeps_the_best_scored_boxes_and_works_without_batching() -> None:
    three = marked((150, 30, 80, 20, 0), (150, 170, 80, 20, 0))
    three += marked((150, 100, 80, 20, 0), value=0.5)
    with in_process(BACKEND, config(most=2, max_batch_size=0)) as ask:
        answer = ask({"probability": three[None]})
    assert answer["count"].tolist() == [2]
    assert answer["scores"] == pytest.approx([0.9, 0.9], abs=0.02)


def test_backend_refuses_a_config_of_another_size() -> None:
    with pytest.raises(ValueError, match="boxes"), in_process(BACKEND, config(most=3, max_boxes=4)):
        pass
