"""The client's pure decisions: which calls share a request, what is repeated, which server is asked, what fits a model."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tritonpilot.client import coalesce, endpoints, retry, served, shared_memory
from tritonpilot.client.coalesce import Limits, Size
from tritonpilot.client.errors import InputError
from tritonpilot.client.placement import place
from tritonpilot.client.transport import _field, retry_after_s

LIMITS = Limits(rows=8, bytes=1000, wait_s=0.001)
CTR = served.from_config(
    {
        "name": "ctr",
        "max_batch_size": 256,
        "input": [
            {"name": "dense", "data_type": "TYPE_FP32", "dims": ["28"]},
            {"name": "ids", "data_type": "TYPE_INT64", "dims": ["8"]},
        ],
        "output": [{"name": "prob", "data_type": "TYPE_FP32", "dims": ["1"]}],
        "parameters": {"pilot_classes": {"string_value": "realtime:1,batch:2"}},
    }
)
TEXT = served.from_config(
    {
        "name": "text",
        "max_batch_size": 16,
        "input": [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}],
        "output": [{"name": "embedding", "data_type": "TYPE_FP32", "dims": [384]}],
    }
)


def decision(sizes: list[Size], age_s: float = 0.0, in_flight: int = 1) -> coalesce.Decision:
    return coalesce.decide(sizes, oldest_age_s=age_s, in_flight=in_flight, limits=LIMITS)


def test_calls_leave_at_once_when_nothing_is_on_the_way() -> None:
    assert decision([Size(1, 10)] * 3, in_flight=0).count == 3


def test_calls_gather_while_a_request_is_on_the_way_and_no_longer_than_the_wait() -> None:
    early, late = decision([Size(1, 10)] * 3, age_s=0.0004), decision([Size(1, 10)] * 3, age_s=0.001)

    assert (early.count, round(early.wait_s, 6)) == (0, 0.0006)
    assert late.count == 3


def test_a_full_request_leaves_without_waiting_and_never_exceeds_its_limits() -> None:
    assert decision([Size(3, 10)] * 5).count == 2
    assert decision([Size(1, 400)] * 5).count == 2
    assert decision([Size(1, 10)] * 8).count == 8


def test_a_call_larger_than_the_limits_leaves_alone() -> None:
    assert decision([Size(20, 5000), Size(1, 1)]).count == 1


def test_nobody_waiting_means_nothing_to_do() -> None:
    assert decision([]) == coalesce.Decision(0, math.inf, "nobody waits")


def test_rows_are_found_again_in_the_joined_answer() -> None:
    assert coalesce.spans([1, 3, 2]) == [(0, 1), (1, 4), (4, 6)]


@pytest.mark.parametrize("count", [2, 3, 64])
@pytest.mark.parametrize("bad", [0, 1])
def test_halving_leaves_the_bad_call_alone_in_less_than_twice_as_many_requests(count: int, bad: int) -> None:
    alone, requests = [], 0
    pending = [list(range(count))]
    while pending:
        calls = pending.pop()
        requests += 1
        if bad in calls and len(calls) == 1:
            alone.append(calls[0])
        elif bad in calls:
            pending += coalesce.halves(calls)

    assert alone == [bad]
    assert requests <= 2 * count - 1


def test_calls_of_a_deadline_band_differ_by_less_than_a_factor_of_two() -> None:
    bands: dict[int, list[float]] = {}
    for milliseconds in range(1, 2000):
        bands.setdefault(coalesce.deadline_band(milliseconds / 1e3), []).append(milliseconds)

    assert all(max(band) < 2 * min(band) for band in bands.values())


def decided(**changes: Any) -> retry.Decision:
    state: dict[str, Any] = {"attempt": 1, "is_retryable": True, "left_s": 1.0, "tokens": 5.0, "draw": 0.5}
    return retry.decide(retry.Policy(attempts=5, first_wait_ms=10, longest_wait_ms=50), **{**state, **changes})


def test_waits_grow_up_to_the_longest_and_are_drawn_at_random() -> None:
    assert [decided(attempt=n).wait_s for n in (1, 2, 3, 4)] == [0.005, 0.01, 0.02, 0.025]
    assert decided(draw=0.0).wait_s == 0.0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_retryable": False}, "this refusal is final"),
        ({"attempt": 5}, "refused 5 times"),
        ({"tokens": 0.9}, "the budget for repeats is spent"),
        ({"left_s": 0.004}, "the deadline comes before the next attempt"),
    ],
)
def test_what_is_not_repeated_says_why(changes: dict[str, Any], reason: str) -> None:
    assert decided(**changes) == retry.Decision(None, reason)


def test_a_server_is_left_alone_as_long_as_it_asked_and_the_drawn_wait_on_top() -> None:
    assert decided(retry_after_s=0.2).wait_s == pytest.approx(0.205)
    assert decided(retry_after_s=0.2, draw=0.0).wait_s == 0.2
    assert decided(retry_after_s=1.0, draw=0.0) == retry.Decision(None, "the deadline comes before the next attempt")
    assert decided(retry_after_s=60.0, has_other_endpoint=True).wait_s == 0.0


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 0.0),
        ({"retry-after-ms": "150.5"}, 0.1505),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after-ms": "150", "retry-after": "1"}, 0.15),
        ({"retry-after-ms": "soon", "retry-after": "1"}, 1.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, 0.0),
        ({"retry-after-ms": "inf"}, 0.0),
        ({"retry-after-ms": "nan"}, 0.0),
        ({"retry-after-ms": "-1"}, 0.0),
    ],
)
def test_how_long_a_refusal_asks_to_wait_is_read_from_its_headers(headers: dict[str, str], expected: float) -> None:
    assert retry_after_s(headers) == pytest.approx(expected)


def test_another_endpoint_is_asked_without_a_wait() -> None:
    assert decided(has_other_endpoint=True).wait_s == 0.0


def test_the_budget_allows_a_share_of_the_requests_to_be_repeated() -> None:
    budget = retry.Budget(retry.Policy(budget_share=0.5, budget_most=1.0))
    budget.repeated()
    assert budget.tokens == 0.0

    budget.sent()
    budget.sent()
    budget.sent()

    assert budget.tokens == 1.0


def test_the_endpoint_with_the_fewest_requests_in_flight_is_asked_and_equals_take_turns() -> None:
    first, second = endpoints.parse("a:1"), endpoints.parse("b:2")

    assert [endpoints.choose([first, second], now=0) for _ in range(3)] == [first, second, first]
    first.in_flight = 1
    assert endpoints.choose([first, second], now=0) is second


def test_a_failed_endpoint_is_left_out_for_longer_each_time_then_tried_by_one_request() -> None:
    good, bad = endpoints.parse("a:1"), endpoints.parse("b:2")
    good.in_flight = 5
    endpoints.failed(bad, now=0.0)
    endpoints.failed(bad, now=0.0)  # of the same moment: counts once

    assert endpoints.choose([good, bad], now=0.2) is good
    assert endpoints.choose([good, bad], now=0.3) is bad
    bad.in_flight = 1
    assert endpoints.choose([good, bad], now=0.3) is good
    endpoints.failed(bad, now=0.3)
    assert bad.out_until == pytest.approx(0.8)
    endpoints.answered(bad)
    bad.in_flight = 0
    assert endpoints.choose([good, bad], now=0.4) is bad


def test_when_all_endpoints_are_out_the_one_that_comes_back_first_is_asked() -> None:
    first, second = endpoints.parse("a:1"), endpoints.parse("b:2")
    endpoints.failed(first, now=0.0)
    endpoints.failed(second, now=0.1)

    assert endpoints.choose([first, second], now=0.15) is first
    assert not endpoints.has_other([first, second], now=0.15, avoid=())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("127.0.0.1:9000", "http://127.0.0.1:9000"),
        ("grpc://triton", "grpc://triton:8001"),
        ("https://[::1]:5/", "https://[::1]:5"),
    ],
)
def test_endpoints_are_given_as_addresses_or_urls(url: str, expected: str) -> None:
    assert endpoints.parse(url).url == expected


@pytest.mark.parametrize("url", ["ftp://a:1", "http://a:99999", "http://a:1/v2", "grpc://", ""])
def test_other_endpoints_are_refused_by_name(url: str) -> None:
    with pytest.raises(InputError, match="is no endpoint"):
        endpoints.parse(url)


def test_only_this_machine_is_loopback() -> None:
    assert [endpoints.parse(f"http://{host}:1").is_loopback for host in ("localhost", "127.0.0.9", "[::1]")] == [
        True
    ] * 3
    assert not endpoints.parse("10.0.0.1:1").is_loopback


def test_a_row_without_batch_dimension_gets_one_and_is_remembered() -> None:
    single = served.check(CTR, {"dense": np.zeros(28, np.float32), "ids": list(range(8))})
    several = served.check(CTR, {"dense": np.zeros((3, 28), np.float32), "ids": np.zeros((3, 8), np.int64)})

    assert (single.is_single, single.rows, single.arrays["ids"].shape) == (True, 1, (1, 8))
    assert (several.is_single, several.rows) == (False, 3)


@pytest.mark.parametrize(
    ("inputs", "field", "says"),
    [
        ({"dense": np.zeros(28, np.float32)}, "ids", "is missing"),
        ({"dense": np.zeros(28, np.float32), "ids": [0] * 8, "x": 1}, "x", "no such input"),
        ({"dense": np.zeros(28), "ids": [0] * 8}, "dense", "float64, but the model ctr takes FP32"),
        ({"dense": np.zeros(27, np.float32), "ids": [0] * 8}, "dense", r"shape \[27\]"),
        ({"dense": np.zeros((1, 1, 28), np.float32), "ids": [0] * 8}, "dense", r"\[rows, 28\]"),
        ({"dense": np.zeros((0, 28), np.float32), "ids": np.zeros((0, 8), np.int64)}, "dense", "no rows"),
        ({"dense": np.zeros((257, 28), np.float32), "ids": np.zeros((257, 8), np.int64)}, "dense", "1 to 256"),
        ({"dense": np.zeros((2, 28), np.float32), "ids": np.zeros((3, 8), np.int64)}, "ids", 'but "dense" has 2'),
        ({"dense": np.zeros((1, 28), np.float32), "ids": [0] * 8}, "ids", "only one of the two"),
        ({"dense": ["a"] * 28, "ids": [0] * 8}, "dense", "not FP32"),
        ({"dense": np.zeros(28, np.float32), "ids": [0.5] * 8}, "ids", "not INT64"),
        ({"dense": np.zeros(28, np.float32), "ids": [2**70] * 8}, "ids", "not INT64"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_with_their_name(inputs: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        served.check(CTR, inputs)

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("value", "expected", "is_single"),
    [
        ("é", [["é".encode()]], True),
        (b"\xff\xd8\0\0", [[b"\xff\xd8\0\0"]], True),
        (["one"], [[b"one"]], True),
        ([["one"], [b"two\0"]], [[b"one"], [b"two\0"]], False),
        (np.array([["one"], ["two"]]), [[b"one"], [b"two"]], False),
        (np.array([[b"x"]], np.object_), [[b"x"]], False),
    ],
)
def test_strings_are_taken_in_every_usual_form(value: Any, expected: list[list[bytes]], is_single: bool) -> None:
    checked = served.check(TEXT, {"text": value})

    assert (checked.arrays["text"].tolist(), checked.is_single) == (expected, is_single)


@pytest.mark.parametrize(
    ("value", "says"), [([1], "something else than strings"), ("\ud800", "UTF-8"), ([["a", "b"]], "shape")]
)
def test_other_strings_are_refused_by_name(value: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as refused:
        served.check(TEXT, {"text": value})

    assert refused.value.field == "text"


def test_classes_become_levels_and_unknown_ones_are_refused() -> None:
    assert [served.level(CTR, name, None) for name in (None, "realtime", "batch")] == [0, 1, 2]
    with pytest.raises(InputError, match="realtime, batch"):
        served.level(CTR, "nobody", None)
    with pytest.raises(InputError, match="no priority 3"):
        served.level(CTR, None, 3)


def described(**shapes: list[int]) -> served.Served:
    tensors = [
        {"name": name, "datatype": "FP32", "shape": [str(dim) for dim in shape]} for name, shape in shapes.items()
    ]
    return served.from_metadata({"name": "hidden", "inputs": tensors[:-1], "outputs": tensors[-1:]})


def test_metadata_tells_rows_by_a_first_dimension_of_any_size_in_every_tensor() -> None:
    model = described(dense=[-1, 28], ids=[-1, 8], prob=[-1, 1])

    found = served.check(model, {"dense": np.zeros(28, np.float32), "ids": np.zeros(8, np.float32)})

    assert (found.rows, found.is_single, found.arrays["ids"].shape) == (1, True, (1, 8))
    assert (model.may_join, model.is_limit_known, model.classes) == (True, False, None)
    assert described(dense=[-1, 28], ids=[8], prob=[-1, 1]).max_batch_size == 0
    assert served.check(described(x=[3], y=[3]), {"x": [1.0, 2.0, 3.0]}).arrays["x"].shape == (3,)


def test_without_classes_in_sight_every_name_is_the_servers_to_judge() -> None:
    model = described(x=[-1, 3], y=[-1, 3])

    assert [served.level(model, "vip", None), served.level(model, None, 7)] == [0, 7]
    with pytest.raises(InputError, match="no priority -1"):
        served.level(model, None, -1)


def test_models_whose_answers_depend_on_batch_mates_are_not_joined() -> None:
    tokens = [{"name": "input_ids", "data_type": "TYPE_INT64", "dims": [-1]}]
    text = [{"name": "text", "data_type": "TYPE_STRING", "dims": [1]}]
    padded = {"name": "t", "max_batch_size": 8, "input": text, "output": tokens}
    plain = {"name": "n", "max_batch_size": 8, "input": tokens, "output": tokens}

    assert CTR.may_join
    assert not served.from_config(padded).may_join
    assert served.from_config(plain).may_join
    assert not served.from_config({**plain, "sequence_batching": {}}).may_join
    assert not served.from_config({**plain, "max_batch_size": 0}).may_join


def test_a_decoupled_model_is_refused() -> None:
    with pytest.raises(InputError, match="decoupled"):
        served.from_config({"name": "stream", "model_transaction_policy": {"decoupled": True}})


def test_only_tensors_of_the_threshold_and_of_known_size_are_placed() -> None:
    plan = place({"small": 10, "big": 1000}, {"unknown": 0, "large": 3000}, threshold=1000)

    assert (plan.inputs, plan.outputs, plan.bytes) == ({"big": 0}, {"large": 1024}, 4032 + 0)


def test_regions_of_dead_processes_are_told_from_those_of_living_ones() -> None:
    mine = shared_memory._owner(shared_memory.os.getpid())  # type: ignore[attr-defined]
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    head = mine.split("_")
    gone = "_".join([*head[:3], str(dead.pid), "123"])

    assert not shared_memory.is_abandoned(f"{mine}_ab_0")
    assert shared_memory.is_abandoned(f"{gone}_ab_0")
    assert not shared_memory.is_abandoned("somebody_elses_region")


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ('"photo": row 3 is no image', "photo"),
        ("in ensemble 'image', \"photo\": row 0 is empty", "photo"),
        ("unexpected shape for input 'dense' for model 'ctr'. Expected [-1,28], got [1,27]", "dense"),
        ("something else", ""),
    ],
)
def test_the_field_is_read_from_the_servers_words(said: str, field: str) -> None:
    assert _field(said) == field


def test_the_client_imports_little() -> None:
    code = "import sys, tritonpilot.client; print([m for m in ('pydantic', 'yaml', 'onnx', 'grpc', 'aiohttp') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ast.literal_eval(done.stdout) == []


def test_the_tree_of_errors_is_the_drawn_one() -> None:
    from tritonpilot.client import errors

    drawn = (Path(errors.__file__).read_text().split('"""')[1]).split()
    classes = [name for name in dir(errors) if name.endswith("Error") and name != "PilotError"]

    assert set(classes) <= set(drawn)
