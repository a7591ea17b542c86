from __future__ import annotations

from pathlib import Path

import pytest

from tritonpilot.errors import SpecError
from tritonpilot.model_config import model_file
from tritonpilot.pipeline import parts
from tritonpilot.spec import json_schema, load_service, load_services

GOOD = """\
service: iris
model:
  file: model.onnx
batching:
  max_batch_size: 8
  queue_delay_us: 100
classes:
  - name: realtime
    priority: 1
    timeout_ms: 40
  - name: batch
    priority: 2
"""


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "service.yaml"
    path.write_text(text)
    return path


def test_a_good_file_is_read_with_defaults(tmp_path: Path) -> None:
    service = load_service(write(tmp_path, GOOD))

    assert service.service == "iris"
    assert [c.max_queue_size for c in service.classes] == [1000, 1000]
    assert service.default_priority == 1
    assert service.folder == tmp_path


def test_a_class_waits_less_than_its_promise_when_it_says_no_timeout(tmp_path: Path) -> None:
    text = GOOD.replace("    timeout_ms: 40\n", "").replace("batching:", "slo: {p99_ms: 50}\nbatching:")
    service = load_service(write(tmp_path, text + "    p99_ms: 2000\n"))

    realtime, batch = service.classes

    assert (service.promise_ms(realtime), service.timeout_ms(realtime)) == (50, 40), (
        "the default class has the service's SLO"
    )
    assert (service.promise_ms(batch), service.timeout_ms(batch)) == (2000, 1600)
    assert load_service(write(tmp_path, GOOD)).timeout_ms(batch.model_copy(update={"p99_ms": None})) == 3_600_000


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("queue_delay_us", "queue_dealy_us", 6, "unknown key batching.queue_dealy_us; did you mean queue_delay_us?"),
        ("    timeout_ms: 40", "    timeout: 40", 10, "did you mean timeout_ms?"),
        ("service: iris", "servise: iris", 1, "unknown key servise; did you mean service?"),
        ("batching:", "zzz: 1\nbatching:", 4, "unknown key zzz (known here: service,"),
        ("max_batch_size: 8", "max_batch_size: many", 5, "max_batch_size: Input should be a valid integer (given: 'many')"),
        ("max_batch_size: 8", "max_batch_size: true", 5, "Input should be a valid integer"),
        ("max_batch_size: 8", "max_batch_size: -1", 5, "greater than or equal to 0"),
        ("max_batch_size: 8", "max_batch_size: 99999999999", 5, "less than or equal to 2147483647"),
        ("queue_delay_us: 100", "queue_delay_us: 99999999999999999999999", 6, "less than or equal to 60000000"),
        ("timeout_ms: 40", "timeout_ms: 0.0001", 10, "greater than or equal to 0.001"),
        ("timeout_ms: 40", "timeout_ms: .nan", 10, "finite number"),
        ("batching:", "slo: {p99_ms: .inf}\nbatching:", 4, "finite number"),
        ("timeout_ms: 40", "p99_ms: 40\n    timeout_ms: 40", 1, "class realtime may wait 40 ms in the queue, but its"),
        ("queue_delay_us: 100", "queue_delay_us: 40000", 1, "no longer than the batcher waits"),
        ("batching:", "slo: {p99_ms: 39}\nbatching:", 1, "class realtime may wait 40 ms in the queue"),
        ("timeout_ms: 40", "share: 0.1", 1, "class realtime is served first anyway"),
        ("timeout_ms: 40", "max_wait_ms: 10", 1, "class realtime is served first anyway"),
        ("priority: 2", "priority: 2\n    share: 0.6", 13, "less than or equal to 0.5"),
        ("priority: 2", "priority: 2\n    share: 0.3\n  - {name: idle, priority: 3, share: 0.3}", 1, "add up to 0.6"),
        ("priority: 2", "priority: 2\n    max_wait_ms: 0", 13, "greater than 0"),
        ("classes:", "triton: {instanceGroup: []}\nclasses:", 7, "instanceGroup is said elsewhere"),
        ("classes:", "triton: {name: other}\nclasses:", 7, "name is said elsewhere"),
        ("priority: 2", "priority: 3", 1, "class batch has priority 3, outside the levels 1 to 2"),
        ("priority: 2", "priority: 0", 1, "outside the levels"),
        ("priority: 2", "priority: 1", 1, "share priority 1"),
        ("name: batch", "name: realtime", 1, "two classes are named realtime"),
        ("queue_delay_us: 100", "preferred_batch_sizes: [4, 16]", 4, "preferred batch size 16 is above max_batch_size 8"),
        ("classes:", "default_class: vip\nclasses:", 1, "default_class vip is not one of the classes (realtime, batch)"),
        ("classes:", "warmup: {batch_sizes: [16]}\nclasses:", 1, "warmup batch size 16 is above max_batch_size 8"),
        ("classes:", "version_policy: {latst: 1}\nclasses:", 7, "unknown key version_policy.latst; did you mean latest?"),
        ("classes:", "instances: [{threads: 1}, {threads: 2}]\nclasses:", 1, "the same `threads`"),
        ("file: model.onnx", "file: model.onnx\n  parameters: {pilot_wake_priority: 9}", 4, "set by the build itself"),
        ("file: model.onnx", "samples: rows.npz", 2, "give `file`, a model, or `backend`"),
        ("file: model.onnx", "backend: python", 2, "backend python runs a file of your own"),
        ("file: model.onnx", "backend: labels\n  file: labels.txt", 2, "list what it reads under `files`"),
        ("file: model.onnx", "backend: labels\n  format: onnx", 2, "belong to model files"),
        ("service: iris", "service: ../iris", 1, "String should match pattern"),
        ("model:\n  file: model.onnx\n", "", 1, "give either `model` or `pipeline`"),
        ("  max_batch_size: 8\n  queue_delay_us: 100", "  max_batch_size: 0", 1, "classes need Triton's dynamic batcher"),
        ("  queue_delay_us: 100", "  max_batch_size: 4", 6, "key 'max_batch_size' is given twice"),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_line_and_the_cure(
    tmp_path: Path, old: str, new: str, line: int, said: str
) -> None:
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))

    with pytest.raises(SpecError) as refused:
        load_service(path)

    assert said in str(refused.value)
    assert f"{path}:{line}: " in str(refused.value) or f"line {line}," in str(refused.value)
    assert "Nothing was changed." in str(refused.value)


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "service: [", "\tservice: x", "? [a]\n: b\n"])
def test_what_is_no_yaml_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match="Nothing was changed"):
        load_service(write(tmp_path, text))


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_bytes(b"service: \xff\xfe")

    with pytest.raises(SpecError, match="cannot be read"):
        load_service(path)


def test_two_services_with_one_name_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", GOOD)
    write(tmp_path / "b", GOOD)

    with pytest.raises(SpecError, match="Two services are named iris"):
        load_services(tmp_path)


def test_an_unknown_service_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "a", GOOD)

    with pytest.raises(SpecError, match="no service irs in .*; did you mean iris?"):
        load_services(tmp_path, ["irs"])


def test_a_folder_without_services_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="There is no service.yaml"):
        load_services(tmp_path)


PIPELINE = """\
service: photos
pipeline:
  inputs: [{name: photo, data_type: BYTES, dims: [1]}]
  outputs: [{name: y, data_type: FP32, dims: [4]}]
  steps:
    - {name: decode, model: {backend: image_decode}, outputs: {pixels: x}}
    - {name: net, model: {file: model.onnx}}
batching: {max_batch_size: 8, queue_delay_us: 900}
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("name: net, ", "", 7, "needs a `name`"),
        ("name: net, ", "name: decode, ", 2, "two steps are named decode"),
        (
            "name: net, model: {file: model.onnx}",
            "name: net",
            7,
            "either a `model` of its own or names another `service`",
        ),
        ("{file: model.onnx}", "{file: model.onnx}, service: other", 7, "and not both"),
        ("model: {file: model.onnx}", "service: iris, warmup: {}", 7, "belong into its own service file"),
        ("  steps:", "  driver: {backend: ocr}\n  steps:", 2, "the driver calls step decode itself"),
        ("  steps:", "  driver: {file: x.onnx}\n  steps:", 2, "a driver is a backend"),
        ("batching:", "warmup: {}\nbatching:", 1, "belong to the steps of a pipeline"),
        ("batching:", "cache: {kind: triton}\nbatching:", 1, "does not cache the answers of a pipeline"),
        ("batching:", "cache: {kind: triton, max_mb: 1}\nbatching:", 8, "has no max_mb and ttl_s of a model"),
        ("batching:", "cache: {max_mb: 1}\nbatching:", 8, "cache.kind"),
        ("name: net, model: {file: model.onnx}", "service: photos", 1, "a step names the pipeline photos itself"),
        (
            "inputs: [{name: photo, data_type: BYTES, dims: [1]}]",
            "inputs: [{name: photo, data_type: BYTES, dims: [1]}, {name: photo, data_type: FP32, dims: [1]}]",
            2,
            "two inputs are named photo",
        ),
        ("batching:", "instances: [{count: 2}]\nbatching:", 1, "give each step its `instances`"),
        ("{backend: image_decode}", "{backend: image_decode, parametrs: {}}", 6, "did you mean parameters?"),
        (
            "model: {file: model.onnx}}\n",
            "model: {file: model.onnx}, batching: {max_batch_size: 0}}\nclasses: [{name: a, priority: 1}]\n",
            1,
            "which step net switches off",
        ),
    ],
)
def test_a_bad_pipeline_is_refused_with_its_line_and_the_cure(
    tmp_path: Path, old: str, new: str, line: int, said: str
) -> None:
    assert old in PIPELINE
    path = write(tmp_path, PIPELINE.replace(old, new))

    with pytest.raises(SpecError) as refused:
        load_service(path)

    assert said in str(refused.value)
    assert f"{path}:{line}: " in str(refused.value)


def test_a_pipeline_becomes_a_service_for_each_step_and_itself(tmp_path: Path) -> None:
    classes = "classes: [{name: now, priority: 1, timeout_ms: 30}]\n"
    service = load_service(write(tmp_path, PIPELINE + classes))

    decode, net, photos = parts(service)

    assert (decode.service, net.service, photos.service) == ("photos_decode", "photos_net", "photos")
    assert decode.classes == net.classes == service.classes, "priorities, timeouts and limits are those of the pipeline"
    assert decode.batching.queue_delay_us + net.batching.queue_delay_us == 900, "steps share the queue delay"
    assert decode.batching.max_batch_size == net.batching.max_batch_size == 8
    assert photos is service


def test_a_driver_is_told_what_its_steps_are_called(tmp_path: Path) -> None:
    text = PIPELINE.replace("  steps:", "  driver: {backend: ocr, parameters: {min_side: 3}}\n  steps:")
    service = load_service(write(tmp_path, text.replace(", outputs: {pixels: x}", "")))

    *_, driver = parts(service)

    assert driver.service == "photos"
    assert driver.model is not None
    assert driver.model.parameters == {
        "min_side": 3,
        "decode": "photos_decode",
        "net": "photos_net",
        "pilot_steps": "photos_decode,photos_net",
    }


def test_the_exported_schema_is_current() -> None:
    import json

    committed = Path(__file__).parents[2] / "docs" / "service.schema.json"
    assert json.loads(committed.read_text()) == json_schema(), "run `tritonpilot schema > docs/service.schema.json`"


def test_the_examples_of_the_project_are_valid() -> None:
    services = load_services(Path(__file__).parents[2] / "models")

    assert {"ctr", "image"} <= {service.service for service in services}


QUANTIZED = GOOD.replace(
    "  file: model.onnx\n",
    "  file: model.onnx\n  quantize: {calibration: c.npz, evaluation: e.npz, metric: auc, publish: beside}\n",
)


def test_an_int8_model_is_served_beside_its_fp32_one(tmp_path: Path) -> None:
    int8, fp32 = parts(load_service(write(tmp_path, QUANTIZED)))

    assert (int8.service, fp32.service) == ("iris_int8", "iris")
    assert int8.model is not None
    assert fp32.model is not None
    assert (int8.model.file, fp32.model.file) == ("model.int8.onnx", "model.onnx")
    assert int8.classes == fp32.classes


def test_an_int8_model_is_served_instead_of_its_fp32_one(tmp_path: Path) -> None:
    service = load_service(write(tmp_path, QUANTIZED.replace("beside", "instead")))

    assert [part.service for part in parts(service)] == ["iris"]
    assert model_file(service, "cpu") == (tmp_path / "model.int8.onnx", "onnx")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("metric: auc", "metric: acc", "model.quantize.metric"),
        ("metric: auc", "max_loss: 1.0", "less than 1"),
        ("metric: auc", "samples: 0", "greater than or equal to 1"),
        ("evaluation: e.npz, ", "", "model.quantize.evaluation"),
        ("file: model.onnx", "file: model.plan", "`quantize` is for ONNX models"),
        ("file: model.onnx", "backend: labels", "belong to model files"),
    ],
)
def test_a_wrong_quantisation_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in QUANTIZED
    with pytest.raises(SpecError) as refused:
        load_service(write(tmp_path, QUANTIZED.replace(old, new)))
    assert said in str(refused.value)
