"""Who calls when: rates, bursts, recordings, sizes, and the same again for the same seed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tritonpilot import arrivals
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.errors import SpecError


@pytest.mark.parametrize(
    ("stream", "requests"),
    [
        (Stream("a", 60, "constant"), "600"),
        (Stream("a", 60), "600"),
        (Stream("a", 1, "burst", peak_per_s=296, every_s=5, for_s=1), "600"),
        (Stream("a", 70, "recorded"), "700"),
        (Stream("a", 0, "recorded"), "2,500"),
    ],
)
def test_more_requests_than_a_load_may_have_are_refused_before_they_are_made(
    tmp_path: Path, stream: Stream, requests: str
) -> None:
    path = recording(tmp_path, "0\n0.004\n")  # one every 4 ms
    first = Stream("first", 10, "constant")
    stream = replace(stream, recording=path) if stream.arrivals == "recorded" else stream
    with pytest.raises(SpecError, match=f"Stream a would be {requests} requests within 10 s, .* room for 499"):
        traffic([first, stream], 10, seed=1, most=599)
    with pytest.raises(SpecError, match="864,000,000,000 requests"):
        traffic([Stream("a", 1e7)], 86400, seed=1)


def test_the_name_of_the_sum_is_no_stream_beside_others() -> None:
    with pytest.raises(SpecError, match="named all"):
        traffic([Stream("a", 1), Stream("all", 1)], 1, seed=1)
    assert len(traffic([Stream("all", 5, "constant")], 1, seed=1)) == 5


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


def test_a_time_that_ends_within_a_burst_has_that_part_of_it() -> None:
    at_s = arrivals.burst(0, 1000, every_s=10, for_s=2, seconds=19, random=random())
    assert len(at_s) == pytest.approx(3000, rel=0.06)
    assert (at_s >= 18).sum() == pytest.approx(1000, rel=0.1)
    assert at_s[-1] < 19


def test_a_replica_gets_its_part_of_every_stream(tmp_path: Path) -> None:
    seen = recording(tmp_path, "at_s,rows\n0,1\n0.001,2\n0.003,3\n")
    streams = [
        Stream("poisson", 1000),
        Stream("constant", 3000, "constant"),
        Stream("bursts", 0, "burst", peak_per_s=10_000, every_s=10, for_s=2),
        Stream("seen", 4000, "recorded", recording=seen),
    ]
    part = traffic(streams, 20, 1, replicas=4)
    assert np.bincount(part.stream) == pytest.approx(np.array([5_000, 15_000, 10_000, 20_000]), rel=0.05)
    at_s = part.at_s[part.stream == 1] * 3000
    np.testing.assert_allclose(at_s, np.round(at_s), atol=1e-6)  # moments of the whole stream
    assert np.diff(at_s).mean() == pytest.approx(4, rel=0.03)
    assert (part.at_s[part.stream == 2] % 10 >= 8).all()
    assert np.bincount(part.rows[part.stream == 3])[1:] == pytest.approx(np.full(3, 6667), rel=0.05)


def test_what_a_load_has_room_for_is_counted_for_one_replica_and_over_its_bursts(tmp_path: Path) -> None:
    tiny = recording(tmp_path, "0\n1e-12\n")
    with pytest.raises(SpecError, match="a load has room for 100,000,000"):
        traffic([Stream("a", 0, "recorded", recording=tiny)], 60, seed=0)
    with pytest.raises(SpecError, match="would be 60,000,000 requests within 60 s, .* room for 20,000,000"):
        traffic([Stream("a", 1e9)], 60, seed=0, replicas=1000, most=20_000_000)
    assert len(traffic([Stream("a", 1e9, "constant")], 60, seed=0, replicas=10**7)) == pytest.approx(6000, rel=0.1)
    rare = Stream("a", 0, "burst", peak_per_s=1e6, every_s=600, for_s=0.01)
    assert len(traffic([rare], 600, seed=0)) == pytest.approx(10_000, rel=0.05)


def test_requests_larger_than_the_largest_batch_are_refused() -> None:
    arrivals.check_sizes([Stream("a", 1, rows=256)], 256)
    for rows in (300, {1: 1.0, 300: 0.1}):
        with pytest.raises(SpecError, match="have up to 300 rows, and the model's max_batch_size is 256"):
            arrivals.check_sizes([Stream("a", 1, rows=rows)], 256)


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
