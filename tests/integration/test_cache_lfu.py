"""The quick form of the proof `cache_lfu`, on a machine that need not be quiet."""

from __future__ import annotations

import dataclasses

import pytest

from perf.frame import carry_out
from perf.proofs import CLAIMS

pytestmark = [pytest.mark.server, pytest.mark.proof]


def test_what_is_asked_most_is_kept_and_nobody_gets_a_stale_answer_or_anothers() -> None:
    said: list[str] = []
    claim = dataclasses.replace(CLAIMS["cache_lfu"], needs_quiet=False)
    result = carry_out(claim, quick=True, say=said.append)
    assert result.ok, "\n".join([*said, str(result.details)])
