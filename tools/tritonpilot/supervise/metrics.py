"""What the supervisor tells Prometheus about itself.

metrics = SupervisorMetrics(); metrics.see("ctr"); metrics.heals["ctr", "instances"] += 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tritonpilot.supervise.decide import Kind

WAYS = ("instances", "reload")


@dataclass(eq=False)
class SupervisorMetrics:
    """A collector for a registry, filled by the loop."""

    heals: dict[tuple[str, str], int] = field(default_factory=dict)
    heal_failures: dict[str, int] = field(default_factory=dict)
    heal_seconds: dict[str, float] = field(default_factory=dict)
    """From the notice to the answer, the last time."""
    deaths: dict[str, int] = field(default_factory=dict)
    unwell: dict[str, Kind] = field(default_factory=dict)
    restarts: int = 0
    restart_failures: int = 0
    restart_seconds: float | None = None
    needs_help: bool = False
    memory: dict[str, int] = field(default_factory=dict)
    slopes: dict[str, float] = field(default_factory=dict)
    freed_bytes: int = 0

    def see(self, model: str) -> None:
        """Count for this model from 0 on: a counter that is born at 1 has no rate."""
        for way in WAYS:
            self.heals.setdefault((model, way), 0)
        self.heal_failures.setdefault(model, 0)
        self.deaths.setdefault(model, 0)

    def collect(self) -> Iterator[Any]:
        """All families (prometheus_client's protocol of a collector)."""
        of_model = ("model",)
        heals = CounterMetricFamily("supervisor_heals", "Models that got new stubs and answer", labels=("model", "way"))
        for key, count in tuple(self.heals.items()):
            heals.add_metric(key, count)
        yield heals
        for name, said, values in (
            ("supervisor_heal_failures", "Reloads after which the model did not answer", self.heal_failures),
            ("supervisor_stub_deaths", "Stubs that died", self.deaths),
        ):
            counter = CounterMetricFamily(name, said, labels=of_model)
            for model, count in tuple(values.items()):
                counter.add_metric((model,), count)
            yield counter
        unwell = GaugeMetricFamily("supervisor_model_unwell", "1: it does not answer", labels=of_model)
        for model in tuple(self.deaths):
            unwell.add_metric((model,), float(model in self.unwell))
        took = GaugeMetricFamily(
            "supervisor_heal_seconds", "From the notice to its answer, the last time", labels=of_model
        )
        for model, seconds in tuple(self.heal_seconds.items()):
            took.add_metric((model,), seconds)
        memory = GaugeMetricFamily("supervised_memory_bytes", "Resident memory of a process", labels=("process",))
        for process, size in tuple(self.memory.items()):
            memory.add_metric((process,), size)
        slopes = GaugeMetricFamily(
            "supervised_memory_slope_bytes_per_hour", "How it grew in the last half hour", labels=("process",)
        )
        for process, slope in tuple(self.slopes.items()):
            slopes.add_metric((process,), slope)
        yield from (unwell, took, memory, slopes)
        yield CounterMetricFamily("supervisor_restarts", "Times that the server was brought back", value=self.restarts)
        yield CounterMetricFamily(
            "supervisor_restart_failures", "Times that it could not be", value=self.restart_failures
        )
        if self.restart_seconds is not None:
            yield GaugeMetricFamily(
                "supervisor_restart_seconds",
                "From the notice to its answers, the last time",
                value=self.restart_seconds,
            )
        yield GaugeMetricFamily(
            "supervisor_needs_help", "1: it cannot heal what is wrong", value=float(self.needs_help)
        )
        yield CounterMetricFamily(
            "supervisor_shm_freed_bytes", "Shared memory of dead stubs that was removed", value=self.freed_bytes
        )
