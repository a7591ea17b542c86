"""Which waiting request goes to Triton next, and which is refused at once? Pure: clock and timers are given.

gate = Gate(loop.time, loop.call_at, watcher)
refusal = gate.submit(Ticket(terms, "realtime", rows, tenant, deadline_s, start, refuse))   # None: accepted
gate.finished(ticket, "ok")                       # Triton has answered
gate.leave(ticket)                                # the caller went away
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from tritonpilot.entry.terms import ModelTerms

Kind = Literal["rate", "concurrency", "queue_full", "wait", "deadline", "unknown_class"]
Status = Literal["ok", "error", "rejected", "unavailable"]
DoneStatus = Literal["ok", "error", "rejected", "unavailable", "cancelled", "timeout"]


class Timer(Protocol):
    """What `call_at` gives: asyncio.TimerHandle."""

    def cancel(self) -> None: ...


class Bucket(Protocol):
    """A token bucket of rows."""

    def take(self, n: int) -> float:
        """0.0: taken; otherwise seconds until it could be."""
        ...


class Tenant(Protocol):
    """What the gate asks of a tenant (tritonpilot.entry.tenants.Tenant)."""

    in_entry: int

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
    """Why a request was not served, and when it is worth to come back."""

    kind: Kind
    message: str
    retry_after_s: float = 0.0


class Ticket:
    """One request, from submit() to its outcome. `level`, `timeout_us` and `started_s` are set before start() is called."""

    __slots__ = (
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
        self.rows = rows
        self.tenant = tenant
        self.deadline_s = deadline_s
        self.start = start
        self.refuse = refuse
        self.level = 0
        self.timeout_us = 0
        self.arrived_s = 0.0
        self.started_s = 0.0
        self.is_promoted = False


class Watcher(Protocol):
    """Who is told what happens, for metrics."""

    def refused(self, ticket: Ticket, refusal: Refusal) -> None:
        """Refused by submit(), or later at its deadline or class timeout while it waited."""
        ...

    def started(self, ticket: Ticket) -> None: ...

    def done(self, ticket: Ticket, status: DoneStatus, seconds: float) -> None:
        """An accepted ticket has its outcome, `seconds` after its arrival."""
        ...


class Gate:
    """All models of one process. Not thread-safe: everything happens in one event loop."""

    def __init__(
        self, clock: Callable[[], float], call_at: Callable[[float, Callable[[], None]], Timer], watch: Watcher
    ) -> None:
        self._clock = clock
        self._call_at = call_at
        self._watch = watch

    def submit(self, ticket: Ticket) -> Refusal | None:
        """Accept the ticket (None; start() may have been called already) or refuse it at once."""
        raise NotImplementedError

    def finished(self, ticket: Ticket, status: Status) -> None:
        """Triton has answered a started ticket, also one whose caller is gone: frees its place in the window."""
        raise NotImplementedError

    def leave(self, ticket: Ticket) -> None:
        """The caller went: a waiting ticket is dropped, a running one keeps its place until finished()."""
        raise NotImplementedError

    def depth(self, model_name: str) -> Mapping[str, int]:
        """Waiting requests by class."""
        raise NotImplementedError

    def rows_in_flight(self, model_name: str) -> int:
        raise NotImplementedError

    def rate_rows_per_s(self, model_name: str) -> float | None:
        """Estimated capacity; None before the first estimate."""
        raise NotImplementedError

    def models(self) -> tuple[str, ...]:
        """Names of the models that had a request."""
        raise NotImplementedError
