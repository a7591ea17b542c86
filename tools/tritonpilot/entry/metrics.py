"""What does the entry tell Prometheus? Requests by tenant, class and outcome, its queues, and the capacity of each model.

metrics = EntryMetrics(); gate = Gate(clock, call_at, metrics); metrics.watch(gate, keys)
metrics.serve(host, port) -> port                 # GET /metrics
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from tritonpilot.entry.gate import DoneStatus, Gate, Kind, Refusal, Ticket
from tritonpilot.entry.tenants import KeyFile
from tritonpilot.entry.terms import ClassTerms, ModelTerms

#: Edges of every model's histograms. They have the SLOs of the model's classes too, all of them, so that its classes can be added.
LATENCY_BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0),
)

#: What a request of a class that the model has may come to.
STATUSES = (*get_args(DoneStatus), *(f"refused_{kind}" for kind in get_args(Kind) if kind != "unknown_class"))

Key = tuple[str, str, str, str]


class EntryMetrics:
    """The gate's Watcher. One per process, with a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._processed = Counter(
            "processed_requests",
            "Requests by outcome: ok, error, rejected (by Triton), unavailable, timeout, cancelled, refused_*",
            ("tenant", "model", "class", "status"),
            registry=self.registry,
        )
        self._promoted = Counter(
            "promoted_requests",
            "Requests that went before better classes, by their class's share or max_wait_ms",
            ("model", "class"),
            registry=self.registry,
        )
        self._denied = Counter(
            "denied_requests",
            "Requests that were answered before they had a class: no or unknown key, bad request, unknown model",
            ("http_status",),
            registry=self.registry,
        )
        # The lookup of a child by its labels costs as much as its increment.
        self._counters: dict[Key, Any] = {}
        self._classes = _Classes()
        self.registry.register(self._classes)

    def refused(self, ticket: Ticket, refusal: Refusal) -> None:
        """The gate did not take the request."""
        self._count(ticket, f"refused_{refusal.kind}")

    def started(self, ticket: Ticket) -> None:
        """It goes to Triton."""
        self._classes.of(ticket).wait.observe(ticket.started_s - ticket.arrived_s)
        if ticket.is_promoted:
            self._promoted.labels(ticket.model.name, ticket.class_name).inc()

    def done(self, ticket: Ticket, status: DoneStatus, seconds: float) -> None:
        """It has its outcome."""
        self._count(ticket, status)
        if status == "ok":
            seen = self._classes.of(ticket)
            seen.latency.observe(seconds)
            if seconds > seen.slo_s:
                seen.slow += 1

    def denied(self, http_status: int) -> None:
        """A front answered by itself."""
        self._denied.labels(str(http_status)).inc()

    def watch(self, gate: Gate, keys: KeyFile | None) -> None:
        """Report the state of the gate and of the tenants file at each scrape."""
        self.registry.register(_State(gate, keys))

    def serve(self, host: str, port: int) -> int:
        """Serve /metrics from a thread; 0 picks a free port. Returns the port. Raises OSError."""
        server, _ = start_http_server(port, host, self.registry)
        return int(server.server_port)

    def _count(self, ticket: Ticket, status: str) -> None:
        tenant = ticket.tenant.name if ticket.tenant is not None else ""
        key = (tenant, ticket.model.name, ticket.class_name, status)
        counter = self._counters.get(key)
        if counter is None:
            counter = self._born(key)
        counter.inc()

    def _born(self, key: Key) -> Any:
        """The counter, and with it those of all statuses, at 0: one that is born at its first refusal has no rate then."""
        tenant, model, class_name, status = key
        for each in STATUSES if status in STATUSES else (status,):
            self._counters[tenant, model, class_name, each] = self._processed.labels(tenant, model, class_name, each)
        return self._counters[key]


class _Histogram:
    """How many observations lie between each two edges. prometheus_client's own has the same edges for all, and costs more."""

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.edges, seconds)] += 1
        self.sum += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """(upper edge, observations up to it), as Prometheus has them."""
        return [
            ("+Inf" if edge == math.inf else str(float(edge)), count)
            for edge, count in zip((*self.edges, math.inf), accumulate(self.counts), strict=True)
        ]


class _Class:
    """What is counted of one class of a model."""

    __slots__ = ("latency", "slo_s", "slow", "terms", "wait")

    def __init__(self, terms: ModelTerms, caller: ClassTerms, edges: tuple[float, ...]) -> None:
        self.latency, self.wait = _Histogram(edges), _Histogram(edges)
        self.slow = 0
        self.take(terms, caller)

    def take(self, terms: ModelTerms, caller: ClassTerms) -> None:
        """The terms that hold now. What was counted stays."""
        self.terms = terms
        self.slo_s = math.inf if caller.slo_s is None else caller.slo_s


class _Classes:
    """All classes of the models that had a request, from the first one on: a counter that is born at 1 has no rate."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _Class] = {}

    def of(self, ticket: Ticket) -> _Class:
        terms = ticket.model
        key = (terms.name, ticket.class_name)
        found = self._seen.get(key)
        if found is None or found.terms is not terms:
            self._take(terms)
            found = self._seen[key]
        return found

    def collect(self) -> Iterator[Any]:
        labels = ("model", "class")
        latency = HistogramMetricFamily(
            "inference_latency_seconds",
            "From a request's arrival at the entry to its outcome, of answered requests",
            labels=labels,
        )
        wait = HistogramMetricFamily(
            "request_queue_seconds", "Time that started requests waited in the entry's queue", labels=labels
        )
        slow = CounterMetricFamily(
            "slow_requests", "Requests that were answered later than their class's SLO", labels=labels
        )
        slo = GaugeMetricFamily("slo_seconds", "The P99 latency that is promised to the class", labels=labels)
        for key, seen in tuple(self._seen.items()):
            latency.add_metric(key, seen.latency.buckets(), seen.latency.sum)
            wait.add_metric(key, seen.wait.buckets(), seen.wait.sum)
            slow.add_metric(key, seen.slow)
            if seen.slo_s < math.inf:
                slo.add_metric(key, seen.slo_s)
        yield from (latency, wait, slow, slo)

    def _take(self, terms: ModelTerms) -> None:
        keys = [(terms.name, caller.name) for caller in terms.classes]
        before = [self._seen[key] for key in keys if key in self._seen]
        edges = _edges(terms, *(seen.latency.edges for seen in before))
        for key, caller in zip(keys, terms.classes, strict=True):
            seen = self._seen.get(key)
            if seen is None:
                self._seen[key] = _Class(terms, caller, edges)
                continue
            if (
                seen.latency.edges != edges
            ):  # nobody knows how many lay below the new edge: to Prometheus it is a restart
                seen.latency, seen.wait = _Histogram(edges), _Histogram(edges)
            seen.take(terms, caller)


def _edges(terms: ModelTerms, *before: Iterable[float]) -> tuple[float, ...]:
    """The edges of a model's histograms; those that it has had stay, for requests of the old terms are still under way."""
    slos = (caller.slo_s for caller in terms.classes if caller.slo_s is not None)
    return tuple(sorted(set(LATENCY_BUCKETS_S).union(slos, *before)))


class _State:
    """Collects gauges when they are asked for."""

    def __init__(self, gate: Gate, keys: KeyFile | None) -> None:
        self._gate = gate
        self._keys = keys

    def collect(self) -> Iterator[Any]:
        waiting = GaugeMetricFamily("request_queue_size", "Requests that wait in the entry", labels=("model", "class"))
        flying = GaugeMetricFamily("rows_in_flight", "Rows that Triton has", labels=("model",))
        rate = GaugeMetricFamily(
            "capacity_rows_per_second", "What the model can do, seen while it was full", labels=("model",)
        )
        for model in self._gate.models():
            for class_name, depth in self._gate.depth(model).items():
                waiting.add_metric((model, class_name), depth)
            flying.add_metric((model,), self._gate.rows_in_flight(model))
            seen = self._gate.rate_rows_per_s(model)
            if seen is not None:
                rate.add_metric((model,), seen)
        yield from (waiting, flying, rate)
        if self._keys is not None:
            trouble = GaugeMetricFamily(
                "tenants_file_trouble", "1: the tenants file on disk is wrong, and the one read before is in force"
            )
            trouble.add_metric((), float(self._keys.trouble is not None))
            yield trouble
