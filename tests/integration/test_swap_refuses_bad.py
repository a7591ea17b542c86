"""The quick form of a proof: bad models are refused by `tritonpilot swap`, and nobody sees anything of them."""

from __future__ import annotations

import pytest

from perf.frame import carry_out
from perf.proofs import CLAIMS

pytestmark = [pytest.mark.server, pytest.mark.proof]


def test_bad_models_are_refused() -> None:
    result = carry_out(CLAIMS["swap_refuses_bad"], quick=True, say=print)
    assert result.ok, result.details
    assert len(result.details["cases"]) == 5  # type: ignore[arg-type]
