"""How does a queued request get out of Triton's 500 ms stall? By the arrival of another one, which the waker sends.

With priority levels or any queue policy, Triton's dynamic batcher can miss that the instance has become free and then
sleeps until the next arrival or 500 ms (core, dynamic_batch_scheduler.cc: WaitForPayloadSlotAvailable). So when an
execution has ended and no new one begins within about 1 ms, one daemon thread sends the model a request that expires in
the queue at once: it is never executed, and its arrival wakes the batcher.

    waker = Waker(send, after_us=1000); waker.began(); ...; waker.ended(); waker.stop()

`began` and `ended` are on the hot path: a counter, and a bell that is rung only while the thread sleeps. Without traffic
the thread sleeps without polling.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

WAKE_ID = "pilot-wake"  # request_id by which `execute` knows a wake that was not rejected in the queue
EXECUTED_IN_A_ROW = 3  # how often an executed wake is followed by another before real work comes
SENDERS_MAX = 8  # wakes that can be on their way at once; they wait 1, 2, 4 ... 128 ms for each other
BACK_OFF_MIN_S = 0.1
BACK_OFF_MAX_S = 5.0


@dataclass(frozen=True)
class WakePlan:
    """Whether a model needs the waker, and whether its queue rejects wakes, with the reason."""

    is_needed: bool
    is_rejected: bool
    reason: str


def plan(config: Mapping[str, Any]) -> WakePlan:
    """Decide from a model config in JSON form.

    A request sent from inside a backend (BLS) carries a timeout but no priority in Triton 24.10, so it queues at the
    default level; there it expires at once when that level's policy says REJECT and allow_timeout_override below a
    default timeout, which Triton needs to be non-zero.
    """
    batching = config.get("dynamic_batching")
    if batching is None:
        return WakePlan(False, False, "without dynamic_batching requests go straight to the instances: no stall")
    levels = int(batching.get("priority_levels", 0) or 0)
    default = batching.get("default_queue_policy") or {}
    if levels == 0 and not _is_policy(default):
        return WakePlan(False, False, "without priority levels or a queue policy the batcher prefetches: no stall")
    level = int(batching.get("default_priority_level", 0) or 0)
    policies = batching.get("priority_queue_policy") or {}
    policy = policies.get(str(level), policies.get(level, default)) if levels else default
    timeout_us = int(policy.get("default_timeout_microseconds", 0) or 0)
    is_reject = policy.get("timeout_action", "REJECT") in ("REJECT", 0)
    if is_reject and timeout_us > 0 and (policy.get("allow_timeout_override") or timeout_us <= 1):
        return WakePlan(True, True, f"the queue of priority level {level} rejects wake requests")
    return WakePlan(
        True,
        False,
        f"the queue of the default priority level {level} cannot reject wake requests: they reach the instance and are "
        "turned away there. Give that level's queue policy timeout_action: REJECT, allow_timeout_override: true and a "
        "default_timeout_microseconds above 0 (an hour will do)",
    )


class Waker:
    """Watches executions from one daemon thread and sends wakes when the instance has gone idle.

    `send` sends one wake, blocks until its answer, and returns whether it was executed instead of rejected in the queue;
    it is called from up to SENDERS_MAX threads. When it raises, the first failure of a row goes to `complain` and the
    waker backs off. `count` gets the number of wakes sent, from one thread only: two threads in one custom metric of
    Triton's made it abort. Executions of nothing but wakes are not counted by `began` and `ended`.
    """

    def __init__(
        self,
        send: Callable[[], bool],
        *,
        after_us: int = 1000,
        complain: Callable[[str], None] = print,
        count: Callable[[int], None] = lambda wakes: None,  # noqa: ARG005
    ) -> None:
        self._send = send
        self._complain = complain
        self._count = count
        self._after_s = after_us / 1e6
        self._back_off_s = 0.0
        self._begun = 0
        self._ended = 0
        self._is_asleep = False
        self._is_stopping = False
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[bool | Exception] = queue.SimpleQueue()
        self._unanswered = 0
        self._senders: list[threading.Thread] = []
        self._watcher = threading.Thread(target=self._watch, name="pilot-waker", daemon=True)
        self._watcher.start()

    def began(self) -> None:
        """Call first in every `execute`."""
        self._begun += 1

    def ended(self) -> None:
        """Call last in every `execute`."""
        self._ended += 1
        if self._is_asleep:
            self._is_asleep = False
            self._bell.put(None)

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the threads; give up waiting after `timeout_s` when a wake is stuck in a server that shuts down."""
        self._is_stopping = True
        self._bell.put(None)
        self._answers.put(False)
        self._watcher.join(timeout_s)
        for _ in self._senders:
            self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        for sender in self._senders:
            sender.join(max(0.0, deadline - time.monotonic()))

    def _watch(self) -> None:
        handled = 0  # executions after which the model has been woken
        while not self._is_stopping:
            self._sleep_until_ended(handled)
            seen = self._begun
            self._pause()
            if self._begun == self._ended == seen != handled and not self._is_stopping:
                handled = seen
                self._count(self._wake(seen))

    def _sleep_until_ended(self, handled: int) -> None:
        self._is_asleep = True
        if self._begun == self._ended != handled:  # ended before `ended` could see us asleep
            self._is_asleep = False
            return
        self._bell.get()

    def _pause(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._bell.get(timeout=self._after_s)

    def _wake(self, seen: int) -> int:
        """Send wakes until the batcher has answered one or begun an execution; how many were sent.

        A wake can fail to wake: it arrives before the instance waits for work again, and then it is itself stuck (about
        3 % of wakes on one busy core). So the next one follows soon, each after twice the time.
        """
        wait_s = self._after_s
        sent = executed = 0
        while self._post():
            sent += 1
            answer = self._answer(wait_s)
            if self._is_stopping or self._begun != seen:
                break
            if isinstance(answer, Exception):
                self._back_off(answer)
                break
            if answer is False or executed == EXECUTED_IN_A_ROW:
                self._back_off_s = 0.0
                break
            if answer is True:
                # The end of the executed wake can have lost the same race as any other execution: wake again.
                executed += 1
                self._pause()
                if self._begun != seen:
                    break
            else:
                wait_s *= 2
        return sent

    def _post(self) -> bool:
        """Hand one wake to a sender; False when all are stuck."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._answers.get_nowait()
                self._unanswered -= 1
        if self._unanswered >= len(self._senders):
            if len(self._senders) == SENDERS_MAX:
                return False
            sender = threading.Thread(target=self._deliver, name="pilot-waker-sender", daemon=True)
            self._senders.append(sender)
            sender.start()
        self._unanswered += 1
        self._jobs.put(None)
        return True

    def _answer(self, timeout_s: float) -> bool | Exception | None:
        try:
            answer = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._unanswered -= 1
        return answer

    def _back_off(self, error: Exception) -> None:
        if self._back_off_s == 0:
            self._complain(f"a wake request failed, the next ones back off: {error}")
        self._back_off_s = min(max(2 * self._back_off_s, BACK_OFF_MIN_S), BACK_OFF_MAX_S)
        deadline = time.monotonic() + self._back_off_s
        while not self._is_stopping and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._bell.get(timeout=self._back_off_s)

    def _deliver(self) -> None:
        while True:
            self._jobs.get()
            if self._is_stopping:
                return
            try:
                self._answers.put(self._send())
            except Exception as error:  # noqa: BLE001  whatever the server answers must not end the thread
                self._answers.put(error)


def _is_policy(policy: Mapping[str, Any]) -> bool:
    return bool(
        int(policy.get("max_queue_size", 0) or 0)
        or int(policy.get("default_timeout_microseconds", 0) or 0)
        or policy.get("allow_timeout_override")
    )
