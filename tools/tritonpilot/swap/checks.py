"""Which checks does a candidate of this service have to stand, and in which order?

checks = checks_of(service, Asked(tolerances={"prob": "0.01"}, entries=["127.0.0.1:8102"], canary_share=0.05))
for check in checks: check.run(control, candidate, print)      # golden, latency, and what was asked for: shadow, canary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tritonpilot import samples
from tritonpilot.errors import SpecError
from tritonpilot.model_config import pipeline_signature
from tritonpilot.onnx_model import read_signature
from tritonpilot.pipeline import parts
from tritonpilot.quantize import data
from tritonpilot.spec import Service
from tritonpilot.swap.asking import Arrays
from tritonpilot.swap.canary import Canary, Shadow, check_options
from tritonpilot.swap.compare import Tolerance
from tritonpilot.swap.golden import Golden, Labelled, read_stored
from tritonpilot.swap.latency import Latency
from tritonpilot.swap.terms import Check


@dataclass(frozen=True)
class Asked:
    """What a person wants a candidate to stand, as written on the command line."""

    golden: Path | None = None
    """Stored answers, see `golden.read_stored`; without them the old version's answers are right."""
    tolerances: Mapping[str, str] = field(default_factory=dict)
    max_loss: float = 0.02
    """By the metric of a model's `quantize`, where it has labelled rows."""
    max_slower: float = 1.5
    entries: Sequence[str] = ()
    """Metrics addresses of the entries in front of this Triton."""
    shadow_share: float = 0.0
    shadow_requests: int = 200
    canary_share: float = 0.0
    canary_requests: int = 200
    patience_s: float = 300.0


def checks_of(service: Service, asked: Asked, repository: Path | None = None) -> list[Check]:
    """The checks, cheapest first. Raises SpecError for wrong options, ModelError for rows that cannot be read."""
    if not asked.max_slower > 0:
        raise SpecError(f"--max-slower is {asked.max_slower:g}, but must be above 0, as 1.5. Nothing was changed.")
    tolerances = {output: Tolerance.parse(text) for output, text in asked.tolerances.items()}
    rows, stored = _rows(service), None
    if asked.golden is not None:
        rows, stored = read_stored(asked.golden, list(rows or ()))
    found: list[Check] = [
        Golden(rows, stored, tolerances, _labelled(service, asked.max_loss), repository),
        Latency(rows, asked.max_slower),
    ]
    if asked.shadow_share:
        check_options(asked.entries, asked.shadow_share, asked.shadow_requests, "shadow")
        found.append(Shadow(asked.entries, asked.shadow_share, asked.shadow_requests, asked.patience_s, tolerances))
    if asked.canary_share:
        check_options(asked.entries, asked.canary_share, asked.canary_requests, "canary")
        found.append(
            Canary(asked.entries, asked.canary_share, asked.canary_requests, asked.patience_s, asked.max_slower)
        )
    return found


def _rows(service: Service) -> Arrays | None:
    """The samples of the public model's inputs."""
    public = parts(service)[-1]
    if public.samples is None or not public.samples.is_file():
        return None
    if public.pipeline is not None:
        return samples.read(public.samples, {tensor.name for tensor in pipeline_signature(public).inputs})
    return samples.read(public.samples)


def _labelled(service: Service, max_loss: float) -> list[Labelled]:
    """Labelled rows that are there already: making them can take minutes."""
    found = []
    for part in parts(service):
        wanted = part.model.quantize if part.model is not None else None
        if wanted is None or part.model is None or part.model.file is None or part.batching.max_batch_size < 1:
            continue
        file, rows = part.folder / part.model.file, part.folder / wanted.evaluation
        if file.is_file() and rows.is_file() and file.suffix == ".onnx":
            found.append(Labelled(part.service, data.read(rows, read_signature(file)), wanted.metric, max_loss))
    return found
