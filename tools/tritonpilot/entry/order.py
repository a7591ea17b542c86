"""Which request of a model goes next? Its queues, its window, and the rules of floors and long waits.

Classes are served strictly by level, except that a class with a share goes first whenever its credit (share * rows that the model
started while it waited) covers its oldest request, and a class with a longest wait when its oldest request has waited that long,
for at most half of the rows.
"""

from __future__ import annotations

from collections import OrderedDict

from tritonpilot.entry.pace import MEMORY_S, PROMOTED_PART, Pace, Turn
from tritonpilot.entry.terms import ClassTerms, ModelTerms
from tritonpilot.entry.ticket import Ticket

#: Windows of rows that may pass a request in Triton's own queue before the gate lets Triton come to it.
PATIENCE = 2
#: Credit is a sum of products: ten times 0.1 must buy one row.
EPSILON = 1e-9


class Queue:
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
        self.below: list[Queue] = []
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


class Model:
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
        self.by_name: dict[str, Queue] = {}
        self.order: list[Queue] = []
        self.take(terms)

    def take(self, terms: ModelTerms) -> None:
        """Serve on other terms from now on. A class that is gone is served until nobody waits in it."""
        self.terms = terms
        self.window_rows = terms.window_rows
        known = {queue.terms.name: queue for queue in self.order}
        queues = {}
        for class_terms in terms.classes:
            queue = queues[class_terms.name] = known.get(class_terms.name) or Queue(class_terms)
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

    def next(self, now: float) -> tuple[Queue, bool, bool]:
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
            price = min(head.rows, self.most_credit) - EPSILON
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

    def must_hold(self, queue: Queue) -> bool:
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

    def pay(self, queue: Queue, rows: int, is_overdue: bool) -> None:
        """Account for a request of `queue` that starts, while it is still in its queue."""
        for other in self.shared:
            if other.tickets:
                other.credit = min(other.credit + other.terms.share * rows, self.most_credit)
        queue.credit = max(0.0, queue.credit - rows)
        if is_overdue:
            self.promotable = max(0.0, self.promotable - rows)
        else:
            self.promotable = min(self.promotable + rows * PROMOTED_PART / (1 - PROMOTED_PART), self.most_credit)
