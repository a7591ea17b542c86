"""Kubernetes' HorizontalPodAutoscaler: its own examples, and the tables of its enhancement proposals, come out of ours."""

from __future__ import annotations

import pytest

from tritonpilot.errors import SpecError
from tritonpilot.hpa import SYNC_S, Autoscaler, Metric, Policy, Rules, per_pod, total, whole

AT_ONCE = Rules(0.0)


def days(scaler: Autoscaler, wanted: list[int], replicas: int = 1, every_s: float = SYNC_S) -> list[int]:
    """Replicas after each sync, when the metric asks for these."""
    seen = []
    for turn, each in enumerate(wanted):
        replicas = scaler.step(turn * every_s, replicas, [Metric(each)])
        seen.append(replicas)
    return seen


@pytest.mark.parametrize(
    ("values", "target", "replicas", "wanted"),
    [
        (
            (0.2, 0.2),
            0.1,
            2,
            4,
        ),  # "if the current metric value is 200m, and the desired value is 100m, the number is doubled"
        ((0.05,) * 4, 0.1, 4, 2),  # "... 50m ... halved"
        ((20.0, 10.0, 30.0), 15.0, 3, 4),  # horizontal_test.go, TestScaleUpCM
        ((12.0, 12.0, 12.0, 12.0, 12.0), 20.0, 5, 3),  # TestScaleDownCM
        ((20.0, 21.0, 21.0), 20.0, 3, 3),  # TestTolerance: within a tenth
    ],
)
def test_pods_follow_the_ratio(values: tuple[float, ...], target: float, replicas: int, wanted: int) -> None:
    assert per_pod(values, target, replicas=replicas).replicas == wanted


def test_pods_without_a_value_brake_both_ways() -> None:
    assert per_pod([0.03, 0.03], 0.01, replicas=2).replicas == 6
    assert per_pod([0.03, 0.03], 0.01, replicas=4, missing=2).replicas == 6, "as 0: 4 x 0.015 / 0.01"
    assert per_pod([0.03, 0.03], 0.01, replicas=8, pending=6).replicas == 8, "as 0: the ratio turns around"
    assert per_pod([0.001, 0.001], 0.01, replicas=4, missing=2).replicas == 3, "as on target"
    assert per_pod([0.001, 0.001], 0.01, replicas=2, pending=6).replicas == 1, "pending ones do not brake fewer"
    assert per_pod([], 0.01, replicas=2).replicas is None


def test_external_metrics_are_for_each_replica_or_for_all() -> None:
    assert total(5100, 1000, replicas=2).replicas == 6
    assert total(2100, 1000, replicas=2).replicas == 2, "within a tenth"
    assert total(0, 1000, replicas=5).replicas == 0
    assert whole(0.06, 0.02, replicas=4, ready=2).replicas == 6, "in proportion to what is ready"
    assert whole(0.021, 0.02, replicas=4, ready=2).replicas == 4
    assert whole(None, 0.02, replicas=4, ready=2).replicas is None


def test_the_metric_that_wants_most_wins_and_one_that_is_not_there_forbids_fewer() -> None:
    scaler = Autoscaler(1, 10, AT_ONCE, AT_ONCE)
    assert scaler.step(0, 2, [Metric(3), Metric(4)]) == 4
    assert scaler.step(15, 4, [Metric(2), Metric(None)]) == 4
    assert scaler.step(30, 4, [Metric(5), Metric(None)]) == 5
    assert scaler.step(45, 5, [Metric(None)]) == 5


def test_bounds_hold_whatever_is_asked_for() -> None:
    assert days(Autoscaler(2, 6, AT_ONCE, AT_ONCE), [100, 100, 100, 0], replicas=2) == [4, 6, 6, 2]
    assert Autoscaler(2, 6).step(0, 9, [Metric(9)]) == 6
    assert Autoscaler(2, 6).step(0, 1, [Metric(1)]) == 2
    with pytest.raises(SpecError, match="between 3 and 2"):
        Autoscaler(3, 2)


# KEP-853, configurable scale velocity: "User Stories".
def test_story_1_as_fast_as_possible() -> None:
    up = Rules(0.0, (Policy("Percent", 900, 60),))
    assert days(Autoscaler(1, 1000, up), [2000] * 4, every_s=60) == [10, 100, 1000, 1000]


def test_story_3_up_by_a_pod_a_minute() -> None:
    up = Rules(0.0, (Policy("Pods", 1, 60),))
    assert days(Autoscaler(1, 10, up), [10] * 9) == [2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_story_4_never_down() -> None:
    assert days(Autoscaler(1, 10, AT_ONCE, Rules(0.0, select="Disabled")), [5, 1, 1, 1], replicas=3) == [5, 5, 5, 5]


def test_story_5_down_to_the_most_of_the_window() -> None:
    down = Rules(60.0, (Policy("Pods", 5, 60),))
    assert days(Autoscaler(1, 20, AT_ONCE, down), [10, 9, 8, 9, 7, 7, 7, 7], replicas=10) == [
        10,
        10,
        10,
        10,
        9,
        9,
        9,
        7,
    ]


def test_up_waits_for_the_least_of_its_window() -> None:
    assert days(Autoscaler(1, 20, Rules(45.0)), [5, 3, 6, 6, 6, 6], replicas=2) == [2, 2, 2, 3, 6, 6]


def test_select_takes_the_largest_or_the_smallest_change() -> None:
    policies = (Policy("Pods", 4, 60), Policy("Percent", 10, 60))
    assert Autoscaler(1, 99, Rules(0.0, policies)).step(0, 10, [Metric(99)]) == 14
    assert Autoscaler(1, 99, Rules(0.0, policies, "Min")).step(0, 10, [Metric(99)]) == 11
    assert Autoscaler(1, 99, AT_ONCE, Rules(0.0, policies)).step(0, 10, [Metric(1)]) == 6
    assert Autoscaler(1, 99, AT_ONCE, Rules(0.0, policies, "Min")).step(0, 10, [Metric(1)]) == 9


def test_without_behavior_it_doubles_every_15_s_and_waits_5_minutes_for_fewer() -> None:
    assert days(Autoscaler(1, 50), [50] * 5) == [5, 10, 20, 40, 50]
    seen = days(Autoscaler(1, 50), [1] * 25, replicas=20)
    assert (seen[19], seen[20]) == (20, 1)
