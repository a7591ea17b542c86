"""How does a stub reach its own server over HTTP with a request that names a priority level?

A BLS request cannot name one in Triton 24.10. That matters when the default level's queue is full: a refused request does
not wake the batcher, so only a wake on another level gets through (seen: 72 answers/s fell to 11/s without it).

    endpoint = http_endpoint(os.environ, parent_command_line())
    Loopback(endpoint, "ctr", 1, body, json_bytes).send() -> '{"error":"... Request timeout expired"}'
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENDPOINT_VARIABLE = "PILOT_HTTP_ENDPOINT"  # host:port, when the command line of the server does not tell
TIMEOUT_S = 1.0


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
    for argument, following in zip(arguments[1:], [*arguments[2:], ""], strict=True):
        name, equals, value = argument.partition("=")
        options[name] = value if equals else following
    if options.get("--allow-http", "true").lower() in ("false", "0"):
        return None
    host = options.get("--http-address", "0.0.0.0")  # noqa: S104  Triton's default, read and not bound
    port = options.get("--http-port", "8000")
    return ("127.0.0.1" if host == "0.0.0.0" else host, int(port)) if port.isdigit() else None  # noqa: S104


def wake_request(request_id: str, inputs: Sequence[Zeros], output_name: str, priority: int) -> tuple[bytes, int]:
    """Body of an inference request of zeros in Triton's binary form, and the length of its JSON part."""
    head: dict[str, Any] = {
        "id": request_id,
        "parameters": {"priority": priority, "timeout": 1},
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
    return encoded + bytes(sum(each.byte_size for each in inputs)), len(encoded)


class Loopback:
    """Sends one prepared request to one model of the own server.

    NOTE: a connection of its own each time; tritonserver does not stop before its HTTP connections have closed.
    """

    def __init__(self, endpoint: tuple[str, int], model: str, version: int, body: bytes, json_bytes: int) -> None:
        self._endpoint = endpoint
        self._path = f"/v2/models/{model}/versions/{version}/infer"
        self._body = body
        self._headers = {"Inference-Header-Content-Length": str(json_bytes)}

    def send(self) -> str:
        """Post the request; the answer's text. Raises OSError or http.client.HTTPException when the server is away."""
        connection = http.client.HTTPConnection(*self._endpoint, timeout=TIMEOUT_S)
        try:
            connection.request("POST", self._path, self._body, self._headers)
            return connection.getresponse().read().decode(errors="replace")
        finally:
            connection.close()
