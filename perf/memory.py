"""How much memory does each process of a server have, and does it grow with its requests?

memory = of_process(pid)                       # Memory(rss_mb=..., anonymous_mb=...)
slope(requests, rss_mb)                        # MB per 100,000 requests, not bent by single outliers
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tritonpilot.errors import MeasurementError

SHARED = Path("/dev/shm")  # noqa: S108  where Linux keeps POSIX shared memory
PER_REQUESTS = 100_000
MB = 1e6


@dataclass(frozen=True)
class Memory:
    """Resident memory of a process, 1e6 bytes each: all of it (its code and shared memory too), and what it alone made."""

    rss_mb: float
    anonymous_mb: float


def of_process(pid: int) -> Memory:
    """Read from smaps_rollup, which counts pages exactly. Raises MeasurementError when the process is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError as error:
        raise MeasurementError(
            f"The process {pid} ended during the measurement ({error}). Nothing is reported. Look at the server's log."
        ) from error
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
    return Memory(kib["Rss"] * 1024 / MB, kib["Anonymous"] * 1024 / MB)


def stubs(server: int) -> dict[str, int]:
    """The stub processes of a server: instance ("labels_0_0") -> pid."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            argv = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it ended in between
            continue
        # The stub of Triton 24.10: path, model file, shared memory and its sizes, parent, backends, offset, instance name.
        if parent == server and len(argv) > 8:
            found[argv[8].decode()] = int(folder.name)
    return found


def model_of(instance: str) -> str:
    """labels_0_0 -> labels"""
    return re.sub(r"_\d+_\d+$", "", instance)


def own_regions() -> dict[str, float]:
    """Shared-memory regions of servers that this process started: name -> MB in use."""
    found = {}
    for path in SHARED.glob(f"tritonpilot_{os.getpid()}_*"):
        try:
            found[path.name] = path.stat().st_blocks * 512 / MB
        except FileNotFoundError:  # it was removed in between
            continue
    return found


def slope(requests: Sequence[float], mb: Sequence[float]) -> float:
    """MB per 100,000 requests over the later half of the requests: the median of the slopes of all pairs of samples.

    Theil and Sen's estimator: a third of the samples may be wild. Raises MeasurementError with fewer than 8 samples there.
    """
    at, level = np.asarray(requests, float), np.asarray(mb, float)
    later = at >= at.max(initial=0.0) / 2
    at, level = at[later], level[later]
    first, second = np.triu_indices(len(at), 1)
    apart = at[second] - at[first]
    if len(at) < 8 or not apart.any():
        raise MeasurementError(
            f"There are {len(at)} samples of memory in the later half of the requests, too few for a slope. Nothing is "
            "reported. Send more requests."
        )
    rises = (level[second] - level[first])[apart > 0] / apart[apart > 0]
    return float(np.median(rises)) * PER_REQUESTS
