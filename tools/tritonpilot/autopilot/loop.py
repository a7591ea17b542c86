"""One interval of the autopilot: look at a running Triton, decide, act, remember. All that is decided is decided in `controller`.

    pilot = Autopilot(settings, folder, actor)
    pilot.look()                     # an interval begins
    for entry in pilot.step(): ...   # it ends, and the next begins

Whatever cannot be known leaves the settings as they are. What is to be done is written down before it is done, so that an
autopilot that was killed finds what it had begun.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from google.protobuf import json_format

from tritonpilot.autopilot import observe, policy
from tritonpilot.autopilot.controller import State, after, decide
from tritonpilot.autopilot.observe import Pages, Prometheus, Reading, Source
from tritonpilot.autopilot.policy import ModelPolicy, Policy
from tritonpilot.autopilot.record import AutopilotMetrics, Entry, Folder, Memory
from tritonpilot.autopilot.terms import Decision, Knobs, Model, Observation, Way
from tritonpilot.control import Control
from tritonpilot.costs import Costs
from tritonpilot.entry.terms import terms_of
from tritonpilot.errors import HostError, PilotError, SpecError
from tritonpilot.model_config import ModelConfig
from tritonpilot.top import Endpoints as Watched
from tritonpilot.top import is_address
from tritonpilot.written import nearest

CALL_TIMEOUT_S = 5.0
PATIENCE_S = 15.0  # with a Prometheus that scrapes rarely
PATIENCE_INTERVALS = 3


class Acts(Protocol):
    """Who changes a running Triton. Its methods raise PilotError, with what is true then."""

    def check_key(self) -> None:
        """Raise when a server that is there would refuse every change."""
        ...

    def knobs(self, model: str) -> Knobs:
        """What the server has now."""
        ...

    def apply(self, model: str, knobs: Knobs, way: Way) -> Knobs:
        """Change it, see that the model answers, and say what the server has then."""
        ...

    def is_live(self, model: str) -> bool:
        """Whether its queue delay can be changed at run time."""
        ...


@dataclass(frozen=True)
class Settings:
    """Which Triton, what is known of it from where, and what may be done. A port of 0 is a free one."""

    policy: Path
    state: Path
    triton_grpc: str = "127.0.0.1:8001"
    metrics: str = "127.0.0.1:8002"
    """Triton's page of metrics; not read where there is a Prometheus."""
    entry: str = ""
    """The entry's page of metrics."""
    prometheus: str = ""
    instance: str = ""
    """Triton's label `instance` in Prometheus."""
    key: str | None = field(default=None, repr=False)
    host: str = "127.0.0.1"
    port: int = 8104
    is_dry_run: bool = False
    waits_for_policy: bool = False
    """A wrong policy file at the start ends nothing: models follow when it is right."""

    def source(self, interval_s: float) -> Source:
        """Where figures come from. Raises SpecError for a wrong address."""
        if not is_address(self.triton_grpc):
            raise SpecError(
                f"--triton-grpc is {self.triton_grpc!r}, but must be HOST:PORT, as 127.0.0.1:8001. Nothing was started."
            )
        if self.prometheus:
            patience_s = max(PATIENCE_S, PATIENCE_INTERVALS * interval_s)
            return Prometheus(self.prometheus, instance=self.instance, patience_s=patience_s)
        if self.instance:
            raise SpecError(
                f"--instance is {self.instance}, which tells Tritons in a Prometheus apart, and no --prometheus is named. Nothing "
                "was started. Name it, or leave --instance out."
            )
        return Pages(Watched(metrics=self.metrics, http="", entry=self.entry))


#: Before a policy file has ever been right.
NOBODY = Policy.model_construct(interval_s=5.0, models=[])


@dataclass(frozen=True)
class _Served:
    """A model of the policy as the server has it."""

    policy: ModelPolicy  # with the defaults of its config
    knobs: Knobs
    max_batch_size: int
    delay_is_live: bool
    model: Model | None


@dataclass(frozen=True)
class _Plan:
    """What was decided for a model and is not done yet."""

    served: _Served
    state: State
    decision: Decision
    seen: Observation


class Autopilot:
    """One Triton's autopilot, an interval at a time. Its caller has entered the folder, and keeps the time."""

    def __init__(
        self,
        settings: Settings,
        folder: Folder,
        actor: Acts,
        metrics: AutopilotMetrics | None = None,
        tell: Callable[[Entry], None] = lambda _: None,
    ) -> None:
        """Raises SpecError for a wrong policy file or address. `tell` hears of what is worth a line of the log."""
        self._settings, self._folder, self._actor = settings, folder, actor
        self.metrics = metrics or AutopilotMetrics(settings.is_dry_run)
        self._tell = tell
        before = _fingerprint(settings.policy)  # what changes while it is read is read again
        self.policy, self._costs = self._first_policy()
        self._prints = (before, *self._fingerprints()[1:])
        self._source = settings.source(self.policy.interval_s)
        self._models: dict[str, Model] = {}
        self._problems: dict[str, str] = {}
        self._away: set[str] = set()
        """Models that the server did not serve, until something is known of them again."""
        self._proposed: dict[str, Knobs] = {}
        """What a dry run has told already."""
        self._before: Reading | None = None
        self._began_s = time.monotonic()
        self._memories: dict[str, Memory] = {}
        clock_s = 0.0
        try:
            self._memories, clock_s = folder.read()
        except HostError as error:
            self.log(Entry("", "problem", str(error)))
        self._away.update(self._memories)  # the server may have been started again meanwhile
        # Goes on where it stood, also over a restart of this machine and a clock that was set back.
        self._clock_offset_s = max(time.time(), clock_s) - time.monotonic()

    def _first_policy(self) -> tuple[Policy, Mapping[str, Costs]]:
        try:
            return _read(self._settings.policy)
        except SpecError as error:
            if not self._settings.waits_for_policy:
                raise
            self.metrics.policy_trouble = True
            self.log(Entry("", "policy", f"{error} No model is looked after until the file is right."))
            return NOBODY, {}

    def now_s(self) -> float:
        """The clock of observations."""
        return time.monotonic() + self._clock_offset_s

    def left_s(self) -> float:
        """Until this interval is as long as the policy wants it."""
        return self._began_s + self.policy.interval_s - time.monotonic()

    def check_key(self) -> None:
        """Say at once when a server that is there would refuse every change."""
        try:
            self._actor.check_key()
        except PilotError as error:
            self.log(Entry("", "problem", f"{error} Until then no change will come about."))

    def look(self) -> None:
        """Begin an interval."""
        self._began_s = time.monotonic()
        self._before = observe.read(self._source, self._settings.triton_grpc)

    def step(self) -> list[Entry]:
        """End an interval: decide for each model, and do it. Returns what was decided, `keep` too."""
        self._follow_policy()
        self._began_s = time.monotonic()
        now = observe.read(self._source, self._settings.triton_grpc)
        if self._before is not None and not observe.is_newer(self._before, now):
            return []
        plans = [plan for each in self.policy.models if (plan := self._decided(each, now)) is not None]
        self._before = now
        entries = [self._carried_out(plan) for plan in plans]
        if any(entry.seconds is not None for entry in entries):
            self.look()  # an interval that a change lies in would tell of neither setting
        self._save()
        self.metrics.decided_s = time.time()
        return entries

    def _follow_policy(self) -> None:
        found = self._fingerprints()
        if found == self._prints:
            return
        self._prints = found
        try:
            fresh, costs = _read(self._settings.policy)
        except SpecError as error:
            self.metrics.policy_trouble = True
            self.log(Entry("", "policy", f"{error} What was read before stays in force until the file is right."))
            return
        self.metrics.policy_trouble = False
        names = {each.model for each in fresh.models}
        for model in {each.model for each in self.policy.models} - names:
            self.metrics.forget(model)
            self._problems.pop(model, None)
        self.policy, self._costs, self._models = fresh, costs, {}
        self._prints = (found[0], *self._fingerprints()[1:])
        self._source = self._settings.source(fresh.interval_s)
        self.log(Entry("", "policy", f"The policy file was read again: {said_of(fresh)}."))

    def _fingerprints(self) -> tuple[tuple[int, ...], ...]:
        """Of the policy file, and of the costs that the policy in force names."""
        costs = [self.policy.folder / each.costs for each in self.policy.models if each.costs is not None]
        return tuple(_fingerprint(path) for path in (self._settings.policy, *costs))

    def _decided(self, written: ModelPolicy, now: Reading) -> _Plan | None:
        """The decision for one model; None where not even its settings are known."""
        name, before, problem = written.model, self._before, ""
        self.metrics.watch(name)
        served = None
        is_served = now.is_up and name in now.statistics
        if not is_served or (before is not None and observe.began_anew(before, now, name)):
            self._away.add(name)
            self._models.pop(name, None)  # it may come back as another one
        if is_served:
            try:
                served = self._served(written)
            except PilotError as error:
                problem = str(error)
        memory = self._memories.get(name)
        if served is None and memory is None:
            self.metrics.unknown.add(name)
            self._tell_problem(
                name, problem or observe.observe(before, now, name, Knobs(0, 0), at_s=self.now_s()).problem
            )
            return None
        if served is None:
            assert memory is not None
            served = _Served(written, memory.state.wanted or memory.found, 0, False, None)
        is_back = memory is not None and name in self._away and served.knobs == memory.found
        memory = self._known(name, memory, served.knobs)
        seen = observe.observe(
            before,
            now,
            name,
            served.knobs,
            at_s=self.now_s(),
            max_batch_size=served.max_batch_size,
            delay_is_live=served.delay_is_live,
            restarted=is_back,
        )
        seen = replace(seen, problem=problem or seen.problem)
        if not seen.problem:
            self._away.discard(name)
        self._tell_problem(name, seen.problem)
        self.metrics.unknown.discard(name)
        self.metrics.seen[name] = seen
        state, decision = decide(served.policy, memory.state, seen, served.model)
        return _Plan(served, state, decision, seen)

    def _served(self, written: ModelPolicy) -> _Served:
        """Raises PilotError when it cannot be asked for, or the policy does not fit it."""
        name = written.model
        with Control(self._settings.triton_grpc) as control:
            config = control.config(name, timeout_s=CALL_TIMEOUT_S)
        terms = terms_of(json_format.MessageToDict(config, preserving_proto_field_name=True))
        classes = {each.name: each for each in terms.classes}
        for class_name in written.max_queue_sizes:
            if class_name not in classes:
                raise SpecError(
                    f"The policy names the class {class_name} of {name}{nearest(class_name, list(classes))}; it has "
                    f"{', '.join(filter(None, classes)) or 'none'}. Nothing is changed until the policy is right."
                )
        slos_ms = [each.slo_s * 1e3 for each in terms.classes if each.slo_s is not None]
        patience_ms = {each.name: each.timeout_s * 1e3 for each in terms.classes if each.timeout_s is not None}
        if name in self._costs and name not in self._models:
            self._models[name] = _expecting(written, self._costs[name], config)
        return _Served(
            written.with_defaults(min(slos_ms, default=None), patience_ms),
            self._actor.knobs(name),
            int(config.max_batch_size),
            self._actor.is_live(name),
            self._models.get(name),
        )

    def _known(self, name: str, memory: Memory | None, knobs: Knobs) -> Memory:
        """What is remembered of the model; its first settings, and others that it came back with, are those of its files."""
        if memory is None or (name in self._away and knobs not in (memory.found, memory.state.wanted)):
            memory = Memory(memory.state if memory is not None else State(), knobs)
        self._memories[name] = memory
        return memory

    def _carried_out(self, plan: _Plan) -> Entry:
        """Do what was decided, remember it, and say so."""
        name, decision, seen = plan.served.policy.model, plan.decision, plan.seen
        entry = Entry(
            name,
            decision.action,
            decision.reason,
            before=seen.knobs,
            target=decision.target,
            way=decision.way,
            seen=seen,
        )
        if decision.target is None:
            self._memories[name] = replace(self._memories[name], state=plan.state)
            self.metrics.count(name, decision.action)
            if decision.action != "keep":
                self.log(entry)
            return entry
        if self._settings.is_dry_run:
            return self._proposal(plan, replace(entry, is_dry_run=True))
        self._memories[name] = replace(self._memories[name], state=plan.state)
        self._save()
        began_s = time.monotonic()
        failed, knobs = "", seen.knobs
        try:
            knobs = self._actor.apply(name, decision.target, decision.way)
        except PilotError as error:
            failed = str(error)
            try:
                knobs = self._actor.knobs(name)
            except PilotError:  # it is gone; the next look says so
                knobs = seen.knobs
        seconds = time.monotonic() - began_s
        state = after(plan.state, decision, knobs, self.now_s())
        self._memories[name] = replace(self._memories[name], state=state)
        self.metrics.seen[name] = replace(seen, knobs=knobs)
        self.metrics.change_seconds[name] = seconds
        entry = replace(entry, now=knobs, seconds=seconds)
        if failed:
            entry = replace(entry, event="failed", said=f"{decision.reason}. This did not come about: {failed}")
        self.metrics.count(name, entry.event)
        self.log(entry)
        return entry

    def _proposal(self, plan: _Plan, entry: Entry) -> Entry:
        """Tell, once, what would be done."""
        name, target = entry.model, entry.target
        assert target is not None
        was = self._memories[name].state
        state = replace(plan.state, wanted=plan.seen.knobs, previous=None, trial=None, shrunk=None)
        state = replace(state, changed_s=was.changed_s, changed_load=was.changed_load)  # nothing was changed
        self._memories[name] = replace(self._memories[name], state=state)
        self.metrics.count(name, plan.decision.action)
        if self._proposed.get(name) != target:
            self._proposed[name] = target
            self.log(entry)
        return entry

    def _tell_problem(self, name: str, problem: str) -> None:
        """Say when something cannot be concluded any more, why, and when it can be again."""
        known = self._problems.get(name, "")
        if problem and not observe.is_first_look(problem) and _kind(problem) != _kind(known):
            self._problems[name] = problem
            self.log(Entry(name, "problem", f"{problem} Its settings stay as they are."))
        elif not problem and known:
            del self._problems[name]
            self.log(Entry(name, "recovered", "Its figures can be relied on again."))

    def _save(self) -> None:
        try:
            self._folder.write(self._memories, self.now_s())
            self.metrics.state_trouble = False
        except OSError as error:
            self._trouble(error)

    def log(self, entry: Entry) -> None:
        """Tell it, and write it down."""
        self._tell(entry)
        try:
            self._folder.log(entry)
        except OSError as error:
            self._trouble(error)

    def _trouble(self, error: OSError) -> None:
        """Without room on the disk it goes on, and says so once."""
        if not self.metrics.state_trouble:
            self.metrics.state_trouble = True
            self._tell(
                Entry("", "problem", f"{self._folder.path} cannot be written: {error}. The autopilot goes on; after a restart it "
                      "would begin with what the server has. Make room.")
            )  # fmt: skip


def _read(path: Path) -> tuple[Policy, Mapping[str, Costs]]:
    """The policy, and the costs that it names, by model. Raises SpecError."""
    found = policy.read(path)
    costs = {each.model: Costs.read(found.folder / each.costs) for each in found.models if each.costs is not None}
    return found, costs


def _expecting(of: ModelPolicy, costs: Costs, config: ModelConfig) -> Model:
    from tritonpilot.autopilot.model import SimulatedModel  # and with it numba, which other policies do without

    return SimulatedModel.of(of, costs, config)


def _fingerprint(path: Path) -> tuple[int, ...]:
    """Of the file's content; another one when it was changed or replaced."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size


def said_of(of: Policy) -> str:
    """The policy in a few words."""
    if of is NOBODY:
        return "no model yet"
    return ", ".join(f"{each.model} ({each.policy})" for each in of.models) + f" every {of.interval_s:g} s"


def _kind(problem: str) -> str:
    """The problem without the numbers in it."""
    return re.sub(r"[\d.]+", "", problem)
