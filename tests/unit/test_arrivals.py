"""Who calls when: rates, bursts, recordings, sizes, and the same again for the same seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tritonpilot import arrivals
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.errors import SpecError


def random() -> np.random.Generator:
    return np.random.default_rng(3)


def test_poisson_gaps_have_the_mean_and_the_spread_of_their_rate() -> None:
    gaps = np.diff(arrivals.poisson(1000, 50, random()))
    assert gaps.mean() == pytest.approx(1e-3, rel=0.02)
    assert gaps.std() == pytest.approx(1e-3, rel=0.03)


def test_constant_arrivals_are_equally_far_apart() -> None:
    np.testing.assert_allclose(arrivals.constant(4, 1), [0, 0.25, 0.5, 0.75])
    assert len(arrivals.constant(3, 2)) == 6


def test_bursts_end_every_period_and_have_their_own_rate() -> None:
    at_s = arrivals.burst(100, 1000, every_s=10, for_s=2, seconds=100, random=random())
    within = at_s % 10 >= 8
    assert within.sum() / 20 == pytest.approx(1000, rel=0.03)
    assert (~within).sum() / 80 == pytest.approx(100, rel=0.05)
    assert (np.diff(at_s) >= 0).all()


def test_a_stream_keeps_its_arrivals_when_another_is_added() -> None:
    first = Stream("a", 50, rows={1: 3, 8: 1})
    alone = traffic([first], 10, seed=7)
    both = traffic([first, Stream("b", 80)], 10, seed=7)
    np.testing.assert_array_equal(both.at_s[both.stream == 0], alone.at_s)
    np.testing.assert_array_equal(both.rows[both.stream == 0], alone.rows)
    assert (np.diff(both.at_s) >= 0).all()
    assert not np.array_equal(traffic([first], 10, seed=8).at_s[:5], alone.at_s[:5])


def test_sizes_come_in_the_proportion_of_their_weights() -> None:
    rows = traffic([Stream("a", 5000, rows={1: 3, 64: 1})], 4, seed=1).rows
    assert set(np.unique(rows)) == {1, 64}
    assert (rows == 64).mean() == pytest.approx(0.25, abs=0.01)


def recording(folder: Path, text: str) -> Path:
    path = folder / "arrivals.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_recording_keeps_its_shape_when_it_is_sped_up(tmp_path: Path) -> None:
    path = recording(tmp_path, "100\n104\n101\n110\n")  # 4 in 10 s and a mean gap after it
    np.testing.assert_allclose(arrivals.recorded(path, 12), [0, 1, 4, 10])
    fast = arrivals.recorded(path, 1000, rate_per_s=3.0)
    assert len(fast) == pytest.approx(3000, abs=4)
    np.testing.assert_allclose(fast[:4], np.array([0, 1, 4, 10]) * fast[1])
    np.testing.assert_allclose(np.diff(fast)[4:7], np.diff(fast)[:3])


def test_moments_and_sizes_of_a_recording_are_read(tmp_path: Path) -> None:
    path = recording(
        tmp_path,
        "user,timestamp,rows\nx,2019-11-24 00:00:01.500000+00:00,9\ny,2019-11-24 00:00:01+00:00,2\nz,2019-11-24T00:00:04Z,3\n",
    )
    stream = Stream("old", 0, "recorded", recording=path)
    found = traffic([stream], 4, seed=0)
    np.testing.assert_allclose(found.at_s, [0, 0.5, 3])
    assert found.rows.tolist() == [2, 9, 3]


@pytest.mark.parametrize("text", ["\ufeffat_s,rows\n1,2\n3,4\n", "\ufeff1,2\n3,4\n", "1,2,x\n3,4,y\n"])
def test_a_recording_of_a_spreadsheet_and_one_without_a_heading_are_read(tmp_path: Path, text: str) -> None:
    found = arrivals.read_recording(recording(tmp_path, text))
    assert found.rows is not None
    assert (found.at_s.tolist(), found.rows.tolist()) == ([0, 2], [2, 4])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1\n", "fewer than two"),
        ("", "fewer than two"),
        ("5\n5\n", "fewer than two"),
        ("at_s\n1\nsoon\n", "arrivals.csv:3: 'soon' is no arrival"),
        ("1\n2\nnan\n", "arrivals.csv:3"),
        ("at_s,rows\n1,2\n2,0\n", "0 rows"),
        ("at_s,rows\n1,2\n2\n", "arrivals.csv:3"),
        ("at_s\n\n1\n\n\nsoon\n", "arrivals.csv:6"),
        ("1,2,x\n2,many,y\n", "arrivals.csv:2"),
    ],
)
def test_a_bad_recording_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        arrivals.read_recording(recording(tmp_path, text))


def test_a_recording_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        arrivals.read_recording(tmp_path / "none.csv")


GOOD = Stream("app", 10)


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (replace(GOOD, rate_per_s=-1), "a rate of -1"),
        (replace(GOOD, rate_per_s=0), "has no rate"),
        (replace(GOOD, rate_per_s=float("inf")), "a rate of inf"),
        (replace(GOOD, rows=0), "no sizes"),
        (replace(GOOD, rows={}), "no sizes"),
        (replace(GOOD, rows={4: 0.0}), "weights"),
        (replace(GOOD, arrivals="burst", peak_per_s=5, every_s=1, for_s=2), "shorter than"),
        (replace(GOOD, arrivals="recorded"), "need a recording"),
        (replace(GOOD, recording=Path("x.csv")), "only arrivals recorded"),
        (replace(GOOD, slo_ms=0), "slo_ms"),
    ],
)
def test_a_stream_that_cannot_be_is_refused(stream: Stream, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        traffic([stream], 1, seed=0)


def test_a_load_needs_time_and_a_stream() -> None:
    with pytest.raises(SpecError, match="longer than 0 s"):
        traffic([GOOD], 0, seed=0)
    with pytest.raises(SpecError, match="at least one stream"):
        traffic([], 1, seed=0)
