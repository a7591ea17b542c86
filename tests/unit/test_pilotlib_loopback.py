from __future__ import annotations

import json
import socket

import pytest

from pilotlib.loopback import Zeros, answer, http_endpoint, wake_request, zeros


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
