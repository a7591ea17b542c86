"""Does a backend of one's own answer in the real Triton as it does in a test? The server half of pilotlib.testkit.

    with in_triton(Path("serving.py"), config, version_folder, probe=cases[0].inputs) as ask:
        ask({"text": np.array([[b"word"]], object)})            # {"length": array}, or InferenceServerException
        ask.together([first, second])                           # in flight at the same time

`ask` is what pilotlib.testkit.check takes.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.grpc as grpcclient
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tritonpilot.control import Inputs
from tritonpilot.errors import ModelError
from tritonpilot.model_config import to_text
from tritonpilot.server import EmbeddedServer

Array = npt.NDArray[Any]
MODEL = "under_test"
GATHER_US = 50_000  # queue delay, so that requests sent together are executed together
MOST_TOGETHER = 64


class Served:
    """One model of a running server, as a function."""

    def __init__(self, server: EmbeddedServer, model: str, data_types: Mapping[str, str]) -> None:
        self.server = server
        self._model = model
        self._data_types = data_types
        self._client: Any = grpcclient.InferenceServerClient(server.endpoints.grpc)
        self._threads = ThreadPoolExecutor(MOST_TOGETHER)

    def __call__(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of one request. Raises InferenceServerException with the backend's words.

        A BF16 tensor is given and taken as uint16 bit patterns.
        """
        tensors = []
        for name, array in inputs.items():
            data_type = self._data_types.get(name) or np_to_triton_dtype(array.dtype)
            tensor = grpcclient.InferInput(name, list(array.shape), data_type)
            tensor.set_data_from_numpy(_float_from_bits(array) if data_type == "BF16" else array)
            tensors.append(tensor)
        answer = self._client.infer(self._model, tensors)
        outputs: list[Any] = list(answer.get_response().outputs)
        return {str(output.name): _array(answer, output) for output in outputs}

    def together(self, requests: Sequence[Mapping[str, Array]]) -> list[Mapping[str, Array] | Exception]:
        """The answers, or errors, of requests that are in flight at the same time."""
        return list(self._threads.map(self._caught, requests))

    def close(self) -> None:
        """Close the connection."""
        self._threads.shutdown()
        self._client.close()

    def _caught(self, inputs: Mapping[str, Array]) -> Mapping[str, Array] | Exception:
        try:
            return self(inputs)
        except InferenceServerException as error:
            refused: Exception = error
            return refused


@contextmanager
def in_triton(
    model_py: Path, config: Mapping[str, Any], version_folder: Path | None = None, *, probe: Inputs | None = None
) -> Iterator[Served]:
    """Serve a model.py and the files of `version_folder` with this ModelConfig (JSON form) on a server of its own.

    `probe` are inputs that it answers without an error, when it does not answer zeros and empty strings. The config is
    completed with what a test needs: one CPU instance and a queue delay. Raises ModelError when Triton's schema does not
    know the config, ServerError when the model does not load.
    """
    with tempfile.TemporaryDirectory(prefix="tritonpilot-testkit-") as folder:
        model = Path(folder, "model_repository", MODEL)
        if version_folder is None:
            (model / "1").mkdir(parents=True)
        else:
            shutil.copytree(version_folder, model / "1", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(model_py, model / "1" / "model.py")
        (model / "config.pbtxt").write_text(to_text(_config(config), str(model_py)), encoding="utf-8")
        data_types = {entry["name"]: entry["data_type"].removeprefix("TYPE_") for entry in config["input"]}
        data_types = {name: "BYTES" if said == "STRING" else said for name, said in data_types.items()}
        with EmbeddedServer(
            model.parent, strict_config=True, probe_inputs={MODEL: probe} if probe is not None else None
        ) as server:
            served = Served(server, MODEL, data_types)
            try:
                yield served
            finally:
                served.close()


def _config(said: Mapping[str, Any]) -> Any:
    whole = {
        "instance_group": [{"count": 1, "kind": "KIND_CPU"}],
        **({"dynamic_batching": {"max_queue_delay_microseconds": GATHER_US}} if said.get("max_batch_size") else {}),
        **said,
        "name": MODEL,
        "backend": "python",
    }
    try:
        return json_format.ParseDict(whole, model_config_pb2.ModelConfig())
    except json_format.ParseError as error:
        raise ModelError(
            f"This is no ModelConfig of Triton: {error}. Nothing was started. Correct the config of the test."
        ) from None


def _array(answer: grpcclient.InferResult, output: Any) -> Array:
    array: Array = answer.as_numpy(output.name)
    if output.datatype == "BF16":  # the client gives float32, of which the upper half is the bits
        return (array.view(np.uint32) >> 16).astype(np.uint16)
    return array


def _float_from_bits(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)
