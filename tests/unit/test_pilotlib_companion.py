from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from pilotlib.companion import (
    BUDGET_MOST_S,
    BUDGET_SHARE,
    BUSY_LOOK_S,
    FIRST_WAIT_S,
    IDLE_TICK_S,
    SILENCE_MOST_S,
    TICK_S,
    WAKE_COST_S,
    WAKES_MOST,
    Lookout,
)
from pilotlib.server_metrics import Counts, Model

CTR: Model = ("ctr", "1")
OCR: Model = ("ocr", "1")
REQUEST_CPU_S = 0.0004
LOOK_CPU_S = 0.0005
TICK_CPU_S = 0.00002


@dataclass
class Server:
    """A server's queue, its CPU time, and a lookout beside it, on a clock of their own."""

    lookout: Lookout = field(default_factory=Lookout)
    now_s: float = 100.0
    cpu_s: float = 7.0
    own_s: float = 0.0
    pending: int = 0
    arrived: int = 0
    executed: int = 0
    waiting: int = 0
    looks: int = 0
    rests: int = 0
    is_slow: bool = False  # the next ticks are those of an idle server
    wakes: int = 0
    spent_s: float = 0.0

    def request(self, pending: int = 0) -> None:
        self.arrived, self.cpu_s, self.pending = self.arrived + 1, self.cpu_s + REQUEST_CPU_S, self.pending + pending

    def end(self) -> None:
        self.executed, self.cpu_s = self.executed + 1, self.cpu_s + REQUEST_CPU_S

    def tick(self) -> int:
        """One tick, with the look that it asks for; the wakes that it sends."""
        pause_s = IDLE_TICK_S if self.is_slow else TICK_S
        self.now_s, self.own_s, self.spent_s = self.now_s + pause_s, self.own_s + TICK_CPU_S, self.spent_s + TICK_CPU_S
        if self.lookout.is_at_rest(self.cpu_s):
            self.rests += 1
            return 0
        step = self.lookout.tick(self.now_s, self.cpu_s, self.own_s)
        wanted = list(step.wake)
        if step.look:
            self.looks += 1
            self.cpu_s, self.spent_s = self.cpu_s + LOOK_CPU_S, self.spent_s + LOOK_CPU_S
            counts = {CTR: Counts(self.pending, self.arrived, self.executed)}
            wanted += self.lookout.looked(self.now_s, counts, {CTR: self.waiting}, LOOK_CPU_S, self.cpu_s)
        for _ in wanted:
            self.lookout.paid(0)
            self.spent_s += WAKE_COST_S
        self.wakes += len(wanted)
        return len(wanted)

    def ticks(self, seconds: float) -> int:
        until_s = self.now_s + seconds
        sent = 0
        while self.now_s < until_s:
            sent += self.tick()
        return sent


@pytest.fixture
def server() -> Server:
    """A server that has been seen idle for two seconds."""
    found = Server()
    found.ticks(2.0)
    return found


def test_an_idle_server_is_not_looked_at(server: Server) -> None:
    looks, rests = server.looks, server.rests

    assert server.ticks(60) == 0
    assert server.looks == looks
    assert server.rests - rests >= 60 / TICK_S - 1


def test_what_waits_after_a_rest_is_woken_only_when_the_execution_before_it_is_over_or_long(server: Server) -> None:
    server.ticks(5)
    server.is_slow = True
    server.request(pending=1)

    looks = server.looks

    assert (server.tick(), server.tick(), server.looks) == (0, 0, looks + 1)
    assert server.ticks(FIRST_WAIT_S) == 1


def test_a_stall_ends_within_a_few_ticks(server: Server) -> None:
    server.request()
    server.tick()
    server.request(pending=1)  # while the first executes
    server.tick()
    server.end()  # and the batcher misses it
    began_s = server.now_s

    while not server.wakes and server.now_s < began_s + 1:
        server.tick()

    assert server.now_s - began_s <= 3 * TICK_S + 1e-9


def test_a_stall_that_follows_work_without_a_pause_is_looked_for_too(server: Server) -> None:
    """Another model keeps the server busy, and this one's only waiting request is never followed by another."""
    server.request(pending=1)
    for _ in range(20):
        server.cpu_s += TICK_S  # a full core
        server.tick()

    assert server.wakes >= 1


def test_a_wake_that_did_not_help_is_followed_at_doubling_intervals_for_a_while(server: Server) -> None:
    server.request(pending=1)
    sent = []
    for _ in range(8):
        server.waiting, server.pending = (
            server.wakes,
            1 + server.wakes,
        )  # none is answered: the instance is busy for long
        sent.append(server.ticks(0.5))

    assert sent[0] > sent[1] > 0
    assert sum(sent) == WAKES_MOST
    server.end()
    server.waiting, server.pending = 0, 1
    assert server.ticks(0.5) > 0  # that execution has ended, and its end may have been missed


def test_our_own_wakes_are_no_waiting_requests(server: Server) -> None:
    server.request()
    server.pending = server.waiting = 2

    assert server.ticks(1.0) == 0


def test_a_model_at_which_requests_arrive_at_every_tick_wakes_itself(server: Server) -> None:
    for _ in range(100):
        for _ in range(3):
            server.request()
            server.end()
        server.pending = 40
        server.tick()

    assert server.looks > 0
    assert server.wakes <= 1  # the first look has nothing to compare with


def test_a_stall_after_dense_traffic_is_woken_when_silence_falls(server: Server) -> None:
    """All callers of a closed loop wait for the same missed execution."""
    for _ in range(40):
        for _ in range(8):
            server.request()
            server.end()
        server.tick()
    server.pending = 16
    before = server.wakes

    assert server.ticks(SILENCE_MOST_S + FIRST_WAIT_S + 4 * TICK_S) > 0, before


def test_models_that_are_gone_are_forgotten() -> None:
    lookout = Lookout()
    assert lookout.looked(1.0, {CTR: Counts(1, 1, 0), OCR: Counts(0, 1, 1)}, {}, 0.0) == [CTR]
    assert lookout.looked(2.0, {OCR: Counts(0, 1, 1)}, {}, 0.0) == []

    assert lookout.tick(9.0, None, 0.0).wake == ()
    assert lookout.tick(9.5, None, 0.0).wake == ()


@pytest.mark.parametrize("requests_per_s", [1, 5, 20, 45])
def test_no_load_makes_it_spend_more_than_its_budget(server: Server, requests_per_s: int) -> None:
    """The worst load for it: every request makes a look, and something always waits."""
    server.spent_s, began_s, due_s = 0.0, server.now_s, server.now_s
    while server.now_s < began_s + 60:
        if server.now_s >= due_s:
            server.request()
            server.end()
            server.pending = 1
            due_s += 1 / requests_per_s
        server.tick()

    allowed_s = BUDGET_SHARE * 60 + BUDGET_MOST_S + LOOK_CPU_S + WAKE_COST_S
    assert 0 < server.spent_s <= allowed_s


def test_the_less_is_left_the_longer_a_silence_has_to_be(server: Server) -> None:
    def silence_s() -> float:
        server.request()
        began_s, before = server.now_s, server.looks
        while server.looks == before and server.now_s < began_s + 1:
            server.tick()
        return server.now_s - began_s

    assert silence_s() <= IDLE_TICK_S + 2 * TICK_S
    server.lookout.looked(server.now_s, {}, {}, BUDGET_MOST_S * 0.9)

    assert SILENCE_MOST_S / 2 <= silence_s() <= SILENCE_MOST_S + 3 * TICK_S


def test_a_server_whose_cpu_time_is_unknown_is_taken_for_busy() -> None:
    lookout = Lookout()
    now_s, looks = 0.0, 0
    for _ in range(100):
        now_s += TICK_S
        if lookout.tick(now_s, None, 0.0).look:
            looks += 1
            lookout.looked(now_s, {}, {}, LOOK_CPU_S)

    assert 10 <= looks <= now_s / BUSY_LOOK_S
