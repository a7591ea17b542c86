"""Histograms of latencies: three digits, exact ends, sums that lose nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tritonpilot.histogram import Histogram


def of(values: object) -> Histogram:
    found = Histogram()
    found.record(values)  # type: ignore[arg-type]
    return found


def test_quantiles_are_within_a_thousandth_of_the_sorted_values() -> None:
    values = np.random.default_rng(1).lognormal(8, 2, 20_000)
    found = of(values)
    ranked = np.sort(values)
    for share in (0.001, 0.1, 0.5, 0.9, 0.99, 0.999):
        assert found.quantile_us(share) == pytest.approx(ranked[int(np.ceil(share * len(values))) - 1], rel=1e-3)
    assert (found.quantile_us(0), found.quantile_us(1)) == (values.min(), values.max())
    assert found.mean_us == pytest.approx(values.mean(), rel=1e-12)


def test_a_merge_equals_recording_everything_in_one() -> None:
    values = np.random.default_rng(2).exponential(5000, 3000)
    both = of(values[:1000])
    both.merge(of(values[1000:]))
    assert both.as_dict()["buckets"] == of(values).as_dict()["buckets"]
    assert (both.count, both.min_us, both.max_us) == (3000, values.min(), values.max())


def test_a_file_gives_back_the_same_histogram() -> None:
    found = of([0.0, 0.4, 999.0, 1e6, 7.2e12])
    again = Histogram.of_dict(json.loads(json.dumps(found.as_dict())))
    assert again.as_dict() == found.as_dict()
    assert Histogram.of_dict(Histogram().as_dict()).count == 0


def test_of_two_values_the_half_is_the_smaller_and_all_the_larger() -> None:
    found = of([1000.0, 3000.0])
    assert (found.quantile_us(0.5), found.quantile_us(0.51)) == (1000.0, 3000.0)
    assert of([1234.5]).quantile_us(0.5) == 1234.5
    assert np.isnan(Histogram().quantile_us(0.5))


def test_the_share_within_a_limit_counts_up_to_it() -> None:
    found = of(np.arange(1, 1001) * 1000.0)
    assert found.share_within(250_000) == pytest.approx(0.25, abs=0.001)
    assert (found.share_within(0), found.share_within(2e6)) == (0.0, 1.0)


@pytest.mark.parametrize("bad", [[-1.0], [float("nan")], [1.0, float("inf")]])
def test_what_is_no_latency_is_refused_and_nothing_counted(bad: list[float]) -> None:
    found = of([5.0])
    with pytest.raises(ValueError, match="finite values from 0 on"):
        found.record(bad)
    assert found.count == 1


@pytest.mark.parametrize(
    "change",
    [
        {"form": "other"},
        {"count": 3},
        {"buckets": [[10**9, 2]]},
        {"buckets": [[0, -1], [1, 3]]},
        {"buckets": "none"},
        {"sum_us": None},
    ],
)
def test_a_damaged_file_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- one of several messages
        Histogram.of_dict({**of([1.0, 2.0]).as_dict(), **change})
