"""pilotlib/recorder.py in the real Triton: what was answered is recorded, what was refused or is dropped is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException
from unit.onnx_files import identity

from tritonpilot.client import Client
from tritonpilot.errors import ServerError
from tritonpilot.server import EmbeddedServer
from tritonpilot.testkit import in_triton

pytestmark = pytest.mark.server

DOUBLE = """
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest


class Double(Backend):
    def decode(self, inputs):
        if inputs["x"][0, 0] < 0:
            raise BadRequest("x", "is negative")
        return inputs["x"]

    def predict(self, items):
        return [2 * item for item in items]

    def encode(self, result):
        return {"y": result}


TritonPythonModel = triton_model(Double)
"""


def config(**parameters: str) -> dict[str, Any]:
    return {
        "max_batch_size": 8,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": [2]},
            {"name": "user_id", "data_type": "TYPE_STRING", "dims": [1]},
        ],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [2]}],
        "parameters": {name: {"string_value": value} for name, value in parameters.items()},
    }


def request(*values: float) -> dict[str, np.ndarray]:
    return {
        "x": np.array([[value, value + 0.5] for value in values], np.float32),
        "user_id": np.array([[b"somebody"]] * len(values), object),
    }


def test_answered_rows_are_recorded_and_refused_ones_and_dropped_inputs_are_not(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(DOUBLE)
    recording = config(pilot_record="50", pilot_record_file=str(tmp_path / "rows.npz"), pilot_record_drop="user_id")
    with in_triton(model, recording, probe=request(0.0)) as ask:
        ask(request(1.0, 2.0))
        with pytest.raises(InferenceServerException, match="is negative"):
            ask(request(-1.0))
        ask(request(3.0))
    (path,) = tmp_path.glob("rows.*.npz")
    with np.load(path, allow_pickle=False) as archive:
        assert archive.files == ["x"]
        rows = archive["x"].tolist()
    assert [row for row in rows if row[0]] == [[1, 1.5], [2, 2.5], [3, 3.5]]  # the others are the server's own probes
    assert b"somebody" not in path.read_bytes()


def test_without_the_parameter_nothing_is_recorded(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(DOUBLE)
    with in_triton(model, config(), probe=request(0.0)) as ask:
        assert ask(request(1.0))["y"].tolist() == [[2, 3]]
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


def test_a_drop_that_names_no_input_refuses_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model.py"
    model.write_text(DOUBLE)
    wrong = config(pilot_record="50", pilot_record_file=str(tmp_path / "rows.npz"), pilot_record_drop="user")
    with (
        pytest.raises(ServerError, match=r'pilot_record_drop" in config.pbtxt names "user", which is no input'),
        in_triton(model, wrong, probe=request(0.0)),
    ):
        pass


def test_the_onnxruntime_stand_in_records_too(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    identity(repository / "same" / "1" / "model.onnx")
    (repository / "same" / "config.pbtxt").write_text(
        'backend: "onnxruntime"\nmax_batch_size: 8\ndynamic_batching { }\n'
        'parameters { key: "pilot_record" value { string_value: "50" } }\n'
        f'parameters {{ key: "pilot_record_file" value {{ string_value: "{tmp_path / "rows.npz"}" }} }}\n'
    )
    with EmbeddedServer(repository) as server, Client(server.endpoints.http) as client:
        client.predict("same", {"x": np.array([[1, 2, 3, 4]], np.float32)})
    recorded = []
    for path in tmp_path.glob("rows.*.npz"):  # one file per instance
        with np.load(path, allow_pickle=False) as archive:
            recorded += archive["x"].tolist()
    assert [1, 2, 3, 4] in recorded
