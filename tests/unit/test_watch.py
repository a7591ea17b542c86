"""What the watch makes of the models' answers. tests/integration/test_watching.py has a real Triton."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner

from tritonpilot import watch
from tritonpilot.cli import app
from tritonpilot.errors import HostError, PortError, RepositoryError, SpecError
from tritonpilot.watch import ModelReport, Report, Settings, WatchMetrics

WELL = ModelReport("m", "1", "READY", "ok", 0.25, True)
DEAD = ModelReport("m", "1", "READY", "failed", said="Stub process is not healthy")


def test_a_report_is_well_when_every_model_answers_somebody() -> None:
    busy = ModelReport("b", "1", "READY", "busy", said="Exceeds maximum queue size")
    refused = ModelReport("r", "1", "READY", "refused", said="row 0 is empty")
    assert Report(True, (WELL, busy, refused)).is_well
    assert not Report(True, (WELL, DEAD)).is_well
    assert not Report(True, (WELL, ModelReport("n", "1", "UNAVAILABLE"))).is_well
    assert not Report(True).is_well
    assert not Report(False).is_well


def test_what_changes_is_said_once() -> None:
    up, dead, down = Report(True, (WELL,)), Report(True, (DEAD,)), Report(False, said="Triton did not answer.")
    failed = "model m version 1 is READY, but does not answer an inference: Stub process is not healthy"

    assert watch.changes(None, up) == ["Triton answers; models: 1"]
    assert watch.changes(up, up) == []
    assert watch.changes(up, dead) == [failed]
    assert watch.changes(dead, dead) == []
    assert watch.changes(dead, up) == ["model m version 1 answers"]
    assert watch.changes(up, Report(True, (ModelReport("m", "1", "READY", "refused", said="row 0 is empty"),))) == [
        "model m version 1 answers, but refuses zeros; give it warmup data or `samples`: row 0 is empty"
    ]
    assert watch.changes(up, down) == ["Triton did not answer."]
    assert watch.changes(down, dead) == ["Triton answers; models: 1", failed]
    assert watch.changes(up, Report(True, (ModelReport("m", "1", "UNAVAILABLE"),))) == [
        "model m version 1 is UNAVAILABLE: no reason given"
    ]


def test_a_person_reads_a_line_a_model() -> None:
    assert watch.lines(Report(True, (WELL, ModelReport("n", "", "LOADING")))) == [
        "model m version 1 answers (250.0 ms)",
        "model n is LOADING: no reason given",
    ]
    assert watch.lines(Report(True, said="Not all is seen.")) == ["Not all is seen.", "no model is loaded"]
    assert watch.lines(Report(False, said="Triton did not answer.")) == ["Triton did not answer."]


def test_prometheus_gets_the_last_look_and_the_counts_of_all() -> None:
    metrics = WatchMetrics()
    assert b"triton_up" not in generate_latest(metrics.registry), "not known before the first look"
    cold = ModelReport("cold", "2", "READY", "busy", has_warmup=False)
    for report in (Report(True, (WELL, cold)), Report(True, (WELL, cold)), Report(True, (DEAD, replaced(cold)))):
        metrics.take(report)

    said = generate_latest(metrics.registry).decode()
    for line in (
        "triton_up 1.0",
        'model_ready{model="m",version="1"} 1.0',
        'model_ready{model="cold",version="2"} 0.0',
        'model_probe_success{model="m",version="1"} 0.0',
        'probes_total{model="m",result="ok"} 2.0',
        'probes_total{model="m",result="failed"} 1.0',
        'probes_total{model="m",result="busy"} 0.0',
        'probes_total{model="cold",result="busy"} 2.0',
    ):
        assert f"{line}\n" in said
    assert 'model_probe_success{model="cold"' not in said, "what is not loaded is not asked"

    metrics.take(Report(True, (WELL,)))
    said = generate_latest(metrics.registry).decode()
    assert 'model_probe_seconds{model="m",version="1"} 0.25\n' in said
    assert 'model_warmup{model="m"} 1.0\n' in said
    assert 'version="2"' not in said, "it is gone"

    metrics.take(Report(False))
    said = generate_latest(metrics.registry).decode()
    assert "triton_up 0.0\n" in said
    assert "model_ready{" not in said


def replaced(model: ModelReport) -> ModelReport:
    return ModelReport(model.model, model.version, "LOADING")


def test_the_key_comes_from_the_file_the_environment_or_where_serve_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    home = {"XDG_STATE_HOME": str(tmp_path)}

    assert watch.control_key(file, {}) == "0123456789abcdef"
    assert watch.control_key(None, {"TRITONPILOT_CONTROL_KEY": "fedcba9876543210"}) == "fedcba9876543210"
    assert watch.control_key(None, home) is None
    assert not (tmp_path / "tritonpilot").exists(), "none is made: Triton would not know it"

    file.write_text("too short")
    for wrong in (file, tmp_path / "absent"):
        with pytest.raises(HostError, match="Nothing was started"):
            watch.control_key(wrong, {})


def test_what_cannot_work_is_refused(free_port: int) -> None:
    for address in ("nohost", "http://127.0.0.1:8001", "127.0.0.1:99999"):
        with pytest.raises(SpecError, match="must be HOST:PORT"):
            watch.once(Settings(address))
    with pytest.raises(PortError, match=r"cannot listen at 203\.0\.113\.9"):
        watch.run(Settings(f"127.0.0.1:{free_port}", host="203.0.113.9", port=0), on_ready=print)


def test_the_key_is_in_no_log() -> None:
    assert "0123456789abcdef" not in repr(Settings(key="0123456789abcdef"))


def test_a_repository_that_is_named_and_not_there_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["watch", "--once", "--repository", str(tmp_path / "absent")])
    assert isinstance(done.exception, RepositoryError)
    assert "There is no model repository at" in str(done.exception)
