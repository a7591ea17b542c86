"""Which requests does the guard look at? A share of them is sent again, equal ones are compared, answers are watched.

    guard = Guard("127.0.0.1:8000", "127.0.0.1:8001", generations, say)     # Triton's HTTP and gRPC ports
    extras = Extras([guard]); registry.register(guard)          # what it found

Here is what happens in the event loop: dice, a digest, a look into a dictionary. All else is done by the Inspector in a thread of
its own, one thing after the other, so that it takes little of a model; what comes meanwhile is left out and counted.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from tritonpilot.entry.extras import Answer, Asked, Content, Extra
from tritonpilot.entry.generations import Generation, Generations
from tritonpilot.entry.inspector import LOOK_S, Inspector, State, Task
from tritonpilot.entry.terms import ModelTerms

CANDIDATE = "__next"  # of a swap: its model is guarded
MOST_BYTES = 2**20  # of a request or an answer
MOST_REMEMBERED_BYTES = 64 * 2**10  # of an answer
REMEMBERED_BYTES = 16 * 2**20  # of all answers of a model


class Note(NamedTuple):
    """What was decided about a request when it was sent."""

    state: State
    generation: Generation
    digest: bytes
    content: Content | None
    is_again: bool
    is_watched: bool


class Memory:
    """Answers by what was asked, the last asked ones, as many as fit. For several threads."""

    def __init__(self, most_bytes: int = REMEMBERED_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._answers: OrderedDict[bytes, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._answers

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, digest: bytes) -> Answer | None:
        """The answer that is remembered."""
        with self._lock:
            found = self._answers.get(digest)
            if found is not None:
                self._answers.move_to_end(digest)
            return found

    def put(self, digest: bytes, answer: Answer) -> None:
        """Remember it instead of what was there. Too large ones are not."""
        size = _size(answer)
        if size > MOST_REMEMBERED_BYTES:
            return
        with self._lock:
            before = self._answers.pop(digest, None)
            self._bytes += size - (0 if before is None else _size(before))
            self._answers[digest] = answer
            while self._bytes > self._most_bytes:
                _, oldest = self._answers.popitem(last=False)
                self._bytes -= _size(oldest)


class Guard(Extra):
    """An extra of the entry, and a collector of Prometheus."""

    def __init__(
        self,
        triton_http: str,
        triton_grpc: str,
        generations: Generations,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._generations = generations
        self._inspector = Inspector(triton_http, triton_grpc, say)
        self._states: dict[str, State] = {}
        self._memories: dict[str, Memory] = {}
        self._random = random.Random()

    def wants(self, terms: ModelTerms) -> bool:
        known = self._states.get(terms.name)
        if terms.guard is None or terms.name.endswith(CANDIDATE):
            if known is not None:
                del self._states[terms.name]
                self._inspector.forget(known)
            return False
        if known is None or not known.holds_for(terms):
            if known is not None:
                self._inspector.forget(known)
            self._states[terms.name] = self._inspector.state_of(terms)
            self._memories[terms.name] = Memory()
        return True

    def target(self, asked: Asked) -> str:
        state = self._states.get(asked.model)
        if state is None or asked.version:
            return asked.model
        before, generation = state.generation, self._generations.of(asked.model)
        state.generation = generation
        if generation is None:
            return asked.model
        if before is None or before.number != generation.number:
            self._inspector.renewed(state)
        guard = state.guard
        is_again = self._random.random() < guard.share
        is_watched = guard.distribution and state.may_watch(asked.arrived_s)
        digest = asked.digest() if guard.repeats else b""
        content = None
        if is_again or (digest and digest in self._memories[asked.model]):
            content = asked.content()
            if content is not None and len(content.text) + len(content.tail) > MOST_BYTES:
                content = None
                state.count("again", "dropped", generation.label)
            if content is not None:
                # NOTE: a copy, for the tail is a view of the whole request.
                content = Content(content.text, bytes(content.tail))
        if digest or content is not None or is_watched:
            asked.notes[self] = Note(state, generation, digest, content, is_again and content is not None, is_watched)
        return asked.model

    def after(self, asked: Asked, answer: Answer | None, ok: bool) -> None:
        note = asked.notes.get(self)
        if note is None or not ok or answer is None or asked.target != asked.model or _size(answer) > MOST_BYTES:
            return
        state: State = note.state
        if self._states.get(asked.model) is not state:
            return
        if note.digest:
            self._remember(asked, note, answer)
        if note.is_again and note.content is not None:
            self._hand_over(Task("again", state, note.generation, asked.protocol, answer, note.content))
        if note.is_watched:
            self._hand_over(Task("watch", state, note.generation, asked.protocol, answer))

    async def keep_up(self) -> None:
        """Let the inspector work, until cancelled."""
        self._inspector.start()
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                for state in self._states.values():
                    if state.doubts:
                        state.generation = self._generations.of(state.name)
        finally:
            self._inspector.stop()

    def collect(self) -> Iterator[Any]:
        """For Prometheus."""
        return self._inspector.collect()

    def _remember(self, asked: Asked, note: Note, answer: Answer) -> None:
        memory = self._memories[asked.model]
        known = memory.get(note.digest)
        if known is None:
            memory.put(note.digest, answer)
        elif known == answer:
            note.state.count("repeat", "same", note.generation.label)
        elif note.content is not None:
            replace = partial(memory.put, note.digest, answer)
            self._hand_over(
                Task("repeat", note.state, note.generation, asked.protocol, answer, note.content, known, replace)
            )

    def _hand_over(self, task: Task) -> None:
        if not self._inspector.put(task) and task.kind != "watch":
            task.state.count(task.kind, "dropped", task.generation.label)


def _size(answer: Answer) -> int:
    return len(answer.text) + len(answer.tail)
