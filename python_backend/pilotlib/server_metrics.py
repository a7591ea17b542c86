"""What do Triton's metrics say of its models' queues? The few families that tell a stall, read from a scrape of /metrics.

scraper = Scraper(endpoint);  seen = counts(scraper.scrape())       # {("ctr", "1"): Counts(pending=0, arrived=9, executed=4), ...}
woken = names(text, b"pilot_wakes_total")                           # models that export the family

Only the named families are parsed: with latency summaries on, they are a tenth of the text.
"""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotlib.loopback import CONTENT_LENGTH, TIMEOUT_S

ENDPOINT_VARIABLE = "PILOT_METRICS_ENDPOINT"  # host:port, when the command line of the server does not tell

Model = tuple[str, str]
"""Name and version, as the metrics' labels write them."""

PENDING = b"nv_inference_pending_request_count"
SUCCESS = b"nv_inference_request_success"
FAILURE = b"nv_inference_request_failure"
EXECUTED = b"nv_inference_exec_count"
MODEL = re.compile(rb'[{,]model="([^"]*)"')
VERSION = re.compile(rb'[{,]version="([^"]*)"')
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Counts:
    """One model version: requests that wait now, that have arrived and executions that have ended since the server's start."""

    pending: int
    arrived: int  # an execution's requests arrive here when it ends: neither pending nor answered, they are not counted
    executed: int


def counts(text: bytes) -> dict[Model, Counts]:
    """The counts of every model version that has a queue of its own."""
    success, failure, executed = (_values(text, family) for family in (SUCCESS, FAILURE, EXECUTED))
    return {
        model: Counts(pending, pending + success.get(model, 0) + failure.get(model, 0), executed.get(model, 0))
        for model, pending in _values(text, PENDING).items()
    }


def names(text: bytes, family: bytes) -> frozenset[str]:
    """The models with a value in a family of metrics."""
    return frozenset(name for name, _ in _values(text, family))


def metrics_endpoint(environ: Mapping[str, str], arguments: Sequence[str]) -> tuple[str, int] | None:
    """Host and port of the server's metrics, from the environment or tritonserver's arguments; None when it has none."""
    if environ.get(ENDPOINT_VARIABLE):
        host, _, port = environ[ENDPOINT_VARIABLE].rpartition(":")
        return (host, int(port)) if port.isdigit() else None
    if not arguments or "tritonserver" not in Path(arguments[0]).name:
        return None
    options = _options(arguments)
    if options.get("--allow-metrics", "true").lower() in ("false", "0"):
        return None
    host = options.get("--metrics-address") or options.get("--http-address") or "0.0.0.0"  # noqa: S104  read, not bound
    port = options.get("--metrics-port", "8002")
    return ("127.0.0.1" if host == "0.0.0.0" else host, int(port)) if port.isdigit() else None  # noqa: S104


class Scraper:
    """One connection to /metrics, kept open between scrapes and made anew when it was lost."""

    def __init__(self, endpoint: tuple[str, int]) -> None:
        self._endpoint = endpoint
        self._connection: socket.socket | None = None

    def scrape(self) -> bytes:
        """The text of all metrics. Raises OSError when the server does not answer."""
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self._endpoint, timeout=TIMEOUT_S)
            self._connection.sendall(REQUEST)
            return _body(self._connection)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection; the next scrape opens one."""
        if self._connection is not None:
            with contextlib.closing(self._connection):
                self._connection = None


def _body(connection: socket.socket) -> bytes:
    received = bytearray()
    whole = 0
    while not whole or len(received) < whole:
        part = connection.recv(1 << 18)
        if not part:
            raise ConnectionError("the server closed the connection to its metrics")
        received += part
        if not whole and (end := received.find(b"\r\n\r\n")) >= 0:
            length = CONTENT_LENGTH.search(received, 0, end + 4)
            if length is None:
                raise ConnectionError("the server's metrics came without a length")
            whole = end + 4 + int(length[1])
    return bytes(received)


def _values(text: bytes, family: bytes) -> dict[Model, int]:
    """The values of one family by model version, summed over its other labels."""
    start = text.find(b"\n" + family + b"{")
    found: dict[Model, int] = {}
    if start < 0:
        return found
    end = text.find(b"\n#", start + 1)
    for line in text[start + 1 : len(text) if end < 0 else end].splitlines():
        labels, _, value = line.rpartition(b" ")
        name, version = MODEL.search(labels), VERSION.search(labels)
        if name is None:
            continue
        model = name[1].decode(errors="replace"), version[1].decode() if version else ""
        found[model] = found.get(model, 0) + int(float(value))
    return found


def _options(arguments: Sequence[str]) -> Mapping[str, str]:
    """The options of a command line, as `--name=value` or `--name value`; the last one of a name counts."""
    options: dict[str, str] = {}
    for argument, following in zip(arguments[1:], (*arguments[2:], ""), strict=False):
        name, equals, value = argument.partition("=")
        options[name] = value if equals else following
    return options
