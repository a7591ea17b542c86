"""Which rows is a model calibrated on, and which is it judged by?

    pool = read(Path("models/ctr/build/calibration.npz"), read_signature(Path("models/ctr/build/model.onnx")))
    chosen = pool.take(coverage.choose(pool, 128))
    for feed in chosen.batches(64):    # {"dense": FP32[64,28], "categorical": INT64[64,8]}, the last one shorter
        session.run(None, feed)

    write(rows, Path("models/ctr/build/evaluation.npz"))   # whole or not at all

An .npz archive of plain arrays, n rows each: one per input of the model under its name, and optionally `label` and `slice.NAME`
(an hour, a user group, a length bucket: what must not fare worse than the rest). `columns.INPUT` names the columns of an input.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritonpilot import samples
from tritonpilot.errors import HostError, ModelError
from tritonpilot.onnx_model import Signature, TensorSignature

LABEL = "label"
SLICE = "slice."
COLUMNS = "columns."


@dataclass(frozen=True)
class Rows:
    """n rows of a model's inputs: `inputs` [n, ...] by input name, `slices` [n] (strings or integers) by slice name, `label`
    [n, ...] or None. `columns` names the columns of an input where they have names; `sequences` are the inputs whose rows have a
    variable size in the model, padded with zeros to one."""

    inputs: Mapping[str, NDArray[Any]]
    slices: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    label: NDArray[Any] | None = None
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sequences: frozenset[str] = frozenset()

    @property
    def count(self) -> int:
        return len(next(iter(self.inputs.values())))

    def take(self, indices: NDArray[np.integer[Any]] | Sequence[int]) -> Rows:
        """These rows, in this order."""
        chosen = np.asarray(indices, np.int64)
        return Rows(
            {name: array[chosen] for name, array in self.inputs.items()},
            {name: array[chosen] for name, array in self.slices.items()},
            None if self.label is None else self.label[chosen],
            self.columns,
            self.sequences,
        )

    def batches(self, size: int) -> Iterator[dict[str, NDArray[Any]]]:
        """The inputs, `size` rows at a time and in order; the last batch has what is left."""
        if size < 1:
            raise ValueError(f"a batch has one row or more, not {size}")
        for start in range(0, self.count, size):
            yield {name: array[start : start + size] for name, array in self.inputs.items()}


def read(path: Path, signature: Signature) -> Rows:
    """The rows of an archive, checked against the model's inputs, whose first dimension is the batch.

    Raises ModelError when the file is missing or damaged, lacks an input, holds what is none, has another type, shape or number
    of rows than it must, or when a number is NaN or infinite (naming the input and the row).
    """
    arrays = _load(path)
    known = {tensor.name: tensor for tensor in signature.inputs}
    inputs = {name: array for name, array in arrays.items() if name in known}
    rest = {name: array for name, array in arrays.items() if name not in known}
    slices = {name[len(SLICE) :]: _slice(path, name, array) for name, array in rest.items() if name.startswith(SLICE)}
    columns = {name[len(COLUMNS) :]: array for name, array in rest.items() if name.startswith(COLUMNS)}
    strange = sorted(name for name in rest if name != LABEL and not name.startswith((SLICE, COLUMNS)))
    missing = [name for name in known if name not in inputs]
    if strange or missing:
        wrong = [f"lacks the input {name}" for name in missing] + [f"holds {name}, no input of it" for name in strange]
        raise ModelError(
            f"{path} does not fit the model, whose inputs are {', '.join(known)}: it {'; it '.join(wrong)}. Nothing was "
            f"changed. Name the arrays as the model does; besides them there may be {LABEL}, {SLICE}NAME and {COLUMNS}INPUT."
        )
    rows = {name: len(array) for name, array in arrays.items() if not name.startswith(COLUMNS)}
    if 0 in rows.values() or len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise ModelError(
            f"The arrays of {path} must have the same number of rows, at least one: {counts}. Nothing was changed. Make the "
            "file again, with a label and a slice value for each row."
        )
    for name, array in inputs.items():
        _check(path, known[name], array)
    label = rest.get(LABEL)
    if label is not None:
        _check_finite(path, LABEL, label)
    return Rows(
        {name: inputs[name] for name in known},  # in the model's order
        slices,
        label,
        {name: _column_names(path, name, array, inputs) for name, array in columns.items()},
        frozenset(tensor.name for tensor in signature.inputs if -1 in tensor.shape[1:]),
    )


def write(rows: Rows, path: Path) -> None:
    """Write what `read` reads, compressed. Until all of it is on disk, an older file of that name stays.

    The same rows give the same bytes. Raises HostError when the file cannot be written.
    """
    arrays = {
        **rows.inputs,
        **({} if rows.label is None else {LABEL: rows.label}),
        **{SLICE + name: array for name, array in rows.slices.items()},
        **{COLUMNS + name: np.array(names) for name, names in rows.columns.items()},
    }
    content = io.BytesIO()  # a disk that fills up under zipfile leaves it without a way to close
    np.savez_compressed(content, **arrays)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            Path(partial).chmod(0o644)
            Path(partial).replace(path)
        finally:
            Path(partial).unlink(missing_ok=True)
    except OSError as error:
        raise HostError(
            f"Cannot write {path}: {error}. What is there has not been replaced by anything half-written. Make room or "
            "give yourself permission to write there, and start this again."
        ) from error


def _load(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        if foreign := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
            raise ValueError(f"{foreign[0]} in it is no array")
    except FileNotFoundError as error:
        raise ModelError(
            f"The rows {path} do not exist. Nothing was changed. Make them (for the examples: `python "
            "models/<service>/evaluation.py`) or correct the path in the service file."
        ) from error
    except Exception as error:  # what numpy, zipfile and its decompressors meet in a damaged file is of any type
        raise ModelError(
            f"{path} is not an .npz archive of plain arrays: {error}. Nothing was changed. Make it again "
            "(strings: not as object arrays, but as `array.astype(str)`)."
        ) from error
    if scalars := [name for name, array in arrays.items() if not array.ndim]:
        raise ModelError(f"{path}: {', '.join(scalars)} is a single value without rows. Nothing was changed.")
    return arrays


def _check(path: Path, tensor: TensorSignature, array: NDArray[Any]) -> None:
    if not tensor.shape or not samples.fits(array, tensor.data_type, tensor.shape[1:]):
        raise ModelError(
            f"{path}: {tensor.name} is {array.dtype}{list(array.shape)}, and the model takes {tensor.data_type}"
            f"{list(tensor.shape)}, the batch first (-1 is any size). Nothing was changed. Make the file again with that type "
            "and shape."
        )
    _check_finite(path, tensor.name, _from_bf16(array) if tensor.data_type == "BF16" else array)


def _check_finite(path: Path, name: str, array: NDArray[Any]) -> None:
    if array.dtype.kind != "f":
        return
    bad = ~np.isfinite(array).reshape(len(array), -1)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        value = array.reshape(len(array), -1)[row, column]
        bad_rows = int(bad.any(axis=1).sum())
        raise ModelError(
            f"{path}: {name} has {value} in row {row}, column {column}, counted from 0 ({bad_rows} of {len(array)} rows have such "
            "values). Nothing was changed. A range with NaN or infinity in it calibrates nothing: leave the row out, or fill "
            "it as serving does."
        )


def _from_bf16(bits: NDArray[Any]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _slice(path: Path, name: str, array: NDArray[Any]) -> NDArray[Any]:
    if array.ndim != 1 or array.dtype.kind not in "SUiub":
        raise ModelError(
            f"{path}: {name} is {array.dtype}{list(array.shape)}; a slice is one string or integer a row. Nothing was changed. "
            "Put numbers into ranges first, such as the length in tens."
        )
    return np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array


def _column_names(path: Path, name: str, array: NDArray[Any], inputs: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    width = inputs[name][0].size if name in inputs else None
    if array.dtype.kind != "U" or array.shape != (width,):
        raise ModelError(
            f"{path}: {COLUMNS}{name} is {array.dtype}{list(array.shape)}; it holds one string for each of the "
            f"{'columns of an input' if width is None else f'{width} columns of {name}'}. Nothing was changed."
        )
    return tuple(array.tolist())
