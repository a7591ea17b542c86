"""Each step of a swap, and how it is taken back: publish, load, warm up, checks, promote, verify, retire.

for step in steps_of(shift, checks):
    step.do(work)                     # raises PilotError; then step.undo(work), and those before it, last one first

A step says what should be true and makes it so, from whatever a killed run left: doing or undoing one twice is as good as once.
The disk is changed before the server is asked, so that a restart serves what the step wants.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tritonpilot import pins
from tritonpilot.control import BusyError, Control
from tritonpilot.entry.terms import CACHE_LEASE_S
from tritonpilot.errors import ModelError, ServerError
from tritonpilot.probes import Probe, probe_of
from tritonpilot.repository import (
    CONFIG_FILE,
    SWAPPED_FILE,
    WARMUP_FOLDER,
    Held,
    damaged,
    held_text,
    link_version,
    manifest,
    put,
    remove,
    rewrite,
    versions,
    write_version,
)
from tritonpilot.swap.golden import Golden
from tritonpilot.swap.shift import Files, Shift
from tritonpilot.swap.terms import Check, Say

WARM = 8  # requests
ANSWER_S = 30.0
BUSY_S = 10.0
POLL_S = 0.05
QUIET_S = 2.0  # without a request to the old versions: nobody calls them any more
DRAIN_S = 120.0
UNLOAD_S = 15.0  # of a candidate, which has few requests or none
CACHED = "pilot_cache"
UNHEALTHY = "is not healthy"  # a stub that has died


@dataclass(frozen=True)
class Work:
    """What the steps work on and with."""

    control: Control
    root: Path
    shift: Shift
    say: Say
    files: Files = field(default_factory=dict)
    """Not known to a run that goes on with another's, and not needed by it."""
    load_timeout_s: float = 120.0


class Step(Protocol):
    """Something that is done and can be taken back."""

    @property
    def name(self) -> str: ...

    def do(self, work: Work) -> str:
        """Make it so; returns what is worth noting. Raises PilotError."""

    def undo(self, work: Work) -> None:
        """Make it as it was before. Raises PilotError."""


class Publish:
    """The candidates are on disk, read back and compared with the files that were given."""

    name = "publish"

    def do(self, work: Work) -> str:
        shift = work.shift
        edits = {shift.names[model]: self._edit(work, model) for model in shift.names}
        self._clear(work)  # of what nobody has noted
        rewrite(work.root, edits)
        for model, checksums in shift.sha256.items():
            written = manifest(work.root, shift.names[model], shift.new[model])
            if wrong := [file for file, checksum in checksums.items() if written.get(file) != checksum]:
                raise ModelError(f"{work.files[model][wrong[0]]} changed while it was copied.")
        return ", ".join(shift.names.values())

    def undo(self, work: Work) -> None:
        self._clear(work)

    def _clear(self, work: Work) -> None:
        self.unload(work)
        remove(work.root, list(work.shift.names.values()))

    def unload(self, work: Work) -> None:
        """The public one first, which calls the others."""
        for name in reversed(work.shift.names.values()):
            unload(work.control, name)

    def _edit(self, work: Work, model: str) -> Callable[[Path], None]:
        shift, current = work.shift, work.root / model
        version = shift.new.get(model, shift.public_version)
        config = pins.candidate(shift.config(model), [version], shift.names)

        def edit(target: Path) -> None:
            put(target / CONFIG_FILE, pins.with_comment(shift.before[model].config, config).encode())
            if (current / WARMUP_FOLDER).is_dir() and not (target / WARMUP_FOLDER).exists():
                link_version(current / WARMUP_FOLDER, target / WARMUP_FOLDER)
            if model in shift.new:
                old = shift.old[model]
                others = {name: current / str(old) / name for name in manifest(work.root, model, old)}
                write_version(target / str(version), {**others, **work.files[model]})
            else:
                link_version(current / str(version), target / str(version))

        return edit


class Load:
    """The candidates are loaded beside the models that serve."""

    name = "load"

    def do(self, work: Work) -> str:
        for model, name in work.shift.names.items():
            version = work.shift.new.get(model, work.shift.public_version)
            check_files(work, name, version)
            load(work, name, [version])
        return ""

    def undo(self, work: Work) -> None:
        Publish().unload(work)


class WarmUp:
    """The candidate has answered some requests: what is measured of it is not its first."""

    name = "warm up"

    def do(self, work: Work) -> str:
        name = work.shift.names[work.shift.service]
        for _ in range(WARM):
            answered(work, name, instead=work.shift.service)
        return ""

    def undo(self, work: Work) -> None:
        pass


@dataclass(frozen=True)
class Checked:
    """A check found nothing against the candidate."""

    check: Check

    @property
    def name(self) -> str:
        return self.check.name

    def do(self, work: Work) -> str:
        found = self.check.run(work.control, work.shift.candidate(work.files), work.say)
        if not found.ok:
            raise ModelError(f"{found.what.rstrip('. ')}.")
        return found.what

    def undo(self, work: Work) -> None:
        pass


class Promote:
    """A model of its own: the new version is served under the real name, and the old one is not."""

    name = "promote"

    def do(self, work: Work) -> str:
        (model,) = work.shift.new
        stand(work, model, [work.shift.new[model]], is_held=True)
        load(work, model, [work.shift.new[model]])
        return f"{model} serves version {work.shift.new[model]}"

    def undo(self, work: Work) -> None:
        (model,) = work.shift.new
        restore(work, [model])
        load(work, model, [work.shift.old[model]])


class Widen:
    """A pipeline calls the old versions by their numbers, and the new ones are loaded beside them."""

    name = "widen"

    def do(self, work: Work) -> str:
        shift = work.shift
        turn(work, shift.old, is_held=False)
        for model in shift.new:
            both = [shift.old[model], shift.new[model]]
            stand(work, model, both, is_held=False)
            load(work, model, both)
        return ""

    def undo(self, work: Work) -> None:
        shift = work.shift
        for model in shift.new:
            restore(work, [model])
            load(work, model, [shift.old[model]])
        restore(work, [shift.service])
        load(work, shift.service, [shift.public_version])


class Turn:
    """The pipeline calls the new versions: all of them from one request to the next."""

    name = "promote"

    def do(self, work: Work) -> str:
        turn(work, work.shift.new, is_held=True)
        return (
            f"{work.shift.service} calls {', '.join(f'{name} {version}' for name, version in work.shift.new.items())}"
        )

    def undo(self, work: Work) -> None:
        turn(work, work.shift.old, is_held=False)


@dataclass(frozen=True)
class Verify:
    """What callers get is what the candidate answered."""

    golden: Golden | None = None
    name: str = "verify"

    def do(self, work: Work) -> str:
        shift = work.shift
        answered(work, shift.service, version=shift.new.get(shift.service, shift.public_version))
        if self.golden is None or not shift.names:
            return ""
        found = self.golden.promoted(work.control, shift.candidate(work.files), work.say)
        if not found.ok:
            raise ModelError(f"{shift.service} does not answer as its candidate did: {found.what.rstrip('. ')}.")
        return found.what

    def undo(self, work: Work) -> None:
        pass


class Narrow:
    """Nobody calls the old versions of a pipeline's members any more, and they are not served."""

    name = "drain"

    def do(self, work: Work) -> str:
        shift = work.shift
        said = ""
        if pins.STEPS in shift.config(shift.service).parameters:
            said = drained(work)
        for model, version in shift.new.items():
            stand(work, model, [version], is_held=True)
            load(work, model, [version])
        return said

    def undo(self, work: Work) -> None:
        pass  # nothing before it is taken back any more


class Settle:
    """No entry gives an answer of the old version from its cache: it gives one only while it saw shortly before who serves."""

    name = "settle"

    def do(self, work: Work) -> str:
        # NOTE: of any model: a pipeline that is cached may call this one, whatever service it belongs to.
        if not any(CACHED in path.read_text(encoding="utf-8") for path in work.root.glob(f"*/{CONFIG_FILE}")):
            return ""
        time.sleep(CACHE_LEASE_S)
        return f"{CACHE_LEASE_S:g} s, in which caches forget"

    def undo(self, work: Work) -> None:
        pass


class Retire:
    """Candidates are gone, and versions that nobody goes back to."""

    name = "retire"

    def do(self, work: Work) -> str:
        shift = work.shift
        Publish().undo(work)
        if shift.kind == "rollback":
            return ""
        gone = []
        for model, version in shift.new.items():
            others = [each for each in reversed(versions(work.root, model)) if each != version]
            if old := others[shift.keep :]:
                rewrite(work.root, {model: lambda folder, old=old: _without(folder, old)})  # type: ignore[misc]
                gone += [f"{model} version {each}" for each in old]
        return f"removed {', '.join(gone)}" if gone else ""

    def undo(self, work: Work) -> None:
        pass


def steps_of(shift: Shift, checks: Sequence[Check] = ()) -> list[Step]:
    """In their order."""
    tried: list[Step] = [Publish(), Load(), WarmUp(), *map(Checked, checks)] if shift.kind == "swap" else []
    promoted: list[Step] = [Widen(), Turn()] if shift.is_pipeline else [Promote()]
    verify = Verify(next((check for check in checks if isinstance(check, Golden)), None))
    last: list[Step] = [Settle(), Narrow(), Retire()] if shift.is_pipeline else [Settle(), Retire()]
    return [*tried, *promoted, verify, *last]


# -- on disk -----------------------------------------------------------------------------------------------------------


def stand(work: Work, model: str, served: Sequence[int], *, is_held: bool) -> None:
    """The folder of a model that changes: its new version is there, and these are served."""
    shift = work.shift
    version = shift.new[model]
    source = work.root / shift.names[model] / str(version) if shift.names else None

    def edit(folder: Path) -> None:
        if source is not None and not (folder / str(version)).exists():
            link_version(source, folder / str(version))
        put(folder / CONFIG_FILE, pins.pinned(shift.before[model].config, served, {}).encode())
        if is_held:
            put(folder / SWAPPED_FILE, held_text(Held(version, shift.instead_of[model])))

    rewrite(work.root, {model: edit})


def restore(work: Work, names: Sequence[str]) -> None:
    """The folders as they were."""

    def edit_of(model: str) -> Callable[[Path], None]:
        before = work.shift.before[model]

        def edit(folder: Path) -> None:
            if work.shift.kind == "swap" and model in work.shift.new:
                _without(folder, [work.shift.new[model]])
            put(folder / CONFIG_FILE, before.config.encode())
            put(folder / SWAPPED_FILE, None if before.swapped is None else before.swapped.encode())

        return edit

    rewrite(work.root, {name: edit_of(name) for name in names})


def turn(work: Work, steps: Mapping[str, int], *, is_held: bool) -> None:
    """A pipeline's public model calls these versions."""
    shift, public = work.shift, work.shift.service
    before = shift.before[public]

    def edit(folder: Path) -> None:
        put(folder / CONFIG_FILE, pins.pinned(before.config, [shift.public_version], steps).encode())
        if is_held:
            put(
                folder / SWAPPED_FILE,
                held_text(Held(shift.public_version, shift.instead_of[public], _all_steps(shift, steps))),
            )
        else:
            put(folder / SWAPPED_FILE, None if before.swapped is None else before.swapped.encode())

    rewrite(work.root, {public: edit})
    load(work, public, [shift.public_version])


def _all_steps(shift: Shift, steps: Mapping[str, int]) -> dict[str, int]:
    """With those that an earlier swap chose."""
    return {**pins.step_versions(shift.config(shift.service)), **steps}


def check_files(work: Work, name: str, version: int) -> None:
    """Raise ModelError when files are not what their manifest says."""
    if wrong := damaged(work.root, name, version):
        raise ModelError(
            f"{wrong[0]} of {name} version {version} is not what its manifest says: the disk, or somebody, changed it."
        )


def _without(folder: Path, gone: Sequence[int]) -> None:
    for version in gone:
        shutil.rmtree(folder / str(version), ignore_errors=True)


# -- on the server -----------------------------------------------------------------------------------------------------


def load(work: Work, name: str, served: Sequence[int]) -> None:
    """Load a model as it is on disk; these versions of it are then ready, no others are, and each answers."""
    work.control.load(name, probe=False, timeout_s=work.load_timeout_s)
    wait_served(work.control, name, served, work.load_timeout_s)
    for version in served:
        answered(work, name, version=version, instead=_served_of(work, name))
    if len(served) == 1:
        answered(work, name, version=served[0], is_named=False, instead=_served_of(work, name))


def unload(control: Control, name: str) -> None:
    """Unload a model, if it is loaded.

    Triton 2.51 waits for ever for a stub that has died; loaded again, with a stub that lives, the model can be unloaded.
    """
    if not any(each.name == name and each.state in ("READY", "LOADING", "UNLOADING") for each in control.index()):
        return
    try:
        control.unload(name, timeout_s=UNLOAD_S)
    except ServerError:
        if not any(each.name == name and each.state == "UNLOADING" for each in control.index()):
            raise
        control.load(name, probe=False)
        control.unload(name)


def wait_served(control: Control, name: str, served: Sequence[int], patience_s: float) -> None:
    """Return when these versions are ready and no others are. Raises ServerError."""
    deadline = time.monotonic() + patience_s
    wanted = {str(version) for version in served}
    while True:
        ready = {each.version for each in control.index() if each.name == name and each.state == "READY"}
        if ready == wanted:
            return
        if time.monotonic() > deadline or not ready:
            raise ServerError(
                f"Triton serves {name} in {_versions(ready)}, not in {_versions(wanted)}. Look at its log."
            )
        time.sleep(POLL_S)


def answered(work: Work, name: str, *, version: int = 0, is_named: bool = True, instead: str = "") -> None:
    """A real inference is answered, by that version. Raises ServerError or ModelError.

    Without real rows a model may refuse what it is asked; not so when `instead`, the same model or the old one, answers it.
    """
    asked = str(version) if version and is_named else ""
    probe = probe_of((name, asked), work.control.config(name, asked), work.root / name)
    try:
        answer = patiently(work.control, probe)
    except ServerError as error:
        if probe.is_real or UNHEALTHY in str(error) or (instead and not _refuses(work, instead)):
            raise ModelError(str(error)) from None
        work.say(f"{name} refuses zeros, which says nothing of it: give its service samples")
        return
    if version and answer.model_version != str(version):
        raise ServerError(f"{name} answered in version {answer.model_version}, and version {version} should serve.")


def patiently(control: Control, probe: Probe) -> Any:
    """The answer; a full queue is waited for."""
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return control.infer(probe.request, timeout_s=ANSWER_S)
        except BusyError:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def drained(work: Work) -> str:
    """Wait until nobody has called the old versions for a while: a driver that was replaced still answers what it had begun."""
    counts: dict[str, int] = {}
    deadline, since = time.monotonic() + DRAIN_S, time.monotonic()
    while time.monotonic() < deadline:
        now = {
            model: sum(each.success.count + each.fail.count for each in work.control.statistics(model, str(version)))
            for model, version in work.shift.old.items()
        }
        if now != counts:
            counts, since = now, time.monotonic()
        if time.monotonic() - since > QUIET_S:
            return ""
        time.sleep(4 * POLL_S)
    return f"the old versions were called for {DRAIN_S:.0f} s more; their callers have to repeat"


def _refuses(work: Work, name: str) -> bool:
    try:
        patiently(work.control, probe_of((name, ""), work.control.config(name), work.root / name))
    except ServerError:
        return True
    return False


def _served_of(work: Work, name: str) -> str:
    """The model that a candidate is one of, or the candidate of a model."""
    names = work.shift.names
    return names.get(name) or next((model for model, candidate in names.items() if candidate == name), "")


def _versions(found: set[str]) -> str:
    return f"version {', '.join(sorted(found))}" if found else "no version"
