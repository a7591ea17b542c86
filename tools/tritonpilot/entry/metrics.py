"""What does the entry tell Prometheus? Requests by tenant, class and outcome, its queues, and the capacity of each model.

metrics = EntryMetrics(); gate = Gate(clock, call_at, metrics); metrics.watch(gate, keys)
metrics.serve(host, port) -> port                 # GET /metrics
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily

from tritonpilot.entry.gate import DoneStatus, Gate, Refusal, Ticket
from tritonpilot.entry.tenants import KeyFile

LATENCY_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0)

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
        self._latency = Histogram(
            "inference_latency_seconds",
            "From a request's arrival at the entry to its outcome, of answered requests",
            ("model", "class"),
            buckets=LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._wait = Histogram(
            "request_queue_seconds",
            "Time that started requests waited in the entry's queue",
            ("model", "class"),
            buckets=LATENCY_BUCKETS_S,
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
        self._histograms: dict[tuple[str, str], tuple[Any, Any]] = {}

    def refused(self, ticket: Ticket, refusal: Refusal) -> None:
        """The gate did not take the request."""
        self._count(ticket, f"refused_{refusal.kind}")

    def started(self, ticket: Ticket) -> None:
        """It goes to Triton."""
        _, wait = self._of_class(ticket)
        wait.observe(ticket.started_s - ticket.arrived_s)
        if ticket.is_promoted:
            self._promoted.labels(ticket.model.name, ticket.class_name).inc()

    def done(self, ticket: Ticket, status: DoneStatus, seconds: float) -> None:
        """It has its outcome."""
        self._count(ticket, status)
        if status == "ok":
            latency, _ = self._of_class(ticket)
            latency.observe(seconds)

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
            counter = self._counters[key] = self._processed.labels(*key)
        counter.inc()

    def _of_class(self, ticket: Ticket) -> tuple[Any, Any]:
        key = (ticket.model.name, ticket.class_name)
        found = self._histograms.get(key)
        if found is None:
            found = self._histograms[key] = (self._latency.labels(*key), self._wait.labels(*key))
        return found


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
