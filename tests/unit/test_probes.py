"""What a model is asked. tests/integration/test_watching.py asks a real Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tritonpilot import probes

INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [4] }'


def config(text: str) -> Any:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def classes(text: str, key: str = "pilot_classes") -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}'


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("", 0),
        ("dynamic_batching { priority_levels: 3 }", 3),
        (f"dynamic_batching {{ priority_levels: 3 }} {classes('3', 'pilot_wake_priority')}", 2),
        (f"dynamic_batching {{ priority_levels: 3 }} {classes('realtime:1,batch:2')}", 2),
        (classes("only:1"), 1),  # an ensemble
    ],
)
def test_it_asks_as_the_lowest_class_of_callers(text: str, level: int) -> None:
    model = config(INPUT + text)
    request = probes.probe_of(("m", "1"), model).request
    assert probes.lowest_level(model) == level
    assert request.parameters["priority"].uint64_param == level


def test_without_warmup_it_asks_with_zeros_of_each_type_and_leaves_optional_inputs_out() -> None:
    text = """
    max_batch_size: 8
    input { name: "a" data_type: TYPE_FP16 dims: [-1, 3] }
    input { name: "b" data_type: TYPE_STRING dims: [2] }
    input { name: "c" data_type: TYPE_INT64 dims: [1] optional: true }
    sequence_batching { }
    """
    request, is_real, remark = probes.probe_of(("m", "3"), config(text))

    assert (request.model_name, request.model_version, is_real, remark) == ("m", "3", False, "")
    assert [(each.name, each.datatype, list(each.shape)) for each in request.inputs] == [
        ("a", "FP16", [1, 1, 3]),
        ("b", "BYTES", [1, 2]),
    ]
    assert list(request.raw_input_contents) == [bytes(6), bytes(8)]
    assert request.parameters["sequence_start"].bool_param
    assert request.parameters["sequence_end"].bool_param


def test_it_asks_with_the_first_warmup_request_and_says_when_that_is_not_there(tmp_path: Path) -> None:
    text = """
    input { name: "x" data_type: TYPE_FP32 dims: [-1] }
    model_warmup { name: "first" batch_size: 1
      inputs { key: "x" value { data_type: TYPE_FP32 dims: [2] input_data_file: "x.bin" } } }
    model_warmup { name: "second" batch_size: 1
      inputs { key: "x" value { data_type: TYPE_FP32 dims: [9] zero_data: true } } }
    """
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "x.bin").write_bytes(b"12345678")

    request, is_real, remark = probes.probe_of(("m", "1"), config(text), tmp_path)
    assert (list(request.inputs[0].shape), request.raw_input_contents[0]) == ([2], b"12345678")
    assert (is_real, remark) == (True, "")

    for folder in (tmp_path / "absent", None):
        request, is_real, remark = probes.probe_of(("m", "1"), config(text), folder)
        assert (list(request.inputs[0].shape), request.raw_input_contents[0], is_real) == ([2], bytes(8), False)
        assert remark.startswith("asked with zeros, for its warmup data cannot be read: ")


def test_what_is_in_the_warmup_folder_is_taken_without_warmup_where_it_fits(tmp_path: Path) -> None:
    text = """
    input { name: "photo" data_type: TYPE_STRING dims: [1] }
    input { name: "x" data_type: TYPE_FP32 dims: [2] }
    input { name: "y" data_type: TYPE_FP32 dims: [-1] }
    """
    (tmp_path / "warmup").mkdir()
    for name, data in (("photo", b"\4\0\0\0JPEG"), ("x", b"12345678"), ("y", b"1234")):
        (tmp_path / "warmup" / f"{name}.bin").write_bytes(data)

    request, is_real, _ = probes.probe_of(("m", "1"), config(text), tmp_path)
    assert list(request.raw_input_contents) == [b"\4\0\0\0JPEG", b"12345678", bytes(4)]
    assert not is_real, "it may be of an earlier model"

    (tmp_path / "warmup" / "x.bin").write_bytes(b"1234")
    assert probes.probe_of(("m", "1"), config(text), tmp_path).request.raw_input_contents[1] == bytes(8)


def test_given_inputs_come_first_also_for_optional_ones(tmp_path: Path) -> None:
    text = """
    max_batch_size: 4
    input { name: "words" data_type: TYPE_STRING dims: [1] }
    input { name: "x" data_type: TYPE_FP32 dims: [-1] optional: true }
    """
    given = {"words": np.array([["caf\u00e9"]], np.object_), "x": np.ones((1, 3), np.float32)}

    request, is_real, _ = probes.probe_of(("m", "1"), config(text), tmp_path, given)
    assert is_real
    assert [list(each.shape) for each in request.inputs] == [[1, 1], [1, 3]]
    assert list(request.raw_input_contents) == [b"\5\0\0\0caf\xc3\xa9", np.ones(3, np.float32).tobytes()]


def test_a_response_cache_is_asked_something_new_each_time() -> None:
    text = f"{INPUT} response_cache {{ enable: true }} input {{ name: 'id' data_type: TYPE_INT64 dims: [1] }}"
    asked = [probes.probe_of(("m", "1"), config(text)).request.raw_input_contents for _ in range(50)]

    floats = np.array([np.frombuffer(each[0], "<f4") for each in asked])
    assert len({each[0] for each in asked}) == 50
    assert (floats[:, : min(4, floats.shape[1])] > np.finfo(np.float32).tiny).all(), "denormals are slow"
    assert np.abs(floats).max() < 1.01e-6
    assert {each[1] for each in asked} == {bytes(8)}, "a number that stands for something stays"


@pytest.mark.parametrize(
    ("backend", "does"), [("onnxruntime", True), ("tensorrt", True), ("python", False), ("", False)]
)
def test_models_from_a_file_take_warmup(backend: str, does: bool) -> None:
    assert probes.takes_warmup(config(f'backend: "{backend}"')) is does
