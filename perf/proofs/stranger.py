"""Can somebody without the control key control a Triton? Every restricted call, by every door, with every key but the right one.

A call got through when it was answered as if it were allowed, or when Triton's state differs afterwards. Each call is made with the
key too, at Triton itself, where it has to pass: otherwise it proves nothing that a stranger's was refused.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import tritonclient.utils.shared_memory as shm
from tritonclient.grpc import service_pb2

from perf.balancer import balancing
from perf.frame import Bench, Outcome
from perf.subjects import cut, entered, sample_rows, services, serving
from tritonpilot.client import Client
from tritonpilot.entry.tenants import hash_key, new_key
from tritonpilot.errors import MeasurementError
from tritonpilot.tritonserver import CONTROL_HEADER

SERVICE = "inference.GRPCInferenceService"
GRPC_HEADER = f"triton-grpc-protocol-{CONTROL_HEADER}"
TENANT_HEADER = "tritonpilot-key"
TIMEOUT_S = 20.0
OWNERS_REGION, STRANGERS_REGION = "owner", "stranger"
REGION_BYTES = 64
ABSENT = "absent"
CONFIG = json.dumps({"backend": "python", "max_batch_size": 1})
#: What Triton 2.51 says to who has no key: HTTP 403, and over gRPC UNAVAILABLE with these words.
LOCKED = "This protocol is restricted"


@dataclass(frozen=True)
class HttpCall:
    """A restricted call over HTTP."""

    method: str
    path: str
    body: bytes = b""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class GrpcCall:
    """A restricted call over gRPC."""

    method: str
    message: Any  # a message of service_pb2, which ships no types

    def __str__(self) -> str:
        return f"{self.method}({' '.join(str(self.message).split())[:80]})"


@dataclass(frozen=True)
class Credential:
    """What a caller shows, in headers of each protocol."""

    name: str
    headers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Door:
    """Where callers come in; `tenant` is an API key that lets them infer there, and nothing else."""

    name: str
    http: str
    grpc: str
    tenant: str = ""
    is_triton: bool = False


@dataclass
class Found:
    """How much was tried, what got through, and which calls did not pass with the key."""

    tried: dict[str, int] = field(default_factory=dict)
    through: list[str] = field(default_factory=list)
    locked_for_owner: list[str] = field(default_factory=list)
    owners_calls: int = 0


def stranger_locked_out(bench: Bench) -> Outcome:
    """Attempts that got through: at Triton itself, through the entry with and without tenants, and through the balancer."""
    tenant = new_key()
    rows = cut(sample_rows(services(["ctr"])["ctr"]), 0, 1)
    with serving(bench, ["ctr"]) as served, tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        tenants = Path(folder, "tenants.yaml")
        tenants.write_text(json.dumps({"tenants": [{"name": "shop", "keys": [hash_key(tenant)]}]}))
        tenants.chmod(0o600)
        triton = (served.server.endpoints.http, served.server.endpoints.grpc)
        with ExitStack() as stack:
            entry = stack.enter_context(entered(served))
            strict = stack.enter_context(entered(served, tenants=tenants))
            logs = [Path(folder, name) for name in ("before_triton", "before_entry")]
            for log in logs:
                log.mkdir()
            before_triton = stack.enter_context(balancing([triton], logs[0]))
            before_entry = stack.enter_context(balancing([(strict.http, strict.grpc)], logs[1]))
            doors = (
                Door("Triton", *triton, is_triton=True),
                Door("entry", entry.http, entry.grpc),
                Door("entry with tenants", strict.http, strict.grpc, tenant),
                Door("balancer before Triton", before_triton.http, before_triton.grpc),
                Door("balancer before an entry with tenants", before_entry.http, before_entry.grpc, tenant),
            )
            for door in doors:  # one that refuses everybody would prove nothing
                for scheme, address in (("http", door.http), ("grpc", door.grpc)):
                    with Client(f"{scheme}://{address}", key=door.tenant, shared_memory="off") as client:
                        client.predict("ctr", rows)
            found = besiege(doors, served.server.control_key, "ctr", is_short=bench.quick, say=bench.say)
        served.server.check_alive()
    return Outcome(
        float(len(found.through)),
        rounds=sum(found.tried.values()),
        ok=not found.locked_for_owner,
        details={
            "got_through": found.through,
            "attempts": found.tried,
            "owners_calls_that_passed": found.owners_calls,
            "owners_calls_that_did_not": found.locked_for_owner,
        },
    )


def besiege(
    doors: Sequence[Door],
    key: str,
    model: str,
    *,
    is_short: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Found:
    """Try everything at each door; the first one is Triton itself. At the end the owner does the same with the key.

    `is_short`: other spellings of paths are tried without a key only. `model` is a loaded one.
    """
    found = Found()
    triton = doors[0]
    with _region() as region:
        owner = _Owner(triton.grpc, key, model)
        calls = _http_calls(model, region), _grpc_calls(model, region)
        owner.register(region)
        state = owner.state()
        for door in doors:
            tried = 0
            for number, credential in enumerate(_credentials(key, door)):
                for attempt, answer in _attempts(door, credential, *calls, is_spelt=not is_short or number == 0):
                    tried += 1
                    if answer is not None:
                        found.through.append(f"{door.name}, {credential.name}: {attempt}: {answer}")
                if (now := owner.state()) != state:
                    found.through.append(f"{door.name}, {credential.name}: Triton's state has changed: {now}")
                    state = now
            for attempt, answer in _smuggled(door, key):
                tried += 1
                if answer is not None or owner.state() != state:
                    found.through.append(f"{door.name}: {attempt}: {answer or 'the log settings have changed'}")
                    state = owner.state()
            found.tried[door.name] = tried
            say(f"{door.name}: {tried} attempts, {len(found.through)} got through so far")
        right = Credential("the key", {CONTROL_HEADER: key}, {GRPC_HEADER: key})
        # Of a model that is not there: whether the lock opens is seen all the same, and nothing is loaded again.
        owners_calls = _http_calls(ABSENT, region, "-"), _grpc_calls(ABSENT, region, "-")
        for attempt, is_open in _owners(triton, right, *owners_calls):
            found.owners_calls += is_open
            if not is_open:
                found.locked_for_owner.append(attempt)
    return found


# -- what a stranger tries ---------------------------------------------------------------------------------------------


def _http_calls(model: str, region: str, config: str = CONFIG) -> list[HttpCall]:
    code = base64.b64encode(b"no model").decode()
    load = f"/v2/repository/models/{model}/load"
    register = {"key": region, "offset": 0, "byte_size": REGION_BYTES}
    cuda = {"raw_handle": {"b64": base64.b64encode(bytes(64)).decode()}, "device_id": 0, "byte_size": REGION_BYTES}
    trace = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"}
    asked: tuple[tuple[str, str, object], ...] = (
        ("POST", "/v2/repository/index", {}),
        ("GET", "/v2/systemsharedmemory/status", None),
        ("GET", f"/v2/systemsharedmemory/region/{OWNERS_REGION}/status", None),
        ("POST", f"/v2/systemsharedmemory/region/{STRANGERS_REGION}/register", register),
        ("POST", f"/v2/systemsharedmemory/region/{OWNERS_REGION}/unregister", {}),
        ("POST", "/v2/systemsharedmemory/unregister", {}),
        ("GET", "/v2/cudasharedmemory/status", None),
        ("GET", f"/v2/cudasharedmemory/region/{OWNERS_REGION}/status", None),
        ("POST", f"/v2/cudasharedmemory/region/{STRANGERS_REGION}/register", cuda),
        ("POST", f"/v2/cudasharedmemory/region/{OWNERS_REGION}/unregister", {}),
        ("POST", "/v2/cudasharedmemory/unregister", {}),
        ("GET", "/v2/trace/setting", None),
        ("POST", "/v2/trace/setting", trace),
        ("GET", f"/v2/models/{model}/trace/setting", None),
        ("POST", f"/v2/models/{model}/trace/setting", trace),
        ("GET", "/v2/logging", None),
        ("POST", "/v2/logging", {"log_verbose_level": 1}),
        ("POST", load, {}),
        ("POST", f"/v2/repository/models/{model}/unload", {"parameters": {"unload_dependents": True}}),
        ("POST", load, {"parameters": {"config": config}}),
        ("POST", load, {"parameters": {"config": config, "file:1/model.py": code}}),
    )
    return [HttpCall(method, path, b"" if body is None else json.dumps(body).encode()) for method, path, body in asked]


def _grpc_calls(model: str, region: str, config: str = CONFIG) -> list[GrpcCall]:
    pb = service_pb2

    files: dict[str, bytes | str] = {"config": config, "file:1/model.py": b"no model"}

    def loading(**parameters: bytes | str) -> Any:
        request = pb.RepositoryModelLoadRequest(model_name=model)
        for name, value in parameters.items():
            if isinstance(value, bytes):
                request.parameters[name].bytes_param = value
            else:
                request.parameters[name].string_param = value
        return request

    def tracing(name: str = "") -> Any:
        request = pb.TraceSettingRequest(model_name=name)
        request.settings["trace_level"].value.append("TIMESTAMPS")
        request.settings["trace_rate"].value.append("1")
        return request

    logging = pb.LogSettingsRequest()
    logging.settings["log_verbose_level"].uint32_param = 1
    unload = pb.RepositoryModelUnloadRequest(model_name=model)
    unload.parameters["unload_dependents"].bool_param = True
    size = REGION_BYTES
    asked = (
        ("RepositoryIndex", pb.RepositoryIndexRequest()),
        ("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        (
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name=STRANGERS_REGION, key=region, byte_size=size),
        ),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=OWNERS_REGION)),
        ("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
        ("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
        (
            "CudaSharedMemoryRegister",
            pb.CudaSharedMemoryRegisterRequest(name=STRANGERS_REGION, raw_handle=bytes(64), byte_size=size),
        ),
        ("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
        ("TraceSetting", pb.TraceSettingRequest()),
        ("TraceSetting", tracing()),
        ("TraceSetting", tracing(model)),
        ("LogSettings", pb.LogSettingsRequest()),
        ("LogSettings", logging),
        ("RepositoryModelLoad", loading()),
        ("RepositoryModelUnload", unload),
        ("RepositoryModelLoad", loading(config=config)),
        ("RepositoryModelLoad", loading(**files)),
    )
    return [GrpcCall(method, message) for method, message in asked]


def _credentials(key: str, door: Door) -> Iterator[Credential]:
    """What a stranger may show. Behind Triton's own door the right key is a wrong one as well."""

    def shown(name: str, value: str) -> Credential:
        return Credential(name, {CONTROL_HEADER: value}, {GRPC_HEADER: value})

    yield Credential("no key")
    yield shown("a wrong key", "0123456789abcdef" * 4)
    if door.is_triton:
        yield shown("an empty key", "")
        yield shown("the key less its last character", key[:-1])
        yield shown("the key and one character", key + "x")
        yield shown("the key in the other case", key.swapcase())
        yield Credential("the key as a bearer token", *[{"authorization": f"Bearer {key}"}] * 2)
        yield Credential("the key under other names", {GRPC_HEADER: key, "control-key": key}, {CONTROL_HEADER: key})
    else:
        yield shown("the control key", key)
    if door.tenant:
        yield Credential("a tenant's key", *[{TENANT_HEADER: door.tenant}] * 2)
        both = {TENANT_HEADER: door.tenant}
        yield Credential(
            "a tenant's key and the control key", {**both, CONTROL_HEADER: key}, {**both, GRPC_HEADER: key}
        )


def _disguised(path: str) -> list[str]:
    """Other spellings of a path, which a lock or a proxy might take for another one than Triton does."""
    first, _, rest = path.removeprefix("/v2/").partition("/")
    encoded = f"%{ord(first[0]):02x}{first[1:]}"
    return [
        f"/{path}",
        f"/v2//{first}/{rest}",
        f"/v2/./{first}/{rest}",
        f"/v2/health/../{first}/{rest}",
        f"/v2/models/x/infer/../../../{first}/{rest}",
        f"/v2/{encoded}/{rest}",
        f"/v2%2f{first}%2f{rest}",
        f"/V2/{first.upper()}/{rest}",
        f"{path}/",
        f"{path}?x=/v2/health/live",
        f"{path}#/v2/health/live",
        f"{path};x=1",
        f"http://127.0.0.1{path}",
        f"/v2/health/live?{path}",
    ]


def _attempts(
    door: Door,
    credential: Credential,
    over_http: Sequence[HttpCall],
    over_grpc: Sequence[GrpcCall],
    *,
    is_spelt: bool,
) -> Iterator[tuple[str, str | None]]:
    """Each attempt, and what was answered when it got through."""
    for call in over_http:
        status, said = _send(door.http, call, credential.headers)
        is_refused = status == 403 if door.is_triton else status >= 400
        yield f"HTTP {call}", None if is_refused else f"{status} {said}"
        for path in _disguised(call.path) if is_spelt else ():
            status, said = _send(door.http, HttpCall(call.method, path, call.body), credential.headers)
            # Such a path may be that of a page which is open to all, and then answers as it does for anybody.
            is_open = path.startswith("/v2/health/live?")
            yield f"HTTP {call.method} {path}", None if status >= 400 or is_open else f"{status} {said}"
    with closing(_channel(door.grpc)) as channel:
        for each in over_grpc:
            code, said = _ask(channel, each, credential.metadata)
            is_refused = LOCKED in said if door.is_triton else code is not grpc.StatusCode.OK
            yield f"gRPC {each}", None if is_refused else f"{code.name} {said}"


def _smuggled(door: Door, key: str) -> Iterator[tuple[str, str | None]]:
    """A call with the right key hidden in another request, so that a proxy may pass it on unseen.

    At Triton's own door there is nobody to hide from. What comes after the first answer is returned when it is a success.
    """
    if door.is_triton:
        return
    body = b'{"log_verbose_level": 1}'
    hidden = b"POST /v2/logging HTTP/1.1\r\nHost: x\r\n%b: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        CONTROL_HEADER.encode(),
        key.encode(),
        len(body),
        body,
    )
    start = b"POST /v2/models/none/infer HTTP/1.1\r\nHost: x\r\n"
    forms = {
        "behind a body of length 0 that is chunked": b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        + hidden,
        "behind the last chunk": b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n%b"
        % (len(hidden) + 5, hidden),
        "behind a strange Transfer-Encoding": b"Content-Length: %d\r\nTransfer-Encoding: xchunked\r\n\r\n%b"
        % (len(hidden), hidden),
        "behind two lengths": b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n%b" % (len(hidden), hidden),
        "behind a GET with a body": b"Content-Length: %d\r\n\r\n%b" % (len(hidden), hidden),
        "behind an upgrade": b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 0\r\n\r\n" + hidden,
        "in the next request": b"Content-Length: 0\r\n\r\n" + hidden,
    }
    for name, rest in forms.items():
        answers = _raw(door.http, start + rest)
        last = answers.rpartition(b"HTTP/1.1 ")[2]
        yield f"HTTP POST /v2/logging {name}", None if not last.startswith(b"2") else last[:200].decode("latin-1")


def _owners(
    triton: Door, credential: Credential, over_http: Sequence[HttpCall], over_grpc: Sequence[GrpcCall]
) -> Iterator[tuple[str, bool]]:
    """Each call with the key, and whether the lock let it pass."""
    for call in over_http:
        status, said = _send(triton.http, call, credential.headers)
        yield f"HTTP {call}: {status} {said}", status != 403
    with closing(_channel(triton.grpc)) as channel:
        for each in over_grpc:
            _, said = _ask(channel, each, credential.metadata)
            yield f"gRPC {each}: {said}", LOCKED not in said


# -- the owner ---------------------------------------------------------------------------------------------------------


class _Owner:
    """Reads, with the key, what a stranger must not have changed."""

    def __init__(self, address: str, key: str, model: str) -> None:
        self._address = address
        self._metadata = {GRPC_HEADER: key}
        self._model = model

    def register(self, region: str) -> None:
        """A region that a stranger could unregister."""
        message = service_pb2.SystemSharedMemoryRegisterRequest(name=OWNERS_REGION, key=region, byte_size=REGION_BYTES)
        try:
            self._asked("SystemSharedMemoryRegister", message)
        except grpc.RpcError as refused:
            raise MeasurementError(
                f"Triton refused its own control key: {refused.details()}. Nothing is reported. Is it the key of this server?"
            ) from None

    def state(self) -> dict[str, str]:
        """The models, regions, log and trace settings; where Triton has no answer, as for a model that is gone, what it says."""
        pb = service_pb2
        asked = {
            "models": ("RepositoryIndex", pb.RepositoryIndexRequest(), pb.RepositoryIndexResponse),
            "regions": (
                "SystemSharedMemoryStatus",
                pb.SystemSharedMemoryStatusRequest(),
                pb.SystemSharedMemoryStatusResponse,
            ),
            "CUDA regions": (
                "CudaSharedMemoryStatus",
                pb.CudaSharedMemoryStatusRequest(),
                pb.CudaSharedMemoryStatusResponse,
            ),
            "trace": ("TraceSetting", pb.TraceSettingRequest(), pb.TraceSettingResponse),
            "trace of the model": (
                "TraceSetting",
                pb.TraceSettingRequest(model_name=self._model),
                pb.TraceSettingResponse,
            ),
            "log": ("LogSettings", pb.LogSettingsRequest(), pb.LogSettingsResponse),
        }
        found = {}
        for name, (method, message, answer) in asked.items():
            try:
                found[name] = " ".join(sorted(str(answer.FromString(self._asked(method, message))).split("\n")))
            except grpc.RpcError as refused:
                found[name] = str(refused.details())
        return found

    def _asked(self, method: str, message: Any) -> bytes:
        with closing(_channel(self._address)) as channel:
            call = channel.unary_unary(f"/{SERVICE}/{method}", lambda m: m.SerializeToString(), None)
            answer: bytes = call(message, timeout=TIMEOUT_S, metadata=tuple(self._metadata.items()))
        return answer


@contextmanager
def _region() -> Iterator[str]:
    """The name of some shared memory on this machine."""
    name = f"/tritonpilot_stranger_{os.getpid()}"
    handle = shm.create_shared_memory_region(OWNERS_REGION, name, REGION_BYTES)
    try:
        yield name
    finally:
        shm.destroy_shared_memory_region(handle)


# -- the wire ----------------------------------------------------------------------------------------------------------


def _send(address: str, call: HttpCall, headers: Mapping[str, str]) -> tuple[int, str]:
    """Status and the beginning of the body; 499 when the connection was closed without an answer."""
    with closing(http.client.HTTPConnection(address, timeout=TIMEOUT_S)) as connection:
        try:
            connection.putrequest(call.method, call.path)
            for name, value in headers.items():
                connection.putheader(name, value)
            if call.method == "POST":
                connection.putheader("content-length", str(len(call.body)))
            connection.endheaders(call.body or None)
            answer = connection.getresponse()
            return answer.status, answer.read()[:200].decode("latin-1")
        except (http.client.HTTPException, ConnectionError) as closed:
            return 499, str(closed)


def _raw(address: str, data: bytes) -> bytes:
    """Everything that is answered until the other side closes, or is silent for a moment."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
        received = b""
        try:
            connection.sendall(data)
            connection.settimeout(0.2)
            while part := connection.recv(65536):
                received += part
        except (TimeoutError, ConnectionError):
            pass
        return received


def _channel(address: str) -> Any:
    return grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])


def _ask(channel: Any, call: GrpcCall, metadata: Mapping[str, str]) -> tuple[Any, str]:
    """Code and details; OK with the answer's size."""
    method = channel.unary_unary(f"/{SERVICE}/{call.method}", lambda m: m.SerializeToString(), None)
    try:
        answer: bytes = method(call.message, timeout=TIMEOUT_S, metadata=tuple(metadata.items()))
    except grpc.RpcError as refused:
        return refused.code(), str(refused.details())
    return grpc.StatusCode.OK, f"{len(answer)} bytes"
