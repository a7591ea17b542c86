"""What is done about a model that does not answer, and about a server that is gone? Pure.

    state, decision = decide(Policy(), state, Seen(at_s=now, unwell={"ctr": Trouble("dead", "...")}))
    decision.action          # "none", "reload" decision.model, "restart", or "give_up"
    state = healed(state, "ctr", now)         # or failed(policy, state, "ctr", now); restarted(policy, state, now, is_up=True)

A model is reloaded first, and alone. Only where that does not help is the server restarted, and for one model no more than once in
ten minutes: the others serve. What dies again at once waits ever longer: it would take the core from those that are well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

#: dead: its stub ended. hung: it answers nobody. failing: it answers with errors, which a restart of the server would not end.
Kind = Literal["dead", "hung", "failing"]
Action = Literal["none", "reload", "restart", "give_up"]


@dataclass(frozen=True)
class Policy:
    """How patient, and how often."""

    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    rapid_s: float = 3.0
    """Who needs help again so soon after it waits."""
    reloads: int = 3
    """That fail, one after the other, until the server is restarted."""
    restarts_most: int = 10
    window_s: float = 600.0
    """In which there may be so many restarts, and one for the sake of a model."""


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a model."""

    kind: Kind
    said: str


@dataclass(frozen=True)
class Seen:
    """One look. `is_down` says why the server is to be restarted, "" when it serves."""

    at_s: float
    is_down: str = ""
    unwell: Mapping[str, Trouble] = field(default_factory=dict)


@dataclass(frozen=True)
class Tries:
    """What was done about one model."""

    failed: int = 0
    """In a row."""
    rapid: int = 0
    """How often in a row it needed help soon after it had some."""
    healed_s: float | None = None
    next_s: float = 0.0
    restarted_s: float | None = None
    """When the server was restarted for its sake."""


@dataclass(frozen=True)
class State:
    """What was done."""

    models: Mapping[str, Tries] = field(default_factory=dict)
    restarts: tuple[float, ...] = ()
    restart_next_s: float = 0.0

    def of(self, model: str) -> Tries:
        """Of one model."""
        return self.models.get(model, Tries())


@dataclass(frozen=True)
class Decision:
    """What to do, and why."""

    action: Action
    model: str = ""
    reason: str = ""


NOTHING = Decision("none")


def decide(policy: Policy, state: State, seen: Seen) -> tuple[State, Decision]:
    """The next step. The state changes by what is noted of a model that needs help again."""
    if seen.is_down:
        return state, _about_server(policy, state, seen, seen.is_down)
    for model, trouble in seen.unwell.items():
        tries = state.of(model)
        if tries.healed_s is not None and not tries.failed and tries.next_s <= tries.healed_s:  # it was well since
            is_rapid = seen.at_s - tries.healed_s < policy.rapid_s
            rapid = tries.rapid + 1 if is_rapid else 0
            tries = replace(tries, rapid=rapid, next_s=seen.at_s + _wait_s(policy, rapid), healed_s=None)
            state = _with(state, model, tries)
        if seen.at_s < tries.next_s:
            continue
        is_hopeless = tries.failed >= policy.reloads and trouble.kind != "failing"
        is_free = tries.restarted_s is None or seen.at_s - tries.restarted_s > policy.window_s
        if is_hopeless and is_free:
            decision = _about_server(
                policy,
                state,
                seen,
                f"{model} is {trouble.kind} and {tries.failed} reloads did not help: {trouble.said}",
                model,
            )
            if decision.action == "restart":
                return _with(state, model, replace(tries, restarted_s=seen.at_s)), decision
            if decision.action == "give_up":
                continue  # the others serve
        return state, Decision("reload", model, f"{model} is {trouble.kind}: {trouble.said}")
    return state, NOTHING


def healed(state: State, model: str, at_s: float) -> State:
    """It answers again."""
    return _with(state, model, replace(state.of(model), failed=0, healed_s=at_s, next_s=at_s))


def failed(policy: Policy, state: State, model: str, at_s: float) -> State:
    """A reload did not help."""
    tries = state.of(model)
    count = tries.failed + 1
    return _with(state, model, replace(tries, failed=count, next_s=at_s + _wait_s(policy, count)))


def restarted(policy: Policy, state: State, at_s: float, *, is_up: bool) -> State:
    """The server was restarted, or could not be. Every model has a new beginning."""
    recent = tuple(each for each in state.restarts if at_s - each < policy.window_s)
    wait_s = _wait_s(policy, sum(at_s - each < policy.first_wait_s * 60 for each in recent) + (not is_up))
    models = {name: replace(tries, failed=0) for name, tries in state.models.items()} if is_up else state.models
    return replace(state, models=models, restarts=(*recent, at_s), restart_next_s=at_s + wait_s)


def _about_server(policy: Policy, state: State, seen: Seen, reason: str, model: str = "") -> Decision:
    recent = [each for each in state.restarts if seen.at_s - each < policy.window_s]
    if len(recent) >= policy.restarts_most:
        return Decision("give_up", model, f"{reason}. It was restarted {len(recent)} times in {policy.window_s:g} s")
    if seen.at_s < state.restart_next_s:
        return Decision("none", model, reason)
    return Decision("restart", model, reason)


def _wait_s(policy: Policy, count: int) -> float:
    return min(policy.longest_wait_s, policy.first_wait_s * 2 ** min(count - 1, 16)) if count > 0 else 0.0


def _with(state: State, model: str, tries: Tries) -> State:
    return replace(state, models={**state.models, model: tries})
