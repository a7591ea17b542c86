from __future__ import annotations

import io
import json
from dataclasses import fields, replace

import numpy as np
import pytest
from rich.console import Console

from tritonpilot import measurement, sweep
from tritonpilot.measurement import METRICS, Point
from tritonpilot.metrics import Statistics
from tritonpilot.perf_analyzer import Load, Reading

POINT = Point(
    model="ctr",
    protocol="grpc",
    batch=1,
    concurrency=16,
    rate_per_s=None,
    throughput_infer_s=12345.6,
    avg_ms=1.5,
    p50_ms=1.25,
    p90_ms=2,
    p95_ms=3,
    p99_ms=4.125,
    mean_batch=7.77,
    queue_ms=0.5,
    compute_ms=0.75,
    network_ms=0.2,
    client_ms=0.01,
    client_cores=0.4,
    spread_pct=5,
    is_stable=True,
)
READING = Reading(1000, 900, 800, 950, 990, 1500, 20, 200, 300, 380, 1, 1, 1, (), 7, True, 3.0, 6.0)


def drawn(points: list[Point]) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(measurement.table(points))
    return out.getvalue()


def test_every_metric_is_a_value_of_point() -> None:
    names = {field.name for field in fields(Point)} | {"load"}
    assert {metric.name for metric in METRICS} <= names


def test_table_shows_the_columns_of_the_demo() -> None:
    text = drawn([POINT])
    for word in ("concurrency", "throughput", "P50", "P99", "mean batch", "queue", "compute", "12,346", "4.12", "7.8"):
        assert word in text
    assert "~" not in text


def test_table_marks_and_names_points_that_did_not_settle() -> None:
    text = drawn([POINT, replace(POINT, concurrency=64, spread_pct=55, is_stable=False)])
    assert "~64" in text
    assert "64 (55 %)" in text


def test_open_loop_table_is_headed_by_the_rate() -> None:
    text = drawn([replace(POINT, concurrency=None, rate_per_s=250.0)])
    assert "rate" in text
    assert "250/s" in text


def test_value_that_does_not_exist_is_a_dash_and_null() -> None:
    idle = replace(POINT, mean_batch=float("nan"))
    assert "-" in measurement.cells(idle)
    assert json.loads(measurement.to_json([idle]))[0]["mean_batch"] is None


def test_json_has_every_field() -> None:
    assert set(json.loads(measurement.to_json([POINT]))[0]) == {field.name for field in fields(Point)}


def test_sweep_repeats_a_shaky_load_and_keeps_the_calmest(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [replace(READING, spread_pct=80, is_stable=False), replace(READING, spread_pct=40, is_stable=False)]
    told: list[str] = []
    points = swept(monkeypatch, readings, told, attempts=2)
    assert [point.spread_pct for point in points] == [40]
    assert not points[0].is_stable
    assert told[1] == "the windows at concurrency 4 differ by 80 % (allowed 20 %)"


def test_sweep_does_not_repeat_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [replace(READING, spread_pct=80, is_stable=False)]
    assert len(swept(monkeypatch, readings, [], attempts=5, budget_s=3)) == 1  # an attempt takes 6 s


def test_point_takes_latency_from_the_client_and_batches_from_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    (point,) = swept(monkeypatch, [READING], [])
    assert (point.p99_ms, point.throughput_infer_s) == (1.5, 1000)
    assert (point.mean_batch, point.queue_ms, point.compute_ms) == (4, 0.5, 1.5)
    assert point.client_cores == 0.5


def swept(monkeypatch: pytest.MonkeyPatch, readings: list[Reading], told: list[str], **wanted: float) -> list[Point]:
    """Points of one load with prepared readings; tests/integration has the real ones."""
    left = iter(readings)
    counts = iter(range(100))

    def statistics(url: str, model: str) -> Statistics:  # noqa: ARG001
        n = next(counts)
        return Statistics(10 * n, 0, 40 * n, 10 * n, 0, 0, n * 5_000_000, 0, n * 15_000_000, 0)

    def run(load: Load, *, cpus: object) -> Reading:  # noqa: ARG001
        return next(left)

    monkeypatch.setattr(sweep.perf_analyzer, "run", run)
    monkeypatch.setattr(sweep.metrics, "statistics", statistics)
    rows = {"x": np.zeros((3, 1), np.float32)}
    return list(sweep.measure("h:1", "m", rows, concurrencies=[4], on_progress=told.append, **wanted))  # type: ignore[arg-type]
