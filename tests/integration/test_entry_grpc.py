"""The entry over gRPC before a real Triton: equal answers, refusals and their codes, deadlines, cancellation, recovery."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from loop_thread import PATIENCE_S, LoopThread
from parrot import PARROT, PARROT_CONFIG
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonpilot.entry.desk import Desk
from tritonpilot.entry.gate import DoneStatus, Gate, Refusal, Ticket
from tritonpilot.entry.grpc_front import GrpcFront
from tritonpilot.entry.tenants import KeyFile, hash_key
from tritonpilot.errors import PortError
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

LONG_S = 1.5  # a request that is still running when its caller has gone
CLASSES_CONFIG = """
backend: "python"
max_batch_size: 64
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching {
  priority_levels: 2
  default_priority_level: 1
  priority_queue_policy { key: 1 value { max_queue_size: 1000 } }
  priority_queue_policy { key: 2 value { max_queue_size: 1 } }
}
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
HASTY_CONFIG = CLASSES_CONFIG.replace("max_queue_size: 1000", "default_timeout_microseconds: 100000")
TENANTS = f"""
tenants:
  - name: shop
    keys: ["{hash_key("key-of-shop")}"]
  - name: guest
    keys: ["{hash_key("key-of-guest")}"]
    models: [parrot]
    class: batch
  - name: slow
    keys: ["{hash_key("key-of-slow")}"]
    rate_per_s: 0.01
    burst: 1
"""


class Seen:
    """A Watcher that counts."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.denials: Counter[int] = Counter()

    def refused(self, _: Ticket, refusal: Refusal) -> None:
        self.refusals[refusal.kind] += 1

    def started(self, _: Ticket) -> None:
        self.outcomes["started"] += 1

    def done(self, _: Ticket, status: DoneStatus, seconds: float) -> None:
        assert seconds >= 0
        self.outcomes[status] += 1

    def denied(self, http_status: int) -> None:
        self.denials[http_status] += 1


class Entry(LoopThread):
    """A gRPC front on a thread of its own, with a real gate and desk."""

    def __init__(self, server: EmbeddedServer, tenants: Path | None = None, **options: Any) -> None:
        super().__init__()
        self.seen = Seen()
        self.url = ""
        self._server = server
        self._tenants = tenants
        self._options = options

    def rows_in_flight(self, model: str) -> Any:
        return self.do(_result(lambda: self.gate.rows_in_flight(model)))

    def waiting(self, model: str) -> Any:
        return self.do(_result(lambda: sum(self.gate.depth(model).values())))

    def held_bytes(self) -> Any:
        return self.do(_result(lambda: self._front.held_bytes))

    async def start(self) -> None:
        keys = KeyFile(self._tenants, time.monotonic) if self._tenants else None
        self.gate = Gate(time.monotonic, self.loop.call_at, self.seen)
        self._desk = Desk(self.gate, self._server.endpoints.http, keys, on_denied=self.seen.denied)
        self._front = GrpcFront(self._desk, self._server.endpoints.grpc, **self._options)
        self.url = f"127.0.0.1:{await self._front.start('127.0.0.1', 0)}"

    async def close(self) -> None:
        await self._front.close(5.0)
        await self._desk.close()


async def _result(ask: Callable[[], Any]) -> Any:
    return ask()


def eventually(claim: Callable[[], bool]) -> bool:
    """Whether the claim comes true in good time."""
    end_s = time.monotonic() + PATIENCE_S
    while not (is_true := claim()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return is_true


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("entry") / "model_repository"
    make_model(root, "identity", config=CLASSES_CONFIG)
    make_model(root, "hasty", config=HASTY_CONFIG)
    make_model(root, "plain")
    make_model(root, "parrot", PARROT, PARROT_CONFIG)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(repository) as server:
        yield server
        server.check_alive()


@pytest.fixture(scope="module")
def shared_entry(server: EmbeddedServer) -> Iterator[Entry]:
    with Entry(server) as entry:
        yield entry


@pytest.fixture
def entry(shared_entry: Entry) -> Entry:
    """The entry, with nothing counted yet."""
    shared_entry.seen.__init__()  # type: ignore[misc]
    return shared_entry


@pytest.fixture(scope="module")
def guarded(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Entry]:
    """An entry with a tenants file."""
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    file.write_text(TENANTS)
    with Entry(server, file) as entry:
        yield entry


@contextmanager
def stub(url: str, **options: Any) -> Iterator[Any]:
    """Triton's own gRPC stub."""
    with grpc.insecure_channel(url, options=[("grpc.max_receive_message_length", -1)], **options) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def rows(*values: float, width: int = 1) -> Any:
    return np.repeat(np.array(values, np.float32)[:, None], width, axis=1)


def request(array: Any = None, model: str = "identity", **parameters: Any) -> Any:
    """A request with raw contents; `parameters` are Python values."""
    array = rows(-1.0) if array is None else array
    message = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[array.tobytes()])
    message.inputs.add(name="INPUT", datatype="FP32", shape=array.shape)
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in parameters.items():
        if value is None:
            message.parameters[name].SetInParent()  # a parameter without a value
        else:
            setattr(message.parameters[name], kinds[type(value)], value)
    return message


def refusal_of(url: str, message: Any, metadata: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
    """The error that the request gets."""
    with stub(url) as triton, pytest.raises(grpc.RpcError) as caught:
        triton.ModelInfer(message, metadata=metadata, timeout=options.pop("timeout", PATIENCE_S), **options)
    return caught.value


def tensor(array: Any) -> Any:
    one = tritonclient.grpc.InferInput("INPUT", list(array.shape), "FP32")
    one.set_data_from_numpy(array)
    return one


# -- equal answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("is_typed", [False, True])
def test_an_answer_is_tritons_own_in_every_byte(
    server: EmbeddedServer, entry: Entry, count: int, is_typed: bool
) -> None:
    array = -np.arange(count * 5, dtype=np.float32).reshape(count, 5)
    message = request(array)
    message.id = "abc"
    if is_typed:
        del message.raw_input_contents[:]
        message.inputs[0].contents.fp32_contents.extend(array.ravel().tolist())

    answers = []
    for url in (server.endpoints.grpc, entry.url):
        with grpc.insecure_channel(url) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            answers.append(call(message.SerializeToString(), timeout=PATIENCE_S))

    assert answers[0] == answers[1]
    parsed = service_pb2.ModelInferResponse.FromString(answers[1])
    assert (np.frombuffer(parsed.raw_output_contents[0], np.float32).reshape(count, 5) == array).all()
    assert entry.seen.outcomes == {"started": 1, "ok": 1}


def test_tritonclient_sees_no_difference(entry: Entry) -> None:
    array = -np.ones((2, 4), np.float32)

    with tritonclient.grpc.InferenceServerClient(entry.url) as client:
        answer = client.infer("identity", [tensor(array)], request_id="7", priority=2, timeout=10_000_000)
        compressed = client.infer("identity", [tensor(array)], compression_algorithm="gzip")

    assert answer.get_response().id == "7"
    assert (answer.as_numpy("OUTPUT") == array).all()
    assert (compressed.as_numpy("OUTPUT") == array).all()


async def test_many_calls_at_once_get_their_own_answers(entry: Entry) -> None:
    arrays = [np.full((1 + i % 8, 3), -float(i), np.float32) for i in range(300)]

    async with tritonclient.grpc.aio.InferenceServerClient(entry.url) as client:
        answers = await asyncio.gather(
            *(client.infer("plain" if i % 2 else "identity", [tensor(array)]) for i, array in enumerate(arrays))
        )

    assert all((answer.as_numpy("OUTPUT") == array).all() for answer, array in zip(answers, arrays, strict=True))
    assert entry.seen.outcomes == {"started": 300, "ok": 300}
    assert entry.rows_in_flight("identity") == 0


def test_several_connections_to_triton_serve_as_one(server: EmbeddedServer) -> None:
    with Entry(server, channels=3) as entry, stub(entry.url) as triton:
        for value in range(7):
            answer = triton.ModelInfer(request(rows(-value)), timeout=PATIENCE_S)
            assert np.frombuffer(answer.raw_output_contents[0], np.float32) == -value


def test_errors_of_triton_keep_their_code_and_words(server: EmbeddedServer, entry: Entry) -> None:
    message = request()
    message.inputs[0].name = "OTHER"

    direct, through = (refusal_of(url, message) for url in (server.endpoints.grpc, entry.url))

    assert (through.code(), through.details()) == (direct.code(), direct.details())
    assert entry.seen.outcomes == {"started": 1, "error": 1}


@pytest.mark.parametrize("shape", [[1, -1], [1, 2], []])
def test_a_wrong_shape_is_left_to_triton(server: EmbeddedServer, entry: Entry, shape: list[int]) -> None:
    message = request()
    message.inputs[0].shape[:] = shape

    direct, through = (refusal_of(url, message) for url in (server.endpoints.grpc, entry.url))

    assert (through.code(), through.details()) == (direct.code(), direct.details())
    assert entry.rows_in_flight("identity") == 0


# -- what reaches Triton -----------------------------------------------------------------------------------------------


def heard(url: str, metadata: Sequence[tuple[str, str]] = (), **parameters: Any) -> dict[str, Any]:
    """What the model was told beside its input."""
    with stub(url) as triton:
        answer = triton.ModelInfer(request(rows(0)[0], "parrot", **parameters), metadata=metadata)
    said: dict[str, Any] = json.loads(answer.raw_output_contents[0][4:])
    return said


def test_only_the_entry_sets_timeout_and_deadline(entry: Entry) -> None:
    without = heard(entry.url, pilot_deadline_ns=5, mine="kept", also=3)
    before_ns = time.monotonic_ns()
    with_deadline = heard(entry.url, [("tritonpilot-deadline-ms", "15000")], pilot_deadline_ns=5)
    shorter = heard(entry.url, [("tritonpilot-deadline-ms", "15000")], timeout=8_000_000)
    after_ns = time.monotonic_ns()

    assert without["parameters"] == {"mine": "kept", "also": 3}
    assert 15e9 <= with_deadline["parameters"]["pilot_deadline_ns"] - before_ns < 15e9 + after_ns - before_ns
    assert 8e9 <= shorter["parameters"]["pilot_deadline_ns"] - before_ns < 8e9 + after_ns - before_ns
    assert 0 < shorter["timeout_us"] <= 8_000_000 < with_deadline["timeout_us"] <= 15_000_000


@pytest.mark.parametrize(("seconds", "native_s"), [(2**63 // 10**6, 1e8), (10**8, 1e9)])
def test_a_deadline_in_the_far_future_is_none(entry: Entry, seconds: int, native_s: float) -> None:
    said = heard(entry.url, timeout=seconds * 10**6)
    with stub(entry.url) as triton:
        natively = triton.ModelInfer(request(rows(0)[0], "parrot"), timeout=native_s)

    assert said["parameters"] == json.loads(natively.raw_output_contents[0][4:])["parameters"] == {}


def test_the_native_deadline_reaches_the_model(entry: Entry) -> None:
    with stub(entry.url) as triton:
        answer = triton.ModelInfer(request(rows(0)[0], "parrot"), timeout=12.0)

    said = json.loads(answer.raw_output_contents[0][4:])
    assert 0 < said["parameters"]["pilot_deadline_ns"] - time.monotonic_ns() < 13e9  # gRPC rounds up on the wire


# -- bad inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"priority": -1}, "priority"),
        ({"priority": "1"}, "priority"),
        ({"priority": 1.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": None}, "priority"),
        ({"priority": 2**32}, "priority"),
        ({"priority": 3}, "priority 3"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": None}, "timeout"),
    ],
)
def test_a_bad_parameter_is_named(entry: Entry, parameters: dict[str, Any], named: str) -> None:
    refused = refusal_of(entry.url, request(rows(-1), **parameters))

    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert named in refused.details()
    assert entry.seen.denials == {400: 1}
    assert not entry.seen.outcomes


@pytest.mark.parametrize(
    "shape", [[65, 1], [0, 1], [-1, 1], [2**32 + 1, 1], [2**62, 1], [1, 2**62], [0, 2**62], [1, 200]]
)
def test_rows_that_the_model_cannot_take_are_refused(entry: Entry, shape: list[int]) -> None:
    message = request()
    message.inputs[0].shape[:] = shape

    refused = refusal_of(entry.url, message)

    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'INPUT'" in refused.details()
    assert not entry.seen.outcomes


@pytest.mark.parametrize(
    "metadata",
    [[("tritonpilot-deadline-ms", text)] for text in ("0", "-1", "nan", "inf", "soon", "", "1e12")]
    + [[("tritonpilot-deadline-ms", "100"), ("tritonpilot-deadline-ms", "200")]]
    + [[("tritonpilot-class", "nobody")], [("tritonpilot-class", "batch"), ("tritonpilot-class", "realtime")]]
    + [[("tritonpilot-key", "a"), ("tritonpilot-key", "b")], [("tritonpilot-key", "a"), ("authorization", "Bearer b")]],
)
def test_bad_metadata_is_an_invalid_argument(entry: Entry, metadata: list[tuple[str, str]]) -> None:
    assert refusal_of(entry.url, request(), metadata).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not entry.seen.outcomes


@pytest.mark.parametrize("name", ["", "missing", "../identity", "identity/config", "%69dentity", "größe", "x" * 5000])
def test_a_model_that_is_none_is_not_found(entry: Entry, name: str) -> None:
    assert refusal_of(entry.url, request(model=name)).code() is grpc.StatusCode.NOT_FOUND


def test_a_version_that_is_no_number_is_not_found(entry: Entry) -> None:
    message = request()
    message.model_version = "latest"

    assert refusal_of(entry.url, message).code() is grpc.StatusCode.NOT_FOUND


def test_bytes_that_are_no_message_are_refused(entry: Entry) -> None:
    with grpc.insecure_channel(entry.url) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\xff\xff\xff", timeout=PATIENCE_S)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "ModelInferRequest" in caught.value.details()


def test_a_parameter_given_twice_has_its_last_value(entry: Entry) -> None:
    first = request(rows(0)[0], "parrot", priority=-7, mine="a").SerializeToString()
    second = service_pb2.ModelInferRequest()
    second.parameters["priority"].int64_param = 1
    second.parameters["mine"].string_param = "b"

    with grpc.insecure_channel(entry.url) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        answer = service_pb2.ModelInferResponse.FromString(call(first + second.SerializeToString()))

    assert json.loads(answer.raw_output_contents[0][4:])["parameters"] == {"mine": "b"}


@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
def test_requests_above_the_limit_are_refused(server: EmbeddedServer, compression: grpc.Compression) -> None:
    with Entry(server, max_request_bytes=100_000) as entry:
        fits = refusal_of(entry.url, request(rows(-1, width=50_000)), compression=compression)
        with stub(entry.url) as triton:
            answer = triton.ModelInfer(request(rows(-1, width=20_000)), compression=compression)

    assert fits.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(answer.raw_output_contents[0]) == 80_000


def refusal_of_bytes(url: str, message: bytes, metadata: Sequence[tuple[str, str]] = ()) -> Any:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(url, options=options, compression=grpc.Compression.Gzip) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            infer(message, metadata=metadata, timeout=PATIENCE_S)
    return caught.value


def test_a_message_of_millions_of_inputs_holds_up_nobody(guarded: Entry, entry: Entry) -> None:
    bomb = service_pb2.ModelInferRequest(model_name="identity").SerializeToString() + b"\x2a\x00" * 8_000_000
    metadata = [("tritonpilot-key", "key-of-shop")]

    for refused in (refusal_of_bytes(guarded.url, bomb, metadata), refusal_of_bytes(entry.url, bomb)):
        assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "more than 256 inputs" in refused.details()
    assert eventually(lambda: guarded.held_bytes() == entry.held_bytes() == 0)


def test_a_small_request_has_limits_of_its_parts(entry: Entry) -> None:
    message = request()
    message.inputs[0].shape[:] = [1] * 33

    refused = refusal_of(entry.url, message)

    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 32 dimensions" in refused.details()


def test_all_requests_together_have_a_limit(server: EmbeddedServer) -> None:
    with Entry(server, max_held_bytes=100_000) as entry:
        refused = refusal_of(entry.url, request(rows(-1, width=20_000)))
        with stub(entry.url) as triton:
            for _ in range(3):
                triton.ModelInfer(request(rows(-1, width=10_000)), timeout=PATIENCE_S)
        assert eventually(lambda: entry.held_bytes() == 0)

    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(refused.trailing_metadata())["retry-after-ms"] == "1000"


def test_calls_have_a_limit_of_number(server: EmbeddedServer) -> None:
    with Entry(server, max_calls=1) as entry, stub(entry.url) as triton:
        first = triton.ModelInfer.future(request(rows(LONG_S)), timeout=PATIENCE_S)
        assert eventually(lambda: entry.rows_in_flight("identity") == 1)
        refused = refusal_of(entry.url, request())
        first.result()

    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_an_answer_above_the_limit_is_refused(server: EmbeddedServer) -> None:
    message = request(rows(-1, width=20_000))
    with stub(server.endpoints.grpc) as direct:
        answer_bytes = direct.ModelInfer(message).ByteSize()
    assert answer_bytes > message.ByteSize()

    with Entry(server, max_request_bytes=message.ByteSize()) as entry:
        refused = refusal_of(entry.url, message)

    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert entry.seen.outcomes == {"started": 1, "error": 1}


# -- who may what ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "model", "code"),
    [
        ([], "identity", "UNAUTHENTICATED"),
        ([("tritonpilot-key", "wrong")], "identity", "UNAUTHENTICATED"),
        ([("tritonpilot-key", "")], "identity", "UNAUTHENTICATED"),
        ([("authorization", "Basic key-of-shop")], "identity", "UNAUTHENTICATED"),
        ([("tritonpilot-key", "key-of-shop"), ("tritonpilot-key", "key-of-shop")], "identity", "INVALID_ARGUMENT"),
        ([("tritonpilot-key", "key-of-guest")], "identity", "PERMISSION_DENIED"),
        ([("tritonpilot-key", "key-of-guest")], "missing", "PERMISSION_DENIED"),
        ([("tritonpilot-key", "key-of-shop")], "missing", "NOT_FOUND"),
    ],
)
def test_only_tenants_come_in(guarded: Entry, metadata: list[tuple[str, str]], model: str, code: str) -> None:
    assert refusal_of(guarded.url, request(model=model), metadata).code().name == code


@pytest.mark.parametrize("metadata", [[("tritonpilot-key", "key-of-shop")], [("authorization", "bearer key-of-shop")]])
def test_a_key_lets_in(guarded: Entry, metadata: list[tuple[str, str]]) -> None:
    with stub(guarded.url) as triton:
        answer = triton.ModelInfer(request(rows(-3)), metadata=metadata, timeout=PATIENCE_S)

    assert np.frombuffer(answer.raw_output_contents[0], np.float32) == -3


@pytest.mark.parametrize("is_output", [False, True])
def test_tenants_do_not_reach_shared_memory(guarded: Entry, is_output: bool) -> None:
    message = request()
    one = message.outputs.add(name="OUTPUT") if is_output else message.inputs[0]
    one.parameters["shared_memory_region"].string_param = "of-somebody-else"

    refused = refusal_of(guarded.url, message, [("tritonpilot-key", "key-of-shop")])

    assert refused.code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_rate_limit_says_when_to_come_back(guarded: Entry) -> None:
    metadata = [("tritonpilot-key", "key-of-slow")]
    with stub(guarded.url) as triton:
        triton.ModelInfer(request(), metadata=metadata, timeout=PATIENCE_S)

    refused = refusal_of(guarded.url, request(), metadata)

    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert 1_000 < int(dict(refused.trailing_metadata())["retry-after-ms"]) <= 100_000
    assert guarded.seen.refusals["rate"] == 1

    # Refused before it is parsed, or that would be an error of its own.
    broken = request(rows(0, width=2000)).SerializeToString() + b"\x1a\x01\xff"
    by_rate = refusal_of_bytes(guarded.url, broken, metadata)
    assert "rate" in by_rate.details()
    assert guarded.seen.refusals["rate"] == 2


# -- other methods -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("ServerLive", service_pb2.ServerLiveRequest()),
        ("ServerReady", service_pb2.ServerReadyRequest()),
        ("ServerMetadata", service_pb2.ServerMetadataRequest()),
        ("ModelReady", service_pb2.ModelReadyRequest(name="identity")),
        ("ModelMetadata", service_pb2.ModelMetadataRequest(name="identity")),
        ("ModelConfig", service_pb2.ModelConfigRequest(name="identity")),
    ],
)
def test_health_and_metadata_are_tritons(server: EmbeddedServer, entry: Entry, method: str, message: Any) -> None:
    with stub(server.endpoints.grpc) as direct, stub(entry.url) as through:
        assert getattr(through, method)(message) == getattr(direct, method)(message)


def test_metadata_of_a_model_is_for_its_tenants(guarded: Entry) -> None:
    message = service_pb2.ModelMetadataRequest(name="parrot")
    codes = []
    with stub(guarded.url) as triton:
        assert triton.ServerLive(service_pb2.ServerLiveRequest()).live
        assert triton.ModelMetadata(message, metadata=[("tritonpilot-key", "key-of-guest")]).name == "parrot"
        for method, asked, key in (
            ("ModelMetadata", message, "wrong"),
            ("ModelReady", service_pb2.ModelReadyRequest(name="identity"), "key-of-guest"),
            ("ModelConfig", service_pb2.ModelConfigRequest(name="parrot"), "key-of-guest"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                getattr(triton, method)(asked, metadata=[("tritonpilot-key", key)])
            codes.append(caught.value.code().name)

    assert codes == ["UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"]


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
        ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="identity")),
        ("ModelStatistics", service_pb2.ModelStatisticsRequest()),
        ("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest()),
        ("TraceSetting", service_pb2.TraceSettingRequest()),
    ],
)
def test_everything_else_is_unimplemented(entry: Entry, method: str, message: Any) -> None:
    with stub(entry.url) as triton, pytest.raises(grpc.RpcError) as caught:
        getattr(triton, method)(message, timeout=PATIENCE_S)

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method in caught.value.details()


def test_a_stream_is_unimplemented(entry: Entry) -> None:
    with stub(entry.url) as triton, pytest.raises(grpc.RpcError) as caught:
        list(triton.ModelStreamInfer(iter([request()]), timeout=PATIENCE_S))

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "ModelInfer" in caught.value.details()


# -- deadlines, cancellation, a full queue -----------------------------------------------------------------------------


@contextmanager
def occupied(entry: Entry, seconds: float = LONG_S) -> Iterator[None]:
    """The model is busy with 64 rows, and 64 more wait in Triton: the window is full."""
    with stub(entry.url) as triton:
        first, *others = (triton.ModelInfer.future(request(rows(*[seconds] * 64))) for _ in range(2))
        assert eventually(lambda: entry.rows_in_flight("identity") == 128)
        yield
        for call in (first, *others):
            call.cancel()
    assert eventually(lambda: entry.rows_in_flight("identity") == 0)


@pytest.mark.parametrize("is_waiting", [False, True])
@pytest.mark.parametrize("way", ["metadata", "parameter", "native"])
def test_at_its_deadline_a_request_is_answered_at_once(entry: Entry, is_waiting: bool, way: str) -> None:
    metadata = [("tritonpilot-deadline-ms", "300")] if way == "metadata" else []
    parameters: dict[str, Any] = {"timeout": 300_000} if way == "parameter" else {}
    message = request(rows(LONG_S), **parameters)

    def ask() -> float:
        asked_s = time.monotonic()
        refused = refusal_of(entry.url, message, metadata, timeout=0.3 if way == "native" else PATIENCE_S)
        assert refused.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return time.monotonic() - asked_s

    if is_waiting:
        with occupied(entry):
            took_s = ask()
            assert eventually(lambda: entry.waiting("identity") == 0)
    else:
        took_s = ask()

    assert 0.25 < took_s < LONG_S - 0.5
    assert eventually(lambda: entry.seen.outcomes["timeout"] == 1)
    assert eventually(lambda: entry.rows_in_flight("identity") == 0)
    assert entry.seen.outcomes["cancelled"] == (2 if is_waiting else 0)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_cancelled_request_is_counted_and_forgotten(entry: Entry, is_waiting: bool) -> None:
    with stub(entry.url) as triton:
        if is_waiting:
            with occupied(entry):
                call = triton.ModelInfer.future(request(rows(-1)))
                assert eventually(lambda: entry.waiting("identity") == 1)
                call.cancel()
                assert eventually(lambda: entry.seen.outcomes["cancelled"] == 1)
                assert entry.waiting("identity") == 0
                assert entry.seen.outcomes["started"] == 2
            return
        call = triton.ModelInfer.future(request(rows(LONG_S)))
        assert eventually(lambda: entry.rows_in_flight("identity") == 1)
        call.cancel()
        assert eventually(lambda: entry.rows_in_flight("identity") == 0)

    assert entry.seen.outcomes == {"started": 1, "cancelled": 1}


def test_a_request_whose_caller_has_gone_keeps_its_place_until_triton_is_done(entry: Entry) -> None:
    with stub(entry.url) as triton:
        running = triton.ModelInfer.future(request(rows(*[LONG_S] * 64)))
        assert eventually(lambda: entry.rows_in_flight("identity") == 64)
        running.cancel()
        assert eventually(lambda: entry.seen.outcomes["cancelled"] == 1)
        is_counted = entry.rows_in_flight("identity") == 64
        answer = triton.ModelInfer(request(rows(-2)), timeout=PATIENCE_S)

    assert is_counted
    assert np.frombuffer(answer.raw_output_contents[0], np.float32) == -2
    assert eventually(lambda: entry.rows_in_flight("identity") == 0)


def test_a_full_queue_is_unavailable_and_the_others_are_served(entry: Entry) -> None:
    batch = [("tritonpilot-class", "batch")]
    with stub(entry.url) as triton:
        with occupied(entry):
            waiting = triton.ModelInfer.future(request(rows(-5)), metadata=batch)
            assert eventually(lambda: entry.waiting("identity") == 1)
            refused = refusal_of(entry.url, request(), batch)
        answer = waiting.result(PATIENCE_S)

    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    assert entry.seen.refusals == {"queue_full": 1}
    assert np.frombuffer(answer.raw_output_contents[0], np.float32) == -5


def test_a_rejection_by_tritons_own_queue_is_passed_on_in_its_words(server: EmbeddedServer, entry: Entry) -> None:
    rejected = None
    with stub(server.endpoints.grpc) as direct, stub(entry.url) as triton:
        while rejected is None:  # until it comes while Triton's queue of 1 is full
            calls = [direct.ModelInfer.future(request(rows(*[LONG_S] * 64), priority=2)) for _ in range(5)]
            assert eventually(lambda: any(call.done() for call in calls))  # noqa: B023
            try:
                triton.ModelInfer(request(priority=2), timeout=PATIENCE_S)
            except grpc.RpcError as error:
                rejected = error
            assert eventually(lambda: all(call.done() for call in calls))  # noqa: B023

    assert rejected.code() is grpc.StatusCode.UNAVAILABLE
    assert rejected.details() == "[request id: <id_unknown>] Exceeds maximum queue size"
    assert entry.seen.outcomes["rejected"] == 1
    assert not entry.seen.refusals


def test_a_timeout_in_tritons_own_queue_is_passed_on_in_its_words(server: EmbeddedServer, entry: Entry) -> None:
    rejected = None
    with stub(server.endpoints.grpc) as direct, stub(entry.url) as triton:
        while rejected is None:  # until it comes while the model is busy
            busy = direct.ModelInfer.future(request(rows(LONG_S), "hasty"))
            try:
                triton.ModelInfer(request(model="hasty"), timeout=PATIENCE_S)
            except grpc.RpcError as error:
                rejected = error
            assert eventually(busy.done)

    assert rejected.code() is grpc.StatusCode.UNAVAILABLE
    assert rejected.details() == "Request timeout expired"
    assert entry.seen.outcomes["rejected"] == 1


# -- starting, stopping, losing Triton ---------------------------------------------------------------------------------


async def test_a_taken_port_is_an_error_that_names_it(server: EmbeddedServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        front = GrpcFront(Desk(None, server.endpoints.http), server.endpoints.grpc)  # type: ignore[arg-type]

        with pytest.raises(PortError, match=str(port)):
            await front.start("127.0.0.1", port)

        await front.close(0)


def test_requests_under_way_are_answered_when_the_front_closes(server: EmbeddedServer) -> None:
    entry = Entry(server)
    with entry:
        channel = grpc.insecure_channel(entry.url)
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer.future(request(rows(0.5)))
        assert eventually(lambda: entry.rows_in_flight("identity") == 1)

    assert np.frombuffer(call.result(PATIENCE_S).raw_output_contents[0], np.float32) == 0.5
    channel.close()


def test_when_triton_is_gone_calls_are_unavailable_until_it_is_back(repository: Path, free_port: int) -> None:
    with (
        EmbeddedServer(repository, models=["identity"], grpc_port=free_port) as first,
        Entry(first) as entry,
        stub(entry.url) as triton,
    ):
        triton.ModelInfer(request(), timeout=PATIENCE_S)
        running = triton.ModelInfer.future(request(rows(LONG_S)))
        assert eventually(lambda: entry.rows_in_flight("identity") == 1)
        os.kill(first.pid, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as lost:
            running.result(PATIENCE_S)
        began_s = time.monotonic()
        late = refusal_of(entry.url, request(), timeout=0.5)
        assert time.monotonic() - began_s < PATIENCE_S / 2
        with ThreadPoolExecutor(3) as threads:  # they wait for Triton, as long as the entry's patience lasts
            gone = list(threads.map(lambda _: refusal_of(entry.url, request(), timeout=None), range(3)))
        with pytest.raises(grpc.RpcError) as not_live:
            triton.ServerLive(service_pb2.ServerLiveRequest(), timeout=PATIENCE_S)
        with EmbeddedServer(repository, models=["identity"], grpc_port=free_port):
            assert eventually(lambda: _is_served(triton))

    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    for error in (lost.value, *gone, not_live.value):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert error.details().startswith("Triton is unavailable: ")
        assert dict(error.trailing_metadata())["retry-after-ms"] == "1000"
    assert entry.seen.outcomes["unavailable"] >= 4


def _is_served(triton: Any) -> bool:
    try:
        triton.ModelInfer(request(), timeout=PATIENCE_S)
    except grpc.RpcError:
        return False
    return True
