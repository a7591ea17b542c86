"""What does Triton's dynamic batcher do next? Its rules, event by event, compiled.

    while not serve(arrival_us, servers, requests, payloads, instances, queues, sizes, jobs, 1 << 20, np.inf):    # tables of run.py
        pass

The rules are those of Triton core r24.10; functions say what they follow: `dynamic_batch_scheduler.cc` (BatcherThread,
WaitForPayloadSlotAvailable, GetDynamicBatch, Enqueue), `scheduler_utils.cc` (PriorityQueue), `rate_limiter.cc`
(PayloadSlotAvailable, DequeuePayload, resources), `instance_queue.cc` (merging), `payload.cc` (the order of callbacks).

A request is an index; queues and payloads are linked lists through `requests.after`. Times are us since the beginning of the
traffic. Everything is a row of a table, because compiled functions take tables by reference, without counting who holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Table = Any  # a numpy record array of one of the types below; Row: one of its records
Row = Any
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ANSWERED, REJECTED, TIMED_OUT, REFUSED = 0, 1, 2, 3  # codes of requests
NO_LEVEL = -1  # level of a request that Triton refuses before it queues
IDLE_WAIT_US = 500_000.0  # how long the batcher sleeps unless it is woken
WAKE_CPU_US = 110.0  # a wake, in server and stub together (docs/adr/0003-waker.md)
# pilotlib.waker: first wait, the longer one, and how many wakes a second are sent after the first.
WAKE_AFTER_US, WAKE_DELAY_MOST_US, PATIENT_US = 1000.0, 1000.0, 4000.0
WAKES_PER_US, WAKES_SAVED = 12e-6, 12.0
WORTH_WAITING, WEIGHT_OF_LAST, LOOK_AFTER = 0.5, 0.25, 8
FRONTS = 8  # requests that the front end works on at once (--http-thread-count)
QUANTILES = 101

# Where the batcher sleeps.
EMPTY, SLOT, DELAY = 0, 1, 2
# States of a payload; its queued states are one here, and an executing one takes no more requests.
NEW, SCHEDULED, EXECUTING = 0, 1, 2
# Instead of the payload of an instance: it idles, or is no more.
FREE, GONE = -1, -2
# Jobs of the front end are numbers: a request, its reply, a wake.
IN, OUT, WAKE = 0, 1, 2

INTEGERS = (
    "instances max_batch threads cores most_running most_preferred "  # what is given
    "queued_rows queued next_preferred mode current ring_head ring_tail idle pending pending_rows ordered "
    "job_head job_tail guarded_from on_cpu front_runs executions wakes following starts leaving"
)
REALS = (
    "delay_us request_us front_us front_row_us reply_us host_us host_request_us slack_us slice_us batcher_first "
    "guard_us now batcher_at executed speed resumed_at owed_us gate_at guarded_until busy_us cpu_us"
)
CLAIMS = "prefetches keeps_order has_waker is_on_cpu is_saturated is_turn"
#: One row: what is given and what changes of the server. `executed` is the clock of executions on the CPU, which runs at `speed`;
#: `owed_us` is how much longer they must have the cores until the front end has had no more than its share. Until that clock
#: shows `guarded_until`, jobs from number `guarded_from` on wait for who executes.
SERVER = np.dtype(
    [(name, "i8") for name in INTEGERS.split()]
    + [(name, "f8") for name in REALS.split()]
    + [(name, "?") for name in CLAIMS.split()]
    + [
        ("random", "u8"),
        ("factor", "f8", (QUANTILES,)),
        ("front_job", "i8", (FRONTS,)),
        ("front_ends", "f8", (FRONTS,)),
    ],
    align=True,
)
REQUEST = np.dtype(
    [("rows", "i4"), ("after", "i4"), ("level", "i2"), ("code", "i1")]
    + [(name, "f8") for name in ("patience_us", "queued_us", "expires_us", "begun_us", "done_us")],
    align=True,
)
PAYLOAD = np.dtype(
    [("head", "i4"), ("tail", "i4"), ("rows", "i4"), ("state", "i1"), ("is_done", "?"), ("oldest_us", "f8")], align=True
)
#: `ends_cpu` is on the clock `executed`, `ends_us` that of its device; inf: it is not there. One that starts is one that executes
#: an empty payload until it is up (`starts` counts them); of those that execute, the next `leaving` to end are no more then.
INSTANCE = np.dtype(
    [("payload", "i4"), ("wake_stage", "i1"), ("wake_hurried", "i1")]
    + [(name, "f8") for name in ("from_us", "ends_cpu", "device_us", "ends_us")]
    + [(name, "f8") for name in ("wake_at", "wake_budget", "wake_budget_at", "wake_came")],
    align=True,
)
#: A level: its requests, and those that wait on after their timeout (action DELAY).
QUEUE = np.dtype(
    [(name, "i4") for name in ("head", "tail", "count", "late_head", "late_tail", "late_count")]
    + [("limit", "i8"), ("delays", "?")],
    align=True,
)
#: For each number of rows: the mean time of an execution, how many there were, whether Triton prefers it.
SIZE = np.dtype(
    [("execution_us", "f8"), ("executions", "i8"), ("next_preferred", "i4"), ("is_preferred", "?")], align=True
)

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compiled(function: Compiled) -> Compiled:
    """Machine code at the first call, kept for later processes where a folder for it can be written."""
    try:
        return cast(Compiled, numba.njit(cache=True)(function))
    except RuntimeError:  # no folder for the cache
        return cast(Compiled, numba.njit(function))


@compiled
def serve(
    arrival_us: FloatArray,
    servers: Table,
    requests: Table,
    payloads: Table,
    instances: Table,
    queues: Table,
    sizes: Table,
    jobs: IntArray,
    events: int,
    until_us: float,
) -> bool:
    """Serve requests that arrive at the server, in their order, for so many events. Whether all have left, or that time has come.

    The tables have been prepared; what became of requests and of the server, and the time `now`, is read from them. `jobs` is the
    front end's FIFO, a power of two long. The next call goes on: only between calls can Python be interrupted, and settings change.
    """
    s = servers[0]
    count, following, now = len(arrival_us), s.following, s.now
    while following < count or s.queued > 0 or s.job_head < s.job_tail or s.front_runs > 0 or s.idle < s.instances:
        if events <= 0:
            s.following, s.now = following, now
            return False
        events -= 1
        at, event, place = np.inf, -1, -1
        if s.on_cpu > 0 and s.speed > 0:
            for j in range(len(instances)):
                if instances[j].ends_cpu < np.inf:
                    ends = now + max(0.0, instances[j].ends_cpu - s.executed) / s.speed
                    if ends < at:
                        at, event, place = ends, 0, j
        if (s.starts > 0 or not s.is_on_cpu) and s.idle < s.instances:
            for j in range(len(instances)):
                if instances[j].ends_us < at:
                    at, event, place = instances[j].ends_us, 1, j
        if s.front_runs > 0:
            for j in range(min(s.cores, FRONTS)):
                if s.front_ends[j] < at:
                    at, event, place = s.front_ends[j], 2, j
        if following < count and arrival_us[following] < at:
            at, event = arrival_us[following], 3
        if s.gate_at < at:
            at, event = s.gate_at, 4
        if s.batcher_at < at:
            at, event = s.batcher_at, 5
        if s.has_waker:
            for j in range(len(instances)):
                if instances[j].wake_at < at:
                    at, event, place = instances[j].wake_at, 6, j
        if at > until_us:
            s.following, s.now = following, now
            return True
        s.executed += s.speed * (at - now)
        now = at
        is_notified, is_timer, ending = False, False, -1
        if event == 0:
            leave_cpu(now, s, instances[place])
            if instances[place].device_us > 0:
                instances[place].ends_us = now + instances[place].device_us
            else:
                ending = place
        elif event == 1:
            instances[place].ends_us = np.inf
            ending = place
        elif event == 2:
            s.front_ends[place] = np.inf
            s.front_runs -= 1
            is_notified = finish(now, s.front_job[place], s, requests, payloads, instances, queues, jobs)
        elif event == 3:
            add_job(s, jobs, following * 3 + IN)
            following += 1
        elif event == 4:
            s.gate_at = np.inf
            if s.is_turn:
                s.owed_us, s.is_turn = 0.0, False
            else:
                s.guarded_until = -np.inf
        elif event == 5:
            is_notified = is_timer = True
        else:
            wake(now, place, s, instances[place], jobs)
        if ending >= 0:
            is_notified = close(now, ending, s, requests, payloads, instances, jobs)
        # NOTE: one place calls the batcher, because every call costs seconds of compilation.
        while True:
            if is_notified:
                batcher(now, is_timer, s, requests, payloads, instances, queues, sizes, jobs)
            if ending >= 0:
                is_notified = release(now, ending, not is_notified, s, requests, payloads, instances, sizes)
                ending = -1
                if is_notified:
                    continue
            is_notified = run_front(now, s, requests, payloads, instances, queues, jobs)
            is_timer = False
            if not is_notified:
                break
        is_at_rest = s.queued == 0 and s.idle == s.instances and s.job_head == s.job_tail and s.front_runs == 0
        if event == 5 and is_at_rest and following < count and arrival_us[following] > s.batcher_at:
            # Looks at an empty queue change nothing.
            s.batcher_at += IDLE_WAIT_US * np.floor((arrival_us[following] - s.batcher_at) / IDLE_WAIT_US)
    s.following, s.now = following, now
    return True


# The front end: cores that requests, replies and wakes share with executions.


@compiled
def add_job(s: Row, jobs: IntArray, job: int) -> None:
    jobs[s.job_tail & (len(jobs) - 1)] = job
    s.job_tail += 1


@compiled
def run_front(
    now: float, s: Row, requests: Table, payloads: Table, instances: Table, queues: Table, jobs: IntArray
) -> bool:
    """Begin waiting jobs where a core is free, or the front end's turn. Whether one has notified the batcher.

    As Linux shares cores: who wakes up gets the core when who has it has run for a first slice (`guard_us`) or sleeps, unless its
    side has had more than its share.
    """
    is_notified = False
    while s.job_head < s.job_tail:
        job = jobs[s.job_head & (len(jobs) - 1)]
        kind = job % 3
        work_us = WAKE_CPU_US
        if kind == IN:
            work_us = s.front_us + s.front_row_us * requests[job // 3].rows
        elif kind == OUT:
            work_us = s.reply_us
        if work_us <= 0:
            s.job_head += 1
            is_notified = finish(now, job, s, requests, payloads, instances, queues, jobs)
            if is_notified:
                break
            continue
        if s.front_runs >= min(s.cores, FRONTS):
            break
        if s.on_cpu > 0 and s.cores - s.front_runs - s.on_cpu * s.threads < 1:
            pay_back(now, s)
            if s.executed < s.guarded_until and s.job_head >= s.guarded_from:
                set_speed(s)
                s.resumed_at, s.gate_at = now, now + (s.guarded_until - s.executed) / s.speed
                break
            if s.is_turn or s.owed_us >= s.slice_us:
                s.is_turn = True
                s.resumed_at, s.gate_at = now, now + s.owed_us
                break
            s.resumed_at = np.inf
            s.owed_us += work_us * owed_share(s)
        s.job_head += 1
        place = 0
        while s.front_ends[place] < np.inf:
            place += 1
        s.front_job[place] = job
        s.front_ends[place] = now + work_us
        s.front_runs += 1
        s.cpu_us += work_us
    if s.on_cpu > 0:
        if s.front_runs == 0 and s.resumed_at == np.inf:
            s.resumed_at = now
        set_speed(s)
    return is_notified


@compiled
def pay_back(now: float, s: Row) -> None:
    """Executions have had the cores since `resumed_at`."""
    if s.resumed_at < np.inf:
        s.owed_us = max(0.0, s.owed_us - (now - s.resumed_at))
        s.resumed_at = now


@compiled
def owed_share(s: Row) -> float:
    """How long executions must have the cores for each us that a job of the front end takes from them: every thread as long."""
    own = s.on_cpu * s.threads
    others = min(s.job_tail - s.job_head + s.front_runs, FRONTS)
    return float(own / (others * s.cores) if own >= s.cores else s.cores / (own * (own + others - s.cores)))


@compiled
def set_speed(s: Row) -> None:
    s.speed = min(1.0, (s.cores - s.front_runs) / (s.on_cpu * s.threads)) if s.on_cpu > 0 else 0.0


@compiled
def finish(
    now: float, job: int, s: Row, requests: Table, payloads: Table, instances: Table, queues: Table, jobs: IntArray
) -> bool:
    """A job of the front end is done. Whether the batcher is notified: DynamicBatchScheduler::Enqueue for what came in."""
    place, kind = job // 3, job % 3
    if kind == OUT:
        requests[place].done_us = now
        return False
    if kind == WAKE:
        instances[place].wake_at = np.inf
        return bool(s.queued > 0 and is_due(s, payloads, 1) and has_slot(s))
    return enqueue(now, place, s, requests, queues, jobs) and is_due(s, payloads, 0) and has_slot(s)


# The queue: PriorityQueue in scheduler_utils.cc.


@compiled
def enqueue(now: float, place: int, s: Row, requests: Table, queues: Table, jobs: IntArray) -> bool:
    """Whether the request waits in its queue now."""
    request = requests[place]
    if request.level == NO_LEVEL:
        fail(place, REFUSED, s, requests, jobs)
        return False
    s.queued_rows += request.rows  # NOTE: before the limit is looked at, so refused rows stay counted, as in Triton
    queue = queues[request.level]
    if queue.limit > 0 and queue.count + queue.late_count >= queue.limit:
        fail(place, REJECTED, s, requests, jobs)
        return False
    request.queued_us = now
    request.expires_us = now + request.patience_us if request.patience_us > 0 else 0.0
    request.after = -1
    if queue.count == 0:
        queue.head = place
    else:
        requests[queue.tail].after = place
    queue.tail = place
    queue.count += 1
    s.queued += 1
    return True


@compiled
def is_due(s: Row, payloads: Table, more_rows: int) -> bool:
    """Whether an arrival wakes the batcher, given that a slot is free."""
    is_stale = s.is_saturated or payloads[s.current].state == EXECUTING
    return bool(is_stale or s.queued_rows + more_rows >= s.next_preferred)


@compiled
def has_slot(s: Row) -> bool:
    """RateLimiter::PayloadSlotAvailable; with the rate limiter on, payloads wait outside of the queue that it looks at."""
    waiting = s.ring_tail - s.ring_head
    if s.prefetches:
        return bool(s.most_running > 0 or waiting < 2 * s.instances)
    return bool(s.idle - waiting > 0)


@compiled
def dequeue(s: Row, requests: Table, queues: Table) -> int:
    own = 0
    while queues[own].count == 0 and queues[own].late_count == 0:
        own += 1
    queue = queues[own]
    s.queued -= 1
    if queue.count > 0:
        place = queue.head
        queue.head = requests[place].after
        queue.count -= 1
    else:
        place = queue.late_head
        queue.late_head = requests[place].after
        queue.late_count -= 1
    return int(place)


@compiled
def fail(place: int, code: int, s: Row, requests: Table, jobs: IntArray) -> None:
    requests[place].code = code
    add_job(s, jobs, place * 3 + OUT)


@compiled
def expire(before: int, place: int, s: Row, queue: Row, requests: Table, jobs: IntArray) -> int:
    """Take a request whose time is over out of its queue; `before` is the one in front of it, -1: none. The rows that left."""
    request = requests[place]
    if before < 0:
        queue.head = request.after
    else:
        requests[before].after = request.after
    if queue.tail == place:
        queue.tail = before
    queue.count -= 1
    if queue.delays:
        request.after = -1
        if queue.late_count == 0:
            queue.late_head = place
        else:
            requests[queue.late_tail].after = place
        queue.late_tail = place
        queue.late_count += 1
        return 0
    s.queued -= 1
    fail(place, TIMED_OUT, s, requests, jobs)
    return int(request.rows)


@compiled
def reject_timeouts(now: float, s: Row, requests: Table, queues: Table, jobs: IntArray) -> None:
    """PriorityQueue::RejectTimeoutRequests: what has expired in queues that reject."""
    for own in range(len(queues)):
        if queues[own].delays:
            continue
        before = -1
        place = queues[own].head if queues[own].count > 0 else -1
        while place >= 0:
            following = requests[place].after
            if requests[place].expires_us != 0 and now > requests[place].expires_us:
                expire(before, place, s, queues[own], requests, jobs)
            else:
                before = place
            place = following


# The batcher's thread.


@compiled
def batcher(
    now: float,
    is_timer: bool,
    s: Row,
    requests: Table,
    payloads: Table,
    instances: Table,
    queues: Table,
    sizes: Table,
    jobs: IntArray,
) -> None:
    """DynamicBatchScheduler::BatcherThread from where it sleeps until it sleeps again."""
    is_past_slot = s.mode == SLOT
    if is_past_slot and not has_slot(s):
        if is_timer:
            reject_timeouts(now, s, requests, queues, jobs)
            s.batcher_at = now + IDLE_WAIT_US
        return
    while True:
        if not is_past_slot:
            if s.is_saturated or payloads[s.current].state == EXECUTING:
                new_payload(s, payloads)
            if s.queued == 0:
                s.mode = EMPTY
                s.batcher_at = now + IDLE_WAIT_US
                return
            if not has_slot(s):
                s.mode = SLOT
                s.batcher_at = now + IDLE_WAIT_US
                return
        is_past_slot = False
        if payloads[s.current].state == EXECUTING:
            continue
        wait_us = dynamic_batch(now, s, requests, payloads, queues, sizes, jobs)
        if wait_us > 0:
            s.mode = DELAY
            s.batcher_at = now + wait_us + s.slack_us
            return
        if s.pending > 0:
            for _ in range(s.pending):
                put(dequeue(s, requests, queues), requests, payloads[s.current])
            s.queued_rows -= s.pending_rows
            if payloads[s.current].state == NEW:
                payloads[s.current].state = SCHEDULED
                s.ring_tail = s.current + 1
                take(now, s, requests, payloads, instances, sizes)


@compiled
def new_payload(s: Row, payloads: Table) -> None:
    if s.current < s.ring_tail:
        s.current += 1
    payload = payloads[s.current]
    payload.head, payload.rows, payload.state = -1, 0, NEW
    s.is_saturated = False
    s.next_preferred = 0


@compiled
def put(place: int, requests: Table, payload: Row) -> None:
    request = requests[place]
    request.after = -1
    if payload.head < 0:
        payload.head = place
        payload.oldest_us = request.queued_us
    else:
        requests[payload.tail].after = place
        payload.oldest_us = min(payload.oldest_us, request.queued_us)
    payload.tail = place
    payload.rows += request.rows


@compiled
def dynamic_batch(
    now: float, s: Row, requests: Table, payloads: Table, queues: Table, sizes: Table, jobs: IntArray
) -> float:
    """DynamicBatchScheduler::GetDynamicBatch: how many requests from the front go now, in `s.pending`, or how long to wait, us.

    The cursor always starts anew: Triton keeps it only while no request in front of it has expired, and then finds the same.
    """
    held = payloads[s.current].rows
    own, is_late, before = 0, False, -1
    place = queues[0].head if queues[0].count > 0 else -1
    pending, rows, best, best_count = 0, 0, 0, 0
    oldest_us, closest_us = np.inf, np.inf
    send_now = False
    while True:
        while True:  # PriorityQueue::ApplyPolicyAtCursor: on to a request that has not expired
            if not is_late:
                while place >= 0 and requests[place].expires_us != 0 and now > requests[place].expires_us:
                    following = requests[place].after
                    s.queued_rows -= expire(before, place, s, queues[own], requests, jobs)
                    place = following
                if place < 0:
                    is_late = True
                    place = queues[own].late_head if queues[own].late_count > 0 else -1
            if place >= 0 or s.queued <= pending or own + 1 >= len(queues):
                break
            own, is_late, before = own + 1, False, -1
            place = queues[own].head if queues[own].count > 0 else -1
        if pending >= s.queued or place < 0:
            break
        request = requests[place]
        if held + rows > 0:
            if held + rows + request.rows > s.most_preferred and best == 0:
                best, best_count = rows, pending
                s.is_saturated = True
            if held + rows + request.rows > s.max_batch:
                send_now = True
                break
        pending += 1
        rows += request.rows
        oldest_us = min(oldest_us, request.queued_us)
        if not is_late and request.expires_us != 0:
            closest_us = min(closest_us, request.expires_us)
        before = place
        place = request.after
        if sizes[held + rows].is_preferred:
            best, best_count = rows, pending
    s.pending, s.pending_rows = pending, rows
    delay_us = now - oldest_us
    is_exceeded = s.delay_us > 0 and pending > 0 and delay_us >= s.delay_us
    if best != 0 and not is_exceeded:
        if s.delay_us == 0:
            s.is_saturated = True
        s.pending, s.pending_rows = best_count, best
        return 0.0
    if pending == 0:
        return 0.0
    if send_now or held + rows >= s.most_preferred:
        s.is_saturated = True
        return 0.0
    if is_exceeded or s.delay_us == 0:
        return 0.0
    s.next_preferred = sizes[held + rows].next_preferred - held
    if not s.is_saturated and held != 0 and not sizes[held].is_preferred:
        return 0.0
    wait_us = s.delay_us - delay_us
    if closest_us < np.inf:
        wait_us = min(closest_us - now, wait_us) if now <= closest_us else 1.0
    return float(int(wait_us))


# Instances.


@compiled
def take(now: float, s: Row, requests: Table, payloads: Table, instances: Table, sizes: Table) -> bool:
    """RateLimiter::DequeuePayload of an idle instance, where there is one and a payload waits. Whether it took one."""
    if s.ring_head >= s.ring_tail or s.idle == 0:
        return False
    if s.most_running > 0 and s.instances - s.idle >= s.most_running:
        return False
    payload = payloads[s.ring_head]
    number = s.ring_head
    payload.state = EXECUTING
    s.ring_head += 1
    if s.delay_us > 0 and s.max_batch > 1 and s.most_running == 0:  # InstanceQueue::Dequeue
        while s.ring_head < s.ring_tail:
            other = payloads[s.ring_head]
            if not now - other.oldest_us > s.delay_us:
                break
            other.state = EXECUTING  # NOTE: also where it does not fit, and then it takes no more requests
            if payload.rows + other.rows > s.max_batch:
                break
            requests[payload.tail].after = other.head
            payload.tail = other.tail
            payload.rows += other.rows
            other.head = -1
            other.is_done = True
            s.ring_head += 1
    place = 0
    while instances[place].payload != FREE:
        place += 1
    begin(now, number, s, requests, payload, instances[place], sizes)
    return True


@compiled
def begin(now: float, number: int, s: Row, requests: Table, payload: Row, instance: Row, sizes: Table) -> None:
    """An execution begins."""
    count = 0
    place = payload.head
    while place >= 0:
        requests[place].begun_us = now
        count += 1
        place = requests[place].after
    total_us = (sizes[payload.rows].execution_us + s.request_us * count) * drawn_factor(s)
    cpu_us = total_us if s.is_on_cpu else min(total_us, s.host_us + s.host_request_us * count)
    s.cpu_us += cpu_us * s.threads if s.is_on_cpu else cpu_us
    sizes[payload.rows].executions += 1
    s.executions += 1
    s.idle -= 1
    instance.payload = number
    instance.from_us = now
    instance.device_us = total_us - cpu_us
    if instance.wake_stage == 1 and instance.wake_at < np.inf:
        instance.wake_came += WEIGHT_OF_LAST * (1.0 - instance.wake_came)
    instance.wake_at = np.inf
    if cpu_us <= 0 < total_us:
        instance.ends_us = now + total_us
        return
    instance.ends_cpu = s.executed + cpu_us
    if s.on_cpu == 0:  # who waits already has the core first: the execution wakes up behind them
        s.guarded_until, s.guarded_from = s.executed + s.guard_us, s.job_tail
    s.on_cpu += 1
    if s.on_cpu == 1:  # it does not take the core from jobs that wait
        s.resumed_at = np.inf if s.front_runs > 0 or s.job_head < s.job_tail else now
    set_speed(s)


@compiled
def leave_cpu(now: float, s: Row, instance: Row) -> None:
    instance.ends_cpu = np.inf
    pay_back(now, s)
    s.on_cpu -= 1
    s.gate_at, s.is_turn = np.inf, False
    set_speed(s)


@compiled
def close(now: float, place: int, s: Row, requests: Table, payloads: Table, instances: Table, jobs: IntArray) -> bool:
    """An execution has ended and its answers leave (Payload::Execute in payload.cc). Whether the batcher looks before `release`.

    Triton notifies the batcher before the instance is free again, and which of the two threads runs first is chance.
    """
    instance = instances[place]
    payload = payloads[instance.payload]
    s.busy_us += now - instance.from_us
    payload.is_done = True
    if s.keeps_order:
        while s.ordered < s.ring_head and payloads[s.ordered].is_done:
            answer(s, requests, payloads[s.ordered], jobs)
            s.ordered += 1
    else:
        answer(s, requests, payload, jobs)
    return bool(s.batcher_first > 0 and (s.batcher_first >= 1 or uniform(s) < s.batcher_first))


@compiled
def release(
    now: float,
    place: int,
    is_notified: bool,
    s: Row,
    requests: Table,
    payloads: Table,
    instances: Table,
    sizes: Table,
) -> bool:
    """The instance asks for its next payload. Whether the batcher looks then: notified by the end, or by a payload that began."""
    instance = instances[place]
    if s.leaving > 0:
        instance.payload = GONE
        s.leaving -= 1
        s.instances -= 1
        return is_notified
    instance.payload = FREE
    s.idle += 1
    if s.has_waker:
        instance.wake_at = now + WAKE_AFTER_US + min(s.delay_us, WAKE_DELAY_MOST_US) + s.slack_us
        instance.wake_stage = 0
    return take(now, s, requests, payloads, instances, sizes) or is_notified


@compiled
def answer(s: Row, requests: Table, payload: Row, jobs: IntArray) -> None:
    place = payload.head
    while place >= 0:
        add_job(s, jobs, place * 3 + OUT)
        place = requests[place].after


@compiled
def wake(now: float, place: int, s: Row, instance: Row, jobs: IntArray) -> None:
    """The alarm of pilotlib.waker rings: a wake now, or a longer wait first."""
    instance.wake_budget = min(WAKES_SAVED, instance.wake_budget + (now - instance.wake_budget_at) * WAKES_PER_US)
    instance.wake_budget_at = now
    if instance.wake_stage == 0 and instance.wake_budget < 1:
        if instance.wake_came >= WORTH_WAITING or instance.wake_hurried >= LOOK_AFTER:
            instance.wake_hurried = 0
            instance.wake_stage = 1
            instance.wake_at = now + PATIENT_US
            return
        instance.wake_hurried += 1
    if instance.wake_stage == 1:
        instance.wake_came -= WEIGHT_OF_LAST * instance.wake_came
    instance.wake_budget = max(0.0, instance.wake_budget - 1)
    instance.wake_stage = 2
    instance.wake_at = np.inf
    s.wakes += 1
    add_job(s, jobs, place * 3 + WAKE)


# Chance (splitmix64 of Steele, Lea and Flood, 2014).


@compiled
def uniform(s: Row) -> float:
    s.random += np.uint64(0x9E3779B97F4A7C15)
    z = s.random
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) / 9007199254740992.0


@compiled
def drawn_factor(s: Row) -> float:
    """A value of the distribution with these quantiles."""
    if s.factor[0] == s.factor[QUANTILES - 1]:
        return float(s.factor[0])
    place = uniform(s) * (QUANTILES - 1)
    below = int(place)
    return float(s.factor[below] + (place - below) * (s.factor[below + 1] - s.factor[below]))
