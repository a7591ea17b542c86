"""What would these settings bring for this traffic? By a short simulation, the same for the same question, and remembered.

    model = SimulatedModel.of(policy, costs, config)
    model.predict(Knobs(queue_delay_us=500, instances=2), Demand(arrivals_per_s=800)).p99_ms

A question is rounded first, traffic to steps of 4 %, so that most intervals ask what was asked before.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from google.protobuf import json_format

from tritonpilot.arrivals import Stream, Traffic, traffic
from tritonpilot.autopilot.policy import ModelPolicy
from tritonpilot.autopilot.terms import Demand, Knobs, Prediction
from tritonpilot.costs import Costs
from tritonpilot.entry.terms import terms_of
from tritonpilot.model_config import ModelConfig
from tritonpilot.simulate import Batcher, simulate

STEP = 1.04  # between two rates that are told apart
SHARE_STEP = 0.05  # and between two shares of a class
LEAST_PER_S = 0.1
REQUESTS, MOST_REQUESTS = 2500, 12_000  # of a simulation: 25 of them are beyond the P99
SLOS = 15  # times the SLO that is simulated at least: a queue that grows shows
REMEMBERED = 4096  # answers
ANYONE = "all"

_Load = tuple[int, float, tuple[tuple[str, int], ...]]  # steps of the rate, rows, steps of each class's share


@dataclass
class SimulatedModel:
    """A Model by `tritonpilot.simulate`. `slos_ms` of classes; `slo_ms` is that of the best one, and of callers without a class."""

    costs: Costs
    batcher: Batcher
    slo_ms: float
    slos_ms: Mapping[str, float] = field(default_factory=dict)
    seed: int = 1

    def __post_init__(self) -> None:
        self._answers: OrderedDict[tuple[Knobs, tuple[tuple[str, int], ...], _Load], Prediction] = OrderedDict()
        self._traffic: OrderedDict[_Load, tuple[tuple[Stream, ...], Traffic]] = OrderedDict()

    @classmethod
    def of(cls, policy: ModelPolicy, costs: Costs, config: ModelConfig) -> SimulatedModel:
        """Of a model as Triton has it now. Raises SpecError for one without a dynamic batcher."""
        terms = terms_of(json_format.MessageToDict(config, preserving_proto_field_name=True))
        slos_ms = {each.name: each.slo_s * 1e3 for each in terms.classes if each.slo_s is not None}
        return cls(costs, Batcher.of(config), policy.slo_ms or min(slos_ms.values(), default=math.inf), slos_ms)

    def predict(self, knobs: Knobs, demand: Demand) -> Prediction:
        """P99 is that of the best class that calls."""
        load = self._rounded(demand)
        question = (knobs, tuple(sorted(knobs.max_queue_sizes.items())), load)
        found = self._answers.pop(question, None) or self._simulated(knobs, load)
        self._answers[question] = found  # the newest last
        if len(self._answers) > REMEMBERED:
            self._answers.popitem(last=False)
        return found

    def capacity_per_s(self, instances: int, rows_per_request: float) -> float:
        """Requests a second with full batches back to back, and the cores that requests need besides."""
        costs, batch = self.costs, self.batcher.max_batch_size
        requests = max(1.0, batch / rows_per_request)
        execution_us = costs.execution_mean_us(batch, requests)
        each_us = costs.front_us + costs.front_row_us * rows_per_request + costs.reply_us
        if costs.is_on_cpu:
            threads = min(self.batcher.threads, costs.cores)
            cpu_us = execution_us * threads + requests * each_us
        else:
            cpu_us = costs.host_us + requests * (costs.host_request_us + each_us)
        by_cores = costs.cores / cpu_us if cpu_us > 0 else math.inf
        by_instances = instances / execution_us if execution_us > 0 else math.inf
        return min(by_instances, by_cores) * requests * 1e6

    def _simulated(self, knobs: Knobs, load: _Load) -> Prediction:
        sizes = knobs.max_queue_sizes
        levels = tuple(
            replace(level, max_queue_size=sizes.get(level.name, level.max_queue_size)) for level in self.batcher.levels
        )
        batcher = replace(self.batcher, queue_delay_us=knobs.queue_delay_us, instances=knobs.instances, levels=levels)
        streams, requests = self._requests(load)
        found = simulate(batcher, self.costs, requests, streams, self.seed)
        best = min(streams, key=batcher.place)
        p99_ms = found.outcome.by_stream[best.name].p_ms(0.99)
        return Prediction(
            p99_ms=math.inf if math.isnan(p99_ms) else p99_ms,
            utilisation=found.utilisation,
            goodput_share=found.outcome.attainment,
            mean_batch=found.mean_rows,
            capacity_per_s=self.capacity_per_s(knobs.instances, load[1]),
        )

    def _rounded(self, demand: Demand) -> _Load:
        rate = max(LEAST_PER_S, demand.arrivals_per_s)
        rows = min(float(self.batcher.max_batch_size), max(1.0, float(f"{demand.rows_per_request:.2g}")))
        total = sum(demand.by_class.values())
        known = {level.name for level in self.batcher.levels if level.name}
        shares = (
            (name, round(own / total / SHARE_STEP)) for name, own in sorted(demand.by_class.items()) if name in known
        )
        found = tuple(each for each in shares if each[1]) if total > 0 else ()
        return round(math.log(rate, STEP)), rows, found or (("", 1),)

    def _requests(self, load: _Load) -> tuple[tuple[Stream, ...], Traffic]:
        if load not in self._traffic:
            step, rows, shares = load
            rate = STEP**step
            weight = sum(share for _, share in shares)
            below = math.floor(rows)
            sizes = below if rows == below else {below: below + 1 - rows, below + 1: rows - below}
            names = [level.name for level in self.batcher.levels]
            best = min((name for name, _ in shares if name), key=names.index, default="")
            streams = tuple(
                Stream(
                    name or ANYONE,
                    rate * share / weight,
                    rows=sizes,
                    caller_class=name,
                    slo_ms=self.slo_ms if name == best else self.slos_ms.get(name, math.inf),
                )
                for name, share in shares
            )
            seconds = min(max(REQUESTS / rate, SLOS * min(self.slo_ms, 1e4) / 1e3), MOST_REQUESTS / rate)
            self._traffic[load] = streams, traffic(streams, seconds, self.seed)
            if len(self._traffic) > REMEMBERED // 64:
                self._traffic.popitem(last=False)
        return self._traffic[load]
