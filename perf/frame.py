"""What is a proof, what does it leave behind, and when does it refuse to speak?

Claim("mean_batch", prove, unit="rows", bar=Bar(">", 4), line="...")     # a row of the registry
result = carry_out(claim, quick=False, say=print)                        # a Result, or MeasurementError
write(result, Path("perf/results"))
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import operator
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from perf import machine
from perf.machine import Cores, Limits, Noise
from tritonpilot.errors import MeasurementError

PROJECT = Path(__file__).resolve().parents[1]
QUIET_WAIT_S = 20.0
QUIET_LOOK_S = 1.0
COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}
VERSIONS_OF = ("tritonpilot", "nvidia-pytriton", "tritonclient", "onnxruntime", "numpy")

Round = TypeVar("Round")


@dataclass(frozen=True)
class Bar:
    """What a value has to reach."""

    compare: str
    limit: float

    def holds(self, value: float) -> bool:
        return bool(COMPARE[self.compare](value, self.limit))

    def __str__(self) -> str:
        return f"{self.compare}{self.limit:g}"


@dataclass(frozen=True)
class Outcome:
    """What a proof found: its value, and how far the rounds behind it lie apart (largest less smallest)."""

    value: float
    spread: float = 0.0
    rounds: int = 1
    ok: bool = True  # False when something that the value does not show went wrong; the details say what
    details: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """A figure that we publish, and how it is proved."""

    name: str
    prove: Callable[[Bench], Outcome]
    unit: str
    bar: Bar
    line: str
    needs_quiet: bool = False  # timing: a noisy machine would change the value


@dataclass(frozen=True)
class Result:
    """What perf/results/<name>.json holds."""

    name: str
    value: float
    unit: str
    bar: str
    ok: bool
    spread: float
    rounds: int
    quick: bool
    command: str
    machine: dict[str, object]
    versions: dict[str, str]
    date: str
    commit: str
    noise: dict[str, object]
    details: dict[str, object]

    def line(self) -> str:
        """The last line of a proof: `<name> <value> <unit> (bar <bar>) ok|short`."""
        return f"{self.name} {self.value:g} {self.unit} (bar {self.bar}) {'ok' if self.ok else 'short'}"


class NoisyRoundError(MeasurementError):
    """`measure` itself saw that its round was disturbed; the message says by what."""


class Bench:
    """What a proof works with: the two cores, the wish for brevity, a voice, and rounds that watch the machine."""

    def __init__(
        self,
        *,
        quick: bool,
        needs_quiet: bool,
        say: Callable[[str], None],
        limits: Limits,
        quiet_wait_s: float = QUIET_WAIT_S,
        quiet_look_s: float = QUIET_LOOK_S,
    ) -> None:
        self.quick = quick
        self.say = say
        self.noise: list[Noise] = []
        self.noisy_rounds = 0
        self._needs_quiet = needs_quiet
        self._limits = limits
        self._quiet_wait_s = quiet_wait_s
        self._quiet_look_s = quiet_look_s
        self._cores: Cores | None = None

    @property
    def cores(self) -> Cores:
        """Found when first asked for: a proof that pins nothing runs on one core too."""
        if self._cores is None:
            self._cores = machine.cores()
        return self._cores

    def rounds(
        self, count: int, measure: Callable[[], Round], *, check: Callable[[], None], retries: int | None = None
    ) -> list[Round]:
        """`count` results of `measure`, each made while the machine was quiet.

        `check` raises when what is measured died; it is called after every round. A noisy round (the machine's load tells,
        or `measure` raises NoisyRoundError) is repeated, also when it failed to measure, up to `retries` times in all
        (default: as many as rounds); then MeasurementError says what was seen.
        """
        spare = count if retries is None else retries
        kept: list[Round] = []
        while len(kept) < count:
            if self._needs_quiet:
                self.wait_until_quiet()
            noise, found = self._watched(lambda: _attempt(measure))
            check()
            if isinstance(found, NoisyRoundError):
                noise = replace(noise, is_quiet=False, reason=str(found))
            elif noise.is_quiet or not self._needs_quiet:
                if isinstance(found, MeasurementError):
                    raise found
                kept.append(found)
                self.noise.append(noise)
                self.say(f"round {len(kept)} of {count}: {noise.reason}")
                continue
            self.noisy_rounds += 1
            failed = isinstance(found, Exception) and not isinstance(found, NoisyRoundError)
            self.say(f"a round is thrown away: {noise.reason}" + (f"; {found}" if failed else ""))
            if self.noisy_rounds > spare:
                raise MeasurementError(
                    f"The machine was too noisy: {self.noisy_rounds} rounds were thrown away, in the last one "
                    f"{noise.reason}. No figure is reported and the earlier result stays. Stop other work and repeat."
                )
        return kept

    def wait_until_quiet(self) -> None:
        """Return after a quiet second. Raises MeasurementError when there is none within 20 seconds."""
        deadline = time.monotonic() + self._quiet_wait_s
        while True:
            noise, _ = self._watched(lambda: time.sleep(self._quiet_look_s))
            if noise.is_quiet:
                return
            if time.monotonic() > deadline:
                raise MeasurementError(
                    f"The machine is too noisy to start: after {self._quiet_wait_s:g} s still {noise.reason}. No figure is "
                    "reported and the earlier result stays. Stop other work and repeat."
                )

    def _watched(self, work: Callable[[], Round]) -> tuple[Noise, Round]:
        watched = sorted(os.sched_getaffinity(0) if self._cores is None else self.cores.both)
        before = machine.sample(watched)
        found = work()
        return machine.judge(before, machine.sample(watched), len(watched), self._limits), found


def carry_out(claim: Claim, *, quick: bool, say: Callable[[str], None], limits: Limits | None = None) -> Result:
    """Prove one claim. Raises MeasurementError (or what the parts raise) when there is no figure to report."""
    bench = Bench(quick=quick, needs_quiet=claim.needs_quiet, say=say, limits=limits or Limits())
    outcome = claim.prove(bench)
    return Result(
        name=claim.name,
        value=_figures(outcome.value),
        unit=claim.unit,
        bar=str(claim.bar),
        ok=outcome.ok and claim.bar.holds(outcome.value),
        spread=_figures(outcome.spread),
        rounds=outcome.rounds,
        quick=quick,
        command=f"{'QUICK=1 ' if quick else ''}make prove NAME={claim.name}",
        machine=machine.describe(),
        versions=versions(),
        date=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=commit(),
        noise={
            "watched": bool(bench.noise),
            "most_other_cores": round(max((n.other_cores for n in bench.noise), default=0.0), 3),
            "most_steal_share": round(max((n.steal_share for n in bench.noise), default=0.0), 4),
            "rounds_thrown_away": bench.noisy_rounds,
        },
        details=outcome.details,
    )


def write(result: Result, folder: Path) -> Path:
    """Write <name>.json so that a reader sees the old file or the new one, never a part."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    text = json.dumps(asdict(result), indent=2, allow_nan=False) + "\n"
    with tempfile.NamedTemporaryFile(
        "w", dir=folder, prefix=f".{result.name}-", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).chmod(0o644)
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)
    return path


def median(values: Sequence[float]) -> float:
    """The middle value. Raises MeasurementError without values."""
    if not values:
        raise MeasurementError("There are no rounds to take a median of. Nothing is reported. Measure one at least.")
    return statistics.median(values)


def spread(values: Sequence[float]) -> float:
    """Largest less smallest."""
    return max(values) - min(values) if values else 0.0


def versions() -> dict[str, str]:
    """The versions that the value depends on."""
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def commit() -> str:
    """The commit of the project, with `-dirty` when tracked source differs from it; "unknown" outside git."""
    try:
        head = _git("rev-parse", "HEAD")
        # Results are written by proofs themselves, so they do not count as a change of what is proved.
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)perf/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def _attempt(measure: Callable[[], Round]) -> Round | MeasurementError:
    """What it measured, or why it could not: whether that is the machine's fault is decided afterwards."""
    try:
        return measure()
    except MeasurementError as error:
        return error


def _figures(value: float) -> float:
    """Six significant figures: a difference of 1e-7 is not 0."""
    return float(f"{value:.6g}")


def _git(*argv: str) -> str:
    done = subprocess.run(["git", *argv], cwd=PROJECT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
