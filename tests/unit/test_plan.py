"""Plans: numbers of replicas that the simulator confirms, bursts, connections, cost, and what is refused."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tritonpilot.arrivals import Stream
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.plan import COLUMNS, Fleet, Plan, Replica, burst_of, fullest, plan
from tritonpilot.simulate import Batcher, Level
from tritonpilot.tune.wish import Wish

# A device that takes 1 ms for a request, one at a time: an M/D/1 queue of 1000 requests/s.
ONE_MS = Costs(rows=(1,), execution_us=(1000.0,), request_us=0.0, is_on_cpu=False)
SINGLE = Batcher(queue_delay_us=0, max_batch_size=1)
# The same for up to 8 rows at once.
BATCHED = Batcher(queue_delay_us=0, max_batch_size=8)
FLAT = Costs(rows=(1, 8), execution_us=(1000.0, 1000.0), request_us=0.0, is_on_cpu=False)


def wish(slo_ms: float, rows: int = 1) -> Wish:
    return Wish((Stream("all", 100.0, rows=rows, slo_ms=slo_ms),))


def replica(slo_ms: float, batcher: Batcher = SINGLE, costs: Costs = ONE_MS) -> Replica:
    return Replica(batcher, costs, wish(slo_ms), requests=20_000)


def planned(rates: Sequence[float], batcher: Batcher = SINGLE, costs: Costs = ONE_MS, **options: Any) -> Plan:
    return plan(batcher, costs, wish(5.0), rates, requests=20_000, **options)


def test_capacity_is_where_the_p99_of_an_md1_queue_reaches_the_slo() -> None:
    one = replica(10.0)
    capacity = one.capacity_per_s()
    # The tail of M/D/1 falls as exp(-s t) with lambda (exp(s D) - 1) = s (Cramer and Lundberg): s = -ln(.01)/9 ms within a tenth.
    decay = -math.log(0.01) / 9
    assert capacity == pytest.approx(1000 * decay / (math.exp(decay) - 1), rel=0.1)
    assert one.keeps(capacity)
    assert not one.keeps(capacity * 1.01)


def test_number_of_replicas_is_confirmed_and_one_less_is_too_few() -> None:
    found = planned([50, 5_000, 1e6])
    one = Replica(SINGLE, ONE_MS, wish(5.0), requests=20_000)
    assert found.rows[0].replicas == 1
    for row in found.rows[1:]:
        assert one.keeps(row.rate_per_s / row.replicas)
        assert not one.keeps(row.rate_per_s / (row.replicas - 1))
        assert row.replicas > row.naive_replicas
    assert found.rows[2].replicas == pytest.approx(200 * found.rows[1].replicas, rel=0.15)
    assert found.rows[2].p99_ms <= 5.0
    assert 0.5 < found.rows[2].utilisation < 0.6  # as the formula above says of 5 ms
    assert found.rows[2].headroom < 0.01
    assert found.rows[0].headroom > 10
    assert "would give 1,0" in found.reason


def test_batches_make_a_replica_larger() -> None:
    single, batched = planned([10_000]), planned([10_000], BATCHED, FLAT)
    assert batched.capacity_per_s > 7 * single.capacity_per_s
    assert batched.rows[0].replicas * 7 < single.rows[0].replicas * 1.2


def test_burst_spare_and_imbalance_each_ask_for_more() -> None:
    def replicas(fleet: Fleet) -> int:
        return plan(SINGLE, ONE_MS, wish(5.0), [10_000], fleet=fleet, requests=4_000).rows[0].replicas

    even = replicas(Fleet())
    assert replicas(Fleet(burst=1.5, spare=2)) == pytest.approx(1.5 * even + 2, abs=1)
    assert replicas(Fleet(imbalance=1.2)) == pytest.approx(1.2 * even, abs=1)
    assert replicas(Fleet(rate_per_connection=100.0)) > 1.5 * even


def test_row_of_a_burst_has_the_figures_of_rate_and_burst() -> None:
    (row,) = planned([10_000], fleet=Fleet(burst=2.0, spare=1)).rows
    assert row.utilisation == pytest.approx(row.replica_per_s / 1000, rel=0.02)
    assert row.p99_ms < row.burst_p99_ms <= 5.0
    assert row.headroom > 1.0
    assert row.burst_headroom < 0.1


def test_cost_is_that_of_the_replicas() -> None:
    found = planned([10_000], cost_per_hour=0.36)
    (row,) = found.rows
    assert row.cost_per_hour == pytest.approx(0.36 * row.replicas)
    assert row.cost_per_million == pytest.approx(0.36 * row.replicas / 36)
    said = json.loads(json.dumps(found.as_dict(), allow_nan=False))["rows"][0]
    assert {column.name for column in COLUMNS} <= set(said)
    assert planned([10_000]).rows[0].cost_per_million is None


def test_saturated_throughput_is_the_most_at_any_rate_also_where_more_load_lowers_it() -> None:
    # On one core the front end takes more from executions the more requests come.
    costs = Costs(
        rows=(1, 64), execution_us=(800.0, 4000.0), request_us=5.0, front_us=50.0, reply_us=20.0, wire_us=100.0
    )
    found = plan(Batcher(queue_delay_us=500, max_batch_size=64), costs, wish(50.0), [100_000], requests=10_000)
    assert found.saturated_per_s >= found.capacity_per_s > 1000
    assert found.rows[0].naive_replicas <= found.rows[0].replicas


def test_rate_of_a_few_requests_a_day_is_planned_for() -> None:
    levels = (Level("high"), Level("low"))
    (row,) = planned([1e-4], Batcher(queue_delay_us=0, max_batch_size=1, levels=levels)).rows
    assert row.replicas == 1
    assert row.utilisation == pytest.approx(1e-7, rel=0.05)
    assert row.p99_ms == pytest.approx(1.0, rel=0.2)


def test_requests_larger_than_a_batch_have_no_plan() -> None:
    with pytest.raises(SpecError, match="up to 9 rows, and the model's max_batch_size is 8"):
        plan(BATCHED, FLAT, wish(5.0, rows=9), [100])


def test_same_seed_same_plan() -> None:
    first, again = (planned([12_345.0], BATCHED, FLAT, seed=3).as_dict() for _ in range(2))
    assert first == again


@pytest.mark.parametrize(("mean", "replicas"), [(0.5, 100), (20, 1_000), (1_000, 300)])
def test_fullest_replica_has_what_chance_gives_it(mean: float, replicas: int) -> None:
    random = np.random.default_rng(1)
    drawn = [random.multinomial(round(mean * replicas), [1 / replicas] * replicas).max() for _ in range(50)]
    assert np.mean(drawn) <= fullest(mean, replicas) < np.mean(drawn) * 1.35 + 1


def test_fullest_of_one_or_of_few_connections() -> None:
    assert fullest(7.0, 1) == pytest.approx(7.0)
    assert fullest(0.01, 100) == pytest.approx(1.0)  # there is one connection


def test_burst_of_a_trace_is_its_busiest_window(tmp_path: Path) -> None:
    trace = tmp_path / "arrivals.csv"
    seconds = [*np.arange(0, 100, 1.0), *np.arange(40, 50, 0.5) + 0.25]  # 120 arrivals, 30 of them in ten seconds
    trace.write_text("at_s\n" + "\n".join(f"{second}" for second in seconds))
    assert burst_of(trace, 10) == pytest.approx(2.5, rel=0.05)
    with pytest.raises(SpecError, match="window of 60 s"):
        burst_of(trace, 60)


def test_promise_that_a_lone_request_misses_is_out_of_reach() -> None:
    with pytest.raises(
        SpecError, match=r"No number of replicas keeps the promises.*promised 0\.5 ms and gets 1\.\d+ ms at P99"
    ):
        plan(SINGLE, ONE_MS, wish(0.5), [100])


def test_connection_that_is_too_much_for_a_replica_is_refused() -> None:
    with pytest.raises(SpecError, match="One connection sends up to 2,000"):
        planned([1e5], fleet=Fleet(rate_per_connection=2000))


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        ({"burst": 0.5}, "burst is 1 or more"),
        ({"burst": math.nan}, "burst is 1 or more"),
        ({"imbalance": 0.9}, "imbalance is 1 or more"),
        ({"rate_per_connection": -1.0}, "a connection cannot"),
        ({"spare": -1}, "spare replicas"),
        ({"imbalance": 1.1, "rate_per_connection": 1.0}, "give one of them"),
    ],
)
def test_fleet_that_cannot_be_is_refused(fleet: dict[str, float], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Fleet(**fleet)  # type: ignore[arg-type]


@pytest.mark.parametrize("rates", [[], [0.0], [math.nan], [math.inf], [-5.0]])
def test_rate_that_cannot_be_is_refused(rates: list[float]) -> None:
    with pytest.raises(SpecError, match="Nothing was simulated"):
        planned(rates)


def test_cost_that_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="cannot cost -1"):
        planned([100], cost_per_hour=-1)


def test_costs_without_any_time_make_no_plan() -> None:
    with pytest.raises(SpecError, match="any rate within its promises"):
        Replica(SINGLE, replace(ONE_MS, execution_us=(0.0,)), wish(5.0), requests=1000).capacity_per_s()
