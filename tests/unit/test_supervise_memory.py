"""A leak has a slope, a peak and a first growth have none."""

from __future__ import annotations

import pytest

from tritonpilot.supervise.memory import EVERY_S, WINDOW_S, Series

MB = 1 << 20


def series(sizes: list[float]) -> Series:
    found = Series()
    for number, size in enumerate(sizes):
        found.add(number * EVERY_S, int(size))
    return found


def test_a_leak_is_told_in_bytes_an_hour_though_single_readings_are_off() -> None:
    sizes = [100 * MB + number * MB for number in range(180)]
    sizes[17] = sizes[90] = 4000 * MB

    assert series(sizes).per_hour == pytest.approx(360 * MB, rel=0.02)


def test_what_grows_once_and_stays_is_no_leak() -> None:
    assert series([100 * MB] * 70 + [400 * MB] * 110).per_hour == 0


def test_ten_minutes_are_too_short_to_tell() -> None:
    assert series([number * MB for number in range(59)]).per_hour is None


def test_only_the_last_half_hour_counts() -> None:
    found = series([number * MB for number in range(180)] + [180 * MB] * 200)

    assert found.per_hour == 0
    assert len(found.points) == WINDOW_S / EVERY_S + 1
