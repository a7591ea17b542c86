"""What the guard calls a difference, a drift, a constant: by data alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tritonpilot.errors import SpecError
from tritonpilot.guard import distance
from tritonpilot.guard.compare import Tolerance, difference
from tritonpilot.guard.reference import Numbers, Reference, Words
from tritonpilot.guard.series import Key, series_of
from tritonpilot.guard.watch import Settings, Watch

RANDOM = np.random.default_rng(1)
VALUE = Key("prob", "value")


def test_psi_and_ks_are_those_of_their_definitions() -> None:
    assert distance.psi([90, 10], [50, 50]) == pytest.approx(
        (0.5 - 90.5 / 101) * math.log(0.5 / (90.5 / 101)) + (0.5 - 10.5 / 101) * math.log(0.5 / (10.5 / 101))
    )
    before, now = np.array([1.0, 2.0, 3.0, 4.0]), np.array([3.0, 4.0, 5.0, 6.0])
    assert distance.ks(before, now) == 0.5
    stats = pytest.importorskip("scipy.stats")
    before, now = np.sort(RANDOM.normal(size=300)), np.sort(RANDOM.normal(0.3, size=200))
    assert distance.ks(before, now) == pytest.approx(stats.ks_2samp(before, now).statistic)


def test_chance_explains_what_two_samples_of_one_source_differ_by() -> None:
    psi, ks = [], []
    for _ in range(2000):
        before, now = np.sort(RANDOM.normal(size=1000)), np.sort(RANDOM.normal(size=300))
        edges = np.quantile(before, np.linspace(0.1, 0.9, 9)).tolist()
        psi.append(distance.psi(distance.counts_between(before, edges), distance.counts_between(now, edges)))
        ks.append(distance.ks(before, now))
    for found, limit in (
        (psi, lambda chance: distance.psi_of_chance(1000, 300, 10, chance)),
        (ks, lambda chance: distance.ks_of_chance(1000, 300, chance)),
    ):
        assert 0.0 < np.mean(np.array(found) > limit(0.05)) <= 0.06
        assert max(found) < limit(1e-6)


def test_values_are_counted_up_to_each_edge() -> None:
    assert distance.counts_between(np.array([0.0, 1.0, 1.5, 2.0, 9.0]), [1.0, 2.0]).tolist() == [2, 2, 1]


def test_answers_differ_by_their_tolerance_and_by_everything_else() -> None:
    tolerance = Tolerance(1e-4, {"big": 0.5})
    small = {"prob": np.array([[0.5]], np.float32), "label": np.array([[b"yes"]], object)}
    assert difference(small, small, tolerance).ok
    assert difference(small, {**small, "prob": np.array([[0.50005]], np.float32)}, tolerance).ok
    found = difference(small, {**small, "prob": np.array([[0.6]], np.float32)}, tolerance)
    assert (found.ok, found.output, found.value) == (False, "prob", pytest.approx(0.1, abs=1e-6))
    assert difference({"big": np.array([100.0])}, {"big": np.array([140.0])}, tolerance).ok
    for other in (
        {**small, "label": np.array([[b"no"]], object)},
        {**small, "prob": np.array([[0.5, 0.5]], np.float32)},
        {**small, "prob": np.array([[np.nan]], np.float32)},
        {"prob": small["prob"]},
        {**small, "more": small["prob"]},
    ):
        assert difference(small, other, tolerance).value == math.inf, other
    nan = {"prob": np.array([np.nan, np.inf, 1.0])}
    assert difference(nan, {"prob": nan["prob"].copy()}, tolerance).ok


def test_rows_become_numbers_and_words() -> None:
    found = series_of(
        {
            "prob": np.array([[0.1], [np.nan], [0.3]], np.float32),
            "scores": np.array([[1, 5, 0], [9, 2, 1], [0, 0, 3]], np.float32),
            "label": np.array([[b"cat"], [b"dog"], [b"cat"]], object),
        },
        is_batched=True,
    )
    assert found.values[VALUE] == pytest.approx([0.1, 0.3])
    assert found.not_finite == {"prob": 1, "scores": 0}
    assert found.values[Key("scores", "top")] == [5, 9, 3]
    assert found.values[Key("scores", "class")] == ["1", "0", "2"]
    assert found.values[Key("label", "text")] == ["cat", "dog", "cat"]
    assert found.values[Key("label", "length")] == [3, 3, 3]
    assert found.rows == 3


def test_an_answer_without_a_batch_is_one_row_and_a_large_one_is_thinned() -> None:
    assert series_of({"y": np.arange(6.0).reshape(2, 3)}, is_batched=False).values[Key("y", "top")] == [5.0]
    assert series_of({"y": np.zeros((1000, 1))}, is_batched=True).rows == 64
    assert series_of({"y": np.zeros((0, 1))}, is_batched=True).values == {}


def test_a_reference_survives_its_file() -> None:
    reference = Reference.of({VALUE: RANDOM.normal(size=1000).tolist(), Key("label", "text"): ["a"] * 9 + ["b"]})
    assert Reference.parse(reference.text(), "x") == reference


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"format": "other", "series": []}',
        '{"format": "tritonpilot guard reference 1", "series": [{"output": "y", "what": "heat", "rows": 1, "points": [1]}]}',
        '{"format": "tritonpilot guard reference 1", "series": [{"output": "y", "what": "value", "rows": 1, "points": []}]}',
        '{"format": "tritonpilot guard reference 1", "series": [{"output": "y", "what": "value", "rows": 1, "points": [2, 1]}]}',
        '{"format": "tritonpilot guard reference 1", "series": [{"output": "y", "what": "value", "rows": 0, "points": [1]}]}',
        '{"format": "tritonpilot guard reference 1", "series": [{"output": "y", "what": "text", "rows": 1, "counts": 1}]}',
    ],
)
def test_what_is_no_reference_is_refused_with_its_file(text: str) -> None:
    with pytest.raises(SpecError, match="reference.json is no reference of a guard"):
        Reference.parse(text, "reference.json")


def test_a_rare_word_may_be_missing_but_not_a_common_one() -> None:
    rare = Words.of(["0"] * 990 + ["1"] * 10)
    assert not rare.distance(["0"] * 300).is_constant
    common = Words.of(["0"] * 500 + ["1"] * 500)
    assert common.distance(["0"] * 300).is_constant
    assert Numbers.of(RANDOM.normal(size=1000).tolist()).distance([0.5] * 300).is_constant
    assert not Numbers.of([0.5] * 1000).distance([0.5] * 300).is_constant


def watched(values: np.ndarray, watch: Watch, version: str = "1", now_s: float = 0.0) -> list[str]:
    """What drifts after these answers of one row each."""
    for value in values:
        watch.take({"prob": np.array([[value]], np.float32)}, version, now_s)
    return [verdict.key.what for verdict in watch.judge() if verdict.drifts or verdict.distance.is_constant]


def a_watch(**settings: float) -> Watch:
    watch = Watch(Settings(**settings), is_batched=True)  # type: ignore[arg-type]
    watch.serves("1", 0.0)
    return watch


def test_the_first_answers_are_the_reference_and_the_same_source_never_drifts() -> None:
    watch = a_watch()
    assert watched(RANDOM.beta(2, 5, 999), watch) == []
    assert watch.is_learning
    for _ in range(100):
        assert watched(RANDOM.beta(2, 5, 100), watch) == []
    assert not watch.is_learning
    assert watch.reference_rows == 1000


@pytest.mark.parametrize(
    "drifted",
    [
        lambda count: RANDOM.beta(5, 2, count),  # another shape
        lambda count: RANDOM.beta(2, 5, count) * 0.5,  # half as confident
        lambda count: np.where(RANDOM.random(count) < 0.6, 0.99, RANDOM.beta(2, 5, count)),  # one answer too often
        lambda count: np.full(count, 0.3),
    ],
)
def test_another_source_drifts_within_a_window(drifted: object) -> None:
    watch = a_watch()
    watched(RANDOM.beta(2, 5, 1500), watch)
    assert watched(drifted(300), watch) == ["value"]  # type: ignore[operator]
    assert watched(RANDOM.beta(2, 5, 300), watch) == [], "and it is over when the answers are as before"


def test_a_new_version_is_held_against_the_old_ones_answers_for_a_while() -> None:
    watch = a_watch(new_version_s=60)
    watched(RANDOM.beta(2, 5, 1500), watch)
    watch.serves("2", 100.0)
    assert watched(RANDOM.beta(2, 5, 500), watch, "1", 101.0) == [], "answers of what drains say nothing"
    assert watch.judge() == []
    assert watched(RANDOM.beta(5, 2, 300), watch, "2", 110.0) == ["value"]
    assert watch.change is not None
    assert (watch.change.version, watch.change.previous) == ("2", "1")
    watched(RANDOM.beta(5, 2, 1000), watch, "2", 161.0)
    assert watched(RANDOM.beta(5, 2, 300), watch, "2", 170.0) == [], "then it has a reference of its own"


def test_a_given_reference_stays() -> None:
    reference = Reference.of({VALUE: RANDOM.beta(2, 5, 1000).tolist()})
    watch = Watch(Settings(new_version_s=60), is_batched=True, reference=reference)
    watch.serves("1", 0.0)
    assert watched(RANDOM.beta(5, 2, 300), watch) == ["value"]
    watch.serves("2", 1.0)
    assert watched(RANDOM.beta(5, 2, 300), watch, "2", 100.0) == ["value"]


def test_nan_is_counted_and_left_out() -> None:
    watch = a_watch()
    watched(RANDOM.beta(2, 5, 1500), watch)
    assert watched(np.full(10, np.nan), watch) == []
    assert watch.not_finite == {"prob": 10}
