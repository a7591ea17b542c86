from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotlib import testkit
from pilotlib.embedding import normalise, not_finite, pool
from pilotlib.testkit import Case, check, check_mates, in_process

MODEL_PY = Path(__file__).parents[2] / "python_backend" / "embedding" / "model.py"
NAN, INF = float("nan"), float("inf")


def floats(*rows: Any) -> Any:
    return np.array(rows, np.float32)


def test_mean_is_over_the_unmasked_tokens() -> None:
    tokens = floats([[1, 2], [3, 4], [50, 50]], [[1, 1], [9, 9], [9, 9]], [[1, 1], [1, 1], [1, 1]])
    mask = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert pool(tokens, mask, "mean").tolist() == [[2, 3], [1, 1], [0, 0]]
    assert pool(tokens, mask, "cls").tolist() == [[1, 2], [1, 1], [1, 1]]


def test_normalise_makes_length_one_of_any_size_and_leaves_zeros() -> None:
    rows = floats([3, 4], [0, 0], [3e30, 4e30], [3e-30, 4e-30])
    normalise(rows)
    assert np.allclose(rows, floats([0.6, 0.8], [0, 0], [0.6, 0.8], [0.6, 0.8]))


def test_the_first_row_that_is_not_finite_is_found() -> None:
    assert not_finite(floats([1, 2], [3, 4])) is None
    assert not_finite(floats([1, 2], [3, INF], [NAN, 4])) == 1


def config(row: list[int], out: int, rows: int = 4, **parameters: Any) -> Any:
    inputs = [{"name": "embedding", "data_type": "FP32", "dims": row}]
    if parameters.get("pooling", "mean") != "none":
        inputs = [
            {"name": "token_embeddings", "data_type": "FP32", "dims": [-1, *row]},
            {"name": "attention_mask", "data_type": "INT64", "dims": [-1]},
        ]
    outputs = [{"name": "embedding", "data_type": "FP32", "dims": [out]}]
    return testkit.config(inputs=inputs, outputs=outputs, parameters=parameters, max_batch_size=rows)


def tokens(*rows: Any, mask: Any) -> dict[str, Any]:
    return {"token_embeddings": floats(*rows), "attention_mask": np.array(mask)}


CASES = [
    Case("mean", tokens([[3, 0], [3, 8], [9, 9]], mask=[[1, 1, 0]]), {"embedding": floats([0.6, 0.8])}, tolerance=1e-6),
    Case("no token", tokens([[3, 4]], [[0, 2]], mask=[[0], [1]]), {"embedding": floats([0, 0], [0, 1])}),
    Case("NaN", tokens([[3, 4]], [[NAN, 1]], mask=[[1], [1]]), error='"token_embeddings": row 1 has NaN or infinity'),
    Case("infinite", tokens([[INF, 4]], mask=[[1]]), error='"token_embeddings": row 0 has NaN or infinity'),
    Case("mask of others", tokens([[3, 4]], mask=[[1, 1]]), error='"attention_mask": has shape [1, 2]'),
    Case("mask of 2", tokens([[3, 4]], [[3, 4]], mask=[[1], [2]]), error='"attention_mask": row 1 has other values'),
    Case("no tokens", tokens(np.empty((0, 2)), mask=np.empty((1, 0), np.int64)), error='"token_embeddings": is empty'),
    Case("four rows", tokens(*[[[0, 5]]] * 4, mask=[[1]] * 4), {"embedding": floats(*[[0, 1]] * 4)}),
]


def test_backend_answers_cases_alone_and_among_mates() -> None:
    with in_process(MODEL_PY, config([2], 2)) as ask:
        for case in CASES:
            check(ask, case)
        check_mates(ask, CASES)


def test_matryoshka_dims_are_cut_before_normalising() -> None:
    said = config([4], 2, pooling="none", dims=2)
    case = Case("cut", {"embedding": floats([3, 4, 12, 84])}, {"embedding": floats([0.6, 0.8])}, tolerance=1e-6)
    with in_process(MODEL_PY, said) as ask:
        check(ask, case)
    with in_process(MODEL_PY, config([-1], 2, pooling="none", dims=2)) as ask:
        check(ask, case)
        check(ask, Case("narrow", {"embedding": floats([1])}, error='"embedding": has 1 dimensions, fewer than the 2'))


def test_length_is_kept_when_asked_and_widths_may_differ() -> None:
    with in_process(MODEL_PY, config([-1], -1, pooling="none", normalize="false")) as ask:
        cases = [Case(str(n), {"embedding": floats([2] * n)}, {"embedding": floats([2] * n)}) for n in (3, 7, 1)]
        check_mates(ask, cases)


def test_a_model_without_batch_dimension() -> None:
    with in_process(MODEL_PY, config([2], 2, rows=0, pooling="cls")) as ask:
        found = ask({"token_embeddings": floats([0, 2], [1, 1]), "attention_mask": np.array([1, 1])})
    assert found["embedding"].tolist() == [0, 1]


def test_backend_refuses_configs_that_it_cannot_serve() -> None:
    for said, words in (
        (config([4], 8, dims=8), '"dims" is 8'),
        (config([4], 3, dims=2), r"must be TYPE_FP32 \[2\]"),
        (config([4], 4, pooling="max"), '"pooling"'),
    ):
        with pytest.raises(ValueError, match=words), in_process(MODEL_PY, said):
            pass
