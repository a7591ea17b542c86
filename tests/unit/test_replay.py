"""Traffic played again to policies and to settings that never change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tritonpilot.arrivals import Stream, traffic
from tritonpilot.autopilot import controller, replay
from tritonpilot.autopilot.controller import Decision, Knobs
from tritonpilot.autopilot.picture import lines, png
from tritonpilot.autopilot.policy import Instances, ModelPolicy, QueueDelay, QueueLimit
from tritonpilot.autopilot.replay import Case, compare, play, static
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.simulate import Batcher, Level

#: An instance answers at most 800 rows a second.
DEVICE = Costs(rows=(1, 8), execution_us=(5000.0, 10_000.0), request_us=0.0, is_on_cpu=False)
POLICY = ModelPolicy(
    model="device",
    policy="queue_depth",
    slo_ms=50,
    instances=Instances(min=1, max=4),
    queue_delay_us=QueueDelay(min=0, max=5000),
    cooldown_s=1,
    steady_s=1,
    shrink_after_s=5,
    max_changes_per_minute=60,
)


def case(
    rate_per_s: float = 300, peak_per_s: float = 2200, *, policy: ModelPolicy = POLICY, seconds: float = 30
) -> Case:
    """Bursts of 5 s that need three instances, and one is enough between them."""
    burst = Stream("app", rate_per_s, "burst", slo_ms=50, peak_per_s=peak_per_s, every_s=15, for_s=5)
    return Case(
        Batcher(1000, 8, instances=2), DEVICE, traffic([burst], seconds, seed=1), [burst], policy, interval_s=0.5
    )


def test_a_policy_that_is_off_is_a_setting_that_never_changes():
    off = play(case(), POLICY.model_copy(update={"policy": "off"}))
    still = static(case(), case().knobs)
    assert off.outcome.as_dict() == still.outcome.as_dict()
    assert off.changes == 0
    assert off.found.instance_s == pytest.approx(still.found.instance_s)
    assert list(off.missed) == list(still.missed)


def test_what_is_seen_adds_up():
    played = play(case(), POLICY)
    seen = [step.seen for step in played.steps]
    assert len(seen) == len(played.missed) == 60
    assert sum(each.arrivals_per_s * each.seconds for each in seen) == pytest.approx(len(case().traffic))
    assert sum(played.missed) == played.violations > 0
    in_bursts = [each for each in seen if each.arrivals_per_s > 1500]
    assert max(each.mean_batch for each in in_bursts) == pytest.approx(8, abs=0.5)
    assert max(each.waiting for each in seen) > 50
    assert {each.max_batch_size for each in seen} == {8}


def test_a_policy_follows_the_bursts_and_plays_the_same_twice():
    one, two = play(case(), POLICY), play(case(), POLICY)
    assert one.found.as_dict() == two.found.as_dict()
    numbers = [step.seen.knobs.instances for step in one.steps]
    assert (min(numbers), max(numbers)) == (1, 4)
    assert one.changes > 4
    assert one.found.instance_s == pytest.approx(sum(numbers) * 0.5, rel=0.03)


def scripted(monkeypatch: pytest.MonkeyPatch, at_s: float, target: Knobs, way: str) -> None:
    def decide(policy, state, seen, model=None):
        del policy, model
        is_now = seen.at_s == at_s
        return state, Decision("change", target, "told", way) if is_now else Decision("keep")

    monkeypatch.setattr(controller, "decide", decide)


@pytest.mark.parametrize(("way", "first_s"), [("live", 2.0), ("reload", 3.5)])
def test_a_reload_takes_its_time(monkeypatch: pytest.MonkeyPatch, way: str, first_s: float):
    constant = Stream("app", 10, "constant", slo_ms=50)
    slow = Case(Batcher(20_000, 8), DEVICE, traffic([constant], 10, seed=0), [constant], POLICY, interval_s=0.5)
    scripted(monkeypatch, 2.0, Knobs(0, 1), way)
    steps = play(slow, POLICY).steps
    assert next(step.seen.at_s for step in steps if step.seen.queue_us < 1000) == pytest.approx(first_s + 1)


def test_p99_is_seen_over_as_long_as_the_source_looks_back():
    def told(over_s: float) -> list[float | None]:
        return [step.seen.p99_ms for step in play(replace(case(), p99_over_s=over_s), POLICY).steps]

    now, back = told(0.0), told(10.0)
    assert now[9] is not None
    assert now[9] < 50
    last = 39  # five seconds after the end of the first burst
    assert now[last] is not None
    assert back[last] is not None
    assert back[last] > 50 > now[last]


def test_limits_of_classes_are_changed(monkeypatch: pytest.MonkeyPatch):
    policy = POLICY.model_copy(update={"max_queue_sizes": {"app": QueueLimit(min=1, max=500)}})
    flood = Stream("app", 2000, caller_class="app", slo_ms=50)
    levels = (Level("app", max_queue_size=500), Level("other"))
    overloaded = Case(
        Batcher(0, 8, levels=levels), DEVICE, traffic([flood], 6, seed=0), [flood], policy, interval_s=0.5
    )
    assert overloaded.knobs.max_queue_sizes == {"app": 500}
    scripted(monkeypatch, 3.0, Knobs(0, 1, {"app": 10}), "live")
    steps = play(overloaded, policy).steps
    assert steps[3].seen.waiting == pytest.approx(500, abs=20)
    assert steps[-1].seen.waiting == pytest.approx(10, abs=10)
    assert steps[-1].seen.refused_per_s > 1000
    assert steps[-1].seen.arrivals_by_class["app"] == pytest.approx(2000, rel=0.2)


def test_the_best_static_setting_has_the_fewest_instances_that_keep_the_promise():
    found = compare(case(), {"queue_depth": None})
    assert found.settings == 4 * 5  # delays within 0 and 5000
    assert found.best.first.instances == 3
    assert found.best.outcome.attainment >= replay.PROMISE
    assert found.worst.first.instances == 2  # one has not the capacity for the mean of 933 requests/s
    assert found.worst.violations > found.best.violations
    rows = found.rows()
    assert [row["name"].split(":")[0] for row in rows] == ["best static", "worst static", "queue_depth"]
    assert rows[0]["saved"] == 0
    assert rows[1]["saved"] == pytest.approx(1 / 3, abs=0.05)


def test_where_no_setting_keeps_the_promise_the_fewest_violations_are_the_best():
    tight = POLICY.model_copy(update={"instances": Instances(min=1, max=2)})
    assert compare(case(policy=tight), {}).best.first.instances == 2


def test_traffic_beyond_all_instances_is_refused():
    with pytest.raises(SpecError, match="cannot serve the mean"):
        compare(case(5000, 9000), {})


def test_many_instances_are_tried_in_steps():
    many = POLICY.model_copy(update={"instances": Instances(min=1, max=256)})
    found = replay.settings(case(policy=many))
    assert len(found) <= replay.MOST_STATIC + 5
    assert {each.instances for each in found} >= {1, 256}


def test_a_comparison_is_drawn():
    found = compare(case(), {"queue_depth": None})
    drawn = lines(found)
    assert [line.name for line in drawn] == [each.name for each in found.all]
    assert {len(line.instances) for line in drawn} == {60}
    assert png("bursts", case().traffic, 0.5, drawn).startswith(b"\x89PNG")
    assert all(math.isfinite(row["p99_ms"]) for row in found.rows())
