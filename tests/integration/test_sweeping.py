"""A sweep on the real server that dies in it, answers a part of the rows with errors, and is changed between its points."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tritonpilot import machine, perf_analyzer_binary
from tritonpilot.errors import ServerError
from tritonpilot.grid import Effort, Row, Trial, run
from tritonpilot.setting import Setting
from tritonpilot.spec import load_service
from tritonpilot.stage import Stage

pytestmark = pytest.mark.server

SERVICE = """\
service: touchy
model:
  backend: python
  file: serving.py
  samples: samples.npz
  inputs: [{name: x, data_type: FP32, dims: [1]}]
  outputs: [{name: y, data_type: FP32, dims: [1]}]
batching: {max_batch_size: 8, queue_delay_us: 500}
"""
# Kills its server once when the file `deadly` is there, and while it loads as many times as `deadly_load` says; refuses
# negative rows while the file `strict` is.
SERVING = """
import os
import signal

import triton_python_backend_utils as pb_utils

FOLDER = {folder!r}


class TritonPythonModel:
    def initialize(self, args):
        deadly = os.path.join(FOLDER, "deadly_load")
        if os.path.exists(deadly):
            with open(deadly) as file:
                left = int(file.read())
            with open(deadly, "w") as file:
                file.write(str(max(0, left - 1)))
            if left > 0:
                os.kill(os.getppid(), signal.SIGKILL)

    def execute(self, requests):
        deadly = os.path.join(FOLDER, "deadly")
        if os.path.exists(deadly):
            os.remove(deadly)
            os.kill(os.getppid(), signal.SIGKILL)
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            if x.min() < 0 and os.path.exists(os.path.join(FOLDER, "strict")):
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("negative rows are not served")))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return responses
"""
EFFORT = Effort(window_ms=250, attempts=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "touchy"
    path.mkdir()
    (path / "service.yaml").write_text(SERVICE)
    (path / "serving.py").write_text(SERVING.format(folder=str(path)))
    np.savez(path / "samples.npz", x=np.where(np.arange(20) % 4 == 3, -1, 1).astype(np.float32).reshape(20, 1))
    return path


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Stage]:
    with Stage(load_service(folder / "service.yaml"), folder.parent) as running:
        yield running


def measured(row: Row) -> tuple[float, str]:
    assert row.point is not None, row.failure
    assert row.point.p99_ms >= row.point.p50_ms > 0
    assert sum(row.batch_sizes.values()) > 0
    return row.point.throughput_infer_s, row.tool


def test_sweep_changes_settings_and_goes_on_after_a_death(stage: Stage, folder: Path) -> None:
    stage.apply(Setting.of(stage.service))
    wanted = replace(Setting.of(stage.service), queue_delay_us=0, max_batch_size=4)
    trial = Trial(wanted, rows=4, concurrency=2)
    said: list[str] = []

    def hear(line: str) -> None:
        if line.startswith("[1/1]"):
            stage.apply(wanted)
            (folder / "deadly").touch()
        said.append(line)

    kept: list[Row] = []
    (row,) = run(stage, [trial], keep=kept.append, effort=EFFORT, on_progress=hear)
    assert measured(row)[1] == "perf_analyzer"
    assert row.notes[0] == "tritonserver died by SIGKILL while it was measured, and was started again"
    assert row.batch_sizes.keys() == {4}
    assert stage.setting == wanted
    assert len(machine.stub_pids(stage.server.pid)["touchy"]) == 1
    assert "tritonserver died by SIGKILL; it is started again and the trial repeated" in said
    assert kept == [row]
    # What is known is not measured again.
    assert list(run(stage, [trial], known={trial: row}, keep=kept.append)) == [row]
    assert kept == [row]


def test_server_that_dies_while_it_loads_is_no_refusal_unless_it_does_so_again(stage: Stage, folder: Path) -> None:
    now = Setting.of(stage.service)
    stage.apply(now)
    once, twice = replace(now, queue_delay_us=100), replace(now, queue_delay_us=200)
    try:
        (folder / "deadly_load").write_text("1")
        (row,) = run(stage, [Trial(once, concurrency=1)], effort=EFFORT)
        (folder / "deadly_load").write_text("2")
        rows = list(run(stage, [Trial(twice, concurrency=1), Trial(twice, concurrency=2)], effort=EFFORT))
    finally:
        (folder / "deadly_load").unlink()
    died = "tritonserver died by SIGKILL"
    assert measured(row)[0] > 0
    assert row.notes[0] == f"{died} while it loaded, and was started again"
    assert [each.failure for each in rows] == [f"{died}, 2 times in this trial. It has no figure."] * 2


def test_load_that_cannot_be_made_costs_its_own_trial_alone(stage: Stage) -> None:
    served = stage.setting or Setting.of(stage.service)
    (row,) = run(stage, [Trial(served, rate_per_s=math.nan)], effort=EFFORT, tool="load")
    assert row.point is None
    assert row.failure.startswith("Stream sweep cannot be: ")
    assert stage.setting == served


def test_rows_that_the_model_refuses_are_counted_instead_of_ending_the_measurement(stage: Stage, folder: Path) -> None:
    served = stage.setting or Setting.of(stage.service)
    (folder / "strict").touch()
    try:
        (row,) = run(stage, [Trial(served, concurrency=4)], effort=EFFORT)
    finally:
        (folder / "strict").unlink()
    assert measured(row)[1] == "load"
    assert 0.15 < row.failed_share < 0.35  # every fourth row
    assert any("perf_analyzer failed: Requests failed during the measurement" in note for note in row.notes)
    assert any("negative rows are not served" in note for note in row.notes)


def test_crashing_perf_analyzer_is_replaced_and_named(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "perf_analyzer"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Perf Analyzer Version 9.9 && exit\nkill -SEGV $$\n')
    script.chmod(0o755)
    monkeypatch.setenv(perf_analyzer_binary.ENV, str(script))
    perf_analyzer_binary.find.cache_clear()
    try:
        (row,) = run(stage, [Trial(stage.setting or Setting.of(stage.service), rows=2, rate_per_s=60.0)], effort=EFFORT)
    finally:
        perf_analyzer_binary.find.cache_clear()
    assert measured(row)[1] == "load"
    assert "perf_analyzer gave up" in row.notes[0]
    assert "exit code -11" in row.notes[0]


def test_setting_that_triton_refuses_costs_its_own_points_alone(stage: Stage, folder: Path) -> None:
    good = stage.setting or Setting.of(stage.service)
    working = (folder / "serving.py").read_text()
    stage.apply(good)
    (folder / "serving.py").write_text("raise RuntimeError('no memory for so many instances')")
    bad = replace(good, instances=3)
    try:
        rows = list(run(stage, [Trial(bad, concurrency=1), Trial(bad, concurrency=2)], effort=EFFORT))
    finally:
        (folder / "serving.py").write_text(working)
    assert [row.point for row in rows] == [None, None]
    assert "no memory for so many instances" in rows[0].failure
    assert rows[1].failure == rows[0].failure
    stage.apply(good)
    assert stage.setting == good


def test_stage_that_was_not_set_up_says_so(stage: Stage) -> None:
    with pytest.raises(ServerError, match="Nothing is served on this stage yet"):
        Stage(stage.service).endpoints  # noqa: B018
    with pytest.raises(ServerError, match="was not set up"):
        Stage(stage.service).apply(Setting.of(stage.service))
