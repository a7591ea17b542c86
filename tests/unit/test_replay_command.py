"""`tritonpilot replay`: a table of policies beside static settings, and what it refuses first."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from tritonpilot.commands import replay
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError

SERVICE = """\
service: device
model: {backend: emulated, files: [curve.json], samples: samples.npz}
slo: {p99_ms: 50, rate_per_s: 500}
batching: {max_batch_size: 8, queue_delay_us: 1000}
"""
POLICY = """\
interval_s: 0.5
models:
  - model: device
    policy: model
    costs: costs.json
    instances: {min: 1, max: 4}
    queue_delay_us: {min: 0, max: 2000}
    cooldown_s: 1
    steady_s: 1
    shrink_after_s: 2
    max_changes_per_minute: 60
"""
SCENARIO = """\
scenario: evening
service: device
seconds: 20
streams:
  - {name: app, arrivals: burst, rate_per_s: 200, peak_per_s: 2000, every_s: 10, for_s: 3}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """models/device, an emulated device, its costs, a policy, a scenario, and a recording of 20 s."""
    place = tmp_path / "models" / "device"
    place.mkdir(parents=True)
    curve = {"name": "a device", "source": "a test", "rows": [1, 8], "execution_us": [5000, 10000]}
    (place / "curve.json").write_text(json.dumps(curve))
    np.savez(place / "samples.npz", row=np.zeros((4, 1), np.float32))
    (place / "service.yaml").write_text(SERVICE)
    Costs(rows=(1, 8), execution_us=(5000.0, 10_000.0), request_us=0.0, is_on_cpu=False).write(tmp_path / "costs.json")
    (tmp_path / "autopilot.yaml").write_text(POLICY)
    (tmp_path / "evening.yaml").write_text(SCENARIO)
    at_s = np.sort(np.random.default_rng(0).uniform(0, 20, 8000))
    (tmp_path / "day.csv").write_text("at_s\n" + "\n".join(f"{each:.6f}" for each in at_s) + "\n")
    return tmp_path


def run(folder: Path, *argv: str) -> Result:
    app = typer.Typer()
    app.command("replay")(replay.command)
    options = ["--models", str(folder / "models"), "--policy", str(folder / "autopilot.yaml")]
    return CliRunner().invoke(app, [*argv, *options], catch_exceptions=False)


def test_policies_are_compared_with_static_settings(folder: Path):
    picture = folder / "day.png"
    found = run(folder, str(folder / "evening.yaml"), "--picture", str(picture), "--json")
    told = json.loads(found.stdout)
    assert told["slo_ms"] == 50
    assert told["is_emulated"]
    best, worst, *policies = told["ways"]
    assert [each["name"] for each in policies] == ["model", "feedback", "queue_depth"]
    assert best["first"]["instances"] == 3
    assert worst["violations"] > best["violations"]
    by_model = policies[0]
    assert by_model["changes"] == len(by_model["decisions"]) > 0
    assert all(decision["reason"] for decision in by_model["decisions"])
    assert by_model["saved"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_recording_is_played_once_at_the_rate_that_is_asked_for(folder: Path):
    found = run(folder, "device", "--trace", str(folder / "day.csv"), "--rate", "800")
    assert "8,000 requests within 10 s, SLO 50 ms" in found.stdout
    assert "best of 16 static settings with hindsight" in " ".join(found.stdout.split())
    assert "emulated" in found.stdout


def test_what_cannot_be_replayed_is_refused(folder: Path):
    recorded = ["device", "--trace", str(folder / "day.csv")]
    assert run(folder, "device").exit_code == 2
    assert run(folder, str(folder / "evening.yaml"), "--rate", "10").exit_code == 2
    for option in ("--rate", "--seconds", "--start-s", "--reload-s"):
        assert run(folder, *recorded, option, "nan").exit_code == 2
        assert run(folder, *recorded, option, "inf").exit_code == 2
    (folder / "odd.csv").write_text("at_s\n0\n1e300\n")
    with pytest.raises(SpecError, match="intervals of 0.5 s.*Look for a wrong time"):
        run(folder, "device", "--trace", str(folder / "odd.csv"))
    (folder / "autopilot.yaml").write_text(POLICY.replace("model: device", "model: other"))
    with pytest.raises(SpecError, match="says nothing about device"):
        run(folder, *recorded)
    (folder / "autopilot.yaml").write_text(POLICY)
    (folder / "models" / "device" / "service.yaml").write_text(
        SERVICE.replace("slo: {p99_ms: 50, rate_per_s: 500}\n", "")
    )
    with pytest.raises(SpecError, match="No SLO is known"):
        run(folder, *recorded)
