from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx_files
import pytest

from tritonpilot.errors import MeasurementError, ModelError
from tritonpilot.quantize.data import Rows
from tritonpilot.quantize.speed import Comparison, Speed, _feeds, compare, pinned, trimmed


def rows(count: int) -> Rows:
    return Rows({"x": np.arange(4 * count, dtype=np.float32).reshape(count, 4)})


def test_every_model_is_measured_at_every_batch_size_in_every_round(tmp_path: Path) -> None:
    models = {name: onnx_files.identity(tmp_path / f"{name}.onnx") for name in ("a", "b")}
    told: list[tuple[str, int, int]] = []

    found = compare(models, rows(10), [1, 7], seconds=0.01, rounds=3, progress=lambda *progress: told.append(progress))

    assert [(each.model, each.batch) for each in found.speeds] == [("a", 1), ("b", 1), ("a", 7), ("b", 7)]
    assert all(len(each.rounds) == 3 and min(each.rounds) > 0 and each.batch_ms > 0 for each in found.speeds)
    assert found.batch_sizes == (1, 7)
    assert told == [("measuring 2 models at batch 1", 0, 2), ("measuring 2 models at batch 7", 1, 2)]


def test_ratio_is_the_median_of_the_rounds_side_by_side() -> None:
    # The second round met a busy neighbour: both models got half.
    slow = Speed("FP32", 8, 100, 100, 80, 0.5, (100.0, 50.0, 100.0))
    fast = Speed("INT8", 8, 200, 200, 40, 0.5, (200.0, 110.0, 210.0))
    more = (Speed("FP32", 1, 10, 10, 100, 0, (10.0,) * 3), Speed("INT8", 1, 9, 9, 110, 0, (9.0,) * 3))
    found = Comparison((slow, fast, *more), threads=1)

    assert found.ratio("INT8", "FP32", 8) == pytest.approx(2.1)
    assert found.least_ratio("INT8", "FP32") == pytest.approx(0.9)
    assert found.of("INT8", 1) is more[1]
    with pytest.raises(KeyError):
        found.of("INT8", 64)


def test_batches_have_exactly_the_size_even_when_rows_are_fewer() -> None:
    (feed,) = _feeds(rows(3), 5)
    assert feed["x"][:, 0].tolist() == [0, 4, 8, 0, 4]


def test_batches_are_spread_over_all_rows() -> None:
    feeds = list(_feeds(rows(160), 2))
    assert len(feeds) == 8
    assert [int(feed["x"][0, 0]) // 4 for feed in feeds] == [0, 20, 40, 60, 80, 100, 120, 140]


def test_padding_that_a_batch_shares_is_cut_off_all_sequences_alike() -> None:
    ids = np.array([[5, 6, 0, 0, 0], [7, 0, 0, 0, 0]])
    mask = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    found = trimmed({"ids": ids, "mask": mask, "dense": np.zeros((2, 9))}, frozenset({"ids", "mask"}))
    assert found["ids"].tolist() == [[5, 6, 0], [7, 0, 0]]
    assert found["mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert found["dense"].shape == (2, 9)


def test_a_batch_of_padding_keeps_one_column() -> None:
    assert trimmed({"ids": np.zeros((2, 5))}, frozenset({"ids"}))["ids"].shape == (2, 1)


def test_images_of_variable_size_are_left_alone() -> None:
    image = np.zeros((1, 3, 8, 8))
    assert trimmed({"x": image}, frozenset({"x"}))["x"] is image


def test_threads_are_pinned_and_free_again_afterwards() -> None:
    before = os.sched_getaffinity(0)
    with pinned(1):
        assert len(os.sched_getaffinity(0)) == 1
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(("count", "sizes"), [(0, [1]), (3, []), (3, [0])])
def test_nothing_to_measure_is_said(tmp_path: Path, count: int, sizes: list[int]) -> None:
    with pytest.raises(MeasurementError, match="Nothing can be compared"):
        compare({"a": onnx_files.identity(tmp_path / "a.onnx")}, rows(count), sizes)


def test_rows_of_another_model_are_told_with_their_shapes(tmp_path: Path) -> None:
    model = onnx_files.identity(tmp_path / "a.onnx", ("batch", 3))
    with pytest.raises(ModelError, match=r"a.onnx cannot be run on x \[1, 4\]"):
        compare({"a": model}, rows(3), [1], seconds=0.01)


def test_a_file_that_is_no_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"cannot load .*a.onnx"):
        compare({"a": tmp_path / "a.onnx"}, rows(3), [1])
