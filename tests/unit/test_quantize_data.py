"""quantize/data.py: an archive of rows fits its model, or the message says what does not."""

from __future__ import annotations

import resource
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tritonpilot.errors import HostError, ModelError
from tritonpilot.onnx_model import Signature, TensorSignature
from tritonpilot.quantize.data import Rows, read, write

CTR = Signature(
    (TensorSignature("dense", "FP32", (-1, 3)), TensorSignature("categorical", "INT64", (-1, 2))),
    (TensorSignature("prob", "FP32", (-1, 1)),),
)
TEXT = Signature((TensorSignature("input_ids", "INT64", (-1, -1)),), ())


def arrays(rows: int = 7, **more: Any) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(7)
    dense = random.normal(size=(rows, 3)).astype(np.float32)
    return {"dense": dense, "categorical": random.integers(0, 9, (rows, 2)), **more}


def saved(folder: Path, content: dict[str, NDArray[Any]]) -> Path:
    path = folder / "calibration.npz"
    np.savez(path, **content)  # type: ignore[arg-type]
    return path


def test_an_archive_comes_back_in_the_order_of_the_model(tmp_path: Path) -> None:
    content = arrays(**{"label": np.arange(7.0), "slice.hour": np.arange(7) % 3, "slice.group": np.array(["a"] * 7)})
    rows = read(saved(tmp_path, dict(reversed(content.items()))), CTR)
    assert list(rows.inputs) == ["dense", "categorical"]
    assert rows.count == 7
    assert rows.slices["hour"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert set(rows.slices["group"].tolist()) == {"a"}
    np.testing.assert_array_equal(rows.inputs["dense"], content["dense"])
    assert rows.label is not None
    assert rows.label[-1] == 6
    assert rows.sequences == frozenset()


def test_labels_slices_and_column_names_are_optional(tmp_path: Path) -> None:
    rows = read(saved(tmp_path, arrays()), CTR)
    assert (rows.slices, rows.label, rows.columns) == ({}, None, {})
    named = read(saved(tmp_path, arrays(**{"columns.dense": np.array(["age", "rate", "hour"])})), CTR)
    assert named.columns == {"dense": ("age", "rate", "hour")}


def test_inputs_of_variable_size_are_known_as_sequences(tmp_path: Path) -> None:
    rows = read(saved(tmp_path, {"input_ids": np.ones((4, 9), np.int64)}), TEXT)
    assert rows.sequences == {"input_ids"}


def test_taken_rows_carry_their_slices_and_labels() -> None:
    content = arrays()
    rows = Rows(content, {"hour": np.arange(7)}, np.arange(7) * 10, {"dense": ("a", "b", "c")}, frozenset({"dense"}))
    taken = rows.take(np.array([5, 0, 5]))
    assert taken.count == 3
    assert taken.slices["hour"].tolist() == [5, 0, 5]
    assert taken.label is not None
    assert taken.label.tolist() == [50, 0, 50]
    np.testing.assert_array_equal(taken.inputs["dense"], content["dense"][[5, 0, 5]])
    assert (taken.columns, taken.sequences) == (rows.columns, rows.sequences)


def test_the_last_batch_is_ragged_and_no_row_is_lost() -> None:
    content = arrays()
    batches = list(Rows(content).batches(3))
    assert [len(batch["dense"]) for batch in batches] == [3, 3, 1]
    np.testing.assert_array_equal(np.concatenate([batch["categorical"] for batch in batches]), content["categorical"])
    assert [len(batch["dense"]) for batch in Rows(content).batches(64)] == [7]
    with pytest.raises(ValueError, match="not 0"):
        next(Rows(content).batches(0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dense": None}, r"lacks the input dense"),
        ({"clicks": np.zeros(7)}, r"holds clicks, no input.*label, slice\.NAME"),
        ({"label": np.zeros(6)}, r"same number of rows.*dense 7, categorical 7, label 6"),
        ({"slice.hour": np.zeros(8, int)}, r"same number of rows.*slice\.hour 8"),
        ({"slice.hour": np.zeros(7)}, r"slice\.hour is float64\[7\].*one string or integer"),
        ({"slice.hour": np.zeros((7, 2), int)}, r"slice\.hour is int64\[7, 2\]"),
        ({"dense": np.zeros((7, 3))}, r"dense is float64\[7, 3\].*FP32\[-1, 3\]"),
        ({"dense": np.zeros((7, 4), np.float32)}, r"dense is float32\[7, 4\].*FP32\[-1, 3\]"),
        ({"categorical": np.zeros((7, 2), np.int32)}, r"categorical is int32\[7, 2\].*INT64\[-1, 2\]"),
        ({"columns.dense": np.array(["a", "b"])}, r"columns\.dense is <U1\[2\].*3 columns of dense"),
        ({"columns.other": np.array(["a", "b"])}, r"columns\.other .*columns of an input"),
        ({"label": np.float32(1)}, r"label is a single value"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    content = {name: array for name, array in {**arrays(), **change}.items() if array is not None}
    with pytest.raises(ModelError, match=says):
        read(saved(tmp_path, content), CTR)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused_with_input_row_and_column(tmp_path: Path, value: float) -> None:
    content = arrays()
    content["dense"][4, 2] = value
    with pytest.raises(ModelError, match=rf"dense has {value} in row 4, column 2, .*1 of 7 rows"):
        read(saved(tmp_path, content), CTR)


def test_nan_among_labels_and_in_bf16_is_refused(tmp_path: Path) -> None:
    labels = np.array([0, 1, 0, np.nan, 1, 0, 1], np.float32)
    with pytest.raises(ModelError, match="label has nan in row 3"):
        read(saved(tmp_path, arrays(label=labels)), CTR)
    half = Signature((TensorSignature("x", "BF16", (-1, 2)),), ())
    bits = np.array([[0x3F80, 0x4000], [0x3F80, 0x7FC0]], np.uint16)  # 1, 2; 1, NaN
    with pytest.raises(ModelError, match="x has nan in row 1, column 1"):
        read(saved(tmp_path, {"x": bits}), half)
    assert read(saved(tmp_path, {"x": bits[:1]}), half).count == 1


def test_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="at least one"):
        read(saved(tmp_path, arrays(rows=0)), CTR)


def test_missing_and_damaged_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"do not exist.*evaluation\.py"):
        read(tmp_path / "none.npz", CTR)
    path = saved(tmp_path, arrays())
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelError, match=r"not an \.npz archive"):
        read(path, CTR)
    with pytest.raises(ModelError, match=r"not as object arrays"):
        read(saved(tmp_path, arrays(label=np.array(["a"] * 7, object))), CTR)
    with zipfile.ZipFile(saved(tmp_path, arrays()), "a") as archive:
        archive.writestr("readme.txt", "not an array")
    with pytest.raises(ModelError, match=r"readme\.txt in it is no array"):
        read(path, CTR)
    with path.open("wb") as file:  # one array, as np.save writes it
        np.save(file, arrays()["dense"])
    with pytest.raises(ModelError, match=r"not an \.npz archive"):
        read(path, CTR)


def test_what_is_written_is_read_again_and_is_the_same_each_time(tmp_path: Path) -> None:
    content = arrays()
    rows = Rows(content, {"hour": np.arange(7)}, np.arange(7.0), {"dense": ("a", "b", "c")})
    for name in ("once", "twice"):
        write(rows, tmp_path / name / "rows.npz")
    again = read(tmp_path / "once/rows.npz", CTR)
    np.testing.assert_array_equal(again.inputs["dense"], content["dense"])
    assert again.label is not None
    assert (again.slices["hour"].tolist(), again.label.tolist()) == (list(range(7)), list(range(7)))
    assert again.columns == rows.columns
    assert (tmp_path / "once/rows.npz").read_bytes() == (tmp_path / "twice/rows.npz").read_bytes()


def test_a_write_that_fails_leaves_the_older_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    write(Rows(arrays()), path)
    before = path.read_bytes()

    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, unlimited[1]))  # a file may not grow further, as on a full disk
    try:
        with pytest.raises(HostError, match=r"Cannot write .*half-written"):
            write(Rows(arrays(rows=1000)), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.npz"]
