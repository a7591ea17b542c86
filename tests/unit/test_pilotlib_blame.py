from __future__ import annotations

import numpy as np
import pytest

from pilotlib.blame import input_at_fault

SAID = (
    "Gather node. Name:'embedding' indices element out of data bounds, idx={} must be within the inclusive range [-4,3]"
)
INPUTS = {
    "ids": np.array([[1, 99]], np.int64),
    "mask": np.array([[1, 1]], np.int64),
    "dense": np.array([[99.0, 1.0]], np.float32),
}


@pytest.mark.parametrize(
    ("said", "name"),
    [(SAID.format(99), "ids"), (SAID.format(1), None), (SAID.format(5), None), ("another reason", None)],
)
def test_only_the_one_input_that_holds_the_value_is_blamed(said: str, name: str | None) -> None:
    assert input_at_fault(said, INPUTS) == name


def test_an_index_without_its_value_is_that_of_the_only_input_of_integers() -> None:
    said = "IndexError: index out of range in self"

    assert input_at_fault(said, {"ids": INPUTS["ids"], "dense": INPUTS["dense"]}) == "ids"
    assert input_at_fault(said, INPUTS) is None
