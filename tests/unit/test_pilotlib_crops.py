"""pilotlib.crops: what the detector and the recogniser see."""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from pilotlib.crops import (
    NARROWEST,
    PADDING,
    Pixels,
    bucket_width,
    cut_line,
    detector_size,
    groups,
    pad_lines,
    shrink_to,
)


@pytest.mark.parametrize(
    ("page", "limit", "size"),
    [
        ((191, 384), 960, (192, 384)),  # small pages keep their size, but for the stride
        ((1180, 900), 960, (960, 736)),
        ((854, 1280), 960, (640, 960)),
        ((10, 4000), 960, (32, 960)),  # never less than the stride
        ((4, 4), 960, (32, 32)),
        ((1000, 1000), 1000, (992, 992)),  # never more than the limit
        ((959, 100), 960, (960, 96)),
    ],
)
def test_detector_size_is_a_multiple_of_32_within_the_limit(
    page: tuple[int, int], limit: int, size: tuple[int, int]
) -> None:
    assert detector_size(*page, side_limit=limit) == size


def test_shrinking_averages_pixels_and_keeps_a_page_that_fits() -> None:
    page = np.zeros((64, 64, 3), np.uint8)
    page[::2] = 200
    assert shrink_to(page, (64, 64)) is page
    assert np.unique(shrink_to(page, (32, 32))).tolist() == [100]


def ramp() -> Pixels:
    """A page on which red grows from left to right and green from top to bottom."""
    x, y = np.meshgrid(np.arange(200), np.arange(100))
    page: Pixels = np.stack([x, y, np.zeros_like(x)], axis=2).astype(np.uint8)
    return page


def box(left: float, top: float, right: float, bottom: float) -> npt.NDArray[np.float32]:
    return np.array([[left, top], [right, top], [right, bottom], [left, bottom]], np.float32)


def test_a_line_is_scaled_to_the_height_and_keeps_its_proportions() -> None:
    line = cut_line(ramp(), box(20, 30, 140, 50), height=48, max_width=3200)
    assert line.shape == (48, 288, 3)
    assert line[24, 10, 0] < 30
    assert line[24, 280, 0] > 130
    assert (line[:, :, 2] == 0).all()


def test_a_tilted_line_becomes_straight() -> None:
    page = np.full((200, 300, 3), 255, np.uint8)
    corners = cv2.boxPoints(((150, 100), (160, 30), 20))
    cv2.fillPoly(page, [corners.astype(np.int32)], (0, 0, 0))
    upright = np.array([corners[i] for i in (1, 2, 3, 0)], np.float32)
    line = cut_line(page, upright, height=48, max_width=3200)
    assert line.shape[1] == pytest.approx(256, abs=2)
    assert line.mean() < 25


def test_a_tall_line_is_turned_so_that_its_top_comes_to_the_left() -> None:
    # Text that runs downwards, as on the spine of an English book.
    page = np.zeros((200, 100, 3), np.uint8)
    page[:100] = 255
    line = cut_line(page, box(40, 20, 60, 180), height=48, max_width=3200)
    assert line.shape == (48, 384, 3)
    assert line[:, :180].mean() > 250
    assert line[:, 200:].mean() < 5


def test_large_lines_are_averaged_and_long_ones_are_squeezed() -> None:
    page = np.zeros((400, 400, 3), np.uint8)
    page[:, ::2] = 255
    line = cut_line(page, box(0, 0, 400, 380), height=48, max_width=3200)
    assert line.std() < 30  # single columns of pixels would be 0 or 255
    assert cut_line(page, box(0, 0, 400, 10), height=48, max_width=320).shape == (48, 320, 3)


def test_boxes_beyond_the_page_and_without_an_area_give_pixels() -> None:
    assert cut_line(ramp(), box(-50, -20, 300, 10), height=48, max_width=3200).shape[0] == 48
    assert cut_line(ramp(), box(10, 10, 10, 10), height=48, max_width=3200).shape == (48, 48, 3)


def test_a_line_waits_for_lines_of_its_own_width_only() -> None:
    widths = [95, 400, 97, 96, 350, 3200, 12]
    found = groups(widths, most=8)
    assert [group.members for group in found] == [(6, 0, 3), (2,), (4,), (1,), (5,)]
    for group in found:
        for member in group.members:
            assert group.width == bucket_width(widths[member])  # whoever else is in the group


def test_groups_hold_each_line_once_and_at_most_so_many() -> None:
    widths = np.random.default_rng(2).integers(1, 3201, 500).tolist()
    found = groups(widths, most=8)
    assert sorted(member for group in found for member in group.members) == list(range(500))
    assert max(len(group.members) for group in found) == 8
    assert [group.width for group in found] == sorted(group.width for group in found)
    assert groups([], most=8) == []


def test_a_bucket_holds_its_line_and_little_more() -> None:
    for width in range(1, 3300):
        bucket = bucket_width(width)
        assert bucket >= width
        assert bucket % 32 == 0
        assert bucket == NARROWEST or bucket - width <= max(32, 0.2 * width)


def test_lines_are_padded_on_the_right() -> None:
    padded = pad_lines([np.zeros((48, 10, 3), np.uint8), np.full((48, 20, 3), 255, np.uint8)], 32)
    assert padded.shape == (2, 48, 32, 3)
    assert (padded[0, :, :10] == 0).all()
    assert (padded[0, :, 10:] == PADDING).all()
    assert (padded[1, :, :20] == 255).all()
