"""What is the same for an instance inside Triton and in the test kit: its context, and what an answer must look like.

backend = set_up(BackendClass, config, model="photos", version=1, version_folder=folder, infer=infer)
outputs = Outputs(config);  outputs.checked(answer, wanted)  -> {name: array}, or AnswerError
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pilotlib.parameters import COMMON_PREFIX, CommonParameters, parse, parse_strictly, table
from pilotlib.tensors import DTYPES_BY_CONFIG, STRING, Array
from pilotlib.verbs import Backend, Context, Infer

UNKNOWN = -1  # a dimension of any size
GC_THRESHOLD = 20_000  # containers made, less those freed, between two looks at the youngest


class AnswerError(RuntimeError):
    """A backend made outputs that its config does not promise: a mistake in the backend or the config."""


def set_up(
    backend_class: type[Backend[Any, Any, Any]],
    config: Mapping[str, Any],
    *,
    model: str,
    version: int,
    version_folder: Path,
    infer: Infer,
    device: str = "cpu",
    log: Callable[[str], None] = print,
    name: str = "",
) -> tuple[Backend[Any, Any, Any], CommonParameters, tuple[str, ...]]:
    """A backend ready to answer, the parameters that all backends have, and remarks on those that are ignored.

    `config` is the ModelConfig in JSON form. Raises ParameterError, and what the backend's own set_up raises.
    """
    raw = config.get("parameters", {})
    remarks: tuple[str, ...] = ()
    parameters: Any
    if backend_class.ignores_unknown_parameters:
        parameters, remarks = parse(_own(raw, backend_class.parameters), backend_class.parameters)
    else:
        parameters = parse_strictly(raw, backend_class.parameters)
    common, strange = parse(_common(raw, backend_class.parameters), CommonParameters)
    backend = backend_class()
    backend.set_up(
        Context(model, version, version_folder, config, parameters, cores_of_instance(config), infer, device, log, name)
    )
    return backend, common, remarks + strange


def cores_of_instance(config: Mapping[str, Any]) -> int:
    """The cores that this process may use, divided by the model's instances, at least one."""
    instances = sum(int(group.get("count", 1) or 1) for group in config.get("instance_group", ()))
    return max(1, len(os.sched_getaffinity(0)) // max(1, instances))


def settle() -> None:
    """Take what an instance has loaded out of the garbage collector's sight, and let it look less often.

    Call when it is set up. Each request makes some ten containers, so Python's 700 come together every few executions, and the
    oldest generation holds all of numpy and the runtime: 8 us of a 64-row ctr request.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


class Outputs:
    """The outputs of a config, and whether an answer fits them: names, types and, unless told otherwise, shapes."""

    def __init__(self, config: Mapping[str, Any], *, checks_shapes: bool = True) -> None:
        self.names = tuple(entry["name"] for entry in config["output"])
        self.bf16 = frozenset(entry["name"] for entry in config["output"] if entry["data_type"] == "TYPE_BF16")
        self._dtypes = {entry["name"]: DTYPES_BY_CONFIG[entry["data_type"]] for entry in config["output"]}
        self._checks_shapes = checks_shapes
        self._has_rows = int(config.get("max_batch_size", 0)) > 0
        self._with_rows = [entry["name"] for entry in config["input"] if not entry.get("is_shape_tensor")]
        self._dims = {entry["name"]: _dims(entry) for entry in config["output"]}
        first = 1 if self._has_rows else 0
        self._fixed = {  # name -> how many dimensions, and those that have one size only, by place
            name: (first + len(dims), [(first + place, dim) for place, dim in enumerate(dims) if dim != UNKNOWN])
            for name, (dims, *_) in self._dims.items()
        }

    def rows_of(self, inputs: Mapping[str, Array]) -> int:
        """How many rows a request has; UNKNOWN where the model has no batch dimension, or the request no input of the config."""
        if self._has_rows:
            for name in self._with_rows:
                if name in inputs:
                    return inputs[name].shape[0]
        return UNKNOWN

    def checked(self, answer: Mapping[str, Array], wanted: Collection[str], rows: int = UNKNOWN) -> dict[str, Array]:
        """The wanted tensors of an answer to so many rows, strings as object arrays.

        Raises AnswerError when one is missing, or has another type or shape than the config says. The shape costs 0.3 us a
        tensor of one or two dimensions.
        """
        if not isinstance(answer, Mapping):
            raise AnswerError(f"the backend made no outputs by name, but a value of type {type(answer).__name__}")
        tensors = {}
        for name in wanted:
            array = answer.get(name)
            if array is None:
                raise AnswerError(f'the backend made no output "{name}", but: {", ".join(map(str, answer)) or "none"}')
            if not isinstance(array, np.ndarray):
                raise AnswerError(f'the backend made output "{name}" as {type(array).__name__}, not as a numpy array')
            dtype = self._dtypes[name]
            if array.dtype != dtype.numpy:
                if dtype is not STRING or array.dtype.kind not in "SU":
                    raise AnswerError(
                        f'the backend made output "{name}" as {array.dtype}, its config says {dtype.config}'
                    )
                array = _objects(array)
            tensors[name] = array
            if not self._checks_shapes:
                continue
            shape = array.shape
            rank, fixed = self._fixed[name]
            if len(shape) != rank or (self._has_rows and shape[0] != rows):
                self._look_closer(name, shape, rows)
                continue
            for place, dim in fixed:
                if shape[place] != dim:
                    self._look_closer(name, shape, rows)
                    break
        return tensors

    def _look_closer(self, name: str, shape: tuple[int, ...], rows: int) -> None:
        dims, *others = self._dims[name]
        lead = (rows,) if self._has_rows else ()
        if _fits(shape, (*lead, *dims)) or any(_fits(shape, (*lead, *each)) for each in others):
            return
        asked = f" for a request of {rows} row{'s' * (rows != 1)}" if self._has_rows and rows != UNKNOWN else ""
        raise AnswerError(
            f'the backend made output "{name}" of shape {list(shape)}{asked}, expected is {[*lead, *dims]}: '
            + ("its rows and then the dims of config.pbtxt" if self._has_rows else "the dims of config.pbtxt")
        )


def _dims(entry: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """What an output may look like, without rows: what the model makes when Triton reshapes it, and its dims."""
    dims = tuple(int(dim) for dim in entry["dims"])
    reshape = entry.get("reshape")
    return [dims] if reshape is None else [tuple(int(dim) for dim in reshape.get("shape", ())), dims]


def _fits(shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
    return len(shape) == len(dims) and all(want in (UNKNOWN, got) for got, want in zip(shape, dims, strict=True))


def _objects(array: Array) -> Array:
    encoded: Any = np.char.encode(array.astype(np.str_), "utf-8") if array.dtype.kind == "U" else array
    objects: Array = encoded.astype(np.object_)
    return objects


def _common(raw: Mapping[str, Any], table_class: type) -> dict[str, Any]:
    own = _own(raw, table_class)
    return {name: holder for name, holder in raw.items() if name not in own}


def _own(raw: Mapping[str, Any], table_class: type) -> dict[str, Any]:
    """What the backend's table is asked for; a stand-in marks with `pilot_` what Triton's own backend does not have."""
    own = {row.name for row in table(table_class)}
    return {name: holder for name, holder in raw.items() if name in own or not name.startswith(COMMON_PREFIX)}
