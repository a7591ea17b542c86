"""The container's start.sh refuses what cannot work, and hands tritonserver the restricted APIs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tritonpilot import model_config
from tritonpilot.tritonserver import trace_settings

START = Path(__file__).parents[2] / "deploy" / "triton" / "start.sh"
KEY = "0123456789abcdef"


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """What start.sh finds: a repository with one model, the secret, and a tritonserver that prints its arguments."""
    (tmp_path / "models" / "ctr" / "1").mkdir(parents=True)
    (tmp_path / "models" / "ctr" / "config.pbtxt").touch()
    (tmp_path / "key").write_text(KEY + "\n")
    (tmp_path / "tritonserver").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "tritonserver").chmod(0o755)
    return tmp_path


def start(container: Path, *flags: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{container}{os.pathsep}{os.environ['PATH']}",
        "TRITONPILOT_REPOSITORY": str(container / "models"),
        "TRITONPILOT_CONTROL_KEY_FILE": str(container / "key"),
        **more,
    }
    return subprocess.run(
        ["sh", str(START), *flags], env=environment, capture_output=True, text=True, timeout=30, check=False
    )


def test_it_becomes_tritonserver_with_the_key_and_the_given_flags(container: Path) -> None:
    said = start(container, "--load-model=*")

    restriction = f"model-repository,shared-memory,trace,logging:tritonpilot-control-key={KEY}"
    assert said.returncode == 0
    assert said.stdout.splitlines() == [
        f"--model-repository={container / 'models'}",
        f"--http-restricted-api={restriction}",
        f"--grpc-restricted-protocol={restriction}",
        "--load-model=ctr",
    ]


def test_all_models_are_those_that_are_models(container: Path) -> None:
    (container / "models" / ".pilot" / "1").mkdir(parents=True)
    (container / "models" / "notes").mkdir()
    (container / "models" / "by hand" / "1").mkdir(parents=True)

    flags = start(container, "--exit-on-error=false", "--load-model=*", "--strict-readiness=true").stdout.splitlines()[
        3:
    ]

    assert flags == ["--exit-on-error=false", "--load-model=by hand", "--load-model=ctr", "--strict-readiness=true"]


def test_configs_of_the_build_are_not_completed(container: Path) -> None:
    config = container / "models" / "ctr" / "config.pbtxt"
    config.write_text(model_config.HEADER.format(source="models/ctr/service.yaml"))
    (container / "models" / "pilot_companion" / "1").mkdir(parents=True)
    (container / "models" / "pilot_companion" / "config.pbtxt").write_text(model_config.COMPANION_HEADER)
    assert "--disable-auto-complete-config" in start(container).stdout.splitlines()

    (container / "models" / "ctr" / "1" / "model.py").write_text("def auto_complete_config(config): ...\n")
    assert "--disable-auto-complete-config" not in start(container).stdout.splitlines()
    (container / "models" / "ctr" / "1" / "model.py").unlink()
    config.write_text("max_batch_size: 8\n" + config.read_text())
    assert "--disable-auto-complete-config" not in start(container).stdout.splitlines()


def test_with_a_receiver_of_traces_it_asks_for_them_and_has_the_models_rates_set(container: Path) -> None:
    (container / "python3").write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/ran"\n')
    (container / "python3").chmod(0o755)
    url = "http://collector:4318/v1/traces"

    said = start(container, "--load-model=*", OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=url)

    flags = said.stdout.splitlines()[3:]
    assert flags == [*(f"--trace-config={setting}" for setting in trace_settings(url)), "--load-model=ctr"]
    assert (container / "ran").read_text() == f"{START.parent}/trace_rates.py http://127.0.0.1:8000 {container}/key\n"


def test_it_names_the_models_that_were_not_built(container: Path) -> None:
    (container / "models" / "image").mkdir()
    (container / "models" / "image" / "config.pbtxt").touch()

    said = start(container)

    assert (said.returncode, said.stdout) == (1, "")
    assert "no version folder for: image. " in said.stderr
    assert "tritonserver was not started. Run `tritonpilot build --prepare`" in said.stderr


def test_it_refuses_an_empty_repository(container: Path) -> None:
    shutil.rmtree(container / "models" / "ctr")

    said = start(container)

    assert said.returncode == 1
    assert "holds no model" in said.stderr
    assert "tritonpilot build --prepare" in said.stderr


@pytest.mark.parametrize("key", ["", "short", "a" * 257, "0123456789abcdef,metadata", "0123456789 abcdef"])
def test_it_refuses_a_key_that_tritonserver_would_misread(container: Path, key: str) -> None:
    (container / "key").write_text(key)

    said = start(container)

    assert (said.returncode, said.stdout) == (1, "")
    assert "is no usable key" in said.stderr
    assert len(key) < 6 or key not in said.stderr


def test_it_refuses_to_run_without_a_key(container: Path) -> None:
    (container / "key").unlink()

    said = start(container)

    assert (said.returncode, said.stdout) == (1, "")
    assert "Run deploy/secrets.sh" in said.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file, whatever its mode")
def test_it_names_a_file_that_the_server_could_not_read(container: Path) -> None:
    (container / "models" / "ctr" / "1" / "model.onnx").touch(mode=0o000)

    said = start(container)

    assert said.returncode == 1
    assert "1/model.onnx cannot be read" in said.stderr
