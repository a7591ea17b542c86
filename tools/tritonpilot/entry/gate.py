"""Which waiting request goes to Triton next, and which is refused at once? Pure: clock and timers are given.

gate = Gate(time.monotonic, call_at, watcher)
refusal = gate.submit(Ticket(terms, "realtime", rows, tenant, deadline_s, start, refuse))   # None: accepted
gate.finished(ticket, "ok")                       # Triton has answered
gate.leave(ticket)                                # the caller went away

A request goes to Triton while its model's rows in flight stay within the window; the others wait here, in one queue per class.
Classes are served strictly by level, except that a class with a share goes first whenever its credit (share * rows that the model
started while it waited) covers its oldest request, and a class with a longest wait when its oldest request has waited that long,
for at most half of the rows. How long a new request would wait is predicted by `Pace`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tritonpilot.entry.pace import MEMORY_S, PROMOTED_PART, Pace, Turn
from tritonpilot.entry.terms import ClassTerms, ModelTerms

Kind = Literal["rate", "concurrency", "queue_full", "wait", "deadline", "unknown_class"]
Status = Literal["ok", "error", "rejected", "unavailable"]
DoneStatus = Literal["ok", "error", "rejected", "unavailable", "cancelled", "timeout"]

#: Part of the allowed wait that a prediction may fill: estimates are off by some percent, and a late rejection is worse.
MARGIN = 0.9
#: The same for a class with others above it, whose load in the meantime is not known.
MARGIN_BELOW = 0.8
#: Windows of rows that may pass a request in Triton's own queue before the gate lets Triton come to it.
PATIENCE = 2
#: Retry-After where nothing is known yet, and its upper end: nobody can predict more than that.
UNKNOWN_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
#: Credit is a sum of products: ten times 0.1 must buy one row.
_EPSILON = 1e-9
#: Ended requests may stay in the heap of due times until they are this many and outnumber the others.
_DEAD_DUES = 256

_NEW, _WAITING, _RUNNING, _ABANDONED, _OVER = range(5)


class Timer(Protocol):
    """What `call_at` gives, as asyncio.TimerHandle."""

    def cancel(self) -> None: ...


class Bucket(Protocol):
    """A token bucket of rows."""

    def take(self, n: int) -> float:
        """0.0: taken; otherwise seconds until it could be."""
        ...


class Tenant(Protocol):
    """What the gate asks of a tenant (tritonpilot.entry.tenants.Tenant)."""

    in_entry: int
    """Its requests that wait or are in Triton; the gate counts."""

    @property
    def name(self) -> str: ...
    @property
    def bucket(self) -> Bucket | None: ...
    @property
    def concurrency(self) -> int | None: ...
    @property
    def queue_share(self) -> float | None: ...


@dataclass(frozen=True)
class Refusal:
    """Why a request is not served, and when it is worth to come back."""

    kind: Kind
    message: str
    retry_after_s: float = 0.0


class Ticket:
    """One request. `level`, `timeout_us` and `started_s` are set before start() is called, which must not raise."""

    __slots__ = (
        "_due",
        "_in_flight",
        "_model",
        "_queue",
        "_state",
        "_waits_until_s",
        "arrived_s",
        "class_name",
        "deadline_s",
        "is_promoted",
        "level",
        "model",
        "refuse",
        "rows",
        "start",
        "started_s",
        "tenant",
        "timeout_us",
    )
    _model: _Model
    _queue: _Queue

    def __init__(
        self,
        model: ModelTerms,
        class_name: str,
        rows: int,
        tenant: Tenant | None,
        deadline_s: float | None,
        start: Callable[[Ticket], None],
        refuse: Callable[[Ticket, Refusal], None],
    ) -> None:
        self.model = model
        self.class_name = class_name
        self.rows = rows if rows > 0 else 1
        self.tenant = tenant
        self.deadline_s = deadline_s
        self.start = start
        self.refuse = refuse
        self.level = 0
        """Triton's priority; 0: none is set."""
        self.timeout_us = 0
        """What is left of its class's timeout and its deadline; 0: neither is set."""
        self.arrived_s = 0.0
        self.started_s = 0.0
        """0: it never went to Triton."""
        self.is_promoted = False
        """It went before a waiting request of a class above its own."""
        self._state = _NEW
        self._due: list[Any] | None = None  # its entry in the heap of due times
        self._in_flight = 0  # rows in flight when it started, if the window was full then
        self._waits_until_s = math.inf


class Watcher(Protocol):
    """Who is told what happens, for metrics. Each ticket ends in one refused() or one done()."""

    def refused(self, ticket: Ticket, refusal: Refusal) -> None:
        """submit() did not accept it."""
        ...

    def started(self, ticket: Ticket) -> None:
        """It goes to Triton."""
        ...

    def done(self, ticket: Ticket, status: DoneStatus, seconds: float) -> None:
        """An accepted ticket has its outcome, `seconds` after its arrival.

        "timeout": its deadline passed, or its class timeout while it waited (started_s is 0 if it waited); "cancelled": the caller
        went. Triton's answer to such a ticket changes nothing.
        """
        ...


class _Queue:
    """The waiting requests of one class."""

    __slots__ = (
        "below",
        "credit",
        "in_triton",
        "overtaken",
        "patience",
        "rows",
        "terms",
        "tickets",
        "turn",
        "waiting_of",
    )

    def __init__(self, terms: ClassTerms) -> None:
        self.turn = Turn()
        self.take(terms)
        self.tickets: OrderedDict[Ticket, None] = OrderedDict()
        self.rows = 0
        self.waiting_of: dict[str, int] = {}
        """Waiting requests by tenant."""
        self.credit = 0.0
        self.below: list[_Queue] = []
        """The classes below, whose requests in Triton's queue this class's requests pass."""
        self.in_triton = 0
        """Rows in flight at this class's own level."""
        self.overtaken = 0
        """Rows of classes above that started since Triton last answered one of those."""
        self.patience = PATIENCE

    def take(self, terms: ClassTerms) -> None:
        self.terms = terms
        self.turn.horizon_s = max(MEMORY_S, (terms.timeout_s or terms.slo_s or 0.0) / 4)

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket] = None
        self.rows += ticket.rows
        if ticket.tenant is not None:
            name = ticket.tenant.name
            self.waiting_of[name] = self.waiting_of.get(name, 0) + 1

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket]
        self.rows -= ticket.rows
        if not self.tickets:
            self.credit = 0.0
        if ticket.tenant is not None:
            name = ticket.tenant.name
            left = self.waiting_of[name] - 1
            if left:
                self.waiting_of[name] = left
            else:
                del self.waiting_of[name]

    @property
    def head(self) -> Ticket:
        return next(iter(self.tickets))


class _Model:
    """Queues, window and pace of one model."""

    __slots__ = (
        "by_name",
        "has_rules",
        "in_flight",
        "is_pumping",
        "most_credit",
        "order",
        "pace",
        "promotable",
        "shared",
        "terms",
        "waiting",
        "window_rows",
    )

    def __init__(self, terms: ModelTerms, now: float) -> None:
        self.in_flight = 0  # rows
        self.waiting = 0  # requests
        self.is_pumping = False
        self.promotable = 0.0
        """Rows that may still go first because of their long wait."""
        self.pace = Pace(now, [])
        self.by_name: dict[str, _Queue] = {}
        self.order: list[_Queue] = []
        self.take(terms)

    def take(self, terms: ModelTerms) -> None:
        """Serve on other terms from now on. A class that is gone is served until nobody waits in it."""
        self.terms = terms
        self.window_rows = terms.window_rows
        known = {queue.terms.name: queue for queue in self.order}
        queues = {}
        for class_terms in terms.classes:
            queue = queues[class_terms.name] = known.get(class_terms.name) or _Queue(class_terms)
            queue.take(class_terms)
        gone = [queue for name, queue in known.items() if name not in queues and queue.tickets]
        self.by_name = queues
        self.order = sorted([*queues.values(), *gone], key=lambda queue: queue.terms.level)
        for index, queue in enumerate(self.order):
            queue.below = self.order[index + 1 :]
        self.shared = [queue for queue in self.order if queue.terms.share]
        self.has_rules = bool(self.shared) or any(queue.terms.max_wait_s is not None for queue in self.order)
        self.most_credit = max(terms.window_rows, terms.max_batch_size)
        self.pace.turns = [queue.turn for queue in self.order]

    def next(self, now: float) -> tuple[_Queue, bool, bool]:
        """(the queue whose oldest request goes next, whether it goes before a class above, whether for its long wait)."""
        first = overdue = None
        for queue in self.order:
            if not queue.tickets:
                continue
            if first is None:
                first = queue
                continue
            terms = queue.terms
            if not terms.share and terms.max_wait_s is None:
                continue
            head = queue.head
            # A request that no credit can cover must not block its class for ever.
            price = min(head.rows, self.most_credit) - _EPSILON
            if terms.share and queue.credit >= price:
                return queue, True, False
            if (
                overdue is None
                and terms.max_wait_s is not None
                and now - head.arrived_s >= terms.max_wait_s
                and self.promotable >= price
            ):
                overdue = queue
        if overdue is not None:
            return overdue, True, True
        assert first is not None
        return first, False, False

    def must_hold(self, queue: _Queue) -> bool:
        """Whether requests of `queue` must wait although they would fit, since Triton starves requests of a class below.

        That is assumed once many windows of rows have passed them in Triton's own queue, which is strict. Then nothing of the
        classes above starts until Triton has answered one of them, or has nothing else left to do. If that did not help,
        they are being executed, not starved, and the next time is further off.
        """
        for lower in queue.below:
            if lower.in_triton and lower.overtaken >= lower.patience * self.window_rows:
                if self.in_flight > lower.in_triton:
                    return True
                lower.overtaken = 0
                lower.patience *= 2
        return False

    def pay(self, queue: _Queue, rows: int, is_overdue: bool) -> None:
        """Account for a request of `queue` that starts, while it is still in its queue."""
        for other in self.shared:
            if other.tickets:
                other.credit = min(other.credit + other.terms.share * rows, self.most_credit)
        queue.credit = max(0.0, queue.credit - rows)
        if is_overdue:
            self.promotable = max(0.0, self.promotable - rows)
        else:
            self.promotable = min(self.promotable + rows * PROMOTED_PART / (1 - PROMOTED_PART), self.most_credit)


class Gate:
    """All models of one process. Not thread-safe: everything happens in one event loop.

    `call_at(seconds on the clock, call)` may call a little early; the gate looks at the clock and asks again.
    """

    def __init__(
        self, clock: Callable[[], float], call_at: Callable[[float, Callable[[], None]], Timer], watch: Watcher
    ) -> None:
        self._clock = clock
        self._call_at = call_at
        self._watch = watch
        self._models: dict[str, _Model] = {}
        # One timer for the earliest due time instead of one per request. An entry is [seconds, number, ticket or None].
        self._dues: list[list[Any]] = []
        self._dead_dues = 0
        self._numbers = itertools.count()
        self._timer: Timer | None = None
        self._timer_s = math.inf

    def submit(self, ticket: Ticket) -> Refusal | None:
        """Accept the ticket (None; start() may have been called already) or refuse it at once."""
        now = self._clock()
        ticket.arrived_s = now
        terms = ticket.model
        model = self._models.get(terms.name)
        if model is None or model.terms is not terms:
            model = self._on_terms(terms)
        queue = model.by_name.get(ticket.class_name)
        fits = not model.waiting and (not model.in_flight or model.in_flight + ticket.rows <= model.window_rows)
        if fits and queue is not None and queue.below and model.must_hold(queue):
            fits = False
        tenant = ticket.tenant
        deadline_s = ticket.deadline_s
        if queue is None or not fits or tenant is not None or deadline_s is not None:
            refusal = _refusal(model, queue, ticket, fits)
            if refusal is not None:
                ticket._state = _OVER
                self._watch.refused(ticket, refusal)
                return refusal
            assert queue is not None
        if tenant is not None:
            tenant.in_entry += 1
        ticket._model = model
        ticket._queue = queue
        timeout_s = queue.terms.timeout_s
        if timeout_s is not None:
            ticket._waits_until_s = now + timeout_s
        if fits:
            if deadline_s is not None:
                self._set_due(ticket, deadline_s)
            self._start(model, queue, ticket, now)
            return None
        ticket._state = _WAITING
        queue.add(ticket)
        model.waiting += 1
        due_s = ticket._waits_until_s if deadline_s is None else min(deadline_s, ticket._waits_until_s)
        if due_s < math.inf:
            self._set_due(ticket, due_s)
        self._pump(model, now)
        return None

    def finished(self, ticket: Ticket, status: Status) -> None:
        """Triton has answered a started ticket, also one that has its outcome already: frees its place in the window.

        Does nothing for a ticket that is not in Triton.
        """
        state = ticket._state
        if state != _RUNNING and state != _ABANDONED:
            return
        now = self._clock()
        ticket._state = _OVER
        model = ticket._model
        model.in_flight -= ticket.rows
        if not ticket.is_promoted:
            queue = ticket._queue
            queue.in_triton -= ticket.rows
            queue.overtaken = 0
            queue.patience = PATIENCE
        if ticket.tenant is not None:
            ticket.tenant.in_entry -= 1
        if ticket._due is not None:
            self._clear_due(ticket)
        model.pace.finished(now, ticket.rows, now - ticket.started_s, ticket._in_flight if status == "ok" else 0)
        if state == _RUNNING:
            self._watch.done(ticket, status, now - ticket.arrived_s)
        if model.waiting:
            self._pump(model, now)

    def leave(self, ticket: Ticket) -> None:
        """The caller went: a waiting ticket is dropped, a running one keeps its place until finished()."""
        state = ticket._state
        if state != _RUNNING and state != _WAITING:
            return
        now = self._clock()
        self._end_early(ticket)
        self._watch.done(ticket, "cancelled", now - ticket.arrived_s)
        if state == _WAITING:
            self._pump(ticket._model, now)

    def depth(self, model_name: str) -> Mapping[str, int]:
        """Waiting requests by class."""
        model = self._models.get(model_name)
        return {} if model is None else {queue.terms.name: len(queue.tickets) for queue in model.order}

    def rows_in_flight(self, model_name: str) -> int:
        """Rows in Triton now."""
        model = self._models.get(model_name)
        return 0 if model is None else model.in_flight

    def rate_rows_per_s(self, model_name: str) -> float | None:
        """The model's capacity as estimated; None as long as its window was never full."""
        model = self._models.get(model_name)
        return None if model is None else model.pace.rate_rows_per_s or None

    def models(self) -> tuple[str, ...]:
        """Names of the models that had a request."""
        return tuple(self._models)

    def _on_terms(self, terms: ModelTerms) -> _Model:
        model = self._models.get(terms.name)
        if model is None:
            model = self._models[terms.name] = _Model(terms, self._clock())
        elif model.terms == terms:
            model.terms = terms
        else:
            model.take(terms)
        return model

    def _start(self, model: _Model, queue: _Queue, ticket: Ticket, now: float) -> None:
        rows = ticket.rows
        if not model.in_flight:
            model.pace.progress_s = now
        model.in_flight += rows
        queue.turn.started_rows += rows
        for lower in queue.below:
            if lower.in_triton:
                lower.overtaken += rows
        ticket._state = _RUNNING
        ticket.started_s = now
        ticket.level = queue.terms.level
        until_s = ticket._waits_until_s
        if ticket.deadline_s is not None and ticket.deadline_s < until_s:
            until_s = ticket.deadline_s
        if until_s != math.inf:
            ticket.timeout_us = max(1, int((until_s - now) * 1e6))
        if ticket.is_promoted:
            # Triton's own queue is strict too: at its own level the request could be passed over there.
            ticket.level = model.terms.classes[0].level
            queue.turn.promoted_rows += rows
        else:
            queue.in_triton += rows
        self._watch.started(ticket)
        ticket.start(ticket)

    def _pump(self, model: _Model, now: float) -> None:
        """Start what fits. start() may call the gate again: then this loop goes on, and the inner call does nothing."""
        if model.is_pumping:
            return
        model.is_pumping = True
        try:
            while model.waiting and (model.in_flight < model.window_rows or not model.in_flight):
                queue, is_promoted, is_overdue = model.next(now)
                ticket = queue.head
                if model.in_flight and (model.in_flight + ticket.rows > model.window_rows or model.must_hold(queue)):
                    return
                if model.has_rules:
                    model.pay(queue, ticket.rows, is_overdue)
                ticket.is_promoted = is_promoted
                queue.remove(ticket)
                model.waiting -= 1
                if ticket._due is not None and ticket._due[0] != ticket.deadline_s:
                    self._clear_due(ticket)  # that was the class timeout, which counts the wait only
                    if ticket.deadline_s is not None:
                        self._set_due(ticket, ticket.deadline_s)
                in_flight = model.in_flight + ticket.rows
                if model.waiting or in_flight >= model.window_rows:
                    ticket._in_flight = in_flight
                self._start(model, queue, ticket, now)
        finally:
            model.is_pumping = False

    def _end_early(self, ticket: Ticket) -> None:
        """The ticket has its outcome before Triton answered."""
        if ticket._due is not None:
            self._clear_due(ticket)
        if ticket._state == _RUNNING:
            ticket._state = _ABANDONED
            return
        ticket._state = _OVER
        ticket._queue.remove(ticket)
        ticket._model.waiting -= 1
        if ticket.tenant is not None:
            ticket.tenant.in_entry -= 1

    def _set_due(self, ticket: Ticket, due_s: float) -> None:
        ticket._due = [due_s, next(self._numbers), ticket]
        heapq.heappush(self._dues, ticket._due)
        if due_s < self._timer_s:
            self._wake_at(due_s)

    def _clear_due(self, ticket: Ticket) -> None:
        assert ticket._due is not None
        ticket._due[2] = None
        ticket._due = None
        self._dead_dues += 1
        if self._dead_dues > _DEAD_DUES and self._dead_dues * 2 > len(self._dues):
            self._dues = [entry for entry in self._dues if entry[2] is not None]
            heapq.heapify(self._dues)
            self._dead_dues = 0

    def _wake_at(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = due_s
        self._timer = self._call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_s = None, math.inf
        now = self._clock()
        try:
            while (due := self._next_due()) is not None and due[0] <= now:
                heapq.heappop(self._dues)
                ticket = due[2]
                ticket._due = None
                self._expire(ticket, now)
        finally:
            if (due := self._next_due()) is not None and due[0] < self._timer_s:
                self._wake_at(due[0])

    def _next_due(self) -> list[Any] | None:
        while self._dues and self._dues[0][2] is None:
            heapq.heappop(self._dues)
            self._dead_dues -= 1
        return self._dues[0] if self._dues else None

    def _expire(self, ticket: Ticket, now: float) -> None:
        was_waiting = ticket._state == _WAITING
        waited_s = now - ticket.arrived_s
        self._end_early(ticket)
        where = "it waited in the entry" if was_waiting else "it was in Triton"
        if ticket.deadline_s is not None and ticket.deadline_s <= now:
            refusal = Refusal(
                "deadline",
                f"{_whose(ticket)} was not answered by its deadline, {waited_s:.3f} s after it came: {where}.",
            )
        else:
            refusal = Refusal(
                "wait",
                f"{_whose(ticket)} waited {waited_s:.3f} s, as long as its class may, and was not started. Retry later.",
                _retry_s(ticket._queue.rows / (ticket._model.pace.rate_rows_per_s or math.inf)),
            )
        self._watch.done(ticket, "timeout", waited_s)
        ticket.refuse(ticket, refusal)
        if was_waiting:
            self._pump(ticket._model, now)


def _refusal(model: _Model, queue: _Queue | None, ticket: Ticket, fits: bool) -> Refusal | None:
    """Why the ticket cannot be accepted. The rate comes last: rows are taken from its bucket only for accepted requests."""
    now = ticket.arrived_s
    if queue is None:
        known = ", ".join(name or "the nameless one" for name in model.by_name)
        return Refusal(
            "unknown_class", f"{_whose(ticket)} is of a class that the model does not have. It has: {known}."
        )
    if ticket.deadline_s is not None and ticket.deadline_s <= now:
        return Refusal(
            "deadline", f"{_whose(ticket)} came {now - ticket.deadline_s:.3f} s after its deadline. It was not sent."
        )
    tenant = ticket.tenant
    if tenant is not None and tenant.concurrency is not None and tenant.in_entry >= tenant.concurrency:
        return Refusal(
            "concurrency",
            f"{_whose(ticket)} is one too many: the tenant {tenant.name} may have {tenant.concurrency} at a time.",
            model.pace.seconds or UNKNOWN_RETRY_S,
        )
    if not fits and (refusal := _no_place(queue, ticket, model) or _too_long(model, queue, ticket)):
        return refusal
    if tenant is not None and tenant.bucket is not None:
        wait_s = tenant.bucket.take(ticket.rows)
        if wait_s:
            return Refusal(
                "rate",
                f"{_whose(ticket)} is above the rate of the tenant {tenant.name}. Retry after {wait_s:.3f} s.",
                wait_s,
            )
    return None


def _no_place(queue: _Queue, ticket: Ticket, model: _Model) -> Refusal | None:
    most = queue.terms.max_queue
    if not most:
        return None
    retry_s = _retry_s(queue.rows / 2 / (model.pace.rate_rows_per_s or math.inf))
    if len(queue.tickets) >= most:
        return Refusal("queue_full", f"{_whose(ticket)} finds {most} waiting, as many as may. Retry later.", retry_s)
    tenant = ticket.tenant
    if tenant is not None and tenant.queue_share is not None:
        theirs = max(1, int(tenant.queue_share * most))
        if queue.waiting_of.get(tenant.name, 0) >= theirs:
            return Refusal(
                "queue_full",
                f"{_whose(ticket)} finds {theirs} of the tenant {tenant.name} waiting, its part of {most}. Retry later.",
                retry_s,
            )
    return None


def _too_long(model: _Model, queue: _Queue, ticket: Ticket) -> Refusal | None:
    """Refuse whose wait would be too long, unless nobody waits before it: then the estimate is put to the test."""
    turn = model.order.index(queue)
    above = sum(other.rows for other in model.order[:turn])
    rate = model.pace.rate_rows_per_s
    if not rate or not (above or queue.rows):
        return None
    terms, now = queue.terms, ticket.arrived_s
    # From its start in a batch to its answer: one batch of the whole model.
    batch_s = max(1, model.terms.max_batch_size) / rate
    allowed_s = math.inf
    if terms.timeout_s is not None:
        allowed_s = terms.timeout_s
    elif terms.slo_s is not None:
        allowed_s = terms.slo_s - batch_s
    if ticket.deadline_s is not None:
        allowed_s = min(allowed_s, ticket.deadline_s - now - batch_s)
    allowed_s = max(0.0, allowed_s * (MARGIN_BELOW if turn else MARGIN))
    if allowed_s == math.inf:
        return None
    wait_s = model.pace.wait_s(
        now,
        turn=turn,
        in_flight=model.in_flight,
        above=above,
        own=queue.rows,
        floors=_floors(queue, now),
        share=terms.share,
        max_wait_s=terms.max_wait_s,
    )
    if wait_s <= allowed_s:
        return None
    return Refusal(
        "wait",
        f"{_whose(ticket)} would wait about {wait_s:.3f} s and may wait {allowed_s:.3f} s. Retry later.",
        _retry_s(wait_s - allowed_s),
    )


def _floors(queue: _Queue, now: float) -> float:
    """The part of the capacity that goes to the classes below before the queue's own requests."""
    part = sum(lower.terms.share for lower in queue.below if lower.tickets)
    for lower in queue.below:
        max_wait_s = lower.terms.max_wait_s
        if max_wait_s is not None and lower.tickets and now - lower.head.arrived_s >= max_wait_s:
            return part + PROMOTED_PART * (1 - part)
    return part


def _retry_s(seconds: float) -> float:
    return min(seconds, LONGEST_RETRY_S) or UNKNOWN_RETRY_S


def _whose(ticket: Ticket) -> str:
    """The subject of a message."""
    of_class = f" of class {ticket.class_name}" if ticket.class_name else ""
    return f"The request to {ticket.model.name}{of_class}"
