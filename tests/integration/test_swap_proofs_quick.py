"""The quick forms of the proofs of swaps."""

from __future__ import annotations

import pytest

from perf.frame import Bench
from perf.machine import Limits
from perf.proofs.swap_50 import swap_50
from perf.proofs.swap_kill import swap_kill_each_step

pytestmark = [pytest.mark.server, pytest.mark.proof]


def bench() -> Bench:
    return Bench(quick=True, needs_quiet=False, say=lambda _: None, limits=Limits())


def test_callers_get_whole_answers_of_one_version_while_models_are_swapped() -> None:
    found = swap_50(bench())

    assert found.details["swaps"] == 2
    assert found.details["requests"] > 1000  # type: ignore[operator]
    wrong = ("failed", "of_several_generations", "of_a_retired_generation", "versions_of_several_generations")
    assert [found.details[name] for name in wrong] == [0] * 4, found.details
    assert found.details["left_behind"] == []


def test_a_killed_swap_harms_nobody_and_a_rerun_brings_order() -> None:
    found = swap_kill_each_step(bench())

    assert found.ok
    assert found.value == 0, found.details
    assert found.details["kills"] == 5
