"""Writes the copies of models that `pilotlib.optimized` opens; run by `tritonpilot build` with the Python of the server's stubs.

    python -m pilotlib.optimize model_repository/text_net/1/model.onnx ...     one JSON object a file: {"path", "did", "said"}

`did` is "written", "current" (there is one), or "nothing", and `said` why. A copy is written aside and renamed; it is kept only
when it answers the model's warmup row (or zeros) with the same bits as the model itself.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as ort

from pilotlib import optimized
from pilotlib.onnx_session import ModelFileError, OnnxSession
from pilotlib.signature import TensorSpec
from pilotlib.tensors import BF16, STRING, Array

SMALLEST_WEIGHT_BYTES = 1024  # smaller ones stay in the model's own file
UNKNOWN_SIZE = 64  # of a dimension that nothing tells
AN_HOUR_S = 3600


class NoCopyError(RuntimeError):
    """Why a model gets no copy; it is served as before."""


def main(paths: list[str]) -> None:
    """One line of JSON for each path; failures are lines too."""
    for path in map(Path, paths):
        did, said = "nothing", ""
        try:
            did = "current" if optimized.find(path) is not None else "written"
            if did == "written":
                write(path)
        except (NoCopyError, ModelFileError, OSError) as error:
            did, said = "nothing", str(error)
        sys.stdout.write(json.dumps({"path": str(path), "did": did, "said": said}) + "\n")


def write(path: Path) -> Path:
    """The copy of a model file, for this machine; older ones that fit no more are removed.

    Raises NoCopyError, ModelFileError or OSError; what was there is then as it was.
    """
    place, files = optimized.runs_on(), optimized.made_of(path)
    folder = path.parent / optimized.FOLDER
    folder.mkdir(exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".new-", dir=folder))
    try:
        aside.chmod(0o755)
        plain = OnnxSession(path, _options(write_to=aside / optimized.MODEL))
        copy = OnnxSession(aside / optimized.MODEL, _options())
        _check_same(plain, copy, path.parent.parent / "warmup")
        if optimized.made_of(path) != files:
            raise NoCopyError("the model was changed meanwhile")
        facts = {"runs_on": place, "made_of": files}
        (aside / optimized.FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        for file in aside.iterdir():
            file.chmod(0o644)
            with file.open("rb") as written:
                os.fsync(written.fileno())
        _remove_others(folder, files, keep=aside)
        target = folder / optimized.folder_name(place)
        shutil.rmtree(target, ignore_errors=True)
        return aside.rename(target) / optimized.MODEL
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _options(write_to: Path | None = None) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # that the copy is for this machine only is what we know
    if write_to is None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options
    options.optimized_model_filepath = str(write_to)
    external = "session.optimized_model_external_initializers_"
    options.add_session_config_entry(f"{external}file_name", optimized.WEIGHTS)
    options.add_session_config_entry(f"{external}min_size_in_bytes", str(SMALLEST_WEIGHT_BYTES))
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    return options


def _check_same(plain: OnnxSession, copy: OnnxSession, warmup: Path) -> None:
    if copy.signature != plain.signature:
        raise NoCopyError("its optimized copy has other inputs or outputs")
    names = [spec.name for spec in plain.signature.outputs]
    feeds = {spec.name: _row(spec, warmup) for spec in plain.signature.inputs}
    try:
        expected = plain.run(names, feeds)
    except Exception as error:  # ONNX Runtime raises bare exceptions of its own
        raise NoCopyError(f"no row is known that it answers: {error}") from error
    found = copy.run(names, feeds)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        if not _are_same(ours, theirs):
            raise NoCopyError(f"its optimized copy answers {name} otherwise")


def _are_same(ours: Array, theirs: Array) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return ours.tolist() == theirs.tolist() if ours.dtype.hasobject else ours.tobytes() == theirs.tobytes()


def _row(spec: TensorSpec, warmup: Path) -> Array:
    """The row that warms the model up, where its size tells the shape; else zeros."""
    batch, dims = spec.dims[:1], list(spec.dims[1:])
    file = warmup / f"{''.join(c if c.isalnum() or c in '._-' else '_' for c in spec.name)}.bin"
    if spec.dtype is not STRING and spec.dtype is not BF16 and batch == (-1,) and file.is_file():
        data = np.fromfile(file, spec.dtype.numpy)
        known = math.prod(dim for dim in dims if dim > 0)
        unknown = sum(dim < 0 for dim in dims)
        size = round((data.size / max(1, known)) ** (1 / max(1, unknown)))
        shape = [1, *(size if dim < 0 else dim for dim in dims)]
        if math.prod(shape) == data.size:
            return data.reshape(shape)
    shape = [1 if place == 0 and dim < 0 else UNKNOWN_SIZE if dim < 0 else dim for place, dim in enumerate(spec.dims)]
    if spec.dtype is STRING:
        return np.full(shape, "", np.object_)
    return np.zeros(shape, spec.dtype.numpy)


def _remove_others(folder: Path, files: dict[str, list[int]], keep: Path) -> None:
    """Copies of files that are no more, and what killed writers left; copies for other machines stay."""
    for other in folder.iterdir():
        try:
            is_left = other.name.startswith(".new-") and keep.stat().st_mtime - other.stat().st_mtime > AN_HOUR_S
            facts = {} if other.name.startswith(".new-") else json.loads((other / optimized.FACTS).read_bytes())
        except (OSError, ValueError):
            facts, is_left = {}, True
        if other != keep and (is_left or facts.get("made_of", files) != files):
            shutil.rmtree(other, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
