"""What do this machine's cores do, how much of it is our own work, and is it quiet enough for a measurement to be believed?

before = sample(cores)
...                                   # one measurement
noise = judge(before, sample(cores), len(cores), Limits())
noise.is_quiet, noise.reason
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonpilot.errors import MeasurementError

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
EEVDF, SHORTER_SLICE = (6, 6), (6, 15)  # versions of Linux


@dataclass(frozen=True)
class Sample:
    """Seconds of CPU time since boot at one moment: of some cores in all, and of our own process tree."""

    at_s: float
    busy_s: float  # user, nice and system; interrupts are left out, for our own loopback traffic causes most of them
    steal_s: float
    own_s: float


@dataclass(frozen=True)
class Limits:
    """What a quiet machine may do besides our work: cores busy with it, and share of the time stolen by the host."""

    other_cores: float = 0.10
    steal_share: float = 0.02


@dataclass(frozen=True)
class Noise:
    """What happened besides our own processes between two samples."""

    other_cores: float
    steal_share: float
    is_quiet: bool
    reason: str


def judge(before: Sample, after: Sample, core_count: int, limits: Limits) -> Noise:
    """Whether the machine was quiet between two samples, with the reason."""
    elapsed = max(after.at_s - before.at_s, 1 / TICKS_PER_S)
    own = after.own_s - before.own_s
    # Ticks round, and a process may move between the two readings: never below zero.
    other = max(0.0, (after.busy_s - before.busy_s - own) / elapsed)
    steal = max(0.0, (after.steal_s - before.steal_s) / (elapsed * core_count))
    loud = []
    if other > limits.other_cores:
        loud.append(f"other processes used {other:.2f} cores (allowed {limits.other_cores:.2f})")
    if steal > limits.steal_share:
        loud.append(f"the host took {steal:.1%} of our cores (allowed {limits.steal_share:.1%})")
    return Noise(other, steal, not loud, " and ".join(loud) or "quiet")


def sample(core_list: Sequence[int]) -> Sample:
    """The CPU times of these cores and of this process with all its descendants, now."""
    busy = steal = 0
    wanted = {f"cpu{core}" for core in core_list}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *columns = line.split()
        if name in wanted:
            user, nice, system = (int(ticks) for ticks in columns[:3])
            busy += user + nice + system
            steal += int(columns[7]) if len(columns) > 7 else 0
    return Sample(time.monotonic(), busy / TICKS_PER_S, steal / TICKS_PER_S, tree_cpu_s(os.getpid()))


def tree_cpu_s(root: int) -> float:
    """CPU seconds of a process and all its descendants, those that ended and were waited for included."""
    stats = _process_stats()
    return sum(stats[pid][1] for pid in _tree(root, stats))


def stub_cpu_s(server: int) -> dict[str, float]:
    """CPU seconds of the Python backend's stubs of a server, by model (all its instances together)."""
    found: dict[str, float] = {}
    for name, _, seconds in _stubs(server):
        found[name] = found.get(name, 0.0) + seconds
    return found


def stub_pids(server: int) -> dict[str, list[int]]:
    """The live stubs of a server, by model: one per instance, and while a model is changed the old ones too."""
    found: dict[str, list[int]] = {}
    for name, pid, _ in _stubs(server):
        found.setdefault(name, []).append(pid)
    return found


def tree_pids(root: int) -> list[int]:
    """A process and all its descendants that live now."""
    return _tree(root, _process_stats())


def process_cpu_s(pid: int) -> float:
    """CPU seconds of one process without its children. Raises MeasurementError when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise MeasurementError(
            f"The process {pid} ended during the measurement ({error}). Nothing is reported. Look at its log."
        ) from error
    return sum(int(column) for column in text.rpartition(")")[2].split()[11:13]) / TICKS_PER_S


def slice_us(cpus: int | None = None, release: str | None = None) -> float:
    """How long a thread that begins to run keeps its core from threads that wake up, us, on a Linux with so many CPUs.

    `base_slice_ns` of kernel/sched/fair.c and its scaling (SCHED_TUNABLESCALING_LOG); since 6.6 who runs is left alone for that
    long (RUN_TO_PARITY). Measured with 2 CPUs on 6.18: 1.4 ms. 0 for older kernels, which let the sleeper go first.
    """
    numbers = re.match(r"(\d+)\.(\d+)", release or platform.release())
    version = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if version < EEVDF:
        return 0.0
    base_us = 700.0 if version >= SHORTER_SLICE else 750.0
    return base_us * min(8, max(1, cpus or os.cpu_count() or 1)).bit_length()


def describe() -> dict[str, object]:
    """The machine in words that let a reader compare: processor, cores, memory, system. No names, no addresses."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
    }


def _stubs(server: int) -> Iterator[tuple[str, int, float]]:
    """Model, pid and CPU seconds of each stub."""
    for pid, (parent, seconds) in _process_stats().items():
        if parent != server:
            continue
        try:
            argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended in between
            continue
        # The stub of Triton 24.10: path, model file, shared memory and its sizes, parent, backends, offset, instance name.
        instance = argv[8].decode() if len(argv) > 8 else "other"
        yield re.sub(r"_\d+_\d+$", "", instance), pid, seconds


def _tree(root: int, stats: Mapping[int, tuple[int, float]]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        if pid in stats:
            found.append(pid)
            pending += children.get(pid, [])
    return found


def _process_stats() -> Mapping[int, tuple[int, float]]:
    """pid -> (parent, CPU seconds of it and of its waited-for children)."""
    stats = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text()
        except OSError:  # it ended in between
            continue
        columns = text.rpartition(")")[2].split()  # the name before may hold spaces and parentheses
        ticks = sum(int(column) for column in columns[11:15])  # utime stime cutime cstime
        stats[int(folder.name)] = (int(columns[1]), ticks / TICKS_PER_S)
    return stats


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
