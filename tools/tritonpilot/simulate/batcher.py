"""What of a model's configuration decides how its requests are batched?

    batcher = Batcher.of(model_config.parse(text, where))
    Batcher(queue_delay_us=500, max_batch_size=64)     # by hand; one queue, no limits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tritonpilot.errors import SpecError
from tritonpilot.model_config import ModelConfig

TimeoutAction = Literal["reject", "delay"]


@dataclass(frozen=True)
class Level:
    """A queue of Triton's batcher and its policy (ModelQueuePolicy); 0 is no limit, as in Triton."""

    name: str = ""
    max_queue_size: int = 0
    timeout_us: int = 0
    action: TimeoutAction = "reject"
    allow_timeout_override: bool = False


@dataclass(frozen=True)
class Batcher:
    """ModelDynamicBatching and what else of a ModelConfig decides about batches.

    `levels` in the order of priority, 1 first; a single level is a model without priority levels. `has_waker`: the batcher is
    woken when an instance becomes idle; without it Triton looks again after the next arrival or 500 ms.
    """

    queue_delay_us: int
    max_batch_size: int
    preferred_batch_sizes: tuple[int, ...] = ()
    instances: int = 1
    levels: tuple[Level, ...] = (Level(),)
    default_level: int = 1
    preserve_ordering: bool = False
    has_waker: bool = True
    resources: Mapping[str, int] = field(default_factory=dict)  # rate limiter: what an execution takes of each
    resource_counts: Mapping[str, int] = field(default_factory=dict)  # and how much of each there is

    @classmethod
    def of(cls, config: ModelConfig) -> Batcher:
        """Raises SpecError for a model that has no dynamic batcher."""
        raise SpecError(f"The model {config.name} has no dynamic batcher.")
