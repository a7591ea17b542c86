"""What the autopilot decides, in hours of traffic on paper."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from unit.paper import Curve, Known, Paper

from tritonpilot.autopilot.controller import Decision, Knobs, Model, State, after, decide
from tritonpilot.autopilot.policy import ModelPolicy

POLICIES = ("model", "feedback")
INTERVAL_S = 5.0
DAY_S = 14_400.0  # a short one


def policy(kind: str = "model", **more: Any) -> ModelPolicy:
    """Of 1 to 8 instances and a delay up to 20 ms, for 100 ms."""
    return ModelPolicy.model_validate(
        {
            "model": "m",
            "policy": kind,
            "slo_ms": 100.0,
            "costs": "costs.json",
            "instances": {"min": 1, "max": 8},
            "queue_delay_us": {"min": 0, "max": 20_000},
            **more,
        }
    )


@dataclass
class Run:
    """A policy in charge of a model on paper."""

    policy: ModelPolicy
    paper: Paper = field(default_factory=Paper)
    model: Model | None = field(default_factory=Known)
    state: State = field(default_factory=State)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    noise: random.Random = field(default_factory=lambda: random.Random(1))

    def step(self, rate_per_s: float, **what: Any) -> Decision:
        """An interval, its decision, and that carried out. `what`: seen otherwise than it is."""
        seen = replace(self.paper.interval(rate_per_s, INTERVAL_S), **what)
        self.state, decision = decide(self.policy, self.state, seen, self.model)
        self.state = State.of_dict(json.loads(json.dumps(self.state.as_dict(), allow_nan=False)))
        if decision.action in ("change", "revert"):
            assert decision.target is not None
            assert decision.way
            self.paper.knobs = decision.target
        self.decisions.append((seen.at_s, decision))
        assert decision.reason
        return decision

    def steady(self, rate_per_s: float, seconds: float, chance: float = 0.0) -> list[Decision]:
        """So long at one rate, that chance moves by a share of it."""
        count = round(seconds / INTERVAL_S)
        return [self.step(rate_per_s * max(0.0, 1 + self.noise.gauss(0, chance))) for _ in range(count)]

    @property
    def changes(self) -> list[tuple[float, Decision]]:
        return [(at_s, each) for at_s, each in self.decisions if each.action in ("change", "revert")]


def changes(decisions: Sequence[Decision]) -> int:
    return sum(each.action in ("change", "revert") for each in decisions)


# -- What it is for


@pytest.mark.parametrize("kind", POLICIES)
def test_a_shift_of_the_load_is_answered_within_two_intervals(kind: str) -> None:
    run = Run(policy(kind))
    run.steady(100, 300)
    assert run.paper.knobs.instances == 1
    first, second = run.steady(1500, 2 * INTERVAL_S)
    assert "change" in (first.action, second.action)
    assert run.paper.knobs.instances >= 2
    run.steady(1500, 6 * INTERVAL_S)
    assert run.step(1500).action == "keep"
    assert run.state.samples[-1].lateness is not None
    assert run.state.samples[-1].lateness < 1


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("rate_per_s", [0, 30, 300, 600, 1200, 2500, 4000, 9000])
def test_in_a_steady_state_nothing_thrashes(kind: str, rate_per_s: float) -> None:
    run = Run(policy(kind))
    run.steady(rate_per_s, 600, chance=0.03)  # finds its setting
    hour = run.steady(rate_per_s, 3600, chance=0.03)
    times = [at_s for at_s, each in run.changes if at_s > 600]
    assert all(later - sooner >= 60 for sooner, later in itertools.pairwise(times))
    assert changes(hour) <= 6


@pytest.mark.parametrize("kind", POLICIES)
def test_a_day_costs_less_than_its_peak_all_day_and_keeps_the_slo(kind: str) -> None:
    run = Run(policy(kind))
    for step in range(int(DAY_S / INTERVAL_S)):
        wave = (1 - math.cos(2 * math.pi * step * INTERVAL_S / DAY_S)) / 2
        run.step((150 + 3500 * wave) * max(0.0, run.noise.gauss(1, 0.03)))
    most = max((each.target.instances for _, each in run.changes if each.target), default=1)
    assert run.paper.answered_late / run.paper.offered < 0.001
    assert run.paper.instance_s < 0.75 * most * DAY_S
    assert len(run.changes) < 60


@pytest.mark.parametrize("kind", POLICIES)
def test_bursts_that_come_again_find_instances_still_there(kind: str) -> None:
    run = Run(policy(kind))
    for _ in range(40):
        run.steady(300, 20)
        run.steady(2000, 10)
    late = run.paper.answered_late / run.paper.offered
    assert len(run.changes) <= 6
    assert late < 0.03  # the first burst's


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("seed", range(8))
def test_bounds_hold_whatever_the_traffic_does(kind: str, seed: int) -> None:
    bounded = policy(kind, instances={"min": 2, "max": 5}, queue_delay_us={"min": 1000, "max": 4000})
    run = Run(bounded, paper=Paper(knobs=Knobs(0, 7)), noise=random.Random(seed))
    rate = 500.0
    for step in range(2000):
        rate = min(8000.0, max(0.0, rate * math.exp(run.noise.gauss(0, 0.3)) + run.noise.uniform(0, 20)))
        run.step(rate)
        assert 2 <= run.paper.knobs.instances <= 5, step
        assert 1000 <= run.paper.knobs.queue_delay_us <= 4000
    for at_s, _ in run.changes:
        assert sum(at_s - 60 < other <= at_s for other, _ in run.changes) <= bounded.max_changes_per_minute


@pytest.mark.parametrize("kind", POLICIES)
def test_more_load_never_means_fewer_instances(kind: str) -> None:
    found = []
    for rate_per_s in (100, 400, 800, 1600, 2400, 3200):
        run = Run(policy(kind))
        run.steady(rate_per_s, 1800)
        found.append(run.paper.knobs.instances)
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] > 3


def test_shrinking_waits_until_the_most_of_a_while_fits() -> None:
    run = Run(policy())
    run.steady(2500, 300)
    many = run.paper.knobs.instances
    at_s = run.paper.now_s
    run.steady(200, 55)
    assert run.paper.knobs.instances == many
    run.steady(200, 120)
    assert run.paper.knobs.instances < many
    assert min(when for when, _ in run.changes if when > at_s) >= at_s + 60


# -- A model that is wrong


@pytest.mark.parametrize("off", [0.6, 1.0, 1.5, 2.0])
def test_a_model_that_is_wrong_is_corrected_by_what_is_seen(off: float) -> None:
    run = Run(policy(), model=Known(off=off))
    run.steady(1000, 120)
    run.paper.answered_late = run.paper.offered = 0.0
    run.steady(1000, 1800, chance=0.02)
    assert run.paper.answered_late / run.paper.offered < 0.01
    assert run.paper.knobs.instances <= 4


def test_without_a_model_the_policy_model_goes_by_what_is_seen() -> None:
    run = Run(policy("model"), model=None)
    run.steady(100, 60)
    run.steady(1500, 60)
    assert run.paper.knobs.instances > 1


# -- What helps nothing is taken back


def test_instances_beyond_the_cores_are_taken_back_and_not_tried_again() -> None:
    run = Run(policy("feedback", instances={"min": 1, "max": 4}), paper=Paper(curve=Curve(cores=1)))
    run.steady(900, 600)  # more than one core answers
    assert run.paper.knobs.instances == 1
    assert [each.action for _, each in run.changes][:2] == ["change", "revert"]
    assert len(run.changes) <= 8


def test_a_change_that_makes_things_worse_is_taken_back() -> None:
    run = Run(policy(instances={"min": 1, "max": 2}, slo_ms=100))
    run.steady(1000, 120)
    assert run.paper.knobs.instances == 2
    run.steady(300, 120)
    assert run.paper.knobs.instances == 1
    # one instance is suddenly not enough for what it was enough for on paper
    run.paper.curve = replace(run.paper.curve, fixed_ms=60.0, row_ms=4.0)
    before = len(run.changes)
    run.steady(300, 60)
    assert run.paper.knobs.instances == 2
    assert len(run.changes) - before <= 2
    run.steady(300, 400)
    assert run.paper.knobs.instances == 2


def test_the_guard_concludes_nothing_when_the_load_changed_too() -> None:
    run = Run(policy("feedback"))
    run.steady(100, 60)
    run.steady(1200, 10)
    run.steady(4500, 60)
    assert all(each.action != "revert" for _, each in run.changes)


# -- What is not known


@pytest.mark.parametrize("kind", [*POLICIES, "queue_depth"])
def test_a_problem_keeps_what_is_there(kind: str) -> None:
    run = Run(policy(kind))
    run.steady(100, 60)
    for _ in range(100):
        decision = run.step(5000, problem="the metrics stand still")
        assert decision.action == "keep"
        assert "the metrics stand still" in decision.reason
    assert run.paper.knobs.instances == 1


def test_p99_that_nobody_measures_is_told_from_the_queue() -> None:
    run = Run(policy("feedback"))
    for _ in range(12):
        run.step(100, p99_ms=None)
    for _ in range(12):
        run.step(1500, p99_ms=None)
    assert run.paper.knobs.instances > 1


def test_a_p99_of_the_last_minute_is_not_taken_for_that_of_now() -> None:
    run = Run(policy("feedback"))
    for _ in range(12):
        run.step(100, p99_ms=900.0, p99_over_s=60.0)
    assert run.paper.knobs.instances == 1


@pytest.mark.parametrize("kind", [*POLICIES, "queue_depth"])
def test_nothing_known_of_utilisation_and_queue_is_no_error(kind: str) -> None:
    run = Run(policy(kind))
    for _ in range(10):
        run.step(100, p99_ms=None, utilisation=None, queue_us=math.nan, batch_sizes={}, mean_batch=math.nan)
    assert run.paper.knobs.instances == 1


def test_a_clock_that_goes_back_forgets_the_times() -> None:
    run = Run(policy())
    run.steady(1500, 300)
    many = run.paper.knobs.instances
    run.paper.now_s = 0.0
    run.steady(1500, 300)
    assert run.paper.knobs.instances == many


def test_no_slo_keeps_and_says_so() -> None:
    run = Run(policy("feedback", slo_ms=5.0).model_copy(update={"slo_ms": None}))
    assert "no SLO" in run.steady(5000, 20)[-1].reason


def test_off_does_nothing() -> None:
    run = Run(policy("off"))
    assert changes(run.steady(9000, 120)) == 0


# -- Others change settings, too


def test_settings_that_someone_set_are_respected_and_gone_on_from() -> None:
    run = Run(policy(cooldown_s=30))
    run.steady(100, 120)
    run.paper.knobs = replace(run.paper.knobs, instances=4)
    decision = run.step(100)
    assert decision.action == "adopt"
    assert "4 instances" in decision.reason
    assert changes(run.steady(100, 25)) == 0
    run.steady(100, 120)
    assert run.paper.knobs.instances == 1


def test_settings_that_someone_set_are_reclaimed_where_the_policy_says_so() -> None:
    run = Run(policy(on_foreign_change="reclaim"))
    run.steady(100, 120)
    run.paper.knobs = replace(run.paper.knobs, instances=4)
    decision = run.step(100)
    assert decision.action == "change"
    assert run.paper.knobs.instances == 1
    assert "set back" in decision.reason


def test_two_who_reclaim_against_each_other_do_so_a_few_times_a_minute() -> None:
    run = Run(policy(on_foreign_change="reclaim", max_changes_per_minute=2))
    for _ in range(120):
        run.paper.knobs = replace(run.paper.knobs, instances=4)
        run.step(100)
    assert len(run.changes) <= 21


def test_a_triton_that_came_back_gets_its_settings_again_once_its_figures_are_clear() -> None:
    run = Run(policy())
    run.steady(1500, 120)
    many = run.paper.knobs
    run.paper.knobs = Knobs(500, 1)
    assert run.step(1500, problem="counters began anew", restarted=True).action == "keep"
    decision = run.step(1500)
    assert decision.action == "change"
    assert "came back" in decision.reason
    assert run.paper.knobs == many


def test_a_change_that_does_not_come_about_is_not_tried_again_and_again() -> None:
    run = Run(policy())
    for _ in range(120):
        run.paper.knobs = Knobs(0, 1)  # whatever is decided
        run.step(1500)
    assert len(run.changes) <= 8
    assert any("did not come about" in each.reason for _, each in run.decisions)


@pytest.mark.parametrize("left", [Knobs(0, 2), Knobs(0, 4), Knobs(500, 4), Knobs(1000, 2)])
def test_a_change_that_was_broken_off_is_nobody_elses_and_is_gone_on_from(left: Knobs) -> None:
    wanted = Knobs(500, 3)
    run = Run(policy(cooldown_s=30), paper=Paper(knobs=left))
    run.state = State(wanted=wanted, previous=Knobs(0, 1))
    decision = run.step(100)
    assert decision.action == "adopt"
    assert ("someone" in decision.reason) == (left == Knobs(1000, 2))
    if left != Knobs(1000, 2):
        assert run.state.paused_until_s == 0
        assert run.state.previous is None
    run.steady(3000, 4 * INTERVAL_S)
    assert (run.paper.knobs.instances > left.instances) or left == Knobs(1000, 2)


def test_after_a_failed_change_the_truth_is_what_the_server_has() -> None:
    run = Run(policy())
    run.steady(100, 60)
    was = run.paper.knobs
    decision = Decision("keep")
    while decision.action == "keep":
        decision = run.step(1500)
    state = after(run.state, decision, was, run.paper.now_s)
    assert state.wanted == was
    assert decision.target is not None
    assert state.avoids(decision.target, 1500)
    assert after(run.state, decision, decision.target, run.paper.now_s).wanted == decision.target
    run.state, run.paper.knobs = state, was
    assert f"{decision.target.describe()} could not be set" in run.step(1500).reason


def test_what_could_not_be_set_is_tried_again_soon_and_then_less_and_less_often() -> None:
    """Growing alone helps here: a Triton that refused once must not keep the policy from it for ten minutes."""
    run = Run(policy(instances={"min": 1, "max": 2}))
    run.steady(100, 60)
    was = run.paper.knobs
    tried_s = []
    while len(tried_s) < 4:
        decision = run.step(1500)
        if decision.action == "change":
            tried_s.append(run.paper.now_s)
            run.state, run.paper.knobs = after(run.state, decision, was, run.paper.now_s), was
    pauses_s = [later - sooner for sooner, later in itertools.pairwise(tried_s)]
    assert pauses_s[0] <= 30
    assert all(1.5 <= later / sooner <= 3 for sooner, later in itertools.pairwise(pauses_s))


# -- Delay and limits


def test_a_delay_by_reload_needs_more_gain_than_a_live_one() -> None:
    ways = {}
    for is_live in (True, False):
        run = Run(policy(instances={"min": 1, "max": 1}), paper=Paper(knobs=Knobs(16_000, 1)))
        for _ in range(60):
            run.step(20, delay_is_live=is_live)
        ways[is_live] = [(each.way, each.target) for _, each in run.changes]
    assert [way for way, _ in ways[True]] == ["live"]
    assert ways[False] == []


@pytest.mark.parametrize("kind", POLICIES)
def test_a_delay_stays_where_the_policy_may_not_change_it(kind: str) -> None:
    for said in ({"delay_by": "never"}, {"queue_delay_us": {"min": 7000, "max": 7000}}):
        run = Run(policy(kind, **said), paper=Paper(knobs=Knobs(7000, 1)))
        run.steady(100, 600)
        run.steady(2000, 600)
        assert run.paper.knobs.queue_delay_us == 7000


def test_class_limits_follow_what_can_be_answered() -> None:
    limited = policy(max_queue_sizes={"batch": {"min": 8, "max": 5000, "patience_ms": 1000.0}})
    start = Knobs(0, 1, {"batch": 20, "realtime": 50})
    run = Run(limited, paper=Paper(knobs=start, limit=20))
    run.steady(300, 120)
    assert run.paper.knobs.max_queue_sizes["batch"] == 20  # nobody waits: no reload for it
    for _ in range(60):
        run.step(500, refused_per_s=5.0)
    assert 300 < run.paper.knobs.max_queue_sizes["batch"] <= 5000
    assert run.paper.knobs.max_queue_sizes["realtime"] == 50
    assert any(each.way == "reload" for _, each in run.changes)


# -- The mission's simple policy


def test_queue_depth_grows_above_one_number_and_shrinks_below_another() -> None:
    run = Run(policy("queue_depth"))
    assert run.step(100, waiting=51.0).target == Knobs(0, 2)
    assert run.step(100, waiting=30.0).action == "keep"
    assert run.step(100, waiting=9.0).target == Knobs(0, 1)
    assert run.step(100, waiting=0.0).action == "keep"


# -- Memory


def test_a_state_survives_json_with_all_that_it_has() -> None:
    run = Run(policy())
    run.steady(100, 60)
    run.steady(1500, 60)
    assert run.state.trial is not None or run.state.changed_s
    assert State.of_dict(json.loads(json.dumps(run.state.as_dict()))) == run.state


@pytest.mark.parametrize(
    "spoil",
    [
        lambda said: said.pop("samples"),
        lambda said: said.update(more=1),
        lambda said: said.update(wanted=3),
        lambda said: said.update(samples=[{"at_s": 1}]),
        lambda said: said.update(changed_s=["soon"]),
        lambda said: said.update(paused_until_s="never"),
        lambda said: said.update(
            samples=[{"at_s": "x", "arrivals_per_s": None, "lateness": None, "utilisation": None}]
        ),
        lambda said: said["wanted"].update(instances=-1),
        lambda said: said["wanted"].update(max_queue_sizes=[1]),
    ],
)
def test_what_is_no_state_is_refused(spoil: Callable[[dict[str, Any]], object]) -> None:
    said = State(wanted=Knobs(0, 1)).as_dict()
    spoil(said)
    with pytest.raises(ValueError, match="no state of the autopilot"):
        State.of_dict(said)


def test_a_restart_of_the_autopilot_changes_no_decision() -> None:
    runs = [Run(policy(), noise=random.Random(5)) for _ in range(2)]
    for step in range(400):
        rate = 300 + 1200 * (step // 40 % 2)
        decisions = [run.step(rate) for run in runs]
        assert decisions[0] == decisions[1]
        if step % 50 == 0:  # the second one is started again
            runs[1].state = State.of_dict(json.loads(json.dumps(runs[1].state.as_dict())))


def test_memory_does_not_grow() -> None:
    run = Run(policy())
    run.steady(300, 7200, chance=0.1)
    assert len(json.dumps(run.state.as_dict())) < 20_000
