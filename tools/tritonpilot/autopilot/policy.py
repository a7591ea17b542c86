"""The file that a person writes for the autopilot: which models it may change, what they promise, and within which bounds.

    policy = policy.read(Path("autopilot.yaml"))
    policy.models[0].with_defaults(slo_ms=50)       # what the model's config.pbtxt promises, where the file does not say

interval_s: 5
models:
  - {model: ctr, policy: model, slo_ms: 50, costs: ctr.costs.json, instances: {min: 1, max: 4}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from tritonpilot import written
from tritonpilot.spec import Name
from tritonpilot.written import Written

MOST_INSTANCES = 256
MOST_DELAY_US = 60_000_000  # as in a service file

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=MOST_INSTANCES)]
Delay = Annotated[int, Field(ge=0, le=MOST_DELAY_US)]
QueueSize = Annotated[int, Field(ge=1, le=2**31 - 1)]


class Bounds(Written):
    """The least and the most that may be chosen."""

    min: int
    max: int

    @model_validator(mode="after")
    def _ordered(self) -> Bounds:
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; no value is between them")
        return self


class Instances(Bounds):
    """How many instances the model may have, all groups together."""

    min: Count = 1
    max: Count = 1


class QueueDelay(Bounds):
    """Between which queue delays is chosen, us."""

    min: Delay = 0
    max: Delay = 0


class QueueLimit(Bounds):
    """Between which limits of waiting requests a class may have one."""

    min: QueueSize
    max: QueueSize
    patience_ms: Positive | None = Field(
        None, description="how long its requests may wait; default: their queue timeout"
    )


class QueueDepth(Written):
    """For `policy: queue_depth`: the numbers of waiting requests at which an instance comes or goes."""

    grow_above: Annotated[float, Field(gt=0)] = 50
    shrink_below: Annotated[float, Field(ge=0)] = 10

    @model_validator(mode="after")
    def _ordered(self) -> QueueDepth:
        if self.shrink_below >= self.grow_above:
            raise ValueError(
                f"shrink_below {self.shrink_below:g} is not below grow_above {self.grow_above:g}: it would grow and shrink at once"
            )
        return self


class ModelPolicy(Written):
    """What may be done to one model, and for what."""

    model: Name
    policy: Literal["model", "feedback", "queue_depth", "off"] = Field(
        "feedback", description="model: simulates with `costs` what settings would bring; feedback: what is seen alone"
    )
    slo_ms: Positive | None = Field(
        None, description="P99 that the best class is promised; default: what its config says"
    )
    costs: str | None = Field(None, description="what `tritonpilot costs` wrote, relative to this file")
    instances: Instances = Instances()
    queue_delay_us: QueueDelay | None = Field(None, description="default: the delay stays as it is")
    max_queue_sizes: dict[Name, QueueLimit] = Field(
        {}, description="classes whose limit may be changed; the others keep theirs"
    )
    delay_by: Literal["live", "reload", "never"] = Field(
        "live", description="how a delay is changed; live: where the backend can, else by a reload"
    )
    slo_share: Annotated[float, Field(gt=0, le=1)] = Field(0.8, description="part of the SLO that a setting may use")
    headroom: Annotated[float, Field(ge=0, le=10)] = Field(
        0.25, description="planned for: so much more traffic than seen"
    )
    cooldown_s: Annotated[float, Field(ge=0)] = Field(
        30, description="after a change, until another that is not urgent"
    )
    steady_s: Annotated[float, Field(ge=0)] = Field(60, description="the same while the traffic stays as it was")
    shrink_after_s: Annotated[float, Field(ge=0)] = Field(
        60, description="the most traffic within this time must fit before an instance goes"
    )
    hysteresis: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="gain below which nothing is changed")
    max_changes_per_minute: Annotated[int, Field(ge=1)] = Field(6, description="urgent ones, too")
    avoid_s: Annotated[float, Field(ge=0)] = Field(
        600, description="how long a setting that made things worse is not tried again"
    )
    on_foreign_change: Literal["respect", "reclaim"] = Field(
        "respect", description="respect: go on from what someone set, after cooldown_s; reclaim: set ours again"
    )
    queue_depth: QueueDepth = QueueDepth()

    @field_validator("policy", mode="before")
    @classmethod
    def _yaml_reads_off_as_false(cls, value: Any) -> Any:
        return "off" if value is False else value

    @model_validator(mode="after")
    def _parts_agree(self) -> ModelPolicy:
        if self.policy == "model" and self.costs is None:
            raise ValueError(
                "policy model simulates with `costs`, and none are given; `tritonpilot costs` measures them, "
                "or say `policy: feedback`"
            )
        if self.slo_ms is not None and self.queue_delay_us is not None and self.queue_delay_us.min >= self.slo_ms * 1e3:
            raise ValueError(
                f"queue_delay_us.min {self.queue_delay_us.min} leaves nothing of slo_ms {self.slo_ms:g} to execute in"
            )
        return self

    def with_defaults(self, slo_ms: float | None, patience_ms: Mapping[str, float] | None = None) -> ModelPolicy:
        """The same with what the model's config says where this says nothing: the SLO, and how long each class may wait."""
        waits = patience_ms or {}
        limits = {
            name: limit.model_copy(update={"patience_ms": limit.patience_ms or waits.get(name)})
            for name, limit in self.max_queue_sizes.items()
        }
        return self.model_copy(update={"slo_ms": self.slo_ms or slo_ms, "max_queue_sizes": limits})


class Policy(Written):
    """The whole file."""

    interval_s: Annotated[float, Field(gt=0, le=3600)] = Field(5, description="from one look to the next")
    models: Annotated[list[ModelPolicy], Field(min_length=1)]

    _path: Path | None = PrivateAttr(default=None)

    @property
    def folder(self) -> Path:
        """What its paths are relative to."""
        return self._path.parent if self._path is not None else Path()

    @model_validator(mode="after")
    def _models_differ(self) -> Policy:
        names = [each.model for each in self.models]
        again = [name for name in names if names.count(name) > 1]
        if again:
            raise ValueError(f"model {again[0]} has two entries; one decides")
        return self


def read(path: Path) -> Policy:
    """Read a policy file. Raises SpecError when it is wrong."""
    found = written.read(path, Policy, "`models:`")
    found._path = path
    return found
