"""What of a model's configuration decides how its requests are batched?

batcher = Batcher.of(model_config.parse(text, where))
Batcher(queue_delay_us=500, max_batch_size=64)     # by hand; one queue, no limits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tritonpilot.arrivals import Stream
from tritonpilot.errors import SpecError
from tritonpilot.model_config import THREAD_PARAMETERS, ModelConfig
from tritonpilot.written import nearest

TimeoutAction = Literal["reject", "delay"]
WAKE = "wake"  # name of the level that the build adds for wakes


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

    `levels` in the order of priority, 1 first; a single one is a model without priority levels. `has_waker`: an instance that
    stays idle wakes the batcher (pilotlib.waker); without it Triton looks again after the next arrival or 500 ms.
    `resources` is what an execution takes of the rate limiter's, `resource_counts` how much there is (default: what one execution
    takes, as in Triton); both are empty when the server runs without `--rate-limit`.
    """

    queue_delay_us: int
    max_batch_size: int
    preferred_batch_sizes: tuple[int, ...] = ()
    instances: int = 1
    levels: tuple[Level, ...] = (Level(),)
    default_level: int = 1
    preserve_ordering: bool = False
    has_waker: bool = True
    resources: Mapping[str, int] = field(default_factory=dict)
    resource_counts: Mapping[str, int] = field(default_factory=dict)
    threads: int = 1  # CPU threads of an execution

    def __post_init__(self) -> None:
        """Raises SpecError for what Triton refuses."""
        preferred = [size for size in self.preferred_batch_sizes if not 1 <= size <= self.max_batch_size]
        wrong = {
            f"max_batch_size is {self.max_batch_size}, and only models with a batch dimension are batched": (
                self.max_batch_size < 1
            ),
            f"a queue delay of {self.queue_delay_us} us cannot be": self.queue_delay_us < 0,
            f"preferred batch size {preferred[:1]} is not within 1 and {self.max_batch_size}": bool(preferred),
            f"{self.instances} instances cannot serve": self.instances < 1,
            f"default level {self.default_level} is none of the {len(self.levels)}": (
                not 1 <= self.default_level <= len(self.levels)
            ),
            "a limit below 0 cannot be": any(level.max_queue_size < 0 or level.timeout_us < 0 for level in self.levels),
            "an execution takes more of a resource than there is": any(
                self.resource_counts.get(name, need) < need for name, need in self.resources.items()
            ),
        }
        said = [what for what, is_so in wrong.items() if is_so]
        if said:
            raise SpecError(f"This batcher cannot be: {'; '.join(said)}. Nothing is simulated. Correct it.")

    @property
    def preferred(self) -> tuple[int, ...]:
        """The preferred sizes, rising; the maximum where none is set, as Triton has it (model_config_utils.cc)."""
        return tuple(sorted(set(self.preferred_batch_sizes))) or (self.max_batch_size,)

    @property
    def prefetches(self) -> bool:
        """Whether Triton fills payloads ahead of idle instances: only with one queue without limits and timeouts."""
        (only, *others) = self.levels
        return not others and not (only.max_queue_size or only.timeout_us or only.allow_timeout_override)

    @property
    def most_running(self) -> int:
        """Executions that the rate limiter lets run at once; 0: it is off."""
        found = [self.resource_counts.get(name, need) // need for name, need in self.resources.items() if need > 0]
        return min([*found, self.instances]) if found else 0

    def place(self, stream: Stream) -> int:
        """Index into `levels` of the queue for a stream: by its priority, else its class, else the default.

        A priority that is no level goes to the default, as in Triton. Raises SpecError for a class that no level has.
        """
        if 1 <= stream.priority <= len(self.levels):
            return stream.priority - 1
        names = [level.name for level in self.levels]
        if stream.priority == 0 and stream.caller_class and any(names):
            if stream.caller_class not in names:
                known = [name for name in names if name and name != WAKE]
                raise SpecError(
                    f"Stream {stream.name} is of class {stream.caller_class}, which the model does not have"
                    f"{nearest(stream.caller_class, known)} (it has {', '.join(known)}). Nothing is simulated. Correct the class."
                )
            return names.index(stream.caller_class)
        return self.default_level - 1

    @classmethod
    def of(cls, config: ModelConfig, resource_counts: Mapping[str, int] | None = None) -> Batcher:
        """The batcher of a ModelConfig. `resource_counts`: of a server with `--rate-limit=execution_count`; without it the
        rate limiter is off and the config's resources mean nothing.

        Raises SpecError for a model that has no dynamic batcher: an ensemble, one without a batch dimension, or a config
        without `dynamic_batching`.
        """
        if config.max_batch_size < 1 or not config.HasField("dynamic_batching"):
            raise SpecError(
                f"The model {config.name} has no dynamic batcher (max_batch_size {config.max_batch_size}, "
                f"{'an ensemble' if config.HasField('ensemble_scheduling') else 'no dynamic_batching'}). Nothing is simulated. "
                "Name a model with one, such as a step of the pipeline."
            )
        batching = config.dynamic_batching
        parameters = {name: value.string_value for name, value in config.parameters.items()}
        needs: dict[str, int] = {}
        if resource_counts is not None:
            needs = {each.name: each.count for group in config.instance_group for each in group.rate_limiter.resources}
        threads = parameters.get(THREAD_PARAMETERS.get(config.backend, ""), "1")
        return cls(
            queue_delay_us=batching.max_queue_delay_microseconds,
            max_batch_size=config.max_batch_size,
            preferred_batch_sizes=tuple(sorted(set(batching.preferred_batch_size))),
            instances=sum(max(1, group.count) for group in config.instance_group) or 1,
            levels=_levels(batching, parameters),
            default_level=max(1, batching.default_priority_level),
            preserve_ordering=batching.preserve_ordering,
            has_waker=parameters.get("pilot_waker", "on") != "off",
            resources=needs,
            resource_counts=dict(resource_counts or {}),
            threads=max(1, int(threads)) if threads.isdigit() else 1,
        )


def _levels(batching: Any, parameters: Mapping[str, str]) -> tuple[Level, ...]:
    names = {int(place): name for name, _, place in (c.partition(":") for c in _split(parameters.get("pilot_classes")))}
    if parameters.get("pilot_wake_priority", "").isdigit():
        names[int(parameters["pilot_wake_priority"])] = WAKE
    if not batching.priority_levels:
        return (_level("", batching.default_queue_policy),)
    policies = batching.priority_queue_policy
    return tuple(
        _level(names.get(place, str(place)), policies.get(place, batching.default_queue_policy))
        for place in range(1, batching.priority_levels + 1)
    )


def _split(text: str | None) -> list[str]:
    return text.split(",") if text else []


def _level(name: str, policy: Any) -> Level:
    return Level(
        name=name,
        max_queue_size=policy.max_queue_size,
        timeout_us=policy.default_timeout_microseconds,
        action="delay" if policy.timeout_action == policy.DELAY else "reject",
        allow_timeout_override=policy.allow_timeout_override,
    )
