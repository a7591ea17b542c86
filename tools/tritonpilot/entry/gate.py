"""Which waiting request goes to Triton next, and which is refused at once? Pure: clock and timers are given.

gate = Gate(time.monotonic, call_at, watcher)
refusal = gate.submit(Ticket(terms, "realtime", rows, tenant, deadline_s, start, refuse))   # None: accepted
gate.finished(ticket, "ok")                       # Triton has answered
gate.leave(ticket)                                # the caller went away

A request goes to Triton while its model's rows in flight stay within the window; the others wait here. `order` says which of them
is next, `pace` how long a new one would wait, `admission` whether it is accepted.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tritonpilot.entry.admission import (
    is_at_concurrency,
    over_concurrency,
    over_rate,
    refusal_of,
    retry_s,
    wait_for_a_row_s,
    whose,
)
from tritonpilot.entry.order import PATIENCE, Model, Queue
from tritonpilot.entry.terms import ModelTerms
from tritonpilot.entry.ticket import (
    ABANDONED,
    OVER,
    RUNNING,
    WAITING,
    DoneStatus,
    Kind,
    Refusal,
    Status,
    Tenant,
    Ticket,
    Watcher,
)

__all__ = ["DoneStatus", "Gate", "Kind", "Refusal", "Status", "Tenant", "Ticket", "Timer", "Watcher"]

#: Ended requests may stay in the heap of due times until they are this many and outnumber the others.
_DEAD_DUES = 256


class Timer(Protocol):
    """What `call_at` gives, as asyncio.TimerHandle."""

    def cancel(self) -> None: ...


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
        self._models: dict[str, Model] = {}
        # One timer for the earliest due time instead of one per request. An entry is [seconds, number, ticket or None].
        self._dues: list[list[Any]] = []
        self._dead_dues = 0
        self._numbers = itertools.count()
        self._timer: Timer | None = None
        self._timer_s = math.inf

    def refuses_tenant(self, terms: ModelTerms, class_name: str, tenant: Tenant) -> Refusal | None:
        """What submit() would say to any request of the tenant, for before the request is read: reading costs everybody.

        Takes nothing. A refusal is told to the watcher: such a request must not be submitted.
        """
        is_at = is_at_concurrency(tenant)
        wait_s = 0.0 if is_at else wait_for_a_row_s(tenant)
        if not is_at and not wait_s:
            return None
        ticket = Ticket(terms, class_name, 1, tenant, None, lambda _: None, lambda _, __: None)
        ticket._state = OVER
        ticket.arrived_s = self._clock()
        model = self._models.get(terms.name)
        if is_at:
            refusal = over_concurrency(ticket, tenant, 0.0 if model is None else model.pace.seconds)
        else:
            refusal = over_rate(ticket, tenant, wait_s)
        self._watch.refused(ticket, refusal)
        return refusal

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
            refusal = refusal_of(model, queue, ticket, fits)
            if refusal is not None:
                ticket._state = OVER
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
        ticket._state = WAITING
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
        if state != RUNNING and state != ABANDONED:
            return
        now = self._clock()
        ticket._state = OVER
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
        if state == RUNNING:
            self._watch.done(ticket, status, now - ticket.arrived_s)
        if model.waiting:
            self._pump(model, now)

    def stalled(self, ticket: Ticket) -> None:
        """A started ticket found no Triton, or a dead stub, and is sent again.

        How fast the model was does not say when it is back: nobody is refused for a long wait until it has worked again.
        """
        if ticket._state == RUNNING:
            ticket._in_flight = 0
            ticket._model.pace.rate_rows_per_s = 0.0

    def leave(self, ticket: Ticket) -> None:
        """The caller went: a waiting ticket is dropped, a running one keeps its place until finished()."""
        state = ticket._state
        if state != RUNNING and state != WAITING:
            return
        now = self._clock()
        self._end_early(ticket)
        self._watch.done(ticket, "cancelled", now - ticket.arrived_s)
        if state == WAITING:
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

    def _on_terms(self, terms: ModelTerms) -> Model:
        model = self._models.get(terms.name)
        if model is None:
            model = self._models[terms.name] = Model(terms, self._clock())
        elif model.terms == terms:
            model.terms = terms
        else:
            model.take(terms)
        return model

    def _start(self, model: Model, queue: Queue, ticket: Ticket, now: float) -> None:
        rows = ticket.rows
        if not model.in_flight:
            model.pace.progress_s = now
        model.in_flight += rows
        queue.turn.started_rows += rows
        for lower in queue.below:
            if lower.in_triton:
                lower.overtaken += rows
        ticket._state = RUNNING
        ticket.started_s = now
        ticket.level = queue.terms.level
        until_s = ticket._waits_until_s
        if ticket.deadline_s is not None and ticket.deadline_s < until_s:
            until_s = ticket.deadline_s
        if until_s != math.inf and ticket.model.may_override_timeout:
            ticket.timeout_us = max(1, int((until_s - now) * 1e6))
        if ticket.is_promoted:
            # Triton's own queue is strict too: at its own level the request could be passed over there.
            ticket.level = model.terms.classes[0].level
            queue.turn.promoted_rows += rows
        else:
            queue.in_triton += rows
        self._watch.started(ticket)
        ticket.start(ticket)

    def _pump(self, model: Model, now: float) -> None:
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
        if ticket._state == RUNNING:
            ticket._state = ABANDONED
            return
        ticket._state = OVER
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
        was_waiting = ticket._state == WAITING
        waited_s = now - ticket.arrived_s
        self._end_early(ticket)
        where = "it waited in the entry" if was_waiting else "it was in Triton"
        if ticket.deadline_s is not None and ticket.deadline_s <= now:
            refusal = Refusal(
                "deadline",
                f"{whose(ticket)} was not answered by its deadline, {waited_s:.3f} s after it came: {where}.",
            )
        else:
            refusal = Refusal(
                "wait",
                f"{whose(ticket)} waited {waited_s:.3f} s, as long as its class may, and was not started. Retry later.",
                retry_s(ticket._queue.rows / (ticket._model.pace.rate_rows_per_s or math.inf)),
            )
        self._watch.done(ticket, "timeout", waited_s)
        ticket.refuse(ticket, refusal)
        if was_waiting:
            self._pump(ticket._model, now)
