"""Runs one tritonserver as its parent, so that nothing of it outlives the process that asked for it.

    python -I -S keeper.py < job.json      (a JSON object, the fields of `Job`)

It prints "pid N" when tritonserver runs and "exit STATUS" (negative: a signal) when it and its stubs are gone. SIGTERM stops
tritonserver and lets it answer what is in flight; a second one, or SIGQUIT, kills it. When the process that started the keeper
dies, however it dies, the keeper does the same by itself. At the end it removes the shared memory and the folder of this server.

Why idle connections are ended: tritonserver 2.51 does not stop while a client keeps an HTTP connection open, and most keep theirs.
It waits for its whole exit timeout (30 s for one idle connection) and then leaves no time for what is in flight.

Why a process and not PR_SET_PDEATHSIG set by the caller: that signal comes when the *thread* that forked ends, and code between
fork and exec is unsafe in a program with threads. The keeper has one thread, so it can use both. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from typing import TypedDict

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.2  # how often the keeper looks whether the process that started it lives
ORPHAN_GRACE_S = 5.0  # how long a tritonserver may answer what is in flight when that process died
SYS_PIDFD_GETFD = 438  # asm-generic/unistd.h; the C library has no function for it before glibc 2.36
SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_libc = ctypes.CDLL(None)


class Job(TypedDict):
    """What the keeper is asked to run."""

    argv: list[str]
    env: dict[str, str]
    cpus: list[int]  # empty: as the keeper's own
    stays_awake: bool  # no core of `cpus` rests
    log_file: str
    parent: int  # pid of the process that asks
    http_ports: list[int]  # of HTTP and metrics
    stop_timeout_s: float  # from SIGTERM to SIGKILL
    shm_prefix: str
    folder: str


def main() -> None:
    """Read the job, run it to its end, and clean up."""
    job: Job = json.load(sys.stdin)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # stubs whose tritonserver died become our children
    keeper = os.getpid()
    server = os.fork()
    if server == 0:
        _become_tritonserver(job, keeper, mask)
    _own_group(server)
    for core in job["cpus"] if job["stays_awake"] else ():
        if os.fork() == 0:
            _keep_awake(core, keeper)
    _say(f"pid {server}")
    status = _watch(server, job)
    end_group(server)
    _end_adopted()
    remove_traces(job["shm_prefix"], Path(job["folder"]))
    _say(f"exit {status}")


def end_group(leader: int) -> None:
    """Kill what is left of tritonserver's process group: stubs whose tritonserver is gone."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def remove_traces(shm_prefix: str, folder: Path) -> None:
    """Remove the shared-memory regions whose names begin with `shm_prefix`, and `folder`."""
    for region in Path("/dev/shm").glob(f"{shm_prefix}*"):  # noqa: S108 -- where Linux keeps POSIX shared memory
        region.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _watch(server: int, job: Job) -> int:
    """Wait for the end of tritonserver, and bring it about when asked to, or when nobody is left to ask."""
    kill_at: float | None = None
    while True:
        received = signal.sigtimedwait(SIGNALS, LOOK_S)
        if (status := _reap(server)) is not None:
            return status
        asked = received is not None and received.si_signo != signal.SIGCHLD
        orphaned = os.getppid() != job["parent"]
        if asked and received is not None and received.si_signo == signal.SIGQUIT:
            os.kill(server, signal.SIGKILL)
        elif kill_at is None and (asked or orphaned):
            os.kill(server, signal.SIGTERM)
            kill_at = time.monotonic() + (ORPHAN_GRACE_S if orphaned else job["stop_timeout_s"])
        elif kill_at is not None and (asked or time.monotonic() > kill_at):
            os.kill(server, signal.SIGKILL)
        elif kill_at is not None:
            _end_idle_connections(server, job["http_ports"])


def _end_idle_connections(server: int, ports: list[int]) -> None:
    """Close the reading half of tritonserver's HTTP connections, in its place: it answers what it has read, and then closes them.

    Where this is not allowed (a kernel before 5.6, a seccomp or ptrace policy) nothing happens and tritonserver waits.
    """
    try:
        process = os.pidfd_open(server)
    except OSError:
        return
    try:
        for descriptor in Path(f"/proc/{server}/fd").iterdir():
            copy = _libc.syscall(SYS_PIDFD_GETFD, process, int(descriptor.name), 0)
            if copy >= 0:
                _end_reading(copy, ports)
    except OSError:
        return  # it has just ended
    finally:
        os.close(process)


def _end_reading(descriptor: int, ports: list[int]) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return
    with socket.socket(fileno=descriptor) as connection:
        if connection.family != socket.AF_INET or connection.getsockname()[1] not in ports:
            return
        with contextlib.suppress(OSError):
            connection.getpeername()  # a listening socket has none; ending it would make tritonserver log without end
            connection.shutdown(socket.SHUT_RD)


def _reap(server: int) -> int | None:
    """Collect every dead child; the status of tritonserver when it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == server:
            found = os.waitstatus_to_exitcode(status)


def _end_adopted() -> None:
    """Kill and collect the children that a dead tritonserver left us, in whatever group they are."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while True:
        for pid in children.read_text().split() if children.exists() else ():
            os.kill(int(pid), signal.SIGKILL)  # our child and not collected yet, so the number is still its own
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _become_tritonserver(job: Job, keeper: int, mask: set[int | signal.Signals]) -> None:
    """In the child: never returns."""
    try:
        log = os.open(job["log_file"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        _own_group(0)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died before the line above
            os._exit(1)
        if job["cpus"]:
            os.sched_setaffinity(0, job["cpus"])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execve(job["argv"][0], job["argv"], job["env"])
    except OSError as failed:
        os.write(2, f"tritonserver could not be executed: {failed}\n".encode())
    finally:
        os._exit(127)


def _keep_awake(core: int, keeper: int) -> None:
    """In a child: run whenever nobody else wants the core (SCHED_IDLE). Never returns.

    In our session: Linux shares a core between sessions first (autogroup of sched(7)), and one that only has SCHED_IDLE threads
    gets as much as tritonserver's.
    """
    try:
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        for inherited in (0, 1):  # who reads the keeper's words waits for their end
            os.close(inherited)
        while os.getppid() == keeper:
            pass
    finally:
        os._exit(0)


def _own_group(pid: int) -> None:
    # Done by parent and child, so that it is done whichever runs first.
    try:
        os.setpgid(pid, 0)
    except (PermissionError, ProcessLookupError):
        return


def _prctl(option: int, value: int) -> None:
    _libc.prctl(option, value, 0, 0, 0)


def _say(line: str) -> None:
    try:
        os.write(1, f"{line}\n".encode())
    except OSError:
        return  # nobody reads any more


if __name__ == "__main__":
    main()
