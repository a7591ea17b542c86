"""Answers that are given again to who asks the same: kept by how often they are asked for (TinyLFU), bounded in bytes.

    cache = Cache(Generations("127.0.0.1:8001")); Extras([cache])

An answer is given again to the same tenant for the same bytes (inputs, outputs that are wanted, parameters that matter), over the
same protocol, while the model is the one that computed it (generations). Who asks what is being computed waits for that answer.
Errors are not kept. Why so: docs/adr/0021-cache.md.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any, Literal, cast

import orjson
from moka_py import Moka
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tritonpilot.entry.extras import Answer, Asked, Extra, Waiting
from tritonpilot.entry.generations import Generation, Generations
from tritonpilot.entry.grpc_scan import field, varint_bytes
from tritonpilot.entry.messages import Denied
from tritonpilot.entry.terms import CacheTerms, ModelTerms

#: Bytes that an answer takes beside its own, as seen in the process (300,000 answers of 110 bytes).
OVERHEAD_BYTES = 600
#: An answer larger than this part of the cache would put out too many others.
LARGEST_PART = 1 / 8
#: Moka evicts when 64 answers have come or 0.3 s are over: by then it holds up to this part more than it may.
PUT_OFF_PART = 1 / 32
SETTLE_S = 1.0
#: What became of a request to a model with a cache.
OUTCOMES = (
    "hit",  # answered from the cache
    "joined",  # answered with another request that was under way
    "miss",  # computed, and its answer kept unless it failed or is too large
    "unsure",  # computed, for Triton was not seen to serve the model within the last CACHE_LEASE_S
    "uncacheable",  # computed: a sequence, or tensors in shared memory
)
Policy = Literal["tiny_lfu", "lru"]
#: Generation, the answer's two parts without an id, seconds that it took. A plain tuple: the garbage collector forgets those.
Kept = tuple[int, bytes, bytes, float]

# The beginning of an answer of Triton's, which writes its keys in this order.
_HTTP_HEAD = re.compile(rb'\{("id":"(?:[^"\\]|\\.)*",)?"model_name":"[^"]*","model_version":"(\d*)"')
_VERSION_TAG, _ID_TAG = 2 << 3 | 2, 3 << 3 | 2


class Store:
    """Answers by key, at most `max_bytes` of them in all, each no older than `ttl_s`."""

    def __init__(self, max_bytes: int, ttl_s: float | None = None, policy: Policy = "tiny_lfu") -> None:
        self.max_bytes = max_bytes
        self.evicted = 0
        """Answers that made room for others; those that were too old do not count."""
        self._put_off = 0  # bytes that came since it settled
        self._moka: Moka[bytes, Kept] = Moka(
            max_bytes, ttl=ttl_s, policy=policy, weigher=_weight, eviction_listener=self._on_eviction
        )

    def get(self, key: bytes) -> Kept | None:
        """What is kept under the key; asked for is asked for, also in vain."""
        return self._moka.get(key)

    def set(self, key: bytes, kept: Kept) -> bool:
        """Keep it; False: it is too large. Whether it stays is up to how often it is asked for."""
        weight = _weight(key, kept)
        if weight > self.max_bytes * LARGEST_PART:
            return False
        self._moka.set(key, kept)
        self._put_off += weight
        if self._put_off > self.max_bytes * PUT_OFF_PART:
            self.settle()
        return True

    def settle(self) -> None:
        """Do what is put off: evictions, and the figures below."""
        self._put_off = 0
        self._moka.run_pending_tasks()

    def weight(self) -> int:
        """Bytes that it holds, estimated."""
        return self._moka.weighted_size()

    def __len__(self) -> int:
        return self._moka.count()

    def _on_eviction(self, _: bytes, __: Kept, cause: str) -> None:
        if cause == "size":
            self.evicted += 1


class _Flight:
    """A request that went to Triton, and those who wait for its answer."""

    __slots__ = ("generation", "key", "level", "waiting")

    def __init__(self, key: bytes, generation: Generation, level: int) -> None:
        self.key = key
        self.generation = generation
        self.level = level
        self.waiting: list[tuple[Asked, Waiting]] = []


class _Model:
    """The cache of one model."""

    def __init__(self, terms: CacheTerms) -> None:
        self.terms = terms
        self.store = Store(terms.max_bytes, terms.ttl_s)
        self.flights: dict[bytes, _Flight] = {}
        self.counts: dict[tuple[str, str], dict[str, int]] = {}
        """By tenant and class, then outcome."""
        self.saved_s = 0.0
        self.renewals = 0

    def count(self, asked: Asked, outcome: str) -> None:
        """One more request with that outcome."""
        whose = (asked.tenant, asked.class_name)
        counts = self.counts.get(whose)
        if counts is None:  # all at once: a counter that is born at 1 has no rate
            counts = self.counts[whose] = dict.fromkeys(OUTCOMES, 0)
        counts[outcome] += 1


class Cache(Extra):
    """The caches of all models that have one; a collector of Prometheus too."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        generations.on_new = self._renewed
        self._models: dict[str, _Model] = {}

    def wants(self, terms: ModelTerms) -> bool:
        """Models whose config has `pilot_cache`."""
        known = self._models.get(terms.name)
        if terms.cache is None:
            if known is not None:
                del self._models[terms.name]
                self._generations.forget(terms.name)
            return False
        if known is None:
            self._models[terms.name] = _Model(terms.cache)
        elif known.terms != terms.cache:
            known.terms, known.store = terms.cache, Store(terms.cache.max_bytes, terms.cache.ttl_s)
        return True

    def before(self, asked: Asked) -> Answer | Waiting | None:
        """The answer that is kept, or that is on its way."""
        model = self._models.get(asked.model)
        if model is None:
            return None
        generation = self._generations.of(asked.model)
        if generation is None:
            model.count(asked, "unsure")
            return None
        digest = asked.digest()
        if not digest:
            model.count(asked, "uncacheable")
            return None
        key = b"\0".join((asked.tenant.encode(), asked.version.encode(), asked.protocol.encode(), digest))
        kept = model.store.get(key)
        if kept is not None and kept[0] == generation.number:
            model.count(asked, "hit")
            model.saved_s += kept[3]
            return _with_id(asked, kept[1], kept[2])
        flight = model.flights.get(key)
        # NOTE: not behind a class that is served later: its request may wait as long as that class may.
        if flight is not None and flight.generation.number == generation.number and flight.level <= asked.level:
            waiting = Waiting()
            flight.waiting.append((asked, waiting))
            return waiting
        model.count(asked, "miss")
        asked.notes[self] = model.flights[key] = _Flight(key, generation, asked.level)
        return None

    def after(self, asked: Asked, answer: Answer | None, ok: bool) -> None:
        """Keep what was answered, and give it to who has waited for it."""
        model, flight = self._models.get(asked.model), cast("_Flight | None", asked.notes.get(self))
        if flight is None:
            return
        kept = None
        if model is not None:
            if model.flights.get(flight.key) is flight:
                del model.flights[flight.key]
            if ok and answer is not None and asked.target == asked.model:
                kept = self._keep(model, flight, asked, answer)
        for waiter, waiting in flight.waiting:
            if waiting.then is None:
                continue  # its caller has gone
            if kept is None or model is None:
                if model is not None:
                    model.count(waiter, "miss")
                waiting.tell(None)
                continue
            model.count(waiter, "joined")
            model.saved_s += kept[3]
            waiting.tell(_with_id(waiter, kept[1], kept[2]))

    async def keep_up(self) -> None:
        """Watch the models, and do what stores put off."""
        await asyncio.gather(self._generations.keep_up(), self._settle())

    def collect(self) -> Iterator[Any]:
        """For Prometheus."""
        requests = CounterMetricFamily(
            "pilot_cache_requests",
            "Requests to models with a cache, by what became of them",
            labels=("tenant", "model", "class", "outcome"),
        )
        saved = CounterMetricFamily(
            "pilot_cache_saved_seconds", "What the computation of given answers had taken", labels=("model",)
        )
        evicted = CounterMetricFamily("pilot_cache_evictions", "Answers that made room for others", labels=("model",))
        renewed = CounterMetricFamily(
            "pilot_cache_renewals", "Changes of the model, after which kept answers are not given", labels=("model",)
        )
        held = GaugeMetricFamily("pilot_cache_bytes", "That kept answers take", labels=("model",))
        most = GaugeMetricFamily("pilot_cache_max_bytes", "That they may take", labels=("model",))
        answers = GaugeMetricFamily("pilot_cache_answers", "Answers that are kept", labels=("model",))
        for name, model in tuple(self._models.items()):
            for (tenant, class_name), counts in tuple(model.counts.items()):
                for outcome, count in counts.items():
                    requests.add_metric((tenant, name, class_name, outcome), count)
            for family, value in (
                (saved, model.saved_s),
                (evicted, model.store.evicted),
                (renewed, model.renewals),
                (held, model.store.weight()),
                (most, model.store.max_bytes),
                (answers, len(model.store)),
            ):
                family.add_metric((name,), value)
        yield from (requests, saved, evicted, renewed, held, most, answers)

    async def _settle(self) -> None:
        while True:
            await asyncio.sleep(SETTLE_S)
            for model in self._models.values():
                model.store.settle()

    def _renewed(self, name: str) -> None:
        model = self._models.get(name)
        if model is not None:
            model.renewals += 1

    def _keep(self, model: _Model, flight: _Flight, asked: Asked, answer: Answer) -> Kept | None:
        """What is given to others; None: nothing, for it is not sure to be the answer of the model that is served."""
        generation = self._generations.of(asked.model)
        if generation is None or generation.number != flight.generation.number:
            return None
        version, text = _plain(asked, answer)
        if version != (asked.version or str(generation.version)) or version not in generation.ready:
            return None
        kept = (generation.number, text, answer.tail, time.monotonic() - asked.arrived_s)
        model.store.set(flight.key, kept)
        return kept


def _weight(key: bytes, kept: Kept) -> int:
    return len(key) + len(kept[1]) + len(kept[2]) + OVERHEAD_BYTES


def _plain(asked: Asked, answer: Answer) -> tuple[str, bytes]:
    """The version that an answer names, "" when it names none, and its text without the request's id."""
    text = answer.text
    if asked.protocol == "http":
        head = _HTTP_HEAD.match(text)
        if head is None:
            return "", text
        return head[2].decode(), text if head[1] is None else b"{" + text[head.end(1) :]
    version, at = "", 0
    try:
        while at < len(text) and text[at] <= _ID_TAG:
            start = at
            tag, begin, at = field(text, at)
            if tag == _VERSION_TAG:
                version = text[begin:at].decode()
            elif tag == _ID_TAG:
                return version, text[:start] + text[at:]
    except (IndexError, Denied, UnicodeDecodeError):
        return "", text
    return version, text


def _with_id(asked: Asked, text: bytes, tail: bytes) -> Answer:
    """An answer with the id that this caller has given."""
    if asked.request_id:
        if asked.protocol == "http":
            text = b'{"id":' + orjson.dumps(asked.request_id) + b"," + text[1:]
        else:  # a field may stand anywhere
            encoded = asked.request_id.encode()
            text = b"".join((text, bytes((_ID_TAG,)), varint_bytes(len(encoded)), encoded))
    return Answer(text, tail)
