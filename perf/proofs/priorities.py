"""Does a request of a high class pass those of a low one that wait?"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from perf.frame import Bench, Outcome
from perf.open_loop import Answer, Request, Sender, outputs_of
from perf.subjects import Served, cut, priority, sample_rows, services, serving
from tritonpilot import metrics
from tritonpilot.errors import MeasurementError

TRIALS = 10
QUEUED = 200
SENT = 400  # more than have to wait: the server works on them while the rest arrives
# Batches that may be answered between the sending of the realtime request and its answer: one was executing, one was
# already handed to the instance, and two may pass while the request travels and the client's threads take turns.
MAY_BE_AHEAD = 4


@dataclass(frozen=True)
class Trial:
    """What happened to one realtime request."""

    queued: int  # batch requests in Triton's queue just before it was sent
    ahead: int  # batch requests answered between its sending and its answer
    behind: int  # batch requests answered after it
    latency_ms: float

    @property
    def overtook(self) -> bool:
        return self.ahead <= MAY_BE_AHEAD and self.behind >= self.queued - MAY_BE_AHEAD


def priority_overtakes(bench: Bench) -> Outcome:
    """Trials in which a realtime request overtook every waiting one of class batch; each of those is a full batch."""
    service = services(["ctr"])["ctr"]
    rows = sample_rows(service)
    size = service.batching.max_batch_size
    low, high = priority(service, "batch"), priority(service, "realtime")
    flood = [Request("ctr", cut(rows, i * size, size), low) for i in range(SENT)]
    urgent = Request("ctr", cut(rows, 0, 1), high)
    with (
        serving(bench, ["ctr"], is_pinned=True) as served,
        Sender(served.server.endpoints.grpc) as second,
    ):
        trials = bench.rounds(TRIALS, lambda: _trial(served, second, flood, urgent), check=served.server.check_alive)
    return Outcome(
        sum(trial.overtook for trial in trials),
        rounds=TRIALS,
        details={
            "queued_when_sent": [t.queued for t in trials],
            "answered_before_it": [t.ahead for t in trials],
            "answered_after_it": [t.behind for t in trials],
            "latency_ms": [round(t.latency_ms, 1) for t in trials],
        },
    )


def _trial(served: Served, second: Sender, flood: list[Request], urgent: Request) -> Trial:
    """The flood goes out in a thread; when enough of it waits in Triton's queue the urgent request follows."""
    answers: list[Answer] = []
    started = time.perf_counter()
    thread = threading.Thread(target=lambda: answers.extend(served.sender.send(flood)))
    thread.start()
    try:
        queued = _wait_until_queued(served, thread)
        sent = time.perf_counter() - started
        answer = second.send([urgent])[0]
    finally:
        thread.join()
    outputs_of([answer, *answers])
    done = sent + answer.answered_s
    before = sum(sent < a.answered_s <= done for a in answers)
    return Trial(queued, before, sum(a.answered_s > done for a in answers), answer.latency_ms)


def _wait_until_queued(served: Served, thread: threading.Thread) -> int:
    while thread.is_alive():
        waiting = metrics.pending(metrics.scrape(served.server.endpoints.metrics), "ctr")
        if waiting >= QUEUED:
            return waiting
    raise MeasurementError(
        f"Triton's queue never held {QUEUED} requests although {SENT} were sent at once: the client was too slow for "
        "this server. Nothing is reported. Repeat on a quiet machine."
    )
