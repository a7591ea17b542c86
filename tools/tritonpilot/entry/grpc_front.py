"""How do callers reach the entry over gRPC? The inference service of KServe v2, as Triton serves it, behind the gate.

    front = GrpcFront(desk, "127.0.0.1:8001")        # Triton's gRPC port
    port = await front.start("0.0.0.0", 8101)
    await front.close(grace_s=10)

ModelInfer goes through the gate; health, metadata and, without tenants, a model's config are passed on as they are. An answer of
Triton's is never parsed: its bytes go to the caller.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from tritonpilot.entry import messages
from tritonpilot.entry.extras import MOST_ANSWER_BYTES, Answer, Asked, Content
from tritonpilot.entry.gate import Refusal, Status, Ticket
from tritonpilot.entry.grpc_scan import SMALL_BYTES, check_sizes, scan
from tritonpilot.entry.messages import Denied
from tritonpilot.entry.resend import ONCE, PAUSE_S, RETRY_HEADER, Again, Deaths
from tritonpilot.entry.terms import ModelTerms
from tritonpilot.errors import PortError
from tritonpilot.ports import port_taken

if TYPE_CHECKING:
    from tritonpilot.entry.desk import Desk
    from tritonpilot.entry.tenants import Tenant

SERVICE = "inference.GRPCInferenceService"
MAX_REQUEST_BYTES = 64 * 2**20
MAX_CALLS = 4096  # at a time
PASS_TIMEOUT_S = 10.0  # health and metadata take Triton microseconds
LONGEST_S = messages.MAX_DEADLINE_MS / 1000  # a later deadline is none; its nanoseconds might not fit into 64 bits
# A native deadline ends the call at both ends at the same moment: a cancellation so shortly before it is the deadline's.
_DEADLINE_SLACK_S = 0.02
# Triton 2.51 keeps 32 bits of a batch size, and its byte sizes overflow: shape [2^62, 1] passes its checks.
MAX_ELEMENTS = 2**31 - 1
LONGEST_NAME_BYTES = 255  # a model's name is that of its folder
REJECTIONS = ("Exceeds maximum queue size", "Request timeout expired")  # of Triton's queues, in its words
_REGION = "shared_memory_region"
_UNSET = "a value of no known kind"

#: Callers may ping an idle connection every 10 s; one that does not answer within 20 s of a ping is given up.
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second entry on the same port is a mistake, not a share of the callers
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", 1024),  # of a connection
)
#: Triton 2.51 takes pings 5 minutes apart at most. Its return is noticed within a second.
BACKEND_OPTIONS = (
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.use_local_subchannel_pool", 1),  # each channel has a connection of its own
)

Parameters = Any  # the map of InferParameter of a ModelInferRequest: tritonclient ships no types
Context = Any  # grpc.aio.ServicerContext: grpcio ships no types
_Answer = Callable[[bytes, Context], Awaitable[bytes]]


class GrpcFront:
    """The gRPC server of the entry, in the event loop that calls `start`.

    `backend` is Triton's gRPC port as "host:port". Requests, and answers, of more than `max_request_bytes` are refused.
    All requests inside together have at most `max_held_bytes`, and there are at most `max_calls`. `channels` is the number of
    connections to Triton.
    """

    def __init__(
        self,
        desk: Desk,
        backend: str,
        *,
        max_request_bytes: int = MAX_REQUEST_BYTES,
        max_held_bytes: int = messages.MAX_HELD_BYTES,
        max_calls: int = MAX_CALLS,
        channels: int = 1,
    ) -> None:
        self.held_bytes = 0
        """Of inference requests that Triton has not answered, and of what was parsed of them: each counts twice."""
        self._desk = desk
        self._backend = backend
        self._max_request_bytes = max_request_bytes
        self._max_held_bytes = max_held_bytes
        self._max_calls = max_calls
        self._channel_count = channels
        self._channels: list[Any] = []
        self._infers: list[Any] = []
        self._next = 0
        self._server: Any = None
        self._deaths = Deaths()
        self._is_closing = False

    async def start(self, host: str, port: int) -> int:
        """Listen on `host` and `port` (0: a free one) and return the port. Raises PortError when it is taken."""
        limit = ("grpc.max_receive_message_length", self._max_request_bytes)
        server = grpc.aio.server(options=[*SERVER_OPTIONS, limit], maximum_concurrent_rpcs=self._max_calls)
        try:
            bound: int = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except RuntimeError:
            raise port_taken(port) from None
        if not bound:
            raise PortError(f"gRPC cannot listen at {host}:{port}. Nothing was started. Give another address or port.")
        for number in range(self._channel_count):
            # Channels with equal options share their connection: the number makes them differ.
            options = [*BACKEND_OPTIONS, limit, ("tritonpilot.channel", number)]
            self._channels.append(grpc.aio.insecure_channel(self._backend, options=options))
        self._infers = [_method(channel, "ModelInfer") for channel in self._channels]
        server.add_generic_rpc_handlers((_Service(self._answers()),))
        await server.start()
        self._server = server
        return bound

    async def close(self, grace_s: float) -> None:
        """Take no more calls, give those under way `grace_s` to end, and end the others."""
        self._is_closing = True
        if self._server is not None:
            await self._server.stop(grace_s)
        for channel in self._channels:
            await channel.close()

    # -- what is passed on ---------------------------------------------------------------------------------------------

    def _answers(self) -> dict[str, _Answer]:
        return {
            "ModelInfer": self._infer,
            "ServerLive": self._passing("ServerLive"),
            "ServerReady": self._passing("ServerReady"),
            "ServerMetadata": self._passing("ServerMetadata"),
            "ModelReady": self._passing("ModelReady", service_pb2.ModelReadyRequest),
            "ModelMetadata": self._passing("ModelMetadata", service_pb2.ModelMetadataRequest),
            "ModelConfig": self._passing("ModelConfig", service_pb2.ModelConfigRequest),
        }

    def _passing(self, method: str, request_type: Any = None) -> _Answer:
        """Pass a call on; one about a model (with `request_type`) only to callers who may use that model."""

        async def answer(message: bytes, context: Context) -> bytes:
            if request_type is not None:
                try:
                    self._check_may_ask(method, _parsed(request_type, message), context)
                except Denied as denied:
                    await self._deny(context, denied)
            try:
                timeout_s = messages.earlier(PASS_TIMEOUT_S, context.time_remaining())
                passed: bytes = await _method(self._channels[0], method)(message, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                await _abort(context, _said(error))
            return passed

        return answer

    def _check_may_ask(self, method: str, request: Any, context: Context) -> None:
        if method == "ModelConfig" and self._desk.tenants is not None:
            raise messages.refused(
                "unknown_path", "The configs of models are not shown to tenants. Ask for ModelMetadata."
            )
        tenant = self._desk.identify(_Asked(context).key())
        _check_model(tenant, _model_name(request.name))

    # -- inference -----------------------------------------------------------------------------------------------------

    async def _infer(self, message: bytes, context: Context) -> bytes:
        flight = _Flight(self._send)
        try:
            return await self._answer(message, context, flight)
        finally:
            if not flight.is_started:
                flight.end(False)
                self._let_go(flight)

    async def _answer(self, message: bytes, context: Context, flight: _Flight) -> bytes:
        try:
            ticket = await self._asked(message, context, flight)
        except Denied as denied:
            await self._deny(context, denied)
        if flight.asked is not None and isinstance(ticket, Ticket):
            found = await _looked_before(flight.asked, ticket)
            if isinstance(found, Answer):
                flight.asked = None
                return found.text
            if found is not None:
                await _abort(context, found)
        refusal = ticket if isinstance(ticket, Refusal) else self._desk.gate.submit(ticket)
        try:
            answer = _refused(refusal) if refusal is not None else await flight.answer
        except asyncio.CancelledError:
            # By the caller, or by gRPC at the native deadline: the gate's own timer counts that one.
            assert isinstance(ticket, Ticket)
            if ticket.deadline_s is None or ticket.deadline_s - time.monotonic() > _DEADLINE_SLACK_S:
                self._desk.gate.leave(ticket)
            raise
        if isinstance(answer, Denied):
            await _abort(context, answer)
        return answer

    async def _asked(self, message: bytes, context: Context, flight: _Flight) -> Ticket | Refusal:
        """What is asked for, and on whose terms; a refusal for who may not ask now. Raises Denied.

        A large message is parsed last: a few bytes can be millions of objects, and others wait meanwhile.
        """
        now_s = time.monotonic()
        asked = _Asked(context)
        tenant = self._desk.identify(asked.key())
        flight.held_bytes = 2 * len(message)
        self.held_bytes += flight.held_bytes
        if self.held_bytes > self._max_held_bytes:
            raise messages.refused("queue_full", messages.HELD_TOO_MUCH, 1.0)
        request = None
        if len(message) <= SMALL_BYTES:
            request = _parsed(service_pb2.ModelInferRequest, message)
            check_sizes(request)
            name = _model_name(request.model_name)
        else:
            name = _model_name(scan(message, _most_parsed_bytes(tenant)))
        _check_model(tenant, name)
        terms = self._desk.terms(name) or await self._desk.fetch_terms(name)
        if tenant is not None:
            class_name = self._desk.class_of(tenant, terms, None, None)
            refusal = self._desk.gate.refuses_tenant(terms, class_name, tenant)
            if refusal is not None:
                return refusal
        if request is None:
            request = _parsed(service_pb2.ModelInferRequest, message)
            check_sizes(request)
        messages.model_version(request.model_version)
        _check_tensors(request, len(message), tenant)
        parameters = request.parameters
        priority = messages.priority_of(_value(parameters, messages.PRIORITY_PARAMETER))
        budget_s = messages.earlier(
            context.time_remaining(),
            messages.deadline_s_of(asked.one(messages.DEADLINE_HEADER)),
            messages.timeout_s_of(_value(parameters, messages.TIMEOUT_PARAMETER)),
        )
        class_name = self._desk.class_of(tenant, terms, asked.one(messages.CLASS_HEADER), priority)
        deadline_s = None if budget_s is None or budget_s > LONGEST_S else now_s + budget_s
        flight.request = request
        flight.trace = asked.trace()
        flight.asks_again = (asked.one(RETRY_HEADER) or "").strip().lower() == ONCE
        extras = self._desk.extras.of(name)
        if extras is not None:
            whose = "" if tenant is None else tenant.name
            flight.asked = Asked(
                self._desk.extras,
                extras,
                terms,
                request.model_version,
                whose,
                class_name,
                "grpc",
                request.id,
                lambda: _content(request),
            )
        return Ticket(terms, class_name, _rows(request, terms), tenant, deadline_s, flight.start, flight.refuse)

    def _let_go(self, flight: _Flight) -> None:
        self.held_bytes -= flight.held_bytes
        flight.held_bytes = 0

    async def _send(self, ticket: Ticket, flight: _Flight) -> None:
        """Send a request to Triton, and tell the gate when Triton is done with it.

        The call goes on when its caller has left: Triton 2.51 executes most of what is cancelled all the same (without a dynamic
        batcher all of it), and the gate must know what Triton still has to do.
        """
        status: Status = "error"
        try:
            _set_parameters(flight.request.parameters, ticket)
            self._next = (self._next + 1) % len(self._infers)
            infer = self._infers[self._next]
            answer = await self._tried_elsewhere(infer, flight) if flight.asked is not None else None
            if answer is None:
                message = flight.request.SerializeToString()
                flight.request = None  # large requests are kept once
                answer = await self._inferred(infer, message, ticket, flight)
            flight.tell(answer)
            flight.end(True, Answer(answer) if len(answer) <= MOST_ANSWER_BYTES else None)
            status = "ok"
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                status = "rejected" if _is_tritons(error) else "unavailable"
            flight.tell(_said(error))
        except asyncio.CancelledError:  # the entry ends
            status = "unavailable"
            flight.tell(messages.refused("starting", "The entry ends. The request may be sent again.", 1.0))
        finally:
            flight.tell(Denied(500, "INTERNAL", "The entry failed."))  # after an error that is none of these
            flight.end(False)
            self._let_go(flight)
            self._desk.gate.finished(ticket, status)

    async def _inferred(self, infer: Any, message: bytes, ticket: Ticket, flight: _Flight) -> bytes:
        """Triton's answer, also after it, or the model, has come back. Raises AioRpcError."""
        again = Again(flight.asks_again, ticket.deadline_s is not None)
        while True:
            try:
                answer: bytes = await infer(message, metadata=flight.trace)
                return answer
            except grpc.aio.AioRpcError as error:
                never_reached = self._never_reached(error)
                if never_reached is None or flight.answer.done() or self._is_closing:
                    raise
                if not again.may(never_reached, time.monotonic()):
                    raise
            self._desk.gate.stalled(ticket)
            await asyncio.sleep(PAUSE_S)

    def _never_reached(self, error: Any) -> bool | None:
        """Whether nobody has computed a request that failed so; None: it did not fail for lack of a Triton or a stub."""
        details: str = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE and not _is_tritons(error):
            return "failed to connect" in details.lower()
        return self._deaths.never_reached(details.encode(), time.monotonic())

    async def _tried_elsewhere(self, infer: Any, flight: _Flight) -> bytes | None:
        """The answer of another model, where an extra said one; None: none said, or it failed, which costs nobody his answer."""
        asked, request = flight.asked, flight.request
        assert asked is not None
        meant, version = request.model_name, request.model_version
        target = asked.choose_target()
        if target == meant:
            return None
        request.model_name, request.model_version = target, ""
        try:
            answer: bytes = await infer(request.SerializeToString(), metadata=flight.trace)
        except grpc.aio.AioRpcError:
            asked.falls_back()
            request.model_name, request.model_version = meant, version
            return None
        flight.request = None
        return answer

    async def _deny(self, context: Context, denied: Denied) -> NoReturn:
        self._desk.on_denied(denied.http_status)
        denied.__traceback__ = None  # the desk remembers who is unknown, and must not remember this request
        await _abort(context, denied)


class _Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds who answers a call; calls that nobody answers are UNIMPLEMENTED, whatever they stream."""

    def __init__(self, answers: Mapping[str, _Answer]) -> None:
        self._handlers = {
            f"/{SERVICE}/{method}": grpc.unary_unary_rpc_method_handler(answer) for method, answer in answers.items()
        }
        self._methods = ", ".join(sorted(answers))

    def service(self, handler_call_details: Any) -> Any:
        return self._handlers.get(handler_call_details.method) or self._refusing(handler_call_details.method)

    def _refusing(self, method: str) -> Any:
        async def refuse(_: Any, context: Context) -> None:
            text = f"The entry does not serve {method!r:.100}. It serves these of {SERVICE}: {self._methods}."
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)

        return grpc.stream_stream_rpc_method_handler(refuse)


class _Asked:
    """The metadata of a call."""

    def __init__(self, context: Context) -> None:
        self._values: dict[str, list[str]] = {}
        for key, value in context.invocation_metadata() or ():
            self._values.setdefault(key, []).append(value)

    def key(self) -> str | None:
        """The API key, if any."""
        values = self._values
        return messages.api_key(values.get(messages.KEY_HEADER, ()), values.get(messages.AUTHORIZATION_HEADER, ()))

    def trace(self) -> tuple[tuple[str, str], ...] | None:
        """The caller's trace context as metadata for Triton; None without one that samples.

        Without its trace state, for Triton 2.51 reads metadata past its end (`it->second.data()` in its infer_handler.h): it takes
        2 to 5 % of contexts for none, and would export what lies behind a state.
        """
        traceparents = self._values.get(messages.TRACEPARENT_HEADER)
        if traceparents is None:
            return None
        return tuple(messages.trace_context(",".join(traceparents), "").items()) or None

    def one(self, name: str) -> str | None:
        """The value of `name`; Denied when there are several."""
        values = self._values.get(name)
        if values is None:
            return None
        if len(values) > 1:
            raise messages.refused("bad_request", f"The metadata has {name!r} {len(values)} times. Send it once.")
        return values[0]


class _Flight:
    """One accepted request between the gate, its caller and Triton."""

    __slots__ = ("_send", "_task", "answer", "asked", "asks_again", "held_bytes", "request", "trace")

    def __init__(self, send: Callable[[Ticket, _Flight], Coroutine[Any, Any, None]]) -> None:
        self._send = send
        self._task: asyncio.Task[None] | None = None
        self.request: Any = None
        self.held_bytes = 0
        self.asked: Asked | None = None  # until it has ended, where extras want to know
        self.trace: tuple[tuple[str, str], ...] | None = None  # metadata for Triton
        self.asks_again = False  # should it fail together with a stub
        self.answer: asyncio.Future[bytes | Denied] = asyncio.get_running_loop().create_future()
        """For the caller; cancelled when he has gone. Not an exception: its traceback would keep the request until a collection."""

    @property
    def is_started(self) -> bool:
        """Whether it went to Triton."""
        return self._task is not None

    def start(self, ticket: Ticket) -> None:
        self._task = asyncio.get_running_loop().create_task(self._send(ticket, self))

    def refuse(self, _: Ticket, refusal: Refusal) -> None:
        self.tell(_refused(refusal))
        self.end(False)

    def end(self, is_ok: bool, answer: Answer | None = None) -> None:
        asked, self.asked = self.asked, None
        if asked is not None:
            # NOTE: later, when the caller has been told.
            asyncio.get_running_loop().call_soon(asked.end, answer, is_ok)

    def tell(self, answer: bytes | Denied) -> None:
        """The first answer is the caller's."""
        if not self.answer.done():
            self.answer.set_result(answer)


async def _looked_before(asked: Asked, ticket: Ticket) -> Answer | Denied | None:
    """An answer that is there, or that one has waited for; None to go on."""
    while True:
        found = asked.before()
        if found is None or isinstance(found, Answer):
            return found
        told: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        found.then = lambda answer, told=told: None if told.done() else told.set_result(answer)
        left_s = None if ticket.deadline_s is None else max(0.0, ticket.deadline_s - time.monotonic())
        try:
            answer = await asyncio.wait_for(told, left_s)
        except asyncio.TimeoutError:
            return messages.refused("deadline", messages.WAITED_TOO_LONG)
        finally:
            found.then = None
        if answer is not None:
            return answer


def _content(request: Any) -> Content | None:
    """For extras, before it is sent."""
    if any(name in request.parameters for name in messages.SEQUENCE_PARAMETERS) or any(
        _REGION in one.parameters for one in (*request.inputs, *request.outputs)
    ):
        return None
    plain = type(request)()
    plain.CopyFrom(request)
    plain.id = ""
    for name in messages.OWN_PARAMETERS:
        plain.parameters.pop(name, None)
    return Content(plain.SerializeToString(deterministic=True))


def _method(channel: Any, method: str) -> Any:
    """A method of Triton's that takes and gives bytes."""
    return channel.unary_unary(f"/{SERVICE}/{method}")


def _parsed(message_type: Any, message: bytes) -> Any:
    try:
        return message_type.FromString(message)
    except Exception:  # noqa: BLE001 -- protobuf's DecodeError is another class in each of its implementations
        raise messages.refused(
            "bad_request", f"The message is not a {message_type.DESCRIPTOR.full_name} of KServe v2."
        ) from None


def _most_parsed_bytes(tenant: Tenant | None) -> int:
    return messages.MAX_PARSED_BYTES if tenant is None else messages.MAX_PARSED_BYTES_OF_TENANT


def _model_name(name: str) -> str:
    encoded = name.encode()
    if len(encoded) > LONGEST_NAME_BYTES:
        raise messages.refused("unknown_model", f"No model has a name of {len(encoded)} bytes.")
    return messages.model_name(encoded.replace(b"%", b"%25"))  # names in messages are not percent-encoded


def _check_model(tenant: Tenant | None, name: str) -> None:
    if tenant is not None and not tenant.may_use(name):
        raise messages.refused("forbidden", f"Tenant {tenant.name!r} may not use model {name!r}.")


def _value(parameters: Parameters, name: str) -> object:
    """The value of a parameter, None when it is absent."""
    if name not in parameters:
        return None
    kind = parameters[name].WhichOneof("parameter_choice")
    return getattr(parameters[name], kind) if kind else _UNSET


def _set_parameters(parameters: Parameters, ticket: Ticket) -> None:
    for name in (messages.PRIORITY_PARAMETER, messages.TIMEOUT_PARAMETER, messages.DEADLINE_PARAMETER):
        parameters.pop(name, None)
    if ticket.level:
        parameters[messages.PRIORITY_PARAMETER].uint64_param = ticket.level
    if ticket.timeout_us:
        parameters[messages.TIMEOUT_PARAMETER].int64_param = ticket.timeout_us
    if ticket.deadline_s is not None:
        parameters[messages.DEADLINE_PARAMETER].int64_param = int(ticket.deadline_s * 1e9)


def _check_tensors(request: Any, size: int, tenant: Tenant | None) -> None:
    """Raises Denied for what Triton does not check well enough.

    Every element takes a byte of the message or more, unless it is in a region of shared memory; and regions belong to whoever
    registered them with Triton, which does not know tenants.
    """
    if tenant is not None:
        for one in (*request.inputs, *request.outputs):
            if _REGION in one.parameters:
                raise messages.refused(
                    "forbidden",
                    f"Tensor {one.name!r:.100} is in shared memory, which tenants may not use. Send its data.",
                )
    for one in request.inputs:
        if math.prod(abs(dim) or 1 for dim in one.shape) > (MAX_ELEMENTS if _REGION in one.parameters else size):
            raise messages.refused(
                "bad_request", f"Input {one.name!r:.100} has more elements than its request has bytes."
            )


def _rows(request: Any, terms: ModelTerms) -> int:
    """Rows of the request as its first input says; Triton itself refuses requests whose inputs disagree."""
    if not terms.max_batch_size or not request.inputs or not request.inputs[0].shape:
        return 1
    rows: int = request.inputs[0].shape[0]
    if not 1 <= rows <= terms.max_batch_size:
        raise messages.refused(
            "bad_request",
            f"Input {request.inputs[0].name!r:.100} has {rows} rows. Model {terms.name!r} takes 1 to {terms.max_batch_size}.",
        )
    return rows


def _said(error: Any) -> Denied:
    """What the caller is told when Triton refuses a call, in Triton's words, or cannot be reached."""
    code: grpc.StatusCode = error.code()
    details: str = error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE and not _is_tritons(error):
        return messages.refused("broken", f"Triton is unavailable: {details}. The request may be sent again.", 1.0)
    return Denied(500, code.name, details)


def _is_tritons(error: Any) -> bool:
    """Whether Triton's queue rejected the request: gRPC has no sign of its own for which side says UNAVAILABLE."""
    details = error.details() or ""
    return any(words in details for words in REJECTIONS)


def _refused(refusal: Refusal) -> Denied:
    return messages.refused(refusal.kind, refusal.message, refusal.retry_after_s)


async def _abort(context: Context, denied: Denied) -> NoReturn:
    trailing: tuple[tuple[str, str], ...] = ()
    if denied.retry_after_s > 0:
        trailing = ((messages.RETRY_AFTER_MS_HEADER, str(messages.retry_after(denied.retry_after_s)[1])),)
    await context.abort(grpc.StatusCode[denied.grpc_code], denied.message, trailing)
    raise AssertionError  # abort() has raised
