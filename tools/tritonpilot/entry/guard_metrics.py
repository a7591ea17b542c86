"""What does the guard tell Prometheus of each model? Counts of comparisons, distances of the answers from usual ones.

yield from collect(states)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from tritonpilot.entry.inspector import State

KINDS = {
    "again": ("same", "different", "changed", "failed", "dropped"),
    "batch": ("same", "different", "changed"),
    "repeat": ("same", "different", "changed", "failed", "dropped"),
    "version": ("same", "different"),
}
VERSIONS = 3  # the last ones, of which counts are told


def collect(states: Iterable[State]) -> Iterator[Any]:
    """All families; samples of a model from when Triton has told its version."""
    comparisons = CounterMetricFamily(
        "pilot_guard_comparisons", "Comparisons of two answers to the same request", labels=("model", "version", "kind", "result")
    )  # fmt: skip
    largest = GaugeMetricFamily(
        "pilot_guard_largest_difference", "Largest difference that was seen", labels=("model", "version", "kind")
    )
    rows = CounterMetricFamily("pilot_guard_rows", "Rows of answers that were looked at", labels=("model",))
    reference = GaugeMetricFamily("pilot_guard_reference_rows", "Rows of the reference", labels=("model",))
    learning = GaugeMetricFamily("pilot_guard_learning", "1: there is no complete reference yet", labels=("model",))
    age = GaugeMetricFamily(
        "pilot_guard_version_age_seconds", "For how long the version is served", labels=("model", "version", "previous")
    )
    not_finite = CounterMetricFamily(
        "pilot_guard_not_finite", "Rows with NaN or infinity", labels=("model", "version", "output")
    )
    of_series = {
        name: GaugeMetricFamily(f"pilot_guard_{name}", what, labels=("model", "output", "what"))
        for name, what in (
            ("psi", "Population stability index of the last answers against the reference"),
            ("ks", "Kolmogorov-Smirnov statistic of them"),
            ("drift", "1: the last answers are distributed differently than usual"),
            ("constant", "1: the last answers are all alike"),
        )
    }
    for state in states:
        name, watch = state.name, state.watch
        if not watch.version:
            continue
        counted = dict(state.counts)
        others = sorted({version for version, _, _ in counted if version != watch.version}, key=_number)
        for version in (*others[1 - VERSIONS :], watch.version):
            for kind, results in KINDS.items():
                for result in results:
                    comparisons.add_metric((name, version, kind, result), counted.get((version, kind, result), 0))
        for (version, kind), value in tuple(state.largest.items()):
            largest.add_metric((name, version, kind), value)
        change = watch.change
        age.add_metric(
            (name, watch.version, change.previous if change is not None else ""),
            time.monotonic() - (change.at_s if change is not None else watch.since_s),
        )
        if not state.guard.distribution:
            continue
        rows.add_metric((name,), watch.rows)
        reference.add_metric((name,), watch.reference_rows)
        learning.add_metric((name,), float(watch.is_learning))
        if state.guard.not_finite == "alarm":
            for output, count in tuple(watch.not_finite.items()):
                not_finite.add_metric((name, watch.version, output), count)
        for verdict in state.verdicts:
            key, distance = verdict.key, verdict.distance
            values = {"psi": distance.psi, "ks": distance.ks, "drift": verdict.drifts}
            if state.guard.constant == "alarm":
                values["constant"] = distance.is_constant
            for figure, value in values.items():
                of_series[figure].add_metric((name, *key), float(value))
    yield from (comparisons, largest, rows, reference, learning, age, not_finite, *of_series.values())


def _number(version: str) -> float:
    return int(version) if version.isdecimal() else math.inf
