"""What does a model answer to these rows? Requests of real rows, in the lowest class of callers, and their answers as arrays.

asker = Asker(control, "ctr__next")
for inputs in asker.requests(rows, 256):
    outputs, version = asker.ask(inputs)          # {"prob": FP32[4,1]}, "2"
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2

from tritonpilot import samples
from tritonpilot.control import BusyError, Control
from tritonpilot.errors import ModelError, ServerError
from tritonpilot.probes import datatype_of, lowest_level, probe_of, varied

Array = NDArray[Any]
Arrays = Mapping[str, Array]

ANSWER_S = 30.0
PATIENCE_S = 10.0  # with a queue that is full
REST_S = 0.05
LARGEST = 16  # rows of a request
BURST_S = 0.05  # how long an execution may take: who serves live requests beside it must not wait longer
LARGEST_BYTES = 16 * 2**20


class Asker:
    """One model of a Triton, or one version of it. Raises ServerError when it is not loaded."""

    def __init__(self, control: Control, model: str, version: str = "") -> None:
        self.model = model
        self.version = version
        self.took_s = 0.0
        """By the last request; then it rests for as long."""
        self.config = control.config(model, version)
        self._control = control
        self._row_s = BURST_S  # at most, by the last request
        self._level = lowest_level(self.config)
        self._datatypes = {tensor.name: datatype_of(tensor.data_type) for tensor in self.config.input}
        self._needed = [tensor.name for tensor in self.config.input if not tensor.optional]

    @property
    def is_batched(self) -> bool:
        """Whether its requests have a batch dimension."""
        return bool(self.config.max_batch_size > 0)

    @property
    def free(self) -> frozenset[str]:
        """Outputs whose answers have no fixed size."""
        return frozenset(tensor.name for tensor in self.config.output if any(size < 0 for size in tensor.dims))

    def check(self, rows: Arrays) -> None:
        """Raise ModelError when the rows lack an input of the model."""
        if absent := [name for name in self._needed if name not in rows]:
            raise ModelError(
                f"The rows have no array for the input {absent[0]} of {self.model} (they have {', '.join(rows)}). Nothing was "
                "changed. Make them again."
            )

    def requests(self, rows: Arrays, most: int) -> Iterator[tuple[NDArray[np.intp], dict[str, Array]]]:
        """(places of the rows, inputs) of requests for at most `most` rows, evenly taken: every second one of a single row, the
        others as large as the model takes, up to LARGEST rows and BURST_S, by what those before have taken."""
        count = len(next(iter(rows.values())))
        places = np.unique(np.linspace(0, count - 1, min(most, count)).round().astype(np.intp))
        row_bytes = sum(array[:1].nbytes for array in rows.values())
        largest = max(1, min(self.config.max_batch_size or 1, LARGEST, LARGEST_BYTES // max(1, row_bytes)))
        start, turn = 0, 0
        while start < len(places):
            size = 1 if turn % 2 == 0 else min(largest, max(1, int(BURST_S / self._row_s)))
            taken = places[start : start + size]
            yield taken, self.inputs(rows, taken)
            start, turn = start + size, turn + 1

    def inputs(self, rows: Arrays, places: NDArray[np.intp]) -> dict[str, Array]:
        """These rows as the inputs of one request; a single one where there is no batch dimension."""
        found = {}
        for name in self._datatypes:
            if name in rows:
                array = rows[name][places] if self.is_batched else rows[name][places[0]]
                least = 2 if self.is_batched else 1
                found[name] = array.reshape(*array.shape, 1) if array.ndim < least else array
        return found

    def ask(self, inputs: Arrays, *, past_cache: bool = False) -> tuple[dict[str, Array], str]:
        """(outputs, version that answered). Raises ServerError; a full queue is waited for.

        `past_cache`: of a model with Triton's response cache, floats differ in their last bits from call to call.
        """
        past_cache = past_cache and self.config.response_cache.enable
        request = service_pb2.ModelInferRequest(
            model_name=self.model, model_version=self.version, id="tritonpilot-swap"
        )
        for name, array in inputs.items():
            request.inputs.add(name=name, datatype=self._datatypes[name], shape=array.shape)
            data = samples.raw(array)
            request.raw_input_contents.append(varied(data, self._datatypes[name]) if past_cache else data)
        if self._level:
            request.parameters["priority"].uint64_param = self._level
        found = self._asked(request)
        if self.is_batched:
            self._row_s = self.took_s / len(next(iter(inputs.values())))
        return found

    def ask_once(self, folder: Any = None) -> tuple[dict[str, Array], str]:
        """Its answer to what a watch asks it: its warmup data, else zeros."""
        return self._asked(probe_of((self.model, self.version), self.config, folder).request)

    def _asked(self, request: service_pb2.ModelInferRequest) -> tuple[dict[str, Array], str]:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            asked_s = time.perf_counter()
            try:
                answer = self._control.infer(request, timeout_s=ANSWER_S)
                break
            except BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(REST_S)
        self.took_s = time.perf_counter() - asked_s
        # Half of the time belongs to live requests.
        time.sleep(self.took_s)
        return arrays_of(answer), str(answer.model_version)


def arrays_of(answer: service_pb2.ModelInferResponse) -> dict[str, Array]:
    """Its outputs. Raises ServerError for an answer whose data do not fit its shapes."""
    result = grpcclient.InferResult(answer)
    found: dict[str, Array] = {}
    for output in answer.outputs:
        try:
            array = result.as_numpy(output.name)
        except ValueError:
            array = None
        if array is None:
            raise ServerError(
                f"Model {answer.model_name!r} answered {output.name} with data that do not fit its shape."
            )
        found[output.name] = array
    return found
