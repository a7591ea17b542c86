"""What the autopilot expects of settings, by simulation."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from unit.paper import Paper

from tritonpilot import model_config
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.autopilot.controller import Demand, Knobs, State, decide
from tritonpilot.autopilot.model import SimulatedModel
from tritonpilot.autopilot.policy import ModelPolicy
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.simulate import Batcher, simulate
from tritonpilot.simulate.batcher import Level

DEVICE = Costs(
    rows=(1, 8, 32),
    execution_us=(8_000, 12_000, 30_000),
    request_us=5,
    front_us=60,
    reply_us=20,
    wire_us=200,
    cores=4,
    is_on_cpu=False,
    host_us=100,
)
CPU = Costs(rows=(1, 64), execution_us=(2_000, 20_000), request_us=10, front_us=60, reply_us=20, wire_us=200, cores=1)
BATCHER = Batcher(queue_delay_us=0, max_batch_size=32)
CLASSES = replace(
    BATCHER,
    levels=(Level("realtime", 100, 80_000), Level("batch", 50, 10_000_000)),
    default_level=1,
)


def test_a_prediction_is_that_of_a_long_simulation() -> None:
    model = SimulatedModel(DEVICE, BATCHER, 100.0)
    for rate_per_s, instances in ((50, 1), (400, 1), (1200, 2)):
        found = model.predict(Knobs(2000, instances), Demand(rate_per_s))
        streams = [Stream("all", rate_per_s, slo_ms=100.0)]
        batcher = replace(BATCHER, queue_delay_us=2000, instances=instances)
        long = simulate(batcher, DEVICE, traffic(streams, 60, 7), streams, 7)
        assert found.p99_ms == pytest.approx(long.outcome.p_ms(0.99), rel=0.15)
        assert found.utilisation == pytest.approx(long.utilisation, rel=0.1)
        assert found.mean_batch == pytest.approx(long.mean_rows, rel=0.1)


def test_the_same_question_has_the_same_answer_whoever_asks_and_whatever_was_asked_before() -> None:
    one, other = SimulatedModel(DEVICE, BATCHER, 100.0), SimulatedModel(DEVICE, BATCHER, 100.0)
    one.predict(Knobs(500, 3), Demand(2000, 2.5))
    question = Knobs(0, 2), Demand(700.0)
    assert one.predict(*question) == other.predict(*question) == one.predict(*question)
    assert one.predict(Knobs(0, 2), Demand(705.0)) == one.predict(*question)  # rounded


def test_more_instances_serve_more_on_a_device_and_not_on_one_core() -> None:
    busy = Demand(1500)
    device = [SimulatedModel(DEVICE, BATCHER, 100.0).predict(Knobs(0, n), busy).goodput_share for n in (1, 2, 4)]
    assert device[0] < 0.7
    assert device[-1] > 0.99
    core = SimulatedModel(CPU, replace(BATCHER, max_batch_size=64), 100.0)
    one, four = (core.capacity_per_s(n, 1.0) for n in (1, 4))
    assert one == four
    assert core.predict(Knobs(0, 4), Demand(5000)).goodput_share < core.predict(Knobs(0, 1), busy).goodput_share


def test_capacity_is_what_a_saturated_simulation_answers() -> None:
    for costs in (DEVICE, CPU):
        model = SimulatedModel(costs, BATCHER, 100.0)
        streams = [Stream("all", 20_000)]
        batcher = replace(BATCHER, instances=2)
        found = simulate(batcher, costs, traffic(streams, 5, 1), streams)
        assert model.capacity_per_s(2, 1.0) == pytest.approx(found.outcome.throughput_per_s, rel=0.1)


def test_classes_share_the_traffic_and_the_best_one_counts() -> None:
    model = SimulatedModel(DEVICE, CLASSES, 100.0, {"realtime": 100.0})
    mixed = Demand(2500, by_class={"realtime": 500, "batch": 2000})
    found = model.predict(Knobs(0, 1), mixed)
    assert found.p99_ms < 100  # realtime goes first
    assert found.goodput_share < 0.9  # batch is refused
    roomy = model.predict(Knobs(0, 1, {"batch": 100_000}), mixed)
    assert roomy.goodput_share > found.goodput_share
    assert model.predict(Knobs(0, 1), Demand(500, by_class={"unheard": 500})).p99_ms < 100


@pytest.mark.parametrize("rate_per_s", [0.0, 1e-9, 0.3, 1e6])
@pytest.mark.parametrize("rows", [0.0, 1.0, 1.37, 500.0])
def test_strange_traffic_has_an_answer(rate_per_s: float, rows: float) -> None:
    found = SimulatedModel(DEVICE, BATCHER, 100.0).predict(Knobs(0, 1), Demand(rate_per_s, rows))
    assert found.p99_ms > 0
    assert 0 <= found.goodput_share <= 1
    assert 0 < found.capacity_per_s < math.inf


def test_executions_that_take_no_time_have_no_bound_but_the_cores() -> None:
    free = replace(DEVICE, execution_us=(0, 0, 0), request_us=0)

    assert 0 < SimulatedModel(free, BATCHER, 100).capacity_per_s(1, 1.0) < math.inf


def test_a_model_without_a_batcher_is_refused() -> None:
    with pytest.raises(SpecError, match="no dynamic batcher"):
        SimulatedModel.of(ModelPolicy(model="m", slo_ms=100.0), DEVICE, model_config.parse('name: "m"', "here"))


def test_a_decision_takes_less_than_an_interval_by_far() -> None:
    """Warm: what a running autopilot needs. Slower machines and busy ones have ten times as long."""
    model = SimulatedModel(DEVICE, BATCHER, 100.0)
    policy = ModelPolicy.model_validate(
        {"model": "m", "policy": "model", "costs": "c", "slo_ms": 100.0, "instances": {"min": 1, "max": 8},
         "queue_delay_us": {"min": 0, "max": 20_000}}
    )  # fmt: skip
    paper, state, times = Paper(), State(), []
    for rate_per_s in [*range(100, 2000, 100)] * 2:
        seen = paper.interval(rate_per_s)
        began = time.thread_time()
        state, decision = decide(policy, state, seen, model)
        times.append(time.thread_time() - began)
        paper.knobs = decision.target or paper.knobs
    assert sorted(times[19:])[9] < 0.05
    assert paper.knobs.instances > 1
