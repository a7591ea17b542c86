"""What was done to a model, kept beside it, and the results of slow steps, kept by what went into them.

    cache = Cache(folder)
    path = cache.get_or_make(cache_key("calibrate", hash_file(model), options), make)   # make(path) writes the file
    write(output, Manifest(...)); manifest = read(output)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Write the manifest beside the model, whole or not at all."""
    raise NotImplementedError


def read(model: Path) -> Manifest:
    """The manifest beside a model; ModelError when it is missing, damaged, or describes another file."""
    raise NotImplementedError


def hash_file(path: Path) -> str:
    """SHA-256 of a file (of an ONNX model with external data: of its external files too)."""
    raise NotImplementedError


def cache_key(*parts: object) -> str:
    """A key by content: equal parts (strings, numbers, arrays, dataclasses, mappings, sets) give equal keys anywhere."""
    raise NotImplementedError


def versions() -> dict[str, str]:
    """Versions of what the result depends on: onnx, onnxruntime, numpy, tritonpilot, Python."""
    raise NotImplementedError


@dataclass(frozen=True)
class Cache:
    """Files by key; a step that was interrupted is made again, one that ended is not."""

    folder: Path

    def get_or_make(self, key: str, make: Callable[[Path], None], suffix: str = "") -> Path:
        """The file of `key`; when there is none, `make(path)` writes it aside and it is renamed into place."""
        raise NotImplementedError
