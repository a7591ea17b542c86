from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotlib import testkit
from pilotlib.testkit import Case, CheckError, check, check_mates, in_process
from pilotlib.verbs import Backend, BadRequest

CONFIG = testkit.config(
    inputs=[{"name": "x", "data_type": "FP32", "dims": [2]}],
    outputs=[{"name": "y", "data_type": "FP32", "dims": [2]}],
    max_batch_size=4,
)


class Half(Backend[Any, Any, Any]):
    """Halves; refuses negative numbers, and answers into a buffer that it reuses."""

    def set_up(self, context: Any) -> None:  # noqa: ARG002
        self.buffer = np.empty((4, 2), np.float32)
        self.is_down = False

    def decode(self, inputs: Any) -> Any:
        if (inputs["x"] < 0).any():
            raise BadRequest("x", "row 0: negative")
        return inputs["x"]

    def predict(self, items: Any) -> Any:
        results, start = [], 0
        for item in items:
            place = self.buffer[start : start + len(item)]
            place[...] = item / 2
            results.append(place)
            start += len(item)
        return results

    def encode(self, result: Any) -> Any:
        return {"y": result}

    def tear_down(self) -> None:
        self.is_down = True


def rows(*numbers: float) -> np.ndarray[Any, Any]:
    return np.array([[number, number] for number in numbers], np.float32)


GOOD = Case("two rows", {"x": rows(1, 3)}, {"y": rows(0.5, 1.5)})
MATE = Case("one row", {"x": rows(5)}, {"y": rows(2.5)})
BAD = Case("negative", {"x": rows(-1)}, error='"x": row 0')


def test_cases_pass_alone_and_together() -> None:
    with in_process(Half, CONFIG) as ask:
        for case in (GOOD, BAD, MATE):
            check(ask, case)
        check_mates(ask, [GOOD, BAD, MATE])
        kept = ask(GOOD.inputs)["y"]
        ask(MATE.inputs)
        assert kept.tolist() == rows(0.5, 1.5).tolist()


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case("value", {"x": rows(1)}, {"y": rows(0.6)}, tolerance=0.01), "differs by up to 0.1, tolerance 0.01"),
        (Case("shape", {"x": rows(1)}, {"y": rows(1, 2)}), "has shape [1, 2], expected [2, 2]"),
        (Case("type", {"x": rows(1)}, {"y": rows(0.5).astype(np.float64)}), "is float32, expected float64"),
        (Case("name", {"x": rows(1)}, {"z": rows(0.5)}), 'no output "z", but y'),
        (Case("unanswered", BAD.inputs, {"y": rows(0.5)}), "not answered, but: BadRequest"),
        (Case("answered", GOOD.inputs, error="negative"), "was expected, but it was answered"),
        (Case("words", BAD.inputs, error="positive"), 'the error has no "positive"'),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_what_differs_is_named(case: Case, says: str) -> None:
    with in_process(Half, CONFIG) as ask, pytest.raises(CheckError) as caught:
        check(ask, case)
    assert f'case "{case.name}"' in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"x": rows(1)[:, :1]}, "unexpected shape for input 'x'"),
        ({"x": rows(1)[0]}, "unexpected shape for input 'x'"),
        ({"x": rows(1, 2, 3, 4, 5)}, "batch-size must be <= 4"),
        ({"x": rows(1).astype(np.float64)}, "data-type is 'FP64'"),
        ({"z": rows(1)}, "unexpected inference input 'z'"),
        ({"x": rows(1), "z": rows(1)}, "expected 1 inputs but got 2"),
        ({}, "expected 1 inputs but got 0"),
    ],
)
def test_what_triton_refuses_is_refused(inputs: Any, says: str) -> None:
    with in_process(Half, CONFIG) as ask, pytest.raises(ValueError, match="under_test") as caught:
        ask(inputs)
    assert says in str(caught.value)


def test_a_model_file_is_loaded_as_triton_does_it(tmp_path: Path) -> None:
    (tmp_path / "words.py").write_text("WORDS = [b'tree']\n")
    (tmp_path / "serving.py").write_text(
        "import numpy as np\n"
        "from words import WORDS\n"
        "from pilotlib.triton_model import triton_model\n"
        "from pilotlib.verbs import Backend\n"
        "class Known(Backend):\n"
        "    def decode(self, inputs): return inputs['word']\n"
        "    def predict(self, items): return [np.isin(item, WORDS) for item in items]\n"
        "    def encode(self, result): return {'known': result}\n"
        "TritonPythonModel = triton_model(Known)\n"
    )
    config = testkit.config(
        inputs=[{"name": "word", "data_type": "BYTES", "dims": [1]}],
        outputs=[{"name": "known", "data_type": "BOOL", "dims": [1]}],
    )
    with in_process(tmp_path / "serving.py", config, tmp_path) as ask:
        asked = {"word": np.array([[b"tree"], [b"boat"]], np.object_)}
        check(ask, Case("known", asked, {"known": np.array([[True], [False]])}))


class Faulty(Half):
    """Fails as its input says, in `decode` or with what it answers."""

    def decode(self, inputs: Any) -> Any:
        value = inputs["x"][0, 0]
        if value == -1:
            raise RuntimeError("caf\udcff \x00 end")
        if value == -2:
            raise SystemExit(3)
        if value == -3:
            raise BadRequest("x", "a\x00b")
        return inputs["x"]

    def predict(self, items: Any) -> Any:
        return [item / 2 for item in items]

    def encode(self, result: Any) -> Any:
        odd = {-2: [result], -3: {"y": np.repeat(result, 2, 0)}, -4: {"y": result[:, :1]}, -5: {"y": [[1]]}}
        return odd.get(int(result[0, 0]), {"y": result})


FAULTS = [
    Case("no UTF-8", {"x": rows(-1)}, error=r"RuntimeError: caf\udcff \x00 end"),
    Case("exit", {"x": rows(-2)}, error="SystemExit: 3"),
    Case("refused", {"x": rows(-3)}, error=r'"x": a\x00b'),
    Case(
        "no outputs",
        {"x": rows(-4)},
        error="AnswerError: the backend made no outputs by name, but a value of type list",
    ),
    Case("rows", {"x": rows(-6)}, error='output "y" of shape [2, 2] for a request of 1 row, expected is [1, 2]'),
    Case("dims", {"x": rows(-8)}, error='output "y" of shape [1, 1] for a request of 1 row, expected is [1, 2]'),
    Case("no array", {"x": rows(-10)}, error='output "y" as list, not as a numpy array'),
]


def test_an_error_has_the_text_that_tritons_client_is_told_and_mates_have_answers() -> None:
    with in_process(Faulty, CONFIG) as ask:
        for case in FAULTS:
            check(ask, case)
        check_mates(ask, [each for case in FAULTS for each in (case, MATE)])
        with pytest.raises(testkit.FaultError) as caught:
            ask({"x": rows(-2)})
    assert isinstance(caught.value.__cause__, SystemExit)
