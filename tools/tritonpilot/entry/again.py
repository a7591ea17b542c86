"""Ask Triton again what a caller has asked, and read what it answers: for whoever compares. Blocks: not for the event loop.

again = Again("127.0.0.1:8000", "127.0.0.1:8001")        # Triton's HTTP and gRPC ports
answer = again.ask(content, "http", "ctr", version="2", level=2)       # raises NoAnswerError
again.ask(several(content, "http", 4), ...)               # the same rows four times over in one request
"""

from __future__ import annotations

import http.client
from contextlib import suppress
from typing import Any

import grpc  # type: ignore[import-untyped]
import orjson
from tritonclient.grpc import service_pb2

from tritonpilot.entry import messages
from tritonpilot.entry.extras import Answer, Content, Protocol

TIMEOUT_S = 30.0
ASK_TIMEOUT_S = 5.0
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_JSON_SIZE = "Inference-Header-Content-Length"


class NoAnswerError(Exception):
    """Triton did not answer, or with an error."""


class Again:
    """Connections to one Triton, for one thread."""

    def __init__(self, triton_http: str, triton_grpc: str) -> None:
        self._address = triton_http
        self._connection: http.client.HTTPConnection | None = None
        self._channel: Any = grpc.insecure_channel(
            triton_grpc,
            options=[
                ("grpc.enable_http_proxy", 0),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
            ],
        )
        self._infer: Any = self._channel.unary_unary(_INFER)

    def close(self) -> None:
        """Close the connections."""
        self._drop()
        self._channel.close()

    def ask(self, content: Content, protocol: Protocol, model: str, version: str, level: int) -> Answer:
        """The answer of this version of a model; `level`: Triton's priority level, 0 for none."""
        if protocol == "grpc":
            request = service_pb2.ModelInferRequest.FromString(content.text)
            request.model_name, request.model_version = model, version
            if level:
                request.parameters[messages.PRIORITY_PARAMETER].uint64_param = level
            try:
                return Answer(self._infer(request.SerializeToString(), timeout=TIMEOUT_S))
            except grpc.RpcError as error:
                raise NoAnswerError(f"{error.code().name}: {error.details()}") from None
        text = content.text
        if level:
            asked = orjson.loads(text)
            asked.setdefault("parameters", {})[messages.PRIORITY_PARAMETER] = level
            text = orjson.dumps(asked)
        headers = {_JSON_SIZE: str(len(text))} if content.tail else {}
        path = f"/v2/models/{model}/versions/{version}/infer"
        status, size, body = self._sent("POST", path, text + content.tail, headers, TIMEOUT_S)
        if status != 200:
            raise NoAnswerError(f"{status}: {body[:300].decode(errors='replace')}")
        return Answer(body[:size], body[size:])

    def told(self, path: str) -> Any:
        """What Triton says at a path, read as JSON; None where it says that there is no such thing."""
        status, _, body = self._sent("GET", path, b"", {}, ASK_TIMEOUT_S)
        if status in (400, 404):
            return None
        if status != 200:
            raise NoAnswerError(f"{status}: {body[:300].decode(errors='replace')}")
        return orjson.loads(body)

    def _sent(
        self, method: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> tuple[int, int, bytes]:
        """(status, size of the JSON, content). A kept connection that Triton has closed meanwhile is opened again."""
        is_fresh = self._connection is None
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._address, timeout=timeout_s)
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            content = answer.read()
            return answer.status, int(answer.getheader(_JSON_SIZE, len(content))), content
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
            self._drop()
            if is_fresh:
                raise NoAnswerError(repr(error)) from None
            return self._sent(method, path, body, headers, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self._drop()
            raise NoAnswerError(repr(error)) from None

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
            self._connection = None


def version_of(answer: Answer, protocol: Protocol) -> str:
    """Which version answered."""
    if protocol == "grpc":
        return str(service_pb2.ModelInferResponse.FromString(answer.text).model_version)
    return str(orjson.loads(answer.text).get("model_version", ""))


def rows_of(content: Content, protocol: Protocol) -> int:
    """Rows of a request to a model with a batch dimension; 0 where it has no input that says so."""
    if protocol == "grpc":
        inputs = service_pb2.ModelInferRequest.FromString(content.text).inputs
        return int(inputs[0].shape[0]) if inputs and inputs[0].shape else 0
    shape = orjson.loads(content.text)["inputs"][0]["shape"]
    return int(shape[0]) if shape else 0


def several(content: Content, protocol: Protocol, copies: int) -> Content:
    """The same request with its rows so many times over; of a model whose first dimension is the batch."""
    if protocol == "grpc":
        return Content(_several_grpc(content.text, copies))
    asked = orjson.loads(content.text)
    parts: list[bytes | memoryview] = []
    start = 0
    for tensor in asked["inputs"]:
        tensor["shape"][0] *= copies
        size = (tensor.get("parameters") or {}).get("binary_data_size")
        if size is None:
            tensor["data"] = tensor["data"] * copies  # flat or nested, rows come first
            continue
        parts += [content.tail[start : start + size]] * copies
        start += size
        tensor["parameters"]["binary_data_size"] = size * copies
    return Content(orjson.dumps(asked), b"".join(parts))


def _several_grpc(text: bytes, copies: int) -> bytes:
    request = service_pb2.ModelInferRequest.FromString(text)
    for place, tensor in enumerate(request.inputs):
        tensor.shape[0] *= copies
        if request.raw_input_contents:
            request.raw_input_contents[place] *= copies
        for _, values in tensor.contents.ListFields():
            values.extend(list(values) * (copies - 1))
    found: bytes = request.SerializeToString()
    return found
