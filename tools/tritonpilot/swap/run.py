"""The order of a swap's steps, each noted in the journal before and after; what fails is taken back, what was killed goes on.

with Control(grpc, key) as control:
    done = swap(control, root, "ctr", ["new.onnx"], checks, say=print)        # Done(old={"ctr": 1}, new={"ctr": 2}, ...)
    resume(control, root, "ctr", say=print)                                     # "finished", "taken back", or "" for nothing to do
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tritonpilot.control import Control
from tritonpilot.errors import PilotError, RepositoryError, ServerError
from tritonpilot.swap.journal import FINISHED, TAKEN_BACK, Journal
from tritonpilot.swap.shift import Shift, of_swap
from tritonpilot.swap.steps import Step, Verify, Work, steps_of
from tritonpilot.swap.terms import Check, Say

LOAD_TIMEOUT_S = 120.0
ACCEPTED = Verify().name  # the step from which on nothing is taken back any more


@dataclass(frozen=True)
class Done:
    """A swap, or a rollback, that came to its end."""

    service: str
    kind: str
    old: Mapping[str, int]
    new: Mapping[str, int]
    said: Mapping[str, str]
    """Step -> what was seen in it."""
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def swap(
    control: Control,
    root: Path,
    service: str,
    given: Sequence[str],
    checks: Sequence[Check] = (),
    *,
    checksums: Sequence[str] = (),
    keep: int = 2,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    say: Say,
) -> Done:
    """Let a service serve new files, see `shift.of_swap`. A swap that was killed is finished or taken back before.

    Raises PilotError, of the kind of what was found; the old version then serves as before and nothing is left of the new one,
    unless the message says otherwise.
    """
    with Journal(root, service).locked() as journal:
        _resume(journal, control, root, say, load_timeout_s)
        shift, files = of_swap(root, service, given, checksums, keep)
        check_served(control, shift)
        return _carry_out(journal, Work(control, root, shift, say, files, load_timeout_s), checks)


def resume(control: Control, root: Path, service: str, *, load_timeout_s: float = LOAD_TIMEOUT_S, say: Say) -> str:
    """Finish a killed swap or rollback, or take it back: FINISHED, TAKEN_BACK, or "" where there is none. Raises PilotError."""
    with Journal(root, service).locked() as journal:
        return _resume(journal, control, root, say, load_timeout_s)


def shift_to(
    control: Control,
    root: Path,
    service: str,
    shift_of: Callable[[Journal], Shift],
    *,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    say: Say,
) -> Done:
    """Let a service serve versions that are there already."""
    with Journal(root, service).locked() as journal:
        _resume(journal, control, root, say, load_timeout_s)
        shift = shift_of(journal)
        check_served(control, shift)
        return _carry_out(journal, Work(control, root, shift, say, {}, load_timeout_s), ())


def check_served(control: Control, shift: Shift) -> None:
    """Raise ServerError where Triton does not serve what the disk says."""
    index = control.index()
    for name, version in {**shift.old, shift.service: shift.old.get(shift.service, shift.public_version)}.items():
        ready = sorted(each.version for each in index if each.name == name and each.state == "READY")
        if ready != [str(version)]:
            now = f"version {', '.join(ready)}" if ready else "no version"
            raise ServerError(
                f"Triton at {control.endpoint} serves {now} of {name}, and in its repository version {version} is the one to "
                "serve. Nothing was changed. Name the repository that it serves from by --repository, or load the model."
            )


def dry_run(
    root: Path, service: str, given: Sequence[str], checks: Sequence[Check], checksums: Sequence[str] = ()
) -> list[str]:
    """What a swap would do, step by step. Raises what it would raise for wrong files; touches nothing."""
    shift, files = of_swap(root, service, given, checksums)
    said = [
        f"{name}: {', '.join(f'{file} from {path}' for file, path in each.items())}" for name, each in files.items()
    ]
    words = {
        "publish": f"write {', '.join(shift.names.values())} beside the models that serve",
        "load": "load them",
        "warm up": "ask them",
        "widen": f"load the new versions beside the old ones, which {service} goes on to call",
        "promote": shift.describe(),
        "verify": f"compare what {service} answers with its candidate",
        "settle": "let caches of the entry forget the old answers, where there are some",
        "drain": "let the old versions' requests end, and the old versions",
        "retire": f"unload and remove {', '.join(shift.names.values())}; keep {shift.keep} older versions",
    }
    return [*said, *(f"{step.name}: {words.get(step.name, 'check the candidate')}" for step in steps_of(shift, checks))]


def _carry_out(journal: Journal, work: Work, checks: Sequence[Check]) -> Done:
    shift, began_s = work.shift, time.monotonic()
    swap_id = journal.begin(shift.as_dict())
    work.say(f"{shift.service}: {shift.describe()}")
    begun: list[Step] = []
    said: dict[str, str] = {}
    is_accepted = False
    for step in steps_of(shift, checks):
        begun.append(step)
        try:
            journal.note(swap_id, step.name, "begins")
            work.say(f"{shift.service}: {step.name}")
            if found := step.do(work):
                said[step.name] = found
                work.say(f"{shift.service}: {step.name}: {found}")
            journal.note(swap_id, step.name, "done", found)
        except BaseException as failed:
            if is_accepted:
                if isinstance(failed, PilotError):
                    raise type(failed)(_accepted_but(shift, step, failed)) from failed
                raise
            truth = _take_back(journal, swap_id, work, begun, failed)
            if isinstance(failed, PilotError):
                raise type(failed)(f"{shift.service} was not changed: {step.name}: {failed} {truth}") from failed
            raise
        is_accepted = is_accepted or step.name == ACCEPTED
    journal.end(swap_id, FINISHED)
    return Done(shift.service, shift.kind, shift.old, shift.new, said, round(time.monotonic() - began_s, 2))


def _take_back(journal: Journal, swap_id: str, work: Work, begun: Sequence[Step], failed: BaseException) -> str:
    """Undo the steps; what is true then."""
    why = str(failed) or type(failed).__name__  # KeyboardInterrupt
    _noted(journal, swap_id, begun[-1].name, "failed", why)
    try:
        for step in reversed(begun):
            work.say(f"{work.shift.service}: taking back {step.name}")
            step.undo(work)
            _noted(journal, swap_id, step.name, "undone")
    except PilotError as stuck:
        return (
            f"It could not be taken back wholly either: {step.name}: {stuck} Run `tritonpilot swap {work.shift.service} --resume` "
            "when that is cured."
        )
    try:
        journal.end(swap_id, TAKEN_BACK, why)
    except RepositoryError as full:
        return f"{_as_before(work.shift)} {full}"
    return _as_before(work.shift)


def _as_before(shift: Shift) -> str:
    served = ", ".join(f"version {version} of {name}" for name, version in shift.old.items())
    new = "; nothing is left of the new one" if shift.kind == "swap" else ""
    return f"As before, {served} is served{new}."


def _accepted_but(shift: Shift, step: Step, failed: PilotError) -> str:
    served = ", ".join(f"version {version} of {name}" for name, version in shift.new.items())
    return (
        f"{shift.service} is changed, {served} is served, but {step.name} failed: {failed} Run `tritonpilot swap {shift.service} "
        "--resume` to tidy up."
    )


def _resume(journal: Journal, control: Control, root: Path, say: Say, load_timeout_s: float) -> str:
    left = journal.unfinished()
    if left is None:
        return ""
    shift = Shift.of(left.began)
    work = Work(control, root, shift, say, {}, load_timeout_s)
    steps = steps_of(shift)
    if left.steps.get(ACCEPTED) == "done":
        say(f"{shift.service}: finishing what {left.began['who']} began: {shift.describe()}")
        places = [step.name for step in steps]
        for step in steps[places.index(ACCEPTED) + 1 :]:
            journal.note(left.swap, step.name, "begins")
            journal.note(left.swap, step.name, "done", step.do(work))
        journal.end(left.swap, FINISHED)
        return FINISHED
    say(f"{shift.service}: taking back what {left.began['who']} began: {shift.describe()}")
    for step in reversed([step for step in steps if step.name in left.steps]):
        step.undo(work)
        journal.note(left.swap, step.name, "undone")
    journal.end(left.swap, TAKEN_BACK, "its process ended")
    return TAKEN_BACK


def _noted(journal: Journal, swap_id: str, step: str, state: str, result: str = "") -> None:
    """A note that must not keep anything from being taken back: a full disk may be why."""
    try:
        journal.note(swap_id, step, state, result)
    except RepositoryError:
        return
