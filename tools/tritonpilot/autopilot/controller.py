"""Which queue delay, how many instances and which class limits should a model have now? Pure: no clock, no I/O.

state, decision = decide(policy, state, observation, model)      # once an interval
state = after(state, decision, knobs, observation.at_s)          # what is true once the decision was carried out
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tritonpilot.autopilot.policy import ModelPolicy
from tritonpilot.autopilot.terms import Action, Decision, Demand, Knobs, Model, Observation, Prediction, Way

__all__ = [
    "Action", "Decision", "Demand", "Knobs", "Model", "Observation", "Prediction", "State", "Way", "after", "decide",
]  # fmt: skip


@dataclass(frozen=True)
class State:
    """What is remembered from interval to interval, and over restarts of the autopilot."""

    wanted: Knobs | None = None  # what was set last, or found

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> State:
        """The reverse of `as_dict`. Raises ValueError for what is no state."""
        return cls(wanted=Knobs.of_dict(values["wanted"]) if values["wanted"] is not None else None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"wanted": self.wanted.as_dict() if self.wanted is not None else None}


def decide(policy: ModelPolicy, state: State, seen: Observation, model: Model | None = None) -> tuple[State, Decision]:
    """What to do after one interval. Growing is never put off by a cool-down; whatever is not known keeps what is there."""
    del policy, state, model
    return State(wanted=seen.knobs), Decision("keep", reason="nothing is decided yet")


def after(state: State, decision: Decision, knobs: Knobs, at_s: float) -> State:
    """What is true once a decision was carried out, or was not: `knobs` is what the server has now.

    A target that could not be reached is not tried again for a while.
    """
    del state, decision, at_s
    return State(wanted=knobs)
