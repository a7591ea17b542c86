"""Which of this machine's cores does a proof use, and how does it stay on them? What they do is `tritonpilot.machine`'s.

with pinned(cores().client):
    ...
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tritonpilot.errors import MeasurementError
from tritonpilot.machine import (
    Limits,
    Noise,
    Sample,
    describe,
    judge,
    process_cpu_s,
    sample,
    stub_cpu_s,
    stub_pids,
    tree_cpu_s,
    tree_pids,
)

__all__ = [
    "Cores",
    "Limits",
    "Noise",
    "Sample",
    "cores",
    "describe",
    "judge",
    "pinned",
    "process_cpu_s",
    "sample",
    "stub_cpu_s",
    "stub_pids",
    "tree_cpu_s",
    "tree_pids",
]


@dataclass(frozen=True)
class Cores:
    """The core that serves and the core that sends: never the same one."""

    server: int
    client: int

    @property
    def both(self) -> tuple[int, int]:
        return self.server, self.client


def cores() -> Cores:
    """The first and the last core that this process may use. Raises MeasurementError when there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        raise MeasurementError(
            f"This process may use only the core {allowed[0]}, and a proof needs one for the server and one for the "
            "client. Nothing was measured. Give it two cores."
        )
    return Cores(server=allowed[0], client=allowed[-1])


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Every thread of this process on one core while the block lasts; children started inside inherit it."""
    before = _pin_threads({}, {core})
    try:
        yield
    finally:
        _pin_threads(before, before[threading.get_native_id()])


def _pin_threads(each: Mapping[int, set[int]], otherwise: set[int]) -> dict[int, set[int]]:
    """Give every thread of this process its cores of `each`, or `otherwise`; returns what they had before."""
    before = {}
    for tid in (int(entry.name) for entry in Path("/proc/self/task").iterdir()):
        with suppress(ProcessLookupError):  # a thread may end in between
            before[tid] = os.sched_getaffinity(tid)
            os.sched_setaffinity(tid, each.get(tid, otherwise))
    return before
