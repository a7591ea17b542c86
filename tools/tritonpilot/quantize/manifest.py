"""What was done to a model, kept beside it, and the results of slow steps, kept by what went into them.

cache = Cache(folder)
path = cache.get_or_make(cache_key("calibrate", hash_file(model), options), make)   # make(path) writes the file
write(output, Manifest(...)); manifest = read(output)
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tritonpilot.errors import HostError, ModelError
from tritonpilot.onnx_model import external_files

_PACKAGES = ("tritonpilot", "onnx", "onnxruntime", "numpy")


@dataclass(frozen=True)
class Manifest:
    """The history of one quantised model; everything in it is JSON."""

    method: str
    options: Mapping[str, Any]
    sample_indices: tuple[int, ...]
    samples_sha256: str
    seeds: Mapping[str, int]
    versions: Mapping[str, str]
    model_sha256: str
    data_sha256: Mapping[str, str]
    result_sha256: str
    gate: Mapping[str, Any] | None = None
    speed: Mapping[str, Any] | None = None
    coverage: Mapping[str, Any] | None = None


def path_beside(model: Path) -> Path:
    """Where the manifest of a model file lies: model.int8.onnx -> model.int8.json."""
    return model.with_suffix(".json")


def write(model: Path, manifest: Manifest) -> Path:
    """Write the manifest beside the model, whole or not at all. Raises HostError when the folder cannot be written."""
    path = path_beside(model)
    text = json.dumps(plain(dataclasses.asdict(manifest)), indent=2, allow_nan=False) + "\n"
    _write_aside(path, lambda aside: _write_text(aside, text))
    return path


def read(model: Path) -> Manifest:
    """The manifest beside a model. Raises ModelError when it is missing, damaged, or describes another file."""
    path = path_beside(model)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(**{**values, "sample_indices": tuple(values["sample_indices"])})
    except FileNotFoundError as error:
        raise ModelError(
            f"{model} has no manifest {path.name} beside it. Nothing was changed. Quantise it again."
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(f"{path} is damaged: {error}. Nothing was changed. Quantise {model.name} again.") from error
    actual = hash_file(model)
    if actual != manifest.result_sha256:
        raise ModelError(
            f"{path} describes another file than {model.name}: SHA-256 {manifest.result_sha256[:12]}..., not {actual[:12]}.... "
            "Nothing was changed. Quantise it again, or restore the file."
        )
    return manifest


def ensure_of(model: Path, source: Path) -> None:
    """Raise ModelError unless the manifest beside `model` says that this very file was made of `source` as it is now."""
    if read(model).model_sha256 != hash_file(source):
        raise ModelError(
            f"{model} was made of another {source.name} than the one beside it, and proved against that. Nothing was changed. "
            "Quantise it again."
        )


def hash_file(path: Path) -> str:
    """SHA-256 of a file; of an ONNX model with external weights, of its external files too. Raises ModelError if one is missing."""
    digest = hashlib.sha256()
    names = external_files(path) if path.suffix == ".onnx" else []
    try:
        for part in (path, *(path.parent / name for name in names)):
            _add(part, digest)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}. Nothing was changed. Make it again.") from error
    return digest.hexdigest()


def cache_key(*parts: object) -> str:
    """A key by content: equal parts (strings, numbers, arrays, dataclasses, mappings, sets, sequences) give equal keys anywhere.

    What makes the results belongs in it too: the versions of the packages always are.
    """
    text = json.dumps([versions(), [plain(part) for part in parts]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of what the result depends on: tritonpilot, onnx, onnxruntime, numpy, Python."""
    return {name: metadata.version(name) for name in _PACKAGES} | {"python": platform.python_version()}


def plain(value: object) -> Any:
    """A value as JSON: sets sorted, arrays as their hash, dataclasses and mappings as objects, NaN and infinity as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(inner) for inner in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, np.ndarray):
        content = np.ascontiguousarray(value)
        head = f"{content.dtype.str}{content.shape}".encode()
        return "sha256:" + hashlib.sha256(head + content.tobytes()).hexdigest()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no content that a key can be made of")


@dataclass(frozen=True)
class Cache:
    """Files by key; a step that was interrupted is made again, one that ended is not."""

    folder: Path

    def get_or_make(self, key: str, make: Callable[[Path], None], suffix: str = "") -> Path:
        """The file of `key`; when there is none, `make(path)` writes it aside and it is renamed into place.

        A file that is not as it was written is made again. Raises HostError when the folder cannot be written; what `make` raises
        passes through, and leaves no file.
        """
        path = self.folder / f"{key}{suffix}"
        stated = path.with_name(f"{path.name}.sha256")
        if not (path.is_file() and stated.is_file() and stated.read_text() == _digest(path)):
            _write_aside(path, make)
            digest = _digest(path)
            _write_aside(stated, lambda aside: _write_text(aside, digest))
        return path


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    _add(path, digest)
    return digest.hexdigest()


def _add(path: Path, digest: Any) -> None:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_aside(path: Path, make: Callable[[Path], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".aside-") as folder:
            aside = Path(folder) / path.name
            make(aside)
            aside.replace(path)
    except OSError as error:
        raise HostError(
            f"{path} cannot be written: {error}. Nothing was changed. Make room, or choose another folder."
        ) from error
