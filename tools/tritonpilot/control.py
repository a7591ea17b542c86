"""Talk to a running Triton over gRPC: what is loaded, load, unload, a real inference, statistics.

    with Control(server.endpoints.grpc, key) as control:
        control.load("ctr")              # verified by the index and an inference
        control.statistics("ctr")

A change is believed when the repository index and a real inference say so, not when the call returns: Triton has answered a
load of a broken model with success.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from google.protobuf import json_format
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from tritonpilot.errors import ServerError
from tritonpilot.model_config import TRACE_RATE, ModelConfig
from tritonpilot.tritonserver import CONTROL_HEADER

Inputs = Mapping[str, npt.NDArray[np.generic]]

ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
    "BYTES": 4,  # an empty string is its length, 0, in four bytes
}
_POLL_S = 0.05
_QUEUE_REFUSALS = 3  # a probe that the queue policy of a busy model rejects is sent this often
_UNHEALTHY_S = 3.0  # on a busy machine a stub misses Triton's heartbeat for a moment; a dead one stays unhealthy


@dataclass(frozen=True)
class ModelState:
    """One line of the repository index."""

    name: str
    version: str  # "" when Triton knows no version of it
    state: str  # "READY", "LOADING", "UNLOADING", "UNAVAILABLE" or "" (never loaded)
    reason: str


class NotLoadedError(ServerError):
    """Triton did not load a model; `reason` is its own, "" when the index has none."""

    def __init__(self, name: str, reason: str) -> None:
        self.reason = one_paragraph(reason)
        why = f": {self.reason}" if self.reason else " and the index gives no reason; the server's log does"
        super().__init__(f"Model {name!r} did not load{why}.")


class BusyError(ServerError):
    """A model's queue policy turned a request away: its queue is full, or the request waited too long in it."""


class RestrictedError(ServerError):
    """The server's control key was missing or wrong."""


@dataclass(frozen=True)
class Duration:
    """How often something happened to a model, and how long it took in all, in nanoseconds."""

    count: int
    ns: int


@dataclass(frozen=True)
class ModelStatistics:
    """Triton's counters of one model version since it was loaded, under Triton's names.

    `inference_count` counts rows and `execution_count` batches: their quotient is the mean batch size.
    `batch_executions` maps batch sizes to how often one of that size was executed.
    """

    name: str
    version: str
    inference_count: int
    execution_count: int
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration
    batch_executions: Mapping[int, int]
    batch_ns: Mapping[int, int]  # time of all executions of that many rows: input, inference and output


class Control:
    """A gRPC connection to one Triton, at "host:port", with the key of its restricted APIs."""

    def __init__(self, grpc_endpoint: str, key: str | None = None) -> None:
        self.endpoint = grpc_endpoint
        self._metadata = [(f"triton-grpc-protocol-{CONTROL_HEADER}", key)] if key else []
        options = [
            ("grpc.enable_http_proxy", 0),  # http_proxy is for the way out, not for loopback
            ("grpc.use_local_subchannel_pool", 1),  # no back-off inherited from an earlier server at this port
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
        ]
        self._channel = grpc.insecure_channel(grpc_endpoint, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def __enter__(self) -> Control:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def index(self, *, timeout_s: float = 10) -> list[ModelState]:
        """Every model that the server knows, one entry per version. Raises ServerError, also when the key is not accepted."""
        request = service_pb2.RepositoryIndexRequest()
        answer = self._call("RepositoryIndex", request, "list its models", timeout_s)
        return [ModelState(model.name, model.version, model.state, model.reason) for model in answer.models]

    def load(
        self,
        name: str,
        *,
        config: ModelConfig | None = None,
        probe_inputs: Inputs | None = None,
        probe: bool = True,
        timeout_s: float = 120,
    ) -> list[ModelState]:
        """Load `name`, or load it again after its files changed; returns its versions in the index.

        `config` takes the place of the one on disk, also in later loads, until that file changes. Where a loaded model's config or
        file differs in nothing but its instances, they are changed in place.
        Raises ServerError unless the index then says READY and an inference is answered (`probe_inputs`, else zeros; `probe=False`
        leaves it out). After a failed load Triton goes on serving the version that it served before, and the error says so.
        """
        deadline = time.monotonic() + timeout_s
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        if config is not None:
            request.parameters["config"].string_param = json_format.MessageToJson(
                config, preserving_proto_field_name=True
            )
        try:
            self._call("RepositoryModelLoad", request, f"load model {name!r}", timeout_s)
        except ServerError as refused:
            serving = [state.version for state in self.index() if state.name == name and state.state == "READY"]
            now = f"version {', '.join(serving)} of it is still served" if serving else "it is not served"
            raise ServerError(f"{refused} As it is now, {now}.") from None
        versions = self.wait_ready(name, deadline)
        if probe:
            self.probe(name, probe_inputs, timeout_s=max(1.0, deadline - time.monotonic()))
        return versions

    def unload(self, name: str, *, dependents: bool = False, timeout_s: float = 60) -> None:
        """Unload `name`, and with `dependents` what an ensemble is made of; returns when the index agrees.

        Requests that are in flight are answered first. Raises ServerError when that takes longer than `timeout_s`.
        """
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        request.parameters["unload_dependents"].bool_param = dependents
        self._call("RepositoryModelUnload", request, f"unload model {name!r}", timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            left = [state for state in self.index() if state.name == name]
            if all(state.state == "" or state.reason == "unloaded" for state in left):
                return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"Model {name!r} was asked to unload and is still {left[0].state} after {timeout_s:.0f} s: requests are in "
                    "flight or its stub hangs. It takes no new requests. Look at the server's log."
                )
            time.sleep(_POLL_S)

    def wait_ready(self, name: str, deadline: float) -> list[ModelState]:
        """Wait until the index says READY for `name`; `deadline` in time.monotonic(). Raises ServerError with Triton's reason."""
        while True:
            versions = [state for state in self.index() if state.name == name]
            # Versions that a version policy has retired stay in the index as unloaded.
            current = [state for state in versions if state.reason != "unloaded"]
            # NOTE: no state at all means that Triton refused to begin: it answers when what it loads has begun.
            failed = [state for state in current if state.state in ("UNAVAILABLE", "")]
            if failed or not current:
                raise NotLoadedError(name, failed[0].reason if failed else "")
            if all(state.state == "READY" for state in current):
                return current
            if time.monotonic() > deadline:
                states = ", ".join(f"version {state.version or '?'} {state.state or 'not loaded'}" for state in current)
                raise ServerError(f"Model {name!r} is not ready in time: {states}. Look at the server's log.")
            time.sleep(_POLL_S)

    def probe(self, name: str, inputs: Inputs | None = None, *, version: str = "", timeout_s: float = 30) -> None:
        """One real inference of batch 1; raises ServerError with Triton's words when it is not answered.

        `inputs` maps input names to arrays with all dimensions that the model's metadata shows; without them the
        request is zeros, false and empty strings, each dimension of free size being 1. A model that rejects such data needs
        `inputs`.
        """
        deadline = time.monotonic() + timeout_s
        config = self.config(name, version, timeout_s=timeout_s)
        optional = {tensor.name for tensor in config.input if tensor.optional}
        request = self._probe_request(name, version, inputs, optional, timeout_s)
        if config.HasField("sequence_batching"):
            request.parameters["sequence_id"].int64_param = 1
            request.parameters["sequence_start"].bool_param = True
            request.parameters["sequence_end"].bool_param = True
        refusals = 0
        healthy_until = min(deadline, time.monotonic() + _UNHEALTHY_S)
        while True:
            left = max(0.1, deadline - time.monotonic())
            try:
                if config.model_transaction_policy.decoupled:
                    self._infer_decoupled(request, left)
                else:
                    self._stub.ModelInfer(request, timeout=left)
                return
            except grpc.RpcError as failed:
                refusals += 1
                # A queue policy answers so when the queue is full or the request waited too long in it.
                queued = failed.code() == grpc.StatusCode.UNAVAILABLE and "tcp" not in failed.details()
                if queued and refusals < _QUEUE_REFUSALS:
                    continue
                if "is not healthy" in failed.details() and time.monotonic() < healthy_until:
                    time.sleep(10 * _POLL_S)
                    continue
                asked = "the given inputs" if inputs is not None else "zeros"
                raise ServerError(
                    f"Model {name!r} is loaded, but does not answer an inference with {asked}: {_text(failed)}. It is not taken "
                    "for ready. Look at the model, or give it inputs that it accepts: `samples` of its service or step."
                ) from None

    def infer(self, request: service_pb2.ModelInferRequest, *, timeout_s: float = 30) -> service_pb2.ModelInferResponse:
        """The answer to a request that is made already. Raises BusyError when the queue turns it away, else ServerError."""
        try:
            return self._stub.ModelInfer(request, timeout=timeout_s)
        except grpc.RpcError as failed:
            said = f"Model {request.model_name!r} at {self.endpoint} did not answer an inference: {_text(failed)}."
            queued = failed.code() == grpc.StatusCode.UNAVAILABLE and "tcp" not in failed.details()
            raise (BusyError if queued else ServerError)(said) from None

    def statistics(self, name: str = "", version: str = "", *, timeout_s: float = 10) -> list[ModelStatistics]:
        """Triton's counters, one entry per version of `name`, or of all models when it is empty. Needs no key."""
        request = service_pb2.ModelStatisticsRequest(name=name, version=version)
        answer = self._call("ModelStatistics", request, "give statistics", timeout_s)
        return [_statistics(model) for model in answer.model_stats]

    def config(self, name: str, version: str = "", *, timeout_s: float = 10) -> ModelConfig:
        """The model's configuration as Triton completed it. Needs no key. Raises ServerError when the model is not loaded."""
        asked = service_pb2.ModelConfigRequest(name=name, version=version)
        return self._call("ModelConfig", asked, f"give the config of {name!r}", timeout_s).config

    def set_trace_rate(self, name: str, *, timeout_s: float = 10) -> int:
        """Let Triton trace one of so many requests to `name` as its config says, and return that number; 0: it says nothing.

        Triton forgets it when it ends, not when the model is loaded again. Raises ServerError.
        """
        config = self.config(name, timeout_s=timeout_s)
        if TRACE_RATE not in config.parameters:
            return 0
        rate = int(config.parameters[TRACE_RATE].string_value)
        request = service_pb2.TraceSettingRequest(model_name=name)
        request.settings["trace_rate"].value.append(str(rate))
        self._call("TraceSetting", request, f"set the trace rate of {name!r}", timeout_s)
        return rate

    def server_version(self, *, timeout_s: float = 10) -> str:
        """The version that the server says it is, as "2.51.0". Needs no key."""
        answer = self._call("ServerMetadata", service_pb2.ServerMetadataRequest(), "describe itself", timeout_s)
        version: str = answer.version
        return version

    def _call(self, method: str, request: object, what: str, timeout_s: float) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as failed:
            if "This protocol is restricted" in failed.details():
                raise RestrictedError(
                    f"Triton at {self.endpoint} refused to {what}: this API is restricted, and the key was missing or wrong. "
                    "Nothing was changed. Set TRITONPILOT_CONTROL_KEY to the key that the server was started with."
                ) from None
            raise ServerError(f"Triton at {self.endpoint} did not {what}: {_text(failed)}.") from None

    def _probe_request(
        self, name: str, version: str, inputs: Inputs | None, optional: Collection[str], timeout_s: float
    ) -> service_pb2.ModelInferRequest:
        request = service_pb2.ModelInferRequest(model_name=name, model_version=version, id="tritonpilot-probe")
        if inputs is not None:
            for key, array in inputs.items():
                request.inputs.add(name=key, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
                request.raw_input_contents.append(_raw(array))
            return request
        asked = service_pb2.ModelMetadataRequest(name=name, version=version)
        for tensor in self._call("ModelMetadata", asked, f"describe model {name!r}", timeout_s).inputs:
            if tensor.name in optional:
                continue
            shape = [1 if size < 0 else size for size in tensor.shape]
            request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
            request.raw_input_contents.append(bytes(math.prod(shape) * ELEMENT_BYTES[tensor.datatype]))
        return request

    def _infer_decoupled(self, request: service_pb2.ModelInferRequest, timeout_s: float) -> None:
        def once() -> Iterator[service_pb2.ModelInferRequest]:
            yield request

        # The end of the stream is the final answer; the client closes its half after the one request.
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for answer in self._stub.ModelStreamInfer(once(), timeout=timeout_s):
            if answer.error_message:
                raise ServerError(f"Model {request.model_name!r} does not answer an inference: {answer.error_message}.")


def one_paragraph(text: str) -> str:
    """Triton's words in one line: with the place in the model's own code, without Python's import machinery."""
    lines = (line.strip() for line in text.replace("\\n", "\n").splitlines())
    return " ".join(line for line in lines if line and not line.startswith("<frozen ")).rstrip(".; ")


def _text(failed: grpc.RpcError) -> str:
    return one_paragraph(failed.details() or failed.code().name)


def _raw(array: npt.NDArray[np.generic]) -> bytes:
    if np_to_triton_dtype(array.dtype) == "BYTES":
        serialized = serialize_byte_tensor(array)
        return bytes(serialized.item()) if serialized.size else b""
    return np.ascontiguousarray(array).tobytes()


def _statistics(model: service_pb2.ModelStatistics) -> ModelStatistics:
    counters = {
        kind: Duration(getattr(model.inference_stats, kind).count, getattr(model.inference_stats, kind).ns)
        for kind in (
            "success",
            "fail",
            "queue",
            "compute_input",
            "compute_infer",
            "compute_output",
            "cache_hit",
            "cache_miss",
        )
    }
    return ModelStatistics(
        name=model.name,
        version=model.version,
        inference_count=model.inference_count,
        execution_count=model.execution_count,
        batch_executions={batch.batch_size: batch.compute_infer.count for batch in model.batch_stats},
        batch_ns={
            batch.batch_size: batch.compute_input.ns + batch.compute_infer.ns + batch.compute_output.ns
            for batch in model.batch_stats
        },
        **counters,
    )
