"""pilotlib.curve and the backend emulated: the time that an accelerator would take, without its work."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotlib import testkit
from pilotlib.curve import Curve, CurveError, Draws, read

BACKEND = Path(__file__).parents[2] / "python_backend" / "emulated" / "model.py"
CURVES = Path(__file__).parents[2] / "perf" / "curves"
SAID: dict[str, Any] = {"name": "a device", "source": "a test", "rows": [1, 8, 16], "execution_us": [1000, 1700, 3300]}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "curve.json"
    path.write_text(json.dumps({key: value for key, value in {**SAID, **changes}.items() if value is not None}))
    return path


@pytest.mark.parametrize(("rows", "us"), [(1, 1000), (2, 1100), (8, 1700), (12, 2500), (16, 3300), (24, 4900)])
def test_times_lie_between_the_known_sizes_and_go_on_beyond_them(tmp_path: Path, rows: int, us: float) -> None:
    assert read(written(tmp_path)).mean_us(rows) == pytest.approx(us)


def test_a_single_size_stands_for_all_in_proportion() -> None:
    curve = Curve("a device", "a test", (4,), (1000.0,))

    assert [curve.mean_us(rows) for rows in (1, 4, 8)] == [1000, 1000, 2000]


def test_the_spread_keeps_the_mean_and_the_seed_decides() -> None:
    curve = Curve("a device", "a test", (1,), (1000.0,), spread=0.2)
    draws = Draws(curve, 7)
    times = np.array([draws.next_us(1) for _ in range(20_000)])
    again = Draws(curve, 7)

    assert times.mean() == pytest.approx(1000, rel=0.01)
    assert np.log(times).std() == pytest.approx(0.2, rel=0.05)
    assert [again.next_us(1) for _ in range(5)] == times[:5].tolist()


def test_instances_draw_times_of_their_own() -> None:
    curve = Curve("a device", "a test", (1,), (1000.0,), spread=0.2)

    def times(seed: str) -> list[float]:
        draws = Draws(curve, seed)
        return [draws.next_us(1) for _ in range(5)]

    assert times("0 v100_0_0") == times("0 v100_0_0")
    assert times("0 v100_0_0") != times("0 v100_0_1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": [1, 8]}, "as many numbers"),
        ({"rows": [8, 1, 16]}, "rise from 1"),
        ({"rows": [0, 8, 16]}, "rise from 1"),
        ({"execution_us": [1000, -1, 3300]}, "above 0"),
        ({"execution_us": [1000, "1", 3300]}, "above 0"),
        ({"execution_us": [1000, 10**400, 3300]}, "above 0"),
        ({"rows": [1, 8, 10**400]}, "rise from 1"),
        ({"spread": 10**400}, "from 0 to 2"),
        ({"spread": 9}, "from 0 to 2"),
        ({"source": None}, 'does not say "source"'),
        ({"speed": 1}, 'names "speed"'),
    ],
)
def test_a_curve_that_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CurveError, match=said):
        read(written(tmp_path, **changes))


def test_a_curve_that_is_not_there_or_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "curve.json").write_text("{")

    for name in ("curve.json", "other.json"):
        with pytest.raises(CurveError, match=name):
            read(tmp_path / name)


def test_published_curves_can_be_read_and_name_their_source() -> None:
    curves = [read(path) for path in sorted(CURVES.glob("*.json"))]

    assert len(curves) >= 2
    assert all(curve.source and curve.spread > 0 for curve in curves)


def test_an_execution_takes_its_time_without_burning_it(tmp_path: Path) -> None:
    written(tmp_path, execution_us=[20_000, 30_000, 40_000])
    config = testkit.config(
        inputs=[{"name": "row", "data_type": "FP32", "dims": [2]}],
        outputs=[{"name": "emulated", "data_type": "FP32", "dims": [3]}],
        parameters={"input_size": 2, "output_size": 3},
    )
    first, second = np.array([[1, 9], [2, 9]], np.float32), np.full((6, 2), 5, np.float32)

    with testkit.in_process(BACKEND, config, tmp_path) as ask:
        began, burnt = time.perf_counter(), time.process_time()
        answers = ask.together([{"row": first}, {"row": second}])
        took, burnt = time.perf_counter() - began, time.process_time() - burnt

    found = [answer["emulated"].tolist() for answer in answers if not isinstance(answer, Exception)]
    assert found == [[[1] * 3, [2] * 3], [[5] * 3] * 6]
    assert took >= 0.03  # 8 rows
    assert burnt < took / 2


@pytest.mark.parametrize(("is_shared", "at_least_s"), [(False, 0.03), (True, 0.06)])
def test_instances_that_share_a_device_take_turns(tmp_path: Path, is_shared: bool, at_least_s: float) -> None:
    written(tmp_path, rows=[1], execution_us=[30_000])
    config = testkit.config(
        inputs=[{"name": "row", "data_type": "FP32", "dims": [1]}],
        outputs=[{"name": "emulated", "data_type": "FP32", "dims": [1]}],
        parameters={"one_device": str(is_shared).lower()},
    )
    row = {"row": np.ones((1, 1), np.float32)}
    with (
        testkit.in_process(BACKEND, config, tmp_path) as one,
        testkit.in_process(BACKEND, config, tmp_path) as other,
        ThreadPoolExecutor(2) as together,
    ):
        began = time.perf_counter()
        asked = [together.submit(ask.together, [row]) for ask in (one, other)]
        answers = [each.result()[0] for each in asked]
        took = time.perf_counter() - began
    assert not any(isinstance(answer, Exception) for answer in answers)
    assert at_least_s <= took < (0.055 if not is_shared else 1)
