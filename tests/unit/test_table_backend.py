"""python_backend/table without a server: its config, its cases one by one and as batch-mates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotlib import table_file, testkit
from pilotlib.config_tensors import ConfigTensorError
from pilotlib.table_fit import Column, Hashed, Number, Words, fit
from pilotlib.testkit import Case, check, check_mates, in_process
from tritonpilot import backends

MODEL = Path(__file__).parents[2] / "python_backend" / "table" / "model.py"
AGE = Number("age", missing="fill", standardise=False, clip=None, buckets=(18,))
PLAIN = Number("age", missing="fill", standardise=False)
STATE = Words("state", unknown="refuse")
DATA = {"age": [10, 20, 30], "state": ["a", "b", ""], "zip": ["1", "2", "3"]}


def config(folder: Path, columns: list[Column], max_batch_size: int = 8) -> dict[str, Any]:
    """Fits and writes a table; the config that the build makes of it."""
    table_file.write(fit(columns, DATA), folder / "features.json")
    found = backends.signature("table", {}, {"features.json": folder / "features.json"}, is_batched=max_batch_size > 0)
    assert found is not None

    def tensors(side: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "data_type": t.data_type, "dims": list(t.shape[max_batch_size > 0 :])} for t in side]

    return testkit.config(inputs=tensors(found.inputs), outputs=tensors(found.outputs), max_batch_size=max_batch_size)


def row(age: float, state: bytes) -> dict[str, Any]:
    return {"numbers": np.array([[age]], np.float32), "texts": np.array([[state]], object)}


CASES = [
    Case("known", row(20, b"b"), {"dense": np.array([[20]], np.float32), "categorical": np.array([[2, 2]])}),
    Case("missing", row(np.nan, b""), {"dense": np.array([[20]], np.float32), "categorical": np.array([[0, 3]])}),
    Case("infinite", row(np.inf, b"a"), error='"numbers": row 0: age is inf'),
    Case("unknown", row(1, b"c"), error='"texts": row 0: state has no value "c"'),
    Case("not UTF-8", row(1, b"\xff"), error='"texts": row 0: state is not UTF-8'),
    Case("unequal rows", {**row(1, b"a"), "texts": np.array([[b"a"], [b"a"]], object)}, error="rows"),
    Case("no rows", {name: array[:0] for name, array in row(1, b"a").items()}, {"dense": np.empty((0, 1), np.float32)}),
]


def test_each_case_gets_its_answer_alone_and_among_others(tmp_path: Path) -> None:
    with in_process(MODEL, config(tmp_path, [AGE, STATE]), tmp_path) as ask:
        for case in CASES:
            check(ask, case)
        check_mates(ask, CASES * 3)


@pytest.mark.parametrize(
    ("columns", "inputs", "outputs"),
    [
        ([AGE], {"numbers": np.array([[20]], np.float32)}, {"categorical": np.array([[2]])}),
        ([STATE], {"texts": np.array([[b"a"]], object)}, {"categorical": np.array([[1]])}),
        ([Hashed("zip", 1)], {"texts": np.array([[b"a"]], object)}, {"categorical": np.array([[1]])}),
        ([PLAIN], {"numbers": np.array([[20]], np.float32)}, {"dense": np.array([[20]], np.float32)}),
    ],
    ids=["numbers alone", "texts alone", "a hash alone", "no categorical"],
)
def test_tensors_without_columns_are_not_there(
    tmp_path: Path, columns: list[Column], inputs: dict[str, Any], outputs: dict[str, Any]
) -> None:
    with in_process(MODEL, config(tmp_path, columns), tmp_path) as ask:
        check(ask, Case("a row", inputs, outputs))


def test_without_batches_a_request_is_one_row(tmp_path: Path) -> None:
    with in_process(MODEL, config(tmp_path, [AGE, STATE], max_batch_size=0), tmp_path) as ask:
        inputs = {"numbers": np.array([20], np.float32), "texts": np.array([b"b"], object)}
        check(ask, Case("a row", inputs, {"dense": np.array([20], np.float32), "categorical": np.array([2, 2])}))


def test_a_config_with_other_tensors_refuses_the_model(tmp_path: Path) -> None:
    wrong = config(tmp_path, [AGE, STATE])
    wrong["output"][0]["dims"] = [2]
    with (
        pytest.raises(ConfigTensorError, match=r'output "dense" is TYPE_FP32 \[2\], but must be TYPE_FP32 \[1\]'),
        in_process(MODEL, wrong, tmp_path),
    ):
        pass
