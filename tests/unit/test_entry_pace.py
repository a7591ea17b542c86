"""The entry's estimates: capacity by Little's law, its memory, and the wait of a new request."""

from __future__ import annotations

import pytest

from tritonpilot.entry.pace import LEAST_PART, SLICE_S, Pace, Turn


def worked(rate: float, in_flight: int = 32, until_s: float = 2.0, turns: int = 1) -> Pace:
    """A model that answered a row every 1/rate seconds out of a full window."""
    pace = Pace(0.0, [Turn() for _ in range(turns)])
    for number in range(1, int(until_s * rate) + 1):
        pace.finished(number / rate, 1, in_flight / rate, in_flight)
    return pace


def test_capacity_is_the_rows_in_flight_over_the_seconds_that_they_take() -> None:
    pace = worked(800)
    assert pace.rate_rows_per_s == pytest.approx(800)
    assert pace.seconds == pytest.approx(32 / 800)


def test_rows_that_leave_a_batch_together_do_not_distort_the_estimate() -> None:
    pace = Pace(0.0, [Turn()])
    for batch in range(1, 100):
        for _ in range(16):
            pace.finished(batch * 0.02, 1, 0.04, 32)
    assert pace.rate_rows_per_s == pytest.approx(800)


def test_requests_of_a_window_that_was_not_full_say_nothing() -> None:
    pace = worked(800)
    for number in range(1, 1000):
        pace.finished(2 + number / 10, 1, 0.001, 0)
    assert pace.rate_rows_per_s == pytest.approx(800)


def test_after_a_pause_the_first_requests_count_alone() -> None:
    pace = worked(800)
    pace.finished(1000.0, 1, 0.4, 32)
    assert pace.rate_rows_per_s == pytest.approx(80)


def test_a_slow_model_is_judged_by_several_of_its_requests() -> None:
    pace = Pace(0.0, [Turn()])
    for number in range(1, 20):
        pace.finished(number * 5.0, 1, 10.0 if number % 2 else 8.0, 2)
    assert pace.rate_rows_per_s == pytest.approx(2 / 9, rel=0.05)


def test_nothing_is_predicted_before_the_first_estimate() -> None:
    pace = Pace(0.0, [Turn()])
    assert pace.wait_s(0.0, turn=0, in_flight=32, above=100, own=100) == 0.0


def test_the_wait_is_the_work_ahead_over_the_rate() -> None:
    pace = worked(800)
    assert pace.wait_s(2.0, turn=0, in_flight=32, above=0, own=40) == pytest.approx(0.09)
    assert pace.wait_s(2.0, turn=0, in_flight=32, above=0, own=40, floors=0.5) == pytest.approx(0.14)


def test_a_class_below_waits_for_what_the_classes_above_take_in_the_meantime() -> None:
    pace = worked(800, turns=2)
    high, low = pace.turns
    for number in range(1, 100):
        high.started_rows = 24
        low.started_rows = 8
        pace.finished(2.0 + number * 0.04, 1, 0.04, 32)
    now = pace.progress_s

    assert pace.wait_s(now, turn=1, in_flight=0, above=0, own=200) == pytest.approx(200 / (0.25 * 800), rel=0.01)
    assert pace.wait_s(now, turn=0, in_flight=0, above=0, own=200) == pytest.approx(200 / 800, rel=0.01)
    # a share and a longest wait bound it, whatever waits above
    assert pace.wait_s(now, turn=1, in_flight=0, above=8000, own=200, share=0.5) == pytest.approx(0.5, rel=0.01)
    assert pace.wait_s(now, turn=1, in_flight=0, above=8000, own=40, max_wait_s=0.3) == pytest.approx(0.4, rel=0.01)


def test_a_class_that_gets_nothing_has_a_long_but_finite_wait() -> None:
    pace = worked(800, turns=2)
    for number in range(1, 100):
        pace.turns[0].started_rows = 32
        pace.finished(2.0 + number * 0.04, 1, 0.04, 32)
    wait_s = pace.wait_s(pace.progress_s, turn=1, in_flight=0, above=0, own=8)
    assert wait_s == pytest.approx(8 / (800 * LEAST_PART))


def test_silence_lowers_the_rate() -> None:
    pace = worked(800)
    now = pace.progress_s
    assert pace.wait_s(now + 0.04, turn=0, in_flight=0, above=0, own=80) == pytest.approx(0.1)
    assert pace.wait_s(now + 0.4, turn=0, in_flight=0, above=0, own=80) == pytest.approx(1.0)


def test_estimates_are_folded_no_more_often_than_a_slice() -> None:
    pace = Pace(0.0, [Turn()])
    pace.finished(SLICE_S / 2, 1, 0.04, 32)
    assert pace.rate_rows_per_s == 0.0
    pace.finished(SLICE_S, 1, 0.04, 32)
    assert pace.rate_rows_per_s == pytest.approx(800)
