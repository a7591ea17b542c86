from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper
from unit.onnx_files import save

from pilotlib import rows as rows_module
from pilotlib.onnx_session import ModelFileError, OnnxSession, model_path, session_options, thread_count
from pilotlib.parameters import Parameters
from pilotlib.rows import RowRunner
from pilotlib.split import SplitError, split
from pilotlib.tensors import DTYPES, text_from_bytes


def load(path: Path) -> OnnxSession:
    options, _ = session_options({}, Parameters(intra_op_thread_count=1), cores=1)
    return OnnxSession(path, options)


def sum_and_first(path: Path, width: int | str) -> OnnxSession:
    """x, k FP32 [b, width] -> s = x + k."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "k"], ["s"])],
        "sum",
        [value("x", TensorProto.FLOAT, ["b", width]), value("k", TensorProto.FLOAT, ["b", width])],
        [value("s", TensorProto.FLOAT, ["b", width])],
    )
    return load(save(path, graph))


@pytest.mark.parametrize("width", [3, "w"])
@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [8], [40, 40]])  # the last is above max_batch_size
def test_every_request_gets_its_own_rows(tmp_path: Path, width: int | str, is_fresh: bool, counts: list[int]) -> None:
    runner = RowRunner(sum_and_first(tmp_path / "m.onnx", width), ["x", "k"], ["s"], 8)
    for round_ in range(3):
        requests = [
            [np.full((count, 3), index + round_, np.float32), np.full((count, 3), 100, np.float32)]
            for index, count in enumerate(counts)
        ]
        answers = runner.run(requests, ["s"], is_fresh)
        for index, (count, (answer,)) in enumerate(zip(counts, answers, strict=True)):
            assert answer.tolist() == [[index + round_ + 100.0] * 3] * count


def test_a_large_single_request_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "COPY_BELOW_BYTES", 0)
    runner = RowRunner(sum_and_first(tmp_path / "m.onnx", 3), ["x", "k"], ["s"], 8)
    one = np.ones((2, 3), np.float32)
    assert runner.run([[one, one]], ["s"])[0][0].tolist() == [[2.0] * 3] * 2


def test_an_output_without_a_row_per_row_is_refused() -> None:
    with pytest.raises(SplitError, match=r'"y" has shape \[2\] for 3 rows'):
        split([np.zeros(2)], ["y"], [1, 2], 3)


def test_threads_never_exceed_the_cores_by_themselves() -> None:
    assert [thread_count(0, 1, 4), thread_count(0, 2, 4), thread_count(0, 8, 4), thread_count(3, 8, 4)] == [4, 2, 1, 3]
    _, remarks = session_options({"instance_group": [{"count": 3}]}, Parameters(intra_op_thread_count=2), cores=4)
    assert "2 times 3 instances is more threads than the 4 cores" in remarks[0]


def test_missing_and_corrupt_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no file .*model\.onnx"):
        model_path({}, tmp_path)
    (tmp_path / "model.onnx").mkdir()
    inside = tmp_path / "model.onnx" / "model.onnx"
    inside.write_bytes(b"not a model")
    assert model_path({}, tmp_path) == inside
    with pytest.raises(ModelFileError, match="cannot load"):
        load(inside)


def test_element_types_have_one_row_each() -> None:
    assert len({dtype.config for dtype in DTYPES}) == len({dtype.onnx_code for dtype in DTYPES}) == len(DTYPES) == 14


def test_strings_become_text_and_keep_their_shape() -> None:
    raw = np.array([["é".encode(), b""], [b"a", "b"]], np.object_)
    assert text_from_bytes(raw).tolist() == [["é", ""], ["a", "b"]]
    assert text_from_bytes(np.empty((0, 2), np.object_)).shape == (0, 2)
    with pytest.raises(UnicodeDecodeError):
        text_from_bytes(np.array([b"\xff"], np.object_))
