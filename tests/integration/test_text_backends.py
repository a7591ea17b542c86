"""The backends embedding and tokenize give the same answers in the real Triton as in their unit tests' process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from unit import test_pilotlib_embedding as embedding
from unit import test_pilotlib_text as text

from pilotlib.testkit import Case, check, check_mates
from tritonpilot.testkit import in_triton

pytestmark = pytest.mark.server

small, library = text.small, text.library  # fixtures


def test_embedding_answers_its_cases() -> None:
    with in_triton(embedding.MODEL_PY, embedding.config([2], 2), probe=embedding.CASES[0].inputs) as ask:
        for case in embedding.CASES:
            check(ask, case)
        check_mates(ask, embedding.CASES)


def test_embedding_cuts_dimensions_of_every_row() -> None:
    rows = embedding.floats([3, 4, 12, 84], [0, 5, 7, 1], [5, 0, 2, 2])
    case = Case("cut", {"embedding": rows}, {"embedding": embedding.floats([0.6, 0.8], [0, 1], [1, 0])}, tolerance=1e-6)
    config = embedding.config([4], 2, pooling="none", dims=2)
    with in_triton(embedding.MODEL_PY, config, probe={"embedding": rows}) as ask:
        check_mates(ask, [case] * 3)


def test_tokenize_answers_its_cases(small: Path) -> None:
    with in_triton(text.MODEL_PY, text.config(), small.parent) as ask:
        for case in text.CASES:
            check(ask, case)
        check_mates(ask, text.CASES)
        nothing = ask.together([{"text": np.empty((0, 1), np.object_)}, text.CASES[0].inputs])
        assert isinstance(nothing[0], Exception)
        assert not isinstance(nothing[1], Exception)
