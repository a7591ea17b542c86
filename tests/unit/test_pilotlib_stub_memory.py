from __future__ import annotations

import mmap
import resource
from typing import Any

import pytest

from pilotlib import stub_memory
from pilotlib.intake import Intake
from pilotlib.stub_memory import LOOK_EVERY_S, StubMemory, resident_bytes


def test_it_is_the_resident_memory_of_this_process() -> None:
    size = 64 << 20
    before = resident_bytes()
    with mmap.mmap(-1, size) as held:
        held.write(b"x" * size)
        grown = resident_bytes() - before
    assert 0.95 * size < grown < 1.25 * size
    assert before <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_it_is_read_once_in_a_while_however_many_executions_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, told = 100.0, []
    reads = 0

    def read() -> int:
        nonlocal reads
        reads += 1
        return 1000 + reads

    monkeypatch.setattr(stub_memory, "resident_bytes", read)
    memory = StubMemory(told.append, lambda: now_s)
    for _ in range(1000):
        memory.look()
    assert (reads, told) == (1, [1001])
    now_s += LOOK_EVERY_S - 0.001
    memory.look()
    assert reads == 1
    now_s += 0.001
    memory.look()
    memory.look()
    assert (reads, told) == (2, [1001, 1002])


def test_a_figure_that_cannot_be_had_costs_no_request() -> None:
    def refuse(size: int) -> None:
        raise RuntimeError(f"no metric of {size}")

    now_s = 0.0
    memory = StubMemory(refuse, lambda: now_s)
    memory.look()
    now_s += LOOK_EVERY_S
    memory.look()


def test_the_intake_looks_once_an_execution() -> None:
    class Request:
        def parameters(self) -> str:
            return "{}"

    looks: list[None] = []
    intake = Intake(None, lambda late: None, look=lambda: looks.append(None))  # noqa: ARG005

    def answer(requests: Any) -> list[str]:
        return ["answer" for _ in requests]

    assert intake.execute([Request(), Request()], answer) == ["answer", "answer"]
    assert len(looks) == 1
