"""What the watch asks a model, and what it makes of the answers. tests/integration/test_watch.py has a real Triton."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from prometheus_client import generate_latest
from tritonclient.grpc import model_config_pb2

from tritonpilot import watch
from tritonpilot.errors import HostError, PortError, SpecError
from tritonpilot.watch import ModelReport, Report, Settings, WatchMetrics

INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [4] }'
WELL = ModelReport("m", "1", "READY", "ok", 0.25, True)
DEAD = ModelReport("m", "1", "READY", "failed", said="Stub process is not healthy")


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
    request, _ = watch.probe_request(("m", "1"), model, None)
    assert watch.lowest_level(model) == level
    assert request.parameters["priority"].uint64_param == level


def test_without_warmup_it_asks_with_zeros_of_each_type_and_leaves_optional_inputs_out() -> None:
    text = """
    max_batch_size: 8
    input { name: "a" data_type: TYPE_FP16 dims: [-1, 3] }
    input { name: "b" data_type: TYPE_STRING dims: [2] }
    input { name: "c" data_type: TYPE_INT64 dims: [1] optional: true }
    sequence_batching { }
    """
    request, remark = watch.probe_request(("m", "3"), config(text), None)

    assert (request.model_name, request.model_version, remark) == ("m", "3", "")
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

    request, remark = watch.probe_request(("m", "1"), config(text), tmp_path)
    assert (list(request.inputs[0].shape), request.raw_input_contents[0], remark) == ([2], b"12345678", "")

    for folder in (tmp_path / "absent", None):
        request, remark = watch.probe_request(("m", "1"), config(text), folder)
        assert (list(request.inputs[0].shape), request.raw_input_contents[0]) == ([2], bytes(8))
        assert remark.startswith("asked with zeros, for its warmup data cannot be read: ")


def test_a_response_cache_is_asked_something_new_each_time() -> None:
    text = f"{INPUT} response_cache {{ enable: true }} input {{ name: 'id' data_type: TYPE_INT64 dims: [1] }}"
    asked = [watch.probe_request(("m", "1"), config(text), None)[0].raw_input_contents for _ in range(50)]

    floats = np.array([np.frombuffer(each[0], "<f4") for each in asked])
    assert len({each[0] for each in asked}) == 50
    assert np.abs(floats).max() < 1e-40
    assert {each[1] for each in asked} == {bytes(8)}, "a number that stands for something stays"


@pytest.mark.parametrize(
    ("backend", "does"), [("onnxruntime", True), ("tensorrt", True), ("python", False), ("", False)]
)
def test_models_from_a_file_take_warmup(backend: str, does: bool) -> None:
    assert watch.takes_warmup(config(f'backend: "{backend}"')) is does


def test_a_report_is_well_when_every_model_answers_somebody() -> None:
    busy = ModelReport("b", "1", "READY", "busy", said="Exceeds maximum queue size")
    assert Report(True, (WELL, busy)).is_well
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
    assert watch.changes(up, down) == ["Triton did not answer."]
    assert watch.changes(down, dead) == ["Triton answers; models: 1", failed]
    assert watch.changes(up, Report(True, (ModelReport("m", "1", "UNAVAILABLE"),))) == [
        "model m version 1 is UNAVAILABLE: no reason given"
    ]


def test_prometheus_gets_the_last_look_and_the_counts_of_all() -> None:
    metrics = WatchMetrics()
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
