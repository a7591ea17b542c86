"""`docker compose up` for real: needs an engine, Compose v2, and the two images (official, or of stand_in_images.sh)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from e2e import compose_v2
from tritonclient.utils import InferenceServerException
from unit.onnx_files import identity

from tritonpilot import build, repository, spec
from tritonpilot.control_key import VARIABLE
from tritonpilot.ports import choose_ports
from tritonpilot.tritonserver import CONTROL_HEADER

ROOT = Path(__file__).parents[2]
IMAGES = ("nvcr.io/nvidia/tritonserver:24.10-py3", "prom/prometheus:v3.5.0")
KEY = "a-key-of-the-tests-0123456789"

pytestmark = [pytest.mark.slow, pytest.mark.server]


@dataclass(frozen=True)
class Deployment:
    """A running compose project: its command, environment and ports on loopback."""

    command: tuple[str, ...]
    folder: Path
    environment: dict[str, str]
    http: int
    grpc: int
    metrics: int
    prometheus: int

    def compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGUMENTS`."""
        return subprocess.run(
            [*self.command, *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    command = compose_v2.find()
    if command is None:
        pytest.skip("no Compose v2 here")
    for image in IMAGES:
        if shutil.which("docker") is None or _fails("docker", "image", "inspect", image):
            pytest.skip(f"no Docker engine with the image {image} here; pull it, or make one with stand_in_images.sh")
    folder = tmp_path_factory.mktemp("compose")
    for name in ("docker-compose.yml", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("deploy", "python_backend", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    _build_a_model(folder)
    for parent in (folder, *folder.parents):  # pytest's folders are private, the containers' users are others
        if parent.stat().st_mode & 0o077 == 0:
            parent.chmod(0o711)
    ports = choose_ports([0, 0, 0, 0])
    variables = ("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT", "PROMETHEUS_PORT")
    environment = {**os.environ, VARIABLE: KEY, **dict(zip(variables, map(str, ports), strict=True))}
    project = f"tritonpilot-test-{os.getpid()}"
    running = Deployment((*command, "--project-name", project), folder, environment, *ports)
    try:
        up = running.compose("up", "--build", "--wait")
        assert up.returncode == 0, up.stderr + running.compose("logs").stdout
        yield running
    finally:
        running.compose("down", "--volumes", "--timeout", "45")


def test_models_answer_over_http_and_grpc(deployment: Deployment) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    for client, port in ((tritonclient.http, deployment.http), (tritonclient.grpc, deployment.grpc)):
        tensor = client.InferInput("x", rows.shape, "FP32")
        tensor.set_data_from_numpy(rows)

        with client.InferenceServerClient(f"127.0.0.1:{port}") as connection:
            answer = connection.infer("echo", [tensor])

        np.testing.assert_array_equal(answer.as_numpy("y"), rows)


def test_model_control_needs_the_key_which_docker_does_not_tell(deployment: Deployment) -> None:
    # Closed at once: Triton 2.51 waits out its exit timeout for every HTTP connection that is open, idle ones too.
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{deployment.http}") as client:
        with pytest.raises(InferenceServerException, match="This API is restricted"):
            client.get_model_repository_index()
        assert client.get_model_repository_index(headers={CONTROL_HEADER: KEY})[0]["state"] == "READY"

    container = deployment.compose("ps", "--quiet", "triton").stdout.strip()
    inspected = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
    assert KEY not in inspected.stdout


def test_the_server_is_not_root_and_cannot_write_the_repository(deployment: Deployment) -> None:
    assert deployment.compose("exec", "-T", "triton", "id", "-u").stdout == "1000\n"
    assert "Read-only file system" in deployment.compose("exec", "-T", "triton", "touch", "/models/x").stderr


def test_prometheus_scrapes_triton(deployment: Deployment) -> None:
    query = f"http://127.0.0.1:{deployment.prometheus}/api/v1/query?query=nv_inference_request_success"
    deadline = time.monotonic() + 30
    while not (found := _get(query)["data"]["result"]) and time.monotonic() < deadline:
        time.sleep(0.5)

    assert found[0]["metric"]["model"] == "echo"


def _build_a_model(folder: Path) -> None:
    identity(folder / "models" / "echo" / "model.onnx")
    service = "service: echo\nmodel: {file: model.onnx}\nbatching: {max_batch_size: 4}\n"
    (folder / "models" / "echo" / "service.yaml").write_text(service)
    plans = build.plan(spec.load_services(folder / "models"))
    repository.publish(folder / "model_repository", [plan.folder for plan in plans])


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.load(answer)


def _fails(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode != 0
