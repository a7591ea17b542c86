"""How does a stub send its own model a request that names a priority level? Over the server's loopback HTTP.

    endpoint = http_endpoint(os.environ, parent_command_line())
    line = Line(endpoint)
    connection = line.post(wake_request("id", "ctr", 1, inputs, "prob", priority=3))    # does not wait for the answer
    ... when it is readable ...
    line.answer(connection)  -> '{"error":"Request timeout expired"}'
    line.rest()                                          # after a while without requests

A BLS request needs no port, but in Triton 24.10 it cannot name a priority level, and a request that a full default queue
refuses does not wake the batcher (seen: 72 answers/s fell to 11/s). It also costs 500 us where this costs 50 to 110 us of CPU,
and sent before the server was ready it has crashed tritonserver.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotlib.tensors import DTYPES_BY_CONFIG, STRING

WAKE_PARAMETER = "pilot_wake"  # by which `execute` knows a wake that was not rejected in the queue
ENDPOINT_VARIABLE = "PILOT_HTTP_ENDPOINT"  # host:port, when the command line of the server does not tell
TIMEOUT_S = 1.0
MAX_ANSWER_BYTES = 1 << 20
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Zeros:
    """One input of a wake: its name, Triton type ("FP32"), shape with the batch dimension, and size in bytes."""

    name: str
    data_type: str
    shape: tuple[int, ...]
    byte_size: int


def parent_command_line() -> tuple[str, ...]:
    """The arguments of the process that started this one: tritonserver. Empty when /proc does not say."""
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(part.decode(errors="replace") for part in raw.split(b"\0") if part)


def http_endpoint(environ: Mapping[str, str], arguments: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of the server's HTTP service, from the environment or its arguments; None when it has none."""
    if environ.get(ENDPOINT_VARIABLE):
        host, _, port = environ[ENDPOINT_VARIABLE].rpartition(":")
        return (host, int(port)) if port.isdigit() else None
    if not arguments or "tritonserver" not in Path(arguments[0]).name:
        return None
    options: dict[str, str] = {}
    for argument, following in zip(arguments[1:], (*arguments[2:], ""), strict=False):
        name, equals, value = argument.partition("=")
        options[name] = value if equals else following
    if options.get("--allow-http", "true").lower() in ("false", "0"):
        return None
    host = options.get("--http-address", "0.0.0.0")  # noqa: S104  Triton's default, read and not bound
    port = options.get("--http-port", "8000")
    return ("127.0.0.1" if host == "0.0.0.0" else host, int(port)) if port.isdigit() else None  # noqa: S104


def zeros(config: Mapping[str, Any]) -> list[Zeros]:
    """The smallest valid request: one row of zeros or empty strings, dynamic dims of 1, optional inputs left out.

    A sequence batcher's controls are no part of it: only a dynamic batcher stalls.
    """
    batch = (1,) if config.get("max_batch_size", 0) > 0 else ()
    found = []
    for entry in config["input"]:
        if entry.get("optional"):
            continue
        dtype = DTYPES_BY_CONFIG[entry["data_type"]]
        shape = batch + tuple(max(int(dim), 1) for dim in entry["dims"])
        bytes_each = 4 if dtype is STRING else dtype.numpy.itemsize  # an empty string is its length, 4 bytes
        name = "BYTES" if dtype is STRING else dtype.config.removeprefix("TYPE_")
        found.append(Zeros(entry["name"], name, shape, math.prod(shape) * bytes_each))
    return found


def wake_request(
    request_id: str,
    model: str,
    version: int,
    inputs: Sequence[Zeros],
    output_name: str,
    priority: int,
    *,
    is_kept: bool = False,
) -> bytes:
    """An HTTP request for an inference of zeros in Triton's binary form, with a queue timeout of 1 us.

    `priority` 0 is the default level; `is_kept`: the connection is used again.
    """
    head: dict[str, Any] = {
        "id": request_id,
        "parameters": {"timeout": 1, WAKE_PARAMETER: True} | ({"priority": priority} if priority else {}),
        "inputs": [
            {
                "name": each.name,
                "datatype": each.data_type,
                "shape": each.shape,
                "parameters": {"binary_data_size": each.byte_size},
            }
            for each in inputs
        ],
        "outputs": [{"name": output_name}],
    }
    encoded = json.dumps(head).encode()
    body = encoded + bytes(sum(each.byte_size for each in inputs))
    lines = (
        f"POST /v2/models/{model}/versions/{version}/infer HTTP/1.1",
        "Host: localhost",
        f"Connection: {'keep-alive' if is_kept else 'close'}",
        f"Inference-Header-Content-Length: {len(encoded)}",
        f"Content-Length: {len(body)}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


def post(endpoint: tuple[str, int], request: bytes) -> socket.socket:
    """Send a request on a connection of its own and return that, without waiting for the answer. Raises OSError."""
    connection = socket.create_connection(endpoint, timeout=TIMEOUT_S)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
    except OSError:
        connection.close()
        raise
    return connection


def answer(connection: socket.socket) -> str:
    """Read the answer's body and close the connection. Raises OSError when the server is away."""
    with contextlib.closing(connection):
        return _body_of(connection)[0]


class Line:
    """One connection that is used again, and more where its answer is still to come. For one thread.

    A connection costs tritonserver as much as the request that comes by it. But tritonserver does not stop before its HTTP
    connections have closed: `rest` has to be called soon after the last request.
    """

    def __init__(self, endpoint: tuple[str, int]) -> None:
        self._endpoint = endpoint
        self._free: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """Whether a connection is kept."""
        return self._free is not None

    def post(self, request: bytes) -> socket.socket:
        """Send a request without waiting for its answer; returns its connection. Raises OSError."""
        connection, self._free = self._free, None
        if connection is not None and select.select([connection], [], [], 0)[0]:
            connection.close()  # nothing is to come by it: this is its end
            connection = None
        if connection is not None:
            try:
                connection.sendall(request)
            except OSError:  # the server has closed it, or is another one by now
                connection.close()
            else:
                return connection
        return post(self._endpoint, request)

    def answer(self, connection: socket.socket) -> str:
        """Read the answer's body; the connection is kept or closed. Raises OSError when the server is away."""
        try:
            body, is_whole = _body_of(connection)
        except OSError:
            connection.close()
            raise
        if is_whole and self._free is None:
            self._free = connection
        else:
            connection.close()
        return body

    def rest(self) -> None:
        """Close what is kept."""
        if self._free is not None:
            self._free.close()
            self._free = None


def _body_of(connection: socket.socket) -> tuple[str, bool]:
    """The body, and whether it is whole and the connection can be used again.

    It ends where its Content-Length says: the end of the connection can be seconds away. A stub that tritonserver forks
    while the connection is open inherits it, so that it stays open when tritonserver has closed it.
    """
    received = b""
    while len(received) < MAX_ANSWER_BYTES and not _is_whole(received) and (part := connection.recv(1 << 16)):
        received += part
    return received.partition(b"\r\n\r\n")[2].decode(errors="replace"), _is_whole(received)


def _is_whole(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    length = CONTENT_LENGTH.search(head) if end else None
    return length is not None and len(body) >= int(length[1])
