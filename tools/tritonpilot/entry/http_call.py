"""One HTTP request, from its head to its answer: what it asks, its ticket at the gate, Triton's answer on the way back.

call = Call(connection, front)        # filled while the request arrives
call.begin()                          # its turn: the connection gets an answer, by write() and done(), or deny()
call.caller_left()
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import orjson

from tritonpilot.entry import messages
from tritonpilot.entry.extras import MOST_ANSWER_BYTES, Answer, Asked, Content, Waiting
from tritonpilot.entry.gate import Refusal, Status, Ticket
from tritonpilot.entry.http_back import BackendConnection, Request
from tritonpilot.entry.messages import Denied
from tritonpilot.entry.resend import ONCE, PATIENCE_S, PAUSE_BROKEN_S, PAUSE_S, RETRY_HEADER, Again
from tritonpilot.entry.tenants import Tenant
from tritonpilot.entry.terms import ModelTerms

if TYPE_CHECKING:
    from tritonpilot.entry.http_front import Connection, HttpFront

_JOINED_BYTES = 128 * 1024  # smaller requests are copied into one piece, which one system call sends
_CONNECTION = re.compile(rb"\r\n(?:connection|keep-alive):[^\r\n]*", re.IGNORECASE)
_DEADLINE = messages.DEADLINE_HEADER.encode()
_CLASS = messages.CLASS_HEADER.encode()
_RETRY, _ONCE = RETRY_HEADER.encode(), ONCE.encode()
_TRACEPARENT, _TRACESTATE = messages.TRACEPARENT_HEADER.encode(), messages.TRACESTATE_HEADER.encode()
_NO_REGIONS = "Shared memory cannot be used where tenants share a Triton."
_REJECTIONS = (429, 503)
_JSON_SIZE = re.compile(rb"\r\ninference-header-content-length:[ \t]*(\d{1,18})[ \t]*\r\n", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_ANSWER_BINARY = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nInference-Header-Content-Length: %d\r\n"
    b"Content-Length: %d\r\n\r\n"
)
_INFLATED_BYTES = (
    4 * 2**20
)  # of a compressed body in one step, after which it is looked at what all requests have together
_DEFLATED_BYTES = 2**20
# Lists and objects of a request's JSON: Python's garbage collector looks at all of them again and again while they are made.
_MOST_CONTAINERS = 65_536
_FEW_BYTES = 2 * _MOST_CONTAINERS  # of JSON that cannot have so many


class Route:
    """A path, as Triton gets it."""

    __slots__ = ("get", "is_infer", "is_open", "model", "post", "post_binary", "version")

    def __init__(self, path: bytes, model: str, version: str = "", *, is_infer: bool, is_open: bool) -> None:
        self.model = model  # "" for paths of the server
        self.version = version  # "" for the one that Triton takes
        self.is_infer = is_infer
        self.is_open = is_open  # to callers without a key
        self.get = b"GET %b HTTP/1.1\r\nHost: triton\r\n\r\n" % path
        post = b"POST %b HTTP/1.1\r\nHost: triton\r\nContent-Type: " % path
        self.post = post + b"application/json\r\nContent-Length: %d\r\n\r\n"
        self.post_binary = (
            post + b"application/octet-stream\r\nInference-Header-Content-Length: %d\r\nContent-Length: %d\r\n\r\n"
        )


class Call:
    """Filled by its Connection; then a Receiver of http_back."""

    __slots__ = (
        "_again",
        "_asked",
        "_caller",
        "_dumps",
        "_front",
        "_has_begun",
        "_is_sent",
        "_json",
        "_parameters",
        "_request",
        "_second",
        "_seen",
        "_tail",
        "_ticket",
        "_timer",
        "_waiting",
        "authorizations",
        "awaits_continue",
        "body",
        "body_size",
        "body_until",
        "buffered_bytes",
        "connection",
        "denied",
        "encoding",
        "head_bytes",
        "headers",
        "is_chunked",
        "is_head_complete",
        "is_kept_alive",
        "is_old",
        "key",
        "keys",
        "method",
        "route",
        "target",
        "tenant",
        "wants_upgrade",
    )

    def __init__(self, caller: Connection, front: HttpFront) -> None:
        self._caller: Connection | None = caller
        self._front = front
        self.target = b""
        self.method = b""
        self.headers: dict[bytes, bytes] = {}
        self.keys: list[bytes] = []
        self.key: str | None = None
        self.authorizations: list[bytes] = []
        self.head_bytes = 0
        self.is_head_complete = False
        self.is_chunked = False
        self.awaits_continue = False
        self.wants_upgrade = False
        self.is_kept_alive = False
        self.is_old = False  # HTTP/1.0
        self.encoding = b""
        self.body: list[bytes | bytearray] = []
        self.body_size = 0
        self.body_until = 0.0
        self.buffered_bytes = 0
        self.denied: Denied | None = None
        self.route: Route | None = None
        self.tenant: Tenant | None = None
        self.connection: BackendConnection | None = None
        self._ticket: Ticket | None = None
        self._json: dict[str, Any] | None = None
        self._parameters: dict[str, Any] = {}
        self._tail: bytes | memoryview | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._dumps: Callable[[Any], bytes] = orjson.dumps
        self._is_sent = False  # towards Triton
        self._has_begun = False  # the caller has had a part of the answer
        self._asked: Asked | None = None  # until it has ended, where extras want to know
        self._seen: list[bytes] = []  # of the answer, for them
        self._waiting: tuple[Waiting, asyncio.TimerHandle | None] | None = None  # for the answer to another request
        self._second: Request | None = None  # to the model that was meant, should another that was asked fail
        self._request: Request | None = None  # to that model, until Triton has answered it
        self._again: Again | None = None  # what is known of it when it failed

    @property
    def is_plain(self) -> bool:
        """An inference whose head says all there is to its framing, and may come again: a trace context does not."""
        route = self.route
        return (
            route is not None
            and route.is_infer
            and self.denied is None
            and _TRACEPARENT not in self.headers
            and not (self.is_chunked or self.awaits_continue or self.wants_upgrade or self.encoding)
        )

    def begin(self) -> None:
        """It is this request's turn, and it is here completely, or denied."""
        if self.denied is not None:
            self._deny(self.denied)
            return
        assert self.route is not None
        if not self.route.is_infer:
            self._ask_directly()
            return
        terms = self._front.desk.terms(self.route.model)
        if terms is not None and not self.encoding:
            try:
                self._submit(terms)
            except Denied as denied:
                self._deny(denied)
            return
        task = asyncio.get_running_loop().create_task(self._prepare())
        self._front.tasks.add(task)
        task.add_done_callback(self._prepared)

    def caller_left(self) -> None:
        """The connection of the caller is gone."""
        self._caller = None
        if self._waiting is not None:
            self._stop_waiting()
        if self._asked is not None and not self._is_sent:
            self._end(False)
        ticket = self._ticket
        if ticket is not None:
            if not self._is_sent:
                self._ticket = None
            self._front.desk.gate.leave(ticket)
        self.resume()  # what comes is thrown away
        if self.connection is None:
            self._drop_body()

    def pause(self) -> None:
        """The caller does not take the answer as fast as it comes."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """He takes more."""
        if self.connection is not None:
            self.connection.resume()

    # -- http_back.Receiver --------------------------------------------------------------------------------------------

    @property
    def is_waited_for(self) -> bool:
        return self._caller is not None

    def stalled(self) -> None:
        if self._ticket is not None:
            self._front.desk.gate.stalled(self._ticket)

    def answered(self, status: int, data: bytes, head_size: int, is_last: bool) -> None:
        if self._second is not None:
            if status != 200:
                if is_last:
                    self._ask_again()
                return
            self._second = None
        if status == 500 and is_last and self._goes_again(data[head_size:]):
            return
        self._request = None
        # NOTE: before the caller has his answer, so that he finds its place in the window free.
        self._finish("ok" if status == 200 else "rejected" if status in _REJECTIONS else "error")
        caller = self._caller
        if caller is not None:
            if self.method == b"HEAD":
                data = data[:head_size]
            if not self.is_kept_alive or self._front.is_closing:
                self.is_kept_alive = False
                head = _CONNECTION.sub(b"", data[: head_size - 2])
                data = b"%bConnection: close\r\n\r\n%b" % (head, data[head_size:])
            self._has_begun = True
            caller.write(data)
        if is_last and caller is not None:
            self._caller = None
            caller.done(self)
        if self._asked is not None:
            self._collect(data, is_last) if status == 200 else self._end(False)

    def more(self, data: bytes, is_last: bool) -> None:
        if self._second is not None:  # the rest of an error
            if is_last:
                self._ask_again()
            return
        if self._asked is not None:
            self._collect(data, is_last)
        caller = self._caller
        if caller is None:
            return
        if self.method != b"HEAD":
            caller.write(data)
        if is_last:
            self._caller = None
            caller.done(self)

    def broke(self, reason: str) -> None:
        if self._second is not None:
            self._ask_again()
            return
        if self._goes_again(None):
            return
        self._request = None
        self._finish("unavailable")
        self._end(False)
        if self._caller is None:
            return
        if self._has_begun:
            self._caller.abandon()
        else:
            self._deny(messages.refused("broken", f"Triton did not answer: {reason}.", 1.0))

    # -- towards Triton ------------------------------------------------------------------------------------------------

    def _ask_directly(self) -> None:
        front, route = self._front, self.route
        assert route is not None
        self._drop_body()
        if front.direct_calls >= front.limits.direct_calls:
            self._deny(messages.refused("queue_full", "The entry has too many requests that are no inferences.", 1.0))
            return
        front.direct_calls += 1
        self._timer = asyncio.get_running_loop().call_later(front.limits.direct_s, self._too_late)
        front.backend.send(route.get, self)

    def _too_late(self) -> None:
        if self._caller is not None:
            self._deny(messages.refused("deadline", f"Triton did not answer within {self._front.limits.direct_s:g} s."))
        if self.connection is not None:
            self.connection.abort()

    async def _prepare(self) -> None:
        """What cannot be had at once: the terms of a model that is new here, a body without its compression."""
        assert self.route is not None
        try:
            terms = await self._front.desk.fetch_terms(self.route.model)
            if self.encoding and not self._is_refused(terms):
                await self._decompress()
            if self._caller is not None:
                self._submit(terms)
        except Denied as denied:
            if self._caller is not None:
                self._deny(denied)

    async def _decompress(self) -> None:
        """Step by step, in a thread, until the caller leaves. Raises Denied."""
        front, body = self._front, bytearray()
        steps = _decompressed(b"".join(self.body), self.encoding)
        self.body = []
        loop = asyncio.get_running_loop()
        while self._caller is not None:
            size = await loop.run_in_executor(None, _extend, body, steps)
            if self._caller is None:
                return
            if not size:
                self._hold(-self.body_size)  # the compressed one
                self.body, self.body_size = [body], len(body)
                return
            self._hold(size)
            if len(body) > front.limits.body_bytes:
                raise messages.refused(
                    "too_large", f"The request's body is larger than {front.limits.body_bytes} bytes when decompressed."
                )
            if front.buffered_bytes > front.limits.buffered_bytes:
                raise messages.refused("queue_full", messages.HELD_TOO_MUCH, 1.0)

    def _hold(self, size: int) -> None:
        self.buffered_bytes += size
        self._front.buffered_bytes += size

    def _is_refused(self, terms: ModelTerms) -> bool:
        """Whether the tenant may not ask now. Then it is answered. Raises Denied."""
        if self.tenant is None:
            return False
        desk = self._front.desk
        refusal = desk.gate.refuses_tenant(terms, desk.class_of(self.tenant, terms, None, None), self.tenant)
        if refusal is not None:
            self._refuse(None, refusal)
        return refusal is not None

    def _prepared(self, task: asyncio.Task[None]) -> None:
        self._front.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            message = "a request could not be prepared"
            task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})
            if self._caller is not None:
                self._deny(Denied(500, "INTERNAL", f"In the entry, {message}. Its log says more."))

    def _submit(self, terms: ModelTerms) -> None:
        """Raises Denied, except for what the gate refuses: that is answered here."""
        if self._is_refused(terms):
            return
        headers, desk, limits = self.headers, self._front.desk, self._front.limits
        body = self.body[0] if len(self.body) == 1 else b"".join(self.body)
        self.body = []
        json_size = headers.get(b"inference-header-content-length")
        if json_size is None:
            text: bytes | bytearray | memoryview = body
        else:
            size = _size_of(json_size, len(body))
            view = memoryview(body)
            text, self._tail = view[:size], view[size:]
        most = limits.json_bytes if self.tenant is None else min(limits.json_bytes, limits.json_bytes_of_tenant)
        if len(text) > most:
            raise messages.refused(
                "too_large",
                f"The request has {len(text)} bytes of JSON, more than {most}. "
                "Send its tensors in the binary form of KServe's extension.",
            )
        asked, self._dumps = _parsed(text, limits.lenient_json_bytes)
        parameters = asked.get("parameters")
        if parameters is None:
            parameters = asked["parameters"] = {}
        elif type(parameters) is not dict:
            raise messages.refused("bad_request", "The request's 'parameters' must be a JSON object.")
        priority = messages.priority_of(parameters.get(messages.PRIORITY_PARAMETER))
        budget_s = messages.timeout_s_of(parameters.get(messages.TIMEOUT_PARAMETER))
        named = None
        if _DEADLINE in headers:
            budget_s = messages.earlier(budget_s, messages.deadline_s_of(headers[_DEADLINE].decode("latin-1")))
        if _CLASS in headers:
            named = headers[_CLASS].decode("latin-1")
        _check_tensors(asked, len(text), len(body), is_shared=self.tenant is not None)
        class_name = desk.class_of(self.tenant, terms, named, priority)
        self._json, self._parameters = asked, parameters
        ticket = Ticket(
            terms,
            class_name,
            _rows_of(asked, terms.max_batch_size),
            self.tenant,
            None if budget_s is None else time.monotonic() + budget_s,
            self._start,
            self._refuse,
        )
        extras = desk.extras.of(terms.name)
        if extras is None:
            self._enter(ticket)
            return
        assert self.route is not None
        tenant = "" if self.tenant is None else self.tenant.name
        request_id = asked.get("id", "")
        self._asked = Asked(
            desk.extras,
            extras,
            terms,
            self.route.version,
            tenant,
            class_name,
            "http",
            request_id if type(request_id) is str else "",
            self._content,
        )
        self._look_before(ticket)

    def _enter(self, ticket: Ticket) -> None:
        self._ticket = ticket
        refusal = self._front.desk.gate.submit(ticket)
        if refusal is not None:
            self._refuse(ticket, refusal)

    # -- extras --------------------------------------------------------------------------------------------------------

    def _look_before(self, ticket: Ticket) -> None:
        """Take an answer that is there, or wait for one that comes, or go on."""
        assert self._asked is not None
        found = self._asked.before()
        if found is None:
            self._enter(ticket)
        elif isinstance(found, Answer):
            self._answer(found)
        else:
            timer = None
            if ticket.deadline_s is not None:
                left_s = max(0.0, ticket.deadline_s - time.monotonic())
                timer = asyncio.get_running_loop().call_later(left_s, self._wait_ends)
            self._waiting = found, timer
            found.then = lambda answer: self._waited(ticket, answer)

    def _waited(self, ticket: Ticket, answer: Answer | None) -> None:
        self._stop_waiting()
        if answer is None:
            self._look_before(ticket)
        else:
            self._answer(answer)

    def _wait_ends(self) -> None:
        self._stop_waiting()
        self._refuse(None, Refusal("deadline", messages.WAITED_TOO_LONG))

    def _stop_waiting(self) -> None:
        assert self._waiting is not None
        waiting, timer = self._waiting
        self._waiting = waiting.then = None
        if timer is not None:
            timer.cancel()

    def _answer(self, answer: Answer) -> None:
        """Instead of Triton."""
        self._asked = None
        self._drop_body()
        text, tail = answer
        head = _ANSWER_BINARY % (len(text), len(text) + len(tail)) if tail else _ANSWER % len(text)
        self.answered(200, b"".join((head, text, tail)), len(head), True)

    def _content(self) -> Content | None:
        """For extras, before it is sent."""
        asked, parameters = self._json, self._parameters
        if asked is None or not _is_whole(asked, parameters):
            return None
        plain = {name: value for name, value in parameters.items() if name not in messages.OWN_PARAMETERS}
        try:
            text = self._dumps({**{name: value for name, value in asked.items() if name != "id"}, "parameters": plain})
        except (RecursionError, orjson.JSONEncodeError):
            return None
        return Content(text, b"" if self._tail is None else self._tail)

    def _collect(self, data: bytes, is_last: bool) -> None:
        """A part of the answer, of which the caller has what has come before."""
        seen = self._seen
        seen.append(data)
        if sum(map(len, seen)) > MOST_ANSWER_BYTES:
            self._seen = []
            self._end(True)
        elif is_last:
            self._seen = []
            self._end(True, _answer_of(b"".join(seen)))

    def _end(self, is_ok: bool, answer: Answer | None = None) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            # NOTE: later, for the caller's answer is only written at the end of this turn of the loop.
            asyncio.get_running_loop().call_soon(asked.end, answer, is_ok)

    # -- towards Triton, again -----------------------------------------------------------------------------------------

    def _start(self, ticket: Ticket) -> None:
        route, parameters = self.route, self._parameters
        assert route is not None
        meant = route
        if self._asked is not None:
            target = self._asked.choose_target()
            if target != route.model:
                route = self._front.route(b"POST", f"/v2/models/{target}/infer".encode())
        if ticket.level > 0:
            parameters[messages.PRIORITY_PARAMETER] = ticket.level
        else:
            parameters.pop(messages.PRIORITY_PARAMETER, None)
        if ticket.timeout_us > 0:
            parameters[messages.TIMEOUT_PARAMETER] = ticket.timeout_us
        else:
            parameters.pop(messages.TIMEOUT_PARAMETER, None)
        if ticket.deadline_s is None:
            parameters.pop(messages.DEADLINE_PARAMETER, None)
        else:
            parameters[messages.DEADLINE_PARAMETER] = int(ticket.deadline_s * 1e9)
        self._is_sent = True
        try:
            text, tail = self._dumps(self._json), self._tail
        except (RecursionError, orjson.JSONEncodeError) as error:
            # NOTE: later, for the gate is not done with its start.
            asyncio.get_running_loop().call_soon(self._cannot_be_sent, str(error))
            return
        trace = self._trace_lines() if _TRACEPARENT in self.headers else b""
        if route is not meant:
            self._second = _request(meant, text, tail, trace)
        request = _request(route, text, tail, trace)
        self._request = self._second or request
        self._drop_body()
        self._front.backend.send(request, self, self._patience_s)

    def _ask_again(self) -> None:
        """The model that was meant, for the other one has failed: a candidate costs nobody his answer."""
        second, self._second = self._second, None
        assert second is not None
        if self._asked is not None:
            self._asked.falls_back()
        if self._caller is None:
            self._finish("error")
            self._end(False)
            return
        # NOTE: later, for the connection is not done with the answer yet.
        asyncio.get_running_loop().call_soon(self._front.backend.send, second, self)

    @property
    def _patience_s(self) -> float:
        """How long it waits for a Triton that is not there: where it has a deadline, the gate ends the wait."""
        return PATIENCE_S if self._ticket is None or self._ticket.deadline_s is None else math.inf

    def _goes_again(self, said: bytes | None) -> bool:
        """Send it again after Triton's error, or (None) after the connection broke; whether that is done."""
        request, now_s = self._request, time.monotonic()
        never_reached = False if said is None else self._front.deaths.never_reached(said, now_s)
        if (
            request is None
            or never_reached is None
            or self._caller is None
            or self._has_begun
            or self._front.is_closing
        ):
            return False
        if self._again is None:
            asks = self.headers.get(_RETRY, b"").strip().lower() == _ONCE
            self._again = Again(asks, self._patience_s == math.inf)
        if not self._again.may(never_reached, now_s):
            return False
        self.stalled()
        pause_s = PAUSE_BROKEN_S if said is None else PAUSE_S
        asyncio.get_running_loop().call_later(pause_s, self._front.backend.send, request, self, self._patience_s)
        return True

    def _trace_lines(self) -> bytes:
        traceparent, tracestate = (self.headers.get(name, b"") for name in (_TRACEPARENT, _TRACESTATE))
        context = messages.trace_context(traceparent.strip().decode("latin-1"), tracestate.decode("latin-1"))
        return "".join(f"{name}: {value}\r\n" for name, value in context.items()).encode("latin-1")

    def _cannot_be_sent(self, reason: str) -> None:
        self._finish("error")
        self._end(False)
        if self._caller is not None:
            self._deny(messages.refused("bad_request", f"The request's JSON cannot be passed on: {reason}."))

    def _refuse(self, _: Ticket | None, refusal: Refusal) -> None:
        self._end(False)
        if not self._is_sent:
            self._ticket = None
            self._drop_body()
        if self._caller is not None and not self._has_begun:
            self._reply(messages.refused(refusal.kind, refusal.message, refusal.retry_after_s))

    def _finish(self, status: Status) -> None:
        ticket = self._ticket
        if ticket is not None:
            self._ticket = None
            self._front.desk.gate.finished(ticket, status)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._front.direct_calls -= 1

    # -- towards the caller --------------------------------------------------------------------------------------------

    def _deny(self, denied: Denied) -> None:
        self._front.desk.on_denied(denied.http_status)
        self._drop_body()
        self._reply(denied)

    def _reply(self, denied: Denied) -> None:
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.deny(self, denied)

    def _drop_body(self) -> None:
        self._front.buffered_bytes -= self.buffered_bytes
        self.buffered_bytes = 0
        self.body = []
        self._json = self._tail = None


def _with_lines(head: bytes, lines: bytes) -> bytes:
    """A head with more lines, each of which ends with CRLF."""
    return b"%b%b\r\n" % (head[:-2], lines) if lines else head


def _size_of(text: bytes, body_size: int) -> int:
    digits = text.strip()
    size = int(digits) if digits.isdigit() and len(digits) < 19 else -1
    if not 0 < size <= body_size:
        raise messages.refused(
            "bad_request",
            f"Header 'inference-header-content-length' must be the size of the JSON part, from 1 to the body's {body_size} bytes. "
            "Requests without JSON are not taken.",
        )
    return size


def _parsed(
    text: bytes | bytearray | memoryview, most_lenient_bytes: int
) -> tuple[dict[str, Any], Callable[[Any], bytes]]:
    """The request's JSON, and what writes it again."""
    dumps: Callable[[Any], bytes] = orjson.dumps
    if len(text) > _FEW_BYTES:
        text = bytes(text)
        if text.count(b"[") + text.count(b"{") > _MOST_CONTAINERS:
            raise messages.refused(
                "bad_request",
                f"The request's JSON has more than {_MOST_CONTAINERS} lists and objects. Send tensors as flat lists, or in the "
                "binary form of KServe's extension.",
            )
    try:
        try:
            asked = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            if len(text) > most_lenient_bytes:
                raise messages.refused(
                    "bad_request",
                    f"The request's JSON cannot be read: {error}. In more than {most_lenient_bytes} bytes of JSON there must be no "
                    "NaN or Infinity: send such tensors in the binary form of KServe's extension.",
                ) from None
            # This one also takes NaN and Infinity, which Triton knows, and lone surrogates.
            asked, dumps = json.loads(bytes(text), parse_float=_finite), _dumps_all
    except (ValueError, RecursionError) as error:
        raise messages.refused("bad_request", f"The request's JSON cannot be read: {error}.") from None
    if type(asked) is not dict:
        raise messages.refused("bad_request", "The request's JSON must be an object.")
    return asked, dumps


def _finite(text: str) -> float:
    """A number as Triton reads it, which refuses what no double holds: json would make it Infinity."""
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is too big")
    return number


def _dumps_all(asked: object) -> bytes:
    return json.dumps(asked).encode()


def _rows_of(asked: dict[str, Any], max_batch_size: int) -> int:
    """Rows by the first input's shape; 1 for what Triton will not accept."""
    if max_batch_size > 0:
        try:
            rows = asked["inputs"][0]["shape"][0]
        except (KeyError, IndexError, TypeError):
            return 1
        if type(rows) is int and 0 < rows <= max_batch_size:
            return rows
    return 1


def _check_tensors(asked: dict[str, Any], json_size: int, body_size: int, *, is_shared: bool) -> None:
    """Raises Denied for what would hurt others.

    Triton 2.51 makes room for a JSON tensor by its `shape` before it looks at its `data`: a hundred bytes that state 10**11
    elements end the whole server. Each element takes a byte of the request: no honest tensor has more elements than bytes.
    Regions of shared memory belong to whoever registered them with Triton, which does not know tenants.
    """
    for what in ("inputs", "outputs"):
        tensors = asked.get(what)
        if type(tensors) is list and len(tensors) > messages.MAX_TENSORS:
            raise messages.refused("bad_request", f"The request has more than {messages.MAX_TENSORS} {what}.")
    inputs = asked.get("inputs")
    for tensor in inputs if type(inputs) is list else ():
        if type(tensor) is not dict:
            continue
        region = _region_of(tensor)
        if region is not None and is_shared:
            raise messages.refused("forbidden", _NO_REGIONS)
        has_data = "data" in tensor
        shape = tensor.get("shape")
        if type(shape) is not list or (region is not None and not has_data):
            continue
        if len(shape) > messages.MAX_DIMENSIONS:
            raise messages.refused(
                "bad_request", f"An input's shape has more than {messages.MAX_DIMENSIONS} dimensions."
            )
        elements = 1
        for dimension in shape:
            if type(dimension) is int:
                elements *= dimension
        if elements > (json_size if has_data else body_size):
            raise messages.refused(
                "bad_request",
                f"An input of {elements if elements < 10**18 else 'more than 10**18'} elements by its shape has more than the "
                "request has bytes.",
            )
    if is_shared:
        outputs = asked.get("outputs")
        for tensor in outputs if type(outputs) is list else ():
            if type(tensor) is dict and _region_of(tensor) is not None:
                raise messages.refused("forbidden", _NO_REGIONS)


def _request(route: Route, text: bytes, tail: bytes | memoryview | None, trace: bytes) -> Request:
    if tail is None:
        return _with_lines(route.post % len(text), trace) + text
    head = _with_lines(route.post_binary % (len(text), len(text) + len(tail)), trace)
    return b"".join((head, text, tail)) if len(tail) < _JOINED_BYTES else (head + text, tail)


def _is_whole(asked: dict[str, Any], parameters: dict[str, Any]) -> bool:
    """Whether all that is asked is in the request: no shared memory, no sequence."""
    if any(name in parameters for name in messages.SEQUENCE_PARAMETERS):
        return False
    for what in ("inputs", "outputs"):
        tensors = asked.get(what)
        if type(tensors) is list and any(type(each) is dict and _region_of(each) is not None for each in tensors):
            return False
    return True


def _answer_of(data: bytes) -> Answer:
    """The parts of a whole answer of Triton's."""
    head_size = data.find(b"\r\n\r\n") + 4
    size = _JSON_SIZE.search(data, 0, head_size)
    if size is None:
        return Answer(data[head_size:])
    text_end = head_size + int(size[1])
    return Answer(data[head_size:text_end], data[text_end:])


def _region_of(tensor: dict[str, Any]) -> object:
    parameters = tensor.get("parameters")
    return parameters.get("shared_memory_region") if type(parameters) is dict else None


def _decompressed(body: bytes, encoding: bytes) -> Iterator[bytes]:
    """The body's data in pieces. Raises Denied."""
    bits = 31
    if encoding == b"deflate":  # which is zlib's format, but some send it bare
        bits = 15 if len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2], "big") % 31 == 0 else -15
    stream = zlib.decompressobj(bits)
    rest = memoryview(body)
    piece: bytes | memoryview = b""
    try:
        while not stream.eof:
            piece = stream.unconsumed_tail
            if not piece:
                piece, rest = rest[:_DEFLATED_BYTES], rest[_DEFLATED_BYTES:]
            data = stream.decompress(piece, _INFLATED_BYTES)
            if data:
                yield data
            elif not piece:
                break
    except zlib.error:
        pass
    if not stream.eof or stream.unused_data or rest:
        raise messages.refused("bad_request", f"The request's body is not {encoding.decode()}, or is not complete.")


def _extend(body: bytearray, pieces: Iterator[bytes]) -> int:
    """Add the next piece and return its size, 0 at the end."""
    piece = next(pieces, b"")
    body += piece
    return len(piece)
