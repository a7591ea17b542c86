"""What was done to a service, who did it, and when: a line before each step and one after it, each on the disk at once.

with Journal(Path("model_repository"), "ctr").locked() as journal:      # one swap of a service at a time
    swap = journal.begin(shift)
    journal.note(swap, "promote", "begins")
    journal.end(swap, "finished")
journal.unfinished()                    # of a run that was killed: Unfinished(id, shift, {"publish": "done", ...}), else None
"""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonpilot.errors import RepositoryError

FOLDER = Path(".pilot") / "swaps"  # in the repository
END = "end"
FINISHED, TAKEN_BACK = "finished", "taken back"

Line = dict[str, Any]


@dataclass(frozen=True)
class Unfinished:
    """A swap that nobody ended: how it began, and the last state of each step that was begun, in their order."""

    swap: str
    began: Line
    steps: Mapping[str, str]


class Journal:
    """The swaps of one service, in a file that only grows. Times are seconds since 1970."""

    def __init__(self, repository: Path, service: str) -> None:
        self.service = service
        self.file = repository / FOLDER / f"{service}.jsonl"
        self._handle: int | None = None

    @contextmanager
    def locked(self) -> Iterator[Journal]:
        """Within the block nobody else changes the service. Raises RepositoryError when somebody does."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RepositoryError(
                    f"A swap of {self.service} is under way{self._whose()}. Nothing was changed. Wait for its end and repeat."
                ) from None
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":  # its writer was killed within a line
                os.write(handle, b"\n")
            self._handle = handle
            yield self
        finally:
            self._handle = None
            os.close(handle)

    def begin(self, facts: Mapping[str, Any]) -> str:
        """Note that a swap begins; returns its id. Raises RepositoryError."""
        swap = f"{time.time_ns() // 1_000_000:x}-{os.getpid()}"
        self._write({"swap": swap, "step": "begin", "state": "done", "who": _who(), "pid": os.getpid(), **facts})
        return swap

    def note(self, swap: str, step: str, state: str, result: str = "", **more: object) -> None:
        """Note what becomes of a step. Raises RepositoryError."""
        self._write({"swap": swap, "step": step, "state": state, **({"result": result} if result else {}), **more})

    def end(self, swap: str, result: str, why: str = "") -> None:
        """Note that it is over: FINISHED or TAKEN_BACK. Raises RepositoryError."""
        self.note(swap, END, "done", result, **({"why": why} if why else {}))

    def lines(self) -> list[Line]:
        """All of it, oldest first, without a line that its writer did not end. Raises RepositoryError when it cannot be read."""
        try:
            text = self.file.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise RepositoryError(f"The journal {self.file} cannot be read: {error}. Nothing was changed.") from None
        return [line for line in map(_parsed, text.splitlines()) if line]

    def unfinished(self) -> Unfinished | None:
        """The last swap, when nobody has ended it."""
        lines = self.lines()
        begun = [line for line in lines if line["step"] == "begin"]
        if not begun:
            return None
        swap = str(begun[-1]["swap"])
        steps = {
            str(line["step"]): str(line["state"]) for line in lines if line["swap"] == swap and line["step"] != "begin"
        }
        return None if END in steps else Unfinished(swap, begun[-1], steps)

    def finished(self) -> list[Line]:
        """How the swaps and rollbacks that came to their end began, oldest first."""
        lines = self.lines()
        ended = {line["swap"] for line in lines if line["step"] == END and line.get("result") == FINISHED}
        return [line for line in lines if line["step"] == "begin" and line["swap"] in ended]

    def _write(self, line: Line) -> None:
        assert self._handle is not None
        try:
            os.write(self._handle, (json.dumps({"at": time.time(), **line}) + "\n").encode())
            os.fsync(self._handle)
        except OSError as error:
            raise self._unwritable(error) from error

    def _whose(self) -> str:
        last = self.unfinished()
        return f", begun by {last.began.get('who')} (process {last.began.get('pid')})" if last else ""

    def _unwritable(self, error: OSError) -> RepositoryError:
        return RepositoryError(
            f"The journal {self.file} cannot be written: {error.strerror or error}. Without it no step is begun. Free space or "
            "make the folder writable, then repeat."
        )


def told(lines: Sequence[Line]) -> list[str]:
    """For a person: a line for each swap, what it was and what became of it."""
    found = []
    for begun in (line for line in lines if line["step"] == "begin"):
        own = [line for line in lines if line["swap"] == begun["swap"]]
        ended = next((line for line in own if line["step"] == END), None)
        failed = next((line for line in own if line["state"] == "failed"), None)
        became = ended["result"] if ended else f"not ended, at {own[-1]['step']}"
        why = f": {failed['step']}: {failed.get('result', '')}" if failed else ""
        versions = ", ".join(f"{name} {begun['old'][name]} -> {version}" for name, version in begun["new"].items())
        took = f" after {ended['at'] - begun['at']:.1f} s" if ended else ""
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(begun["at"]))
        found.append(f"{when}  {begun['who']}  {begun['kind']}  {versions}  {became}{took}{why}")
    return found


def _parsed(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"at", "swap", "step", "state"} <= line.keys() else None


def _who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"
