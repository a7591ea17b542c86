"""What does a candidate do with live traffic? A copy of a share of it (shadow), or the share itself (canary), through the entry.

    Shadow(["127.0.0.1:8102"], share=0.1).run(control, candidate, print)        # metrics of the entries in front of this Triton
    Canary(["127.0.0.1:8102"], share=0.05).run(control, candidate, print)

The share is written into the candidate's own config, which the entries read; when the check ends, however it ends, it is taken
away again. A canary that fails is asked of the served model by the entry, so that no caller is hurt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from tritonpilot import metrics
from tritonpilot.control import Control
from tritonpilot.entry.canary import CANARY_OF, CANARY_SHARE, SHADOW_SHARE
from tritonpilot.errors import MeasurementError, ServerError, SpecError
from tritonpilot.metrics import Sample
from tritonpilot.swap.compare import Tolerance
from tritonpilot.swap.golden import AGAINST_OLD
from tritonpilot.swap.terms import Candidate, Finding

Say = Callable[[str], None]

NOTICED_S = 15.0  # until every entry has read the candidate's config
LOOK_S = 0.2
SAY_EVERY_S = 5.0
FEW = 20  # requests from which a candidate that fails many is known
MANY = 0.1
FAILING = 0.01  # of the requests, more than the served model fails


@dataclass(frozen=True)
class Shadow:
    """A check with copies of live requests: the candidate answers all of them, as the served version does within tolerances.

    Ends when `requests` copies have come back, or without enough of them after `patience_s`, which is a failure.
    """

    entries: Sequence[str]
    share: float = 0.1
    requests: int = 200
    patience_s: float = 300.0
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    name: str = "shadow"

    def run(self, control: Control, candidate: Candidate, say: Say) -> Finding:
        try:
            with _sharing(control, candidate, self.entries, 0.0, self.share, say):
                seen = _watched(self._look(candidate.public), self.requests, self.patience_s, f"{self.name}s", say)
        except (ServerError, MeasurementError) as error:
            return Finding(self.name, ok=False, what=str(error))
        done = seen.of("shadow_requests_total")
        failed = {kind: int(done[kind]) for kind in ("failed", "misfit", "not_finite") if done.get(kind)}
        figures = {"copies": seen.count, **{f"copies_{kind}": float(count) for kind, count in failed.items()}}
        if failed:
            words = {"failed": "no answer", "misfit": "another shape", "not_finite": "NaN or infinity"}
            what = ", ".join(f"{words[kind]} to {count}" for kind, count in failed.items())
            return Finding(self.name, ok=False, what=f"of {seen.count:.0f} copies: {what}", figures=figures)
        if seen.count < self.requests:
            return Finding(
                self.name, ok=False, what=_too_few(seen.count, self.requests, self.patience_s), figures=figures
            )
        differences = {output: self._difference(seen, output) for output in seen.of("shadow_values", "output")}
        wrong = [said for said, ok, _ in differences.values() if not ok]
        figures |= {f"{output}_difference": value for output, (_, _, value) in differences.items()}
        said = "; ".join(wrong or [said for said, _, _ in differences.values()])
        return Finding(
            self.name, ok=not wrong, what=f"{said} ({seen.count:.0f} copies of live requests)", figures=figures
        )

    def _look(self, model: str) -> Callable[[], _Seen]:
        return lambda: _Seen.of_entries(
            self.entries, model, "shadow_requests_total", ("ok", "failed", "misfit", "not_finite")
        )

    def _difference(self, seen: _Seen, output: str) -> tuple[str, bool, float]:
        """(words, whether it is within the tolerance, value)."""
        tolerance = self.tolerances.get(output, AGAINST_OLD)
        values, unequal, served, squared, difference = (
            seen.of(f"shadow_{name}", "output").get(output, 0.0)
            for name in ("values", "unequal", "served", "served_squared", "squared_difference")
        )
        largest = max(
            (
                each.value
                for each in seen.samples
                if each.name == "shadow_largest_difference" and each.labels["output"] == output
            ),
            default=0.0,
        )
        if not squared:  # no floats, or zeros alone
            value = unequal / values if values else 0.0
            said = f"{output}: {100 * value:.3g} % of the values differ"
        elif tolerance.is_share:
            spread = math.sqrt(max(squared / values - (served / values) ** 2, 0.0)) or math.sqrt(squared / values)
            value = math.sqrt(difference / values) / spread
            said = f"{output}: differs by {100 * value:.3g} % of the spread of the served answers"
        else:
            value = largest
            said = f"{output}: differs by at most {largest:.3g}"
        ok = value <= tolerance.limit
        return f"{said}, {'within' if ok else 'more than'} {tolerance}", ok, value


@dataclass(frozen=True)
class Canary:
    """A check with live requests: the candidate fails no more of them than the served version, and is not much slower."""

    entries: Sequence[str]
    share: float = 0.05
    requests: int = 200
    patience_s: float = 300.0
    max_slower: float = 1.5
    name: str = "canary"

    def run(self, control: Control, candidate: Candidate, say: Say) -> Finding:
        def look() -> _Seen:
            return _Seen.of_entries(self.entries, candidate.public, "canary_requests_total", ("ok", "failed"))

        try:
            with _sharing(control, candidate, self.entries, self.share, 0.0, say):
                seen = _watched(look, self.requests, self.patience_s, "canary requests", say)
        except (ServerError, MeasurementError) as error:
            return Finding(self.name, ok=False, what=str(error))
        failed, count = seen.of("canary_requests_total").get("failed", 0.0), seen.count
        served = seen.of("canary_served_requests_total")
        asked = sum(served.values())
        p50_s = {who: quantile(seen.samples, who, 0.5) for who in ("served", "candidate")}
        figures = {
            "requests": count,
            "failed": failed,
            **{f"{who}_p50_ms": 1e3 * s for who, s in p50_s.items() if s == s},
        }
        allowed = FAILING + (served.get("failed", 0.0) / asked if asked else 0.0)
        if count and failed / count > allowed:
            what = f"{failed:.0f} of {count:.0f} requests failed there, and were answered by the served version"
            return Finding(self.name, ok=False, what=what, figures=figures)
        if count < self.requests:
            return Finding(self.name, ok=False, what=_too_few(count, self.requests, self.patience_s), figures=figures)
        slower = p50_s["candidate"] / p50_s["served"]
        ok = not slower > self.max_slower  # nan where the whole traffic was the canary's
        what = f"{count:.0f} live requests, P50 {slower:.2f} times the served version's"
        what += f", {'within' if ok else 'more than'} {self.max_slower:g}"
        return Finding(self.name, ok, what, figures)


def check_options(entries: Sequence[str], share: float, requests: int, what: str) -> None:
    """Raise SpecError for what cannot be done. `what`: "shadow" or "canary"."""
    if not entries:
        raise SpecError(
            f"A {what} needs live traffic through an entry. Nothing was changed. Name the entry's metrics: --entry 127.0.0.1:8102"
        )
    if not 0 < share <= 1:
        raise SpecError(
            f"The share of the {what} is {share:g}, but must be above 0 and at most 1. Nothing was changed."
        )
    if requests < 1:
        raise SpecError(f"The {what} was to see {requests} requests, and needs one at least. Nothing was changed.")


def set_shares(control: Control, candidate: Candidate, canary: float, shadow: float) -> None:
    """What the candidate gets, from the moment on that the entries notice. Loads it again. Raises ServerError."""
    name = candidate.names[candidate.public]
    config = control.config(name)
    for key, value in ((CANARY_OF, candidate.public), (CANARY_SHARE, f"{canary:g}"), (SHADOW_SHARE, f"{shadow:g}")):
        config.parameters[key].string_value = value
    control.load(name, config=config, probe=False)


def quantile(samples: Iterable[Sample], who: str, part: float) -> float:
    """Of `canary_latency_seconds`, interpolated within its bucket, in seconds; nan without observations."""
    counts: dict[float, float] = {}
    for each in samples:
        if each.name == "canary_latency_seconds_bucket" and each.labels["who"] == who:
            edge = float(each.labels["le"])
            counts[edge] = counts.get(edge, 0.0) + each.value
    edges = sorted(counts)
    if not edges or not counts[edges[-1]]:
        return math.nan
    wanted = part * counts[edges[-1]]
    below, lower = 0.0, 0.0
    for edge in edges:
        if counts[edge] >= wanted:
            if edge == math.inf:
                return lower
            return lower + (edge - lower) * (wanted - below) / (counts[edge] - below)
        below, lower = counts[edge], edge
    return lower


@dataclass(frozen=True)
class _Seen:
    """What the entries say of one model."""

    samples: tuple[Sample, ...]
    count: float

    @classmethod
    def of_entries(cls, entries: Sequence[str], model: str, counter: str, results: Sequence[str]) -> _Seen:
        samples = tuple(each for each in _scraped(entries) if each.labels.get("model") == model)
        count = sum(each.value for each in samples if each.name == counter and each.labels["result"] in results)
        return cls(samples, count)

    def of(self, name: str, label: str = "result") -> dict[str, float]:
        """Summed over the entries, by a label."""
        found: dict[str, float] = {}
        for each in self.samples:
            if each.name == name:
                found[each.labels[label]] = found.get(each.labels[label], 0.0) + each.value
        return found


@contextmanager
def _sharing(
    control: Control, candidate: Candidate, entries: Sequence[str], canary: float, shadow: float, say: Say
) -> Iterator[None]:
    """The candidate has its share within the block; afterwards it has none, and every entry knows."""
    say(
        f"{candidate.names[candidate.public]} gets {'a copy of ' if shadow else ''}{canary or shadow:.1%} of the requests"
    )
    try:
        set_shares(control, candidate, canary, shadow)
        _wait_noticed(entries, candidate.public, (canary, shadow))
        yield
    finally:
        set_shares(control, candidate, 0.0, 0.0)
        _wait_noticed(entries, candidate.public, None)


def _wait_noticed(entries: Sequence[str], model: str, wanted: tuple[float, float] | None) -> None:
    """Return when every entry has these shares in force. Raises MeasurementError."""
    deadline = time.monotonic() + NOTICED_S
    left = list(entries)
    while True:
        left = [entry for entry in left if _shares(entry, model) != wanted]
        if not left:
            return
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"The entry whose metrics are at {left[0]} has not noticed within {NOTICED_S:g} s what the candidate of {model} "
                f"gets. Nothing was compared. Check that it stands before this Triton and that {model} is asked through it."
            )
        time.sleep(LOOK_S)


def _shares(entry: str, model: str) -> tuple[float, float] | None:
    found = {
        each.labels["kind"]: each.value
        for each in metrics.scrape(entry)
        if each.name == "candidate_share" and each.labels["model"] == model
    }
    return (found["canary"], found["shadow"]) if found else None


def _scraped(entries: Sequence[str]) -> list[Sample]:
    return [sample for entry in entries for sample in metrics.scrape(entry)]


def _watched(look: Callable[[], _Seen], wanted: int, patience_s: float, what: str, say: Say) -> _Seen:
    """The state when there are as many as wanted, or many of the first have failed, or the patience ends."""
    deadline, said = time.monotonic() + patience_s, time.monotonic()
    while True:
        seen = look()
        failed = sum(
            count
            for name in ("shadow_requests_total", "canary_requests_total")
            for kind, count in seen.of(name).items()
            if kind in ("failed", "misfit", "not_finite")
        )
        if seen.count >= wanted or time.monotonic() > deadline or (seen.count >= FEW and failed > MANY * seen.count):
            return seen
        if time.monotonic() - said > SAY_EVERY_S:
            said = time.monotonic()
            say(f"{seen.count:.0f} of {wanted} {what}")
        time.sleep(LOOK_S)


def _too_few(count: float, wanted: int, patience_s: float) -> str:
    return f"only {count:.0f} of {wanted} live requests came in {patience_s:g} s, of which nothing can be told"
