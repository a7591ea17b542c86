"""Which of a Triton's stubs have died, and what did they leave in /dev/shm? Read from /proc, where its processes can be seen.

    with Stubs(server_pid) as stubs:
        stubs.wait(0.2)                 # returns at once when a process ends
        for stub in stubs.died(): ...   # Stub(pid=..., instance="ctr_0_0", segment="triton_python_backend_shm_region_...")

Triton neither reaps nor replaces a stub that died: it stays a zombie, health stays at 200, and each execution on it fails after a
second. A stub that Triton itself ended is reaped at once, and is none of ours.
"""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

SHARED = Path("/dev/shm")  # noqa: S108  where Linux keeps POSIX shared memory
SETTLE_S = 0.5  # a zombie that ended by itself and is not reaped by then is a dead one
_ARGUMENTS = 9  # of the stub of Triton 24.10: path, model file, shared memory, its sizes, parent, ..., instance name
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Stub:
    """One process of the Python backend."""

    pid: int
    instance: str
    """As Triton names it: "ctr_0_0"."""
    segment: str
    """Its region in /dev/shm."""


class Stubs:
    """The stubs of one tritonserver, from their birth to their end. Not for several threads."""

    def __init__(self, server: int) -> None:
        self.server = server
        self._known: dict[int, Stub] = {}
        self._fds: dict[int, int] = {}
        self._ended: dict[int, float] = {}  # when we saw it, of those that are not reported yet
        self._left: dict[str, Stub] = {}  # segments of stubs that are gone
        self._server_fd = _open(server)

    def __enter__(self) -> Stubs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget all of them."""
        for fd in (*self._fds.values(), *([self._server_fd] if self._server_fd is not None else [])):
            os.close(fd)
        self._fds, self._server_fd = {}, None

    @property
    def is_server_alive(self) -> bool:
        """Whether tritonserver runs; True where that cannot be known."""
        return self._server_fd is None or not select.select([self._server_fd], [], [], 0)[0]

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until a stub or the server ends; whether one did."""
        if not self.is_server_alive:
            time.sleep(seconds)
            return True
        self._find_new()
        waiting = [fd for pid, fd in self._fds.items() if pid not in self._ended]
        if self._server_fd is not None:
            waiting.append(self._server_fd)
        if not waiting:
            time.sleep(seconds)
            return False
        return bool(select.select(waiting, [], [], seconds)[0])

    def died(self) -> list[Stub]:
        """The stubs that died since the last call, each once."""
        found = []
        now_s = time.monotonic()
        for pid, fd in list(self._fds.items()):
            if not select.select([fd], [], [], 0)[0]:
                continue
            since_s = self._ended.setdefault(pid, now_s)
            ending = _ending(pid)
            if ending is None:  # reaped: Triton ended it
                self._forget(pid)
            elif ending or now_s - since_s > SETTLE_S:
                found.append(self._known[pid])
                self._forget(pid)
        return found

    def alive(self) -> list[Stub]:
        """Those that run, also stopped ones."""
        self._find_new()
        return [stub for pid, stub in self._known.items() if pid not in self._ended]

    def kill(self, stub: Stub) -> bool:
        """SIGKILL; whether that was allowed. The pidfd makes sure that it is this process."""
        fd = self._fds.get(stub.pid)
        if fd is None:
            return False
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError:
            return False
        return True

    def clean(self) -> int:
        """Remove the segments of dead stubs that nobody maps any more; the bytes that were freed."""
        if not self._left:
            return 0
        mapped = _maps(self.server) if self.is_server_alive else ""
        if mapped is None:
            return 0  # not to be seen: they stay
        used = {stub.segment for stub in self.alive()}
        freed = 0
        for segment in list(self._left):
            path = SHARED / segment
            if segment in used or f"{path}" in mapped:
                continue
            try:
                freed += path.stat().st_size
                path.unlink()
            except OSError:
                pass  # Triton was faster, or it is not ours
            del self._left[segment]
        return freed

    def _find_new(self) -> None:
        for pid in _children(self.server):
            if pid in self._known:
                continue
            stub = _stub(pid)
            fd = _open(pid) if stub is not None else None
            if stub is not None and fd is not None:
                self._known[pid], self._fds[pid] = stub, fd

    def _forget(self, pid: int) -> None:
        os.close(self._fds.pop(pid))
        stub = self._known.pop(pid)
        self._ended.pop(pid, None)
        self._left[stub.segment] = stub


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0: it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def model_of(instance: str, models: list[str]) -> str:
    """The model that an instance ("ctr_0_0") is of, "" for none: the longest name that it begins with."""
    found = [name for name in models if instance.startswith(f"{name}_")]
    return max(found, key=len, default="")


def _children(server: int) -> list[int]:
    """Of all its threads: stubs are forked by those that load models."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{server}/task"):  # noqa: PTH208  ten times a second
            try:
                found += map(int, Path(f"/proc/{server}/task/{thread}/children").read_text().split())
            except OSError:  # it has just ended
                continue
    except OSError:
        return []
    return found


def _stub(pid: int) -> Stub | None:
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if len(argv) < _ARGUMENTS or not argv[0].endswith(b"triton_python_backend_stub"):
        return None
    return Stub(pid, argv[8].decode(errors="replace"), argv[2].decode(errors="replace"))


def _ending(pid: int) -> bool | None:
    """Of a process that has ended: whether a signal or an error ended it; None: it is reaped."""
    try:
        columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # The status is the last column of proc(5); 0 where we may not trace it.
    return columns[0] == "Z" and columns[-1] != "0"


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if pid > 0 else None
    except OSError:
        return None


def _maps(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return None
