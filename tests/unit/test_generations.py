"""The models whose answers tell which generation computed them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from perf import generations
from perf.generations import Question, Subject


def answers(file: Path, subject: Subject, question: int) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(subject.questions[question].inputs)), strict=True))


@pytest.mark.parametrize("generation", [0, 1, 7, 60])
def test_a_generation_is_told_by_each_answer(tmp_path: Path, generation: int) -> None:
    subject = generations.pair(tmp_path)
    files = subject.files(generation, tmp_path)

    for question in range(len(subject.questions)):
        found = answers(files["pair_first"], subject, question)
        assert subject.generations(question, {"of_first": found["mark"], "of_second": found["mark"]}) == {generation}


def test_members_of_two_generations_and_values_of_nobody_are_told() -> None:
    base = np.ones((2, 1), np.float32)
    subject = Subject("pair", (), {}, (Question({}, {"of_first": base, "of_second": base}),))

    assert subject.generations(0, {"of_first": base * 0.998, "of_second": base * 0.997}) == {2, 3}
    assert subject.generations(0, {"of_first": base * 0.9985, "of_second": base}) == {-1, 0}
    assert subject.generations(0, {"of_first": base * np.nan, "of_second": base}) == {-1, 0}
    assert subject.generations(0, {"of_first": base}) == {-1}
    assert subject.generations(0, {"of_first": base[:1], "of_second": base}) == {-1}
