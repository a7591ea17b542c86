"""The values between the autopilot's parts: what can be set, what is seen, what a model expects, what is decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

Action = Literal["keep", "change", "revert", "adopt"]
#: How a target is reached: only instances change (in place); the delay changes at run time, instances perhaps too; a delay or
#: limits change by a reload, instances with it. "" where nothing is done.
Way = Literal["", "instances", "live", "reload"]


@dataclass(frozen=True)
class Knobs:
    """What can be set. `max_queue_sizes` maps classes to their limit of waiting requests (0: none)."""

    queue_delay_us: int
    instances: int
    max_queue_sizes: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Knobs:
        """The reverse of `as_dict`. Raises TypeError or ValueError for what is none."""
        found = cls(**values)
        for value in (found.queue_delay_us, found.instances, *dict(found.max_queue_sizes).values()):
            if type(value) is not int or value < 0:
                raise ValueError(f"{value!r} can be no setting")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "queue_delay_us": self.queue_delay_us,
            "instances": self.instances,
            "max_queue_sizes": dict(self.max_queue_sizes),
        }

    def describe(self) -> str:
        """In a few words: `2 instances, delay 500 us, batch at most 40 waiting`."""
        limits = "".join(f", {name} at most {limit} waiting" for name, limit in sorted(self.max_queue_sizes.items()))
        return f"{self.instances} instance{'s' * (self.instances != 1)}, delay {self.queue_delay_us} us{limits}"

    def brief(self) -> str:
        """Without the limits: `2 instances, delay 500 us`."""
        return replace(self, max_queue_sizes={}).describe()

    def change_to(self, other: Knobs) -> str:
        """What differs: `instances 1 -> 2, delay 500 -> 0 us`."""
        sizes, others = self.max_queue_sizes, other.max_queue_sizes
        found = [f"instances {self.instances} -> {other.instances}"] if self.instances != other.instances else []
        if self.queue_delay_us != other.queue_delay_us:
            found.append(f"delay {self.queue_delay_us} -> {other.queue_delay_us} us")
        found += [
            f"{name} at most {sizes.get(name, 0)} -> {size} waiting"
            for name, size in sorted(others.items())
            if sizes.get(name, 0) != size
        ]
        return ", ".join(found)


@dataclass(frozen=True)
class Observation:
    """One interval of a model's life, up to `at_s` on a clock that goes on when the autopilot starts again. nan: not known."""

    at_s: float
    seconds: float
    knobs: Knobs  # as the server's configuration has them now
    arrivals_per_s: float  # requests that came: answered + failed + refused + growth of the queue
    rows_per_request: float
    answered_per_s: float
    refused_per_s: float
    failed_per_s: float
    waiting: float  # requests in the queue at the end
    queue_us: float  # mean time in the queue of answered requests; nan: none
    mean_batch: float  # rows of an execution
    batch_sizes: Mapping[int, float]  # rows of an execution -> executions a second
    p99_ms: float | None  # of the best class, where someone measures it,
    utilisation: float | None  # busy time of instances / (instances x seconds)
    arrivals_by_class: Mapping[str, float] = field(default_factory=dict)
    p99_over_s: float = 0.0  # and over how long where that is longer than the interval, as in Triton's summaries
    max_batch_size: int = 0  # 0: not known
    delay_is_live: bool = False  # the queue delay can be changed at run time; else a reload changes it
    restarted: bool = False  # the server came back since the interval before, with the settings of its files
    problem: str = ""  # why nothing may be concluded


@dataclass(frozen=True)
class Demand:
    """The traffic that settings are chosen for."""

    arrivals_per_s: float
    rows_per_request: float = 1.0
    by_class: Mapping[str, float] = field(default_factory=dict)  # class -> requests a second


@dataclass(frozen=True)
class Prediction:
    """What a model expects of settings under a demand."""

    p99_ms: float  # of the best class's answers
    utilisation: float
    goodput_share: float  # answered within the SLO, of all requests
    mean_batch: float
    capacity_per_s: float = math.inf  # requests that the settings could answer at most


class Model(Protocol):
    """Knows what settings would bring."""

    def predict(self, knobs: Knobs, demand: Demand) -> Prediction:
        """The same arguments give the same answer."""
        ...


@dataclass(frozen=True)
class Decision:
    """What to do, and why, as a sentence for the log."""

    action: Action
    target: Knobs | None = None  # None: what is there stays
    reason: str = ""
    way: Way = ""
