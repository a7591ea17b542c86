from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pilotlib.waker import (
    EXECUTED_IN_A_ROW,
    EXPIRED,
    FAILURES_TOLD,
    WAKE_ANSWER,
    WAKES_MAX,
    WAKES_PER_S,
    WAKES_SAVED,
    Waker,
    plan,
    wait_us,
)

REJECTS = {"default_timeout_microseconds": "40000", "allow_timeout_override": True}


@pytest.mark.parametrize(
    ("batching", "is_needed", "is_rejected"),
    [
        (None, False, False),
        ({}, False, False),
        ({"max_queue_delay_microseconds": 500}, False, False),
        ({"default_queue_policy": {"max_queue_size": 0}}, False, False),
        ({"default_queue_policy": {"max_queue_size": 9}}, True, False),
        ({"default_queue_policy": REJECTS}, True, True),
        ({"priority_levels": "2", "default_priority_level": "1"}, True, False),
        ({"priority_levels": 2, "default_priority_level": 1, "priority_queue_policy": {"1": REJECTS}}, True, True),
        ({"priority_levels": 2, "default_priority_level": 2, "priority_queue_policy": {"1": REJECTS}}, True, False),
        ({"priority_levels": 2, "default_priority_level": 2, "default_queue_policy": REJECTS}, True, True),
        ({"default_queue_policy": {**REJECTS, "timeout_action": "DELAY"}}, True, False),
    ],
)
def test_the_plan_follows_the_queue_policies(batching: Any, is_needed: bool, is_rejected: bool) -> None:
    decided = plan({} if batching is None else {"dynamic_batching": batching})
    assert (decided.is_needed, decided.is_rejected) == (is_needed, is_rejected)
    assert decided.reason


def test_the_level_of_wakes_decides_when_one_is_reserved() -> None:
    reserved = {"timeout_action": "REJECT", "default_timeout_microseconds": 1}
    batching = {"priority_levels": 3, "default_priority_level": 1, "priority_queue_policy": {"3": reserved}}
    assert [plan({"dynamic_batching": batching}, level).is_rejected for level in (0, 2, 3, 9)] == [
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(("delay_us", "wait"), [(None, 1000), ("500", 1500), (100_000, 2000)])
def test_the_batcher_is_left_its_queue_delay(delay_us: Any, wait: int) -> None:
    assert wait_us({"dynamic_batching": {"max_queue_delay_microseconds": delay_us}}, 1000) == wait


class Server:
    """Answers wakes with `text`, or leaves them stuck when it is None; a socket pair stands for each connection."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.far_ends: list[socket.socket] = []

    @property
    def wakes(self) -> int:
        return len(self.far_ends)

    def send(self) -> socket.socket:
        near, far = socket.socketpair()
        self.far_ends.append(far)
        if self.text is not None:
            far.sendall(self.text.encode())
        return near

    def read(self, connection: socket.socket) -> str:
        with connection:
            return connection.recv(1 << 16).decode()


Start = Callable[..., tuple[Waker, Server]]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(text)` gives a running waker and the server that it wakes."""
    running: list[tuple[Waker, Server]] = []

    def begin(text: str | None, **more: Any) -> tuple[Waker, Server]:
        server = Server(text)
        running.append((Waker(server.send, server.read, **more), server))
        return running[-1]

    yield begin
    for waker, server in running:
        waker.stop()
        for one in server.far_ends:
            one.close()


def wait_for(is_true: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def execute(waker: Waker, times: int = 1) -> None:
    for _ in range(times):
        waker.began()
        waker.ended()


def test_one_wake_follows_the_last_execution(start: Start) -> None:
    waker, server = start(EXPIRED)
    for round_ in range(1, 4):
        execute(waker, 5)
        wait_for(lambda round_=round_: server.wakes == round_)
    time.sleep(0.05)
    assert server.wakes == 3


def test_no_wake_while_an_execution_runs(start: Start) -> None:
    waker, server = start(EXPIRED)
    waker.began()
    time.sleep(0.05)
    assert server.wakes == 0
    waker.ended()
    wait_for(lambda: server.wakes == 1)


def test_stuck_wakes_are_followed_by_others_until_an_execution_begins(start: Start) -> None:
    waker, server = start(None)
    execute(waker)
    wait_for(lambda: server.wakes >= 4)
    waker.began()
    time.sleep(0.1)
    before = server.wakes
    time.sleep(0.1)
    assert server.wakes == before
    waker.ended()
    wait_for(lambda: server.wakes == before + WAKES_MAX)
    time.sleep(0.1)
    assert server.wakes == before + WAKES_MAX


def test_executed_wakes_are_repeated_a_bounded_number_of_times(start: Start) -> None:
    waker, server = start(WAKE_ANSWER)
    execute(waker)
    wait_for(lambda: server.wakes == EXECUTED_IN_A_ROW + 1)
    time.sleep(0.05)
    assert server.wakes == EXECUTED_IN_A_ROW + 1


def test_failures_are_told_once_and_do_not_end_the_waker() -> None:
    told: list[str] = []
    calls: list[int] = []

    def refuse() -> socket.socket:
        calls.append(1)
        raise ConnectionRefusedError("nobody listens")

    waker = Waker(refuse, lambda connection: "", complain=told.append)  # noqa: ARG005
    for count in range(1, FAILURES_TOLD + 2):
        execute(waker)
        wait_for(lambda count=count: len(calls) == 2 * count)
    waker.stop()
    assert len(told) == 1
    assert "nobody listens" in told[0]


def test_a_wake_that_fails_once_is_sent_again_at_once() -> None:
    server = Server(EXPIRED)
    calls: list[int] = []

    def send() -> socket.socket:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionResetError("the connection had ended")
        return server.send()

    waker = Waker(send, server.read)
    execute(waker)
    wait_for(lambda: server.wakes == 1)
    waker.stop()
    assert len(calls) == 2


def test_wakes_are_counted(start: Start) -> None:
    counted: list[int] = []
    waker, server = start(EXPIRED, count=counted.append)
    execute(waker)
    wait_for(lambda: sum(counted) == 1 == server.wakes)
    for before in (1, 2):
        execute(waker)
        wait_for(lambda before=before: server.wakes > before)
    wait_for(lambda: counted == [1, 2])  # a second later, with no wake to come


def test_stop_ends_the_thread_while_wakes_are_stuck(start: Start) -> None:
    waker, server = start(None)
    execute(waker)
    wait_for(lambda: server.wakes >= 1)
    waker.stop()
    assert "pilot-waker" not in {one.name for one in threading.enumerate()}


def test_without_traffic_the_waker_costs_nothing(start: Start) -> None:
    waker, server = start(EXPIRED)
    execute(waker)
    wait_for(lambda: server.wakes == 1)
    begin = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - begin < 0.05


def test_the_line_is_given_back_soon_after_the_last_wake_and_at_the_end(start: Start) -> None:
    rests: list[float] = []
    waker, server = start(EXPIRED, rest=lambda: rests.append(time.monotonic()))
    for _ in range(3):
        waker.began()
        waker.ended()
        wait_for(lambda before=server.wakes: server.wakes > before or bool(rests))
    wait_for(lambda: len(rests) == 1)
    waker.stop()
    wait_for(lambda: len(rests) == 2)


def test_a_model_that_goes_on_by_itself_soon_is_not_woken_after_every_execution(start: Start) -> None:
    """Its callers answer an answer with the next request after 2 ms: then wakes are for nothing, and only so many are paid."""
    waker, server = start(EXPIRED)
    began = time.monotonic()
    for _ in range(100):
        waker.began()
        waker.ended()
        time.sleep(0.003)
    seconds = time.monotonic() - began
    assert WAKES_SAVED <= server.wakes <= WAKES_SAVED + WAKES_PER_S * seconds + 2
    waker.began()
    waker.ended()
    before = server.wakes
    wait_for(lambda: server.wakes > before)


def test_it_does_not_wait_for_executions_that_never_come_by_themselves(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers at random: with the budget spent, only every ninth wait is a long one, to see whether that is worth it again."""
    monkeypatch.setattr("pilotlib.waker.WAKES_PER_S", 0.0)
    monkeypatch.setattr("pilotlib.waker.PATIENT_S", 0.2)
    waker, server = start(EXPIRED)
    waits_s = []
    for _ in range(40):
        before, began = server.wakes, time.monotonic()
        execute(waker)
        wait_for(lambda before=before: server.wakes > before)
        waits_s.append(time.monotonic() - began)
    assert 3 <= sum(wait_s >= 0.2 for wait_s in waits_s[int(WAKES_SAVED) :]) <= 8
