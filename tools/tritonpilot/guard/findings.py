"""What is wrong, by what the entry's guard tells? Its metrics in, findings out, and whether the version before was better.

state = read(metrics.scrape("127.0.0.1:8102"))
state.findings                       # [Finding("ctr", "different", "3 of 120 answers differed ...")]
decide_trip(state, within_s=3600)    # [Trip("ctr", version="4", previous="3", to=3, why="...")]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

Kind = Literal["different", "drift", "constant", "not_finite"]

PREFIX = "pilot_guard_"
#: What compares answers of one version: they have to be the same.
SAME_VERSION = ("again", "batch", "repeat")


class Sample(Protocol):
    """A line of metrics (tritonpilot.metrics.Sample)."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def value(self) -> float: ...


@dataclass(frozen=True)
class Finding:
    """Something that a model does and should not."""

    model: str
    kind: Kind
    what: str


@dataclass(frozen=True)
class Guarded:
    """What is known of one model."""

    model: str
    compared: int
    different: int
    versions_compared: int
    versions_different: int
    rows: int
    reference_rows: int
    is_learning: bool
    version: str = ""
    previous: str = ""
    version_age_s: float = 0.0
    """How long `version` has been served after `previous`; meaningless without one."""
    findings: tuple[Finding, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True)
class Trip:
    """A service's version that is to go, and why."""

    model: str
    version: str
    previous: str
    to: int
    """The version to go back to, of what changed: the model, or a member of its pipeline."""
    why: str


def read(samples: Iterable[Sample]) -> list[Guarded]:
    """Every guarded model, by name: what was found of the version that is served now, since the entry's start."""
    ours = [sample for sample in samples if sample.name.startswith(PREFIX)]
    models = sorted({sample.labels["model"] for sample in ours if "model" in sample.labels})
    return [_guarded(model, [sample for sample in ours if sample.labels.get("model") == model]) for model in models]


def decide_trip(guarded: Iterable[Guarded], within_s: float) -> list[Trip]:
    """The versions that came after a lower one, less than `within_s` ago, and of which something was found.

    A version that has been served for longer is not the cause of what is new; one that came by a rollback is not left again.
    """
    found = []
    for each in guarded:
        now, before = _numbers(each.version), _numbers(each.previous)
        grown = [old for new, old in zip(now, before, strict=False) if new > old]
        if not each.findings or len(now) != len(before) or not grown or each.version_age_s > within_s:
            continue
        if all(new >= old for new, old in zip(now, before, strict=True)):
            why = "; ".join(finding.what for finding in each.findings)
            found.append(Trip(each.model, each.version, each.previous, grown[0], why))
    return found


def _guarded(model: str, samples: list[Sample]) -> Guarded:
    served = next((each for each in samples if each.name == PREFIX + "version_age_seconds"), None)
    version = served.labels["version"] if served is not None else ""

    def total(name: str, **labels: str) -> float:
        return sum(
            each.value for each in samples if each.name == PREFIX + name and labels.items() <= dict(each.labels).items()
        )

    def compared_so(kind: str, *results: str) -> int:
        return int(sum(total("comparisons_total", version=version, kind=kind, result=each) for each in results))

    different = {kind: compared_so(kind, "different") for kind in SAME_VERSION}
    compared = sum(compared_so(kind, "same", "different") for kind in SAME_VERSION)
    findings = []
    if any(different.values()):
        how = ", ".join(f"{count} {_HOW[kind]}" for kind, count in different.items() if count)
        findings.append(
            Finding(
                model, "different", f"{model} answered the same input differently: {how}, of {compared} comparisons"
            )
        )
    for name, kind, words in (
        ("drift", "drift", "is distributed differently than usual"),
        ("constant", "constant", "is the same in all answers"),
    ):
        for each in samples:
            if each.name == PREFIX + name and each.value:
                output, what = each.labels["output"], each.labels["what"]
                figures = ", ".join(
                    f"{figure.upper()} {total(figure, output=output, what=what):.2g}" for figure in ("psi", "ks")
                )
                said = f"{model}: {output} ({what}) {words}" + (f" ({figures})" if name == "drift" else "")
                findings.append(Finding(model, kind, said))  # type: ignore[arg-type]
    for each in samples:
        if each.name == PREFIX + "not_finite_total" and each.value and each.labels["version"] == version:
            rows = f"{each.value:.0f} of {total('rows_total'):.0f} rows looked at"
            findings.append(
                Finding(model, "not_finite", f"{model}: {each.labels['output']} has NaN or infinity in {rows}")
            )
    return Guarded(
        model=model,
        compared=compared,
        different=sum(different.values()),
        versions_compared=compared_so("version", "same", "different"),
        versions_different=compared_so("version", "different"),
        rows=int(total("rows_total")),
        reference_rows=int(total("reference_rows")),
        is_learning=bool(total("learning")),
        version=version,
        previous=served.labels["previous"] if served is not None else "",
        version_age_s=served.value if served is not None else 0.0,
        findings=tuple(findings),
    )


def _numbers(version: str) -> list[int]:
    """Of a version as 3, or as 1.3.2 of a pipeline and its members."""
    return [int(part) for part in version.split(".") if part.isdecimal()]


_HOW = {"again": "when it was sent again", "batch": "within a batch", "repeat": "when it came again by itself"}
