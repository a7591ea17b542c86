from __future__ import annotations

import pytest

from pilotlib.torch_names import NamesError, check_results, input_places, output_places, paths


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (["x", "mask"], (0, 1)),
        (["mask", "x"], (1, 0)),
        (["INPUT__1", "INPUT__0"], (1, 0)),
        (["mask__0", "x__1"], (0, 1)),  # the index counts and not the rest of the name
    ],
)
def test_inputs_are_arguments_or_numbered(names: list[str], places: tuple[int, ...]) -> None:
    found = input_places(names, ["x", "mask"])
    assert (found.indices, found.remark) == (places, "")


@pytest.mark.parametrize("names", [["left", "right"], ["x", "right"], ["a__b__0", "b__1"]])
def test_other_names_are_taken_in_order_and_said(names: list[str]) -> None:
    found = input_places(names, ["x", "mask"])
    assert found.indices == (0, 1)
    assert "in the order of the config" in found.remark


def test_a_single_name_needs_no_remark() -> None:
    assert input_places(["anything"], ["x"]).remark == ""
    assert output_places(["anything"]).remark == ""


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["x"], "the config has 1 inputs"),
        (["x", "mask", "more"], r"takes 2 \(x, mask\)"),
        (["INPUT__0", "INPUT__2"], '"INPUT__2".*2 arguments, counted from 0'),
        (["INPUT__0", "OTHER__0"], '"OTHER__0" and another input mean the same argument.*none means mask'),
    ],
)
def test_inputs_that_miss_an_argument_are_refused(names: list[str], says: str) -> None:
    with pytest.raises(NamesError, match=says):
        input_places(names, ["x", "mask"])


def test_outputs_are_numbered_or_in_order() -> None:
    assert output_places(["OUTPUT__1", "OUTPUT__0"]).indices == (1, 0)
    assert output_places(["OUTPUT__3"]).indices == (3,)
    assert output_places(["score", "label"]).indices == (0, 1)


def test_an_output_beyond_the_results_is_refused_when_they_are_known() -> None:
    places = output_places(["OUTPUT__0", "OUTPUT__2"])
    check_results(["OUTPUT__0", "OUTPUT__2"], places, 3)
    with pytest.raises(NamesError, match='"OUTPUT__2" means result 2, but the model has 2'):
        check_results(["OUTPUT__0", "OUTPUT__2"], places, 2)


def test_exported_programs_are_addressed_by_paths() -> None:
    assert paths({"b": 0, "a": (1, [2])}, "RESULT") == ["RESULT[b]", "RESULT[a][0]", "RESULT[a][1][0]"]
    assert paths(0, "RESULT") == ["RESULT"]
    assert output_places(["RESULT[a]"], ["RESULT[b]", "RESULT[a]"]).indices == (1,)
    assert input_places(["ARGS[1]", "ARGS[0]"], ["x", "y"], ["ARGS[0]", "ARGS[1]"]).indices == (1, 0)
