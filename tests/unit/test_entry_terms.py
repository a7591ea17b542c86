"""What the entry reads from Triton's model config: classes, queues, shares, waits, the window."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from tritonpilot import model_config
from tritonpilot.entry.terms import CacheTerms, ClassTerms, ModelTerms, terms_of
from tritonpilot.errors import RepositoryError

REPOSITORY = Path(__file__).parents[2] / "model_repository"


def served(**parameters: str) -> dict[str, Any]:
    """A config as Triton gives it over HTTP."""
    policy = {"timeout_action": "REJECT", "allow_timeout_override": True}
    return {
        "name": "risk_table",
        "platform": "",
        "backend": "table",
        "max_batch_size": 256,
        "input": [{"name": "numbers", "data_type": "TYPE_FP32"}, {"name": "texts", "data_type": "TYPE_STRING"}],
        "instance_group": [
            {"name": "risk_table_0", "kind": "KIND_CPU", "count": 2, "gpus": []},
            {"name": "risk_table_1", "kind": "KIND_GPU", "count": 1, "gpus": [0, 1]},
        ],
        "dynamic_batching": {
            "priority_levels": 3,
            "default_priority_level": 2,
            "priority_queue_policy": {
                "1": {**policy, "default_timeout_microseconds": 200000, "max_queue_size": 1000},
                "2": {**policy, "default_timeout_microseconds": "3600000000", "max_queue_size": 0},
                "3": {"timeout_action": "REJECT", "default_timeout_microseconds": 1},
            },
        },
        "parameters": {
            key: {"string_value": value} for key, value in {"pilot_classes": "realtime:1,batch:2", **parameters}.items()
        },
    }


def test_terms_of_a_model_with_classes() -> None:
    config = served(
        pilot_shares="batch:0.1", pilot_max_waits_ms="batch:500", pilot_slos_ms="realtime:50", pilot_wake_priority="3"
    )
    config["response_cache"] = {"enable": True}

    assert terms_of(config) == ModelTerms(
        name="risk_table",
        classes=(
            ClassTerms("realtime", 1, 1000, 0.2, slo_s=0.05),
            ClassTerms("batch", 2, 0, None, share=0.1, max_wait_s=0.5),
        ),
        default_class="batch",
        window_rows=(2 + 2 + 1) * 256,
        max_batch_size=256,
        inputs=("numbers", "texts"),
        caches=True,
        may_override_timeout=True,
    )


def test_a_model_without_classes_has_a_nameless_one() -> None:
    found = terms_of({"name": "identity", "max_batch_size": 0, "instance_group": [{"count": 3, "kind": "KIND_CPU"}]})

    assert found == ModelTerms(
        "identity", (ClassTerms("", 0, 1000, None),), "", window_rows=4, max_batch_size=0, may_override_timeout=False
    )


def test_the_numbers_of_the_nameless_class_come_from_the_default_queue_policy() -> None:
    config = {
        "name": "m",
        "max_batch_size": 8,
        "dynamic_batching": {"default_queue_policy": {"max_queue_size": 7, "default_timeout_microseconds": "500000"}},
    }
    assert terms_of(config).classes == (ClassTerms("", 0, 7, 0.5),)


def test_a_queue_policy_that_delays_rejects_nobody() -> None:
    config = served()
    config["dynamic_batching"]["priority_queue_policy"]["1"]["timeout_action"] = "DELAY"
    assert terms_of(config).classes[0].timeout_s is None


def test_a_timeout_is_honoured_only_where_each_class_has_one_and_allows_it() -> None:
    config = served()
    config["dynamic_batching"]["priority_queue_policy"]["2"]["allow_timeout_override"] = False
    assert not terms_of(config).may_override_timeout


def test_a_timeout_is_not_sent_where_a_queue_delay_makes_it_harmful() -> None:
    config = served()
    assert terms_of(config).may_override_timeout
    config["dynamic_batching"]["max_queue_delay_microseconds"] = "500"
    assert not terms_of(config).may_override_timeout


def test_an_ensemble_says_in_parameters_what_a_batcher_says_in_policies() -> None:
    config = served(
        pilot_timeouts_ms="realtime:200, batch:30000",
        pilot_max_queue_sizes="batch:10000",
        pilot_default_class="batch",
    )
    del config["dynamic_batching"], config["instance_group"]
    config["ensemble_scheduling"] = {"step": [{"model_name": "a"}, {"model_name": "b"}, {"model_name": "c"}]}
    found = terms_of(config)

    assert found.classes == (ClassTerms("realtime", 1, 1000, 0.2), ClassTerms("batch", 2, 10000, 30.0))
    assert (found.default_class, found.window_rows, found.may_override_timeout) == ("batch", 4 * 256, True)


def test_a_queue_size_of_zero_is_unlimited() -> None:
    assert terms_of(served(pilot_max_queue_sizes="realtime:0,batch:5")).classes[0].max_queue == 0


def test_an_hour_is_no_timeout() -> None:
    assert terms_of(served(pilot_timeouts_ms="realtime:3600000,batch:5")).classes[0].timeout_s is None


def test_without_a_default_the_first_class_is_the_default() -> None:
    config = served()
    del config["dynamic_batching"]
    assert terms_of(config).default_class == "realtime"


def test_the_window_can_be_stated() -> None:
    assert terms_of(served(pilot_window_rows="64")).window_rows == 64


@pytest.mark.parametrize(
    ("parameter", "value", "why"),
    [
        ("pilot_classes", "realtime", "'realtime' is not NAME:NUMBER"),
        ("pilot_classes", ":1", "':1' is not NAME:NUMBER"),
        ("pilot_classes", "realtime:x", "realtime has the level 'x', and levels are 1, 2, ..."),
        ("pilot_classes", "realtime:0", "realtime has the level '0', and levels are 1, 2, ..."),
        ("pilot_classes", "a:1,a:2", "it names a twice"),
        ("pilot_classes", "a:1,b:1", "it gives level 1 to two classes"),
        ("pilot_classes", "a:1", "no class has the level 2, the batcher's default_priority_level"),
        ("pilot_shares", "gold:0.1", "the model has no class 'gold' (pilot_classes: realtime, batch)"),
        ("pilot_shares", "batch:0.1,batch:0.2", "it names batch twice"),
        ("pilot_shares", "batch:none", "'none' of batch is no number above 0"),
        ("pilot_shares", "realtime:0.5,batch:0.5", "the shares add up to 1, and must stay below 1"),
        ("pilot_max_waits_ms", "batch:-1", "'-1' of batch is no number above 0"),
        ("pilot_slos_ms", "batch:nan", "'nan' of batch is no number above 0"),
        ("pilot_timeouts_ms", "batch:inf", "'inf' of batch is no number above 0"),
        ("pilot_max_queue_sizes", "batch:1.5", "'1.5' of batch is no whole number from 0 on"),
        ("pilot_max_queue_sizes", "batch:inf", "'inf' of batch is no whole number from 0 on"),
        ("pilot_default_class", "gold", "the model's classes are realtime, batch"),
        ("pilot_cache", "max_mb:0", "'0' of max_mb is no number above 0"),
        ("pilot_cache", "max_mb:1,ttl_s:soon", "'soon' of ttl_s is no number above 0"),
        ("pilot_cache", "ttl_s:1", "max_mb is not given"),
        ("pilot_cache", "max_mb:1,max_mb:2", "'max_mb' is there twice or not known (max_mb, ttl_s)"),
        ("pilot_cache", "max_gb:1", "'max_gb' is there twice or not known (max_mb, ttl_s)"),
        ("pilot_window_rows", "0", "it must be a whole number of rows, 1 or more"),
    ],
)
def test_a_wrong_parameter_is_named_with_the_reason(parameter: str, value: str, why: str) -> None:
    message = (
        f"The model risk_table: parameter {parameter} is {value!r}, but {why}. Its requests cannot be scheduled. Correct it in "
        "the service file and run `tritonpilot build`, or in its config.pbtxt, and load the model again."
    )
    with pytest.raises(RepositoryError, match=f"^{re.escape(message)}$"):
        terms_of(served(**{parameter: value}))


def test_what_the_entry_may_keep_of_answers() -> None:
    assert terms_of(served()).cache is None
    assert terms_of(served(pilot_cache="max_mb:0.5")).cache == CacheTerms(2**19, None)
    assert terms_of(served(pilot_cache="max_mb:64,ttl_s:600")).cache == CacheTerms(64 * 2**20, 600)


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in REPOSITORY.glob("*/config.pbtxt")))
def test_the_configs_of_all_example_services_have_terms(folder: str) -> None:
    path = REPOSITORY / folder / "config.pbtxt"
    config = model_config.parse(path.read_text(), str(path))
    found = terms_of(json.loads(json_format.MessageToJson(config, preserving_proto_field_name=True)))
    largest = max(1, config.max_batch_size)

    assert found.name == folder
    assert found.window_rows >= 2 * largest
    assert found.window_rows % largest == 0
    assert [c.name for c in found.classes] == [
        part.partition(":")[0] for part in config.parameters["pilot_classes"].string_value.split(",")
    ]
    assert found.inputs == tuple(tensor.name for tensor in config.input)
