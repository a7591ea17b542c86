"""Which requests does a model really get? A fair sample of their rows, kept inside an instance, to calibrate a smaller model on.

    recorder = recorder_of(config, keep=20_000, path="/data/ctr.npz", drop="user_id", instance="ctr_0_0", log=warn)
    if recorder is not None:                      # off: nothing else is paid
        recorder.offer({"dense": dense, "categorical": categorical})
    recorder.close()                              # in finalize

Each row that is offered has the same chance to be among those kept, however many come (reservoir sampling): the file stands for
all of the traffic since the instance was loaded. It is written when twice as many rows have come as at the last time (requests
wait so long, ever more seldom) and at the end, whole or not at all, readable by its owner only. Inputs in `drop` are never stored,
not even in memory; rows with NaN or infinity, which no calibration can use, are not written. One file per instance:
/data/ctr.ctr_0_0.npz.
"""

from __future__ import annotations

import io
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from math import exp, floor, log, log1p
from pathlib import Path
from typing import Any

import numpy as np

from pilotlib.parameters import ParameterError
from pilotlib.tensors import Array
from pilotlib.told import text_of

BELOW_ONE = 1 - 2**-53


class Reservoir:
    """Decides which of a stream's rows are kept: `size` of them, all with the same chance. It draws how many rows to pass over, so
    one that is not kept costs nothing (algorithm L of K.-H. Li, ACM Transactions on Mathematical Software 20(4), 1994)."""

    def __init__(self, size: int, seed: int | None = None) -> None:
        if size < 1:
            raise ValueError(f"a reservoir holds one row or more, not {size}")
        self.size = size
        self.seen = 0
        self._random = random.Random(seed)
        self._weight = 1.0
        self._next = 0  # number of the next row that is kept, once the reservoir is full

    def take(self, rows: int) -> list[tuple[int, int]]:
        """(row, slot) of those of the next `rows` rows that are kept; a slot's earlier row is forgotten."""
        first, self.seen = self.seen, self.seen + rows
        found = [(row - first, row) for row in range(first, min(self.seen, self.size))]
        if first < self.size <= self.seen:
            self._next = self.size - 1
            self._skip()
        while self.size <= self._next < self.seen:
            found.append((self._next - first, self._random.randrange(self.size)))
            self._skip()
        return found

    def _skip(self) -> None:
        self._weight *= exp(log(1 - self._random.random()) / self.size)
        self._next += floor(log(1 - self._random.random()) / log1p(-min(self._weight, BELOW_ONE))) + 1


class Recorder:
    """Keeps rows of the inputs `names` and writes them to `path`. An error in writing ends the recording, not the serving."""

    def __init__(
        self,
        names: Sequence[str],
        reservoir: Reservoir,
        path: Path,
        *,
        has_rows: bool = True,
        log: Callable[[str], None] = print,
    ) -> None:
        self._names = names
        self._reservoir = reservoir
        self._path = path
        self._has_rows = has_rows
        self._log = log
        self._kept: list[list[Array]] = []
        self._write_at = 1
        self.is_on = True

    def offer(self, inputs: Mapping[str, Array]) -> None:
        """The inputs of one request; rows that are kept are copied. A request without one of the inputs is passed over."""
        if not self.is_on or any(name not in inputs for name in self._names):
            return
        arrays = [inputs[name] if self._has_rows else inputs[name][np.newaxis] for name in self._names]
        for row, slot in self._reservoir.take(len(arrays[0])):
            kept = [np.array(array[row]) for array in arrays]
            if slot < len(self._kept):
                self._kept[slot] = kept
            else:
                self._kept.append(kept)
        if self._reservoir.seen >= self._write_at:
            self._write_at = 2 * self._reservoir.seen
            self._write()

    def close(self) -> None:
        """Write what has been kept."""
        if self.is_on and self._kept:
            self._write()

    def _write(self) -> None:
        rows = [row for row in self._kept if all(map(_is_finite, row))]
        if not rows:
            return
        content = io.BytesIO()
        columns = zip(*rows, strict=True)
        np.savez_compressed(
            content, **{name: _joined(column) for name, column in zip(self._names, columns, strict=True)}
        )
        try:
            descriptor, partial = tempfile.mkstemp(prefix=f".{self._path.name}-", dir=self._path.parent)  # mode 0600
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content.getbuffer())
                Path(partial).replace(self._path)
            finally:
                Path(partial).unlink(missing_ok=True)
        except OSError as error:
            self.is_on = False
            self._kept.clear()
            self._log(
                f"requests are no longer recorded: {self._path} cannot be written: {text_of(error)}. Serving goes on; make room "
                "or give the server permission to write there, and load the model again"
            )


def recorder_of(
    config: Mapping[str, Any],
    *,
    keep: int,
    path: str,
    drop: str,
    instance: str,
    log: Callable[[str], None] = print,
) -> Recorder | None:
    """An instance's recorder from its config in JSON form, or None where `keep` (parameter pilot_record) is 0.

    `path` is pilot_record_file, `drop` pilot_record_drop: names of inputs, with commas. Raises ParameterError when the two do not
    say where to write, or what not to.
    """
    if not keep:
        return None
    target = Path(path)
    if target.suffix != ".npz" or not target.is_absolute() or not os.access(target.parent, os.W_OK):
        raise ParameterError(
            f'parameter "pilot_record_file" in config.pbtxt is "{path}", but must name an .npz file by its whole path, in a folder '
            "that the server may write to; the model is not loaded: correct it, or leave pilot_record out"
        )
    inputs = [entry["name"] for entry in config["input"]]
    dropped = [name.strip() for name in drop.split(",") if name.strip()]
    strange = [name for name in dropped if name not in inputs]
    names = [name for name in inputs if name not in dropped]
    if strange or not names:
        why = f'names "{strange[0]}", which is no input' if strange else "leaves no input to record"
        raise ParameterError(
            f'parameter "pilot_record_drop" in config.pbtxt {why}; the model is not loaded, since it might store what it must '
            f"not: name some of {', '.join(inputs)}"
        )
    has_rows = int(config.get("max_batch_size", 0)) > 0
    own = target.with_name(f"{target.stem}.{instance}.npz")
    return Recorder(names, Reservoir(keep), own, has_rows=has_rows, log=log)


def _is_finite(row: Array) -> bool:
    return row.dtype.kind != "f" or bool(np.isfinite(row).all())


def _joined(rows: Sequence[Array]) -> Array:
    """[rows, ...], the shorter ones padded with zeros at their ends; strings as numpy has them."""
    parts = [row.astype(np.bytes_) if row.dtype.kind == "O" else row for row in rows]
    shape = tuple(max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True))
    dtype = max((part.dtype for part in parts), key=lambda each: each.itemsize)
    joined: Array = np.zeros((len(parts), *shape), dtype)
    for place, part in enumerate(parts):
        joined[place, ...][tuple(slice(size) for size in part.shape)] = part
    return joined
