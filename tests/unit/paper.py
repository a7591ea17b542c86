"""A served model on paper, for what decides about one: a queue, instances, and executions of a fixed and a rising part.

paper = Paper(instances=1)
for second in range(3600):
    seen = paper.interval(rate_per_s=500, seconds=5)       # an Observation
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tritonpilot.autopilot.controller import Demand, Knobs, Observation, Prediction


@dataclass(frozen=True)
class Curve:
    """An execution takes `fixed_ms + row_ms` per row. `cores`: executions that run at once at full speed; 0: all."""

    fixed_ms: float = 8.0
    row_ms: float = 1.0
    max_batch_size: int = 16
    cores: int = 0

    def steady(self, knobs: Knobs, rate_per_s: float, slo_ms: float) -> Prediction:
        """What comes of a rate for ever."""
        running = min(knobs.instances, self.cores) if self.cores else knobs.instances
        capacity = running * self.max_batch_size / (self.fixed_ms + self.row_ms * self.max_batch_size) * 1e3
        spare = 1e3 * running - rate_per_s * self.row_ms
        needed = rate_per_s * self.fixed_ms / spare if spare > 0 else math.inf  # batches grow until they suffice
        batch = min(self.max_batch_size, max(1.0, needed, knobs.queue_delay_us / 1e6 * rate_per_s / running))
        busy = min(1.0, rate_per_s * self._ms(batch) / batch / 1e3 / running)
        share = min(1.0, capacity / max(rate_per_s, 1e-9))
        slowed = knobs.instances / running  # more instances than cores only take turns
        p99_ms = knobs.queue_delay_us / 1e3 + self._ms(batch) * (1 + 1.5 * busy**2) * slowed
        if rate_per_s > capacity:
            return Prediction(math.inf, 1.0, 0.5 * share, self.max_batch_size, capacity)
        return Prediction(p99_ms, busy, 1.0 if p99_ms <= slo_ms else 0.9 * share, batch, capacity)

    def _ms(self, batch: float) -> float:
        return self.fixed_ms + self.row_ms * batch


@dataclass
class Paper:
    """Serves; its settings change at once."""

    knobs: Knobs = field(default_factory=lambda: Knobs(0, 1))
    curve: Curve = Curve()
    slo_ms: float = 100.0
    limit: float = 1000.0  # requests that may wait
    now_s: float = 0.0
    waiting: float = 0.0
    answered_late: float = 0.0
    offered: float = 0.0
    instance_s: float = 0.0

    def interval(self, rate_per_s: float, seconds: float = 5.0) -> Observation:
        """An interval of so many requests a second."""
        steady = self.curve.steady(self.knobs, rate_per_s + self.waiting / seconds, self.slo_ms)
        came = self.waiting + rate_per_s * seconds
        done = min(came, steady.capacity_per_s * seconds)
        left = came - done
        refused = max(0.0, left - self.limit)
        waited_ms = (self.waiting + left - refused) / 2 / steady.capacity_per_s * 1e3
        at_ease = self.curve.steady(self.knobs, min(rate_per_s, 0.97 * steady.capacity_per_s), self.slo_ms).p99_ms
        p99_ms = at_ease + 2 * waited_ms
        self.now_s += seconds
        self.waiting = left - refused
        self.offered += rate_per_s * seconds
        self.answered_late += refused + (done if p99_ms > self.slo_ms else 0.0)
        self.instance_s += self.knobs.instances * seconds
        return Observation(
            at_s=self.now_s,
            seconds=seconds,
            knobs=self.knobs,
            arrivals_per_s=rate_per_s,
            rows_per_request=1.0,
            answered_per_s=done / seconds,
            refused_per_s=refused / seconds,
            failed_per_s=0.0,
            waiting=self.waiting,
            queue_us=1e3 * (waited_ms + 0.1),
            mean_batch=steady.mean_batch,
            batch_sizes={round(steady.mean_batch): done / seconds / steady.mean_batch},
            p99_ms=p99_ms if done else None,
            utilisation=steady.utilisation if rate_per_s else 0.0,
            max_batch_size=self.curve.max_batch_size,
            delay_is_live=True,
        )


@dataclass(frozen=True)
class Known:
    """A Model of it that is wrong by `off`: executions take so many times as long as it believes."""

    curve: Curve = Curve()
    slo_ms: float = 100.0
    off: float = 1.0

    def predict(self, knobs: Knobs, demand: Demand) -> Prediction:
        """As the curve has it."""
        believed = replace(self.curve, fixed_ms=self.curve.fixed_ms / self.off, row_ms=self.curve.row_ms / self.off)
        return believed.steady(knobs, demand.arrivals_per_s, self.slo_ms)
