"""How many replicas would Kubernetes' HorizontalPodAutoscaler (autoscaling/v2) set? Its formula and its brakes, without a cluster.

scaler = Autoscaler(1, 8, up=Rules(policies=(Policy("Percent", 100, 60),)), down=Rules(300.0))
wanted = scaler.step(now_s, replicas, [per_pod(waits_s, 0.02, replicas=3)])

Kubernetes' own rules: pkg/controller/podautoscaler, replica_calculator.go and horizontal.go. Times are seconds on any clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tritonpilot.errors import SpecError

TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance: a ratio this near to 1 changes nothing
SYNC_S = 15.0  # --horizontal-pod-autoscaler-sync-period
DOWN_WINDOW_S = 300.0  # --horizontal-pod-autoscaler-downscale-stabilization


@dataclass(frozen=True)
class Metric:
    """What one metric asks for: replicas, or None when it could not be read."""

    replicas: int | None


@dataclass(frozen=True)
class Policy:
    """At most so many pods, or percent of them, more or fewer in a period."""

    kind: Literal["Pods", "Percent"]
    value: int
    period_s: float


@dataclass(frozen=True)
class Rules:
    """`behavior.scaleUp` or `behavior.scaleDown`. `select` chooses among the policies: Max the largest change, Min the smallest."""

    window_s: float = 0.0
    policies: tuple[Policy, ...] = (Policy("Percent", 100, SYNC_S),)
    select: Literal["Max", "Min", "Disabled"] = "Max"


#: What Kubernetes takes where an HPA has no `behavior`.
DEFAULT_UP = Rules(0.0, (Policy("Pods", 4, SYNC_S), Policy("Percent", 100, SYNC_S)))
DEFAULT_DOWN = Rules(DOWN_WINDOW_S, (Policy("Percent", 100, SYNC_S),))


def per_pod(values: Sequence[float], target: float, *, replicas: int, pending: int = 0, missing: int = 0) -> Metric:
    """A metric of type Pods with an AverageValue: `values` are those of the pods that run and have one, ready or not.

    Pods that are pending, or have no value, count as 0 when more would be wanted, and the latter as on target when fewer.
    """
    if not values:
        return Metric(None)
    ratio = _mean(values) / target
    more = ratio > 1
    if not (pending and more) and not missing:
        return Metric(replicas if abs(1 - ratio) <= TOLERANCE else _up(ratio * len(values)))
    filled = [*values, *[0.0 if more or ratio == 1 else target] * missing, *([0.0] * pending if more else [])]
    anew = _mean(filled) / target
    if abs(1 - anew) <= TOLERANCE or (ratio < 1 < anew) or (anew < 1 < ratio):
        return Metric(replicas)
    wanted = _up(anew * len(filled))
    turned = (anew < 1 and wanted > replicas) or (anew > 1 and wanted < replicas)
    return Metric(replicas if turned else wanted)


def total(value: float | None, target: float, *, replicas: int) -> Metric:
    """An external metric with an AverageValue, KEDA's default: `target` for each replica."""
    if value is None:
        return Metric(None)
    ratio = value / (target * replicas) if replicas else math.inf
    return Metric(replicas if abs(1 - ratio) <= TOLERANCE else _up(value / target))


def whole(value: float | None, target: float, *, replicas: int, ready: int) -> Metric:
    """An external metric with a Value, KEDA's `metricType: Value`: the ready pods in proportion to it."""
    if value is None:
        return Metric(None)
    ratio = value / target
    return Metric(replicas if abs(1 - ratio) <= TOLERANCE else _up(ratio * ready))


@dataclass
class Autoscaler:
    """One HorizontalPodAutoscaler: `step` every SYNC_S. It remembers what it recommended and what it did."""

    least: int
    most: int
    up: Rules = DEFAULT_UP
    down: Rules = DEFAULT_DOWN
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    _changes: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises SpecError for bounds that contradict."""
        if not 1 <= self.least <= self.most:
            raise SpecError(
                f"Replicas cannot be between {self.least} and {self.most}. Nothing was simulated. Give a least of 1 or more, and a "
                "most that is not below it."
            )

    def step(self, now_s: float, replicas: int, metrics: Sequence[Metric]) -> int:
        """The replicas from now on. The metric that wants most wins; one that cannot be read forbids fewer."""
        if not self._recommended:
            self._recommended.append((now_s, replicas))
        if not self.least <= replicas <= self.most:
            return self._set(now_s, replicas, min(max(replicas, self.least), self.most))
        known = [metric.replicas for metric in metrics if metric.replicas is not None]
        if not known or (len(known) < len(metrics) and max(known) < replicas):
            return replicas
        wanted = self._stabilised(now_s, replicas, max(known))
        if wanted > replicas:
            wanted = min(wanted, self.most, max(replicas, self._limit(now_s, replicas, self.up, +1)))
        elif wanted < replicas:
            wanted = max(wanted, self.least, min(replicas, self._limit(now_s, replicas, self.down, -1)))
        return self._set(now_s, replicas, wanted)

    def _stabilised(self, now_s: float, replicas: int, wanted: int) -> int:
        """Within what was recommended in the windows: not above the least of the one, not below the most of the other."""
        since = {rules: now_s - rules.window_s for rules in (self.up, self.down)}
        most = min([wanted, *(said for at_s, said in self._recommended if at_s > since[self.up])])
        least = max([wanted, *(said for at_s, said in self._recommended if at_s > since[self.down])])
        keep_s = now_s - max(self.up.window_s, self.down.window_s)
        self._recommended = [each for each in self._recommended if each[0] >= keep_s] + [(now_s, wanted)]
        return min(max(replicas, most), least)

    def _limit(self, now_s: float, replicas: int, rules: Rules, sign: int) -> int:
        """How far the policies let it go in this direction."""
        if rules.select == "Disabled":
            return replicas
        limits = []
        for policy in rules.policies:
            start = replicas - sum(by for at_s, by in self._changes if at_s > now_s - policy.period_s)
            if policy.kind == "Pods":
                limits.append(start + sign * policy.value)
            else:
                share = start * (1 + sign * policy.value / 100)
                limits.append(_up(share) if sign > 0 else int(share))
        return max(limits) if (rules.select == "Max") == (sign > 0) else min(limits)

    def _set(self, now_s: float, replicas: int, wanted: int) -> int:
        if wanted != replicas:
            self._changes.append((now_s, wanted - replicas))
            longest_s = max(policy.period_s for rules in (self.up, self.down) for policy in rules.policies)
            self._changes = [each for each in self._changes if each[0] > now_s - longest_s]
        return wanted


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _up(value: float) -> int:
    """Rounded up; Kubernetes counts in thousandths, so what a float adds in its last places is nothing."""
    return math.ceil(round(value, 9))
