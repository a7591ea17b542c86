"""How do many models take as many requests as they can, all at once, some of them bad? Raw HTTP from one thread.

streams = [Stream("labels", requests, callers=4, total=200_000), ...]
with MixedLoad("127.0.0.1:8000", streams) as load:
    load.run(on_tick=sample, tick_s=2.0)       # returns when every stream has its answers

The bytes of every request are made once: a caller costs 20 to 30 us a request, so that one thread keeps two cores busy.
"""

from __future__ import annotations

import itertools
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy.typing as npt
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype

from tritonpilot.errors import MeasurementError

TIMEOUT_S = 60.0
RECEIVE_BYTES = 1 << 18
LENGTH = b"\r\nContent-Length: "  # with the line's beginning: another header ends in the same words
OK = b"HTTP/1.1 200"


@dataclass(frozen=True)
class Request:
    """The bytes of one HTTP request, and whether it is to be answered or refused."""

    content: bytes
    is_good: bool


@dataclass
class Stream:
    """What one model is asked, `total` times in all, its requests in turn; `done` and `refused` count the answers."""

    model: str
    requests: Sequence[Request]
    callers: int
    total: int
    done: int = 0
    refused: int = 0
    sent: int = 0
    turns: Iterator[Request] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.turns = itertools.cycle(self.requests)


@dataclass
class _Call:
    stream: Stream
    connection: socket.socket
    request: Request
    received: bytearray = field(default_factory=bytearray)


class MixedLoad:
    """Callers of several models, each with a connection of its own, from one thread."""

    def __init__(self, http_url: str, streams: Sequence[Stream]) -> None:
        host, _, port = http_url.rpartition(":")
        self._address = host, int(port)
        self._streams = streams
        self._selector = selectors.DefaultSelector()
        self._connections: list[socket.socket] = []

    def __enter__(self) -> MixedLoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._connections:
            connection.close()
        self._selector.close()

    def run(self, on_tick: Callable[[], None], tick_s: float) -> None:
        """Send until every stream is done. Raises MeasurementError when a request has no answer, or not the right kind."""
        for stream in self._streams:
            for _ in range(min(stream.callers, stream.total - stream.sent)):
                self._begin(stream)
        next_tick = time.monotonic() + tick_s
        last_answer = time.monotonic()
        while self._selector.get_map():
            events = self._selector.select(tick_s)
            now = time.monotonic()
            for key, _ in events:
                self._receive(key.data)
            if events:
                last_answer = now
            elif now - last_answer > TIMEOUT_S:
                waiting = ", ".join(stream.model for stream in self._streams if stream.done < stream.total)
                raise MeasurementError(
                    f"No answer came for {TIMEOUT_S:g} s from {waiting}. Nothing is reported. Look at the server's log."
                )
            if now >= next_tick:
                on_tick()
                next_tick = now + tick_s
        on_tick()

    def _begin(self, stream: Stream) -> None:
        connection = socket.create_connection(self._address, timeout=TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.append(connection)
        call = _Call(stream, connection, next(stream.turns))
        self._selector.register(connection, selectors.EVENT_READ, call)
        stream.sent += 1
        connection.sendall(call.request.content)

    def _receive(self, call: _Call) -> None:
        stream = call.stream
        try:
            part = call.connection.recv(RECEIVE_BYTES)
        except OSError as error:
            raise _unanswered(stream, error) from error
        if not part:
            raise _unanswered(stream, EOFError("the server closed the connection"))
        call.received += part
        if not _is_whole(call.received):
            return
        is_answered = call.received.startswith(OK)
        if is_answered != call.request.is_good:
            text = bytes(call.received).partition(b"\r\n\r\n")[2][:300].decode(errors="replace")
            raise MeasurementError(
                f"{stream.model} answered a request that it should have refused. Nothing is reported. Look at its input."
                if is_answered
                else f"{stream.model} refused a good request: {text}. Nothing is reported. Look at the server's log."
            )
        call.received.clear()
        stream.done += 1
        stream.refused += not is_answered
        if stream.sent == stream.total:
            self._selector.unregister(call.connection)
            return
        call.request = next(stream.turns)
        stream.sent += 1
        try:
            call.connection.sendall(call.request.content)
        except OSError as error:
            raise _unanswered(stream, error) from error


def request(model: str, inputs: Mapping[str, npt.NDArray[Any]], *, is_good: bool = True) -> Request:
    """Encode one inference in Triton's binary form."""
    tensors = []
    for name, array in inputs.items():
        tensor = httpclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    body, json_bytes = httpclient.InferenceServerClient.generate_request_body(tensors)
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: localhost",
        *([f"Inference-Header-Content-Length: {json_bytes}"] if json_bytes is not None else []),
        f"Content-Length: {len(body)}",
        "",
        "",
    )
    return Request("\r\n".join(lines).encode() + bytes(body), is_good)


def _is_whole(received: bytearray) -> bool:
    """Whether head and body of an HTTP answer are there."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return False
    start = received.find(LENGTH, 0, end)
    if start < 0:
        return True
    stop = received.find(b"\r\n", start + len(LENGTH))
    return len(received) >= end + 4 + int(received[start + len(LENGTH) : stop])


def _unanswered(stream: Stream, error: Exception) -> MeasurementError:
    return MeasurementError(
        f"A request to {stream.model} had no answer ({error!r}). Nothing is reported. Look at the server's log."
    )
