"""A simulated server that is stopped, looked at and changed: by hand, and by its own books."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from tritonpilot.arrivals import Stream, Traffic, traffic
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.simulate import Batcher, Host, Level, Run, Window, simulate

#: 10 ms for any batch on a device, nothing else costs.
DEVICE = Costs(rows=(1, 64), execution_us=(10_000.0, 10_000.0), request_us=0.0, is_on_cpu=False)
SHARP = Host(timer_slack_us=0.0, batcher_first=0.0)
LEVELS = (Level("high", max_queue_size=50, timeout_us=100_000), Level("low", max_queue_size=20))
STREAMS = [Stream("high", 150, priority=1, slo_ms=50), Stream("low", 100, priority=2)]


def arriving(*at_ms: float) -> Traffic:
    count = len(at_ms)
    return Traffic(
        np.array(at_ms) / 1e3, np.ones(count, dtype=np.int32), np.zeros(count, dtype=np.int16), max(at_ms) / 1e3 + 1
    )


def begun(batcher: Batcher, *at_ms: float, most: int = 4, costs: Costs = DEVICE) -> Run:
    return Run(batcher, costs, arriving(*at_ms), [Stream("all", 1)], host=SHARP, most_instances=most)


def latencies_ms(run: Run) -> list[float]:
    run.finish()
    return [round(float(value) / 1e3, 3) for value in run.latencies()[0]]


@pytest.mark.parametrize("levels", [(Level(),), LEVELS])
@pytest.mark.parametrize("is_on_cpu", [True, False])
def test_where_a_run_is_stopped_changes_nothing(levels: tuple[Level, ...], is_on_cpu: bool):
    costs = replace(DEVICE, is_on_cpu=is_on_cpu, front_us=100.0, reply_us=50.0, host_us=200.0, cores=2)
    batcher = Batcher(2000, 2, levels=levels, instances=2)
    load = traffic(STREAMS, 10, seed=3)
    whole = simulate(batcher, costs, load, STREAMS, seed=5)
    run = Run(batcher, costs, load, STREAMS, seed=5)
    windows = list(looked(run, np.linspace(0, 10, 97)))
    found = run.finish()
    assert found.as_dict() == whole.as_dict()
    windows.append(after_the_end(run))
    assert sum(each.arrived for each in windows) == len(load)
    assert sum(each.rows for each in windows) == load.rows.sum()
    assert sum(each.answered for each in windows) == whole.outcome.answered
    assert sum(each.refused + each.failed for each in windows) == sum(whole.outcome.errors.values())
    assert sum(sum(each.batch_sizes.values()) for each in windows) == whole.executions
    latencies = np.concatenate([each.latency_ms for each in windows])
    assert latencies.max() == pytest.approx(whole.outcome.latency.max_us / 1e3)
    assert {name: sum(each.by_stream[name] for each in windows) for name in ("high", "low")} == {
        name: each.requests for name, each in whole.outcome.by_stream.items()
    }


def looked(run: Run, at_s: Iterable[float]) -> Iterable[Window]:
    for moment in at_s:
        run.advance(float(moment))
        yield run.look()


def after_the_end(run: Run) -> Window:
    run.advance(1000.0)
    return run.look()


def test_a_window_counts_what_waits_and_what_was_refused():
    run = begun(Batcher(0, 1, levels=(Level("only", max_queue_size=2), Level("other")), default_level=1), 0, 1, 2, 3, 4)
    run.advance(0.0055)
    window = run.look()
    assert (window.arrived, window.answered, window.refused, window.waiting) == (5, 0, 2, 2)
    run.advance(0.0255)
    window = run.look()
    assert (window.arrived, window.answered, window.waiting) == (0, 2, 0)
    assert window.queue_us == pytest.approx((0 + 9000) / 2)
    assert window.latency_ms == pytest.approx([10, 19])


def test_an_instance_that_starts_takes_what_waits_when_it_is_up():
    run = begun(Batcher(0, 1), 0, 1, 2)
    run.advance(0.002)
    run.change(instances=2, start_s=0.005)
    assert run.instances == 2
    assert latencies_ms(run) == [10, 7 + 10 - 1, 10 + 10 - 2]


def test_an_instance_on_the_cpu_starts_too():
    costs = replace(DEVICE, is_on_cpu=True, cores=2)
    run = begun(Batcher(0, 1), 0, 1, 2, costs=costs)
    run.advance(0.002)
    run.change(instances=2, start_s=0.005)
    assert latencies_ms(run) == [10, 7 + 10 - 1, 10 + 10 - 2]


def test_an_instance_that_goes_ends_its_execution():
    run = begun(Batcher(0, 1, instances=2), 0, 1, 2, 3)
    run.advance(0.0025)
    run.change(instances=1)
    assert run.instances == 1
    assert latencies_ms(run) == [10, 10, 11 + 10 - 2, 21 + 10 - 3]  # the first to end is no more


def test_an_idle_instance_goes_at_once_and_comes_back():
    run = begun(Batcher(0, 1, instances=2), 0, 100, 101, 200, 201)
    run.advance(0.05)
    run.change(instances=1)
    run.advance(0.15)
    run.change(instances=2)
    assert latencies_ms(run) == [10, 10, 19, 10, 10]


def test_one_that_was_to_go_stays_when_more_are_asked_for_again():
    run = begun(Batcher(0, 1, instances=2), 0, 1, 2, 3)
    run.advance(0.0025)
    run.change(instances=1)
    run.change(instances=2, start_s=100.0)
    assert latencies_ms(run) == [10, 10, 18, 18]


def test_instance_time_counts_from_the_wish_to_the_farewell():
    run = begun(Batcher(0, 1), 0, 9000)
    run.advance(2)
    run.change(instances=3, start_s=1)
    run.advance(5)
    run.change(instances=2)
    assert run.finish().instance_s == pytest.approx(2 * 1 + 3 * 3 + 5 * 2, rel=0.01)


def test_a_new_delay_counts_from_the_next_look_on():
    run = begun(Batcher(5000, 8), 0, 100)
    run.advance(0.05)
    run.change(queue_delay_us=1000)
    assert latencies_ms(run) == [15, 11]


def test_a_new_limit_refuses_what_comes_then():
    run = begun(Batcher(0, 1, levels=(Level("a", max_queue_size=9), Level("b"))), 0, 1, 2, 3, 100, 101, 102, 103)
    run.advance(0.05)
    run.change(max_queue_sizes={"a": 1})
    assert run.finish().outcome.errors == {"rejected": 2}


def test_a_number_of_instances_that_cannot_be_is_refused():
    run = begun(Batcher(0, 1), 0, 1, most=2)
    for wanted in (0, 3):
        with pytest.raises(SpecError):
            run.change(instances=wanted)
    assert run.instances == 1
