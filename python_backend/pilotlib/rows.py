"""How do many requests become one run? Their rows are gathered into buffers made once, run, and split again.

    runner = RowRunner(session, input_names, output_names, max_batch_size)
    runner.run([[a, b], [c, d]], output_names) -> [[y_of_first], [y_of_second]]

One list of arrays per request, in the order of `input_names`. Answers may be views into buffers that the next run
overwrites: send them first, or ask for `is_fresh`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pilotlib.onnx_session import Binding, OnnxSession, is_bindable
from pilotlib.signature import TensorSpec
from pilotlib.split import split
from pilotlib.tensors import STRING, Array

# A single request above this is run from where it lies; below, copying it costs less than passing arrays to the session
# (8 us a call on the ctr model, against 10 us for copying 64 KiB).
COPY_BELOW_BYTES = 64 << 10
MAX_BINDINGS = 256  # prepared runs kept, one per number of rows; a few KiB each
MAX_BUFFER_BYTES = 256 << 20  # a larger gathering is allocated for its run and freed


class RowRunner:
    """Runs requests of a model with a batch dimension, together."""

    def __init__(
        self, session: OnnxSession, input_names: Sequence[str], output_names: Sequence[str], max_batch_size: int
    ) -> None:
        specs = {s.name: s for s in session.signature.inputs + session.signature.outputs + session.signature.optional}
        self._session = session
        self._input_names = tuple(input_names)
        self._output_names = tuple(output_names)
        self._max_rows = max_batch_size
        self._buffers = [RowBuffer(specs[name], max_batch_size) for name in input_names]
        self._outputs: list[Array] = []
        self._prepared: dict[int, tuple[Binding, list[Array], list[Array]]] = {}
        self._can_bind = False
        self._output_specs = [specs[name] for name in output_names]
        self._can_bind = is_bindable([specs[name] for name in self._input_names] + self._output_specs)

    def run(
        self, requests: Sequence[Sequence[Array]], output_names: Sequence[str], is_fresh: bool = False
    ) -> list[list[Array]]:
        """Answers per request, arrays in the order of `output_names`. Raises what ONNX Runtime raises, and SplitError."""
        rows = [arrays[0].shape[0] for arrays in requests]
        total = sum(rows)
        if (
            self._can_bind
            and not is_fresh
            and len(output_names) == len(self._output_names)
            and total <= self._max_rows
            and (len(requests) > 1 or sum(array.nbytes for array in requests[0]) <= COPY_BELOW_BYTES)
        ):
            prepared = self._prepared.get(total) or self._prepare(total)
            if prepared is not None:
                return self._run_prepared(prepared, requests, rows)
        if len(requests) == 1:
            feeds = dict(zip(self._input_names, requests[0], strict=True))
        else:
            feeds = {
                name: self._buffers[index].gather([arrays[index] for arrays in requests], total)
                for index, name in enumerate(self._input_names)
            }
        return split(self._session.run(output_names, feeds), output_names, rows, total)

    def _run_prepared(
        self, prepared: tuple[Binding, list[Array], list[Array]], requests: Sequence[Sequence[Array]], rows: list[int]
    ) -> list[list[Array]]:
        binding, inputs, outputs = prepared
        if len(requests) == 1:
            for place, array in zip(inputs, requests[0], strict=True):
                place[...] = array
            binding.run()
            return [outputs]
        for place, arrays in zip(inputs, zip(*requests, strict=True), strict=True):
            np.concatenate(arrays, out=place)
        binding.run()
        answers = []
        start = 0
        for count in rows:
            stop = start + count
            answers.append([output[start:stop] for output in outputs])
            start = stop
        return answers

    def _prepare(self, total: int) -> tuple[Binding, list[Array], list[Array]] | None:
        if len(self._prepared) >= MAX_BINDINGS:
            return None
        if not self._outputs:
            self._outputs = [np.empty((self._max_rows, *s.dims[1:]), s.dtype.numpy) for s in self._output_specs]
        inputs = [buffer.rows(total) for buffer in self._buffers]
        outputs = [array[:total] for array in self._outputs]
        binding = self._session.bind(
            dict(zip(self._input_names, inputs, strict=True)), dict(zip(self._output_names, outputs, strict=True))
        )
        self._prepared[total] = binding, inputs, outputs
        return self._prepared[total]


class RowBuffer:
    """Where the rows of one input are gathered. Grows by doubling when dims are dynamic, up to MAX_BUFFER_BYTES."""

    def __init__(self, spec: TensorSpec, max_rows: int) -> None:
        self._dtype = spec.dtype.numpy
        self._is_string = spec.dtype is STRING
        self._fixed: Array | None = None
        self._flat: Array = np.empty(0, self._dtype)
        if is_bindable([spec]):
            self._fixed = np.empty((max_rows, *spec.dims[1:]), self._dtype)

    def rows(self, count: int) -> Array:
        """The first `count` rows of a buffer with static dims."""
        assert self._fixed is not None
        return self._fixed[:count]

    def gather(self, arrays: Sequence[Array], total: int) -> Array:
        """The arrays below each other, `total` rows; in this buffer where it is large enough."""
        if self._is_string:
            return np.concatenate(arrays)
        if self._fixed is not None and total <= len(self._fixed):
            return np.concatenate(arrays, out=self._fixed[:total])
        shape = (total, *arrays[0].shape[1:])
        count = int(np.prod(shape, dtype=np.int64))
        if count * self._dtype.itemsize > MAX_BUFFER_BYTES:
            return np.concatenate(arrays)
        if count > self._flat.size:
            self._flat = np.empty(1 << (count - 1).bit_length(), self._dtype)
        return np.concatenate(arrays, out=self._flat[:count].reshape(shape))
