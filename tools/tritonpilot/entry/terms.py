"""On which terms does a model serve its callers? Its classes, their queues and shares, read from Triton's config.

terms = terms_of(config)                          # Triton's ModelConfig in JSON form, GET /v2/models/M/config
terms.classes, terms.default_class, terms.window_rows
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClassTerms:
    """What one class of callers may expect, and what it may ask of the others."""

    name: str
    level: int
    """Triton's priority level, 1 is served first; 0: the model has no levels."""
    max_queue: int
    """Requests that may wait; 0: unlimited."""
    timeout_s: float | None
    """Longest wait in the queue."""
    share: float = 0.0
    """Part of the model's capacity that the class gets while it has requests waiting, whatever the classes above it do."""
    max_wait_s: float | None = None
    """After this wait its oldest request goes before the classes above it."""
    slo_s: float | None = None


@dataclass(frozen=True)
class ModelTerms:
    """What the entry knows about a model."""

    name: str
    classes: tuple[ClassTerms, ...]
    """By level, the first is served first; never empty."""
    default_class: str
    window_rows: int
    """Rows that may be in Triton at a time: those that execute, and one more batch that forms."""
    max_batch_size: int
    """0: the model has no batch dimension, and every request counts as one row."""
    inputs: tuple[str, ...] = ()
    caches: bool = False
    may_override_timeout: bool = True


def terms_of(config: Mapping[str, Any]) -> ModelTerms:
    """Read Triton's ModelConfig in JSON form. Raises RepositoryError naming the parameter that is wrong."""
    raise NotImplementedError(config)
