from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from perf import emulated
from tritonpilot.errors import SpecError
from tritonpilot.setting import Setting, find
from tritonpilot.spec import Service, load_service, load_services
from tritonpilot.tune import rewrite

PROJECT = Path(__file__).parents[2]

BLOCK = """\
# who owns this
service: iris
model:
  file: model.onnx # trained nightly

slo:
  p99_ms: 100

batching: # measured in May
  max_batch_size: 8 # the largest that fits
  queue_delay_us: 100

classes:
  - name: realtime # a page waits
    priority: 1
    max_queue_size: 50
  - name: night
    priority: 2
    timeout_ms: 5000

# the rest
instances:
  - count: 1 # one core
    threads: 1

warmup:
  batch_sizes: [1, 8]
  # why two
"""
FLOW = """\
service: iris
model: {file: model.onnx}
batching: {max_batch_size: 8}   # no delay
"""
PIPELINE = """\
service: photo
pipeline:
  inputs: [{name: a, data_type: FP32, dims: [1]}]
  outputs: [{name: b, data_type: FP32, dims: [1]}]
  steps:
    - {name: decode, model: {backend: image_decode}}
    - name: net
      model: {file: build/model.onnx} # the network
      # after the model
    - name: labels
      model: {backend: labels}
batching:
  max_batch_size: 16
  queue_delay_us: 3000
"""


def tuned(tmp_path: Path, text: str, name: str, **changes: object) -> str:
    """The text with these values of the setting; it was read again and says so."""
    path = tmp_path / "service.yaml"
    path.write_text(text)
    service = find([load_service(path)], name)
    now = Setting.of(service)
    setting = replace(now, **changes)  # type: ignore[arg-type]
    new = rewrite.rewritten(text, service, setting.applied(service))
    rewrite.checked(path, new, name, setting)
    return new


def test_values_change_where_they_stand_and_comments_stay(tmp_path: Path) -> None:
    new = tuned(
        tmp_path, BLOCK, "iris", queue_delay_us=2000, max_batch_size=64, instances=2, max_queue_sizes={"realtime": 128}
    )

    assert new == (
        BLOCK.replace("max_batch_size: 8 #", "max_batch_size: 64 #")
        .replace("queue_delay_us: 100\n", "queue_delay_us: 2000\n")
        .replace("count: 1 #", "count: 2 #")
        .replace("max_queue_size: 50", "max_queue_size: 128")
    )


def test_keys_that_are_not_there_are_added_to_their_mapping(tmp_path: Path) -> None:
    new = tuned(tmp_path, FLOW, "iris", queue_delay_us=500, instances=3, threads=2)

    assert new == FLOW.replace(
        "{max_batch_size: 8}   # no delay\n",
        "{max_batch_size: 8, queue_delay_us: 500}   # no delay\ninstances: [{count: 3, threads: 2}]\n",
    )


def test_a_limit_is_added_to_the_class_that_has_none(tmp_path: Path) -> None:
    new = tuned(tmp_path, BLOCK, "iris", max_queue_sizes={"realtime": 50, "night": 4096})

    assert new == BLOCK.replace("    timeout_ms: 5000\n", "    timeout_ms: 5000\n    max_queue_size: 4096\n")


def test_nothing_changes_for_the_setting_that_the_file_has(tmp_path: Path) -> None:
    assert tuned(tmp_path, BLOCK, "iris") == BLOCK


def test_a_step_without_batching_gets_all_of_its_own(tmp_path: Path) -> None:
    new = tuned(tmp_path, PIPELINE, "photo_net", queue_delay_us=5000, instances=2)

    said = yaml.safe_load(new)["pipeline"]["steps"]
    assert said[1]["batching"] == {"max_batch_size": 16, "queue_delay_us": 5000}
    assert said[1]["instances"] == [{"count": 2}]
    assert "the network" in new
    assert "after the model" in new
    assert [step.keys() for step in (said[0], said[2])] == [{"name", "model"}] * 2


def test_a_list_of_several_lines_is_replaced_as_one(tmp_path: Path) -> None:
    text = BLOCK.replace("  batch_sizes: [1, 8]\n", "  batch_sizes:\n  - 1\n  - 8\n")

    new = tuned(tmp_path, text, "iris", max_batch_size=4)

    assert "  batch_sizes: [1, 4]\n  # why two\n" in new


@pytest.mark.parametrize("name", ["ctr", "image_net", "text_net", "ocr_rec", "risk_net"])
def test_every_example_can_be_changed_and_says_so(name: str) -> None:
    service = find(load_services(PROJECT / "models"), name)
    setting = replace(Setting.of(service), queue_delay_us=777, max_batch_size=32, instances=3)
    text = service.path.read_text()

    new = rewrite.rewritten(text, service, setting.applied(service))

    assert rewrite.checked(service.path, new, name, setting).service == service.written_as
    comments = [line.partition("#")[2] for line in text.splitlines() if "#" in line]
    assert [line.partition("#")[2] for line in new.splitlines() if "#" in line] == comments


def test_a_text_that_does_not_say_the_setting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(FLOW)
    setting = replace(Setting.of(load_service(path)), queue_delay_us=500)

    with pytest.raises(SpecError, match=r"could not be changed so that it says delay 500 us.*would say delay 0 us"):
        rewrite.checked(path, FLOW, "iris", setting)


PIPELINE_OVER = """\
service: over
pipeline:
  inputs: [{name: row, data_type: FP32, dims: [1]}]
  outputs: [{name: emulated, data_type: FP32, dims: [1]}]
  steps: [{service: device}]
batching: {max_batch_size: 64}
"""


def test_a_setting_that_breaks_a_pipeline_over_the_service_is_refused(tmp_path: Path) -> None:
    device = emulated.services_of(tmp_path, {"device": "batching: {max_batch_size: 64}"})["device"]
    Path(tmp_path, "models/over").mkdir()
    Path(tmp_path, "models/over/service.yaml").write_text(PIPELINE_OVER)
    services = load_services(tmp_path / "models")
    text = device.path.read_text()

    def said(size: int) -> Service:
        setting = replace(Setting.of(device), max_batch_size=size)
        new = rewrite.rewritten(text, device, setting.applied(device))
        return rewrite.checked(device.path, new, "device", setting)

    rewrite.check_all(said(128), services)
    with pytest.raises(
        SpecError, match=r"With the new setting over cannot be built any more: .*takes batches up to 8, below"
    ):
        rewrite.check_all(said(8), services)


def test_the_difference_is_a_unified_diff_and_the_file_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(FLOW)
    path.chmod(0o640)
    new = FLOW.replace("8", "16")

    assert "-batching: {max_batch_size: 8} " in rewrite.difference(path, new)
    assert "+batching: {max_batch_size: 16} " in rewrite.difference(path, new)
    rewrite.write(path, new)
    assert path.read_text() == new
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
