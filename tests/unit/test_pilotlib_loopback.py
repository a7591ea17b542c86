from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from pilotlib.loopback import Line, Zeros, answer, http_endpoint, wake_request, zeros


@pytest.mark.parametrize(
    ("environ", "arguments", "endpoint"),
    [
        ({}, ("/opt/bin/tritonserver",), ("127.0.0.1", 8000)),
        ({}, ("tritonserver", "--http-port=18000", "--http-address=127.0.0.2"), ("127.0.0.2", 18000)),
        ({}, ("tritonserver", "--http-address", "0.0.0.0", "--http-port", "9000"), ("127.0.0.1", 9000)),  # noqa: S104
        ({}, ("tritonserver", "--allow-http=false"), None),
        ({}, ("python3", "-m", "something"), None),
        ({}, (), None),
        ({"PILOT_HTTP_ENDPOINT": "127.0.0.1:81"}, (), ("127.0.0.1", 81)),
        ({"PILOT_HTTP_ENDPOINT": "nonsense"}, ("tritonserver",), None),
    ],
)
def test_the_endpoint_is_read_from_environment_or_command_line(
    environ: dict[str, str], arguments: tuple[str, ...], endpoint: tuple[str, int] | None
) -> None:
    assert http_endpoint(environ, arguments) == endpoint


def test_a_wake_request_is_zeros_in_tritons_binary_form() -> None:
    request = wake_request("id", "m", 1, [Zeros("x", "FP32", (1, 2), 8), Zeros("s", "BYTES", (1,), 4)], "y", 3)
    lines, _, body = request.partition(b"\r\n\r\n")
    headers = dict(line.split(": ") for line in lines.decode().split("\r\n")[1:])
    json_bytes = int(headers["Inference-Header-Content-Length"])
    assert lines.startswith(b"POST /v2/models/m/versions/1/infer HTTP/1.1")
    assert (int(headers["Content-Length"]), headers["Connection"]) == (len(body), "close")
    head = json.loads(body[:json_bytes])
    assert head["parameters"] == {"timeout": 1, "pilot_wake": True, "priority": 3}
    assert [one["parameters"]["binary_data_size"] for one in head["inputs"]] == [8, 4]
    assert body[json_bytes:] == bytes(12)


def test_zeros_are_the_smallest_valid_request() -> None:
    config = {
        "max_batch_size": 4,
        "input": [
            {"name": "dense", "data_type": "TYPE_FP32", "dims": ["28"]},
            {"name": "text", "data_type": "TYPE_STRING", "dims": [-1, 2]},
            {"name": "more", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
        ],
    }
    assert zeros(config) == [Zeros("dense", "FP32", (1, 28), 112), Zeros("text", "BYTES", (1, 1, 2), 8)]
    assert zeros({**config, "max_batch_size": 0})[0].shape == (28,)


def test_an_answer_ends_with_its_length_though_the_connection_stays_open() -> None:
    here, there = socket.socketpair()
    here.settimeout(5)
    with there:  # as when a stub that is being forked has inherited the server's end
        there.sendall(b'HTTP/1.1 400 Bad Request\r\nContent-Length: 11\r\nConnection: close\r\n\r\n{"error":1}')
        assert answer(here) == '{"error":1}'


def test_an_answer_without_length_ends_with_its_connection() -> None:
    here, there = socket.socketpair()
    here.settimeout(5)
    with there:
        there.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\nnot now")
    assert answer(here) == "not now"


class Counting(http.server.BaseHTTPRequestHandler):
    """Answers every POST, and counts connections."""

    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self) -> None:
        type(self).connections += 1
        super().setup()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def endpoint() -> Iterator[tuple[str, int]]:
    """A real HTTP server."""
    Counting.connections = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counting) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield ("127.0.0.1", server.server_port)
        server.shutdown()


KEPT = wake_request("id", "m", 1, [Zeros("x", "FP32", (1, 2), 8)], "y", 3, is_kept=True)


def test_a_line_is_used_again_until_it_rests(endpoint: tuple[str, int]) -> None:
    line = Line(endpoint)
    assert [line.answer(line.post(KEPT)) for _ in range(3)] == ["ok"] * 3
    assert (Counting.connections, line.is_open) == (1, True)
    line.rest()
    assert not line.is_open
    assert line.answer(line.post(KEPT)) == "ok"
    assert Counting.connections == 2
    line.rest()


def test_a_request_does_not_wait_for_the_answer_to_another(endpoint: tuple[str, int]) -> None:
    line = Line(endpoint)
    first, second = line.post(KEPT), line.post(KEPT)
    assert first is not second
    assert [line.answer(second), line.answer(first)] == ["ok", "ok"]
    assert first.fileno() == -1, "one of them is kept, not both"
    assert line.is_open
    line.rest()


def test_a_line_that_broke_is_replaced(endpoint: tuple[str, int]) -> None:
    line = Line(endpoint)
    kept = line.post(KEPT)
    line.answer(kept)
    kept.shutdown(socket.SHUT_RDWR)
    assert line.answer(line.post(KEPT)) == "ok"
    line.rest()
