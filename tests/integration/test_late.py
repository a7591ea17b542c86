"""Requests whose deadline has passed are not computed, in every kind of backend and pipeline, and their mates are."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from pilotlib.deadlines import LATE
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

# Answers twice its input and how many rows it has computed so far; sleeps 30 ms per execution.
DOUBLE = """
import time

import numpy as np

from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend


class Double(Backend):
    def set_up(self, context):
        self.computed = 0

    def decode(self, inputs):
        return inputs["x"]

    def predict(self, items):
        time.sleep(0.03)
        self.computed += sum(len(item) for item in items)
        return [(item, np.full((len(item), 1), self.computed, np.int64)) for item in items]

    def encode(self, result):
        return {"y": result[0] * 2, "computed": result[1]}


TritonPythonModel = triton_model(Double)
"""
OUTPUTS = '{ name: "y" data_type: TYPE_FP32 dims: [1] }, { name: "computed" data_type: TYPE_INT64 dims: [1] }'
TENSORS = f"""
max_batch_size: 8
input [{{ name: "x" data_type: TYPE_FP32 dims: [1] }}]
output [ {OUTPUTS} ]
"""
CONFIG = (
    TENSORS
    + """
backend: "python"
instance_group [{ kind: KIND_CPU }]
dynamic_batching { max_queue_delay_microseconds: 20000 %s }
"""
)
WITH_CLASSES = """priority_levels: 2 default_priority_level: 1
  priority_queue_policy { key: 2 value { timeout_action: REJECT default_timeout_microseconds: 1 } }"""
ENSEMBLE = (
    TENSORS
    + """
platform: "ensemble"
ensemble_scheduling { step [
  { model_name: "double" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "half" } },
  { model_name: "double" model_version: -1 input_map { key: "x" value: "half" }
    output_map { key: "y" value: "y" } output_map { key: "computed" value: "computed" } }
] }
"""
)
# Calls the model "double", and again after 0.2 s.
DRIVER = """
import time

from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, InferError


class Driver(Backend):
    def set_up(self, context):
        self.infer = context.infer

    def decode(self, inputs):
        return inputs["x"]

    def predict(self, items):
        return [self.read(item) for item in items]

    def read(self, item):
        try:
            half = self.infer("double", {"x": item}, ["y"])["y"]
            time.sleep(0.2)
            return self.infer("double", {"x": half}, ["y", "computed"])
        except InferError as error:
            return error

    def encode(self, result):
        if isinstance(result, InferError):
            raise result
        return result


TritonPythonModel = triton_model(Driver)
"""
ONNX_CONFIG = """
backend: "onnxruntime"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ kind: KIND_CPU }]
dynamic_batching { max_queue_delay_microseconds: 20000 }
"""


def write_onnx(path: Path) -> None:
    """y = x + x, so that the stand-in for onnxruntime runs it the plain way."""
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 1]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "x"], ["y"])], "double", [x], [y])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Iterator[EmbeddedServer]:
    root = tmp_path_factory.mktemp("late") / "model_repository"
    make_model(root, "double", DOUBLE, CONFIG % "")
    make_model(
        root,
        "classes",
        DOUBLE,
        CONFIG % WITH_CLASSES + 'parameters { key: "pilot_wake_priority" value { string_value: "2" } }',
    )
    make_model(root, "driver", DRIVER, CONFIG % "")
    make_model(root, "ensemble", "", ENSEMBLE)
    (root / "ensemble" / "1" / "model.py").unlink()
    onnx_folder = make_model(root, "onnx", "", ONNX_CONFIG) / "1"
    (onnx_folder / "model.py").unlink()
    write_onnx(onnx_folder / "model.onnx")
    with EmbeddedServer(root) as running:
        yield running
        running.check_alive()


@pytest.fixture(scope="module")
def client(server: EmbeddedServer) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as one:
        yield one


def ask(
    client: tritonclient.grpc.InferenceServerClient,
    model: str,
    number: float,
    parameters: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """The outputs of one row. Raises InferenceServerException."""
    x = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
    x.set_data_from_numpy(np.array([[number]], np.float32))
    found = client.infer(model, [x], parameters=dict(parameters or {}))
    return {each.name: found.as_numpy(each.name)[0, 0].item() for each in found.get_response().outputs}


def together(
    client: tritonclient.grpc.InferenceServerClient, model: str, asked: list[Mapping[str, Any]]
) -> list[float | InferenceServerException]:
    """Requests number 1, 2, ... with these parameters at the same time: y of each, or its error."""

    def one(place: int) -> float | InferenceServerException:
        try:
            return ask(client, model, place + 1.0, asked[place])["y"]
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(one, range(len(asked))))


def in_ns(seconds: float) -> dict[str, int]:
    return {"pilot_deadline_ns": time.monotonic_ns() + round(seconds * 1e9)}


def late_total(server: EmbeddedServer, model: str) -> float:
    with urllib.request.urlopen(f"http://{server.endpoints.metrics}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f'pilot_late_total{{model="{model}"')]
    return float(line.rpartition(" ")[2])


@pytest.mark.parametrize("model", ["double", "classes", "onnx"])
def test_late_requests_are_not_computed_and_their_mates_are(
    server: EmbeddedServer, client: tritonclient.grpc.InferenceServerClient, model: str
) -> None:
    before = late_total(server, model)
    asked = [
        {},
        in_ns(-1),
        in_ns(60),
        in_ns(-3600),
        {"color": "red"},
        {"pilot_deadline_ns": 0},
        {"pilot_deadline_ns": -5},
        in_ns(9),
    ]

    found = together(client, model, asked)

    late = [place for place, each in enumerate(found) if isinstance(each, InferenceServerException)]
    assert late == [1, 3, 5, 6]
    for place in late:
        error = found[place]
        assert isinstance(error, InferenceServerException)
        assert (error.status(), LATE in error.message()) == ("StatusCode.UNAVAILABLE", True)
    assert [found[place] for place in (0, 2, 4, 7)] == [2.0, 6.0, 10.0, 16.0]
    assert late_total(server, model) == before + 4


def test_a_late_request_costs_the_model_nothing(client: tritonclient.grpc.InferenceServerClient) -> None:
    before = ask(client, "double", 1)["computed"]

    together(client, "double", [in_ns(-1)] * 20)

    assert ask(client, "double", 1)["computed"] == before + 1


@pytest.mark.parametrize("value", ["soon", "", 1.5, True, 2.0**70, float("nan"), float("inf"), '"pilot_wake":true'])
def test_a_deadline_that_is_no_integer_is_an_error_that_names_it(
    client: tritonclient.grpc.InferenceServerClient, value: Any
) -> None:
    found = together(client, "double", [{}, {"pilot_deadline_ns": value}, {}])

    error = found[1]
    assert isinstance(error, InferenceServerException)
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert "pilot_deadline_ns is " in error.message()
    assert [found[0], found[2]] == [2.0, 6.0]


@pytest.mark.parametrize(
    "parameters",
    [
        {"other": "pilot_deadline_ns"},
        {"other": '"pilot_deadline_ns":1,'},
        {"pilot_other": 1, "b": "pilot_wake"},
        {"pilot_wake": False},
        {"pilot_wake": "true"},
    ],
)
def test_other_parameters_change_nothing(
    client: tritonclient.grpc.InferenceServerClient, parameters: Mapping[str, Any]
) -> None:
    assert ask(client, "double", 4, parameters)["y"] == 8
    assert ask(client, "double", 4, {**parameters, **in_ns(60)})["y"] == 8
    with pytest.raises(InferenceServerException, match=LATE):
        ask(client, "double", 4, {**parameters, **in_ns(-1)})


def post(server: EmbeddedServer, model: str, parameters: bytes) -> tuple[int, Any]:
    """(status, body) of a request with one row over HTTP, its parameters written by hand."""
    body = (
        b'{"parameters":{%s},"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[3]}],'
        b'"outputs":[{"name":"y"}]}' % parameters
    )
    try:
        with urllib.request.urlopen(f"http://{server.endpoints.http}/v2/models/{model}/infer", body) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize(
    ("parameters", "status"),
    [
        (b'"pilot_deadline_ns":1', 503),
        (b'"pilot_deadline_ns":9223372036854775807', 200),
        (b'"pilot_deadline_ns":9223372036854775808', 400),
        (b'"pilot_deadline_ns":1e3', 400),
        (b'"pilot_deadline_ns":"1"', 400),
        (b'"pilot_deadline_ns":1,"color":"red"', 503),
        (b'"color":"\xff"', 200),
        (b'"color":"\xff","pilot_deadline_ns":1', 200),
    ],
)
def test_over_http_the_same_is_said_with_its_statuses(server: EmbeddedServer, parameters: bytes, status: int) -> None:
    found, body = post(server, "double", parameters)

    assert found == status, body
    if status == 503:
        assert LATE in body["error"]


@pytest.mark.parametrize("model", ["ensemble", "driver"])
def test_pipelines_hand_the_deadline_to_their_steps(
    server: EmbeddedServer, client: tritonclient.grpc.InferenceServerClient, model: str
) -> None:
    assert ask(client, model, 1, in_ns(60))["y"] == 4
    before, computed = late_total(server, "double"), ask(client, "double", 1)["computed"]

    with pytest.raises(InferenceServerException, match=LATE) as raised:
        ask(client, model, 1, in_ns(-1))

    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert ask(client, "double", 1)["computed"] == computed + 1
    assert late_total(server, "double") == before + (model == "ensemble")  # a driver is turned away itself


def test_a_driver_does_not_call_the_next_step_for_nobody(
    server: EmbeddedServer, client: tritonclient.grpc.InferenceServerClient
) -> None:
    before, computed = late_total(server, "driver"), ask(client, "double", 1)["computed"]

    with pytest.raises(InferenceServerException, match=LATE) as raised:
        ask(client, "driver", 1, in_ns(0.15))  # passes while it sleeps between the two

    assert raised.value.status() == "StatusCode.UNAVAILABLE"
    assert ask(client, "double", 1)["computed"] in (computed + 1, computed + 2)  # at most the first step, and this
    assert late_total(server, "driver") == before + 1
    assert together(client, "driver", [in_ns(0.1), {}])[1] == 8  # a mate without a deadline is worked for


def test_with_random_deadlines_every_answer_is_right_or_late(client: tritonclient.grpc.InferenceServerClient) -> None:
    draw = random.Random(4)
    outcomes = {True: 0, False: 0}
    for _ in range(20):
        asked = [in_ns(draw.uniform(-0.1, 0.2)) if draw.random() < 0.8 else {} for _ in range(16)]
        sent_ns = time.monotonic_ns()
        for place, each in enumerate(together(client, "double", asked)):
            is_late = isinstance(each, InferenceServerException)
            outcomes[is_late] += 1
            deadline = asked[place].get("pilot_deadline_ns")
            if isinstance(each, InferenceServerException):
                assert LATE in each.message()
                assert deadline is not None
                assert deadline <= time.monotonic_ns()
            else:
                assert each == 2.0 * (place + 1)
                assert deadline is None or deadline > sent_ns
    assert min(outcomes.values()) > 20, outcomes
