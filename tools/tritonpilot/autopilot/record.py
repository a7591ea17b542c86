"""What does the autopilot remember, and what does it tell? Its folder on disk, its decision log, its own metrics.

    with Folder(Path("state")) as folder:            # one autopilot at a time
        memories, clock_s = folder.read()
        folder.write(memories, clock_s)              # whole or not at all
        folder.log(Entry("ctr", "change", "2 instances instead of 1: ...", target=knobs))

The log is decisions.jsonl in that folder: a line per event, each with a sentence for people (`jq -r .said decisions.jsonl`).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tritonpilot.autopilot.controller import State
from tritonpilot.autopilot.terms import Knobs, Observation
from tritonpilot.columns import finite
from tritonpilot.errors import HostError

STATE, LOG, LOCK = "state.json", "decisions.jsonl", "lock"
FORMAT = 1  # of the state
LOG_BYTES_MOST = 10 << 20  # then it becomes decisions.jsonl.1

#: keep: nothing is done (told by `once` alone). failed: a change did not come about. problem, recovered: nothing can be concluded
#: about the model, and it can again. policy: the policy file was read again, or is wrong. started, stopped: the autopilot itself.
Event = Literal["keep", "change", "revert", "adopt", "failed", "problem", "recovered", "policy", "started", "stopped"]


@dataclass(frozen=True)
class Entry:
    """A line of the log. `model` is "" where it is about the autopilot."""

    model: str
    event: Event
    said: str
    before: Knobs | None = None
    target: Knobs | None = None
    now: Knobs | None = None  # what the server has afterwards
    way: str = ""
    seconds: float | None = None  # that the change took
    seen: Observation | None = None
    is_dry_run: bool = False
    time_s: float = field(default_factory=time.time)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in ISO 8601, UTC; what is not known is left out."""
        knobs = {name: getattr(self, name).as_dict() for name in ("before", "target", "now") if getattr(self, name)}
        at = datetime.fromtimestamp(self.time_s, timezone.utc).isoformat(timespec="milliseconds")
        seen = {} if self.seen is None else finite(asdict(self.seen))
        return {
            "time": at,
            "model": self.model,
            "event": self.event,
            "said": self.said,
            **knobs,
            **({"way": self.way} if self.way else {}),
            **({"seconds": round(self.seconds, 3)} if self.seconds is not None else {}),
            **({"dry_run": True} if self.is_dry_run else {}),
            **({"seen": {name: value for name, value in seen.items() if value not in (None, "", {})}} if seen else {}),
        }

    def line(self) -> str:
        """For people: `ctr: change: 2 instances, ...`."""
        dry = " (dry run)" if self.is_dry_run else ""
        return f"{self.model + ': ' if self.model else ''}{self.event}{dry}: {self.said}"


@dataclass(frozen=True)
class Memory:
    """What is known of a model beyond this process. `found`: what tritonserver had after its start."""

    state: State
    found: Knobs

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Memory:
        """The reverse of `as_dict`. Raises ValueError, KeyError or TypeError for what is none."""
        return cls(State.of_dict(values["state"]), Knobs.of_dict(values["found"]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"state": self.state.as_dict(), "found": self.found.as_dict()}


class Folder:
    """Where an autopilot keeps what it knows. Who has entered it is the only one who acts on its Triton."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def __enter__(self) -> Folder:
        """Raises HostError when another autopilot is in it, or it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (self.path / LOCK).open("a+", encoding="ascii")
        except OSError as error:
            raise HostError(
                f"The folder of the autopilot's state, {self.path}, cannot be used: {error.strerror}. Nothing was started. Make it "
                "writable for this user, or name another (--state)."
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise HostError(
                f"Another autopilot (process {holder}) works with {self.path}, and two would undo each other's changes. Nothing "
                "was started; that one goes on. Stop it first, or, for another Triton, name another folder (--state)."
            ) from None
        self._lock = lock
        with suppress(OSError):  # a full disk: who holds it is for people only
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"{os.getpid()}\n".encode())
        return self

    def __exit__(self, *_: object) -> None:
        assert self._lock is not None
        self._lock.close()  # with it goes the lock
        self._lock = None

    def read(self) -> tuple[dict[str, Memory], float]:
        """What was written last, by model, and the clock then; nothing and 0 where nothing was.

        Raises HostError for a file that is none; it is kept aside where that can be, and the next read then finds nothing.
        """
        path = self.path / STATE
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            if said["format"] != FORMAT:
                raise ValueError(f"its format is {said['format']}, this program's {FORMAT}")
            memories = {str(name): Memory.of_dict(each) for name, each in said["models"].items()}
            return memories, float(said["clock_s"])
        except FileNotFoundError:
            return {}, 0.0
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            aside = path.with_suffix(".broken")
            try:
                path.replace(aside)
                now = f"It is kept as {aside.name}"
            except OSError as failed:
                now = f"It cannot be put aside ({failed.strerror})"
            raise HostError(
                f"{path} holds no state of an autopilot ({type(error).__name__}: {error}). {now}; what the server has now is taken "
                "for the beginning. Nothing needs to be done."
            ) from None

    def write(self, memories: Mapping[str, Memory], clock_s: float) -> None:
        """Raises OSError; the file is the old or the new one, never a part."""
        models = {name: memory.as_dict() for name, memory in memories.items()}
        text = json.dumps({"format": FORMAT, "clock_s": clock_s, "models": models}, indent=1)
        with tempfile.NamedTemporaryFile("w", dir=self.path, prefix=".state-", delete=False, encoding="utf-8") as file:
            try:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(self.path / STATE)
            finally:
                Path(file.name).unlink(missing_ok=True)

    def log(self, entry: Entry) -> None:
        """Append it. Raises OSError."""
        path = self.path / LOG
        if path.exists() and path.stat().st_size > LOG_BYTES_MOST:
            path.replace(path.with_name(f"{LOG}.1"))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry.as_dict(), allow_nan=False) + "\n")


@dataclass(eq=False)
class AutopilotMetrics:
    """What the autopilot tells Prometheus about itself."""

    is_dry_run: bool = False
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    policy_trouble: bool = False
    state_trouble: bool = False
    decided_s: float | None = None
    seen: dict[str, Observation] = field(default_factory=dict)
    unknown: set[str] = field(default_factory=set)
    """Models of which nothing was ever seen, as those that the server does not have."""
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    change_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.registry.register(self)

    def watch(self, model: str) -> None:
        """Count for this model from 0 on: a counter that is born at 1 has no rate."""
        for event in ("keep", "change", "revert", "adopt", "failed"):
            self.counts.setdefault((model, event), 0)

    def forget(self, model: str) -> None:
        """The model is not in the policy any more. What was counted stays."""
        self.seen.pop(model, None)
        self.unknown.discard(model)

    def count(self, model: str, event: Event) -> None:
        """A decision, or a change that failed."""
        self.counts[model, event] = self.counts.get((model, event), 0) + 1

    def collect(self) -> Iterator[Any]:
        """All families (prometheus_client's protocol of a collector)."""
        decisions = CounterMetricFamily(
            "autopilot_decisions",
            "Decisions: keep, change, revert, adopt; and changes that failed",
            labels=("model", "event"),
        )
        for key, count in tuple(self.counts.items()):
            decisions.add_metric(key, count)
        yield decisions
        of_model = ("model",)
        families = {
            name: GaugeMetricFamily(f"autopilot_{name}", said, labels=of_model)
            for name, said in (
                ("problem", "1: nothing can be concluded about the model, and its settings stay"),
                ("instances", "Instances that the model has"),
                ("queue_delay_seconds", "Queue delay that the model has"),
                ("arrivals_per_second", "Requests that came in the last interval"),
                ("utilisation", "Part of the last interval that instances were busy"),
                ("change_seconds", "How long the last change took"),
            )
        }
        limits = GaugeMetricFamily("autopilot_max_queue_size", "Limit of waiting requests", labels=("model", "class"))
        for model in tuple(self.unknown):
            families["problem"].add_metric((model,), 1.0)
        for model, seen in tuple(self.seen.items()):
            families["problem"].add_metric((model,), float(bool(seen.problem)))
            families["instances"].add_metric((model,), seen.knobs.instances)
            families["queue_delay_seconds"].add_metric((model,), seen.knobs.queue_delay_us / 1e6)
            for name, value in (("arrivals_per_second", seen.arrivals_per_s), ("utilisation", seen.utilisation)):
                if value is not None and math.isfinite(value):
                    families[name].add_metric((model,), value)
            for class_name, limit in seen.knobs.max_queue_sizes.items():
                limits.add_metric((model, class_name), limit)
        for model, seconds in tuple(self.change_seconds.items()):
            families["change_seconds"].add_metric((model,), seconds)
        yield from (*families.values(), limits)
        for name, said, is_so in (
            (
                "policy_file_trouble",
                "1: the policy file on disk is wrong, and the one read before is in force",
                self.policy_trouble,
            ),
            ("state_trouble", "1: the state cannot be written", self.state_trouble),
            ("dry_run", "1: nothing is changed", self.is_dry_run),
        ):
            yield GaugeMetricFamily(f"autopilot_{name}", said, value=float(is_so))
        if self.decided_s is not None:
            yield GaugeMetricFamily(
                "autopilot_last_decision_timestamp_seconds",
                "When it decided last, since the epoch",
                value=self.decided_s,
            )
