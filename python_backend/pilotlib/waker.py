"""How does a queued request get out of Triton's 500 ms stall? By the arrival of another one, which the waker sends.

With priority levels or any queue policy, Triton's dynamic batcher can miss that the instance has become free and then
sleeps until the next arrival or 500 ms (core, dynamic_batch_scheduler.cc: WaitForPayloadSlotAvailable). So when an
execution has ended and no new one begins within about 1 ms, one daemon thread sends the model a request that expires in
the queue at once: it is never executed, and its arrival wakes the batcher.

    waker = Waker(send, read, after_us=1000); waker.began(); ...; waker.ended(); waker.stop()

`began` and `ended` are on the hot path: a counter and a kernel timer (pilotlib.alarm), 1 us each. The thread sleeps until the
timer rings: not at all under load, and not without traffic.

One queue it cannot reach: that of a copy which retires because a new version was loaded. Triton no longer finds a retiring
version, so the last executions that its queue holds may each wait 500 ms.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlib.alarm import Alarm

WAKE_ID = "pilot-wake"  # request_id of wakes, for who reads a log
WAKE_ANSWER = "a wake request is never executed"  # what `execute` answers to it
EXPIRED = "timeout expired"  # what Triton's core answers to a request that was rejected in the queue for its age
NOT_READY = "is not at ready state"  # what it answers before a version serves and when it retires
WAIT_MAX_S = 0.016  # wakes wait 1, 2, 4, 8, 16, 16 ... ms for each other
WAKES_MAX = 36  # on their way at once: then Triton's own 500 ms are over
EXECUTED_IN_A_ROW = 3  # how often an executed wake is followed by another before real work comes
FAILURES_TOLD = 3  # a server that starts or stops refuses one or two; only more of them are worth a line in the log
COUNT_EVERY_S = 1.0
# A wake costs 0.2 to 0.7 ms of CPU time, so that a saturated model whose answers bring the next requests, only later than the waker
# waits, would spend 2 % of a core on wakes that are for nothing. Beyond so many a second the waker waits longer first,
WAKES_PER_S, WAKES_SAVED = 12.0, 12.0
PATIENT_S = 0.004  # so much longer,
# as long as that is worth it: when fewer of these waits end by an execution, it does so only to see whether that has changed.
WORTH_WAITING, WEIGHT_OF_LAST, LOOK_AFTER = 0.5, 0.25, 8
REST_AFTER_S = 0.1  # without a wake: then the line to the server is given back
QUEUE_DELAY_MAX_US = 1000
BACK_OFF_MIN_S = 0.1
BACK_OFF_MAX_S = 1.0


@dataclass(frozen=True)
class WakePlan:
    """Whether a model needs the waker, and whether its queue rejects wakes, with the reason."""

    is_needed: bool
    is_rejected: bool
    reason: str


def plan(config: Mapping[str, Any], wake_priority: int = 0) -> WakePlan:
    """Decide from a model config in JSON form and the priority level of wakes (0: the default level).

    A wake carries a timeout of 1 us. It expires in the queue when that level's policy says REJECT and has a default
    timeout of 1 us, or a longer one (Triton needs it to be non-zero) that requests may override.
    """
    batching = config.get("dynamic_batching")
    if batching is None:
        return WakePlan(False, False, "without dynamic_batching requests go straight to the instances: no stall")
    levels = int(batching.get("priority_levels", 0) or 0)
    default = batching.get("default_queue_policy") or {}
    if levels == 0 and not _is_policy(default):
        return WakePlan(False, False, "without priority levels or a queue policy the batcher prefetches: no stall")
    # Triton takes a level outside the levels for the default one.
    default_level = int(batching.get("default_priority_level", 0) or 0)
    level = wake_priority if 1 <= wake_priority <= levels else default_level
    policies = batching.get("priority_queue_policy") or {}
    policy = policies.get(str(level), policies.get(level, default)) if levels else default
    timeout_us = int(policy.get("default_timeout_microseconds", 0) or 0)
    is_reject = policy.get("timeout_action", "REJECT") in ("REJECT", 0)
    if is_reject and timeout_us > 0 and (policy.get("allow_timeout_override") or timeout_us <= 1):
        return WakePlan(True, True, f"the queue of priority level {level} rejects wake requests")
    return WakePlan(
        True,
        False,
        f"the queue of priority level {level} cannot reject wake requests: they reach the instance and are turned away "
        "there. Give that level's queue policy timeout_action: REJECT, allow_timeout_override: true and a "
        "default_timeout_microseconds above 0 (an hour will do)",
    )


def wait_us(config: Mapping[str, Any], after_us: int) -> int:
    """How long an instance is idle before its batcher is woken: `after_us`, and the queue delay of up to 1 ms on top.

    While the batcher gathers requests for its queue delay it is not stalled, and a wake is for nothing: without this a third
    of ctr's executions under full load were followed by one, at 110 us of CPU time each.
    """
    delay_us = int(config["dynamic_batching"].get("max_queue_delay_microseconds", 0) or 0)
    return after_us + min(delay_us, QUEUE_DELAY_MAX_US)


class Waker:
    """Watches executions from one daemon thread and sends wakes when the instance has gone idle.

    `send` sends one wake and returns its connection without waiting; `read` takes the answer from a connection that has
    become readable, and closes or keeps it. Both may raise OSError. `rest` closes what is kept, soon after the last wake.
    `count` gets the number of wakes sent, at most once a second, and all of them a second after the last one; `complain` a line
    when wakes keep failing. All are called on the waker's thread. Executions of nothing but wakes are not counted.
    """

    def __init__(
        self,
        send: Callable[[], socket.socket],
        read: Callable[[socket.socket], str],
        *,
        after_us: int = 1000,
        complain: Callable[[str], None] = print,
        count: Callable[[int], None] | None = None,
        rest: Callable[[], None] | None = None,
    ) -> None:
        self._send = send
        self._read = read
        self._rest = rest
        self._count = count
        self._complain = complain
        self._after_s = after_us / 1e6
        self._failures = 0
        self._uncounted = 0
        self._count_at = 0.0
        self._budget = WAKES_SAVED
        self._budget_at = time.monotonic()
        self._came_by_itself = 1.0  # share of the longer waits, the last ones counting most
        self._hurried = 0
        self._begun = 0
        self._ended = 0
        self._alarm = Alarm(self._after_s)
        self._is_stopping = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="pilot-waker", daemon=True)
        self._thread.start()

    def began(self) -> None:
        """Call first in every `execute`."""
        self._begun += 1
        self._alarm.clear()

    def ended(self) -> None:
        """Call last in every `execute`."""
        self._ended += 1
        self._alarm.set()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the thread; give up waiting for it after `timeout_s`. No `began` or `ended` may follow."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self._stopping.set()
        self._alarm.ring()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._alarm.close()

    def _watch(self) -> None:
        handled = 0  # executions after which the model has been woken
        is_resting = True
        while not self._is_stopping:
            if not self._alarm.wait(self._until_next(is_resting)):
                if not is_resting:
                    self._give_back()
                is_resting = True
                self._tell_count()
                continue
            seen = self._begun
            # It can ring while the next execution begins.
            if self._is_idle(seen) and seen != handled and not self._can_afford() and self._is_worth_waiting():
                self._stopping.wait(PATIENT_S)
                self._came_by_itself += WEIGHT_OF_LAST * ((not self._is_idle(seen)) - self._came_by_itself)
            if self._is_idle(seen) and seen != handled and not self._is_stopping:
                handled = seen
                is_resting = self._rest is None
                if not self._wake(seen) and self._is_idle(seen) and not self._is_stopping:
                    self._wake(seen)
        self._give_back()

    def _until_next(self, is_resting: bool) -> float | None:
        """How long the alarm may be silent before there is something to do; None: for ever."""
        if not is_resting:
            return REST_AFTER_S
        return max(0.0, self._count_at - time.monotonic()) if self._uncounted and self._count is not None else None

    def _is_idle(self, seen: int) -> bool:
        """Whether no execution has begun since the one numbered `seen` ended."""
        return self._begun == self._ended == seen

    def _can_afford(self) -> bool:
        now = time.monotonic()
        self._budget = min(WAKES_SAVED, self._budget + (now - self._budget_at) * WAKES_PER_S)
        self._budget_at = now
        return self._budget >= 1

    def _is_worth_waiting(self) -> bool:
        """Whether the next execution may well begin without a wake, or it is time to look again."""
        if self._came_by_itself < WORTH_WAITING and self._hurried < LOOK_AFTER:
            self._hurried += 1
            return False
        self._hurried = 0
        return True

    def _give_back(self) -> None:
        if self._rest is not None:
            self._rest()

    def _wake(self, seen: int) -> bool:
        """Send wakes until the batcher has answered one or begun an execution. False: nobody got them.

        A wake can fail to wake: it arrives before the instance waits for work again, and then it is itself stuck (about
        3 % of wakes on one busy core). So the next one follows soon, after twice the time up to WAIT_MAX_S.
        """
        waiting: list[socket.socket] = []
        wait_s = self._after_s
        executed = 0
        try:
            while len(waiting) < WAKES_MAX:
                waiting.append(self._send())
                self._tally()
                readable, _, _ = select.select(waiting, [], [], wait_s)
                answers = [self._take(waiting, connection) for connection in readable]
                wait_s = min(2 * wait_s, WAIT_MAX_S)
                if self._is_stopping or self._begun != seen or any(EXPIRED in answer for answer in answers):
                    break
                if any(WAKE_ANSWER in answer for answer in answers) and executed < EXECUTED_IN_A_ROW:
                    # The end of the executed wake can have lost the same race as any other execution: wake again.
                    executed += 1
                    wait_s = self._after_s
                elif answers:
                    raise WakeError(answers[0])
            self._failures = 0
            return True
        except (OSError, WakeError) as error:
            if NOT_READY not in str(error):  # this copy is starting or retiring
                self._back_off(error)
            return isinstance(error, WakeError)
        finally:
            for connection in waiting:
                connection.close()

    def _tally(self) -> None:
        """Count one wake; told at most once a second, because a custom metric costs as much as the wake itself."""
        self._uncounted += 1
        self._budget = max(0.0, self._budget - 1)
        self._tell_count()

    def _tell_count(self) -> None:
        now = time.monotonic()
        if self._count is not None and self._uncounted and now >= self._count_at:
            self._count(self._uncounted)
            self._uncounted, self._count_at = 0, now + COUNT_EVERY_S

    def _take(self, waiting: list[socket.socket], connection: socket.socket) -> str:
        waiting.remove(connection)
        return self._read(connection)

    def _back_off(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == FAILURES_TOLD:
            self._complain(f"wake requests fail, so a request may wait 500 ms for a free instance: {error}")
        if self._failures > 1:  # one may be a connection that had ended
            self._stopping.wait(min(BACK_OFF_MIN_S * 2 ** min(self._failures - 2, 10), BACK_OFF_MAX_S))


class WakeError(RuntimeError):
    """A wake got another answer than a wake gets."""


def _is_policy(policy: Mapping[str, Any]) -> bool:
    return bool(
        int(policy.get("max_queue_size", 0) or 0)
        or int(policy.get("default_timeout_microseconds", 0) or 0)
        or policy.get("allow_timeout_override")
    )
