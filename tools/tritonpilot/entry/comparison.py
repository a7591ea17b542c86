"""How far apart are the answers of a served model and of its candidate? Sums over many requests, as metrics of the entry.

    seen = Comparison(); seen.take(served, candidate)              # output name -> array, of the same request
    seen.outputs["prob"].squared_difference                         # whoever reads the metrics divides

Sums, not verdicts: how much may differ is said to `tritonpilot swap`, which reads them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.http import InferResult as HttpInferResult

from tritonpilot.entry.extras import Answer

Arrays = Mapping[str, NDArray[Any]]

ShadowResult = Literal["ok", "misfit", "not_finite", "failed", "dropped"]
CanaryResult = Literal["ok", "failed", "failed_both", "cancelled"]
#: 0.1 ms to 45 s in steps of a fifth: coarser ones could not tell whether a model takes 1.5 times as long.
EDGES_S = tuple(1e-4 * 1.2**step for step in range(72))


class Latency:
    """A histogram over EDGES_S."""

    def __init__(self) -> None:
        self.counts = [0] * (len(EDGES_S) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(EDGES_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them."""
        return list(zip((*(f"{edge:.6g}" for edge in EDGES_S), "+Inf"), accumulate(self.counts), strict=True))


@dataclass
class OutputSums:
    """Of one output: served values and their differences from the candidate's. Of what is no number `unequal` counts alone."""

    values: int = 0
    unequal: int = 0
    served: float = 0.0
    served_squared: float = 0.0
    squared_difference: float = 0.0
    largest_difference: float = 0.0

    def take(self, served: NDArray[Any], candidate: NDArray[Any]) -> None:
        """Add an answer."""
        self.values += served.size
        self.unequal += int((served != candidate).sum())
        if served.dtype.kind == "f" and served.size:
            ours, theirs = served.astype(np.float64), candidate.astype(np.float64)
            difference = np.abs(ours - theirs)[np.isfinite(ours)]
            finite = ours[np.isfinite(ours)]
            self.served += float(finite.sum())
            self.served_squared += float((finite**2).sum())
            self.squared_difference += float((difference**2).sum())
            self.largest_difference = max(self.largest_difference, float(difference.max(initial=0.0)))


@dataclass
class Comparison:
    """What is known of one candidate since its shares were set."""

    shadows: Counter[ShadowResult] = field(default_factory=Counter)
    canaries: Counter[CanaryResult] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    """Outcomes of requests that the served model got while there was a canary."""
    outputs: dict[str, OutputSums] = field(default_factory=dict)
    candidate_latency: Latency = field(default_factory=Latency)
    served_latency: Latency = field(default_factory=Latency)
    said: str = ""

    def take(self, served: Arrays, candidate: Arrays) -> None:
        """Add the answers to one request, which have the same outputs and shapes."""
        for name, array in served.items():
            self.outputs.setdefault(name, OutputSums()).take(array, candidate[name])

    @staticmethod
    def collect(plans: Mapping[str, tuple[float, float]], seen: Mapping[str, Comparison]) -> Iterator[Any]:
        """All models' metrics. `plans` are the shares of canary and shadow that are in force."""
        shares = GaugeMetricFamily(
            "candidate_share",
            "Part of a model's requests that goes to its candidate (canary), or of which it gets a copy (shadow)",
            labels=("model", "kind"),
        )
        by_result = ("model", "result")
        shadows = CounterMetricFamily("shadow_requests", "Copies for a candidate, by what came", labels=by_result)
        canaries = CounterMetricFamily(
            "canary_requests", "Requests sent to a candidate, by what came", labels=by_result
        )
        served = CounterMetricFamily(
            "canary_served_requests",
            "Requests sent to the served model while its candidate had a share",
            labels=by_result,
        )
        latency = HistogramMetricFamily(
            "canary_latency_seconds",
            "From a request's way to Triton to its answer, in that time",
            labels=("model", "who"),
        )
        sums = {
            name: GaugeMetricFamily(f"shadow_{name}", what, labels=("model", "output"))
            for name, what in (
                ("values", "Values of the served answers that were compared"),
                ("unequal", "Values that the candidate answered differently"),
                ("served", "Sum of the served values"),
                ("served_squared", "Sum of their squares"),
                ("squared_difference", "Sum of the squared differences of the candidate's"),
                ("largest_difference", "The largest difference of a value"),
            )
        }
        for model, (canary, shadow) in plans.items():
            shares.add_metric((model, "canary"), canary)
            shares.add_metric((model, "shadow"), shadow)
        for model, each in seen.items():
            for result in get_args(ShadowResult):
                shadows.add_metric((model, result), each.shadows[result])
            for result in get_args(CanaryResult):
                canaries.add_metric((model, result), each.canaries[result])
            for outcome in ("ok", "failed"):
                served.add_metric((model, outcome), each.served[outcome])
            for who, seen_latency in (("candidate", each.candidate_latency), ("served", each.served_latency)):
                latency.add_metric((model, who), seen_latency.buckets(), seen_latency.sum_s)
            for output, found in tuple(each.outputs.items()):
                for name, family in sums.items():
                    family.add_metric((model, output), getattr(found, name))
        yield from (shares, shadows, canaries, served, latency, *sums.values())


def misfit(served: Arrays, candidate: Arrays) -> Literal["misfit", "not_finite", ""]:
    """Why two answers cannot be compared: other outputs, types or shapes; NaN or infinity where the served one has none."""
    for name, ours in served.items():
        theirs = candidate.get(name)
        if theirs is None or theirs.dtype != ours.dtype or theirs.shape != ours.shape:
            return "misfit"
        if ours.dtype.kind == "f" and (np.isfinite(ours) & ~np.isfinite(theirs)).any():
            return "not_finite"
    return ""


def outputs_of(answer: Answer, protocol: str) -> dict[str, NDArray[Any]]:
    """The arrays of an answer. Raises whatever Triton's client meets."""
    if protocol == "grpc":
        response = service_pb2.ModelInferResponse.FromString(answer.text)
        result: Any = InferResult(response)
        names = [output.name for output in response.outputs]
    else:
        result = HttpInferResult.from_response_body(
            answer.text + answer.tail, header_length=len(answer.text) if answer.tail else None
        )
        names = [output["name"] for output in result.get_response()["outputs"]]
    return {name: result.as_numpy(name) for name in names}
