from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from integration.test_triton_model import MIRROR
from tritonclient.utils import InferenceServerException

from pilotlib import testkit
from pilotlib.testkit import Case, check, check_mates, in_process
from tritonpilot.testkit import in_triton

pytestmark = pytest.mark.server

CONFIG = testkit.config(
    inputs=[{"name": "x", "data_type": "BF16", "dims": [2]}],
    outputs=[{"name": "y", "data_type": "BF16", "dims": [2]}],
    max_batch_size=4,
)
BITS = np.array([[0x3F80, 0x7F80], [1, 0xFFFF]], np.uint16)
REFUSED = (
    {"x": BITS[:, :1]},
    {"x": BITS[0]},
    {"x": np.repeat(BITS, 3, axis=0)},
    {"z": BITS},
    {"x": BITS, "z": BITS},
    {},
)


# Fails as a request says, in each verb and with what it answers.
FAULTY = r"""
import numpy as np

from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest


class Silent(RuntimeError):
    def __str__(self):
        raise KeyError("no text")


ERRORS = {
    b"surrogate": RuntimeError("caf\\udcff \\x00 end"),
    b"refused": BadRequest("how", "a\\x00b \\udcff"),
    b"silent": Silent(),
    b"memory": MemoryError(),
}


class Faulty(Backend):
    def decode(self, inputs):
        how = inputs["how"][0, 0]
        if how in ERRORS:
            raise ERRORS[how]
        if how == b"decode exits":
            raise SystemExit(3)
        return how, inputs["x"]

    def predict(self, items):
        if any(how == b"predict exits" for how, _ in items):
            raise SystemExit("now")
        return items

    def encode(self, result):
        how, x = result
        if how == b"encode exits":
            raise SystemExit(3)
        odd = {b"rows": np.repeat(x, 2, 0), b"no rows": x[:0], b"dims": x[:, :1], b"rank": x[:, 0], b"list": x.tolist()}
        return [x] if how == b"no dict" else {"y": odd.get(how, x)}


TritonPythonModel = triton_model(Faulty)
"""
FAULTY_CONFIG = testkit.config(
    inputs=[{"name": "x", "data_type": "FP32", "dims": [2]}, {"name": "how", "data_type": "BYTES", "dims": [1]}],
    outputs=[{"name": "y", "data_type": "FP32", "dims": [2]}],
)


def faulty(how: str, error: str) -> Case:
    return Case(how, {"x": np.ones((1, 2), np.float32), "how": np.array([[how.encode()]], np.object_)}, error=error)


FAULTS = [
    faulty("surrogate", r"RuntimeError: caf\udcff \x00 end"),
    faulty("refused", r'"how": a\x00b \udcff'),
    faulty("silent", "Silent: (its text cannot be shown: KeyError)"),
    faulty("memory", "MemoryError: "),
    faulty("decode exits", "SystemExit: 3"),
    faulty("predict exits", "SystemExit: now"),
    faulty("encode exits", "SystemExit: 3"),
    faulty(
        "rows", 'AnswerError: the backend made output "y" of shape [2, 2] for a request of 1 row, expected is [1, 2]'
    ),
    faulty("no rows", '"y" of shape [0, 2] for a request of 1 row, expected is [1, 2]'),
    faulty("dims", '"y" of shape [1, 1] for a request of 1 row, expected is [1, 2]'),
    faulty("rank", '"y" of shape [1] for a request of 1 row, expected is [1, 2]'),
    faulty("list", 'AnswerError: the backend made output "y" as list, not as a numpy array'),
    faulty("no dict", "AnswerError: the backend made no outputs by name, but a value of type list"),
]


def test_faults_of_a_backend_have_one_text_in_this_process_and_in_triton_and_spare_their_mates(tmp_path: Path) -> None:
    model = tmp_path / "faulty.py"
    model.write_text(FAULTY)
    answer = np.array([[3, 4], [5, 6]], np.float32)
    mate = Case("two rows", {"x": answer, "how": np.array([[b""], [b""]], np.object_)}, {"y": answer})
    with in_process(model, FAULTY_CONFIG) as here, in_triton(model, FAULTY_CONFIG) as there:
        for ask in (here, there):
            for case in FAULTS:
                check(ask, case)
            check_mates(ask, [each for case in FAULTS for each in (case, mate)])
        for case in FAULTS:
            (ours,), (theirs,) = here.together([case.inputs]), there.together([case.inputs])
            assert isinstance(theirs, InferenceServerException)
            assert str(ours).strip() == str(theirs.message()).strip()
        served = there.server.statistics("under_test")[0]
        assert served.execution_count < served.success.count + served.fail.count


def test_the_same_cases_pass_in_this_process_and_in_triton(tmp_path: Path) -> None:
    model = tmp_path / "mirror.py"
    model.write_text(MIRROR)
    cases = [
        Case("two rows", {"x": BITS}, {"y": BITS[:, ::-1]}),
        Case("wrong width", {"x": BITS[:, :1]}, error="unexpected shape"),
        Case("one row", {"x": BITS[1:]}, {"y": BITS[1:, ::-1]}),
    ]
    with in_process(model, CONFIG) as here, in_triton(model, CONFIG) as there:
        for ask in (here, there):
            for case in cases:
                check(ask, case)
            check_mates(ask, cases * 3)
        (mirrored,) = there.server.statistics("under_test")
        assert mirrored.execution_count < mirrored.success.count
        for inputs in REFUSED:
            with pytest.raises(ValueError, match="under_test") as ours:
                here(inputs)
            with pytest.raises(InferenceServerException) as theirs:
                there(inputs)
            assert str(ours.value).partition(" for model ")[0] in str(theirs.value)
