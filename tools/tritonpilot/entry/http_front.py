"""The entry's HTTP side: KServe v2 as Triton speaks it, for callers that are not trusted.

    front = HttpFront(desk, "127.0.0.1:8000")
    port = await front.start("127.0.0.1", 8100)
    await front.close(grace_s=10)

Inference goes through the gate, health, metadata and (without tenants) configs directly to Triton, everything else is refused.
Nothing that a caller sends reaches Triton as it is, except tensors: heads are written anew, the JSON is parsed and written again.
"""

from __future__ import annotations

import asyncio
import errno
import re
import time
from collections import deque
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import NamedTuple, cast

import httptools

from tritonpilot.entry import messages
from tritonpilot.entry.desk import Desk
from tritonpilot.entry.http_back import Backend
from tritonpilot.entry.http_call import Call, Route
from tritonpilot.entry.messages import Denied
from tritonpilot.entry.resend import RETRY_HEADER, Deaths
from tritonpilot.ports import port_taken

MIB = 1 << 20
_READ_ANYWAY_BYTES = (
    64 * 1024
)  # a refused request's body is read if it is this small, so that the connection stays usable
_LINGER_S = 2.0  # what a refused caller still sends is read for so long, or he would not see the answer
_UNSENT_BYTES = 512 * 1024  # of an answer, from where on Triton's connection is not read
_MOST_ROUTES = _MOST_HEADS = 1024
_MOST_HEAD_BYTES = 2048
_BLANK_LINE = b"\r\n\r\n"
_CHUNK_OVERHEAD = 16  # bytes of framing for each byte of a chunked body, at most
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_OVERLOADED = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
_ABSOLUTE = re.compile(rb"[Hh][Tt][Tt][Pp][Ss]?://[^/?#]+")  # before the path, as proxies send it (RFC 9112 3.2.2)
_PATH = re.compile(rb"/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/(infer|ready|config))?/?")
# Paths of a model without more, to which Triton 2.51 gives a meaning of its own: the statistics of all models.
_TAKEN = frozenset([b"/v2/models/stats"])
_SERVER_PATHS = {
    b"/v2/health/live": True,
    b"/v2/health/ready": True,
    b"/v2": False,
    b"/v2/": False,
}  # path: is open to all
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
# Headers that are read; another one of the same name could be the one that a proxy in front has looked at.
_SINGLE = frozenset(
    [
        b"content-length",
        b"content-encoding",
        b"expect",
        b"inference-header-content-length",
        messages.CLASS_HEADER.encode(),
        messages.DEADLINE_HEADER.encode(),
        RETRY_HEADER.encode(),
    ]
)
_KEY = messages.KEY_HEADER.encode()
_AUTHORIZATION = messages.AUTHORIZATION_HEADER.encode()
_TRACE = frozenset([messages.TRACEPARENT_HEADER.encode(), messages.TRACESTATE_HEADER.encode()])
_READ = _SINGLE | _TRACE | {_KEY, _AUTHORIZATION, b"transfer-encoding"}


@dataclass(frozen=True)
class Limits:
    """What one caller, or all together, may take."""

    header_bytes: int = 16 * 1024
    body_bytes: int = 64 * MIB  # as sent, and after decompression
    json_bytes: int = messages.MAX_PARSED_BYTES  # without tenants: tensors belong into the binary part
    json_bytes_of_tenant: int = messages.MAX_PARSED_BYTES_OF_TENANT
    lenient_json_bytes: int = 256 * 1024  # with NaN and Infinity, of which parsing takes 20 times as long
    buffered_bytes: int = (
        messages.MAX_HELD_BYTES
    )  # bodies of all requests that wait or are still arriving, decompressed
    connections: int = 4096
    idle_s: float = 75.0  # between two requests
    head_s: float = 10.0  # from the first byte of a request to the end of its head
    body_s: float = 10.0  # from there on, plus the time that its bytes need at body_rate_bytes_per_s
    body_rate_bytes_per_s: float = 64 * 1024.0
    write_s: float = 30.0  # without any byte of the answer being taken
    direct_s: float = 10.0  # answers of Triton that do not go through the gate
    direct_calls: int = 64  # at a time


class KnownHead(NamedTuple):
    """What the parser made of a head; identical bytes mean the same again. Who calls is asked each time."""

    route: Route
    headers: dict[bytes, bytes]
    key: str | None
    body_size: int


class HttpFront:
    """Listens for callers. `triton` is host:port of Triton's HTTP service."""

    def __init__(
        self, desk: Desk, triton: str, *, max_request_bytes: int | None = None, limits: Limits | None = None
    ) -> None:
        host, _, port = triton.rpartition(":")
        self.desk = desk
        self.limits = limits or Limits()
        if max_request_bytes is not None:
            self.limits = replace(self.limits, body_bytes=max_request_bytes)
        self.backend = Backend(host.strip("[]"), int(port))
        self.deaths = Deaths()
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.buffered_bytes = 0
        self.direct_calls = 0
        self.is_closing = False
        self.heads: dict[bytes, KnownHead] = {}
        self._routes: dict[bytes, Route] = {}
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, a free one for 0. Raises PortError when it is taken."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Connection(self), host, port, backlog=1024)
        except OSError as failed:
            if failed.errno == errno.EADDRINUSE:
                raise port_taken(port) from None
            raise
        self._look_at_times()
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self, grace_s: float) -> None:
        """Accept nothing new, give requests inside `grace_s` to be answered, then end all connections."""
        self.is_closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_when_idle()
        until = time.monotonic() + grace_s
        while self.connections and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for connection in list(self.connections):
            connection.abort()
        if self._sweep is not None:
            self._sweep.cancel()
        for task in self.tasks:
            task.cancel()
        self.backend.close()

    def route(self, method: bytes, target: bytes) -> Route:
        """Where a request goes. Raises Denied 404 or 405."""
        route = self._routes.get(target)
        if route is None:
            route = self._find_route(target)
            if len(self._routes) >= _MOST_ROUTES:
                self._routes.clear()
            self._routes[target] = route
        if method != b"POST" if route.is_infer else method not in (b"GET", b"HEAD"):
            allowed = "POST" if route.is_infer else "GET, HEAD"
            raise messages.refused("method", f"This path takes {allowed}, not {method.decode('latin-1')}.")
        return route

    def _find_route(self, target: bytes) -> Route:
        absolute = _ABSOLUTE.match(target)
        path = target[absolute.end() if absolute else 0 :].partition(b"?")[0]
        if path in _SERVER_PATHS:
            return Route(path.rstrip(b"/"), "", is_infer=False, is_open=_SERVER_PATHS[path])
        found = _PATH.fullmatch(path)
        what = found[3] if found else None
        if found is None or (what == b"config" and self.desk.tenants is not None):
            raise _no_such_path()
        model = messages.model_name(found[1])
        version = messages.model_version((found[2] or b"").decode("latin-1"))
        trailing = [b"versions", version.encode()] if version else []
        trailing += [what] if what else []
        forwarded = b"/".join([b"/v2/models", model.encode(), *trailing])
        if forwarded in _TAKEN:
            raise _no_such_path()
        return Route(forwarded, model, version, is_infer=what == b"infer", is_open=False)

    def _look_at_times(self) -> None:
        now = time.monotonic()
        for connection in [one for one in self.connections if one.until < now]:
            connection.expire()
        limits = self.limits
        every_s = min(1.0, limits.idle_s / 4, limits.head_s / 4, limits.body_s / 4, limits.write_s / 4)
        self._sweep = asyncio.get_running_loop().call_later(every_s, self._look_at_times)


def _no_such_path() -> Denied:
    return messages.refused("unknown_path", "The entry has no such path. It serves inference, health and metadata.")


class _Stop(Exception):  # noqa: N818
    """Nothing more of this connection is parsed."""


class Connection(asyncio.Protocol):
    """One connection of a caller: its requests are answered one after the other, in their order."""

    __slots__ = (
        "_awaits_continue",
        "_current",
        "_front",
        "_is_advancing",
        "_is_ending",
        "_is_lingering",
        "_is_paused",
        "_limits",
        "_parser",
        "_queue",
        "_raw_bytes",
        "_reading",
        "_transport",
        "_whole",
        "until",
    )

    def __init__(self, front: HttpFront) -> None:
        self._front = front
        self._limits = front.limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._reading: Call | None = None  # its head or body is still arriving
        self._queue: deque[Call] = deque()  # complete, but not their turn
        self._current: Call | None = None
        self._raw_bytes = 0  # of the message that is being read; -1: another one has ended in the same data
        self._awaits_continue = False
        self._is_advancing = False
        self._is_ending = False  # nothing more is read, the connection ends with the answers that are due
        self._is_lingering = False  # all is said; what still comes is thrown away
        self._is_paused = False
        self._whole = b""  # the data that is being parsed, when a message begins with it
        self.until = 0.0  # time.monotonic() when expire() is called

    # -- for HttpFront -------------------------------------------------------------------------------------------------

    def close_when_idle(self) -> None:
        """End after the answer to the request that is inside."""
        if self._current is None and self._reading is None:
            self._close()

    def abort(self) -> None:
        """End now."""
        if self._transport is not None:
            self._transport.abort()

    def expire(self) -> None:
        """`until` has passed."""
        reading = self._reading
        if reading is None or self._is_lingering or self._current is not None:
            self.abort()
            return
        part = "body" if reading.is_head_complete else "head"
        self._deny_and_end(reading, messages.refused("slow", f"The {part} of the request did not arrive in time."))

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        front = self._front
        front.connections.add(self)
        self._transport.set_write_buffer_limits(high=_UNSENT_BYTES)
        self.until = time.monotonic() + self._limits.head_s
        if front.is_closing or len(front.connections) > self._limits.connections:
            self._transport.write(_OVERLOADED)
            self._is_ending = True
            self._close()

    def data_received(self, data: bytes) -> None:
        if self._is_ending:
            return
        if self._raw_bytes < 0:
            self._raw_bytes = 0
        self._whole = b""
        if self._reading is None and self._current is None and not self._queue:
            head_size = data.find(_BLANK_LINE) + 4
            known = self._front.heads.get(data[:head_size])
            if known is not None and len(data) == head_size + known.body_size:
                self._take_known(known, data[head_size:])
                return
            self._whole = data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._go_on_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Stop):
                raise
            return
        except httptools.HttpParserError as error:
            self._deny_and_end(
                self._reading or Call(self, self._front),
                messages.refused("bad_request", f"This is no HTTP/1.1 request: {error}."),
            )
            return
        reading = self._reading
        if reading is not None:
            # Behind the end of another message in the same data its share is not known, and left out.
            self._raw_bytes = 0 if self._raw_bytes < 0 else self._raw_bytes + len(data)
            self._check_arriving(reading)
        if self._current is not None and (reading is not None or self._queue) and not self._is_paused:
            # NOTE: only now, for as long as it is not paused the end of the connection is noticed at once.
            self._is_paused = True
            cast(asyncio.Transport, self._transport).pause_reading()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        self._front.connections.discard(self)
        self._is_ending = True
        for call in (self._current, self._reading, *self._queue):
            if call is not None:
                call.caller_left()
        self._current = self._reading = None
        self._queue.clear()

    def pause_writing(self) -> None:
        self.until = time.monotonic() + self._limits.write_s
        if self._current is not None:
            self._current.pause()

    def resume_writing(self) -> None:
        if self._current is not None:
            self.until = float("inf")
            self._current.resume()
        elif not self._is_lingering:
            self.until = time.monotonic() + self._limits.idle_s

    # -- httptools -----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._reading is None:  # else the request goes on that wanted an upgrade
            self._reading = Call(self, self._front)
            if self._current is None:
                self.until = time.monotonic() + self._limits.head_s

    def on_url(self, part: bytes) -> None:
        reading = cast(Call, self._reading)
        if not reading.is_head_complete:
            reading.target += part
            reading.head_bytes += len(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        reading = cast(Call, self._reading)
        if reading.is_head_complete:
            return  # a trailer
        reading.head_bytes += len(name) + len(value) + 4
        name = name.lower()
        if name not in _READ:
            return
        if name in _SINGLE:
            if name in reading.headers:
                reading.denied = messages.refused("bad_request", f"Header {name.decode()!r} is there twice.")
            reading.headers[name] = value
        elif name == _KEY:
            reading.keys.append(value)
        elif name == _AUTHORIZATION:
            reading.authorizations.append(value)
        elif name in _TRACE:
            known = reading.headers.get(name)
            reading.headers[name] = value if known is None else known + b"," + value
        else:  # transfer-encoding
            reading.is_chunked = True
            if value.strip().lower() != b"chunked":
                reading.denied = messages.refused("encoding", "The only Transfer-Encoding is chunked.")

    def on_headers_complete(self) -> None:
        reading = cast(Call, self._reading)
        if reading.is_head_complete:
            return
        reading.is_head_complete = True
        if reading.head_bytes > self._limits.header_bytes:
            reading.denied = self._head_too_large()
            self._stop_with(reading)
        try:
            self._admit(reading)
        except Denied as denied:
            reading.denied = denied
            expected = reading.headers.get(b"content-length", b"0")
            if reading.is_chunked or b"expect" in reading.headers or int(expected) > _READ_ANYWAY_BYTES:
                self._stop_with(reading)
        if reading.awaits_continue:
            self._awaits_continue = True
            self._continue()

    def on_body(self, part: bytes) -> None:
        reading = cast(Call, self._reading)
        self._awaits_continue = False  # it has begun without
        if reading.denied is not None:
            return
        size = len(part)
        reading.body_size += size
        reading.body.append(part)
        front = self._front
        front.buffered_bytes += size
        reading.buffered_bytes += size
        if reading.body_size > self._limits.body_bytes:
            reading.denied = self._body_too_large()
            self._stop_with(reading)
        if front.buffered_bytes > self._limits.buffered_bytes:
            reading.denied = messages.refused("queue_full", messages.HELD_TOO_MUCH, 1.0)
            self._stop_with(reading)

    def on_message_complete(self) -> None:
        reading = cast(Call, self._reading)
        if reading.wants_upgrade:
            return
        if self._parser.should_upgrade():  # to what the entry does not speak: it goes on in HTTP/1.1
            reading.wants_upgrade = True
            return
        self._complete(reading, self._parser.should_keep_alive() and not self._front.is_closing)
        if self._whole and reading.is_plain and reading.is_kept_alive:
            self._remember(reading)

    # -- reading -------------------------------------------------------------------------------------------------------

    def _admit(self, call: Call) -> None:
        """Everything that can be said before the body is there. Raises Denied."""
        method = call.method = self._parser.get_method()
        version = self._parser.get_http_version()
        if version != "1.1":
            call.is_old = True
            if version != "1.0":
                raise messages.refused("bad_request", f"The entry speaks HTTP/1.1, not HTTP/{version}.")
        if call.denied is not None:
            raise call.denied
        front = self._front
        route = call.route = front.route(method, call.target)
        headers = call.headers
        if not route.is_open:
            keys = [key.decode("latin-1") for key in call.keys]
            authorizations = [value.decode("latin-1") for value in call.authorizations] if call.authorizations else ()
            call.key = messages.api_key(keys, authorizations)
            self._identify(call, route)
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._limits.body_bytes:
            raise self._body_too_large()
        if b"content-encoding" in headers:
            call.encoding = headers[b"content-encoding"].strip().lower()
            if call.encoding == b"identity":
                call.encoding = b""
            elif call.encoding not in (b"gzip", b"deflate"):
                raise messages.refused("encoding", "The entry knows the Content-Encodings gzip, deflate and identity.")
        if b"expect" in headers:
            if headers[b"expect"].strip().lower() != b"100-continue":
                raise Denied(417, "UNIMPLEMENTED", "The only Expect that is met is 100-continue.")
            call.awaits_continue = not call.is_old

    def _identify(self, call: Call, route: Route) -> None:
        tenant = call.tenant = self._front.desk.identify(call.key)
        if tenant is not None and route.model and not tenant.may_use(route.model):
            raise messages.refused("forbidden", f"Tenant {tenant.name!r} may not use model {route.model!r}.")

    def _remember(self, call: Call) -> None:
        """A caller's next request mostly has the same head, byte by byte, and need not be parsed again."""
        heads, head_size = self._front.heads, len(self._whole) - call.body_size
        if head_size <= _MOST_HEAD_BYTES and self._whole.find(_BLANK_LINE) + 4 == head_size:
            if len(heads) >= _MOST_HEADS:
                heads.clear()
            assert call.route is not None
            heads[self._whole[:head_size]] = KnownHead(call.route, call.headers, call.key, call.body_size)

    def _take_known(self, known: KnownHead, body: bytes) -> None:
        call = Call(self, self._front)
        call.method, call.route, call.headers, call.key = b"POST", known.route, known.headers, known.key
        call.is_head_complete = True
        call.body.append(body)
        call.body_size = call.buffered_bytes = len(body)
        self._front.buffered_bytes += len(body)
        try:
            self._identify(call, known.route)
            if self._front.buffered_bytes > self._limits.buffered_bytes:
                raise messages.refused("queue_full", messages.HELD_TOO_MUCH, 1.0)
        except Denied as denied:
            call.denied = denied
        self._complete(call, not self._front.is_closing)

    def _check_arriving(self, call: Call) -> None:
        """Limits of what has arrived and is not yet complete."""
        if not call.is_head_complete:
            if self._raw_bytes > self._limits.header_bytes:
                self._deny_and_end(call, self._head_too_large())
            return
        if call.is_chunked and self._raw_bytes > _READ_ANYWAY_BYTES + _CHUNK_OVERHEAD * call.body_size:
            self._deny_and_end(call, self._head_too_large())
        elif self._current is None:
            if not call.body_until:
                call.body_until = time.monotonic() + self._limits.body_s
            self.until = call.body_until + call.body_size / self._limits.body_rate_bytes_per_s

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        """Java's client, for one, asks for h2c with each first request: read its body, and what follows, with a new parser."""
        reading = self._reading
        if reading is None or reading.method == b"CONNECT":
            self._deny_and_end(
                reading or Call(self, self._front), messages.refused("method", "The entry is no tunnel for CONNECT.")
            )
            return
        self._parser = httptools.HttpRequestParser(self)
        framing = b"Transfer-Encoding: chunked\r\n" if reading.is_chunked else b""
        if b"content-length" in reading.headers:
            framing = b"Content-Length: %d\r\n" % int(reading.headers[b"content-length"])
        reading.wants_upgrade = False
        self.data_received(b"%b / HTTP/1.1\r\n%b\r\n%b" % (reading.method, framing, rest))

    def _stop_with(self, call: Call) -> None:
        """In a callback of the parser: `call` is denied and the last."""
        self._is_ending = True
        self._complete(call, False)
        raise _Stop

    def _deny_and_end(self, call: Call, denied: Denied) -> None:
        call.denied = denied
        self._is_ending = True
        self._complete(call, False)

    def _complete(self, call: Call, is_kept_alive: bool) -> None:
        self._reading = None
        self._raw_bytes = -1
        self._awaits_continue = False
        call.is_kept_alive = is_kept_alive and not call.is_old
        if self._current is None and not self._queue:
            self._current = call
            self.until = float("inf")
            call.begin()
        else:
            self._queue.append(call)
            self._advance()

    def _continue(self) -> None:
        if self._awaits_continue and self._current is None and not self._queue:
            self._awaits_continue = False
            cast(asyncio.Transport, self._transport).write(_CONTINUE)

    def _head_too_large(self) -> Denied:
        limit = self._limits.header_bytes
        return messages.refused("headers_too_large", f"The request's head is larger than {limit} bytes.")

    def _body_too_large(self) -> Denied:
        limit = self._limits.body_bytes
        return messages.refused("too_large", f"The request's body is larger than {limit} bytes.")

    # -- answering: for Call -------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """A part of the answer to the current request."""
        cast(asyncio.Transport, self._transport).write(data)

    def deny(self, call: Call, denied: Denied) -> None:
        """The whole answer to the current request."""
        body = messages.error_body(denied.message)
        if self._front.is_closing:
            call.is_kept_alive = False
        lines = [
            b"HTTP/1.1 %d %b" % (denied.http_status, _REASONS[denied.http_status]),
            b"Content-Type: application/json",
            b"Content-Length: %d" % len(body),
        ]
        if denied.http_status == 401:
            lines.append(b"WWW-Authenticate: Bearer")
        elif denied.http_status == 405:
            lines.append(b"Allow: POST" if call.target and self._is_infer(call.target) else b"Allow: GET, HEAD")
        if denied.retry_after_s > 0:
            lines.append(b"Retry-After: %d\r\nretry-after-ms: %d" % messages.retry_after(denied.retry_after_s))
        if not call.is_kept_alive:
            lines.append(b"Connection: close")
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        self.write(head if call.method == b"HEAD" else head + body)
        self.done(call)

    def done(self, call: Call) -> None:
        """The answer to the current request is complete."""
        self._current = None
        if not call.is_kept_alive:
            self._close()
            return
        if self._queue:
            self._advance()
        else:
            self._rest()

    def abandon(self) -> None:
        """An answer that has begun cannot be completed."""
        self.abort()

    def _advance(self) -> None:
        if self._is_advancing:
            return
        self._is_advancing = True  # calls may be answered within begin(): a loop, no recursion
        while self._queue and self._current is None:
            call = self._current = self._queue.popleft()
            self.until = float("inf")
            call.begin()
        self._is_advancing = False
        if self._current is None and not self._is_lingering:
            self._rest()

    def _rest(self) -> None:
        """No request waits for an answer."""
        limits = self._limits
        self.until = time.monotonic() + (limits.idle_s if self._reading is None else limits.head_s)
        if self._awaits_continue:
            self._continue()
        if self._front.is_closing and self._reading is None:
            self._close()
        elif self._is_paused and not self._is_ending:
            self._is_paused = False
            cast(asyncio.Transport, self._transport).resume_reading()

    def _close(self) -> None:
        """All is said. What the caller still sends is read for a moment, or a reset would take the answer from him."""
        transport = cast(asyncio.Transport, self._transport)
        while self._queue:
            self._queue.popleft().caller_left()
        was_ending, self._is_ending = self._is_ending, True
        if not was_ending or self._is_lingering or transport.is_closing():
            transport.close()
            return
        self._is_lingering = True
        self.until = time.monotonic() + _LINGER_S
        transport.write_eof()
        if self._is_paused:
            self._is_paused = False
            transport.resume_reading()

    def _is_infer(self, target: bytes) -> bool:
        return target.partition(b"?")[0].rstrip(b"/").endswith(b"/infer")
