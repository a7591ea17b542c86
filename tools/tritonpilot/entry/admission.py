"""Why can a new request not be accepted? It is told at once, instead of after a wait that was in vain.

refusal = refusal_of(model, queue, ticket, fits)      # None: accept it
"""

from __future__ import annotations

import math

from tritonpilot.entry.order import Model, Queue
from tritonpilot.entry.pace import PROMOTED_PART
from tritonpilot.entry.tenants import NO_WAIT_S
from tritonpilot.entry.ticket import Refusal, Tenant, Ticket

#: Part of the allowed wait that a prediction may fill: estimates are off by some percent, and a late rejection is worse.
MARGIN = 0.9
#: The same for a class with others above it, whose load in the meantime is not known: Poisson arrivals of a few rows a batch swing
#: by a tenth of such a wait, late rejections come from three of those and from a core that slows down meanwhile.
MARGIN_BELOW = 0.6
#: Retry-After where nothing is known yet, and its upper end: nobody can predict more than that.
UNKNOWN_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0


def refusal_of(model: Model, queue: Queue | None, ticket: Ticket, fits: bool) -> Refusal | None:
    """Why the ticket cannot be accepted. The rate comes last: rows are taken from its bucket only for accepted requests."""
    now = ticket.arrived_s
    if queue is None:
        known = ", ".join(name or "the nameless one" for name in model.by_name)
        return Refusal("unknown_class", f"{whose(ticket)} is of a class that the model does not have. It has: {known}.")
    if ticket.deadline_s is not None and ticket.deadline_s <= now:
        return Refusal(
            "deadline", f"{whose(ticket)} came {now - ticket.deadline_s:.3f} s after its deadline. It was not sent."
        )
    tenant = ticket.tenant
    if tenant is not None and is_at_concurrency(tenant):
        return over_concurrency(ticket, tenant, model.pace.seconds)
    if not fits and (refusal := _no_place(queue, ticket, model) or _too_long(model, queue, ticket)):
        return refusal
    if tenant is not None and tenant.bucket is not None:
        wait_s = tenant.bucket.take(ticket.rows)
        if wait_s:
            return over_rate(ticket, tenant, wait_s)
    return None


def is_at_concurrency(tenant: Tenant) -> bool:
    """Whether the tenant has as many requests in the entry as it may."""
    return tenant.concurrency is not None and tenant.in_entry >= tenant.concurrency


def wait_for_a_row_s(tenant: Tenant) -> float:
    """Seconds until the tenant's rate allows one row, 0.0 for now. Nothing is taken."""
    bucket = tenant.bucket
    if bucket is None:
        return 0.0
    wait_s = (min(1.0, bucket.burst) - bucket.level) / bucket.rate_per_s
    return wait_s if wait_s > NO_WAIT_S else 0.0


def over_concurrency(ticket: Ticket, tenant: Tenant, typical_s: float) -> Refusal:
    """`typical_s` is how long a request takes; 0: not known."""
    return Refusal(
        "concurrency",
        f"{whose(ticket)} is one too many: the tenant {tenant.name} may have {tenant.concurrency} at a time.",
        typical_s or UNKNOWN_RETRY_S,
    )


def over_rate(ticket: Ticket, tenant: Tenant, wait_s: float) -> Refusal:
    """`wait_s` is the time until the rate allows it."""
    return Refusal(
        "rate",
        f"{whose(ticket)} is above the rate of the tenant {tenant.name}. Retry after {wait_s:.3f} s.",
        wait_s,
    )


def _no_place(queue: Queue, ticket: Ticket, model: Model) -> Refusal | None:
    most = queue.terms.max_queue
    if not most:
        return None
    after_s = retry_s(queue.rows / 2 / (model.pace.rate_rows_per_s or math.inf))
    if len(queue.tickets) >= most:
        return Refusal("queue_full", f"{whose(ticket)} finds {most} waiting, as many as may. Retry later.", after_s)
    tenant = ticket.tenant
    if tenant is not None and tenant.queue_share is not None:
        theirs = max(1, int(tenant.queue_share * most))
        if queue.waiting_of.get(tenant.name, 0) >= theirs:
            return Refusal(
                "queue_full",
                f"{whose(ticket)} finds {theirs} of the tenant {tenant.name} waiting, its part of {most}. Retry later.",
                after_s,
            )
    return None


def _too_long(model: Model, queue: Queue, ticket: Ticket) -> Refusal | None:
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
        f"{whose(ticket)} would wait about {wait_s:.3f} s and may wait {allowed_s:.3f} s. Retry later.",
        retry_s(wait_s - allowed_s),
    )


def _floors(queue: Queue, now: float) -> float:
    """The part of the capacity that goes to the classes below before the queue's own requests."""
    part = sum(lower.terms.share for lower in queue.below if lower.tickets)
    for lower in queue.below:
        max_wait_s = lower.terms.max_wait_s
        if max_wait_s is not None and lower.tickets and now - lower.head.arrived_s >= max_wait_s:
            return part + PROMOTED_PART * (1 - part)
    return part


def retry_s(seconds: float) -> float:
    """Retry-After for a wait of so long; 0 means not known."""
    return min(seconds, LONGEST_RETRY_S) or UNKNOWN_RETRY_S


def whose(ticket: Ticket) -> str:
    """The subject of a message."""
    of_class = f" of class {ticket.class_name}" if ticket.class_name else ""
    return f"The request to {ticket.model.name}{of_class}"
