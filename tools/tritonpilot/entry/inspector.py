"""What does the guard find in what it was handed? A thread that asks Triton again, compares, watches, and tells Prometheus.

    inspector = Inspector("127.0.0.1:8000", "127.0.0.1:8001", say); inspector.start()
    state = inspector.state_of(terms)                     # what is known of a model from now on
    inspector.put(Task("again", state, ...))              # False: it has enough to do

A difference of two answers counts when the model, and all that it calls, is known to have been the same from before the first until
after the second (Generations).
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from tritonpilot.entry.again import Again, NoAnswerError, rows_of, several, version_of
from tritonpilot.entry.comparison import outputs_of
from tritonpilot.entry.extras import Answer, Content, Protocol
from tritonpilot.entry.generations import Generation
from tritonpilot.entry.guard_metrics import collect
from tritonpilot.entry.terms import CACHE_LEASE_S, ModelTerms
from tritonpilot.guard.compare import Arrays, Difference, difference, first_rows, last_rows
from tritonpilot.guard.watch import Verdict, Watch

Kind = Literal["again", "batch", "repeat", "version"]
Result = Literal["same", "different", "changed", "failed", "dropped"]

LOOK_S = 0.5
PATIENCE_S = 30.0  # with a Triton that does not tell whether a model is still the same
JUDGE_S = 1.0
MOST_AGAIN = 8  # tasks that wait to be sent again: what is watched waits behind them
MOST_TASKS = 256
MOST_COPIES = 8  # of the rows of a request, in a batch
MOST_SAID = 5  # differences of a version that are told in words


class State:
    """What is known of a model. Counts may come from any thread."""

    def __init__(self, terms: ModelTerms) -> None:
        assert terms.guard is not None
        self.name = terms.name
        self.guard = terms.guard
        self.level = terms.classes[-1].level
        """Nobody waits for what the guard asks."""
        self.max_batch_size = terms.max_batch_size
        self.generation: Generation | None = None
        """What the model is now; set by the event loop, None while that is not known."""
        self.doubts = 0
        """For how many differences somebody waits to know what the model is."""
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.largest: dict[tuple[str, Kind], float] = {}
        self.watch = Watch(terms.guard.settings, is_batched=terms.max_batch_size > 0, reference=terms.guard_reference)
        self.verdicts: list[Verdict] = []
        self.judged_s = 0.0
        self._terms = terms
        self._lock = threading.Lock()
        self._credit, self._credited_s = 0.0, 0.0

    def holds_for(self, terms: ModelTerms) -> bool:
        """Whether what was learned may stay on these terms."""
        ours = self._terms
        return (ours.guard, ours.guard_reference, ours.max_batch_size, ours.classes) == (
            terms.guard,
            terms.guard_reference,
            terms.max_batch_size,
            terms.classes,
        )

    def may_watch(self, now_s: float) -> bool:
        """Whether one more answer may be looked at: so many in a second, and in a burst."""
        rate = self.guard.rows_per_s
        self._credit = min(max(1.0, rate), self._credit + (now_s - self._credited_s) * rate)
        self._credited_s = now_s
        if self._credit < 1:
            return False
        self._credit -= 1
        return True

    def count(self, kind: Kind, result: Result, version: str) -> None:
        """A comparison has ended."""
        with self._lock:
            self.counts[version, kind, result] += 1


@dataclass(frozen=True)
class Task:
    """Something to look at: an answer, and what it answers where that is needed."""

    kind: Literal["again", "repeat", "watch"]
    state: State
    generation: Generation
    protocol: Protocol
    answer: Answer
    content: Content | None = None
    known: Answer | None = None
    replace: Callable[[], None] = lambda: None
    """Remember this answer instead of the known one."""

    @property
    def size(self) -> int:
        parts = [self.answer, *(part for part in (self.content, self.known) if part is not None)]
        return sum(len(part.text) + len(part.tail) for part in parts)


@dataclass(frozen=True)
class Doubt:
    """A difference that is either a fault or a model that was changed meanwhile."""

    task: Task
    kind: Kind
    found: Difference
    due_s: float
    """When it will be known which."""


class Inspector:
    """The thread, and the models' states."""

    def __init__(self, triton_http: str, triton_grpc: str, say: Callable[[str], None]) -> None:
        self._addresses = triton_http, triton_grpc
        self._say = say
        self._tasks: queue.SimpleQueue[Task | State | None] = queue.SimpleQueue()
        self._waiting_again = 0
        self._lock = threading.Lock()
        self._states: tuple[State, ...] = ()
        self._thread: threading.Thread | None = None
        self._is_over = False
        self._doubts: deque[Doubt] = deque()
        self._again: Again | None = None
        self._random = random.Random()
        self._said: Counter[tuple[str, str]] = Counter()

    def start(self) -> None:
        """Begin."""
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the task under way; no longer than a moment."""
        self._is_over = True
        self._tasks.put(None)

    def state_of(self, terms: ModelTerms) -> State:
        """A new one."""
        state = State(terms)
        self._states = (*self._states, state)
        return state

    def forget(self, state: State) -> None:
        """The model is not guarded any more, or on other terms."""
        self._states = tuple(each for each in self._states if each is not state)

    def renewed(self, state: State) -> None:
        """Its generation is another one."""
        self._tasks.put(state)

    def put(self, task: Task) -> bool:
        """Whether it is taken."""
        if self._tasks.qsize() >= MOST_TASKS:
            return False
        if task.kind != "watch":
            with self._lock:
                if self._waiting_again >= MOST_AGAIN:
                    return False
                self._waiting_again += 1
        self._tasks.put(task)
        return True

    def collect(self) -> Iterator[Any]:
        """For Prometheus."""
        return collect(self._states)

    # -- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._again = Again(*self._addresses)
        try:
            while not self._is_over:
                due_s = self._doubts[0].due_s if self._doubts else math.inf
                left_s = due_s - time.monotonic()
                if left_s <= 0:
                    self._settle(self._doubts.popleft())
                    continue
                try:
                    task = self._tasks.get(timeout=left_s if left_s < math.inf else None)
                except queue.Empty:
                    continue
                if isinstance(task, State):
                    self._believe(task)
                elif task is not None:
                    self._do(task)
        finally:
            self._again.close()

    def _settle(self, doubt: Doubt) -> None:
        """A difference counts when the model is known to have been the same one from before it until after it."""
        task, found = doubt.task, doubt.found
        state, version = task.state, task.generation.label
        if state.generation is None and time.monotonic() < doubt.due_s + PATIENCE_S:
            self._doubts.append(replace(doubt, due_s=time.monotonic() + LOOK_S))  # Triton is just not seen
            return
        state.doubts -= 1
        if state.generation is None or state.generation.number != task.generation.number:
            state.count(doubt.kind, "changed", version)
            return
        self._note(state, doubt.kind, found, version)
        state.count(doubt.kind, "different", version)
        self._tell(
            state,
            f"different {version}",
            f"model {state.name} version {version} answered the same input differently ({doubt.kind}): {found.output} by "
            f"{found.value:.3g}",
        )

    def _do(self, task: Task) -> None:
        if task.kind != "watch":
            with self._lock:
                self._waiting_again -= 1
        try:
            if task.kind == "watch":
                self._watch(task)
            elif task.kind == "again":
                self._ask_again(task)
            else:
                self._settle_repeat(task)
        except NoAnswerError as error:
            task.state.count("again", "failed", task.generation.label)
            self._tell(
                task.state, "failed", f"model {task.state.name} did not answer a request that was sent again: {error}"
            )
        except Exception as error:  # noqa: BLE001  what Triton's client meets in an answer that is none is of any type
            if task.kind != "watch":
                task.state.count(task.kind, "failed", task.generation.label)
            self._tell(task.state, "unread", f"an answer of model {task.state.name} cannot be read: {error!r:.300}")

    def _believe(self, state: State) -> None:
        """What the event loop has heard of the model."""
        generation = state.generation
        if generation is None or generation.label == state.watch.version:
            return
        if state.watch.version:
            self._say(f"model {state.name}: version {generation.label} answers after version {state.watch.version}")
        state.watch.serves(generation.label, time.monotonic())
        state.verdicts = []

    def _watch(self, task: Task) -> None:
        state, now_s = task.state, time.monotonic()
        if version_of(task.answer, task.protocol) == str(task.generation.version):  # else one that drains, or comes
            state.watch.take(outputs_of(task.answer, task.protocol), task.generation.label, now_s)
        if now_s - state.judged_s >= JUDGE_S:
            state.judged_s = now_s
            state.verdicts = state.watch.judge()

    def _ask_again(self, task: Task) -> None:
        state, content = task.state, task.content
        assert content is not None
        version = version_of(task.answer, task.protocol)
        kind: Kind = "again"
        rows = rows_of(content, task.protocol) if state.max_batch_size > 1 else 0
        copies = min(MOST_COPIES, state.max_batch_size // rows) if rows else 1
        if copies > 1 and self._random.random() < 0.5:
            kind, content = "batch", several(content, task.protocol, copies)
        first = outputs_of(task.answer, task.protocol)
        second = self._asked(task, content, version)
        if kind == "batch":
            found = max(
                (difference(first, part(second, rows), state.guard.allowed) for part in (first_rows, last_rows)),
                key=lambda each: (not each.ok, each.value),
            )
        else:
            found = difference(first, second, state.guard.allowed)
        self._judge(task, kind, found, version)

    def _settle_repeat(self, task: Task) -> None:
        """Two equal requests had different bytes as answers. Is it the answer's wording, another version, or a fault?"""
        state = task.state
        assert task.known is not None
        assert task.content is not None
        version, before = version_of(task.answer, task.protocol), version_of(task.known, task.protocol)
        known, now = outputs_of(task.known, task.protocol), outputs_of(task.answer, task.protocol)
        found = difference(known, now, state.guard.allowed)
        if version != before:
            task.replace()
            self._note(state, "version", found, task.generation.label)
            state.count("version", "same" if found.ok else "different", task.generation.label)
            return
        if not found.ok:
            # The known answer may be that of an ensemble's old members, or of a file that was changed in place.
            third = self._asked(task, task.content, version)
            if difference(now, third, state.guard.allowed).ok and not difference(known, third, state.guard.allowed).ok:
                task.replace()
                state.count("repeat", "changed", task.generation.label)
                return
        self._judge(task, "repeat", found, version)

    def _asked(self, task: Task, content: Content, version: str) -> Arrays:
        assert self._again is not None
        state = task.state
        answer = self._again.ask(content, task.protocol, state.name, version, state.level)
        return outputs_of(answer, task.protocol)

    def _judge(self, task: Task, kind: Kind, found: Difference, version: str) -> None:
        label = task.generation.label
        if version != str(task.generation.version):  # one that drains, or comes
            task.state.count(kind, "same" if found.ok else "changed", label)
        elif found.ok:
            self._note(task.state, kind, found, label)
            task.state.count(kind, "same", label)
        else:
            task.state.doubts += 1
            self._doubts.append(Doubt(task, kind, found, time.monotonic() + CACHE_LEASE_S))

    def _note(self, state: State, kind: Kind, found: Difference, version: str) -> None:
        state.largest[version, kind] = max(state.largest.get((version, kind), 0.0), found.value)

    def _tell(self, state: State, about: str, words: str) -> None:
        """The first few times."""
        self._said[state.name, about] += 1
        if self._said[state.name, about] <= MOST_SAID:
            self._say(words)
