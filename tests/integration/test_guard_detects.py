"""The proof `guard_detects` in its quick form."""

from __future__ import annotations

import pytest

from perf.frame import carry_out
from perf.proofs import CLAIMS

pytestmark = [pytest.mark.server, pytest.mark.proof]


def test_the_guard_detects_and_gives_no_false_alarm() -> None:
    said: list[str] = []
    result = carry_out(CLAIMS["guard_detects"], quick=True, say=said.append)
    assert result.ok, "\n".join([*said, str(result.details)])
