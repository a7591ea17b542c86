"""The entry over HTTP before a real Triton: equal answers, hostile input, refusals, deadlines, broken connections, recovery."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import signal
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
import uvloop
from parrot import PARROT, PARROT_CONFIG

from tritonpilot.entry.desk import Desk
from tritonpilot.entry.gate import DoneStatus, Gate, Refusal, Ticket
from tritonpilot.entry.http_front import HttpFront, Limits
from tritonpilot.entry.tenants import KeyFile, hash_key
from tritonpilot.errors import PortError
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

PATIENCE_S = 30.0
LONG_S = 1.5  # of a request that is still running when its caller has gone
CLASSES_CONFIG = """
backend: "python"
max_batch_size: 4
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching {
  priority_levels: 2
  default_priority_level: 1
  priority_queue_policy { key: 1 value { max_queue_size: 100 } }
  priority_queue_policy { key: 2 value { max_queue_size: 2 } }
}
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
TENANTS = f"""
tenants:
  - name: shop
    keys: ["{hash_key("tp_shop")}"]
    models: [identity, classes]
    classes: {{classes: batch}}
  - name: slow
    keys: ["{hash_key("tp_slow")}"]
    models: [identity]
    rate_per_s: 0.01
    burst: 1
"""


class Seen:
    """The gate's Watcher: what happened to the requests."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []
        self.refusals: list[Refusal] = []
        self.statuses: list[DoneStatus] = []
        self.denied: list[int] = []

    def refused(self, ticket: Ticket, refusal: Refusal) -> None:  # noqa: ARG002
        self.refusals.append(refusal)

    def started(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)

    def done(self, ticket: Ticket, status: DoneStatus, seconds: float) -> None:  # noqa: ARG002
        self.statuses.append(status)


class Entry:
    """A front with a gate and a desk of its own, in a thread."""

    def __init__(self, triton: str, tenants: Path | None, limits: Limits, new_loop: Callable[[], Any]) -> None:
        self.seen = Seen()
        self.troubles: list[dict[str, Any]] = []
        self._loop = new_loop()
        self._loop.set_exception_handler(lambda _, context: self.troubles.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.port: int = self.run(self._start(triton, tenants, limits))

    async def _start(self, triton: str, tenants: Path | None, limits: Limits) -> int:
        loop = asyncio.get_running_loop()
        self.gate = Gate(
            time.monotonic, lambda at_s, call: loop.call_later(max(0.0, at_s - time.monotonic()), call), self.seen
        )
        keys = KeyFile(tenants, time.monotonic) if tenants else None
        self.desk = Desk(self.gate, triton, keys, on_denied=self.seen.denied.append)
        self.front = HttpFront(self.desk, triton, limits=limits)
        return await self.front.start("127.0.0.1", 0)

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    def rows_in_flight(self, model: str) -> int:
        async def ask() -> int:
            return self.gate.rows_in_flight(model)

        return int(self.run(ask()))

    def stop(self) -> None:
        self.run(self.front.close(0))
        self.run(self.desk.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        assert self.troubles == []


@contextmanager
def entering(
    triton: str,
    tenants: Path | None = None,
    limits: Limits | None = None,
    new_loop: Callable[[], Any] = uvloop.new_event_loop,
) -> Iterator[Entry]:
    entry = Entry(triton, tenants, limits or Limits(), new_loop)
    try:
        yield entry
    finally:
        entry.stop()


class Raw:
    """A socket that sends what a test wants and reads answers one by one."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        status = int(self._file.readline().split()[1])
        headers = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, self._file.read(int(headers.get("content-length", 0))) if has_body else b""

    def ask(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        self.send(data)
        return self.answer()

    def is_ended(self) -> bool:
        """Whether the other side ends the connection, without another byte."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True


def body_of(value: float = -1.0, *, rows: int = 1, **parameters: object) -> bytes:
    """JSON for the identity; `rows=0`: of a model without batches."""
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [rows, 1] if rows else [1], "data": [value] * (rows or 1)}
    return json.dumps({"inputs": [tensor], "parameters": parameters}).encode()


def post(body: bytes, model: str = "identity", *headers: str) -> bytes:
    lines = [f"POST /v2/models/{model}/infer HTTP/1.1", "Host: test", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "\r\n"]).encode()


def output_of(answer: tuple[int, dict[str, str], bytes]) -> list[float]:
    status, _, body = answer
    assert status == 200, body
    return list(json.loads(body)["outputs"][0]["data"])


def error_of(answer: tuple[int, dict[str, str], bytes]) -> str:
    return str(json.loads(answer[2])["error"])


def wait_until(claim: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not claim():
        assert time.monotonic() < deadline, "this did not come true in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("entry-http") / "model_repository"
    make_model(root, "identity")
    make_model(root, "classes", config=CLASSES_CONFIG)
    make_model(root, "parrot", PARROT, PARROT_CONFIG)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(repository) as running:
        yield running
        running.check_alive()


@pytest.fixture(scope="module")
def triton(server: EmbeddedServer) -> str:
    return server.endpoints.http


@pytest.fixture
def entry(triton: str) -> Iterator[Entry]:
    with entering(triton) as entry:
        yield entry


@pytest.fixture
def raw(entry: Entry) -> Iterator[Raw]:
    with Raw(entry.port) as raw:
        yield raw


@pytest.fixture(scope="module")
def tenants_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    path.write_text(TENANTS)
    path.chmod(0o600)
    return path


def direct(triton: str) -> Raw:
    return Raw(int(triton.rpartition(":")[2]))


# -- what goes through -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_tritons_client_gets_the_same_answers(triton: str, new_loop: Callable[[], Any]) -> None:
    sent = -np.arange(6, dtype=np.float32).reshape(2, 3)
    with entering(triton, new_loop=new_loop) as entry:
        for is_binary in (True, False):
            with tritonclient.http.InferenceServerClient(f"127.0.0.1:{entry.port}") as client:
                tensor = tritonclient.http.InferInput("INPUT", [2, 3], "FP32")
                tensor.set_data_from_numpy(sent, binary_data=is_binary)
                outputs = [tritonclient.http.InferRequestedOutput("OUTPUT", binary_data=is_binary)]
                assert client.is_server_ready()
                assert client.is_model_ready("identity")
                assert client.get_model_metadata("identity")["name"] == "identity"
                assert client.get_model_config("identity")["name"] == "identity"
                for compression in (None, "gzip", "deflate"):
                    answer = client.infer(
                        "identity", [tensor], outputs=outputs, request_compression_algorithm=compression, request_id="a"
                    )
                    np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), sent)
                    assert answer.get_response()["id"] == "a"
        assert [ticket.rows for ticket in entry.seen.tickets] == [2] * 6
        assert entry.seen.statuses == ["ok"] * 6


@pytest.mark.parametrize("data", ["-1.5", "NaN", "-Infinity", '"a"', "-1, -2", "-12345678901234567890123", "{}"])
def test_an_answer_is_tritons_byte_by_byte(triton: str, raw: Raw, data: str) -> None:
    body = b'{"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,1],"data":[%b]}]}' % data.encode()
    with direct(triton) as other:
        expected, expected_headers, expected_body = other.ask(post(body))
    status, headers, answered = raw.ask(post(body))
    assert (status, headers.keys(), answered) == (expected, expected_headers.keys(), expected_body)


def test_a_binary_answer_is_tritons_byte_by_byte(triton: str, raw: Raw) -> None:
    said = b'{"inputs":[{"name":"INPUT","datatype":"FP32","shape":[4,25000],"parameters":{"binary_data_size":400000}}],'
    said += b'"parameters":{"binary_data_output":true}}'
    tensor = (-np.arange(100_000, dtype=np.float32)).tobytes()
    request = post(said + tensor, "identity", f"Inference-Header-Content-Length: {len(said)}")
    with direct(triton) as other:
        expected = other.ask(request)
    assert raw.ask(request) == expected
    assert expected[2].endswith(tensor)


def test_nothing_else_of_a_head_reaches_triton(raw: Raw) -> None:
    hostile = [
        "Accept-Encoding: gzip",
        "X-Forwarded-For: a",
        "Connection: keep-alive",
        "Te: trailers",
        "tritonpilot-key: a",
    ]
    status, headers, body = raw.ask(post(body_of(), "identity", *hostile))
    assert status == 200
    assert "content-encoding" not in headers
    assert json.loads(body)["outputs"][0]["data"] == [-1.0]


def test_the_gates_terms_replace_those_of_the_body(entry: Entry, raw: Raw) -> None:
    parameters = {"priority": 1, "timeout": 20_000_000, "pilot_deadline_ns": 5, "mine": "kept"}
    before_ns = time.monotonic_ns()
    said = json.loads(output_of(raw.ask(post(body_of(rows=0, **parameters), "parrot")))[0])  # type: ignore[arg-type]
    assert entry.seen.tickets[0].level == 1
    assert 0 < said["timeout_us"] <= 20_000_000
    assert said["parameters"]["mine"] == "kept"
    deadline_ns = int(said["parameters"]["pilot_deadline_ns"])
    assert before_ns + 20_000_000_000 <= deadline_ns <= time.monotonic_ns() + 20_000_000_000


def test_without_a_deadline_none_is_sent(raw: Raw) -> None:
    said = json.loads(output_of(raw.ask(post(body_of(rows=0, pilot_deadline_ns=5), "parrot")))[0])  # type: ignore[arg-type]
    assert "pilot_deadline_ns" not in said["parameters"]


def test_get_and_head_of_health_and_metadata(triton: str, raw: Raw) -> None:
    for path in ("/v2", "/v2/health/live", "/v2/models/identity", "/v2/models/identity/versions/1/ready"):
        with direct(triton) as other:
            expected = other.ask(get(path))
        assert raw.ask(get(path)) == expected
        raw.send(get(path, method="HEAD"))
        assert raw.answer(has_body=False)[:2] == expected[:2]
    status, _, _ = raw.ask(get("/v2/models/id%65ntity/ready?a=b"))
    assert status == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v2/models/identity/infer", 405, "POST"),
        ("HEAD", "/v2/models/identity/infer", 405, "POST"),
        ("DELETE", "/v2/models/identity", 405, "GET, HEAD"),
        ("POST", "/v2/health/live", 405, "GET, HEAD"),
        ("GET", "/", 404, None),
        ("GET", "/metrics", 404, None),
        ("GET", "/v2/models/identity/stats", 404, None),
        ("GET", "/v2/models/identity/trace/setting", 404, None),
        ("POST", "/v2/repository/index", 404, None),
        ("POST", "/v2/repository/models/identity/unload", 404, None),
        ("POST", "/v2/models/identity/generate", 404, None),
        ("POST", "/v2/systemsharedmemory/region/a/register", 404, None),
        ("GET", "/v2/logging", 404, None),
        ("GET", "/v2/models/..%2f..%2fmetrics", 404, None),
        ("GET", "/v2/models/a%0d%0aX: b/ready", 400, None),
        ("GET", "/v2/models/a%250d/ready", 404, None),
        ("GET", "/v2/models/identity/versions/-1", 404, None),
        ("GET", "/v2/models/stats", 404, None),
        ("GET", "/v2/models/stats/", 404, None),
        ("GET", "/v2/models/%73tats?x=1", 404, None),
        ("GET", "http://other/v2/models/stats", 404, None),
        ("GET", "http:///v2/health/live", 404, None),
        ("GET", "ftp://other/v2/health/live", 404, None),
        ("GET", "//v2/health/live", 404, None),
        ("GET", "/v2/./health/live", 404, None),
        ("GET", "http://127.0.0.1/v2/repository/index", 404, None),
    ],
)
def test_other_paths_and_methods_are_refused(raw: Raw, method: str, path: str, status: int, allow: str | None) -> None:
    raw.send(get(path, method=method))
    answered, headers, _ = raw.answer(has_body=method != "HEAD")
    assert answered == status
    assert headers.get("allow") == allow


def test_an_unknown_model_is_not_found(entry: Entry, raw: Raw) -> None:
    answer = raw.ask(post(body_of(), "nope"))
    assert answer[0] == 404
    assert "nope" in error_of(answer)
    assert entry.seen.denied == [404]
    assert output_of(raw.ask(post(body_of()))) == [-1.0]


# -- classes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "class_name"),
    [
        (body_of(), [], "realtime"),
        (body_of(priority=0), [], "realtime"),
        (body_of(priority=2), [], "batch"),
        (body_of(priority=1), ["tritonpilot-class: batch"], "batch"),
        (body_of(priority=1).replace(b'"priority": 1', b'"priority": 1, "priority": 2'), [], "batch"),
        (body_of(priority=1).replace(b'"priority": 1', b'"priority": 1, "\\u0070riority": 2'), [], "batch"),
        (body_of(priority=1)[:-1] + b', "parameters": {"priority": 2}}', [], "batch"),
        (body_of(priority=2)[:-1] + b', "parameters": {}}', [], "realtime"),
    ],
)
def test_a_class_is_named_by_header_or_priority_and_sent_once(
    entry: Entry, raw: Raw, body: bytes, headers: list[str], class_name: str
) -> None:
    assert output_of(raw.ask(post(body, "classes", *headers))) == [-1.0]
    assert [(t.class_name, t.level) for t in entry.seen.tickets] == [
        (class_name, {"realtime": 1, "batch": 2}[class_name])
    ]


@pytest.mark.parametrize("priority", ["1", -1, 1.0, True, 2**32, 10**30, [1], 3])
def test_a_bad_priority_is_refused_by_name(entry: Entry, raw: Raw, priority: object) -> None:
    answer = raw.ask(post(body_of(priority=priority), "classes"))
    assert answer[0] == 400
    assert "priority" in error_of(answer)
    assert entry.seen.tickets == []
    assert output_of(raw.ask(post(body_of(), "classes"))) == [-1.0]


@pytest.mark.parametrize("timeout", ["1", -1, 0.5, False, 2**63, 10**30])
def test_a_bad_timeout_is_refused_by_name(raw: Raw, timeout: object) -> None:
    answer = raw.ask(post(body_of(timeout=timeout)))
    assert answer[0] == 400
    assert "timeout" in error_of(answer)


@pytest.mark.parametrize("timeout", [0, 2**63 - 1])
def test_a_timeout_of_0_or_of_ages_is_none(raw: Raw, timeout: int) -> None:
    assert output_of(raw.ask(post(body_of(timeout=timeout), "classes"))) == [-1.0]


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        (["tritonpilot-class: nope"], "nope"),
        (["tritonpilot-deadline-ms: 0"], "tritonpilot-deadline-ms"),
        (["tritonpilot-deadline-ms: soon"], "tritonpilot-deadline-ms"),
        (["tritonpilot-deadline-ms: 50", "Tritonpilot-Deadline-Ms: 50"], "twice"),
        (["tritonpilot-class: batch", "tritonpilot-class: realtime"], "twice"),
        (["Inference-Header-Content-Length: 9999"], "inference-header-content-length"),
        (["Inference-Header-Content-Length: 0"], "inference-header-content-length"),
        (["Inference-Header-Content-Length: -1"], "inference-header-content-length"),
        (["Inference-Header-Content-Length: 0x10"], "inference-header-content-length"),
    ],
)
def test_a_bad_header_is_refused_by_name(entry: Entry, raw: Raw, headers: list[str], says: str) -> None:
    answer = raw.ask(post(body_of(), "classes", *headers))
    assert answer[0] == 400
    assert says in error_of(answer)
    assert entry.seen.tickets == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"a"',
        b"null",
        b"\xff",
        b'{"parameters": []}',
        b'{"parameters": "a"}',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"a":' * 400 + b"1" + b"}" * 400,
        b'{"a": ' + b"1" * 5000 + b"}",
        b'{"a": 1e400}',
    ],
)
def test_unreadable_json_is_refused_and_the_connection_goes_on(raw: Raw, body: bytes) -> None:
    answer = raw.ask(post(body))
    assert answer[0] == 400
    assert error_of(answer)
    assert output_of(raw.ask(post(body_of()))) == [-1.0]


@pytest.mark.parametrize("shape", ["[]", "{}", "[-1, 1]", '["1", 1]', "[true]", "[1e3]", "[9, 1]", "null"])
def test_a_senseless_shape_counts_as_one_row_and_triton_refuses_it(entry: Entry, raw: Raw, shape: str) -> None:
    body = b'{"inputs":[{"name":"INPUT","datatype":"FP32","shape":%b,"data":[-1.0]}]}' % shape.encode()
    assert raw.ask(post(body))[0] in (400, 500)
    assert [ticket.rows for ticket in entry.seen.tickets] == [1]
    assert entry.seen.statuses == ["error"]
    assert entry.rows_in_flight("identity") == 0


@pytest.mark.parametrize(
    "shape",
    [
        "[100000000000, 1]",
        "[1, 100000000000]",
        "[4611686018427387904, 1]",
        "[2147483648, 2147483648]",
        "[18446744073709551615]",
        "[[1], 100000000000]",
    ],
)
def test_a_shape_that_would_end_triton_is_refused(entry: Entry, raw: Raw, shape: str) -> None:
    body = b'{"inputs":[{"name":"INPUT","datatype":"FP32","shape":%b,"data":[-1.0]}]}' % shape.encode()
    answer = raw.ask(post(body))
    assert answer[0] == 400
    assert "elements" in error_of(answer)
    said = (
        b'{"inputs":[{"name":"INPUT","datatype":"FP32","shape":%b,"parameters":{"binary_data_size":4}}]}'
        % shape.encode()
    )
    answer = raw.ask(post(said + bytes(4), "identity", f"Inference-Header-Content-Length: {len(said)}"))
    assert answer[0] == 400
    assert entry.seen.tickets == []
    assert output_of(raw.ask(post(body_of()))) == [-1.0]


# -- bodies, heads and time ------------------------------------------------------------------------------------------


def test_a_chunked_body_is_put_together(raw: Raw) -> None:
    body = body_of()
    raw.send(b"POST /v2/models/identity/infer HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    for part in (body[:1], body[1:30], body[30:]):
        raw.send(b"%x;ext=1\r\n%b\r\n" % (len(part), part))
    assert output_of(raw.ask(b"0\r\nX: trailer\r\n\r\n")) == [-1.0]
    assert output_of(raw.ask(post(body))) == [-1.0]


def test_a_caller_that_expects_100_is_told_to_go_on(raw: Raw) -> None:
    body = body_of()
    head = post(body, "identity", "Expect: 100-continue")[: -len(body)]
    assert raw.ask(head)[0] == 100
    assert output_of(raw.ask(body)) == [-1.0]
    raw.send(post(body) + head)  # the answer comes before the word to go on
    assert output_of(raw.answer()) == [-1.0]
    assert raw.answer()[0] == 100
    assert output_of(raw.ask(body)) == [-1.0]


def test_a_caller_that_expects_100_is_refused_before_he_sends(raw: Raw) -> None:
    assert raw.ask(post(b"", "..", "Expect: 100-continue"))[0] == 404
    assert raw.is_ended()


def test_pipelined_requests_are_answered_in_order(entry: Entry, raw: Raw) -> None:
    requests = [post(body_of(0.2)), get("/v2/health/live"), post(b"{"), post(body_of(-3)), get("/nope")]
    raw.send(b"".join(requests))
    answers = [raw.answer() for _ in requests]
    assert [answer[0] for answer in answers] == [200, 200, 400, 200, 404]
    assert output_of(answers[0]) == [pytest.approx(0.2)]
    assert output_of(answers[3]) == [-3.0]
    assert entry.seen.statuses == ["ok", "ok"]


def test_thousands_of_pipelined_requests_are_answered(raw: Raw) -> None:
    count = 3000
    sender = threading.Thread(target=raw.send, args=(post(body_of(0.1)) + get("/nope") * count,))
    sender.start()
    answers = Counter(raw.answer()[0] for _ in range(count + 1))
    sender.join()
    assert answers == {200: 1, 404: count}


def test_a_head_that_is_known_is_taken_as_the_first_time(entry: Entry, raw: Raw) -> None:
    for at in range(3):
        assert output_of(raw.ask(post(body_of(-float(at)), "classes", "tritonpilot-class: batch"))) == [-float(at)]
    assert len(entry.front.heads) == 1
    assert raw.ask(post(b"{" + b" " * (len(body_of()) - 1), "classes", "tritonpilot-class: batch"))[0] == 400
    raw.send(post(body_of(), "classes", "tritonpilot-class: batch")[:-1])
    raw.send(b"}" + post(body_of(-7.0), "classes", "tritonpilot-class: batch"))
    assert [output_of(raw.answer()), output_of(raw.answer())] == [[-1.0], [-7.0]]
    assert {ticket.class_name for ticket in entry.seen.tickets} == {"batch"}
    for at in range(1100):
        assert raw.ask(post(b"{}", "classes", f"X: {at}"))[0] in (400, 500)
    assert 0 < len(entry.front.heads) <= 1024
    assert entry.front.buffered_bytes == 0


def test_a_request_may_come_byte_by_byte(raw: Raw) -> None:
    raw.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    request = post(body_of(), "identity", "tritonpilot-deadline-ms: 20000")
    for at in range(len(request)):
        raw.send(request[at : at + 1])
    assert output_of(raw.answer()) == [-1.0]


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v2/health/live HTTP/1.1\r\nX: " + b"a" * 20_000,
        b"GET /v2/health/live HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\n" + b"X: a\r\n" * 4000 + b"\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        post(body_of(), "identity", "X: " + "a" * 20_000),
    ],
)
def test_a_head_that_is_too_large_ends_the_connection(entry: Entry, raw: Raw, head: bytes) -> None:
    assert raw.ask(head)[0] == 431
    assert raw.is_ended()
    assert entry.seen.tickets == []


def test_trailers_and_framing_without_end_are_refused(raw: Raw) -> None:
    head = b"POST /v2/models/identity/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw.send(head)
    for _ in range(10):
        raw.send(b"1;" + b"x" * 16_000 + b"\r\n{\r\n")
    assert raw.answer()[0] == 431
    assert raw.is_ended()


@pytest.mark.parametrize("framing", ["Content-Length: 2000", "Transfer-Encoding: chunked"])
def test_a_body_that_is_too_large_is_not_read(triton: str, framing: str) -> None:
    with entering(triton, limits=Limits(body_bytes=1000)) as entry, Raw(entry.port) as raw:
        raw.send(f"POST /v2/models/identity/infer HTTP/1.1\r\n{framing}\r\n\r\n".encode())
        raw.send(b"7d0\r\n" + b" " * 2000)
        answer = raw.answer()
        assert answer[0] == 413
        assert "1000 bytes" in error_of(answer)
        assert entry.seen.tickets == []


def test_json_has_a_limit_of_its_own(triton: str) -> None:
    with entering(triton, limits=Limits(json_bytes=1000)) as entry, Raw(entry.port) as raw:
        answer = raw.ask(post(body_of() + b" " * 1000))
        assert answer[0] == 413
        assert "binary" in error_of(answer)
        assert output_of(raw.ask(post(body_of()))) == [-1.0]


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_inputs_and_outputs_have_a_limit(entry: Entry, raw: Raw, what: str) -> None:
    tensors = {**json.loads(body_of()), what: [{}] * 257}
    answer = raw.ask(post(json.dumps(tensors).encode()))
    assert answer[0] == 400
    assert f"more than 256 {what}" in error_of(answer)
    assert entry.seen.tickets == []


def test_a_shape_of_a_million_numbers_is_not_multiplied(entry: Entry, raw: Raw) -> None:
    asked = json.loads(body_of())
    asked["inputs"][0]["shape"] = [2**62] * 200_000
    answer = raw.ask(post(json.dumps(asked).encode()))
    assert answer[0] == 400
    assert "more than 32 dimensions" in error_of(answer)
    assert entry.seen.tickets == []


@pytest.mark.parametrize("container", ["[]", "{}"])
def test_json_of_very_many_lists_or_objects_is_refused(entry: Entry, raw: Raw, container: str) -> None:
    asked = body_of().decode().replace("-1.0", ",".join([container] * 65_536))
    answer = raw.ask(post(asked.encode()))
    assert answer[0] == 400
    assert "more than 65536 lists and objects" in error_of(answer)
    assert entry.seen.tickets == []


def test_nan_is_taken_in_small_json_only(raw: Raw) -> None:
    body = body_of().replace(b"-1.0", b"NaN")
    assert raw.ask(post(body))[0] == 200
    answer = raw.ask(post(body + b" " * 256 * 1024))
    assert answer[0] == 400
    assert "NaN" in error_of(answer)
    assert "binary" in error_of(answer)


def test_a_target_may_be_a_whole_address(raw: Raw) -> None:
    target = "http://proxy.example:80/v2/models/identity/infer"
    request = post(body_of()).replace(b"/v2/models/identity/infer", target.encode())
    assert output_of(raw.ask(request)) == output_of(raw.ask(request)) == [-1.0]
    assert raw.ask(get("HTTP://[::1]:8100/v2/health/live"))[0] == 200


def test_waiting_bodies_have_a_limit_together(triton: str) -> None:
    with (
        entering(triton, limits=Limits(buffered_bytes=3000)) as entry,
        Raw(entry.port) as first,
        Raw(entry.port) as second,
    ):
        first.send(post(b" " * 2900)[:-100])
        wait_until(lambda: entry.front.buffered_bytes == 2800)
        answer = second.ask(post(b" " * 400))
        assert (answer[0], answer[1]["retry-after"]) == (503, "1")
        first.close()
        wait_until(lambda: entry.front.buffered_bytes == 0)
        with Raw(entry.port) as third:
            assert output_of(third.ask(post(body_of()))) == [-1.0]
        assert entry.front.buffered_bytes == 0


def test_slow_callers_are_told_so_and_silent_ones_dropped(triton: str) -> None:
    limits = Limits(head_s=0.2, body_s=0.2, idle_s=0.2)
    with entering(triton, limits=limits) as entry:
        with Raw(entry.port) as raw:
            answer = raw.ask(b"POST /v2/models/identity/infer HTTP/1.1\r\nHost")
            assert (answer[0], "head" in error_of(answer)) == (408, True)
            assert raw.is_ended()
        with Raw(entry.port) as raw:
            answer = raw.ask(post(body_of())[:-1])
            assert (answer[0], "body" in error_of(answer)) == (408, True)
            assert raw.is_ended()
        with Raw(entry.port) as raw:
            assert raw.ask(get("/v2/health/live"))[0] == 200
            assert raw.is_ended()
        with Raw(entry.port) as raw:
            assert raw.is_ended()
        with Raw(entry.port) as raw:  # not the callers, Triton is slow
            assert output_of(raw.ask(post(body_of(1.0)))) == [1.0]
        assert entry.seen.statuses == ["ok"]


def test_a_body_that_drips_is_ended_by_its_rate(triton: str) -> None:
    with entering(triton, limits=Limits(body_s=0.2, body_rate_bytes_per_s=1000)) as entry, Raw(entry.port) as raw:
        raw.send(post(b" " * 60_000)[:-60_000])
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011, PT012 -- reset or broken pipe
            while time.monotonic() < began + PATIENCE_S:
                raw.send(b" ")
                time.sleep(0.005)
        assert entry.seen.denied == [408]


def test_a_truncated_body_reaches_nobody(entry: Entry, raw: Raw) -> None:
    raw.send(post(body_of())[:-5])
    wait_until(lambda: entry.front.buffered_bytes > 0)
    raw.close()
    wait_until(lambda: not entry.front.connections)
    assert entry.front.buffered_bytes == 0
    assert entry.seen.tickets == []


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /v2/health/live HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /v2/health/live HTTP/1.1\r\nContent-Length: +3\r\n\r\nabc",
        b"GET /v2/health/live HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\nabc",
        b"GET /v2/health/live HTTP/1.1\r\nA : b\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\r\nA: b\r\n folded: c\r\n\r\n",
        b"GET /v2/health/live HTTP/1.1\nA: b\n\n",
        b"GET /v2/health/live HTTP/1.1\r\nA: b\0c\r\n\r\n",
        b"POST /v2/models/identity/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /v2/health/live\r\n\r\n",
    ],
)
def test_what_is_no_clean_http_ends_the_connection(entry: Entry, raw: Raw, request_: bytes) -> None:
    answer = raw.ask(request_)
    assert answer[0] == 400
    assert answer[1]["connection"] == "close"
    assert raw.is_ended()
    assert entry.seen.tickets == []


def test_bad_http_behind_a_good_request_does_not_take_its_answer(raw: Raw) -> None:
    raw.send(post(body_of(0.2)) + b"garbage\r\n\r\n")
    assert output_of(raw.answer()) == [pytest.approx(0.2)]
    assert raw.answer()[0] == 400
    assert raw.is_ended()


def test_garbled_requests_harm_nobody(entry: Entry) -> None:
    random = np.random.default_rng(7)
    good = post(body_of(), "classes", "tritonpilot-deadline-ms: 20000", "Expect: 100-continue")
    chunked = b"POST /v2/models/identity/infer HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    for request in [good, chunked, get("/v2/models/identity")] * 100:
        garbled = bytearray(request * 2)
        for at in random.integers(0, len(garbled), 3):
            garbled[at] = random.integers(0, 256)
        with Raw(entry.port) as raw:
            raw.send(garbled[: random.integers(1, len(garbled))])
            raw.socket.shutdown(socket.SHUT_WR)
            raw.is_ended()
    wait_until(lambda: not entry.front.connections)
    wait_until(lambda: entry.rows_in_flight("identity") == entry.rows_in_flight("classes") == 0)
    assert (entry.front.buffered_bytes, entry.front.direct_calls) == (0, 0)
    with Raw(entry.port) as raw:
        assert output_of(raw.ask(post(body_of()))) == [-1.0]


def test_other_transfer_encodings_are_refused(raw: Raw) -> None:
    raw.send(b"POST /v2/models/identity/infer HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n")
    assert raw.answer()[0] == 415


def test_connect_is_refused(raw: Raw) -> None:
    assert raw.ask(b"CONNECT 127.0.0.1:80 HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n\r\n")[0] in (404, 405)
    assert raw.is_ended()


def test_an_offer_to_upgrade_is_not_taken_and_the_body_read(raw: Raw) -> None:
    h2c = [
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
    ]
    assert output_of(raw.ask(post(body_of(), "identity", *h2c))) == [-1.0]
    assert output_of(raw.ask(post(body_of(-2.0), "identity", *h2c))) == [-2.0]
    assert raw.ask(get("/v2/health/live", *h2c))[0] == 200
    raw.send(post(body_of(-3.0), "identity", *h2c) + post(body_of(-4.0)))
    assert [output_of(raw.answer()), output_of(raw.answer())] == [[-3.0], [-4.0]]


@pytest.mark.parametrize(
    ("head", "is_kept"), [(b"HTTP/1.1\r\nConnection: close", False), (b"HTTP/1.0", False), (b"HTTP/1.1", True)]
)
def test_a_connection_is_kept_as_long_as_asked(raw: Raw, head: bytes, is_kept: bool) -> None:
    body = body_of()
    raw.send(b"POST /v2/models/identity/infer %b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
    status, headers, _ = raw.answer()
    assert (status, headers.get("connection")) == (200, None if is_kept else "close")
    if not is_kept:
        assert raw.is_ended()


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [
        ("gzip", gzip.compress),
        ("GZIP", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", lambda b: zlib.compress(b)[2:-4]),
    ],
)
def test_a_compressed_body_is_decompressed(raw: Raw, encoding: str, compress: Callable[[bytes], bytes]) -> None:
    assert output_of(raw.ask(post(compress(body_of()), "identity", f"Content-Encoding: {encoding}"))) == [-1.0]


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("br", b"{}", 415),
        ("gzip, gzip", b"{}", 415),
        ("gzip", b"{}", 400),
        ("gzip", gzip.compress(b"{}")[:-1], 400),
        ("gzip", gzip.compress(b"{}") + b"more", 400),
        ("gzip", gzip.compress(b" " * 200_000), 413),
        ("deflate", zlib.compress(b" " * 200_000), 413),
    ],
)
def test_other_encodings_and_bombs_are_refused(triton: str, encoding: str, body: bytes, status: int) -> None:
    with entering(triton, limits=Limits(body_bytes=100_000)) as entry, Raw(entry.port) as raw:
        assert raw.ask(post(body, "identity", f"Content-Encoding: {encoding}"))[0] == status
        assert output_of(raw.ask(post(body_of()))) == [-1.0]
        assert entry.front.buffered_bytes == 0


def test_what_all_bodies_have_together_is_counted_decompressed(triton: str) -> None:
    with entering(triton, limits=Limits(buffered_bytes=10_000)) as entry, Raw(entry.port) as raw:
        answer = raw.ask(post(gzip.compress(body_of() + b" " * 20_000), "identity", "Content-Encoding: gzip"))
        assert (answer[0], answer[1]["retry-after"]) == (503, "1")
        assert entry.front.buffered_bytes == 0
        assert output_of(raw.ask(post(gzip.compress(body_of()), "identity", "Content-Encoding: gzip"))) == [-1.0]
        assert entry.front.buffered_bytes == 0


def test_a_large_body_is_decompressed_whole(raw: Raw) -> None:
    values = np.random.default_rng(1).random(3_000_000, np.float32)
    size = {"binary_data_size": values.nbytes}
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, values.size], "parameters": size}
    asked = {"inputs": [tensor], "outputs": [{"name": "OUTPUT", "parameters": {"binary_data": True}}]}
    text = json.dumps(asked).encode()
    body = zlib.compress(text + values.tobytes(), 1)
    head = ["Content-Encoding: deflate", f"Inference-Header-Content-Length: {len(text)}"]
    status, headers, answer = raw.ask(post(body, "identity", *head))
    assert status == 200
    assert answer[int(headers["inference-header-content-length"]) :] == values.tobytes()


# -- deadlines and callers that go -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "header"), [({}, "tritonpilot-deadline-ms: 200"), ({"timeout": 200_000}, "X: y")]
)
def test_at_the_deadline_the_caller_has_504_and_the_connection_goes_on(
    entry: Entry, raw: Raw, parameters: dict[str, object], header: str
) -> None:
    began = time.monotonic()
    answer = raw.ask(post(body_of(LONG_S, **parameters), "identity", header))  # type: ignore[arg-type]
    assert answer[0] == 504
    assert time.monotonic() - began < LONG_S
    assert entry.rows_in_flight("identity") == 1
    assert output_of(raw.ask(post(body_of(-2.0)))) == [-2.0]
    assert entry.rows_in_flight("identity") == 0


def test_who_leaves_while_his_request_runs_frees_its_window_when_triton_has_answered(entry: Entry, raw: Raw) -> None:
    raw.send(post(body_of(LONG_S)))
    wait_until(lambda: entry.rows_in_flight("identity") == 1)
    raw.close()
    wait_until(lambda: not entry.front.connections)
    assert entry.rows_in_flight("identity") == 1
    wait_until(lambda: entry.rows_in_flight("identity") == 0)
    assert entry.seen.statuses == ["cancelled"]


def test_who_leaves_while_he_waits_reaches_triton_never(entry: Entry, raw: Raw) -> None:
    raw.send(post(body_of(LONG_S, rows=4), "classes"))
    wait_until(lambda: entry.rows_in_flight("classes") == 4)
    with Raw(entry.port) as second, Raw(entry.port) as third:
        second.send(post(body_of(0.1, rows=4), "classes"))
        wait_until(lambda: entry.rows_in_flight("classes") == 8)
        third.send(post(body_of(-1.0), "classes"))
        wait_until(lambda: entry.gate.depth("classes").get("realtime") == 1)
        third.close()
        wait_until(lambda: not entry.gate.depth("classes").get("realtime"))
        assert raw.answer()[0] == second.answer()[0] == 200
    assert len(entry.seen.tickets) == 2
    assert sorted(entry.seen.statuses) == ["cancelled", "ok", "ok"]


def test_a_full_queue_is_refused_with_a_time_to_come_back(entry: Entry) -> None:
    # One runs, one waits in Triton (both do for a moment), two in the entry.
    requests = [body_of(LONG_S, rows=4, priority=2), *[body_of(-1.0, rows=4, priority=2)] * 3]
    callers = [Raw(entry.port) for _ in requests]
    for at, (caller, body) in enumerate(zip(callers, requests, strict=True)):
        caller.send(post(body, "classes"))
        wait_until(
            lambda at=at: (
                entry.rows_in_flight("classes") + 4 * sum(entry.gate.depth("classes").values()) == 4 * (at + 1)
            )
        )
    with Raw(entry.port) as late:
        status, headers, body = late.ask(post(requests[2], "classes"))
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert int(headers["retry-after-ms"]) >= 1
        assert entry.seen.refusals[0].message == json.loads(body)["error"]
    for caller in callers:
        assert caller.answer()[0] == 200
        caller.close()


# -- tenants ---------------------------------------------------------------------------------------------------------


def test_keys_open_what_their_tenant_may_use(triton: str, tenants_file: Path) -> None:
    with entering(triton, tenants_file) as entry, Raw(entry.port) as raw:
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert raw.ask(get(path))[0] == 200
        for headers in (
            [],
            ["tritonpilot-key: tp_no"],
            ["Authorization: Bearer tp_no"],
            ["Authorization: Basic dHBfc2hvcA=="],
        ):
            for request in (get("/v2", *headers), post(body_of(), "identity", *headers)):
                status, said, _ = raw.ask(request)
                assert (status, said["www-authenticate"]) == (401, "Bearer")
        for headers in (["tritonpilot-key: tp_shop"], ["authorization: bearer tp_shop"]):
            assert raw.ask(get("/v2/models/identity", *headers))[0] == 200
            assert output_of(raw.ask(post(body_of(), "identity", *headers))) == [-1.0]
        key = "tritonpilot-key: tp_shop"
        assert raw.ask(get("/v2/models/identity/config", key))[0] == 404
        for model in ("parrot", "nope"):
            assert raw.ask(get(f"/v2/models/{model}", key))[0] == 403
            assert raw.ask(post(body_of(), model, key))[0] == 403
        assert raw.ask(post(body_of(), "identity", key, key))[0] == 400
        assert raw.ask(post(body_of(), "identity", key, "Authorization: Bearer tp_shop"))[0] == 400
        assert {ticket.tenant.name for ticket in entry.seen.tickets if ticket.tenant} == {"shop"}


def test_a_key_that_is_taken_away_opens_nothing_although_its_head_is_known(triton: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(TENANTS)
    with entering(triton, path) as entry, Raw(entry.port) as raw:
        request = post(body_of(), "identity", "tritonpilot-key: tp_shop")
        assert [raw.ask(request)[0] for _ in range(3)] == [200] * 3
        path.write_text(TENANTS.replace(hash_key("tp_shop"), hash_key("tp_other")))
        assert entry.desk.tenants is not None
        wait_until(entry.desk.tenants.poll)
        assert raw.ask(request)[0] == 401
        assert len(entry.front.heads) == 1


def test_a_tenants_class_counts_whatever_the_request_says(triton: str, tenants_file: Path) -> None:
    with entering(triton, tenants_file) as entry, Raw(entry.port) as raw:
        request = post(body_of(priority=1), "classes", "tritonpilot-key: tp_shop", "tritonpilot-class: realtime")
        assert output_of(raw.ask(request)) == [-1.0]
        assert [(ticket.class_name, ticket.level) for ticket in entry.seen.tickets] == [("batch", 2)]


def test_a_rate_is_429_with_the_time_until_it_allows_more(triton: str, tenants_file: Path) -> None:
    with entering(triton, tenants_file) as entry, Raw(entry.port) as raw:
        request = post(body_of(), "identity", "tritonpilot-key: tp_slow")
        assert raw.ask(request)[0] == 200
        status, headers, _ = raw.ask(request)
        assert status == 429
        assert 90 <= int(headers["retry-after"]) <= 100
        assert 90_000 <= int(headers["retry-after-ms"]) <= 100_000


@pytest.mark.parametrize("headers", [[], ["Content-Encoding: gzip"]])
def test_who_is_above_his_rate_is_refused_before_his_request_is_read(
    triton: str, tenants_file: Path, headers: list[str]
) -> None:
    with entering(triton, tenants_file) as entry, Raw(entry.port) as raw:
        key = "tritonpilot-key: tp_slow"
        for _ in range(2):
            raw.ask(post(body_of(), "identity", key))
        answer = raw.ask(post(b"no JSON, and no gzip", "identity", key, *headers))
        assert answer[0] == 429
        assert 90 <= int(answer[1]["retry-after"]) <= 100
        assert [refusal.kind for refusal in entry.seen.refusals] == ["rate", "rate"]
        assert entry.seen.denied == []
        assert entry.front.buffered_bytes == 0


def test_tenants_may_send_less_json(triton: str, tenants_file: Path) -> None:
    with entering(triton, tenants_file) as entry, Raw(entry.port) as raw:
        answer = raw.ask(post(body_of() + b" " * 2**20, "identity", "tritonpilot-key: tp_shop"))
        assert answer[0] == 413
        assert "1048576" in error_of(answer)


def test_tenants_may_not_use_shared_memory(triton: str, tenants_file: Path) -> None:
    region = {"shared_memory_region": "theirs", "shared_memory_byte_size": 4}
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, 1]}
    with entering(triton, tenants_file) as entry, Raw(entry.port) as raw:
        for asked in (
            {"inputs": [{**tensor, "parameters": region}]},
            {"inputs": [{**tensor, "data": [-1.0]}], "outputs": [{"name": "OUTPUT", "parameters": region}]},
        ):
            for text in (
                json.dumps(asked),
                json.dumps(asked).replace("shared_memory_region", "\\u0073hared_memory_region"),
            ):
                answer = raw.ask(post(text.encode(), "identity", "tritonpilot-key: tp_shop"))
                assert answer[0] == 403
        assert entry.seen.tickets == []


# -- many, large, and Triton's end -----------------------------------------------------------------------------------


def test_two_hundred_connections_get_their_own_answers(entry: Entry) -> None:
    callers = [Raw(entry.port) for _ in range(200)]
    for turn in range(3):
        for at, caller in enumerate(callers):
            caller.send(post(body_of(-float(at + turn))))
        assert [output_of(caller.answer()) for caller in callers] == [[-float(at + turn)] for at in range(200)]
    assert entry.seen.statuses == ["ok"] * 600
    for caller in callers:
        caller.close()
    wait_until(lambda: not entry.front.connections)


def test_a_large_answer_waits_for_a_slow_reader(triton: str) -> None:
    size = 8_000_000
    said = b'{"inputs":[{"name":"INPUT","datatype":"FP32","shape":[1,%d],"parameters":{"binary_data_size":%d}}],' % (
        size,
        4 * size,
    )
    said += b'"parameters":{"binary_data_output":true}}'
    tensor = (-np.arange(size, dtype=np.float32)).tobytes()
    request = post(said + tensor, "identity", f"Inference-Header-Content-Length: {len(said)}")
    with entering(triton) as entry, Raw(entry.port) as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        raw.send(request)
        wait_until(lambda: entry.seen.statuses == ["ok"])  # its window is free before it is read
        assert entry.front.buffered_bytes == 0
        status, _, body = raw.answer()
        assert (status, body[-4 * size :] == tensor) == (200, True)
        assert raw.ask(get("/v2/health/live"))[0] == 200
    with entering(triton, limits=Limits(write_s=0.3)) as entry, Raw(entry.port) as raw:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        raw.send(request)
        wait_until(lambda: entry.seen.statuses == ["ok"])
        wait_until(lambda: not entry.front.connections)  # who never reads is dropped


def test_idle_connections_to_triton_end_and_new_ones_come(triton: str) -> None:
    with entering(triton) as entry, Raw(entry.port) as raw:
        entry.front.backend._idle_s = 0.1
        assert output_of(raw.ask(post(body_of()))) == [-1.0]
        assert entry.front.backend.connections == 1
        wait_until(lambda: entry.front.backend.connections == 0)
        assert output_of(raw.ask(post(body_of()))) == [-1.0]


def test_closing_answers_what_is_inside_and_takes_nothing_new(triton: str) -> None:
    with entering(triton) as entry, Raw(entry.port) as raw, Raw(entry.port) as idle:
        assert idle.ask(get("/v2/health/live"))[0] == 200
        raw.send(post(body_of(0.5)))
        wait_until(lambda: entry.rows_in_flight("identity") == 1)
        closing = threading.Thread(target=entry.run, args=(entry.front.close(PATIENCE_S),))
        closing.start()
        assert idle.is_ended()
        status, headers, _ = raw.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert raw.is_ended()
        closing.join()
        with pytest.raises(ConnectionRefusedError):
            Raw(entry.port)


def test_a_taken_port_is_said(triton: str, entry: Entry) -> None:
    with pytest.raises(PortError, match=str(entry.port)):
        entry.run(HttpFront(entry.desk, triton).start("127.0.0.1", entry.port))


def test_triton_dies_and_comes_back(repository: Path, free_port: int) -> None:
    triton = f"127.0.0.1:{free_port}"
    with entering(triton) as entry, Raw(entry.port) as raw, Raw(entry.port) as other:
        assert raw.ask(post(body_of()))[0] == 503  # its terms cannot be had yet
        assert raw.ask(get("/v2/health/ready"))[0] == 502
        with EmbeddedServer(repository, models=["identity"], http_port=free_port) as server:
            assert output_of(raw.ask(post(body_of()))) == [-1.0]
            assert output_of(other.ask(post(body_of()))) == [-1.0]
            raw.send(post(body_of(PATIENCE_S)))
            wait_until(lambda: entry.rows_in_flight("identity") == 1)
            os.kill(server.describe()["pid"], signal.SIGKILL)
            answer = raw.answer()
            assert answer[0] == 502
            assert answer[1]["retry-after"] == "1"
            assert other.ask(post(body_of()))[0] == 502
            assert entry.rows_in_flight("identity") == 0
        with EmbeddedServer(repository, models=["identity"], http_port=free_port):
            assert output_of(raw.ask(post(body_of()))) == [-1.0]
            assert output_of(other.ask(post(body_of()))) == [-1.0]
        assert Counter(entry.seen.statuses) == {"ok": 4, "unavailable": 2}


def test_a_connection_that_went_stale_does_not_cost_a_request(repository: Path, free_port: int) -> None:
    triton = f"127.0.0.1:{free_port}"
    with entering(triton) as entry, Raw(entry.port) as raw:
        with EmbeddedServer(repository, models=["identity"], http_port=free_port):
            assert output_of(raw.ask(post(body_of()))) == [-1.0]
        with EmbeddedServer(repository, models=["identity"], http_port=free_port):
            assert output_of(raw.ask(post(body_of()))) == [-1.0]
        assert entry.seen.statuses == ["ok", "ok"]


def test_python_clients_of_the_standard_library_are_served(entry: Entry) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", entry.port, timeout=PATIENCE_S)
    for value in (-1.0, -2.0):
        connection.request("POST", "/v2/models/identity/infer", body_of(value))
        assert json.loads(connection.getresponse().read())["outputs"][0]["data"] == [value]
    connection.close()
