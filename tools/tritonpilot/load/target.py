"""Where does a load go, what does the model take, and which bytes ask for it?

    target = Target("127.0.0.1:8000", "http")
    asked = bodies(target, describe(target, "ctr"), rows, streams, traffic)
    asked.content[asked.place[i]]              # what request i sends

The bytes of every request are made before the load: sending one costs tens of us then, and its time is kept.
"""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from tritonpilot import samples
from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.entry.messages import CLASS_HEADER
from tritonpilot.errors import MeasurementError, ServerError

TIMEOUT_S = 10.0
VARIANTS = 251  # a prime: streams in step do not meet the same rows again and again
MOST_BODIES = 4096
MOST_BYTES = 256 << 20
HEADER = re.compile(r"[A-Za-z0-9_.-]+")
VALUE = re.compile(r"[\x20-\x7e]*")
OWN_HEADERS = {"host", "content-length", "inference-header-content-length", "transfer-encoding", "connection", "te"}
Protocol = Literal["http", "grpc"]
Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Target:
    """A Triton, or an entry in front of one, at "host:port"; `headers` go with every request (over gRPC as metadata)."""

    url: str
    protocol: Protocol = "http"
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port. Raises MeasurementError for anything else than "host:port"."""
        host, _, port = self.url.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536 or "/" in host:
            raise MeasurementError(
                f"{self.url!r} is no address of a server. Nothing was sent. Give HOST:PORT, such as 127.0.0.1:8000; TLS is not "
                "spoken."
            )
        return host.strip("[]"), int(port)


def header(name: str, value: str) -> tuple[str, str]:
    """A header as both protocols take it: name in lower case, no spaces around. Raises ValueError for one that they do not."""
    name, value = name.strip().lower(), value.strip()
    if not HEADER.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a header: letters, digits and - _ . make one")
    if not VALUE.fullmatch(value):
        raise ValueError(f"the value of header {name} must be printable ASCII, not {value!r}")
    if name in OWN_HEADERS or name.startswith("grpc-") or name.endswith("-bin"):
        raise ValueError(f"the header {name} is the protocol's own")
    return name, value


def is_reachable(target: Target) -> bool:
    """Whether anybody accepts a connection there now."""
    try:
        socket.create_connection(target.address, TIMEOUT_S).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Signature:
    """What a model takes: input name -> Triton's data type, and the largest batch (0: it has no batch dimension)."""

    model: str
    types: Mapping[str, str]
    optional: frozenset[str]
    max_batch_size: int


@dataclass(frozen=True)
class Bodies:
    """The distinct requests as bytes, which one each request of the traffic sends, and the headers of its stream."""

    content: tuple[bytes, ...]
    place: npt.NDArray[np.int32]  # [n], index into content
    headers: tuple[Mapping[str, str], ...]  # of each content; over HTTP they are part of it


def describe(target: Target, model: str) -> Signature:
    """Ask the server for the model's config. Raises ServerError when it or the model is not there."""
    host, port = target.address
    if target.protocol == "grpc":
        with grpc.insecure_channel(target.url, options=[("grpc.enable_http_proxy", 0)]) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = service_pb2.ModelConfigRequest(name=model)
            try:
                config = stub.ModelConfig(request, timeout=TIMEOUT_S, metadata=list(target.headers.items())).config
            except grpc.RpcError as failed:
                raise _unknown(target, model, failed.details() or failed.code().name) from None
        inputs = [(each.name, model_config_pb2.DataType.Name(each.data_type), each.optional) for each in config.input]
        return _signature(model, inputs, config.max_batch_size)
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"/v2/models/{model}/config", headers=dict(target.headers))
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise _unknown(target, model, repr(error)) from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise _unknown(target, model, f"{answer.status} {text[:300].decode(errors='replace')}")
    try:
        content = json.loads(text)
        inputs = [(each["name"], each["data_type"], each.get("optional", False)) for each in content["input"]]
        return _signature(model, inputs, int(content["max_batch_size"]))
    except (ValueError, KeyError, TypeError) as error:
        raise _unknown(target, model, f"its config is no ModelConfig ({error!r})") from error


def bodies(target: Target, signature: Signature, rows: Arrays, streams: Sequence[Stream], traffic: Traffic) -> Bodies:
    """The bytes of all requests: for each stream and size up to 251 different ones, made of the samples in turn.

    Raises MeasurementError when the samples lack an input or a request is larger than the model takes.
    """
    missing = [name for name in signature.types if name not in rows and name not in signature.optional]
    if missing:
        raise MeasurementError(
            f"Model {signature.model} takes an input {missing[0]}, which the samples lack (they have {', '.join(rows)}). Nothing "
            "was sent. Give samples of this model."
        )
    chosen = {name: array for name, array in rows.items() if name in signature.types}
    kinds = sorted({(int(stream), int(size)) for stream, size in zip(traffic.stream, traffic.rows, strict=True)})
    most = signature.max_batch_size or 1
    for stream, size in kinds:
        if size > most:
            raise MeasurementError(
                f"Stream {streams[stream].name} sends {size} rows a request, and model {signature.model} takes at most {most}. "
                "Nothing was sent. Send fewer rows, or raise max_batch_size."
            )
    available = len(next(iter(chosen.values())))
    row_bytes = sum(array.nbytes for array in chosen.values()) / available
    total_rows = sum(size for _, size in kinds)
    by_bytes = int(MOST_BYTES / max(1.0, row_bytes * total_rows)) if kinds else 1
    variants = max(1, min(VARIANTS, available, MOST_BODIES // max(1, len(kinds)), by_bytes))
    write = _grpc_body if target.protocol == "grpc" else _http_body
    content: list[bytes] = []
    headers: list[Mapping[str, str]] = []
    place = np.zeros(len(traffic), dtype=np.int32)
    for stream, size in kinds:
        its = {**target.headers, **_headers(streams[stream])}
        of_kind = np.flatnonzero((traffic.stream == stream) & (traffic.rows == size))
        place[of_kind] = len(content) + np.arange(len(of_kind)) % variants
        for variant in range(min(variants, len(of_kind))):
            cut = {
                n: a.take(range(variant * size, (variant + 1) * size), axis=0, mode="wrap") for n, a in chosen.items()
            }
            if not signature.max_batch_size:
                cut = {name: array[0] if array.ndim > 1 else array for name, array in cut.items()}
            content.append(write(target, signature, cut, streams[stream], its))
            headers.append(its)
    return Bodies(tuple(content), place, tuple(headers))


def _signature(model: str, inputs: Sequence[tuple[str, str, bool]], max_batch_size: int) -> Signature:
    types = {name: kind.removeprefix("TYPE_").replace("STRING", "BYTES") for name, kind, _ in inputs}
    return Signature(model, types, frozenset(name for name, _, optional in inputs if optional), max_batch_size)


def _unknown(target: Target, model: str, reason: str) -> ServerError:
    return ServerError(
        f"The server at {target.url} does not describe model {model} over {target.protocol}: {reason}. Nothing was sent. Check the "
        "address, mind that HTTP and gRPC have ports of their own, and that the model is loaded."
    )


def _headers(stream: Stream) -> dict[str, str]:
    return {CLASS_HEADER: stream.caller_class} if stream.caller_class else {}


def _parameters(stream: Stream) -> dict[str, int]:
    """Triton's parameters of a request: its level, and how long it may wait in the queue, us."""
    found = {}
    if stream.priority:
        found["priority"] = stream.priority
    if stream.timeout_ms is not None:
        found["timeout"] = max(1, round(stream.timeout_ms * 1e3))
    return found


def _http_body(
    target: Target, signature: Signature, arrays: Arrays, stream: Stream, headers: Mapping[str, str]
) -> bytes:
    """A whole HTTP request in Triton's binary form."""
    tensors, data = [], []
    for name, array in arrays.items():
        data.append(samples.raw(array))
        tensors.append(
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": signature.types[name],
                "parameters": {"binary_data_size": len(data[-1])},
            }
        )
    words = {"inputs": tensors, "parameters": {"binary_data_output": True, **_parameters(stream)}}
    head = json.dumps(words, separators=(",", ":")).encode()
    lines = [
        f"POST /v2/models/{signature.model}/infer HTTP/1.1",
        f"Host: {target.url}",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(head) + sum(map(len, data))}",
        *(f"{name}: {value}" for name, value in headers.items()),
        "",
        "",
    ]
    return b"".join(["\r\n".join(lines).encode(), head, *data])


def _grpc_body(
    target: Target,  # noqa: ARG001 -- as _http_body
    signature: Signature,
    arrays: Arrays,
    stream: Stream,
    headers: Mapping[str, str],  # noqa: ARG001 -- sent as metadata
) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=signature.model)
    for name, array in arrays.items():
        request.inputs.add(name=name, datatype=signature.types[name], shape=array.shape)
        request.raw_input_contents.append(samples.raw(array))
    for name, value in _parameters(stream).items():
        request.parameters[name].int64_param = value
    return bytes(request.SerializeToString())
