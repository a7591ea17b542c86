"""A few of ONNX's own cases; the proof onnx_conformance runs hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import conformance_cases
from perf.conformance_cases import obstacle
from perf.proofs.conformance import judged, serve, spread

# A scalar, an always empty dim, strings, BF16, an input with a default, several outputs, a boolean, a dynamic number of rows.
CHOSEN = (
    "test_clip_example",
    "test_tril_zero",
    "test_strnorm_model_nostopwords_nochangecase",
    "test_cast_BFLOAT16_to_FLOAT",
    "test_sequence_model1",
    "test_split_equal_parts_1d_opset18",
    "test_and_bcast3v1d",
    "test_nonzero_example",
)
CASES = {case.name: case for case in conformance_cases.cases()}


@pytest.mark.server
def test_odd_tensors_pass_in_the_real_triton(tmp_path: Path) -> None:
    cases = [CASES[name] for name in CHOSEN]
    assert [judged(case).reason for case in cases] == [""] * len(cases)
    assert serve(cases, tmp_path / "model_repository") == {}


def test_what_triton_cannot_carry_is_told() -> None:
    assert obstacle(CASES["test_sequence_insert_at_back"]) == "Triton has no sequence tensors"
    assert obstacle(CASES["test_cast_FLOAT_to_FLOAT8E4M3FN"]) == "Triton has no element type FLOAT8E4M3FN"
    assert obstacle(CASES["test_abs"]) == ""


def test_the_spread_is_the_same_every_time_and_without_repetition() -> None:
    cases = list(CASES.values())
    chosen = spread(cases, 360)
    assert len({case.name for case in chosen}) == 360
    assert chosen == spread(cases, 360)
    assert sum(case.folder.parent.name == "simple" for case in chosen) >= 20
