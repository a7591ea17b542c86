"""The same request by every way that Triton offers: HTTP with JSON or binary tensors, gRPC, and shared memory under both.

with Ways(server) as ways:
    for name, send in ways.all().items():
        outputs = send("ctr", inputs)          # name -> array; Refusal when the server refuses
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor

from tritonpilot.server import EmbeddedServer

Arrays = Mapping[str, npt.NDArray[Any]]
Send = Callable[[str, Arrays], dict[str, npt.NDArray[Any]]]
TIMEOUT_S = 60.0
RELEASE_S = 5.0


class Refusal(Exception):  # noqa: N818  an answer that is looked at, not a failure of ours
    """The server answered with an error; `status` is HTTP's number or gRPC's name."""

    def __init__(self, said: str, status: str) -> None:
        super().__init__(said)
        self.status = status


class Ways:
    """Connections to one server; they end with the block. Not for several threads."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._stack = ExitStack()
        self._http = httpclient.InferenceServerClient(
            server.endpoints.http, connection_timeout=TIMEOUT_S, network_timeout=TIMEOUT_S
        )
        self._grpc = grpcclient.InferenceServerClient(server.endpoints.grpc)

    def __enter__(self) -> Ways:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self._grpc.close()

    def all(self) -> dict[str, Send]:
        """Name of the way -> how to send a request by it. Strings are object arrays of bytes."""
        return {
            "http json": self.json,
            "http binary": self.binary,
            "grpc": self.grpc,
            "http shared memory": lambda model, inputs: self.shared(self._http, httpclient, model, inputs),
            "grpc shared memory": lambda model, inputs: self.shared(self._grpc, grpcclient, model, inputs),
        }

    def json(self, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Numbers as JSON prints them, strings as UTF-8; UnicodeDecodeError for those that are not."""
        tensors = [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": np_to_triton_dtype(array.dtype),
                "data": [each.decode() for each in array.ravel()]
                if array.dtype == np.object_
                else array.ravel().tolist(),
            }
            for name, array in inputs.items()
        ]
        body = json.dumps({"inputs": tensors}).encode()
        answer = self._http._post(f"v2/models/{model}/infer", body, headers=None, query_params=None)
        content = json.loads(answer.read())
        if answer.status_code != 200:
            raise Refusal(str(content.get("error")), str(answer.status_code))
        return {each["name"]: _from_json(each) for each in content["outputs"]}

    def binary(self, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """HTTP with the tensors' bytes after the JSON."""
        return self._infer(self._http, httpclient, model, inputs)

    def grpc(self, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """gRPC with raw contents."""
        return self._infer(self._grpc, grpcclient, model, inputs)

    def shared(self, client: Any, library: Any, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        """Inputs and outputs in one region of system shared memory; outputs of strings come in the body."""
        expected = self._infer(client, library, model, inputs)  # tells the outputs' sizes
        placed = {name: array for name, array in expected.items() if array.dtype != np.object_ and array.nbytes}
        data = {
            name: np.frombuffer(serialize_byte_tensor(array).item(), np.uint8) if array.dtype == np.object_ else array
            for name, array in inputs.items()
        }
        sizes = [array.nbytes for array in (*data.values(), *placed.values())]
        offsets = [int(end) for end in np.cumsum([0, *(-(-size // 64) * 64 for size in sizes)])]
        name = f"tritonpilot-proof-{uuid.uuid4().hex[:12]}"
        region = shm.create_shared_memory_region(name, f"/{name}", max(64, offsets[-1]))
        header = self._server.control_header
        headers = {header if library is httpclient else f"triton-grpc-protocol-{header}": self._server.control_key}
        try:
            client.register_system_shared_memory(name, f"/{name}", max(64, offsets[-1]), headers=headers)
            try:
                tensors, outputs = [], []
                for (key, array), offset in zip(data.items(), offsets, strict=False):
                    shm.set_shared_memory_region(region, [array], offset)
                    tensor = library.InferInput(key, list(inputs[key].shape), np_to_triton_dtype(inputs[key].dtype))
                    tensor.set_shared_memory(name, array.nbytes, offset)
                    tensors.append(tensor)
                places = dict(zip(placed, offsets[len(data) :], strict=False))
                for key in expected:
                    outputs.append(library.InferRequestedOutput(key))
                    if key in placed:
                        outputs[-1].set_shared_memory(name, placed[key].nbytes, places[key])
                result = client.infer(model, tensors, outputs=outputs)
                return {
                    key: shm.get_contents_as_numpy(region, array.dtype, _shape(result, key), places[key]).copy()
                    if key in placed
                    else result.as_numpy(key)
                    for key, array in expected.items()
                }
            except InferenceServerException as refused:
                raise Refusal(str(refused.message()), str(refused.status())) from None
            finally:
                _unregister(client, name, headers)
        finally:
            shm.destroy_shared_memory_region(region)

    def _infer(self, client: Any, library: Any, model: str, inputs: Arrays) -> dict[str, npt.NDArray[Any]]:
        tensors = []
        for name, array in inputs.items():
            tensor = library.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        options = {"client_timeout": TIMEOUT_S} if library is grpcclient else {}
        try:
            result = client.infer(model, tensors, **options)
        except InferenceServerException as refused:
            raise Refusal(str(refused.message()), str(refused.status())) from None
        response = result.get_response()
        names = (
            [each["name"] for each in response["outputs"]]
            if isinstance(response, dict)
            else [o.name for o in response.outputs]
        )
        return {name: result.as_numpy(name) for name in names}


def _unregister(client: Any, name: str, headers: Mapping[str, str]) -> None:
    """Triton refuses while a request holds the region, which it does until a moment after its answer."""
    deadline = time.monotonic() + RELEASE_S
    while True:
        try:
            client.unregister_system_shared_memory(name, headers=headers)
            return
        except InferenceServerException as refused:
            if "in use" not in str(refused) or time.monotonic() > deadline:
                raise
            time.sleep(0.002)


def _from_json(output: Mapping[str, Any]) -> npt.NDArray[Any]:
    if output["datatype"] == "BYTES":
        array = np.empty(len(output["data"]), np.object_)
        array[:] = [each.encode() for each in output["data"]]
    else:
        # JSON has no NaN; Triton's printer writes FP32 with digits that are read back to the same bits.
        array = np.array(output["data"], httpclient.triton_to_np_dtype(output["datatype"]))
    return array.reshape(output["shape"])


def _shape(result: Any, name: str) -> list[int]:
    output = result.get_output(name)
    return [int(size) for size in (output["shape"] if isinstance(output, dict) else output.shape)]
