"""One server's HTTP or gRPC interface through tritonclient, with one set of errors.

    transport = connect(endpoint, key)
    answer = await transport.infer(request)

Only the client library of the scheme that is used gets imported.
"""

from __future__ import annotations

import asyncio
import http
import json
import math
import re
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tritonclient.utils import InferenceServerException

from tritonpilot.client.endpoints import Endpoint
from tritonpilot.client.errors import (
    CallError,
    DeadlineError,
    DeniedError,
    DisconnectedError,
    InputError,
    ModelFaultError,
    RejectedError,
    UnknownModelError,
)
from tritonpilot.client.served import DTYPES, Array

CONNECT_S = 1.0
CONNECTIONS = 512
SAID_CHARACTERS = 300  # of a refusal that is not Triton's
KEY_HEADER = "tritonpilot-key"
CLASS_HEADER = "tritonpilot-class"
DEADLINE_HEADER = "tritonpilot-deadline-ms"
DEADLINE_PARAMETER = "pilot_deadline_ns"  # what our backends read
LATE = "deadline exceeded before execution"  # what they answer after it
STUB_DIED = "is not healthy"  # of the Python backend: until the model is given a new one
# What Python and tritonclient raise where an answer is none of Triton's: no JSON, other keys, other types, other lengths.
_NONSENSE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, struct.error)
_FIELD = re.compile(r"""(?:^|[,:] )"([^"]+)": |\binput '([^']+)'""")
# What gRPC itself says under UNAVAILABLE when the connection, not the server, refuses.
_BROKEN = ("connect", "socket", "goaway", "recvmsg", "sendmsg", "tcp", "dns", "ping timeout", "transport", "reset")


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in registered shared memory."""

    region: str
    bytes: int
    offset: int


@dataclass(frozen=True)
class Request:
    """One inference as it is sent. Inputs in shared memory are named in `placed_inputs` too, their arrays give type and shape."""

    model: str
    version: str
    inputs: Mapping[str, tuple[str, Array]]  # name -> (data type, array)
    outputs: Sequence[str]  # () for all
    priority: int = 0
    timeout_us: int = 0  # of queue time, 0: the class's own
    deadline_ns: int = 0  # time.monotonic_ns() by which the answer is wanted, 0: at any time
    caller_class: str = ""  # for a server that did not tell which level it is
    placed_inputs: Mapping[str, Place] = field(default_factory=dict)
    placed_outputs: Mapping[str, Place] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Outputs that came in the body, and the shapes of those that were put into shared memory."""

    arrays: Mapping[str, Array]
    placed_shapes: Mapping[str, tuple[int, ...]]


class Transport:
    """A connection (or several) to one server. Every method raises a CallError; of the event loop that made it."""

    _has_deadlines = False  # whether the protocol has deadlines of its own

    def __init__(
        self,
        endpoint: Endpoint,
        library: Any,
        client: Any,
        headers: Mapping[str, str],
        control_headers: Mapping[str, str],
    ) -> None:
        self._url = endpoint.url
        self._headers = headers
        self._shares_clock = endpoint.is_loopback
        self._library = library
        self._client = client
        self._control_headers = {**headers, **control_headers}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around the reading of an answer: nonsense in it raises DisconnectedError, as there is no Triton where we ask."""
        try:
            yield
        except _NONSENSE as error:
            raise _no_triton(self._url, error) from error

    async def config(self, model: str, version: str) -> Mapping[str, Any]:
        """The model's config in JSON form."""
        raise NotImplementedError

    async def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        """The model's metadata in JSON form."""
        raise NotImplementedError

    async def regions(self) -> Sequence[str]:
        """The names of all registered system shared memory regions."""
        raise NotImplementedError

    async def infer(self, request: Request) -> Answer:
        """Send and wait for the answer; cancelled, the request is given up."""
        shares_clock = self._shares_clock
        try:
            return await self._infer(request, shares_clock)
        except DeadlineError as error:
            if error.is_computed or time.monotonic_ns() >= request.deadline_ns or not shares_clock:
                raise
            # Late by another clock than ours: a tunnel leads to a server on another machine.
            self._shares_clock = False
            return await self._infer(request, False)

    async def _infer(self, request: Request, shares_clock: bool) -> Answer:
        inputs, outputs = _tensors(self._library, request)
        headers = dict(self._headers)
        if request.caller_class:
            headers[CLASS_HEADER] = request.caller_class
        options: dict[str, Any] = {}
        if request.deadline_ns:
            left_s = max(1e-3, (request.deadline_ns - time.monotonic_ns()) / 1e9)
            if self._has_deadlines and not (request.placed_inputs or request.placed_outputs):
                options["client_timeout"] = left_s
            else:  # the server uses shared memory until it has answered, and gRPC's own deadline does not wait for that
                headers[DEADLINE_HEADER] = f"{left_s * 1e3:.3f}"
            if shares_clock:
                options["parameters"] = {DEADLINE_PARAMETER: request.deadline_ns}
        result = await self._call(
            self._client.infer(
                request.model,
                inputs,
                model_version=request.version,
                outputs=outputs,
                priority=request.priority,
                timeout=request.timeout_us or None,
                headers=headers,
                **options,
            )
        )
        with self.reading():
            return _answer(request, result)

    async def register(self, name: str, key: str, size: int) -> None:
        """Let the server map the shared memory object of that key, as `name`."""
        await self._call(
            self._client.register_system_shared_memory(name, key, size, headers=dict(self._control_headers))
        )

    async def register_cuda(self, name: str, handle: bytes, size: int, device: int) -> None:
        """The same for memory of a GPU."""
        await self._call(
            self._client.register_cuda_shared_memory(name, handle, device, size, headers=dict(self._control_headers))
        )

    async def unregister(self, name: str) -> None:
        """Let the server unmap a system region."""
        await self._call(self._client.unregister_system_shared_memory(name, headers=dict(self._control_headers)))

    async def unregister_cuda(self, name: str) -> None:
        """Let the server unmap a GPU's region."""
        await self._call(self._client.unregister_cuda_shared_memory(name, headers=dict(self._control_headers)))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _call(self, call: Any) -> Any:
        raise NotImplementedError


def connect(endpoint: Endpoint, control_header: tuple[str, str] | None, key: str = "") -> Transport:
    """A transport of the endpoint's scheme. The caller's key goes along with every call, the control header with those of the
    restricted shared-memory API."""
    kind = _Http if endpoint.scheme.startswith("http") else _Grpc
    return kind(endpoint, control_header, {KEY_HEADER: key} if key else {})


async def reach(endpoint: Endpoint) -> None:
    """Raise DisconnectedError unless something accepts connections there within a second.

    A host that swallows packets would hold a request until its deadline, when another endpoint could have answered.
    """
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(endpoint.host, endpoint.port), CONNECT_S)
    except (OSError, asyncio.TimeoutError) as error:
        raise DisconnectedError(f"{endpoint.url} cannot be reached: {error or 'no answer in a second'}.") from None
    writer.close()


class _Http(Transport):
    def __init__(self, endpoint: Endpoint, control_header: tuple[str, str] | None, headers: Mapping[str, str]) -> None:
        import aiohttp
        import tritonclient.http.aio as library

        self._broken: tuple[type[Exception], ...] = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
        client = library.InferenceServerClient(
            endpoint.address, conn_limit=CONNECTIONS, conn_timeout=None, ssl=endpoint.scheme == "https"
        )
        for verb in ("_get", "_post"):  # tritonclient keeps a refusal's headers to itself
            setattr(client, verb, _refusing(endpoint.url, getattr(client, verb)))
        # aiohttp asks for compressed answers by default, and Triton then compresses: 62 ms instead of 3 for 1 MiB of floats.
        headers = {"Accept-Encoding": "identity", **headers}
        super().__init__(endpoint, library, client, headers, dict([control_header]) if control_header else {})

    async def config(self, model: str, version: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self._call(
            self._client.get_model_config(model, version, headers=dict(self._headers))
        )
        return found

    async def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self._call(
            self._client.get_model_metadata(model, version, headers=dict(self._headers))
        )
        return found

    async def regions(self) -> Sequence[str]:
        found = await self._call(self._client.get_system_shared_memory_status(headers=dict(self._control_headers)))
        with self.reading():
            return [str(each["name"]) for each in found]

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except InferenceServerException as refused:
            raise _error(self._url, str(refused.message()), str(refused.status()), {}) from None
        except self._broken as broken:
            raise DisconnectedError(
                f"The connection to {self._url} failed: {broken or type(broken).__name__}."
            ) from None
        except _NONSENSE as error:
            raise _no_triton(self._url, error) from error


class _Grpc(Transport):
    _has_deadlines = True

    def __init__(self, endpoint: Endpoint, control_header: tuple[str, str] | None, headers: Mapping[str, str]) -> None:
        import tritonclient.grpc.aio as library

        client = library.InferenceServerClient(
            endpoint.address,
            ssl=endpoint.scheme == "grpcs",
            channel_args=[
                ("grpc.max_send_message_length", -1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),  # no back-off inherited from others' connections
                ("grpc.initial_reconnect_backoff_ms", 50),  # endpoints.py decides how long one is left out
                ("grpc.max_reconnect_backoff_ms", 250),
            ],
        )
        control_headers = {f"triton-grpc-protocol-{control_header[0]}": control_header[1]} if control_header else {}
        super().__init__(endpoint, library, client, headers, control_headers)

    async def config(self, model: str, version: str) -> Mapping[str, Any]:
        answer = await self._call(
            self._client.get_model_config(model, version, headers=dict(self._headers), as_json=True)
        )
        with self.reading():
            found: Mapping[str, Any] = answer["config"]
        return found

    async def metadata(self, model: str, version: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self._call(
            self._client.get_model_metadata(model, version, headers=dict(self._headers), as_json=True)
        )
        return found

    async def regions(self) -> Sequence[str]:
        headers = dict(self._control_headers)
        return list((await self._call(self._client.get_system_shared_memory_status(headers=headers))).regions)

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except InferenceServerException as refused:
            said, status = str(refused.message()), str(refused.status()).removeprefix("StatusCode.")
            if status == "UNAVAILABLE" and any(word in said.lower() for word in _BROKEN):
                raise DisconnectedError(f"The connection to {self._url} failed: {said}.") from None
            call = refused.__context__  # grpc.aio.AioRpcError, from which tritonclient made this
            trailing: Any = call.trailing_metadata() if hasattr(call, "trailing_metadata") else None
            raise _error(self._url, said, status, dict(trailing or ())) from None
        except _NONSENSE as error:
            raise _no_triton(self._url, error) from error


def _refusing(url: str, send: Any) -> Any:
    """tritonclient's sending of one HTTP request, with refusals raised as a CallError."""

    async def sent(*arguments: Any, **named: Any) -> Any:
        response = await send(*arguments, **named)
        if response.status == http.HTTPStatus.OK:
            return response
        body = (await response.read()).decode(errors="replace")
        try:
            said = str(json.loads(body)["error"])
        except (ValueError, KeyError, TypeError):  # a proxy's page
            said = body[:SAID_CHARACTERS] or str(response.reason)
        raise _error(url, said, str(response.status), response.headers)

    return sent


def _tensors(library: Any, request: Request) -> tuple[list[Any], list[Any] | None]:
    inputs = []
    for name, (data_type, array) in request.inputs.items():
        tensor = library.InferInput(name, list(array.shape), data_type)
        place = request.placed_inputs.get(name)
        if place is None:
            tensor.set_data_from_numpy(array)
        else:
            tensor.set_shared_memory(place.region, place.bytes, place.offset)
        inputs.append(tensor)
    if not request.outputs:
        return inputs, None
    outputs = []
    for name in request.outputs:
        tensor = library.InferRequestedOutput(name)  # binary by default over HTTP too
        place = request.placed_outputs.get(name)
        if place is not None:
            tensor.set_shared_memory(place.region, place.bytes, place.offset)
        outputs.append(tensor)
    return inputs, outputs


def _answer(request: Request, result: Any) -> Answer:
    response = result.get_response()
    arrays, shapes = {}, {}
    for each in response["outputs"] if isinstance(response, dict) else response.outputs:
        name, shape, data_type = (
            (each["name"], each["shape"], each["datatype"])
            if isinstance(each, dict)
            else (each.name, each.shape, each.datatype)
        )
        if data_type not in DTYPES:
            raise ValueError(f"the output {name} is of the type {data_type}")
        if name in request.placed_outputs:
            shapes[name] = tuple(int(size) for size in shape)
        else:
            arrays[name] = result.as_numpy(name)
            if arrays[name] is None:
                raise ValueError(f"no values of the output {name}")
    for name in request.outputs:
        if name not in arrays and name not in shapes:
            raise ValueError(f"no output {name}")
    return Answer(arrays, shapes)


def _no_triton(url: str, error: Exception) -> DisconnectedError:
    said = f"{type(error).__name__}: {error}"[:SAID_CHARACTERS]
    return DisconnectedError(
        f"{url} does not answer as a Triton does ({said}). Correct the endpoint, or look at what answers there."
    )


def _error(url: str, said: str, status: str, headers: Mapping[str, Any]) -> CallError:
    """Triton's statuses are gRPC's by name, or HTTP's by number; headers as of HTTP, or gRPC's trailing metadata."""
    said = " ".join(said.split()).removeprefix("[request id: <id_unknown>] ").rstrip(".")
    if status in ("INVALID_ARGUMENT", "400", "413"):
        return InputError(f"{url} refused the request: {said}. Repair the inputs.", _field(said))
    if status in ("NOT_FOUND", "404"):
        return UnknownModelError(f"{url} has no such model: {said}. Correct the name or load it.")
    if status in ("DEADLINE_EXCEEDED", "504", "408") or (status in ("UNAVAILABLE", "503") and LATE in said):
        late = DeadlineError(
            f"The deadline passed before {url} had an answer: {said}. Ask for more time, or send less."
        )
        late.is_computed = LATE not in said
        return late
    if status in ("UNAVAILABLE", "503", "RESOURCE_EXHAUSTED", "429", "502"):
        return RejectedError(
            f"{url} does not take the request now: {said}. Try again later, or with less load.", retry_after_s(headers)
        )
    if status in ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "401", "403", "405"):
        return DeniedError(f"{url} does not let this caller do that: {said}. Give a key that may (`key=`).")
    if STUB_DIED in said:
        return DisconnectedError(f"The model's process at {url} has died: {said}. Ask again; look at the server's log.")
    if status == "CANCELLED":
        return DisconnectedError(f"The connection to {url} was closed: {said}.")
    return ModelFaultError(f"{url} failed to answer ({status}): {said}. Look at the server's log.")


def retry_after_s(headers: Mapping[str, Any]) -> float:
    """How long a refusal asks to be left alone: `retry-after-ms`, else Retry-After in seconds; 0 when it does not say."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit_s
        except ValueError:  # Retry-After may also be a date, by a clock that is not ours
            continue
        if math.isfinite(seconds) and seconds >= 0:
            return seconds
    return 0.0


def _field(said: str) -> str:
    """The input that a backend of ours names, as in `in ensemble 'x', "photo": row 3 is no image`, or Triton as `input 'x'`."""
    found = _FIELD.search(said)
    return (found[1] or found[2]) if found else ""
