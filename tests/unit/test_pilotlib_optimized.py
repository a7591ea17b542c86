from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import SessionOptions
from unit.onnx_files import save

from pilotlib import optimize, optimized
from pilotlib.onnx_session import ModelFileError
from pilotlib.optimized import find, is_made_for, open_session
from pilotlib.parameters import Parameters

ROWS = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return dense(tmp_path / "m" / "1" / "model.onnx", seed=1)


def dense(path: Path, seed: int, rows: int | str = "batch") -> Path:
    """x [rows, 64] -> y [rows, 512]: a MatMul, whose weights the CPU's kernel packs."""
    weights = np.random.default_rng(seed).standard_normal((64, 512)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (rows, 64))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (rows, 512))],
        [numpy_helper.from_array(weights, "w")],
    )
    return save(path, graph)


def answer(path: Path, config: dict[str, Any] | None = None) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    session, remarks = open_session(path, config or {}, Parameters(), SessionOptions())
    (found,) = session.run(["y"], {"x": ROWS})
    return found, remarks


def written(paths: Sequence[Path], capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    optimize.main([str(path) for path in paths])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_copy_is_opened_and_answers_the_same_bits(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, _ = answer(path)
    assert find(path) is None

    (told,) = written([path], capsys)

    assert told == {"path": str(path), "did": "written", "said": ""}
    copy = find(path)
    assert copy is not None
    assert copy.with_name("weights.bin").stat().st_size > 64 * 512 * 4
    path.write_bytes(b"not read again" + path.read_bytes()[14:])  # the same size; and the same time:
    facts = json.loads(copy.with_name("facts.json").read_bytes())
    os.utime(path, ns=(0, facts["made_of"]["model.onnx"][1]))
    found, remarks = answer(path)
    assert remarks == ()
    assert found.tobytes() == before.tobytes()


def test_weights_of_a_copy_are_mapped(path: Path) -> None:
    optimize.write(path)
    code = (
        "import sys, pathlib, onnxruntime\n"
        "from pilotlib.optimized import open_session\n"
        "from pilotlib.parameters import Parameters\n"
        "kept = open_session(pathlib.Path(sys.argv[1]), {}, Parameters(), onnxruntime.SessionOptions())\n"
        "print(open('/proc/self/maps').read())"
    )
    maps = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
    assert str(find(path).with_name("weights.bin")) in maps  # type: ignore[union-attr]


def test_what_is_current_is_left(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written([path], capsys)
    before = find(path).stat().st_mtime_ns  # type: ignore[union-attr]
    (told,) = written([path], capsys)
    assert told["did"] == "current"
    assert find(path).stat().st_mtime_ns == before  # type: ignore[union-attr]


def test_a_copy_of_another_file_is_not_opened_and_goes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written([path], capsys)
    dense(path, seed=2)
    new, _ = answer(path)
    assert find(path) is None

    (path.parent / optimized.FOLDER / "other").mkdir()
    (told,) = written([path], capsys)

    assert told["did"] == "written"
    assert answer(path)[0].tobytes() == new.tobytes()
    assert [each.name for each in (path.parent / optimized.FOLDER).iterdir()] == [
        optimized.folder_name(optimized.runs_on())
    ]


def test_a_file_beside_the_model_counts(path: Path) -> None:
    optimize.write(path)
    (path.parent / "model.data").write_bytes(b"weights of another file")
    assert find(path) is None


def test_a_copy_for_another_machine_stays_and_is_not_opened(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(optimized, "runs_on", lambda: "onnxruntime 9; another CPU")
        theirs = optimize.write(path)
    assert find(path) is None
    ours = optimize.write(path)
    assert theirs.is_file()
    assert find(path) == ours


def test_a_damaged_copy_is_left_out_with_a_remark(path: Path) -> None:
    before, _ = answer(path)
    copy = optimize.write(path)
    copy.write_bytes(b"nonsense")
    found, (remark,) = answer(path)
    assert remark.startswith("its optimized copy is left out, the model file itself is opened: ")
    assert found.tobytes() == before.tobytes()


@pytest.mark.parametrize("facts", ["", "[]", "{}", '{"runs_on": 1}'])
def test_damaged_facts_are_no_copy(path: Path, facts: str) -> None:
    optimize.write(path).with_name("facts.json").write_text(facts)
    assert find(path) is None
    answer(path)


@pytest.mark.parametrize(
    ("config", "parameters", "expected"),
    [
        ({}, Parameters(), True),
        ({"optimization": {"graph": {"level": 1}}}, Parameters(), False),
        ({"model_operations": {"op_library_filename": ["ops.so"]}}, Parameters(), False),
        ({}, Parameters(session={"session.disable_prepacking": "1"}), False),
        ({}, Parameters(intra_op_thread_count=3), True),
    ],
)
def test_options_that_a_copy_has_decided_otherwise(
    config: dict[str, Any], parameters: Parameters, expected: bool
) -> None:
    assert is_made_for(config, parameters) is expected


def test_a_model_that_answers_otherwise_gets_no_copy(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dense(path.parents[1] / "2" / "model.onnx", seed=2)
    opened = optimize.OnnxSession

    def open_other(asked: Path, options: SessionOptions) -> Any:
        return opened(other if asked.parent.name.startswith(".new-") else asked, options)

    monkeypatch.setattr(optimize, "OnnxSession", open_other)
    optimize_row = path.parents[1] / "warmup"
    optimize_row.mkdir()
    ROWS[0].tofile(optimize_row / "x.bin")  # zeros would be answered alike
    (told,) = written([path], capsys)
    assert (told["did"], told["said"]) == ("nothing", "its optimized copy answers y otherwise")
    assert list((path.parent / optimized.FOLDER).iterdir()) == []


def test_what_cannot_be_copied_is_said_and_the_next_one_is_done(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corrupt = tmp_path / "c" / "1" / "model.onnx"
    corrupt.parent.mkdir(parents=True)
    corrupt.write_bytes(b"nonsense")
    told = written([corrupt, tmp_path / "absent" / "1" / "model.onnx", path], capsys)
    assert [each["did"] for each in told] == ["nothing", "nothing", "written"]
    assert "ONNX Runtime cannot load" in told[0]["said"]
    assert "No such file" in told[1]["said"]
    with pytest.raises(ModelFileError):
        answer(corrupt)


def test_a_model_of_one_row_is_copied_too(tmp_path: Path) -> None:
    path = dense(tmp_path / "m" / "1" / "model.onnx", seed=3, rows=3)
    before, _ = answer(path)
    optimize.write(path)
    assert answer(path)[0].tobytes() == before.tobytes()


def test_the_cpu_and_the_runtime_are_told() -> None:
    place = optimized.runs_on()
    assert place.startswith("onnxruntime 1.")
    assert len(place) > len("onnxruntime 1.32.0; ")
    assert place.count("vendor_id") <= 1
