"""pilotlib.ctc and the backend ctc: classes spell text."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pilotlib import testkit
from pilotlib.ctc import best, read_characters, spell
from pilotlib.testkit import Case, check, check_mates, in_process

BACKEND = Path(__file__).parents[2] / "python_backend" / "ctc" / "model.py"
ALPHABET = np.array(["", "a", "b", "é", " "], np.object_)


def read(*rows: list[int], blank: int = 0) -> list[str]:
    index = np.array(rows, np.int32)
    return [line.text for line in spell(index, np.ones(index.shape, np.float32), ALPHABET, blank)]


def test_repeats_are_one_and_blanks_are_none() -> None:
    assert read([1, 1, 0, 1, 2, 2], [0, 0, 0, 0, 0, 0], [3, 4, 4, 0, 4, 1]) == ["aab", "", "é  a"]


def test_the_blank_may_be_any_class() -> None:
    characters = np.array(["a", "b", ""], np.object_)
    (line,) = spell(np.array([[0, 0, 2, 0, 1]]), np.ones((1, 5), np.float32), characters, blank=2)
    assert line.text == "aab"


def test_spelling_equals_the_rule_step_by_step() -> None:
    index = np.random.default_rng(4).integers(0, 5, (20, 60))
    expected = ["".join(ALPHABET[cls] for cls, _ in groupby(row) if cls != 0) for row in index.tolist()]
    assert read(*index.tolist()) == expected


def test_score_is_the_mean_over_the_characters_read() -> None:
    index = np.array([[1, 1, 0, 2], [0, 0, 0, 0]])
    confidence = np.array([[0.9, 0.1, 0.3, 0.7], [0.9, 0.9, 0.9, 0.9]], np.float32)
    lines = spell(index, confidence, ALPHABET)
    assert [line.score for line in lines] == pytest.approx([0.8, 0.0])


def test_no_steps_and_no_lines_spell_nothing() -> None:
    assert read([]) == [""]
    assert spell(np.empty((0, 7), np.int32), np.empty((0, 7), np.float32), ALPHABET) == []


def test_a_class_without_a_character_is_a_fault_of_the_files() -> None:
    with pytest.raises(ValueError, match=r"class 5 has no character.*has 5"):
        read([1, 5])


def test_best_of_logits_has_the_probability_of_a_softmax() -> None:
    logits = np.random.default_rng(5).normal(0, 30, (2, 9, 50)).astype(np.float32)
    wide = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    probabilities = wide / wide.sum(axis=-1, keepdims=True)
    index, confidence = best(logits, are_logits=True)
    np.testing.assert_array_equal(index, probabilities.argmax(axis=-1))
    np.testing.assert_allclose(confidence, probabilities.max(axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(best(logits)[1], logits.max(axis=-1))


def test_characters_may_be_separators_of_unicode(tmp_path: Path) -> None:
    path = tmp_path / "characters.txt"
    path.write_bytes("a\n\u2028\n\r\n \n".encode())
    assert read_characters(path).tolist() == ["", "a", "\u2028", "\r", " "]
    assert read_characters(path, blank=4).tolist() == ["a", "\u2028", "\r", " ", ""]


def test_a_wrong_file_of_characters_is_named(tmp_path: Path) -> None:
    path = tmp_path / "characters.txt"
    path.write_text("a\n\nb\n")
    with pytest.raises(ValueError, match=r"characters\.txt: line 2 is empty"):
        read_characters(path)
    path.write_text("a\nb\n")
    with pytest.raises(ValueError, match="no class 9 for the blank"):
        read_characters(path, blank=9)


# -- the backend -------------------------------------------------------------------------------------------------------


@pytest.fixture
def version_folder(tmp_path: Path) -> Path:
    (tmp_path / "characters.txt").write_text("a\nb\né\n \n", encoding="utf-8")
    return tmp_path


def config(classes: int = 5, max_batch_size: int = 8, **parameters: Any) -> dict[str, Any]:
    return testkit.config(
        inputs=[{"name": "logits", "data_type": "FP32", "dims": [-1, classes]}],
        outputs=[
            {"name": "text", "data_type": "BYTES", "dims": [1]},
            {"name": "score", "data_type": "FP32", "dims": [1]},
        ],
        parameters=parameters,
        max_batch_size=max_batch_size,
    )


def one_hot(*rows: list[int], value: float = 1.0) -> dict[str, npt.NDArray[Any]]:
    return {"logits": np.eye(5, dtype=np.float32)[np.array(rows)] * np.float32(value)}


def texts(*rows: str) -> dict[str, npt.NDArray[Any]]:
    return {"text": np.array([[row.encode()] for row in rows], np.object_)}


def test_backend_spells_rows_and_isolates_what_is_wrong(version_folder: Path) -> None:
    bad = one_hot([1, 2], [1, 2])["logits"]
    bad[1, 1, 3] = np.nan
    cases = [
        Case("one", one_hot([1, 1, 0, 1]), {**texts("aa"), "score": np.array([[1]], np.float32)}),
        Case("rows", one_hot([3, 4, 1], [0, 0, 0]), texts("é a", "")),
        Case("not a number", {"logits": bad}, error='"logits": row 1 holds NaN'),
        Case("classes", {"logits": np.zeros((1, 3, 4), np.float32)}, error='"logits": has 4 classes, 5 are expected'),
    ]
    with in_process(BACKEND, config(classes=-1), version_folder) as ask:
        for case in cases:
            check(ask, case)
        check_mates(ask, cases)


def test_backend_takes_logits_and_works_without_batching(version_folder: Path) -> None:
    with in_process(BACKEND, config(max_batch_size=0, activation="softmax"), version_folder) as ask:
        answer = ask({"logits": one_hot([1, 0, 2], value=3.0)["logits"][0]})
    assert answer["text"].tolist() == [b"ab"]
    assert answer["score"] == pytest.approx([np.exp(3) / (np.exp(3) + 4)], rel=1e-5)


def test_backend_refuses_characters_of_another_model(version_folder: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"spells 5 classes.*\[-1, 7\]"),
        in_process(BACKEND, config(7), version_folder),
    ):
        pass
