"""A real Triton model that takes the time of an accelerator's published curve: what is measured with it is emulated.

    root = repository_of(folder, {"emulated_v100": "batching: {max_batch_size: 64}"}, curve="resnet50_v100_amp")

Each name becomes a service; the text is its service file without the name and the model. One number in, the same out.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from perf.frame import PROJECT
from tritonpilot import build, repository
from tritonpilot.spec import Service, load_services

CURVES = PROJECT / "perf" / "curves"
V100, T4, TENSORRT = "resnet50_v100_amp", "resnet50_t4_amp", "resnet50_v100_tensorrt"
SAMPLE_ROWS = 256


def rows(count: int = SAMPLE_ROWS) -> dict[str, npt.NDArray[np.float32]]:
    """Inputs of so many rows."""
    return {"row": np.arange(count, dtype=np.float32)[:, np.newaxis]}


def services_of(
    folder: Path, texts: Mapping[str, str], curve: str = V100, *, seed: int = 0, one_device: bool = False
) -> dict[str, Service]:
    """Service files over one curve in `folder`/models, read: name -> service. `one_device`: instances take turns on it."""
    for name, text in texts.items():
        place = folder / "models" / name
        place.mkdir(parents=True)
        shutil.copyfile(CURVES / f"{curve}.json", place / "curve.json")
        np.savez(place / "samples.npz", **rows())
        (place / "service.yaml").write_text(
            f"service: {name}\nmodel: {{backend: emulated, files: [curve.json], samples: samples.npz, "
            f"parameters: {{seed: {seed}, one_device: {str(one_device).lower()}}}}}\n{text}\n",
            encoding="utf-8",
        )
    return {service.service: service for service in load_services(folder / "models", list(texts))}


def repository_of(folder: Path, texts: Mapping[str, str], curve: str = V100, *, seed: int = 0) -> Path:
    """A repository in `folder` with these services."""
    return published(folder, list(services_of(folder, texts, curve, seed=seed).values()))


def published(folder: Path, services: Sequence[Service]) -> Path:
    """A repository in `folder` with services that were written there."""
    root = folder / "model_repository"
    root.mkdir()
    repository.publish(root, [plan.folder for plan in build.plan(services, "auto")])
    return root
