"""pilotlib.labels and the backend labels: logits into words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pilotlib import testkit
from pilotlib.labels import Ranking, first_not_finite, names
from pilotlib.testkit import Case, check, check_mates, in_process

BACKEND = Path(__file__).parents[2] / "python_backend" / "labels" / "model.py"
RANDOM = np.random.default_rng(8)


@pytest.fixture
def version_folder(tmp_path: Path) -> Path:
    (tmp_path / "labels.txt").write_text("Katze\nHund\nMäuse\nBaum\n", encoding="utf-8")
    return tmp_path


def config(classes: int = 4, k: int = 2, max_batch_size: int = 8, **parameters: Any) -> dict[str, Any]:
    return testkit.config(
        inputs=[{"name": "logits", "data_type": "FP32", "dims": [classes]}],
        outputs=[
            {"name": "label", "data_type": "BYTES", "dims": [k]},
            {"name": "score", "data_type": "FP32", "dims": [k]},
            {"name": "index", "data_type": "INT32", "dims": [k]},
        ],
        parameters={"k": k, **parameters},
        max_batch_size=max_batch_size,
    )


def logits(*rows: list[float]) -> dict[str, npt.NDArray[Any]]:
    return {"logits": np.array(rows, np.float32)}


def words(*rows: list[str]) -> npt.NDArray[Any]:
    return np.array([[word.encode() for word in row] for row in rows], np.object_)


# -- ranking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5, 999, 1000])
@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_best_are_those_of_a_full_sort_with_exact_scores(k: int, activation: str) -> None:
    given = RANDOM.normal(0, 4, (7, 1000)).astype(np.float32)
    index, score = Ranking(1000, k, activation, max_rows=4).best(given)  # more rows than its scratch memory
    expected = np.argsort(-given, axis=1, kind="stable")[:, :k]
    np.testing.assert_array_equal(index, expected)
    wide = given.astype(np.float64)
    scores = {
        "softmax": np.exp(wide) / np.exp(wide).sum(axis=1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-wide)),
        "none": wide,
    }[activation]
    np.testing.assert_allclose(score, np.take_along_axis(scores, expected, axis=1), rtol=1e-5)
    assert (index.dtype, score.dtype) == (np.int32, np.float32)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_extreme_logits_overflow_nothing(activation: str) -> None:
    given = np.array([[3e38, -3e38, 0, 100], [-3e38, -3e38, -3e38, -2e38], [1e4, 1e4, -1e4, 0]], np.float32)
    with np.errstate(all="raise", under="ignore"):
        index, score = Ranking(4, 4, activation, max_rows=3).best(given)
    assert np.isfinite(score).all()
    assert index[:, 0].tolist() == [0, 3, 0]
    assert score[2].tolist() == ([0.5, 0.5, 0, 0] if activation == "softmax" else [1, 1, 0.5, 0])


def test_equal_logits_come_in_the_order_of_their_numbers() -> None:
    index, score = Ranking(6, 3).best(np.array([[1, 2, 2, 0, 2, 1]], np.float32))
    assert index.tolist() == [[1, 2, 4]]
    assert len(set(score[0].tolist())) == 1


def test_a_row_has_the_same_answer_whatever_rows_are_beside_it() -> None:
    given = RANDOM.normal(0, 3, (16, 100)).astype(np.float32)
    ranking = Ranking(100, 5, max_rows=16)
    index, score = ranking.best(given)
    for row in range(16):
        alone = ranking.best(given[row : row + 1])
        np.testing.assert_array_equal(alone[0][0], index[row])
        np.testing.assert_array_equal(alone[1][0], score[row])


def test_more_labels_than_classes_are_refused() -> None:
    with pytest.raises(ValueError, match="k is 5, but must be from 1 to 4"):
        Ranking(4, 5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_not_finite_is_found(bad: float) -> None:
    given = np.zeros((3, 5), np.float32)
    assert first_not_finite(given) is None
    given[1, 3] = bad
    assert first_not_finite(given) == (1, 3)


def test_huge_but_finite_numbers_are_finite() -> None:
    assert first_not_finite(np.full((2, 9), 3e38, np.float32)) is None


def test_names_are_the_lines_of_the_file(version_folder: Path) -> None:
    assert names(version_folder / "labels.txt").tolist() == [b"Katze", b"Hund", "Mäuse".encode(), b"Baum"]


# -- the backend -------------------------------------------------------------------------------------------------------


def test_labels_scores_and_numbers_come_best_first(version_folder: Path) -> None:
    case = Case(
        "two rows",
        logits([0, 1, 3, 2], [np.log(3), 0, -90, -90]),
        {
            "label": words(["Mäuse", "Baum"], ["Katze", "Hund"]),
            "score": np.array([[0.6439, 0.2369], [0.75, 0.25]], np.float32),
            "index": np.array([[2, 3], [0, 1]], np.int32),
        },
        tolerance=1e-4,
    )
    with in_process(BACKEND, config(), version_folder) as ask:
        check(ask, case)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_request_with_a_bad_row_fails_alone_and_is_named(version_folder: Path, bad: float) -> None:
    good = Case("good", logits([0, 9, 0, 0]), {"label": words(["Hund", "Katze"])})
    wrong = Case("bad", logits([0, 1, 2, 3], [0, 1, bad, 3]), error='"logits": row 1: class 2 is ')
    with in_process(BACKEND, config(), version_folder) as ask:
        check_mates(ask, [good, wrong, good, wrong, good])


def test_what_is_below_the_threshold_has_no_label(version_folder: Path) -> None:
    said = config(activation="sigmoid", threshold=0.5)
    with in_process(BACKEND, said, version_folder) as ask:
        found = ask(logits([2, -1, -3, -4]))
    assert found["label"].tolist() == [[b"Katze", b""]]
    assert found["index"].tolist() == [[0, -1]]


def test_unbatched_models_work(version_folder: Path) -> None:
    with in_process(BACKEND, config(max_batch_size=0), version_folder) as ask:
        check(ask, Case("one", {"logits": np.array([0, 1, 5, 3], np.float32)}, {"label": words(["Mäuse", "Baum"])[0]}))


@pytest.mark.parametrize(
    ("said", "what"),
    [
        (config(classes=5), r'labels.txt has 4 labels, but config.pbtxt says that "logits" is \[5\]'),
        (config(k=5), "k is 5, but must be from 1 to 4"),
        (config(activation="tanh"), 'parameter "activation"'),
        (config(labels="names.txt"), r"names\.txt"),
    ],
)
def test_what_cannot_be_served_is_refused_when_the_model_is_loaded(
    version_folder: Path, said: dict[str, Any], what: str
) -> None:
    with pytest.raises((ValueError, OSError), match=what), in_process(BACKEND, said, version_folder):
        pass
