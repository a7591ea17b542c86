"""What the autopilot remembers of a model from interval to interval, and over its own restarts, as JSON."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pydantic import TypeAdapter

from tritonpilot.autopilot.terms import Knobs

MOST_SAMPLES = 1000  # an interval of a second remembers a quarter of an hour
MOST_FAILURES = 10
SAME_LOAD = 0.25  # loads that differ by less are the same load
OTHERWISE = 0.33  # and a setting is avoided while the load is the one that it was bad under
_NEEDED = {"wanted", "previous", "samples", "changed_s", "shrunk", "trial", "avoided"}  # of a state in a file


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
            if unfit := _NEEDED - set(values) or set(values) - {each.name for each in fields(cls)}:
                raise ValueError(f"{', '.join(sorted(unfit))} is missing or unknown")
            found = _adapter().validate_python(values)
            for each in (found.wanted, found.previous):
                if each is not None:
                    Knobs.of_dict(each.as_dict())
        except (TypeError, ValueError) as error:  # pydantic's is one
            raise ValueError(f"this is no state of the autopilot: {' '.join(str(error).split())}") from error
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def failed(self, wanted: Knobs, now: Knobs, at_s: float, rest_s: float, avoid_s: float) -> State:
        """With `now` for what is there, as a change did not come about.

        It is tried again after `rest_s`, after twice as long for each further failure in a row, and after `avoid_s` at the latest.
        """
        load = self.samples[-1].arrivals_per_s if self.samples else 0.0
        pause_s = min(avoid_s, rest_s * 2**self.failures)
        return replace(
            self.with_avoided(Avoided(wanted, at_s + pause_s, load)),
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


@functools.cache
def _adapter() -> TypeAdapter[State]:
    return TypeAdapter(State)
