from __future__ import annotations

from typing import Any

import pytest

from tritonpilot.autopilot import live
from tritonpilot.autopilot.knobs import as_written, is_same_but_knobs, knobs_of, with_knobs, with_spare
from tritonpilot.autopilot.terms import Knobs
from tritonpilot.errors import ServerError
from tritonpilot.metrics import parse as parse_metrics
from tritonpilot.model_config import parse

WRITTEN = """
name: "ctr"
backend: "onnxruntime"
max_batch_size: 8
instance_group { count: 2 kind: KIND_CPU }
dynamic_batching {
  max_queue_delay_microseconds: 500
  priority_levels: 3
  default_priority_level: 1
  priority_queue_policy { key: 1 value { default_timeout_microseconds: 100000 max_queue_size: 50 } }
  priority_queue_policy { key: 3 value { default_timeout_microseconds: 1 } }
}
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
COMPLETED = (
    WRITTEN.replace("count: 2", 'count: 2 name: "ctr_0"').replace(
        "{\n  max_queue", "{ preferred_batch_size: 8 max_queue"
    )
    + 'optimization { input_pinned_memory { enable: true } output_pinned_memory { enable: true } } runtime: "model.py"'
)


def config(text: str = WRITTEN) -> Any:
    return parse(text, "config.pbtxt")


def test_settings_are_found_in_a_config() -> None:
    assert knobs_of(config()) == Knobs(500, 2, {"realtime": 50, "batch": 0})
    assert knobs_of(config('name: "plain"')) == Knobs(0, 1, {})
    assert knobs_of(config("instance_group { count: 2 gpus: [0, 1] } instance_group { count: 1 }")).instances == 5


def test_what_is_written_is_what_is_found_and_nothing_else_changes() -> None:
    target = Knobs(2000, 3, {"realtime": 50, "batch": 7})
    changed = with_knobs(config(), target)
    assert knobs_of(changed) == target
    assert is_same_but_knobs(config(), changed)
    assert with_knobs(changed, knobs_of(config())).dynamic_batching.priority_queue_policy[2].max_queue_size == 0
    assert knobs_of(config()).instances == 2, "the given one stays as it is"


def test_classes_that_are_not_named_keep_their_limits() -> None:
    assert knobs_of(with_knobs(config(), Knobs(500, 2, {"batch": 9}))).max_queue_sizes == {"realtime": 50, "batch": 9}


def test_what_triton_completes_is_no_change() -> None:
    assert config(COMPLETED) != config()
    assert as_written(config(COMPLETED)) == config()
    assert as_written(config()) == config()


def test_other_changes_are_seen() -> None:
    assert not is_same_but_knobs(config(), config(WRITTEN.replace("max_batch_size: 8", "max_batch_size: 9")))
    assert not is_same_but_knobs(config(), config(WRITTEN.replace(": 100000", ": 200000")))


def test_several_groups_take_what_the_first_can_make() -> None:
    groups = config("instance_group { count: 1 gpus: [0, 1] } instance_group { count: 1 kind: KIND_CPU }")
    assert [g.count for g in with_knobs(groups, Knobs(0, 7)).instance_group] == [3, 1]
    with pytest.raises(ServerError, match="cannot make 4 instances"):
        with_knobs(groups, Knobs(0, 4))


def test_a_spare_instance_is_one_on_each_device() -> None:
    assert knobs_of(with_spare(config())).instances == 3
    assert knobs_of(with_spare(config("instance_group { count: 1 gpus: [0, 1] }"))).instances == 4
    assert is_same_but_knobs(with_spare(config()), config())


@pytest.mark.parametrize(
    ("text", "target", "why"),
    [
        (WRITTEN, Knobs(500, 0), "cannot make 0 instances"),
        (WRITTEN, Knobs(500, 2, {"gold": 1}), "no class gold"),
        (WRITTEN, Knobs(100_000, 2), "realtime may wait 100000 us"),
        ('name: "plain"', Knobs(1, 1), "no dynamic batching"),
        ('name: "whole" ensemble_scheduling { }', Knobs(0, 2), "an ensemble, which has no instances"),
    ],
)
def test_what_a_model_cannot_have_is_refused(text: str, target: Knobs, why: str) -> None:
    with pytest.raises(ServerError, match=f"{why}.*Nothing was changed"):
        with_knobs(config(text), target)


def test_a_live_delay_is_read_from_the_metrics_of_the_model() -> None:
    page = parse_metrics(
        'pilot_live_delay_us{model="ctr",version="1"} 0\npilot_live_delay_us{model="ctr",version="2"} 700\n'
        'pilot_live_delay_us{model="other",version="1"} 9\n'
    )
    assert live.delay_us(page, "ctr") == 700
    assert live.delay_us(page, "none") is None
    assert live.delay_us(parse_metrics('pilot_live_delay_us{model="ctr"} NaN'), "ctr") is None
    assert live.signed("key", "ctr", 5, 7).startswith("5:7:")
    assert live.signed("key", "ctr", 5, 7) != live.signed("key", "other", 5, 7)
