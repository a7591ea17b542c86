"""The entry's gate: order, floors, predicted waits, deadlines and accounts, on a virtual clock with clients and a batcher."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tritonpilot.entry.gate import DoneStatus, Gate, Refusal, Status, Ticket
from tritonpilot.entry.tenants import TokenBucket
from tritonpilot.entry.terms import ClassTerms, ModelTerms

HIGH = ClassTerms("high", 1, 1000, 0.2)
LOW = ClassTerms("low", 2, 10000, None, share=0.1)


def terms(*classes: ClassTerms, window: int = 32, batch: int = 16, name: str = "m") -> ModelTerms:
    return ModelTerms(name, classes or (HIGH, LOW), (classes or (HIGH,))[0].name, window, batch)


class Alarm:
    """A timer on the virtual clock."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class World:
    """A virtual clock, what happens on it, and the gate with all that it said. It is the gate's Watcher."""

    def __init__(self) -> None:
        self.now = 0.0
        self.happenings: list[tuple[float, int, Alarm]] = []
        self.numbers = itertools.count()
        self.gate = Gate(lambda: self.now, self.call_at, self)
        self.refusals: list[tuple[Ticket, Refusal]] = []
        self.began: list[Ticket] = []
        self.ended: dict[Ticket, tuple[DoneStatus, float]] = {}
        self.late: dict[Ticket, Refusal] = {}
        self.waits: list[tuple[float, str, float]] = []
        self.alarms = 0

    def call_at(self, at_s: float, call: Callable[[], None]) -> Alarm:
        alarm = Alarm(call)
        self.alarms += 1
        heapq.heappush(self.happenings, (at_s, next(self.numbers), alarm))
        return alarm

    def run(self, until_s: float) -> None:
        while self.happenings and self.happenings[0][0] <= until_s:
            at_s, _, alarm = heapq.heappop(self.happenings)
            if alarm.call is not None:
                self.now = max(self.now, at_s)
                alarm.call()
        self.now = until_s

    def refused(self, ticket: Ticket, refusal: Refusal) -> None:
        assert ticket not in self.ended
        self.refusals.append((ticket, refusal))

    def started(self, ticket: Ticket) -> None:
        assert ticket not in self.ended
        self.began.append(ticket)

    def done(self, ticket: Ticket, status: DoneStatus, seconds: float) -> None:
        assert ticket not in self.ended
        assert seconds == pytest.approx(self.now - ticket.arrived_s)
        self.ended[ticket] = (status, self.now)

    def refuse_late(self, ticket: Ticket, refusal: Refusal) -> None:
        assert ticket not in self.late
        self.late[ticket] = refusal

    def send(
        self,
        model: ModelTerms,
        class_name: str = "high",
        rows: int = 1,
        tenant: Any = None,
        deadline_s: float | None = None,
        start: Callable[[Ticket], None] = lambda _: None,
    ) -> tuple[Ticket, Refusal | None]:
        ticket = Ticket(model, class_name, rows, tenant, deadline_s, start, self.refuse_late)
        return ticket, self.gate.submit(ticket)

    def fill(self, model: ModelTerms) -> Ticket:
        """One request that takes the whole window."""
        ticket, refusal = self.send(model, model.classes[0].name, rows=model.window_rows)
        assert refusal is None
        return ticket

    def order(self, *, rows: bool = False) -> list[Any]:
        return [(t.class_name, t.rows) if rows else t.class_name for t in self.began]


class Batcher:
    """Triton: batches by priority of at most `max_batch` rows, each takes `batch_s` in one of the instances."""

    def __init__(self, world: World, batch_s: float, max_batch: int = 16, instances: int = 1) -> None:
        self.world, self.batch_s, self.max_batch, self.idle = world, batch_s, max_batch, instances
        self.queue: list[tuple[int, int, Ticket]] = []
        self.answered: list[tuple[float, Ticket]] = []
        self.is_awake = False

    def start(self, ticket: Ticket) -> None:
        heapq.heappush(self.queue, (ticket.level, next(self.world.numbers), ticket))
        if not self.is_awake:  # looks when everything that happens at this time has happened
            self.is_awake = True
            self.world.call_at(self.world.now, self.look)

    def look(self) -> None:
        self.is_awake = False
        while self.idle and self.queue:
            batch, rows = [], 0
            while self.queue and (not batch or rows + self.queue[0][2].rows <= self.max_batch):
                ticket = heapq.heappop(self.queue)[2]
                batch.append(ticket)
                rows += ticket.rows
            self.idle -= 1
            self.world.call_at(self.world.now + self.batch_s, lambda batch=batch: self.finish(batch))

    def finish(self, batch: Iterable[Ticket]) -> None:
        self.idle += 1
        for ticket in batch:
            self.answered.append((self.world.now, ticket))
            self.world.gate.finished(ticket, "ok")
        self.look()

    def rows(self, class_name: str, since_s: float, until_s: float) -> int:
        return sum(t.rows for at_s, t in self.answered if t.class_name == class_name and since_s < at_s <= until_s)


@dataclass
class Clients:
    """Callers of one class: `closed` of them wait for their answer, or requests come at `rate_per_s` (Poisson)."""

    world: World
    batcher: Batcher
    model: ModelTerms
    class_name: str
    rows: int = 1
    deadline_s: float | None = None
    random: random.Random = field(default_factory=lambda: random.Random(7))
    is_on: bool = True
    sent: int = 0
    refused: list[tuple[float, Refusal]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)

    def one(self) -> bool:
        self.sent += 1
        until = None if self.deadline_s is None else self.world.now + self.deadline_s
        ticket, refusal = self.world.send(self.model, self.class_name, self.rows, None, until, self.batcher.start)
        if refusal is not None:
            self.refused.append((self.world.now, refusal))
            return False
        self.tickets.append(ticket)
        return True

    def open(self, rate_per_s: float, until_s: float) -> Clients:
        def arrive() -> None:
            self.one()
            at_s = self.world.now + self.random.expovariate(rate_per_s)
            if at_s < until_s:
                self.world.call_at(at_s, arrive)

        self.world.call_at(self.world.now + self.random.expovariate(rate_per_s), arrive)
        return self

    def closed(self, count: int, until_s: float) -> Clients:
        """Each looks for its answer every millisecond."""

        def caller() -> None:
            state: dict[str, Ticket] = {}

            def look() -> None:
                if self.world.now >= until_s:
                    return
                ticket = state.get("ticket")
                if (ticket is None or ticket in self.world.ended) and self.one():
                    state["ticket"] = self.tickets[-1]
                self.world.call_at(self.world.now + 0.001, look)

            look()

        for _ in range(count):
            caller()
        return self


# Order


def test_a_request_starts_at_once_while_the_window_has_room() -> None:
    world, model = World(), terms()
    tickets = [world.send(model)[0] for _ in range(33)]

    assert world.began == tickets[:32]
    assert (world.gate.rows_in_flight("m"), world.gate.depth("m")) == (32, {"high": 1, "low": 0})
    assert all((t.level, t.timeout_us, t.is_promoted) == (1, 200_000, False) for t in world.began)

    world.gate.finished(tickets[0], "ok")

    assert world.began == tickets
    assert world.ended[tickets[0]] == ("ok", 0.0)


def test_classes_are_served_strictly_by_level_and_first_come_first_served_inside_one() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), replace(LOW, share=0.0), window=4)
    first = world.fill(model)
    for class_name, rows in (("low", 1), ("high", 2), ("low", 3), ("high", 1)):
        world.send(model, class_name, rows)
    world.gate.finished(first, "ok")

    assert world.order(rows=True) == [("high", 4), ("high", 2), ("high", 1), ("low", 1)]
    assert [t.level for t in world.began] == [1, 1, 1, 2]


def test_a_small_request_does_not_pass_a_larger_one_that_does_not_fit_yet() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), window=4)
    first, _ = world.send(model, rows=3)
    second, _ = world.send(model, rows=2)
    third, _ = world.send(model, rows=1)
    assert world.began == [first]

    world.gate.finished(first, "ok")

    assert world.began == [first, second, third]


def test_a_request_of_a_higher_class_starts_although_a_lower_one_does_not_fit() -> None:
    world, model = World(), terms(window=4)
    world.send(model, rows=3)
    world.send(model, "low", rows=2)
    world.send(model, "high", rows=1)

    assert world.order(rows=True) == [("high", 3), ("high", 1)]


def test_triton_is_told_what_is_left_of_the_wait_only_where_it_heeds_it() -> None:
    world = World()
    for model, timeout_us in ((terms(HIGH), pytest.approx(1e6 * (HIGH.timeout_s or 0))), (terms(HIGH, name="deaf"), 0)):
        ticket, _ = world.send(replace(model, may_override_timeout=model.name != "deaf"))
        assert ticket.timeout_us == timeout_us


def test_a_request_larger_than_the_window_starts_alone() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), window=4)
    first, _ = world.send(model)
    large, _ = world.send(model, rows=10)
    last, _ = world.send(model)
    assert world.began == [first]

    world.gate.finished(first, "ok")
    assert world.began == [first, large]
    world.gate.finished(large, "ok")
    assert world.began == [first, large, last]


def saturated(
    model: ModelTerms, loads: dict[str, float], seconds: float, batch_s: float = 0.02
) -> tuple[World, Batcher]:
    """Open-loop callers at a multiple of the capacity, per class."""
    world = World()
    batcher = Batcher(world, batch_s, model.max_batch_size)
    for seed, (class_name, load) in enumerate(loads.items()):
        clients = Clients(world, batcher, model, class_name, random=random.Random(seed))
        clients.open(load * model.max_batch_size / batch_s, seconds)
    world.run(seconds)
    return world, batcher


def test_a_share_of_a_tenth_is_a_tenth_of_what_a_saturated_model_serves() -> None:
    _, batcher = saturated(terms(HIGH, LOW), {"high": 1.5, "low": 1.0}, 6)
    high, low = batcher.rows("high", 1, 6), batcher.rows("low", 1, 6)

    assert 0.08 < low / (high + low) < 0.12
    assert (high + low) / 5 == pytest.approx(800, rel=0.03)


def test_without_a_share_strict_priority_leaves_nothing_to_the_class_below() -> None:
    _, batcher = saturated(terms(HIGH, replace(LOW, share=0.0)), {"high": 1.5, "low": 1.0}, 4)

    assert batcher.rows("low", 1, 4) == 0
    assert batcher.rows("high", 1, 4) == pytest.approx(2400, rel=0.03)


def test_two_closed_loop_callers_below_a_saturating_class_are_served() -> None:
    world, model = World(), terms()
    batcher = Batcher(world, 0.02)
    Clients(world, batcher, model, "high").open(1200, 6)
    low = Clients(world, batcher, model, "low").closed(2, 6)
    world.run(6)
    latencies = [world.ended[t][1] - t.arrived_s for t in low.tickets if t in world.ended]

    assert max(latencies[2:]) < 0.15  # strict priority: never
    assert batcher.rows("low", 1, 6) / 5 > 20  # a closed loop of two cannot take its tenth of 800


def test_credit_is_earned_only_while_somebody_waits() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), LOW, window=4)
    running = [world.fill(model)]
    for _ in range(100):  # high alone: low earns nothing
        world.send(model, "high", rows=4, start=running.append)
        world.gate.finished(running.pop(0), "ok")
    world.began.clear()
    for _ in range(10):
        world.send(model, "high", rows=4, start=running.append)
    for _ in range(3):
        world.send(model, "low", start=running.append)
    while running:
        world.gate.finished(running.pop(0), "ok")

    # a tenth of 4 rows each: one low request is covered after three high ones, then its own row earns too
    assert world.order() == ["high"] * 3 + ["low"] + ["high"] * 2 + ["low"] + ["high"] * 2 + ["low"] + ["high"] * 3


def test_requests_of_a_class_with_a_longest_wait_go_first_after_it_at_their_level_one() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), replace(LOW, share=0.0, max_wait_s=0.5), window=4)
    running = [world.fill(model)]
    low, _ = world.send(model, "low", start=running.append)
    for _ in range(3):
        world.send(model, "high", rows=4, start=running.append)
    world.run(0.4)
    world.gate.finished(running.pop(0), "ok")
    world.run(0.6)
    assert low not in world.began

    world.gate.finished(running.pop(0), "ok")

    assert world.began[-1] is low
    assert (low.is_promoted, low.level, low.started_s) == (True, 1, 0.6)


def test_long_waits_take_at_most_half_of_the_rows() -> None:
    model = terms(HIGH, replace(LOW, share=0.0, max_wait_s=0.3))
    _, batcher = saturated(model, {"high": 1.5, "low": 1.0}, 6)
    high, low = batcher.rows("high", 2, 6), batcher.rows("low", 2, 6)

    assert 0.47 < low / (high + low) <= 0.505


def test_what_started_below_saturation_is_not_starved_in_the_queue_of_triton() -> None:
    """Triton's queue is strict: requests of a lower level that are in it are passed by whatever the gate sends later."""
    world, model = World(), terms(HIGH, replace(LOW, share=0.0))
    batcher = Batcher(world, 0.02)
    low = Clients(world, batcher, model, "low").closed(8, 0.1)
    world.run(0.05)
    Clients(world, batcher, model, "high").open(1600, 3)
    world.run(3)
    started = [t for t in low.tickets if t.started_s]

    assert len(started) >= 8
    assert all(world.ended[t][1] - t.started_s < 0.3 for t in started)
    assert batcher.rows("high", 1, 3) / 2 == pytest.approx(800, rel=0.05)


# Predicted waits


def overload(load: float, model: ModelTerms, *, deadline_s: float | None = None, instances: int = 1) -> None:
    world = World()
    batcher = Batcher(world, 0.05, 16, instances)
    capacity = 16 * instances / 0.05
    clients = Clients(world, batcher, model, "high", deadline_s=deadline_s).open(load * capacity, 6)
    world.run(6)
    allowed_s = model.classes[0].timeout_s or deadline_s or model.classes[0].slo_s
    assert allowed_s is not None

    assert batcher.rows("high", 1, 6) / 5 >= 0.95 * capacity
    assert clients.refused
    assert {refusal.kind for _, refusal in clients.refused} == {"wait"}
    assert all(0 < refusal.retry_after_s < 1 for _, refusal in clients.refused)
    settled = [t for t in clients.tickets if t.arrived_s > 1]
    assert max(t.started_s - t.arrived_s for t in settled) < allowed_s
    assert {world.ended[t][0] for t in settled if t in world.ended} == {"ok"}
    assert world.gate.rate_rows_per_s("m") == pytest.approx(capacity, rel=0.03)

    world.run(7)
    after = Clients(world, batcher, model, "high", deadline_s=deadline_s).open(0.7 * capacity, 12)
    world.run(15)
    assert after.sent > 0.6 * capacity * 5
    assert not after.refused


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_in_an_overload_capacity_is_served_in_time_and_the_rest_is_refused_at_once(load: float) -> None:
    overload(load, terms(HIGH))


def test_an_overload_of_several_instances() -> None:
    overload(1.5, terms(HIGH, window=64), instances=3)


def test_an_overload_of_requests_with_deadlines_only() -> None:
    overload(1.5, terms(replace(HIGH, timeout_s=None)), deadline_s=0.3)


def test_a_class_without_timeout_is_held_to_its_slo() -> None:
    overload(1.5, terms(replace(HIGH, timeout_s=None, slo_s=0.3)))


def test_nothing_is_refused_by_prediction_at_nine_tenths_of_capacity() -> None:
    world, _ = saturated(terms(HIGH), {"high": 0.9}, 10)

    assert not world.refusals
    assert {status for status, _ in world.ended.values()} == {"ok"}


def test_a_class_below_is_refused_by_what_the_classes_above_leave_it() -> None:
    """Its backlog alone would fit its timeout; with what the class above takes it does not."""
    model = terms(HIGH, replace(LOW, share=0.0, timeout_s=2.0))
    world, batcher = saturated(model, {"high": 0.7, "low": 0.6}, 16)
    accepted = [t for t in world.ended if t.class_name == "low" and t.arrived_s > 4]
    late = [t for t in accepted if world.ended[t][0] == "timeout"]

    assert len(accepted) > 1500
    assert len(late) < 0.02 * len(accepted)
    assert (batcher.rows("high", 4, 16) + batcher.rows("low", 4, 16)) / 12 == pytest.approx(800, rel=0.02)


@pytest.mark.parametrize("factor", [3, 1 / 3])
def test_the_estimate_follows_a_change_of_capacity_within_about_a_second(factor: float) -> None:
    world, model = World(), terms(HIGH)
    batcher = Batcher(world, 0.02)
    clients = Clients(world, batcher, model, "high").open(1.5 * 800 * max(1, 1 / factor), 6)
    world.run(3)
    assert world.gate.rate_rows_per_s("m") == pytest.approx(800, rel=0.03)

    batcher.batch_s *= factor
    world.run(4.2)
    assert world.gate.rate_rows_per_s("m") == pytest.approx(800 / factor, rel=0.15)
    world.run(6)

    assert batcher.rows("high", 4.2, 6) / 1.8 == pytest.approx(800 / factor, rel=0.05)
    assert {world.ended[t][0] for t in clients.tickets if t.arrived_s > 4 and t in world.ended} == {"ok"}


def test_an_estimate_that_is_far_too_low_locks_nobody_out() -> None:
    world, model = World(), terms(HIGH)
    batcher = Batcher(world, 0.02)
    batcher.batch_s = 2.0
    Clients(world, batcher, model, "high").open(20, 12)
    world.run(60)
    low = world.gate.rate_rows_per_s("m")
    assert low is not None
    assert low < 20
    assert not world.gate.depth("m")["high"]

    batcher.batch_s = 0.02  # a hundred times faster from now on
    seen = len(world.refusals)
    clients = Clients(world, batcher, model, "high").open(600, 65)
    world.run(62)
    assert len(world.refusals) - seen < 10
    assert {world.ended[t][0] for t in clients.tickets if t in world.ended} == {"ok"}

    Clients(world, batcher, model, "high").open(1000, 65)
    world.run(65)
    assert batcher.rows("high", 63, 65) / 2 > 0.95 * 800


def test_failures_are_no_capacity() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None))

    def fail(ticket: Ticket) -> None:
        world.call_at(world.now + 0.0001, lambda: world.gate.finished(ticket, "unavailable"))

    for _ in range(500):
        world.send(model, start=fail)
    world.run(1)

    assert len(world.ended) == 500
    assert world.gate.rate_rows_per_s("m") is None


def test_nobody_is_refused_for_a_long_wait_while_triton_or_a_stub_is_known_to_be_away() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None))
    batcher = Batcher(world, 0.02)
    Clients(world, batcher, model, "high").open(700, 2)
    Clients(world, batcher, model, "high").open(700, 2)
    world.run(10)
    for _ in range(100):  # from now on nothing is answered
        world.send(model)
    world.run(12)
    assert world.send(model, deadline_s=15)[1] is not None, "silent for 2 s"

    world.gate.stalled(world.began[-1])

    assert world.send(model, deadline_s=15)[1] is None
    world.run(12.5)
    world.gate.finished(world.began[-1], "ok")
    assert world.gate.rate_rows_per_s("m") == pytest.approx(800), "as before: what waited for its return tells no pace"


def test_without_an_estimate_and_with_an_empty_queue_nothing_is_refused() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=0.001))
    assert [world.send(model)[1] for _ in range(40)] == [None] * 40


# Limits


@dataclass
class Limited:
    """What the gate asks of a tenant."""

    name: str = "a"
    bucket: Any = None
    concurrency: int | None = None
    queue_share: float | None = None
    in_entry: int = 0


class Tokens:
    """A bucket that never fills up."""

    def __init__(self, level: int) -> None:
        self.level = level

    def take(self, n: int) -> float:
        if n > self.level:
            return 2.5
        self.level -= n
        return 0.0


def test_a_full_queue_refuses_at_once() -> None:
    world, model = World(), terms(replace(HIGH, max_queue=2), window=1)
    refusals = [world.send(model)[1] for _ in range(5)]

    assert [refusal and refusal.kind for refusal in refusals] == [None, None, None, "queue_full", "queue_full"]
    assert refusals[3] is not None
    assert refusals[3].message == "The request to m of class high finds 2 waiting, as many as may. Retry later."
    assert refusals[3].retry_after_s > 0
    assert len(world.refusals) == 2


def test_a_queue_without_limit_takes_all() -> None:
    world, model = World(), terms(replace(HIGH, max_queue=0), window=1)
    assert [world.send(model)[1] for _ in range(3000)] == [None] * 3000


def test_a_tenant_holds_no_more_than_its_part_of_a_queue() -> None:
    world, model = World(), terms(replace(HIGH, max_queue=10), window=1)
    world.fill(model)
    greedy, other = Limited("greedy", queue_share=0.3), Limited("other", queue_share=0.3)
    mine = [world.send(model, tenant=greedy) for _ in range(5)]

    assert [refusal and refusal.kind for _, refusal in mine] == [None] * 3 + ["queue_full"] * 2
    assert world.send(model, tenant=other)[1] is None
    assert (greedy.in_entry, other.in_entry) == (3, 1)

    world.gate.leave(mine[1][0])
    assert greedy.in_entry == 2
    assert world.send(model, tenant=greedy)[1] is None


def test_a_tenant_may_always_have_one_waiting() -> None:
    world, model = World(), terms(replace(HIGH, max_queue=10), window=1)
    world.fill(model)
    assert world.send(model, tenant=Limited(queue_share=0.01))[1] is None


def test_concurrency_counts_waiting_and_running_until_triton_has_answered() -> None:
    world, model = World(), terms(window=1)
    tenant = Limited(concurrency=2)
    running, _ = world.send(model, tenant=tenant)
    world.send(model, tenant=tenant)
    _, third = world.send(model, tenant=tenant)
    assert third is not None
    assert third.kind == "concurrency"

    world.gate.leave(running)  # it is still in Triton
    assert tenant.in_entry == 2
    world.gate.finished(running, "ok")
    assert tenant.in_entry == 1
    assert world.send(model, tenant=tenant)[1] is None


def test_rows_are_taken_from_the_bucket_of_accepted_requests_only() -> None:
    world, model = World(), terms(replace(HIGH, max_queue=1), window=1)
    tenant = Limited(bucket=Tokens(10))
    for _ in range(4):
        world.send(model, rows=2, tenant=tenant)
    assert tenant.bucket.level == 6

    _, refusal = world.send(terms(name="other"), rows=7, tenant=tenant)
    assert refusal is not None
    assert (refusal.kind, refusal.retry_after_s) == ("rate", 2.5)
    assert tenant.in_entry == 2


def test_a_tenant_is_refused_before_its_request_is_read_as_submit_would() -> None:
    world, model = World(), terms(window=1)
    bucket = TokenBucket(0.5, 2.0, lambda: world.now)
    tenant = Limited(bucket=bucket, concurrency=3)
    assert world.gate.refuses_tenant(model, "high", tenant) is None
    assert bucket.level == 2.0
    for _ in range(2):
        assert world.send(model, tenant=tenant)[1] is None

    by_rate = world.gate.refuses_tenant(model, "high", tenant)
    assert by_rate is not None
    assert (by_rate.kind, by_rate.retry_after_s) == ("rate", 2.0)
    assert world.send(model, tenant=tenant)[1] == by_rate
    world.now = 2.0
    assert world.gate.refuses_tenant(model, "high", tenant) is None
    assert world.send(model, tenant=tenant)[1] is None

    by_number = world.gate.refuses_tenant(model, "high", tenant)
    assert by_number is not None
    assert by_number.kind == "concurrency"
    assert tenant.in_entry == 3
    assert [(ticket.class_name, refusal.kind) for ticket, refusal in world.refusals] == [
        ("high", "rate"),
        ("high", "rate"),
        ("high", "concurrency"),
    ]


def test_a_burst_below_one_row_lets_a_request_be_read_when_it_is_full() -> None:
    world = World()
    tenant = Limited(bucket=TokenBucket(0.1, 0.5, lambda: world.now))
    assert world.gate.refuses_tenant(terms(), "high", tenant) is None
    assert world.send(terms(), tenant=tenant)[1] is None
    refusal = world.gate.refuses_tenant(terms(), "high", tenant)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(10.0)


def test_a_class_that_the_model_does_not_have_is_refused() -> None:
    world = World()
    _, refusal = world.send(terms(), "gold")
    assert refusal is not None
    assert refusal.kind == "unknown_class"
    assert (
        refusal.message
        == "The request to m of class gold is of a class that the model does not have. It has: high, low."
    )


# Deadlines and callers who go


def test_a_request_that_comes_after_its_deadline_is_refused() -> None:
    world = World()
    world.run(1)
    _, refusal = world.send(terms(), deadline_s=1.0)
    assert refusal is not None
    assert refusal.kind == "deadline"


def test_a_waiting_and_a_running_request_are_refused_exactly_at_their_deadline() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), window=1)
    running, _ = world.send(model, deadline_s=0.25)
    waiting, _ = world.send(model, deadline_s=0.125)
    world.run(0.1249)
    assert not world.late
    world.run(1)

    assert {t: r.kind for t, r in world.late.items()} == {running: "deadline", waiting: "deadline"}
    assert world.ended == {waiting: ("timeout", 0.125), running: ("timeout", 0.25)}
    assert (running.timeout_us, waiting.started_s) == (250_000, 0.0)
    assert world.gate.rows_in_flight("m") == 1  # Triton is still at it

    world.gate.finished(running, "ok")
    assert world.gate.rows_in_flight("m") == 0
    assert world.ended[running] == ("timeout", 0.25)


def test_the_timeout_of_a_class_counts_the_wait_only() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=0.2), window=1)
    running, _ = world.send(model)
    world.run(0.1)
    second, _ = world.send(model)
    third, _ = world.send(model, deadline_s=5.0)
    world.run(0.25)
    world.gate.finished(running, "ok")
    world.run(2)

    assert second.started_s == 0.25
    assert second.timeout_us == pytest.approx(50_000, abs=1)
    assert world.late[third].kind == "wait"
    assert list(world.ended.items()) == [(running, ("ok", 0.25)), (third, ("timeout", pytest.approx(0.3)))]
    assert second not in world.late


def test_a_request_that_waited_has_its_deadline_when_it_runs() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=0.2), window=1)
    running, _ = world.send(model)
    second, _ = world.send(model, deadline_s=0.5)
    world.run(0.1)
    world.gate.finished(running, "ok")
    world.run(2)

    assert second.started_s == 0.1
    assert world.ended[second] == ("timeout", 0.5)


def test_a_dropped_request_makes_place_for_one_that_fits() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), window=4)
    world.send(model, rows=3)
    large, _ = world.send(model, rows=2, deadline_s=0.1)
    small, _ = world.send(model, rows=1)
    world.run(0.1)

    assert world.ended[large] == ("timeout", 0.1)
    assert small.started_s == 0.1


def test_deadlines_cost_one_timer_and_leave_nothing_behind() -> None:
    world, model = World(), terms(HIGH)
    for _ in range(5000):
        ticket, _ = world.send(model, deadline_s=world.now + 30)
        world.run(world.now + 0.001)
        world.gate.finished(ticket, "ok")

    assert world.alarms == 1
    assert len(world.gate._dues) < 600
    world.run(100)
    assert not world.late


def test_leaving_in_all_states() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), window=1)
    running, waiting, last = (world.send(model, deadline_s=9.0)[0] for _ in range(3))
    world.gate.leave(waiting)
    world.gate.leave(running)
    world.gate.leave(running)
    assert {t: status for t, (status, _) in world.ended.items()} == {waiting: "cancelled", running: "cancelled"}
    assert (world.gate.rows_in_flight("m"), world.gate.depth("m")) == (1, {"high": 1})

    world.gate.finished(running, "ok")
    assert world.began == [running, last]
    world.gate.finished(last, "ok")
    world.gate.leave(last)
    world.gate.finished(last, "ok")
    world.gate.finished(waiting, "ok")
    world.run(10)

    assert world.ended[last][0] == "ok"
    assert (world.gate.rows_in_flight("m"), world.gate.depth("m"), world.late) == (0, {"high": 0}, {})


# Models


def test_other_terms_are_taken_and_a_class_that_is_gone_is_still_served() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), LOW, window=1)
    first = world.fill(model)
    old, _ = world.send(model, "low")
    renamed = terms(replace(HIGH, timeout_s=None), replace(LOW, name="bulk"), window=8)
    new, _ = world.send(renamed, "bulk")

    assert world.began == [first, new, old]
    assert (world.gate.models(), world.gate.rows_in_flight("m")) == (("m",), 3)
    assert world.send(renamed, "low")[1] is not None
    for ticket in (first, old, new):
        world.gate.finished(ticket, "ok")
    assert world.gate.rows_in_flight("m") == 0


def test_equal_terms_change_nothing_and_models_do_not_share_a_window() -> None:
    world = World()
    world.fill(terms())
    world.send(terms())
    world.send(terms(name="other"))

    assert world.gate.depth("m") == {"high": 1, "low": 0}
    assert (world.gate.models(), world.gate.rows_in_flight("other")) == (("m", "other"), 1)
    assert (world.gate.depth("none"), world.gate.rows_in_flight("none"), world.gate.rate_rows_per_s("none")) == (
        {},
        0,
        None,
    )


def test_a_model_without_classes() -> None:
    world = World()
    nameless = ModelTerms("m", (ClassTerms("", 0, 1000, None),), "", 2, 0)
    ticket, _ = world.send(nameless, "")
    assert (ticket.level, ticket.timeout_us) == (0, 0)


def test_start_may_finish_its_ticket_and_submit_others() -> None:
    world, model = World(), terms(replace(HIGH, timeout_s=None), window=1)
    first = world.fill(model)
    count = itertools.count()

    def at_once(ticket: Ticket) -> None:
        if next(count) < 3000:  # far deeper than the recursion limit if the gate recursed
            world.send(model, start=at_once)
        world.gate.finished(ticket, "error")

    world.send(model, start=at_once)
    world.gate.finished(first, "ok")

    assert len(world.ended) == 3002
    assert world.gate.rows_in_flight("m") == 0


@pytest.mark.parametrize("seed", range(8))
def test_accounts_always_balance(seed: int) -> None:
    """Random requests, answers, departures, deadlines and changes of terms: nothing is lost, counted twice, or below zero."""
    choose, world = random.Random(seed), World()
    low, bulk = replace(LOW, max_queue=20), replace(LOW, name="bulk", max_wait_s=0.05)
    models = [terms(HIGH, low, window=window, name=name) for window in (1, 8, 32) for name in "ab"]
    models.append(terms(HIGH, bulk, window=8, name="a"))
    tenants = [Limited("x", concurrency=9), Limited("y", queue_share=0.2), Limited("z", bucket=Tokens(400))]
    accepted: list[Ticket] = []
    in_triton: list[Ticket] = []
    sent = 0

    def step() -> None:
        nonlocal sent
        kind = choose.random()
        if kind < 0.5:
            sent += 1
            deadline_s = world.now + choose.uniform(-0.01, 0.3) if choose.random() < 0.5 else None
            ticket, refusal = world.send(
                choose.choice(models),
                choose.choice(["high", "low", "bulk"]),
                choose.choice([0, 1, 2, 7, 40]),
                choose.choice([None, *tenants]),
                deadline_s,
                in_triton.append,
            )
            if refusal is None:
                accepted.append(ticket)
        elif kind < 0.8 and in_triton:
            statuses: tuple[Status, ...] = ("ok", "error", "rejected", "unavailable")
            world.gate.finished(in_triton.pop(choose.randrange(len(in_triton))), choose.choice(statuses))
        elif kind < 0.85 and accepted:
            world.gate.leave(choose.choice(accepted[-20:]))
        else:
            world.run(world.now + choose.expovariate(200))

    def check() -> None:
        began = set(world.began)
        waiting = [t for t in accepted if t not in began and t not in world.ended]
        assert len(began) == len(world.began)
        assert sent == len(world.refusals) + len(accepted)
        assert sum(sum(world.gate.depth(name).values()) for name in "ab") == len(waiting)
        for name in "ab":
            assert world.gate.rows_in_flight(name) == sum(t.rows for t in in_triton if t.model.name == name)
        for tenant in tenants:
            assert tenant.in_entry == sum(t.tenant is tenant for t in [*waiting, *in_triton])
        assert set(world.late) <= {t for t, (status, _) in world.ended.items() if status == "timeout"}

    for index in range(3000):
        step()
        if index % 100 == 0:
            check()
    check()
    world.run(world.now + 1)
    while in_triton:
        world.gate.finished(in_triton.pop(), "ok")
    check()

    assert set(world.ended) == set(accepted)
    assert {status for status, _ in world.ended.values()} >= {"ok", "error", "cancelled", "timeout"}
    assert not any(tenant.in_entry for tenant in tenants)
    assert all(rows == 0 for name in "ab" for rows in world.gate.depth(name).values())
