from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeModel

from tritonpilot import first_calls
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

ROW = {"INPUT": np.zeros((1, 3), np.float32)}
STRINGS = """
backend: "python"
max_batch_size: 8
input [{name: "INPUT" data_type: TYPE_STRING dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_STRING dims: [-1]}]
instance_group [{kind: KIND_CPU}]
"""
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        for array in arrays:
            print("asked", array.tolist(), flush=True)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array)]) for array in arrays]
"""


def answered(server: EmbeddedServer, model: str, least: int = 1) -> int:
    """Triton counts after it has answered."""
    deadline = time.monotonic() + 5
    while True:
        (found,) = server.statistics(model)
        if found.inference_count >= least or time.monotonic() > deadline:
            return found.inference_count
        time.sleep(0.02)


def test_a_server_that_warms_http_has_asked_its_models(tmp_path: Path, make_model: MakeModel) -> None:
    make_model(tmp_path / "r", "identity")
    make_model(tmp_path / "r", "strings", ECHO, STRINGS)
    words = np.array([["größe".encode(), b""]], np.object_)
    with EmbeddedServer(
        tmp_path / "r",
        probe_inputs=lambda: {"identity": ROW, "strings": {"INPUT": words}},
        warms_http=True,
        http_threads=2,
    ) as server:
        assert 1 + 2 <= answered(server, "identity", 1 + 2 * 2) <= 1 + 2 * 2
        assert f"asked {words.tolist()}" in server.log_file.read_text()
        assert answered(server, "strings", 1 + 2) >= 1 + 2


def test_models_without_rows_are_not_asked_again(identity_repository: Path) -> None:
    with EmbeddedServer(identity_repository, warms_http=True) as server:
        assert answered(server, "identity") == 1


def test_a_server_that_does_not_answer_is_left(free_port: int) -> None:
    began = time.monotonic()
    first_calls.call(f"127.0.0.1:{free_port}", "identity", ROW, connections=2, seconds=1)
    assert time.monotonic() - began < first_calls.TIMEOUT_S


def test_a_refusal_is_left(identity_repository: Path) -> None:
    with EmbeddedServer(identity_repository) as server:
        first_calls.call(server.endpoints.http, "absent", ROW, connections=2, seconds=1)
        assert answered(server, "identity") == 1
