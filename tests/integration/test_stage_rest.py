"""A stage whose server keeps an old instance that does not end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tritonpilot import machine, stage
from tritonpilot.setting import Setting
from tritonpilot.spec import load_service

SERVICE = """\
service: sticky
model:
  backend: python
  file: serving.py
  samples: rows.npz
  inputs: [{name: x, data_type: FP32, dims: [1]}]
  outputs: [{name: y, data_type: FP32, dims: [1]}]
batching: {max_batch_size: 8, queue_delay_us: 500}
"""
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(each, "x").as_numpy())])
            for each in requests
        ]
"""


def test_a_server_that_does_not_let_go_of_an_old_instance_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton keeps one once in some hundred reloads only, so here one is counted that is not there."""
    monkeypatch.setattr(stage, "STEADY_TIMEOUT_S", 2.0)
    (tmp_path / "service.yaml").write_text(SERVICE)
    (tmp_path / "serving.py").write_text(ECHO)
    np.savez(tmp_path / "rows.npz", x=np.zeros((4, 1), np.float32))
    service = load_service(tmp_path / "service.yaml")
    said: list[str] = []
    with stage.Stage(service, tmp_path, on_progress=said.append) as tried:
        tried.apply(Setting.of(service))
        first = tried.server.pid
        count = machine.stub_pids

        def kept(server: int) -> dict[str, list[int]]:
            found = count(server)
            return {"sticky": [*found["sticky"], 1]} if server == first else found

        monkeypatch.setattr(machine, "stub_pids", kept)
        wanted = replace(Setting.of(service), queue_delay_us=1000)
        tried.apply(wanted)

        assert tried.setting == wanted
        assert tried.server.pid != first
        assert len(machine.stub_pids(tried.server.pid)["sticky"]) == 1
    assert [line for line in said if "2 stubs for 1 instances" in line and "started again" in line]
