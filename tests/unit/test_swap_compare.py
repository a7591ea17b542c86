"""When are the answers of a new model taken for those of the old one, trained anew, and when for wrong ones?"""

from __future__ import annotations

import numpy as np
import pytest

from tritonpilot.errors import SpecError
from tritonpilot.swap.compare import Tolerance, Verdict, compare

HALF = Tolerance(0.5, is_share=True)
RANDOM = np.random.default_rng(4)
PROBS = RANDOM.uniform(0, 1, (64, 1)).astype(np.float32)
CLASSES = RANDOM.dirichlet(np.full(5, 0.5), 64).astype(np.float32)


def whole(old, new, tolerance: Tolerance = HALF) -> Verdict:
    (verdict,) = compare([{"y": old}], [{"y": new}], {}, tolerance)
    return verdict


@pytest.mark.parametrize(
    ("text", "tolerance"), [("0.01", Tolerance(0.01)), ("5%", Tolerance(0.05, is_share=True)), ("0", Tolerance(0))]
)
def test_a_tolerance_is_a_number_or_a_share(text, tolerance):
    assert Tolerance.parse(text) == tolerance


@pytest.mark.parametrize("text", ["", "%", "-1", "nan", "inf", "1e999", "five"])
def test_no_other_tolerance_is_taken(text):
    with pytest.raises(SpecError, match="neither a number"):
        Tolerance.parse(text)


def test_a_model_that_was_trained_anew_passes():
    noisy = np.clip(PROBS + RANDOM.normal(0, 0.05, PROBS.shape), 0, 1).astype(np.float32)
    assert whole(PROBS, noisy).ok
    assert 0.05 < whole(PROBS, noisy).difference < 0.3


def test_swapped_probabilities_do_not():
    assert not whole(PROBS, 1 - PROBS).ok


def test_swapped_columns_are_named_although_most_values_stay():
    swapped = CLASSES[:, [0, 3, 2, 1, 4]]
    verdict = whole(CLASSES, swapped, Tolerance(10, is_share=True))
    assert not verdict.ok
    assert "column 1 is the old one's column 3" in verdict.what


def test_columns_of_a_noisy_model_are_not_taken_for_swapped():
    noisy = CLASSES + RANDOM.normal(0, 0.05, CLASSES.shape).astype(np.float32)
    assert whole(CLASSES, noisy).ok


def test_few_rows_of_many_columns_are_not_taken_for_swapped():
    old = RANDOM.normal(0, 1, (20, 1000)).astype(np.float32)
    assert whole(old, old + RANDOM.normal(0, 0.3, old.shape).astype(np.float32)).ok


def test_nan_is_refused_whatever_the_tolerance():
    broken = PROBS.copy()
    broken[7] = np.nan
    verdict = whole(PROBS, broken, Tolerance(1e9))
    assert not verdict.ok
    assert "NaN or infinity in 1 of 64 rows, first in row 7" in verdict.what


def test_what_was_nan_already_is_nobodys_fault():
    old = PROBS.copy()
    old[3] = np.inf
    assert whole(old, PROBS).ok


def test_constant_answers_are_refused_whatever_the_tolerance():
    verdict = whole(PROBS, np.full_like(PROBS, 0.5), Tolerance(1e9))
    assert not verdict.ok
    assert "all 64 rows alike" in verdict.what


def test_another_shape_is_refused():
    verdict = whole(PROBS, PROBS.repeat(2, axis=1), Tolerance(1e9))
    assert not verdict.ok
    assert "[64, 2] where the old one [64, 1]" in verdict.what


def test_another_type_is_refused():
    assert "whole numbers" in whole(PROBS, PROBS.astype(np.int64)).what


def test_an_output_that_is_gone_is_refused():
    verdicts = compare([{"y": PROBS, "z": PROBS}], [{"y": PROBS}], {}, HALF)
    assert [(verdict.output, verdict.ok) for verdict in verdicts] == [("z", False), ("y", True)]


def test_a_number_is_held_against_the_largest_difference():
    moved = PROBS.copy()
    moved[5] += 0.02
    assert whole(PROBS, moved, Tolerance(0.03)).ok
    assert not whole(PROBS, moved, Tolerance(0.01)).ok


def test_words_are_compared_one_by_one():
    old = np.array([[b"cat", b"dog"]] * 10, object)
    new = old.copy()
    new[0, 0] = b"cow"
    assert whole(old, new, Tolerance(0.05, is_share=True)).difference == pytest.approx(0.05)
    assert not whole(old, new, Tolerance(0.04, is_share=True)).ok


def test_another_size_is_another_answer_where_sizes_are_free():
    old = [{"y": np.array([[b"a", b"b"]], object)}, {"y": np.array([[b"c"]], object)}]
    new = [{"y": np.array([[b"a"]], object)}, {"y": np.array([[b"c"]], object)}]
    (verdict,) = compare(old, new, {}, HALF, frozenset({"y"}))
    assert verdict.difference == pytest.approx(2 / 3)
    assert not verdict.ok
    assert not compare(old, new, {}, HALF)[0].ok  # and a misfit elsewhere


def test_a_constant_old_answer_is_measured_by_its_size():
    old = np.full((64, 1), 2.0, np.float32)
    assert whole(old, old * 1.01, Tolerance(0.02, is_share=True)).ok
    assert not whole(old, old * 2, Tolerance(0.02, is_share=True)).ok


def test_a_tolerance_of_no_output_is_said():
    with pytest.raises(SpecError, match=r"tolerance for prb, which is no output of the model \(y\)"):
        compare([{"y": PROBS}], [{"y": PROBS}], {"prb": HALF}, HALF)


def test_requests_of_different_sizes_are_judged_together():
    cuts = [slice(0, 1), slice(1, 5), slice(5, 64)]
    parts = [[{"y": answers[cut]} for cut in cuts] for answers in (PROBS, 1 - PROBS)]
    assert compare(*parts, {}, HALF)[0].difference == pytest.approx(whole(PROBS, 1 - PROBS).difference)
