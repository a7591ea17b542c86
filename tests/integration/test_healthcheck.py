"""The container's health check, against a real server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from photos import encoded, scene
from unit.onnx_files import identity

from tritonpilot import build, repository, spec
from tritonpilot.server import EmbeddedServer

HEALTHCHECK = Path(__file__).parents[2] / "deploy" / "triton" / "healthcheck.py"


@pytest.fixture(scope="module")
def model_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with warmup data, one without, one of strings, and one that refuses zeros, but has samples."""
    root = tmp_path_factory.mktemp("healthcheck")
    services = {
        "warm": "model: {file: model.onnx, samples: samples.npz}\nwarmup: {batch_sizes: [1, 4]}\n",
        "cold": "model: {file: model.onnx}\n",
        "words": "model: {file: model.onnx}\n",
        "photos": "model: {backend: image_decode, samples: samples.npz, parameters: {size: 32}}\n",
    }
    for name, text in services.items():
        element = TensorProto.STRING if name == "words" else TensorProto.FLOAT
        (root / "models" / name).mkdir(parents=True)
        if name != "photos":
            identity(root / "models" / name / "model.onnx", element=element)
        batching = "batching: {max_batch_size: 4}\n"
        (root / "models" / name / "service.yaml").write_text(f"service: {name}\n{batching}{text}")
    np.savez(root / "models" / "warm" / "samples.npz", x=np.ones((3, 4), np.float32))
    np.savez(root / "models" / "photos" / "samples.npz", photo=np.array([[encoded(scene())]]))
    plans = build.plan(spec.load_services(root / "models"))
    repository.publish(root / "model_repository", [plan.folder for plan in plans])
    return root / "model_repository"


@pytest.fixture(scope="module")
def server(model_repository: Path) -> Iterator[EmbeddedServer]:
    probes = build.probe_inputs(model_repository.parent / "models", model_repository)
    with EmbeddedServer(model_repository, probe_inputs=probes) as running:
        yield running


@pytest.fixture
def key_file(server: EmbeddedServer, tmp_path: Path) -> Path:
    (tmp_path / "key").write_text(server.control_key + "\n")
    return tmp_path / "key"


def healthcheck(endpoint: str, model_repository: Path, key_file: Path) -> tuple[int, str]:
    command = [sys.executable, str(HEALTHCHECK), f"http://{endpoint}", str(model_repository), str(key_file)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return said.returncode, said.stderr


def test_it_asks_every_model_for_one_answer(server: EmbeddedServer, model_repository: Path, key_file: Path) -> None:
    before = counts(server)

    assert healthcheck(server.endpoints.http, model_repository, key_file) == (0, "")

    wanted = {name: count + 1 for name, count in before.items()}
    deadline = time.monotonic() + 5  # Triton counts after it has answered
    while (after := counts(server)) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    assert after == wanted


def test_without_the_right_key_or_a_server_it_fails(
    server: EmbeddedServer, model_repository: Path, key_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrong").write_text("0123456789abcdef")

    for endpoint, key in (
        (server.endpoints.http, tmp_path / "wrong"),
        (server.endpoints.http, tmp_path / "absent"),
        ("127.0.0.1:1", key_file),
    ):
        code, said = healthcheck(endpoint, model_repository, key)
        assert code == 1
        assert said.startswith("the server does not list its models: ")


def test_an_unloaded_model_is_no_fault_but_a_server_without_models_is_not_ready(
    server: EmbeddedServer, model_repository: Path, key_file: Path
) -> None:
    server.unload("cold")
    assert healthcheck(server.endpoints.http, model_repository, key_file) == (0, "")

    server.unload("warm")
    server.unload("words")
    server.unload("photos")
    assert healthcheck(server.endpoints.http, model_repository, key_file) == (1, "no model is loaded\n")

    for name in ("cold", "warm", "words", "photos"):
        server.load(name)


# NOTE: last, because the server cannot unload a model whose stub is dead.
def test_a_dead_stub_is_found_although_triton_says_ready(
    server: EmbeddedServer, model_repository: Path, key_file: Path
) -> None:
    os.kill(stub_of("cold", server), signal.SIGKILL)

    with urllib.request.urlopen(f"http://{server.endpoints.http}/v2/health/ready") as answer:
        assert answer.status == 200
    code, said = healthcheck(server.endpoints.http, model_repository, key_file)
    assert code == 1
    assert "model cold is READY, but does not answer an inference" in said


def counts(server: EmbeddedServer) -> dict[str, int]:
    return {model.name: model.inference_count for model in server.statistics()}


def stub_of(model: str, server: EmbeddedServer) -> int:
    """Pid of the stub that serves `model`: a child of tritonserver that has the model's path among its arguments."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            arguments = (process / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if parent == server.pid and any(f"/{model}/" in argument for argument in arguments):
            return int(process.name)
    raise AssertionError(f"no stub of {model} under {server.pid}")
