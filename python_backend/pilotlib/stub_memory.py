"""How much memory does this stub hold? A gauge in Triton's metrics: a leak in a model or a library is a line that only rises.

    memory = stub_memory_of(args)       # in initialize
    memory.look()                       # in execute: 0.1 us, and once in LOOK_EVERY_S a reading of some 0.1 ms

`pilot_stub_memory_bytes{model,version,stub}` is the resident set of the process, with its part of Triton's shared memory. `stub` is
Triton's name of the instance, since each instance has a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pilotlib.stub import pb_utils

LOOK_EVERY_S = 5.0
STATM = Path("/proc/self/statm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class StubMemory:
    """Reads the memory of this process and tells it, at most every LOOK_EVERY_S."""

    def __init__(self, tell: Callable[[int], None], clock_s: Callable[[], float] = time.monotonic) -> None:
        self._tell = tell
        self._clock_s = clock_s
        self._due_s = 0.0

    def look(self) -> None:
        """Call in every `execute`. It raises nothing: a request is worth more than a figure."""
        now_s = self._clock_s()
        if now_s < self._due_s:
            return
        self._due_s = now_s + LOOK_EVERY_S
        with contextlib.suppress(
            Exception
        ):  # no descriptor left, or Triton refuses the value: the next look may succeed
            self._tell(resident_bytes())


def resident_bytes() -> int:
    """The resident set of this process (proc(5), statm). Raises OSError."""
    return int(STATM.read_bytes().split()[1]) * PAGE_BYTES


def stub_memory_of(args: Mapping[str, str]) -> StubMemory:
    """An instance's memory, from initialize's `args`, told once already. To be kept as long as the process lives.

    NOTE: a gauge that is given up is deleted in Triton, also when another instance has one with the same labels, as after a reload:
    that one would then write to freed memory. So Triton goes on to show the last value of an instance that has ended.
    """
    family = pb_utils.MetricFamily(
        name="pilot_stub_memory_bytes",
        description="Resident memory of the process of an instance of a Python backend",
        kind=pb_utils.MetricFamily.GAUGE,
    )
    gauge = family.Metric(
        labels={"model": args["model_name"], "version": args["model_version"], "stub": args["model_instance_name"]}
    )

    def tell(size: int, family: Any = family) -> None:  # noqa: ARG001  observing needs a reference to the family
        gauge.set(size)

    memory = StubMemory(tell)
    memory.look()
    return memory
