"""The quick form of the proof `cold_start`."""

from __future__ import annotations

from typing import Any

import pytest

from perf.frame import Claim, carry_out
from perf.machine import Limits
from perf.proofs import CLAIMS

pytestmark = [pytest.mark.server, pytest.mark.proof]


def test_servers_start_sooner_than_they_did_and_answer_the_same() -> None:
    asked = CLAIMS["cold_start"]
    claim = Claim(asked.name, asked.prove, asked.unit, asked.bar, asked.line)  # on a busy machine too

    result = carry_out(claim, quick=True, say=print, limits=Limits())

    assert result.details["wrong"] == []
    examples: Any = result.details["examples"]
    assert set(examples) == {"ctr", "text"}
    for name, row in examples.items():
        assert row["now"]["answered_s"] < 0.8 * row["before"]["answered_s"], name
        assert 0 < row["now"]["launched_s"] < row["now"]["loaded_s"] < row["now"]["answered_s"], name
