"""What may look at a request on its way through the entry: a cache that answers it, a canary that takes it elsewhere, a guard.

    class Counting(Extra):                                  # every method may be left out
        def wants(self, terms): return terms.name == "ctr"
        def after(self, asked, answer, ok): ...

    extras = Extras([Counting()]); Desk(..., extras=extras) # the fronts do the rest

All of it happens in the entry's event loop: before() and target() are on a request's way and count in microseconds, after() comes
when the caller has his answer. Requests of models that no extra wants cost one look into a dictionary.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from tritonpilot.entry.terms import ModelTerms

Protocol = Literal["http", "grpc"]

#: Answers above this size are not collected for after(): a copy of each would be held meanwhile.
MOST_ANSWER_BYTES = 8 * 2**20


class Content(NamedTuple):
    """All that is asked, without what differs from caller to caller (id, priority, timeout), in the words of its protocol.

    HTTP: the JSON and the binary part behind it. gRPC: a ModelInferRequest and nothing. Sent again it is the same request.
    """

    text: bytes
    tail: bytes | memoryview = b""


class Answer(NamedTuple):
    """A whole answer of the status ok. HTTP: the JSON and the binary part behind it. gRPC: a ModelInferResponse and nothing."""

    text: bytes
    tail: bytes = b""


class Waiting:
    """Another request that asks the same is under way: `then` will be called once, with its answer, or None to go on alone."""

    __slots__ = ("then",)

    def __init__(self) -> None:
        self.then: Callable[[Answer | None], None] | None = None
        """Set by the front, and to None by it when its caller has gone or must not wait longer."""

    def tell(self, answer: Answer | None) -> None:
        """The end of the wait."""
        then, self.then = self.then, None
        if then is not None:
            then(answer)


class Extra:
    """What an extra may do. Whatever it raises is said and changes nothing for the caller."""

    def wants(self, terms: ModelTerms) -> bool:  # noqa: ARG002
        """Whether requests to this model are shown to it. Asked when the model's terms are new; see Extras.look()."""
        return False

    def before(self, asked: Asked) -> Answer | Waiting | None:  # noqa: ARG002
        """An answer without Triton, a wait for one, or None. Not called when an extra before this one had an answer."""
        return None

    def target(self, asked: Asked) -> str:
        """The model that is really asked, on the terms of the one that was meant. The first that differs is taken.

        When that one fails, the one that was meant is asked: `asked.target` says who was in the end.
        """
        return asked.model

    def after(self, asked: Asked, answer: Answer | None, ok: bool) -> None:
        """The request has ended: called once, when the caller has been answered, but not for what before() answered.

        `answer` is None unless ok, and where it is larger than MOST_ANSWER_BYTES. Not ok: the model failed, the request was refused
        or expired, its caller left while it waited; then target() was perhaps never asked, nor before() of those behind.
        """

    async def keep_up(self) -> None:
        """Runs beside the requests, until cancelled."""


class Asked:
    """One inference, read and allowed, as extras see it."""

    __slots__ = (
        "_content",
        "_digest",
        "_extras",
        "_left",
        "_mine",
        "_read",
        "arrived_s",
        "class_name",
        "is_over",
        "notes",
        "protocol",
        "request_id",
        "target",
        "tenant",
        "terms",
        "version",
    )

    def __init__(
        self,
        extras: Extras,
        mine: Sequence[Extra],
        terms: ModelTerms,
        version: str,
        tenant: str,
        class_name: str,
        protocol: Protocol,
        request_id: str,
        read: Callable[[], Content | None],
    ) -> None:
        self._extras = extras
        self._mine = mine
        self._left = iter(mine)
        self._read: Callable[[], Content | None] | None = read
        self._content: Content | None = None
        self._digest = b""
        self.terms = terms
        self.version = version
        """As the caller named it; "" for the one that Triton takes."""
        self.tenant = tenant
        """"" without a tenants file."""
        self.class_name = class_name
        self.protocol: Protocol = protocol
        self.request_id = request_id
        self.target = terms.name
        """The model that is asked: another than `model` when an extra said so."""
        self.arrived_s = time.monotonic()
        self.is_over = False
        self.notes: dict[object, Any] = {}
        """Of an extra, from before() to after(); by convention under itself as the key."""

    @property
    def model(self) -> str:
        """The model that the caller means."""
        return self.terms.name

    @property
    def level(self) -> int:
        """The priority level of its class, 1 is served first; 0: the model has none."""
        return next((each.level for each in self.terms.classes if each.name == self.class_name), 0)

    def content(self) -> Content | None:
        """What is asked. None where that is not in the request alone: tensors in shared memory, sequences.

        To be called first in before() or target(): once the request is sent what nobody asked for is gone, and this is None.
        """
        if self._read is not None:
            self._content, self._read = self._read(), None
        return self._content

    def digest(self) -> bytes:
        """16 bytes that stand for the content, b"" where there is none."""
        if not self._digest:
            content = self.content()
            if content is not None:
                digest = hashlib.blake2b(content.text, digest_size=16)
                # NOTE: the length keeps a text's end and a tail's beginning apart.
                digest.update(len(content.text).to_bytes(8, "little"))
                digest.update(content.tail)
                self._digest = digest.digest()
        return self._digest

    # -- for the fronts ------------------------------------------------------------------------------------------------

    def before(self) -> Answer | Waiting | None:
        """Ask the extras in turn; after a wait, those behind the one that let wait."""
        for extra in self._left:
            try:
                found = extra.before(self)
            except Exception as error:  # noqa: BLE001  a fault of an extra must not cost the caller his answer
                self._extras.failed(extra, error)
                continue
            if found is not None:
                return found
        return None

    def choose_target(self) -> str:
        """Which model is asked; the last look at the content."""
        for extra in self._mine:
            try:
                target = extra.target(self)
            except Exception as error:  # noqa: BLE001  as above
                self._extras.failed(extra, error)
                continue
            if target != self.terms.name:
                self.target = target
                break
        self._read = None  # it holds the request
        return self.target

    def falls_back(self) -> None:
        """The other model has failed, and the one that was meant is asked."""
        self.target = self.terms.name

    def end(self, answer: Answer | None, ok: bool) -> None:
        """Tell the extras; only the first time."""
        if self.is_over:
            return
        self.is_over = True
        self._read = None
        for extra in self._mine:
            try:
                extra.after(self, answer, ok)
            except Exception as error:  # noqa: BLE001  as above
                self._extras.failed(extra, error)


class Extras:
    """The extras of one entry, in their order: who is first may answer first."""

    def __init__(self, extras: Iterable[Extra] = (), say: Callable[[str], None] = lambda _: None) -> None:
        self._extras = tuple(extras)
        self._say = say
        self._terms: dict[str, ModelTerms] = {}
        self._by_model: dict[str, tuple[Extra, ...]] = {}
        self._has_failed: set[tuple[int, str]] = set()

    def __iter__(self) -> Iterator[Extra]:
        return iter(self._extras)

    def of(self, model: str) -> tuple[Extra, ...] | None:
        """Those that want requests to this model; None for none."""
        return self._by_model.get(model)

    def told(self, terms: ModelTerms) -> None:
        """A model's terms are new."""
        self._terms[terms.name] = terms
        self._look_at(terms)

    def gone(self, model: str) -> None:
        """Triton has no such model any more."""
        self._terms.pop(model, None)
        self._by_model.pop(model, None)

    def look(self) -> None:
        """Ask every extra again which models it wants: for one that has changed its mind."""
        for terms in self._terms.values():
            self._look_at(terms)

    async def keep_up(self) -> None:
        """What extras do beside the requests, until cancelled."""
        await asyncio.gather(*(self._kept_up(extra) for extra in self._extras))

    def failed(self, extra: Extra, error: Exception) -> None:
        """Said once for each kind of error: it may come with every request."""
        kind = (id(extra), type(error).__name__)
        if kind not in self._has_failed:
            self._has_failed.add(kind)
            self._say(f"{type(extra).__name__} of the entry failed, requests go on without it: {error!r}")

    def _look_at(self, terms: ModelTerms) -> None:
        wanting = tuple(extra for extra in self._extras if self._does_want(extra, terms))
        if wanting:
            self._by_model[terms.name] = wanting
        else:
            self._by_model.pop(terms.name, None)

    def _does_want(self, extra: Extra, terms: ModelTerms) -> bool:
        try:
            return extra.wants(terms)
        except Exception as error:  # noqa: BLE001  as above
            self.failed(extra, error)
            return False

    async def _kept_up(self, extra: Extra) -> None:
        try:
            await extra.keep_up()
        except Exception as error:  # noqa: BLE001  as above
            self.failed(extra, error)
