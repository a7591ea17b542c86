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
