"""What the proofs about transports and bad inputs decide, without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from perf.bad_inputs import Case, cases_of
from perf.proofs import bad_inputs, transports
from tritonpilot.client.served import from_config

PHOTOS = from_config(
    {
        "name": "photos",
        "max_batch_size": 4,
        "input": [
            {"name": "photo", "data_type": "TYPE_STRING", "dims": [1]},
            {"name": "width", "data_type": "TYPE_INT32", "dims": [1]},
            {"name": "scale", "data_type": "TYPE_FP32", "dims": [2]},
        ],
        "output": [{"name": "label", "data_type": "TYPE_STRING", "dims": [1]}],
    }
)
ROW = {
    "photo": np.array([[b"good" * 20]], np.object_),
    "width": np.array([[3]], np.int32),
    "scale": np.array([[1, 2]], np.float32),
}


def test_cases_cover_shapes_numbers_strings_and_pictures() -> None:
    names = [case.name for case in cases_of(PHOTOS, ROW)]

    for part in (
        "wrong rank",
        "zero rows",
        "more rows than the maximum",
        "an input left out",
        "NaN in scale",
        "Inf in scale",
        "unknown category in width: largest",
        "empty string in photo",
        "a megabyte of words in photo",
        "invalid UTF-8 in photo",
        "truncated as photo",
        "decompression bomb, honest as photo",
        "animated GIF as photo",
        "CMYK as photo",
        "16-bit as photo",
        "rotated by EXIF as photo",
    ):
        assert part in names
    assert len(set(names)) == len(names)


def test_cases_leave_the_good_row_as_it_was() -> None:
    before = {name: array.copy() for name, array in ROW.items()}
    cases_of(PHOTOS, ROW)

    assert all((ROW[name] == before[name]).all() for name in ROW)


def test_one_row_more_than_the_maximum_is_sent_and_no_rows_at_all() -> None:
    rows = {case.name: len(case.inputs["scale"]) for case in cases_of(PHOTOS, ROW) if "scale" in case.inputs}

    assert rows["more rows than the maximum"] == 5
    assert rows["zero rows"] == 0


@pytest.mark.parametrize(
    ("must", "said", "wrong"),
    [
        ("refuse", '"photo": row 0 is damaged', ""),
        ("refuse", "", "answered"),
        ("refuse", "something is wrong", "names none of photo"),
        ("answer", '"photo": no', "refused"),
        ("answer", "", ""),
        ("either", "", ""),
        ("either", "unnamed", "names none"),
    ],
)
def test_a_case_is_judged_by_what_it_must_and_by_the_field_that_is_named(must: Any, said: str, wrong: str) -> None:
    found = bad_inputs._judge(Case("case", {}, must, ("photo",)), said)

    assert wrong in found
    assert bool(found) == bool(wrong)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (np.array([1.0]), np.array([1.0 + 5e-6]), True),
        (np.array([1.0]), np.array([1.0 + 5e-5]), False),
        (np.array([np.nan]), np.array([np.nan]), True),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array([1.0]), np.array([[1.0]]), False),
        (np.array([b"a"], np.object_), np.array([b"b"], np.object_), False),
        (np.array([b'[{"s": 0.5001}]'], np.object_), np.array([b'[{"s": 0.5002}]'], np.object_), True),
        (np.array([b'[{"s": 0.5}]'], np.object_), np.array([b'[{"t": 0.5}]'], np.object_), False),
        (np.array([b"12"], np.object_), np.array([b"13"], np.object_), False),
    ],
)
def test_neighbours_answers_are_the_same_up_to_the_last_digits(one: Any, other: Any, same: bool) -> None:
    assert bad_inputs._same(one, other) is same


def test_transports_differ_by_numbers_or_by_everything_else() -> None:
    text = {"x": np.array([1.0, 2.0], np.float32), "t": np.array([b"a"], np.object_)}
    other = {**text, "x": np.array([1.0, 2.5], np.float32)}

    assert transports._difference(text, text) == 0
    assert transports._difference(other, text) == 0.5
    for changed in (
        {"x": text["x"]},
        {**text, "t": np.array([b"b"], np.object_)},
        {**text, "x": text["x"].astype(np.float64)},
        {**text, "x": text["x"][:1]},
    ):
        assert transports._difference(changed, text) == transports.DIFFERENT
