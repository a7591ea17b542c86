"""Does a backend answer as it should? The same cases without a server, and in a real one (tritonpilot.testkit).

config = testkit.config(inputs=[{"name": "text", "data_type": "BYTES", "dims": [1]}], outputs=[...])
cases = [
    Case("a word", {"text": np.array([[b"word"]], object)}, outputs={"length": np.array([[4]], np.int32)}),
    Case("too long", {"text": np.array([[b"x" * 99]], object)}, error='"text": row 0'),
]
with in_process(Path("serving.py"), config, folder) as ask:
    for case in cases:
        check(ask, case)
    check_mates(ask, cases)          # all in one execution: nobody suffers from a neighbour
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pilotlib import instance
from pilotlib.tensors import DTYPES, DTYPES_BY_CONFIG, STRING, Array
from pilotlib.verbs import Backend, BadRequest, Infer, InferError, answers, told


class Ask(Protocol):
    """The one seam between cases and what answers them."""

    def __call__(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        """The outputs of one request. Raises an exception whose text is what a client is told."""

    def together(self, requests: Sequence[Mapping[str, Array]]) -> list[Mapping[str, Array] | Exception]:
        """Requests that are in flight at the same time: the answer of each, or its error."""


@dataclass(frozen=True)
class Case:
    """One request, and the outputs that it is to get, or words of the error."""

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array] = field(default_factory=dict)
    """Outputs that are compared; the backend may make more. Without any, an answer without error is enough."""
    error: str = ""
    tolerance: float = 0.0
    """For floating point: |found - expected| <= tolerance * (1 + |expected|)."""


class FaultError(RuntimeError):
    """The backend's code failed on a request: the text is what a client is told, the cause is what was raised."""


class CheckError(AssertionError):
    """An answer is not what its case says."""


def check(ask: Ask, case: Case) -> None:
    """Ask and compare. Raises CheckError that names the case, the output and what differs."""
    found: Mapping[str, Array] | Exception
    try:
        found = ask(case.inputs)
    except Exception as error:  # noqa: BLE001  whatever is raised is the answer to compare
        found = error
    _compare(case, found)


def check_mates(ask: Ask, cases: Sequence[Case]) -> None:
    """Ask all cases at the same time; each must get its own answer. Raises CheckError for the first that does not."""
    for case, found in zip(cases, ask.together([case.inputs for case in cases]), strict=True):
        _compare(case, found)


def config(
    *,
    inputs: Sequence[Mapping[str, Any]],
    outputs: Sequence[Mapping[str, Any]],
    parameters: Mapping[str, str | int | float | bool] | None = None,
    max_batch_size: int = 8,
) -> dict[str, Any]:
    """A ModelConfig in JSON form. Tensors are written as in a service file: {"name": ..., "data_type": "BYTES", "dims": [1]}."""
    said = {
        name: {"string_value": str(value).lower() if isinstance(value, bool) else str(value)}
        for name, value in (parameters or {}).items()
    }
    return {
        "name": "under_test",
        "max_batch_size": max_batch_size,
        "input": [_tensor(each) for each in inputs],
        "output": [_tensor(each) for each in outputs],
        "parameters": said,
    }


@contextmanager
def in_process(
    backend: Path | type[Backend[Any, Any, Any]],
    config: Mapping[str, Any],
    version_folder: Path = Path(),
    infer: Infer | None = None,
) -> Iterator[Ask]:
    """Ask a backend in this process: a class, or the model.py that ends with `TritonPythonModel = triton_model(Class)`.

    `version_folder` holds its files. `infer` stands for the other models of the server. Requests that Triton would refuse
    before a backend sees them are refused with Triton's words.
    """
    backend_class = load(backend, version_folder) if isinstance(backend, Path) else backend
    found, _, _ = instance.set_up(
        backend_class,
        config,
        model=config.get("name", "under_test"),
        version=1,
        version_folder=version_folder,
        infer=infer or _nobody,
    )
    try:
        yield _InProcess(found, config)
    finally:
        found.tear_down()


class _InProcess:
    def __init__(self, backend: Backend[Any, Any, Any], config: Mapping[str, Any]) -> None:
        self._backend, self._config = backend, config
        self._outputs = instance.Outputs(config, checks_shapes=backend.checks_shapes)

    def __call__(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        (found,) = self.together([inputs])
        if isinstance(found, Exception):
            raise found
        return found

    def together(self, requests: Sequence[Mapping[str, Array]]) -> list[Mapping[str, Array] | Exception]:
        refused = [refusal(self._config, inputs) for inputs in requests]
        good = [inputs for inputs, why in zip(requests, refused, strict=True) if not why]
        given = iter(answers(self._backend, good) if good else [])
        return [
            ValueError(why) if why else self._checked(inputs, next(given))
            for inputs, why in zip(requests, refused, strict=True)
        ]

    def _checked(
        self, inputs: Mapping[str, Array], answer: Mapping[str, Array] | BaseException
    ) -> Mapping[str, Array] | Exception:
        if isinstance(answer, BaseException):
            return _as_told(answer)
        try:
            found = self._outputs.checked(answer, self._outputs.names, self._outputs.rows_of(inputs))
            # Copied as Triton does: they may lie in buffers that the next request overwrites.
            return {name: array.copy() for name, array in found.items()}
        except Exception as error:  # noqa: BLE001  this request's error is its answer; its mates get theirs
            return _as_told(error)


def _as_told(error: BaseException) -> Exception:
    """An exception whose text is what Triton's client would be told."""
    if isinstance(error, (BadRequest, InferError)) and error.args == (told(error),):
        return error
    fault = FaultError(told(error))
    fault.__cause__ = error
    return fault


def refusal(config: Mapping[str, Any], inputs: Mapping[str, Array]) -> str:
    """Why Triton would refuse a request before any backend sees it, or ""."""
    entries = {entry["name"]: entry for entry in config["input"]}
    rows_at_most = int(config.get("max_batch_size", 0))
    model = config.get("name", "")
    needed = sum(not entry.get("optional") for entry in entries.values())
    if not needed <= len(inputs) <= len(entries):
        between = needed if needed == len(entries) else f"number of inputs between {needed} and {len(entries)}"
        return f"expected {between} inputs but got {len(inputs)} inputs for model '{model}'"
    for name, array in inputs.items():
        entry = entries.get(name)
        if entry is None:
            return f"unexpected inference input '{name}' for model '{model}', which takes: {', '.join(entries)}"
        dtype = DTYPES_BY_CONFIG[entry["data_type"]]
        if array.dtype != dtype.numpy and not (dtype is STRING and array.dtype.kind in "SU"):
            return (
                f"inference input '{name}' data-type is '{_wire(array)}', but model '{model}' expects '{_short(entry)}'"
            )
        dims = [int(dim) for dim in entry["dims"]]
        expected = ([-1] if rows_at_most else []) + dims
        shape = list(array.shape)
        if len(shape) != len(expected) or any(e not in (-1, s) for s, e in zip(shape, expected, strict=True)):
            return f"unexpected shape for input '{name}' for model '{model}'. Expected {expected}, got {shape}"
        if rows_at_most and shape[0] > rows_at_most:
            return f"inference request batch-size must be <= {rows_at_most} for '{model}'"
    return ""


def _compare(case: Case, found: Mapping[str, Array] | Exception) -> None:
    if case.error:
        if not isinstance(found, Exception):
            raise CheckError(f'case "{case.name}": an error with "{case.error}" was expected, but it was answered')
        if case.error not in str(found):
            raise CheckError(f'case "{case.name}": the error has no "{case.error}": {found}')
        return
    if isinstance(found, Exception):
        raise CheckError(f'case "{case.name}": not answered, but: {type(found).__name__}: {found}') from found
    for name, expected in case.outputs.items():
        if name not in found:
            raise CheckError(f'case "{case.name}": no output "{name}", but {", ".join(found) or "none"}')
        difference = _difference(found[name], expected, case.tolerance)
        if difference:
            raise CheckError(f'case "{case.name}": output "{name}" {difference}')


def _difference(found: Array, expected: Array, tolerance: float) -> str:
    if found.shape != expected.shape:
        return f"has shape {list(found.shape)}, expected {list(expected.shape)}"
    if expected.dtype.kind in "OSU":
        is_same = _as_bytes(found) == _as_bytes(expected)
        return "" if is_same else f"is {found.tolist()}, expected {expected.tolist()}"
    if found.dtype != expected.dtype:
        return f"is {found.dtype}, expected {expected.dtype}"
    if expected.dtype.kind != "f":
        return "" if np.array_equal(found, expected) else f"is {found.tolist()}, expected {expected.tolist()}"
    wide_found, wide = found.astype(np.float64), expected.astype(np.float64)
    if np.allclose(wide_found, wide, rtol=tolerance, atol=tolerance, equal_nan=True):
        return ""
    return f"differs by up to {np.nanmax(np.abs(wide_found - wide)):g}, tolerance {tolerance:g}"


def _as_bytes(array: Array) -> list[bytes]:
    return [item.encode() if isinstance(item, str) else bytes(item) for item in array.ravel().tolist()]


def _wire(array: Array) -> str:
    """The type under which a client sends an array."""
    if array.dtype.kind in "OSU":
        return "BYTES"
    return next((_short({"data_type": each.config}) for each in DTYPES if each.numpy == array.dtype), str(array.dtype))


def _short(entry: Mapping[str, Any]) -> str:
    name = str(entry["data_type"]).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _tensor(said: Mapping[str, Any]) -> dict[str, Any]:
    name = str(said["data_type"]).removeprefix("TYPE_")
    return {**said, "data_type": "TYPE_" + ("STRING" if name == "BYTES" else name)}


def load(path: Path, version_folder: Path) -> type[Backend[Any, Any, Any]]:
    """The backend of a model.py, imported with the version folder on sys.path as Triton's stub does."""
    spec = importlib.util.spec_from_file_location(f"under_test_{abs(hash(path.resolve()))}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    folders = [str(version_folder.resolve()), str(path.parent.resolve())]
    sys.path[:0] = folders
    try:
        spec.loader.exec_module(module)
    finally:
        for folder in folders:
            sys.path.remove(folder)
    found: type[Backend[Any, Any, Any]] = module.TritonPythonModel.backend_class
    return found


def _nobody(model: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> dict[str, Array]:  # noqa: ARG001
    raise InferError(f'model "{model}" could not be called: in_process was given no `infer`')
