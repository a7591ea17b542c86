"""quantize/coverage.py: a set from one slice is refused by name, a chosen one passes, and the statistics are those of the books."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scipy import stats

from models.ctr import evaluation as ctr
from models.ctr.features import CATEGORICAL
from models.risk import evaluation as risk
from tritonpilot.errors import ModelError
from tritonpilot.quantize import coverage
from tritonpilot.quantize.coverage import CoverageReport, choose, report
from tritonpilot.quantize.data import Rows


@pytest.fixture(scope="module")
def clicks() -> Rows:
    return ctr.make()[0]


@pytest.fixture(scope="module")
def loans() -> Rows:
    return risk.make()[0]


def of_numbers(*columns: np.ndarray, **slices: np.ndarray) -> Rows:
    return Rows({"x": np.column_stack(columns).astype(np.float32)}, slices)


def draw(rows: int = 5000, seed: int = 3) -> Rows:
    random = np.random.default_rng(seed)
    return of_numbers(random.normal(size=rows), random.lognormal(size=rows), hour=random.integers(0, 24, rows))


def names(found: CoverageReport) -> list[str]:
    return [entry.name for entry in found.verdict()]


def only(pool: Rows, name: str, value: object) -> np.ndarray:
    """128 rows, well chosen from one slice."""
    of_slice = np.flatnonzero(pool.slices[name] == value)
    return of_slice[choose(pool.take(of_slice), min(128, len(of_slice)))]


@pytest.mark.parametrize("n", [100, 128, 200])
def test_chosen_rows_of_real_services_cover_every_feature(clicks: Rows, loans: Rows, n: int) -> None:
    for pool in (clicks, loans):
        chosen = choose(pool, n)
        assert len(set(chosen.tolist())) == n
        assert (np.diff(chosen) > 0).all()
        found = report(pool, chosen)
        assert found.verdict() == []
        found.ensure()
        figures = found.summary()
        assert (figures["rows"], figures["pool_rows"], figures["uncovered"]) == (n, pool.count, [])
        assert figures["least_inside"] >= 0.998
        assert figures["largest_psi"] < 0.05
        assert figures["largest_ks"] < 0.1


def test_a_random_draw_of_the_same_size_does_not(clicks: Rows) -> None:
    drawn = np.random.default_rng(1).permutation(clicks.count)[:128]
    found = report(clicks, drawn)
    assert "slice hour" in names(found)
    assert found.summary()["least_inside"] < 0.98


def test_one_hour_of_clicks_is_refused_and_the_uncovered_features_are_named(clicks: Rows) -> None:
    found = report(clicks, only(clicks, "hour", 21))
    reasons = {entry.name: entry.reason for entry in found.verdict()}
    assert "no row of 0, 1, 10, 11" in reasons["slice hour"]
    assert "and 15 more" in reasons["slice hour"]
    assert {"dense.hour_sin", "dense.hour_cos", "dense.global_click_rate"} <= set(reasons)
    assert "KS" in reasons["dense.hour_sin"]
    assert not {"dense.item_age", "dense.genres", "categorical.release_year", "categorical.genre_set"} & set(reasons)
    with pytest.raises(
        ModelError, match=r"128 calibration rows do not cover \d+ of 42.*9998 rows.*\n  slice hour: no row of 0, 1"
    ):
        found.ensure()


def test_one_group_of_users_is_refused_by_slice_and_by_embedding_index(clicks: Rows) -> None:
    reasons = {entry.name: entry.reason for entry in report(clicks, only(clicks, "user", "new")).verdict()}
    assert reasons["slice user"].startswith("no row of known; PSI")
    assert "PSI" in reasons["categorical.user"]
    column = clicks.inputs["categorical"][:, CATEGORICAL.index("user")]
    seldom = [str(index) for index in np.unique(column) if index and (column == index).mean() >= 0.01]
    assert reasons["categorical.user"].startswith(f"no row of {', '.join(seldom)};")


def test_one_state_of_loans_is_refused(loans: Rows) -> None:
    reasons = {entry.name: entry.reason for entry in report(loans, only(loans, "state", "CA")).verdict()}
    assert reasons["slice state"].startswith("no row of AK, AL, AR, AZ")
    assert reasons["categorical.addr_state"].startswith("no row of 0, 2, 4")
    assert not any(name.startswith("dense.") for name in reasons)


def test_the_same_pool_size_and_seed_give_the_same_rows() -> None:
    pool = draw()
    np.testing.assert_array_equal(choose(pool, 100, seed=5), choose(pool, 100, seed=5))
    assert choose(pool, 100, seed=5).tolist() != choose(pool, 100, seed=6).tolist()


def test_choosing_all_rows_is_the_pool_itself() -> None:
    pool = draw(150)
    chosen = choose(pool, 150)
    assert chosen.tolist() == list(range(150))
    for feature in report(pool, chosen).features:
        assert (feature.inside, feature.missing) == (1.0, ())
        assert feature.psi == pytest.approx(0, abs=1e-12)
        assert feature.ks in (None, 0.0)


def test_rare_slices_and_frequent_categories_get_a_row() -> None:
    random = np.random.default_rng(0)
    rows = 10_000
    group = np.where(np.arange(rows) % 500 == 7, "rare", "usual")  # 0.2 %
    category = random.choice(200, rows, p=np.r_[np.full(50, 0.0138), np.full(150, 0.31 / 150)])
    pool = Rows({"k": category[:, np.newaxis]}, {"group": group})
    chosen = choose(pool, 100)
    assert "rare" in group[chosen]
    assert set(range(50)) <= set(category[chosen].tolist())
    assert report(pool, chosen).verdict() == []
    without = np.flatnonzero((group == "usual") & (category != 17))[:2000]
    reasons = {entry.name: entry.reason for entry in report(pool, without).verdict()}
    assert reasons["slice group"] == "no row of rare"
    assert reasons["k"].startswith("no row of 17")


def test_both_ends_of_a_number_are_chosen() -> None:
    pool = of_numbers(np.random.default_rng(0).standard_cauchy(900))
    values = pool.inputs["x"][:, 0]
    chosen = values[choose(pool, 20)]
    assert (chosen.min(), chosen.max()) == (values.min(), values.max())  # 0.1 % of 900 is less than a row


def test_pairs_of_slices_are_covered_together() -> None:
    rows = 4000
    hour, group = np.arange(rows) % 2, np.arange(rows) // 2 % 2
    pool = of_numbers(np.zeros(rows), hour=hour, group=group)
    diagonal = np.flatnonzero(hour == group)[:100]  # every hour and every group, but not every pair
    (uncovered,) = report(pool, diagonal).verdict()
    assert uncovered.name == "slice hour with slice group"
    assert uncovered.reason == "no row of 0 with 1, 1 with 0"
    assert report(pool, choose(pool, 100)).verdict() == []


def test_fewer_rows_than_asked_say_both_numbers() -> None:
    with pytest.raises(ModelError, match=r"100 calibration rows are asked for, and there are 60"):
        choose(draw(60), 100)
    with pytest.raises(ValueError, match="not 0"):
        choose(draw(60), 0)
    with pytest.raises(ValueError, match="one or more"):
        report(draw(60), np.array([], np.int64))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_refused_with_input_and_row(value: float) -> None:
    pool = draw(300)
    pool.inputs["x"][41, 1] = value
    for attempt in (lambda: choose(pool, 100), lambda: report(draw(300), pool)):
        with pytest.raises(ModelError, match=r"x has NaN or infinite values in row 41.*1 of 300"):
            attempt()


def test_constant_features_are_covered_unless_the_set_has_another_value() -> None:
    rows = 500
    constant = np.full(rows, 2.5)
    pool = Rows(
        {
            "x": np.column_stack([constant, np.random.default_rng(0).normal(size=rows)]).astype(np.float32),
            "k": np.ones(rows, int),
        },
        {"country": np.array(["NZ"] * rows)},
    )
    chosen = choose(pool, 100)
    found = report(pool, chosen)
    assert found.verdict() == []
    feature = next(feature for feature in found.features if feature.name == "x[0]")
    assert (feature.inside, feature.ks) == (1.0, 0.0)
    assert feature.psi == pytest.approx(0)
    elsewhere = pool.take(chosen)
    elsewhere.inputs["x"][:, 0] = 3
    assert names(report(pool, elsewhere)) == ["x[0]"]


def test_rows_from_elsewhere_are_measured_by_the_bins_of_the_pool() -> None:
    pool = draw()
    assert report(pool, pool.take(choose(pool, 128))) == report(pool, choose(pool, 128))
    shifted = pool.take(choose(pool, 128))
    shifted.inputs["x"][:, 0] += 1
    reasons = {entry.name: entry.reason for entry in report(pool, shifted).verdict()}
    assert list(reasons) == ["x[0]"]
    assert "PSI 1." in reasons["x[0]"]
    assert "KS 0.3" in reasons["x[0]"]  # a shift by one standard deviation: 2 Phi(1/2) - 1 = 0.38


def test_rows_from_elsewhere_that_do_not_tell_a_slice_or_lack_an_input() -> None:
    pool = draw()
    chosen = pool.take(choose(pool, 128))
    assert names(report(pool, Rows(chosen.inputs))) == ["slice hour"]
    with pytest.raises(ModelError, match=r"lack k, which"):
        report(Rows({**pool.inputs, "k": np.ones(pool.count, int)}), chosen)


def test_unseen_categories_from_elsewhere_shift_the_distribution() -> None:
    pool = Rows({"k": np.arange(1000) % 4})
    (uncovered,) = report(pool, Rows({"k": np.r_[np.arange(60) % 4, np.full(60, 99)]})).verdict()
    assert uncovered.name == "k"
    assert "PSI" in uncovered.reason


def test_images_are_covered_by_brightness_and_contrast() -> None:
    random = np.random.default_rng(0)
    light = random.uniform(-0.8, 0.8, 600)
    pixels = (light[:, None] + random.normal(size=(600, 300)) * random.uniform(0.05, 0.2, (600, 1))).astype(np.float32)
    pool = Rows({"image": pixels.reshape(600, 3, 10, 10)})
    found = report(pool, choose(pool, 100))
    assert [feature.name for feature in found.features if feature.kind == "summary"] == [
        "image mean", "image std", "image min", "image max",
    ]  # fmt: skip
    assert found.verdict() == []
    dark = np.flatnonzero(light < 0)[:100]
    assert {"image mean", "image min", "image max", "image mean with image std"} == set(names(report(pool, dark)))
    as_bytes = Rows({"image": (pool.inputs["image"] * 60 + 128).clip(0, 255).astype(np.uint8)})
    assert "image mean" in names(report(as_bytes, dark))


def test_sequences_are_covered_by_length() -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(3, 60, 900)
    ids = np.where(np.arange(64) < lengths[:, None], random.integers(1, 30_000, (900, 64)), 0)
    pool = Rows(
        {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)},
        {"language": np.where(np.arange(900) % 2 == 0, "en", "de")},
        sequences=frozenset({"input_ids", "attention_mask"}),
    )
    found = report(pool, choose(pool, 100))
    assert found.verdict() == []
    assert [feature.name for feature in found.features] == [
        "slice language", "input_ids length", "input_ids distinct values", "attention_mask length",
        "attention_mask distinct values", "slice language with input_ids length",
    ]  # fmt: skip
    short = names(report(pool, np.flatnonzero(lengths < 20)[:100]))
    assert {"input_ids length", "attention_mask length", "slice language with input_ids length"} <= set(short)


def test_psi_is_the_sum_of_the_books() -> None:
    shares, counts = np.array([0.5, 0.3, 0.2]), np.array([30.0, 50.0, 20.0])
    q = [(30 + 1.5 * 0.5) / 101.5, (50 + 1.5 * 0.3) / 101.5, (20 + 1.5 * 0.2) / 101.5]
    by_hand = sum((a - p) * math.log(a / p) for a, p in zip(q, shares, strict=True))
    assert coverage.psi(shares, counts) == pytest.approx(by_hand)
    assert coverage.psi(shares, shares * 1000) == pytest.approx(0, abs=1e-12)
    assert math.isfinite(coverage.psi(shares, np.array([0.0, 100.0, 0.0])))


def test_ks_equals_scipy_ties_included() -> None:
    random = np.random.default_rng(5)
    for pool, rows in (
        (random.normal(size=3000), random.normal(0.4, size=120)),
        (random.integers(0, 6, 3000).astype(float), random.integers(0, 5, 120).astype(float)),
    ):
        assert coverage.ks(pool, rows) == pytest.approx(stats.ks_2samp(pool, rows).statistic)


@pytest.mark.parametrize(("cells", "count"), [(2, 50), (10, 60), (25, 100), (101, 300)])
def test_limits_are_the_quantiles_of_chance_where_those_are_larger(cells: int, count: int) -> None:
    scale = 1 / count + 1 / 10_000
    quantile = stats.chi2.ppf(0.999, cells - 1) * scale
    assert coverage.psi_limit(cells, count, 10_000) == pytest.approx(max(0.25, quantile), rel=0.02)
    assert coverage.psi_limit(10, 128, 10_000) == 0.25
    assert coverage.ks_limit(count, 10_000) == pytest.approx(
        max(0.2, stats.kstwobign.ppf(0.999) * math.sqrt(scale)), rel=1e-3
    )


@pytest.mark.parametrize(("cells", "count"), [(10, 60), (10, 128), (20, 100)])
def test_random_draws_exceed_the_limits_as_seldom_as_they_say(cells: int, count: int) -> None:
    random = np.random.default_rng(0)
    shares = np.full(cells, 1 / cells)
    draws = random.multinomial(count, shares, size=20_000).astype(float)
    limit = coverage.psi_limit(cells, count, 10_000)
    assert np.mean([coverage.psi(shares, draw) > limit for draw in draws]) < 0.002
    pool = random.normal(size=2000)
    distances = [coverage.ks(pool, random.choice(pool, count, replace=False)) for _ in range(1000)]
    assert np.mean(np.array(distances) > coverage.ks_limit(count, 2000)) <= 0.002


def test_the_summary_is_plain_json(clicks: Rows) -> None:
    figures = report(clicks, only(clicks, "hour", 21)).summary()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["uncovered"][0].startswith("slice hour: no row of")


def test_a_lower_threshold_lets_a_narrower_range_pass() -> None:
    pool = draw()
    middle = np.flatnonzero(np.abs(pool.inputs["x"][:, 0]) < 2.2)  # 97 % of a normal distribution
    chosen = middle[choose(pool.take(middle), 128)]
    assert [entry.name for entry in report(pool, chosen).verdict()] == ["x[0]"]
    assert report(pool, chosen).verdict(threshold=0.95) == []
