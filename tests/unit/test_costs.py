"""What requests and executions cost: the data, and how it is fitted to bursts of requests."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tritonpilot.costs import SHARES, STEADY, Costs, mean_of
from tritonpilot.errors import SpecError
from tritonpilot.profile import TOGETHER, Burst, fit, shapes_of

COSTS = Costs(rows=(1, 8, 64), execution_us=(1000.0, 1700.0, 7300.0), request_us=50.0, front_us=60.0, reply_us=40.0)


@pytest.mark.parametrize(
    ("rows", "requests", "us"),
    [(1, 1, 1050), (2, 2, 1200), (8, 1, 1750), (36, 4, 4700), (64, 1, 7350), (128, 2, 13800)],
)
def test_time_of_a_batch_is_linear_between_the_known_sizes_and_beyond(rows: int, requests: int, us: float) -> None:
    assert COSTS.execution_mean_us(rows, requests) == pytest.approx(us)


def test_a_single_known_size_stands_for_larger_ones_in_proportion() -> None:
    only = replace(COSTS, rows=(4,), execution_us=(1000.0,))

    assert [only.execution_mean_us(rows, 0) for rows in (1, 4, 8)] == [1000, 1000, 2000]


def test_costs_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "build" / "costs.json"

    COSTS.write(path)

    assert Costs.read(path) == COSTS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": [8, 1, 64]}, "rows do not rise"),
        ({"rows": [1, 8, math.inf]}, "rows holds inf, not whole"),
        ({"rows": [1, math.nan, 64]}, "rows holds nan, not whole"),
        ({"rows": [1.5, 8, 64.25]}, "rows holds 1.5, 64.25, not whole"),
        ({"rows": [True, 8, 64]}, "rows holds True, not whole"),
        ({"rows": [1, 8, 10**400]}, "rows holds 1000"),
        ({"rows": 8}, "rows is no list, but 8"),
        ({"execution_us": [1000, 1e308, 1e308]}, r"execution_us holds 1e\+308, 1e\+308, not times"),
        ({"execution_us": [1000, True, math.nan]}, "execution_us holds True, nan, not times"),
        ({"front_us": 10**400}, "front_us holds 1000"),
        ({"factor": [0.0] * 101}, "factor has the mean 0, not 1"),
        ({"wire_factor": [5.0] * 101}, "wire_factor has the mean 5, not 1"),
        ({"factor": [*[1.0] * 50, *[math.inf] * 51]}, "factor holds inf, inf, inf and 48 more, not numbers"),
        ({"cores": 0.5}, "cores is 0.5"),
        ({"cores": 1.5}, "cores is 1.5"),
        ({"cores": 10**30}, "cores is 1000"),
        ({"is_on_cpu": "false"}, "is_on_cpu is 'false', not true or false"),
        ({"cores": 0, "front_us": -1}, "front_us holds -1, not times from 0 to an hour; cores is 0"),
        ({"rows": [1, 8]}, "rows has 2 values and execution_us 3"),
        ({"execution_us": [1000, -1, 7300]}, "execution_us holds -1"),
        ({"front_us": "60"}, "front_us holds '60'"),
        ({"factor": [1.0] * 5}, "factor has 5 quantiles"),
        ({"factor": [2.0, *[1.0] * 100]}, "quantiles of factor do not rise"),
        ({"cores": 0}, "cores is 0"),
        ({"speed": 1}, "names speed"),
        ({"request_us": None}, "has no request_us"),
    ],
)
def test_costs_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    values = {name: value for name, value in {**COSTS.as_dict(), **changes}.items() if value is not None}
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(values))

    with pytest.raises(SpecError, match=said):
        Costs.read(path)


def test_a_mean_of_quantiles_is_that_of_what_is_drawn_between_them() -> None:
    # Uniform from 0 to 2 and its last hundredth to 22: of the area, not of the points.
    quantiles = np.append(np.linspace(0, 2, SHARES)[:-1], 22.0)
    drawn = np.interp(np.random.default_rng(1).random(1_000_000) * (SHARES - 1), np.arange(SHARES), quantiles)

    assert mean_of(quantiles) == pytest.approx(1.1)
    assert drawn.mean() == pytest.approx(1.1, rel=0.005)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, None], ids=["half", "list", "deep", "none"])
def test_a_file_without_costs_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(SpecError, match=str(path)):
        Costs.read(path)


def test_a_slower_machine_makes_everything_longer_but_a_device() -> None:
    slower = COSTS.scaled(1.5)
    device = replace(COSTS, is_on_cpu=False, host_us=100.0).scaled(1.5)

    assert (slower.execution_us, slower.request_us, slower.front_us) == ((1500, 2550, 10950), 75, 90)
    assert (device.execution_us, device.request_us, device.host_us) == (COSTS.execution_us, 50, 150)


def bursts_of(costs: Costs, besides_us: float = 0.0) -> list[Burst]:
    """What a server with these costs shows; a third of the stub's time would be waiting on a device that is not the CPU."""
    found = []
    front_us = costs.front_us + costs.reply_us
    for rows, requests in shapes_of(64):
        executing_us = costs.execution_mean_us(rows * requests, requests)
        stub_us = executing_us if costs.is_on_cpu else costs.host_us + costs.host_request_us * requests
        latency_us = executing_us + front_us * requests + costs.wire_us + 500
        spread = executing_us * (np.array(costs.factor) - 1)
        found.append(
            Burst(
                rows,
                requests,
                100,
                latency_us,
                500.0,
                executing_us,
                1.0,
                front_us * requests + besides_us,
                stub_us,
                spread,
            )
        )
    return found


def test_what_a_server_shows_leads_to_its_costs() -> None:
    spread = tuple(np.linspace(0.8, 1.2, 101).tolist())
    told = replace(COSTS, wire_us=200.0, factor=spread)

    found = fit(bursts_of(told), cores=1, is_on_cpu=True)

    assert found.rows == (1, 2, 4, 8, 16, 32, 64)
    assert found.execution_mean_us(48, 3) == pytest.approx(told.execution_mean_us(48, 3), rel=0.01)
    assert found.request_us == pytest.approx(50, rel=0.01)
    assert found.front_us + found.reply_us == pytest.approx(100, rel=0.01)
    assert found.wire_us == pytest.approx(200, rel=0.01)
    assert found.factor == pytest.approx(spread, rel=0.01)


def test_what_comes_with_each_execution_is_a_part_of_it_on_the_cpu() -> None:
    found = fit(bursts_of(COSTS, besides_us=150.0), cores=1, is_on_cpu=True)

    assert found.execution_mean_us(8) == pytest.approx(COSTS.execution_mean_us(8) + 150, rel=0.01)
    assert found.front_us + found.reply_us == pytest.approx(100, rel=0.01)


def test_on_a_device_the_cpu_time_of_executions_is_told_apart() -> None:
    told = replace(COSTS, is_on_cpu=False, host_us=300.0, host_request_us=30.0)

    found = fit(bursts_of(told), cores=2, is_on_cpu=False)

    assert [found.host_us, found.host_request_us] == pytest.approx([300, 30], rel=0.01)
    assert (found.cores, found.is_on_cpu) == (2, False)


def test_a_model_that_takes_single_rows_alone_can_be_fitted() -> None:
    (only,) = [burst for burst in bursts_of(COSTS) if (burst.rows, burst.requests) == (1, 1)]

    found = fit([only], cores=1, is_on_cpu=True)

    assert found.rows == (1,)
    assert found.execution_mean_us(1) == pytest.approx(1050, rel=0.2)
    assert found.factor == STEADY


def test_shapes_grow_to_the_maximum_and_no_batch_is_too_large() -> None:
    assert shapes_of(256)[:8] == [(rows, 1) for rows in (1, 2, 4, 8, 16, 32, 64, 256)]
    assert shapes_of(3) == [(1, 1), (2, 1), (3, 1), (1, 2)]
    assert {requests for _, requests in shapes_of(64)} == {1, *TOGETHER}
