"""Settings of a service: what they change, and what they refuse."""

from dataclasses import replace
from pathlib import Path

import pytest

from tritonpilot import model_config, setting
from tritonpilot.errors import SpecError
from tritonpilot.setting import Setting
from tritonpilot.spec import Service, load_service, load_services

MODELS = Path(__file__).parents[2] / "models"

SERVICE = """\
service: digits
model: {file: model.onnx, quantize: {calibration: c.npz, evaluation: e.npz}}
batching: {max_batch_size: 64, queue_delay_us: 500, preferred_batch_sizes: [32, 64]}
classes:
  - {name: realtime, priority: 1, max_queue_size: 100, timeout_ms: 20}
  - {name: batch, priority: 2, max_queue_size: 1000}
instances: [{count: 2, threads: 3}]
warmup: {batch_sizes: [1, 64]}
"""


@pytest.fixture
def service(tmp_path: Path) -> Service:
    path = tmp_path / "service.yaml"
    path.write_text(SERVICE)
    for name in ("model.onnx", "model.int8.onnx"):
        (tmp_path / name).touch()
    return load_service(path)


def test_setting_of_a_service_is_what_its_file_says(service: Service) -> None:
    found = Setting.of(service)
    assert found == Setting(500, 64, 2, 3, "fp32", {"realtime": 100, "batch": 1000})
    assert Setting.of(found.applied(service)) == found
    assert Setting.of_dict(found.as_dict()) == found
    assert found.describe() == "delay 500 us, batch 64, 2 instances of 3 threads, fp32"


def test_every_part_of_a_setting_reaches_the_service(service: Service) -> None:
    wanted = Setting(2000, 32, 1, 2, "int8", {"realtime": 7})
    changed = wanted.applied(service)
    assert Setting.of(changed) == replace(wanted, max_queue_sizes={"realtime": 7, "batch": 1000})
    assert changed.batching.preferred_batch_sizes == [32]
    assert changed.warmup is not None
    assert changed.warmup.batch_sizes == [1, 32]
    assert model_config.model_file(changed, "cpu")[0].name == "model.int8.onnx"
    assert model_config.model_file(replace(wanted, precision="fp32").applied(changed), "cpu")[0].name == "model.onnx"
    assert Setting.of(service).max_batch_size == 64  # the service itself is not touched


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"queue_delay_us": 20_000}, "class realtime may wait 20 ms, no longer than this delay"),
        ({"max_queue_sizes": {"real": 1}}, "there is no class real; did you mean realtime? (realtime, batch)"),
        ({"max_batch_size": 0}, "its max_batch_size is 64, and 0, no batch dimension, is the model's own"),
        ({"precision": "fp16"}, "make it with `tritonpilot quantize digits --precision fp16`"),
        ({"instances": 0}, "greater than or equal to 1"),
        ({"max_batch_size": -1}, "greater than or equal to 0"),
    ],
)
def test_contradiction_is_refused_with_its_reason(service: Service, changes: dict[str, object], said: str) -> None:
    wanted = replace(Setting.of(service), **changes)  # type: ignore[arg-type]
    with pytest.raises(SpecError) as refused:
        wanted.applied(service)
    assert said in str(refused.value)
    assert "digits cannot have the setting" in str(refused.value)


def test_precisions_are_those_whose_files_are_there(service: Service) -> None:
    assert setting.precisions(service) == ("fp32", "int8")
    assert setting.file_of(service, "bf16") == service.folder / "model.bf16.onnx"


def test_model_of_a_pipeline_is_found_and_an_ensemble_is_refused() -> None:
    services = load_services(MODELS)
    assert setting.find(services, "image_net").batching.max_batch_size == 16
    with pytest.raises(
        SpecError, match="image is an ensemble.*Name one of them: image_decode, image_net, image_labels"
    ):
        setting.find(services, "image")
    with pytest.raises(SpecError, match="no service or model image_nett; did you mean image_net?"):
        setting.find(services, "image_nett")
