"""What came of a load: goodput, attainment, errors by kind, and second by second."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from rich.console import Console

from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.outcome import REJECTED, TIMED_OUT, Outcome, summarise

STREAMS = (Stream("app", 2, slo_ms=100), Stream("night", 1))


@pytest.fixture
def outcome() -> Outcome:
    """Six requests in 3 s: app within, app late, app rejected, app timed out, night 2 s late, night within."""
    traffic = Traffic(
        at_s=np.array([0.1, 0.2, 0.3, 1.1, 1.2, 2.5]),
        rows=np.array([1, 2, 4, 8, 16, 32], dtype=np.int32),
        stream=np.array([0, 0, 0, 0, 1, 1], dtype=np.int16),
        seconds=3.0,
    )
    latency_us = np.array([50e3, 150e3, math.nan, 90e3, 2000e3, 10e3])
    error = np.array([0, 0, 1, 2, 0, 0], dtype=np.int16)
    return summarise(traffic, STREAMS, latency_us=latency_us, error=error, kinds=(REJECTED, TIMED_OUT))


def test_goodput_counts_answers_within_the_promise_of_their_stream(outcome: Outcome) -> None:
    assert (outcome.requests, outcome.answered, outcome.within_slo) == (6, 4, 3)
    assert outcome.goodput_per_s == pytest.approx(3 / 3.2)
    assert outcome.by_stream["app"].goodput_per_s == pytest.approx(1 / 3)
    assert outcome.attainment == 0.5
    assert outcome.by_stream["app"].attainment == 0.25
    assert outcome.by_stream["night"].attainment == 1.0  # it has no promise to break


def test_throughput_counts_up_to_the_last_answer(outcome: Outcome) -> None:
    assert outcome.last_answer_s == pytest.approx(3.2)
    assert outcome.throughput_per_s == pytest.approx(4 / 3.2)
    assert outcome.rows == 1 + 2 + 16 + 32
    assert outcome.by_stream["app"].throughput_per_s == pytest.approx(2 / 3)


def test_goodput_is_never_more_than_the_throughput() -> None:
    at_s = np.arange(1000) / 1000  # 1000 requests in a second, answered at 100 a second, all of them in time
    traffic = Traffic(at_s, np.ones(1000, np.int32), np.zeros(1000, np.int16), 1.0)
    latency_us = (np.arange(1, 1001) / 100 - at_s) * 1e6
    found = summarise(
        traffic, [Stream("app", 1000, slo_ms=60_000)], latency_us=latency_us, error=np.zeros(1000, np.int16), kinds=()
    )
    assert found.attainment == 1.0
    assert found.goodput_per_s == found.throughput_per_s == pytest.approx(100)


def test_errors_are_counted_by_kind_and_their_times_are_no_latencies(outcome: Outcome) -> None:
    assert outcome.errors == {REJECTED: 1, TIMED_OUT: 1}
    assert outcome.by_stream["night"].errors == {}
    assert outcome.by_stream["app"].p_ms(1.0) == 150.0
    assert outcome.by_stream["app"].p_ms(0.5) == 50.0


def test_the_series_says_what_was_offered_and_what_was_answered_when(outcome: Outcome) -> None:
    assert [second.offered for second in outcome.series] == [3, 2, 1, 0]
    assert [second.answered for second in outcome.series] == [2, 0, 1, 1]
    assert [second.errors for second in outcome.series] == [1, 1, 0, 0]
    assert [second.within_slo for second in outcome.series] == [1, 1, 1, 0]
    assert outcome.series[1].p99_ms == 2000.0
    assert math.isnan(outcome.series[3].p99_ms)


def test_the_result_is_json_also_without_answers() -> None:
    traffic = Traffic(np.array([0.0]), np.array([1], np.int32), np.array([0], np.int16), 1.0)
    found = summarise(
        traffic, STREAMS, latency_us=np.array([math.nan]), error=np.array([1], np.int16), kinds=(REJECTED,)
    )
    said = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert (said["answered"], said["p99_ms"], said["streams"]["night"]["attainment"]) == (0, None, None)


def test_the_table_has_a_row_per_stream_and_one_for_all(outcome: Outcome) -> None:
    console = Console(width=200, record=True, file=None)
    with console.capture() as captured:
        console.print(outcome.table("title"))
    text = captured.get()
    assert "1 rejected, 1 timed_out" in text
    assert [name for name in ("app", "night", "all") if name in text] == ["app", "night", "all"]
