"""What `tritonpilot tune` refuses before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from perf import emulated
from tritonpilot.commands import tune
from tritonpilot.errors import HostError, PilotError, SpecError

app = typer.Typer()
app.command("tune", epilog=tune.EPILOG)(tune.command)

OVER = """\
service: over
pipeline:
  inputs: [{name: row, data_type: FP32, dims: [1]}]
  outputs: [{name: emulated, data_type: FP32, dims: [1]}]
  steps: [{service: device}]
batching: {max_batch_size: 16}
"""
SCENARIO = """\
scenario: evening
service: %s
seconds: 5
streams: [{name: app, rate_per_s: 10}]
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    emulated.services_of(tmp_path, {"device": "batching: {max_batch_size: 64}\nslo: {p99_ms: 100, rate_per_s: 100}"})
    Path(tmp_path, "models/over").mkdir()
    Path(tmp_path, "models/over/service.yaml").write_text(OVER)
    return tmp_path / "models"


def call(models: Path, *argv: object) -> Result:
    return CliRunner().invoke(app, ["device", "--models", str(models), *map(str, argv)], env={"COLUMNS": "200"})


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rate", "300,5000"], "'300,5000' is not one rate, or max"),
        (["--rate", "nan"], "is no list of positive numbers"),
        (["--rows", "1,64"], "'1,64' is not one size; several have weights"),
        (["--slo-ms", "inf"], "inf is no finite number"),
        (["--memory-mb", "nan"], "--memory-mb"),
        (["--scenario", "none.yaml", "--rows", "1"], "the scenario says rate, mix and rows itself"),
    ],
)
def test_options_that_say_nothing_are_a_usage_error(models: Path, argv: list[str], said: str) -> None:
    found = call(models, *argv)

    assert found.exit_code == 2
    assert said in found.output


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rate", "1e9"], "1e+09 requests/s for device are not above 0 and at most 10,000,000"),
        (["--rate", "9e6"], "9,000,000 requests/s for 6 s are more than the 20,000,000 requests"),
        (
            ["--rows", "1000"],
            "requests have up to 1000 rows, more than the largest batch allowed, 256 without --max-batch",
        ),
        (["--instances", "5000000000"], "5000000000 instances of 1 thread"),
        (["--max-batch", "4,8"], "max_batch_size 4, 8: pipeline over passes batches of up to 16 rows on to device"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(models: Path, argv: list[str], said: str) -> None:
    found = call(models, *argv)

    assert isinstance(found.exception, SpecError)
    assert said in str(found.exception)
    assert "Nothing was" in str(found.exception)


def test_a_scenario_of_another_service_is_refused(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "evening.yaml"
    path.write_text(SCENARIO % "over")

    found = call(models, "--scenario", path)

    assert isinstance(found.exception, SpecError)
    assert "is a load of over, not of device" in str(found.exception)


@pytest.mark.parametrize("place", ["", "/dev/null"])
def test_evidence_that_cannot_be_kept_is_refused(models: Path, tmp_path: Path, place: str) -> None:
    found = call(models, "--evidence", place or tmp_path)

    assert isinstance(found.exception, HostError)
    assert ("it is no regular file" if place else "it is a directory") in str(found.exception)


def test_cpus_that_are_not_there_are_refused(models: Path) -> None:
    for option in ("--cpus", "--server-cpus"):
        found = call(models, option, "4000")

        assert isinstance(found.exception, PilotError)
        assert f"{option} 4000" in str(found.exception)
