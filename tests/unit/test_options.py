"""Options that commands share: lists of numbers and CPUs, and what is no number."""

from __future__ import annotations

import os

import pytest
import typer

from tritonpilot.commands.options import cpu_list, finite, numbers
from tritonpilot.errors import HostError


@pytest.mark.parametrize("text", ["nan", "inf", "1,nan,4", "0", "-1", "1e999", "", "x", "1,,2"])
def test_list_of_numbers_has_finite_positive_ones_alone(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no list of positive numbers"):
        numbers(text, "--rate", float)
    assert numbers("0.5,100", "--rate", float) == [0.5, 100.0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_option_that_must_be_finite_refuses_what_is_not(value: float) -> None:
    with pytest.raises(typer.BadParameter, match="is no finite number"):
        finite(value)
    assert finite(2.5) == 2.5
    assert finite(None) is None


def test_cpus_are_those_that_this_process_may_use() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert cpu_list("") is None
    assert cpu_list(str(allowed[0])) == allowed[:1]
    assert cpu_list(",".join(map(str, reversed(allowed)))) == allowed
    for text in ("4095", f"{allowed[0]},4095", f"{allowed[-1]}-99999999999999999999"):
        with pytest.raises(HostError, match=r"cannot run on \d+, and --server-cpus .* Choose among") as refused:
            cpu_list(text, "--server-cpus")
        assert refused.value.exit_code == 7


@pytest.mark.parametrize("text", ["a", "-1", "1-0", "0,1-0", "0,,1"])
def test_lists_of_cpus_that_are_none_are_usage_errors(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is no list of CPUs"):
        cpu_list(text)
