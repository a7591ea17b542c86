"""The autopilot when its world breaks: the quick form of the proof `autopilot_chaos`."""

from __future__ import annotations

import pytest
from programs import program

from perf.frame import carry_out
from perf.proofs import CLAIMS

pytestmark = [pytest.mark.server, pytest.mark.proof]


def test_seven_faults_change_nothing_lose_nothing_and_are_told() -> None:
    program("prometheus")
    said: list[str] = []

    result = carry_out(CLAIMS["autopilot_chaos"], quick=True, say=said.append)

    assert result.ok, "\n".join([*said, *map(str, result.details["log"])])  # type: ignore[call-overload]
    assert result.rounds == 7
