"""How do many requests become one run of a PyTorch model? Gathered into memory made once, run, fetched and split again.

    runner = TorchRunner(forward.call, execution, outputs)
    runner.run([[x_of_first], [x_of_second]])  -> [[score_of_first], [score_of_second]]
    runner.run_alone([x])                      -> [score]          a model without a batch dimension

Arrays are numpy in the order of the model's arguments. Answers may lie in memory that the next run overwrites: send them
first, or ask for `is_fresh`. On a GPU inputs are gathered in page-locked memory and copied without waiting; outputs come
back the same way, and the stream is waited for once.

NOTE: the GPU part (`_to_device`, `_fetched`, `_recover`) is written by PyTorch's documentation and has not been run on one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pilotlib.split import split
from pilotlib.tensors import Array
from pilotlib.torch_names import Places, check_results
from pilotlib.torch_switches import Execution

MAX_BUFFER_BYTES = 256 << 20  # a larger gathering is allocated for its run and freed


class OutputTypeError(TypeError):
    """The model gives another element type than its config says."""


class ScalarError(TypeError):
    """The model gives a tensor without dimensions, which Triton cannot carry."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of the config, in its order: their names, which results of the model they are, and their types."""

    names: tuple[str, ...]
    places: Places
    types: tuple[torch.dtype, ...]


class TorchRunner:
    """Runs one model from one thread."""

    def __init__(
        self, call: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]], execution: Execution, outputs: Outputs
    ) -> None:
        self._call = call
        self._how = execution
        self._outputs = outputs
        self._is_gpu = execution.device.type == "cuda"
        self._gathered: list[Staging] = []
        self._fetched_into = [Staging(execution.is_pinned) for _ in outputs.names]
        self._until_cleaning = execution.empty_cache_every
        self._are_results_checked = False

    def run(self, requests: Sequence[Sequence[Array]], is_fresh: bool = False) -> list[list[Array]]:
        """Answers per request, arrays in the order of the config's outputs. All requests have the same trailing shapes.

        Raises what the model raises, NamesError, OutputTypeError and SplitError.
        """
        rows = [arrays[0].shape[0] for arrays in requests]
        inputs = list(zip(*requests, strict=True))
        return split(self._run(inputs, is_fresh), self._outputs.names, rows, sum(rows))

    def run_alone(self, arrays: Sequence[Array]) -> list[Array]:
        """The outputs of one request as they are. Raises what the model raises, NamesError, OutputTypeError and ScalarError."""
        outputs = self._run([(array,) for array in arrays], is_fresh=True)
        for name, output in zip(self._outputs.names, outputs, strict=True):
            if output.ndim == 0:
                raise ScalarError(f'output "{name}" is a scalar, which Triton cannot carry: give it the shape [1]')
        return outputs

    def _run(self, inputs: Sequence[Sequence[Array]], is_fresh: bool) -> list[Array]:
        if not self._gathered:
            self._gathered = [Staging(self._how.is_pinned) for _ in inputs]
        try:
            with torch.inference_mode() if self._how.is_inference_mode else torch.no_grad():
                tensors = [
                    self._to_device(arrays, staging, is_fresh)
                    for arrays, staging in zip(inputs, self._gathered, strict=True)
                ]
                if self._how.autocast is None:
                    results = self._call(tensors)
                else:
                    with torch.autocast(self._how.device.type, self._how.autocast):
                        results = self._call(tensors)
                return self._fetched(self._picked(results), is_fresh)
        except Exception:
            if self._is_gpu:
                self._recover()
            raise
        finally:
            self._clean()

    def _to_device(self, arrays: Sequence[Array], staging: Staging, is_fresh: bool) -> torch.Tensor:
        if self._is_gpu:
            # NOTE: not overwritten before the copy has been made: every run ends with waiting for the stream.
            host = torch.from_numpy(staging.gather(arrays))
            return host.to(self._how.device, non_blocking=self._how.is_pinned)
        if len(arrays) == 1:
            return torch.from_numpy(arrays[0])
        return torch.from_numpy(np.concatenate(arrays) if is_fresh else staging.gather(arrays))

    def _picked(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if not self._are_results_checked:
            check_results(self._outputs.names, self._outputs.places, len(results))
            self._are_results_checked = True
        picked = [results[place] for place in self._outputs.places.indices]
        for index, (tensor, wanted) in enumerate(zip(picked, self._outputs.types, strict=True)):
            if tensor.dtype is wanted:
                continue
            if self._how.autocast is None:
                raise OutputTypeError(
                    f'output "{self._outputs.names[index]}": the config says {wanted}, the model gives {tensor.dtype}; '
                    "correct data_type in config.pbtxt"
                )
            picked[index] = tensor.to(wanted)
        return picked

    def _fetched(self, tensors: Sequence[torch.Tensor], is_fresh: bool) -> list[Array]:
        if not self._is_gpu:
            return [tensor.numpy(force=True) for tensor in tensors]
        if is_fresh or not self._how.is_pinned:
            return [tensor.numpy(force=True) for tensor in tensors]
        hosts = [
            torch.from_numpy(staging.place(tuple(tensor.shape), _numpy_type(tensor)))
            for tensor, staging in zip(tensors, self._fetched_into, strict=True)
        ]
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(self._how.device).synchronize()
        return [host.numpy() for host in hosts]

    def _recover(self) -> None:
        """After a failed run: nothing of it may still read what the next one overwrites. Raises when the GPU is lost."""
        torch.cuda.current_stream(self._how.device).synchronize()
        torch.cuda.empty_cache()  # it may have been memory that failed: the next try has half the rows

    def _clean(self) -> None:
        if self._until_cleaning == 0:
            return
        self._until_cleaning -= 1
        if self._until_cleaning == 0:
            torch.cuda.empty_cache()
            self._until_cleaning = self._how.empty_cache_every


class Staging:
    """Memory for the rows of one tensor, reused; grown by doubling up to MAX_BUFFER_BYTES, page-locked if wanted."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._flat: Array = np.empty(0, np.uint8)

    def gather(self, arrays: Sequence[Array]) -> Array:
        """The arrays below each other, here."""
        if len(arrays) == 1:
            found = self.place(arrays[0].shape, arrays[0].dtype)
            found[...] = arrays[0]
            return found
        shape = (sum(array.shape[0] for array in arrays), *arrays[0].shape[1:])
        return np.concatenate(arrays, out=self.place(shape, arrays[0].dtype))

    def place(self, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> Array:
        """An array of that shape in this memory, with whatever it holds; elsewhere when it would be too large."""
        size = math.prod(shape) * dtype.itemsize
        if size > MAX_BUFFER_BYTES:
            return np.empty(shape, dtype)
        if size > self._flat.size:
            self._flat = _memory(1 << (size - 1).bit_length(), self._is_pinned).numpy()
        return self._flat[:size].view(dtype).reshape(shape)


def torch_type(dtype: np.dtype[np.generic]) -> torch.dtype:
    """PyTorch's name of a numpy type."""
    return torch.from_numpy(np.empty(0, dtype)).dtype


def _memory(size: int, is_pinned: bool) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)


def _numpy_type(tensor: torch.Tensor) -> np.dtype[np.generic]:
    found: np.dtype[np.generic] = torch.empty(0, dtype=tensor.dtype).numpy().dtype
    return found
