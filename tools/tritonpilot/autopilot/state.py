"""What the autopilot remembers of a model from interval to interval, and over its own restarts, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tritonpilot.autopilot.terms import Knobs

MOST_SAMPLES = 1000  # an interval of a second remembers a quarter of an hour
MOST_FAILURES = 10
SAME_LOAD = 0.25  # loads that differ by less are the same load
OTHERWISE = 0.33  # and a setting is avoided while the load is the one that it was bad under


@dataclass(frozen=True)
class Sample:
    """An interval, as later ones need it."""

    at_s: float
    arrivals_per_s: float
    lateness: float | None  # P99, or what the queue says of it, divided by the SLO
    utilisation: float | None


@dataclass(frozen=True)
class Trial:
    """A change that is not judged yet, and how it was before."""

    before: Knobs
    at_s: float
    arrivals_per_s: float
    answered_per_s: float
    lost: float  # share of requests that were refused or failed
    lateness: float | None


@dataclass(frozen=True)
class Avoided:
    """A setting that made things worse, until when it is not tried again, and under which load it was bad.

    One that had too few instances stands for every one with as few, under that load and more.
    """

    knobs: Knobs
    until_s: float
    arrivals_per_s: float
    is_too_few: bool = False

    def covers(self, knobs: Knobs, arrivals_per_s: float) -> bool:
        """Whether it speaks against a setting under a load."""
        if self.is_too_few and knobs.instances <= self.knobs.instances:
            return arrivals_per_s > self.arrivals_per_s * (1 - SAME_LOAD)
        return knobs == self.knobs and is_close(arrivals_per_s, self.arrivals_per_s, OTHERWISE)


@dataclass(frozen=True)
class State:
    """Everything. Times are those of the observations."""

    wanted: Knobs | None = None  # what was set last, or found
    previous: Knobs | None = None  # what was there before it, while a change is carried out
    samples: tuple[Sample, ...] = ()
    changed_s: tuple[float, ...] = ()  # when something was changed, in the last minute; and the last time
    changed_load: float = 0.0  # requests a second at the last change
    shrunk: Avoided | None = None  # the last setting with fewer instances, to see whether it holds
    trial: Trial | None = None
    avoided: tuple[Avoided, ...] = ()
    paused_until_s: float = 0.0
    pause: str = ""  # why
    failures: int = 0  # changes in a row that did not come about
    has_restarted: bool = False  # the server came back, and its settings are not set again yet
    load_factor: float = 1.0  # how much more an execution takes than the model expects
    tail_factor: float = 1.0  # how much longer the tail is

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> State:
        """The reverse of `as_dict`. Raises ValueError for what is no state."""
        try:
            said = dict(values)
            for name in ("wanted", "previous"):
                said[name] = _knobs(said[name])
            said["samples"] = tuple(Sample(**each) for each in said["samples"])
            said["changed_s"] = tuple(said["changed_s"])
            said["shrunk"] = _avoided(said["shrunk"])
            trial = said["trial"]
            said["trial"] = None if trial is None else Trial(**{**trial, "before": Knobs.of_dict(trial["before"])})
            said["avoided"] = tuple(_avoided(each) for each in said["avoided"])
            found = cls(**said)
            _ = (
                found.paused_until_s
                + found.load_factor
                + found.tail_factor
                + sum(found.changed_s)
                + found.changed_load
                + found.failures
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no state of the autopilot: {error!r}") from error
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def failed(self, wanted: Knobs, now: Knobs, at_s: float, rest_s: float, avoid_s: float) -> State:
        """With `now` for what is there, as a change did not come about: each further one in a row is tried half as soon."""
        load = self.samples[-1].arrivals_per_s if self.samples else 0.0
        pause_s = min(avoid_s, rest_s * 2**self.failures)
        return replace(
            self.with_avoided(Avoided(wanted, at_s + avoid_s, load)),
            wanted=now,
            previous=None,
            trial=None,
            shrunk=None,
            paused_until_s=at_s + pause_s,
            pause=f"{wanted.describe()} could not be set",
            failures=min(self.failures + 1, MOST_FAILURES),
        )

    def load_over(self, since_s: float) -> float:
        """The most requests a second since then; 0 where nothing is known."""
        return max((each.arrivals_per_s for each in self.samples if each.at_s >= since_s), default=0.0)

    def spans(self, seconds: float) -> bool:
        """Whether all of the last while is known, or all but an interval or so."""
        times = [each.at_s for each in self.samples]
        return bool(times) and times[-1] - times[0] >= seconds - 2.5 * (times[-1] - times[-2] if times[1:] else 0.0)

    def avoids(self, knobs: Knobs, arrivals_per_s: float) -> bool:
        """Whether it made things worse lately, under about this load."""
        return any(each.covers(knobs, arrivals_per_s) for each in self.avoided)

    def with_avoided(self, what: Avoided) -> State:
        """The same, keeping away from a setting until then."""
        others = tuple(each for each in self.avoided if each.knobs != what.knobs)
        return replace(self, avoided=(*others, what))


def is_close(one: float, other: float, share: float) -> bool:
    """Whether two rates differ by less than a share of the larger; two that are hardly any are close."""
    return abs(one - other) <= share * max(one, other) + 0.5


def _knobs(values: Any) -> Knobs | None:
    return None if values is None else Knobs.of_dict(values)


def _avoided(values: Any) -> Any:
    return None if values is None else Avoided(**{**values, "knobs": Knobs.of_dict(values["knobs"])})
