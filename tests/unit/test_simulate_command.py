"""`tritonpilot simulate` and `plan`: what they take from scenarios and options, what they refuse first, what they call emulated."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from tritonpilot.commands import costs as measuring
from tritonpilot.commands import plan, simulate
from tritonpilot.costs import Costs
from tritonpilot.errors import HostError, SpecError
from tritonpilot.plan import plan as planned
from tritonpilot.spec import Service, load_services

SERVICE = """\
service: device
model: {backend: emulated, files: [curve.json], samples: samples.npz}
slo: {p99_ms: 100, rate_per_s: 500}
batching: {max_batch_size: 64}
classes:
  - {name: realtime, priority: 1}
  - {name: nightly, priority: 2, p99_ms: 1000}
"""
SCENARIO = """\
scenario: evening
service: device
seconds: 2
seed: 5
streams:
  - {name: app, rate_per_s: 200, caller_class: %s}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """models/device, an emulated device, and its costs."""
    place = tmp_path / "models" / "device"
    place.mkdir(parents=True)
    curve = {"name": "a device", "source": "a test", "rows": [1, 64], "execution_us": [1000, 4000]}
    (place / "curve.json").write_text(json.dumps(curve))
    np.savez(place / "samples.npz", row=np.zeros((4, 1), np.float32))
    (place / "service.yaml").write_text(SERVICE)
    Costs(rows=(1, 64), execution_us=(1000.0, 4000.0), request_us=0.0, is_on_cpu=False).write(tmp_path / "costs.json")
    (tmp_path / "evening.yaml").write_text(SCENARIO % "realtime")
    return tmp_path


def service_in(folder: Path) -> Service:
    (found,) = load_services(folder / "models")
    return found


def run(folder: Path, name: str, *argv: str) -> Result:
    app = typer.Typer()
    app.command("simulate")(simulate.command)
    app.command("plan")(plan.command)
    common = ["--models", str(folder / "models"), "--costs", str(folder / "costs.json")]
    return CliRunner().invoke(app, [name, *argv, *common])


def said(folder: Path, *argv: str) -> dict[str, Any]:
    result = run(folder, *argv, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout[result.stdout.index("{") :])
    return found


def refusal(folder: Path, *argv: str) -> str:
    result = run(folder, *argv)
    assert isinstance(result.exception, SpecError), result.output
    return str(result.exception)


def test_a_scenario_says_its_seed_and_the_option_another(folder: Path) -> None:
    scenario = str(folder / "evening.yaml")
    own, same, other = (said(folder, "simulate", scenario, *seed) for seed in ((), ("--seed", "5"), ("--seed", "6")))
    assert (own["seed"], other["seed"]) == (5, 6)
    assert own == same
    assert own["outcome"] != other["outcome"]


@pytest.mark.parametrize(
    "options", ["--seconds 1", "--rows 1", "--slo-ms 5", "--arrivals constant", "--rate 5", "--trace x.csv"]
)
def test_what_a_scenario_says_is_no_option_beside_it(folder: Path, options: str) -> None:
    result = run(folder, "simulate", str(folder / "evening.yaml"), *options.split())
    assert result.exit_code == 2
    assert options.split()[0] in result.output


@pytest.mark.parametrize(
    "argv",
    [
        "simulate device --trace x.csv --arrivals constant",
        "plan device --save-costs x.json",
        "plan device --server-cpus 0",
        "plan device --peak-seconds 5",
        "plan device --mix realtime:1e308,nightly:1e308",
    ],
)
def test_options_that_would_mean_nothing_are_refused(folder: Path, argv: str) -> None:
    assert run(folder, *argv.split()).exit_code == 2


def test_figures_of_an_emulated_device_are_called_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tritonpilot.commands.plan.plan", functools.partial(planned, requests=2000))
    found = said(folder, "simulate", "device", "--rate", "500", "--seconds", "2")
    assert found["is_emulated"] is True
    text = run(folder, "simulate", "device", "--rate", "500", "--seconds", "2").stdout
    assert "device (emulated)" in text
    assert "The device of device is emulated" in text
    found = said(folder, "plan", "device", "--rates", "500")
    assert found["is_emulated"] is True
    assert "is emulated" in found["reason"]


def test_a_class_that_is_none_is_told_with_the_nearest(folder: Path) -> None:
    assert "did you mean nightly?" in refusal(folder, "simulate", "device", "--rate", "night=5")
    (folder / "evening.yaml").write_text(SCENARIO % "night")
    assert "did you mean nightly?" in refusal(folder, "simulate", str(folder / "evening.yaml"))


def test_a_rate_has_the_promise_of_its_class(folder: Path) -> None:
    found = said(folder, "simulate", "device", "--rate", "500", "--rate", "nightly=50", "--seconds", "2")
    assert set(found["outcome"]["streams"]) == {"realtime", "nightly"}
    assert found["outcome"]["streams"]["nightly"]["attainment"] == 1


@pytest.mark.parametrize("argv", ["simulate device --rate 5 --rows 300", "plan device --rates 5 --rows 300"])
def test_requests_larger_than_a_batch_are_refused_at_once(folder: Path, argv: str) -> None:
    assert "have up to 300 rows, and the model's max_batch_size is 64" in refusal(folder, *argv.split())


def test_a_load_is_limited_for_each_replica(folder: Path) -> None:
    assert "a load has room for 20,000,000" in refusal(folder, "simulate", "device", "--rate", "1e9")
    found = said(folder, "simulate", "device", "--rate", "1e9", "--replicas", "10000000", "--seconds", "10")
    assert found["outcome"]["requests"] == pytest.approx(1000, rel=0.15)


def test_costs_are_kept_in_a_folder_that_is_made_or_nothing_is_measured(folder: Path) -> None:
    (folder / "file").write_text("")
    for path, words in ((folder / "file" / "costs.json", "has no folder"), (folder / "models", "is a folder")):
        with pytest.raises(HostError, match=f"{words}.*Nothing was measured"):
            measuring.measure(service_in(folder), folder / "models", None, path)
    measuring.check_writable(folder / "build" / "costs.json")
    assert (folder / "build").is_dir()
