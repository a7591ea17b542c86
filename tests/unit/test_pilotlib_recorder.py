"""pilotlib/recorder.py: a fair sample, written whole, without what must not be stored."""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotlib.parameters import ParameterError
from pilotlib.recorder import Recorder, Reservoir, recorder_of

CONFIG = {"max_batch_size": 64, "input": [{"name": "x"}, {"name": "text"}, {"name": "user_id"}]}


def kept(size: int, stream: list[int], seed: int) -> list[int]:
    """What a reservoir has kept of the row numbers 0, 1, ... that come in requests of so many rows."""
    reservoir = Reservoir(size, seed)
    slots: dict[int, int] = {}
    first = 0
    for rows in stream:
        for row, slot in reservoir.take(rows):
            assert 0 <= row < rows
            slots[slot] = first + row
        first += rows
    assert reservoir.seen == first
    return [slots[slot] for slot in sorted(slots)]


def recorder(folder: Path, **options: Any) -> Recorder:
    made = recorder_of(
        CONFIG, **{"keep": 100, "path": str(folder / "rows.npz"), "drop": "user_id", "instance": "m_0_0", **options}
    )
    assert made is not None
    return made


def request(rows: int, first: int = 0) -> dict[str, np.ndarray]:
    numbers = np.arange(first, first + rows, dtype=np.float32)
    return {
        "x": np.column_stack([numbers, -numbers]),
        "text": np.array([[b"row %d" % number] for number in numbers.astype(int)], dtype=object),
        "user_id": numbers.astype(np.int64),
    }


def written(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "rows.m_0_0.npz", allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def test_a_stream_that_fits_is_kept_whole_however_it_comes() -> None:
    assert kept(10, [3, 0, 7], seed=1) == list(range(10))
    assert kept(10, [4], seed=1) == list(range(4))


def test_each_row_has_the_same_chance_in_requests_of_any_size() -> None:
    trials, rows, size = 4000, 60, 12
    for stream in ([1] * rows, [60], [5, 30, 1, 24]):
        counts = np.zeros(rows)
        for seed in range(trials):
            chosen = kept(size, stream, seed)
            assert len(set(chosen)) == size
            counts[chosen] += 1
        expected = trials * size / rows
        chi_square = ((counts - expected) ** 2 / (expected * (1 - size / rows))).sum()
        assert abs(chi_square - rows) < 4 * math.sqrt(2 * rows)


def test_a_reservoir_draws_as_often_as_it_keeps_and_not_for_each_row() -> None:
    reservoir = Reservoir(100, seed=3)
    reservoir.take(100)
    taken = sum(len(reservoir.take(1000)) for _ in range(1000))
    assert taken == pytest.approx(100 * math.log(1_000_100 / 100), rel=0.2)  # expected: size x ln(rows / size)


def test_a_reservoir_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="not 0"):
        Reservoir(0)


def test_off_is_no_recorder_at_all() -> None:
    assert recorder_of(CONFIG, keep=0, path="", drop="", instance="m_0_0") is None


def test_recorded_rows_are_read_again_without_the_dropped_input(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    recording.offer(request(3))
    recording.offer(request(2, first=3))
    recording.close()
    rows = written(tmp_path)
    assert set(rows) == {"x", "text"}
    assert rows["x"].tolist() == [[number, -number] for number in range(5)]
    assert rows["x"].dtype == np.float32
    assert rows["text"][:, 0].tolist() == [b"row %d" % number for number in range(5)]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.m_0_0.npz"]
    assert stat.S_IMODE((tmp_path / "rows.m_0_0.npz").stat().st_mode) == 0o600


def test_kept_rows_are_copies_of_memory_that_triton_takes_back(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    inputs = request(3)
    recording.offer(inputs)
    inputs["x"][:] = 99
    recording.close()
    assert written(tmp_path)["x"][2].tolist() == [2, -2]


def test_a_long_stream_leaves_as_many_rows_as_are_kept_and_both_inputs_of_the_same_row(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    for first in range(0, 5000, 50):
        recording.offer(request(50, first))
    recording.close()
    rows = written(tmp_path)
    numbers = rows["x"][:, 0].astype(int)
    assert len(set(numbers.tolist())) == 100
    assert numbers.max() > 2500
    assert rows["text"][:, 0].tolist() == [b"row %d" % number for number in numbers]


def test_the_file_is_there_before_the_end_and_written_seldom(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    sizes = []
    for first in range(9):
        recording.offer(request(1, first))
        sizes.append(len(written(tmp_path)["x"]))
    assert sizes == [1, 2, 2, 4, 4, 4, 4, 8, 8]


def test_rows_that_calibrate_nothing_are_not_written(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    inputs = request(4)
    inputs["x"][1, 0], inputs["x"][2, 1] = np.nan, np.inf
    recording.offer(inputs)
    assert written(tmp_path)["x"][:, 0].tolist() == [0, 3]


def test_rows_of_different_length_are_padded(tmp_path: Path) -> None:
    config = {"max_batch_size": 8, "input": [{"name": "ids"}, {"name": "hour"}]}
    recording = recorder_of(config, keep=9, path=str(tmp_path / "rows.npz"), drop="", instance="m_0_0")
    assert recording is not None
    recording.offer({"ids": np.array([[1, 2, 3]]), "hour": np.array([7])})
    recording.offer({"ids": np.array([[4], [5]]), "hour": np.array([8, 9])})
    recording.close()
    assert written(tmp_path)["ids"].tolist() == [[1, 2, 3], [4, 0, 0], [5, 0, 0]]
    assert written(tmp_path)["hour"].tolist() == [7, 8, 9]


def test_a_model_without_rows_gives_one_row_a_request(tmp_path: Path) -> None:
    config = {"max_batch_size": 0, "input": [{"name": "x"}]}
    recording = recorder_of(config, keep=9, path=str(tmp_path / "rows.npz"), drop="", instance="m_0_0")
    assert recording is not None
    for value in (1.0, 2.0):
        recording.offer({"x": np.array([value, value])})
    recording.close()
    assert written(tmp_path)["x"].tolist() == [[1, 1], [2, 2]]


def test_a_request_without_an_optional_input_is_passed_over(tmp_path: Path) -> None:
    recording = recorder(tmp_path)
    recording.offer({"x": np.ones((2, 2), np.float32)})
    recording.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_ends_the_recording_with_a_line_in_the_log(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "gone"
    folder.mkdir()
    recording = recorder(folder, log=said.append)
    folder.rmdir()
    recording.offer(request(1))
    recording.offer(request(1))
    recording.close()
    assert not recording.is_on
    assert len(said) == 1
    assert "no longer recorded" in said[0]
    assert "Serving goes on" in said[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"path": ""}, 'pilot_record_file" in config.pbtxt is "", but must name'),
        ({"path": "rows.npz"}, "by its whole path"),
        ({"path": "/no/such/folder/rows.npz"}, "may write to"),
        ({"drop": "user"}, 'pilot_record_drop" in config.pbtxt names "user", which is no input.*x, text, user_id'),
        ({"drop": "x, text,user_id"}, "leaves no input to record"),
    ],
)
def test_a_recording_that_is_not_told_well_refuses_the_model(
    tmp_path: Path, options: dict[str, str], says: str
) -> None:
    with pytest.raises(ParameterError, match=says):
        recorder(tmp_path, **options)
