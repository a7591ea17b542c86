"""The client against a front that stands before Triton: what it tells that, and what it does when it is refused."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from pilotlib import deadlines
from tritonpilot.client import (
    AsyncClient,
    CallError,
    Client,
    DeadlineError,
    DeniedError,
    InputError,
    RejectedError,
    UnknownModelError,
)
from tritonpilot.client.transport import DEADLINE_PARAMETER, LATE
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

CONFIG = """
backend: "python"
max_batch_size: 8
input [{name: "INPUT" data_type: TYPE_FP32 dims: [2]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [2]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching {}
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
FLAT_CONFIG = """
backend: "python"
max_batch_size: 0
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU}]
"""
PAIR = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.tile(array, 2))]) for array in inputs]
"""


@dataclass(frozen=True)
class Refusal:
    """One answer of the front instead of Triton's."""

    status: int
    code: grpc.StatusCode
    said: str = "the queue is full"
    headers: Mapping[str, str] = field(default_factory=dict)
    is_page: bool = False  # HTML, as of a proxy


@dataclass(frozen=True)
class Seen:
    """One inference as it came."""

    at: float
    headers: Mapping[str, str]
    parameters: Mapping[str, Any]
    rows: int
    left_s: float | None  # by gRPC's own deadline


@dataclass
class Front:
    """Hands requests on to Triton, but for the refusals that it is given; keeps what it saw."""

    scheme: str
    triton: str
    url: str = ""
    refusals: deque[Refusal] = field(default_factory=deque)
    hides_config: bool = False
    seen: list[Seen] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)

    def refusal(self) -> Refusal | None:
        return self.refusals.popleft() if self.refusals else None


@contextmanager
def http_front(front: Front) -> Iterator[None]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["content-length"])))

        def _answer(self, body: bytes) -> None:
            front.keys.add(self.headers["tritonpilot-key"])
            refusal = None
            if self.command == "POST":
                head = json.loads(body[: int(self.headers.get("inference-header-content-length", len(body)))])
                headers = {name.lower(): value for name, value in self.headers.items()}
                rows = head["inputs"][0]["shape"][0]
                front.seen.append(Seen(time.monotonic(), headers, head.get("parameters", {}), rows, None))
                refusal = front.refusal()
            elif front.hides_config and self.path.endswith("/config"):
                refusal = Refusal(404, grpc.StatusCode.UNIMPLEMENTED, "no such path")
            if refusal is not None:
                said = f"<html>{refusal.said}" if refusal.is_page else json.dumps({"error": refusal.said})
                self._send(refusal.status, refusal.headers, said.encode())
                return
            triton = http.client.HTTPConnection(front.triton)
            named = ("content-type", "inference-header-content-length")
            triton.request(
                self.command, self.path, body, {name: self.headers[name] for name in named if name in self.headers}
            )
            answer = triton.getresponse()
            content = answer.read()
            named = ("Content-Type", "Inference-Header-Content-Length")
            self._send(answer.status, {name: answer.headers[name] for name in named if name in answer.headers}, content)
            triton.close()

        def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  callers may leave before their answer
        threading.Thread(target=server.serve_forever, daemon=True).start()
        front.url = f"http://127.0.0.1:{server.server_port}"
        yield
        server.shutdown()


@contextmanager
def grpc_front(front: Front) -> Iterator[None]:
    channel = grpc.insecure_channel(front.triton)
    triton = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def metadata(context: grpc.ServicerContext) -> dict[str, str]:
        found = {name: str(value) for name, value in context.invocation_metadata()}
        front.keys.add(found.get("tritonpilot-key"))
        return found

    def handed_on(call: Any, request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return call(request)
        except grpc.RpcError as error:
            context.abort(error.code(), error.details())

    class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
        def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            metadata(context)
            if front.hides_config:
                context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
            return handed_on(triton.ModelConfig, request, context)

        def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            metadata(context)
            return handed_on(triton.ModelMetadata, request, context)

        def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
            parameters = {
                name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in request.parameters.items()
            }
            rows = request.inputs[0].shape[0]
            front.seen.append(Seen(time.monotonic(), metadata(context), parameters, rows, context.time_remaining()))
            if (refusal := front.refusal()) is not None:
                context.set_trailing_metadata(tuple((name.lower(), value) for name, value in refusal.headers.items()))
                context.abort(refusal.code, refusal.said)
            return handed_on(triton.ModelInfer, request, context)

    server = grpc.server(ThreadPoolExecutor(8))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(), server)
    front.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield
    server.stop(0).wait()
    channel.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Iterator[EmbeddedServer]:
    root = tmp_path_factory.mktemp("front") / "model_repository"
    make_model(root, "identity", config=CONFIG)
    make_model(root, "pair", PAIR, FLAT_CONFIG)
    with EmbeddedServer(root) as running:
        yield running
        running.check_alive()


@pytest.fixture(params=["http", "grpc"])
def front(request: pytest.FixtureRequest, server: EmbeddedServer) -> Iterator[Front]:
    scheme = request.param
    one = Front(scheme, server.endpoints.http if scheme == "http" else server.endpoints.grpc)
    with (http_front if scheme == "http" else grpc_front)(one):
        yield one


FULL = Refusal(503, grpc.StatusCode.UNAVAILABLE)


def row(number: float) -> dict[str, Any]:
    return {"INPUT": np.array([-number, -number], np.float32)}


@pytest.mark.parametrize(
    ("status", "code"), [(503, grpc.StatusCode.UNAVAILABLE), (429, grpc.StatusCode.RESOURCE_EXHAUSTED)]
)
async def test_a_refused_call_waits_as_long_as_it_was_told(front: Front, status: int, code: grpc.StatusCode) -> None:
    front.refusals += [Refusal(status, code, headers={"retry-after-ms": "150.5", "Retry-After": "1"})] * 2

    async with AsyncClient(front.url) as client:
        answer = await client.predict("identity", row(3))

    assert answer["OUTPUT"].tolist() == [-3, -3]
    first, second, third = (each.at for each in front.seen)
    assert second - first >= 0.15
    assert third - second >= 0.15


async def test_the_plain_header_of_http_is_understood_too(front: Front) -> None:
    front.refusals.append(Refusal(503, grpc.StatusCode.UNAVAILABLE, headers={"Retry-After": "1"}))

    async with AsyncClient(front.url) as client:
        await client.predict("identity", row(3))

    first, second = (each.at for each in front.seen)
    assert second - first >= 1


async def test_a_wait_beyond_the_deadline_ends_the_call_at_once(front: Front) -> None:
    front.refusals.append(Refusal(503, grpc.StatusCode.UNAVAILABLE, headers={"retry-after-ms": "60000"}))

    async with AsyncClient(front.url) as client:
        began = time.monotonic()
        with pytest.raises(RejectedError, match="the queue is full") as raised:
            await client.predict("identity", row(3), deadline_ms=20_000)

    assert raised.value.retry_after_s == 60
    assert len(front.seen) == 1
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("value", ["soon", "-5", "nan", "inf", "", "Wed, 21 Oct 2026 07:28:00 GMT"])
async def test_what_is_no_time_is_no_wait(front: Front, value: str) -> None:
    front.refusals.append(
        Refusal(503, grpc.StatusCode.UNAVAILABLE, headers={"retry-after-ms": value, "Retry-After": value})
    )

    async with AsyncClient(front.url) as client:
        await client.predict("identity", row(3), deadline_ms=20_000)

    assert len(front.seen) == 2


async def test_another_server_is_asked_instead_of_waiting(front: Front, server: EmbeddedServer) -> None:
    front.refusals += [Refusal(503, grpc.StatusCode.UNAVAILABLE, headers={"retry-after-ms": "60000"})]

    async with AsyncClient([front.url, server.endpoints.http]) as client:
        for number in range(4):
            answer = await client.predict("identity", row(number), deadline_ms=20_000)
            assert answer["OUTPUT"].tolist() == [-number, -number]

    assert not front.refusals


@pytest.mark.parametrize(
    ("status", "code"), [(401, grpc.StatusCode.UNAUTHENTICATED), (403, grpc.StatusCode.PERMISSION_DENIED)]
)
def test_a_key_that_may_not_is_denied_for_good(front: Front, status: int, code: grpc.StatusCode) -> None:
    front.refusals.append(Refusal(status, code, "tenant shop may not use this model"))

    with Client(front.url, key="tp_x") as client, pytest.raises(DeniedError, match="tenant shop may not") as raised:
        client.predict("identity", row(3))

    assert not raised.value.is_retryable
    assert len(front.seen) == 1
    assert "tp_x" not in str(raised.value)


async def test_a_deadline_that_the_front_saw_pass_is_not_repeated(front: Front) -> None:
    front.refusals.append(Refusal(504, grpc.StatusCode.DEADLINE_EXCEEDED, "no answer within 5 ms"))

    async with AsyncClient(front.url) as client:
        with pytest.raises(DeadlineError, match="no answer within 5 ms"):
            await client.predict("identity", row(3))

    assert len(front.seen) == 1


async def test_a_page_of_a_proxy_is_a_rejection_with_its_text(front: Front) -> None:
    front.refusals += [Refusal(503, grpc.StatusCode.UNAVAILABLE, "sorry, no upstream", is_page=True)] * 5

    async with AsyncClient(front.url) as client:
        with pytest.raises(RejectedError, match="sorry, no upstream"):
            await client.predict("identity", row(3))


async def test_the_key_goes_along_with_every_call(front: Front) -> None:
    front.hides_config = True

    async with AsyncClient(front.url, key="tp_secret") as client:
        await client.predict("identity", row(3))

    assert front.keys == {"tp_secret"}


@pytest.mark.parametrize("key", ["tp\n", "tp\r\nx: y", " tp", "tp\u00e9"])
def test_a_key_that_cannot_be_sent_is_refused_at_once(key: str) -> None:
    with pytest.raises(InputError) as raised:
        AsyncClient("127.0.0.1:1", key=key)
    assert raised.value.field == "key"


async def test_the_time_left_is_told_in_every_form_that_is_understood(front: Front) -> None:
    async with AsyncClient(front.url) as client:
        await client.predict("identity", row(1))
        before_ns = time.monotonic_ns()
        await client.predict("identity", row(3), deadline_ms=20_000)
        after_ns = time.monotonic_ns()

    seen = front.seen[-1]
    assert before_ns <= seen.parameters[DEADLINE_PARAMETER] - 20_000_000_000 <= after_ns
    assert 0 < seen.parameters["timeout"] <= 20_000_000
    if front.scheme == "http":
        assert 10_000 < float(seen.headers["tritonpilot-deadline-ms"]) <= 20_000
    else:
        assert seen.left_s is not None
        assert 10 < seen.left_s <= 20.1  # gRPC rounds it up


async def test_a_deadline_in_weeks_is_none(front: Front) -> None:
    async with AsyncClient(front.url) as client:
        answer = await client.predict("identity", row(3), deadline_ms=1e12)

    assert answer["OUTPUT"].tolist() == [-3, -3]
    (seen,) = front.seen
    assert DEADLINE_PARAMETER not in seen.parameters
    assert "tritonpilot-deadline-ms" not in seen.headers


async def test_a_joined_request_has_the_latest_deadline_of_its_calls(front: Front) -> None:
    async with AsyncClient(front.url) as client:
        await client.predict("identity", row(1))
        now_ns = time.monotonic_ns()
        calls = [client.predict("identity", row(n), deadline_ms=ms) for n, ms in enumerate((17_000, 31_000, 18_000))]
        answers = await asyncio.gather(*calls)

    assert [answer["OUTPUT"][0] for answer in answers] == [0, -1, -2]
    assert [each.rows for each in front.seen] == [1, 3]
    assert front.seen[-1].parameters[DEADLINE_PARAMETER] >= now_ns + 31_000_000_000


async def test_where_the_config_is_hidden_the_front_is_told_the_class_by_name(front: Front) -> None:
    front.hides_config = True

    async with AsyncClient(front.url, caller_class="batch") as client:
        one = await client.predict("identity", row(3))
        two = await client.predict("identity", {"INPUT": -np.ones((2, 2), np.float32)}, caller_class="vip")
        await client.predict("identity", row(3), priority=2)
        with pytest.raises(InputError, match=r"INPUT.*shape \[3\]"):
            await client.predict("identity", {"INPUT": [1.0, 2.0, 3.0]})
        with pytest.raises(InputError, match="No server has a class"):
            await client.predict("identity", row(3), caller_class="vip\r\nx: y")
        with pytest.raises(UnknownModelError):
            await client.predict("nothing", row(3))

    assert one["OUTPUT"].tolist() == [-3, -3]
    assert two["OUTPUT"].tolist() == [[-1, -1], [-1, -1]]
    assert [each.headers.get("tritonpilot-class") for each in front.seen] == ["batch", "vip", None]
    assert [int(each.parameters.get("priority", 0)) for each in front.seen] == [0, 0, 2]


async def test_where_the_config_is_known_the_class_is_its_level(front: Front) -> None:
    async with AsyncClient(front.url, caller_class="batch") as client:
        await client.predict("identity", row(3))

    assert [each.headers.get("tritonpilot-class") for each in front.seen] == [None]
    assert [each.parameters["priority"] for each in front.seen] == [2]


async def test_calls_are_joined_without_config_when_their_rows_are_bounded(front: Front) -> None:
    front.hides_config = True
    for rows, expected in ((0, [1, 1, 1, 1]), (3, [1, 3])):
        front.seen.clear()
        async with AsyncClient(front.url, coalesce_rows=rows) as client:
            calls = [client.predict("identity", row(number)) for number in range(4)]
            answers = await asyncio.gather(*calls)
        assert [answer["OUTPUT"][0] for answer in answers] == [0, -1, -2, -3]
        assert sorted(each.rows for each in front.seen) == expected


async def test_a_model_without_rows_is_answered_whole_where_the_config_is_hidden(front: Front) -> None:
    front.hides_config = True

    async with AsyncClient(front.url) as client:
        answer = await client.predict("pair", {"INPUT": np.array([1, 2, 3], np.float32)})

    assert answer["OUTPUT"].tolist() == [1, 2, 3, 1, 2, 3]


async def test_a_clock_that_is_not_ours_is_noticed(front: Front) -> None:
    """As behind a tunnel: the front is on loopback, but the model runs on a machine that was started earlier."""
    front.refusals.append(Refusal(503, grpc.StatusCode.UNAVAILABLE, LATE))

    async with AsyncClient(front.url) as client:
        for _ in range(2):
            await client.predict("identity", row(3))

    assert [DEADLINE_PARAMETER in each.parameters for each in front.seen] == [True, False, False]


async def test_a_request_that_was_late_indeed_is_not_sent_again(front: Front) -> None:
    async with AsyncClient(front.url) as client:
        await client.predict("identity", row(3))
        front.refusals += [FULL] * 1000
        with pytest.raises(CallError) as raised:
            await client.predict("identity", row(3), deadline_ms=1)

    assert isinstance(raised.value, DeadlineError)


def test_client_and_backends_mean_the_same() -> None:
    assert (DEADLINE_PARAMETER, LATE) == (deadlines.DEADLINE_PARAMETER, deadlines.LATE)
