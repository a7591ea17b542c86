"""What a load test sends, and what its figures say: without Locust."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from perf.locust import figures, scenarios
from perf.locust.figures import Call


def call(due_s: float, ms: float = 5, caller_class: str = "realtime", error: str = "", transport: str = "http") -> Call:
    return Call(caller_class, transport, due_s, due_s, due_s + ms / 1e3, error)


def steady(seconds: float, rate_per_s: int = 100, ms: float = 5) -> list[Call]:
    return [call(number / rate_per_s, ms) for number in range(int(seconds * rate_per_s))]


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_every_request_of_a_rate_is_due_once_and_evenly(name: str) -> None:
    scenario = scenarios.SCENARIOS[name]
    for stream in scenario.streams:
        callers = [each for each in scenario.callers(("http", "grpc")) if each.stream == stream]
        assert {each.transport for each in callers} == {"http", "grpc"}
        dues = sorted(each.due_s(turn) or 0.0 for each in callers for turn in range(3))
        if stream.rate_per_s is not None:
            gaps = [later - earlier for earlier, later in itertools.pairwise(dues)]
            assert gaps == pytest.approx([1 / stream.rate_per_s] * len(gaps))
            assert stream.rate_per_s / len(callers) <= scenarios.CALLS_PER_S


def test_the_scenarios_are_those_that_are_promised() -> None:
    assert {name: scenario.rate_per_s for name, scenario in scenarios.SCENARIOS.items()} == {
        "constant": 100,
        "burst": 500,
        "mixed": 100,
    }
    assert scenarios.SCENARIOS["constant"].seconds == 300
    assert {scenario.judged for scenario in scenarios.SCENARIOS.values()} == {"realtime"}


def test_another_rate_keeps_the_parts_of_the_classes() -> None:
    changed = scenarios.of("burst", rate_per_s=50, seconds=2)
    assert [stream.rate_per_s for stream in changed.streams] == pytest.approx([20, 30])
    assert (changed.seconds, changed.limits) == (2, scenarios.SCENARIOS["burst"].limits)
    assert scenarios.of("mixed", rate_per_s=10).streams[1] == scenarios.SCENARIOS["mixed"].streams[1]


def test_a_latency_counts_from_the_due_time() -> None:
    late = Call("realtime", "http", due_s=1.0, sent_s=1.2, answered_s=1.21)
    assert (late.latency_ms, late.late_ms) == pytest.approx((210, 200))


def test_figures_are_counted_by_class_and_transport() -> None:
    calls = [*steady(2), call(0.5, 80, "batch", transport="grpc"), call(0.6, 1, "batch", "queue full", "grpc")]
    found = figures.of(scenarios.of("constant", seconds=2), calls)
    assert (found["requests"], found["failures"], found["requests_per_s"]) == (202, 1, 101)
    assert found["by_class"]["realtime"] == {"requests": 200, "failures": 0, "p50_ms": 5, "p99_ms": 5, "max_ms": 5}
    assert found["by_transport"]["grpc"]["max_ms"] is None, "its answer never came"
    assert found["errors"] == {"queue full": 1}
    json.dumps(found, allow_nan=False)


def test_one_slow_request_in_a_hundred_is_not_p99_and_two_are() -> None:
    assert figures.quantile([5.0] * 99 + [90.0], 0.99) == 5
    assert figures.quantile([5.0] * 98 + [90.0] * 2, 0.99) == 90
    assert figures.quantile([5.0] * 98 + [math.inf] * 2, 0.99) == math.inf
    assert math.isnan(figures.quantile([], 0.99))


@pytest.mark.parametrize(
    ("slow_s", "seconds", "recovered"),
    [((), 10, 0), ((0,), 10, 1), ((0, 1, 2), 10, 3), ((1, 6), 10, 7), ((9,), 10, None), ((), 0, None)],
)
def test_recovery_is_when_no_later_second_is_slow(slow_s: tuple[int, ...], seconds: int, recovered: int | None) -> None:
    calls = steady(seconds) + [call(second + 0.5, 60) for second in slow_s for _ in range(3)]
    assert figures.recovered_after_s(calls, 50) == recovered


def test_a_second_without_requests_decides_nothing() -> None:
    assert figures.recovered_after_s([call(0.1, 60), call(5.1)], 50) == 1


def broken(name: str, calls: list[Call]) -> list[str]:
    scenario = scenarios.of(name, seconds=10)
    return figures.broken(scenario, figures.of(scenario, calls))


def test_limits_that_are_kept_say_nothing() -> None:
    assert broken("constant", steady(10)) == []
    assert broken("burst", [*steady(10), *(call(2.5, 200) for _ in range(9))]) == []
    assert broken("mixed", [*steady(10), *(call(2.5, 200, "batch", "full") for _ in range(900))]) == []


@pytest.mark.parametrize(
    ("name", "calls", "said"),
    [
        ("constant", steady(10, ms=71.25), "P99 of realtime was 71.25 ms, and must stay below 50 ms"),
        (
            "constant",
            [*steady(10), call(1, error="x")],
            "1 of 1001 requests of realtime failed (0.100%), and at most 0.020% may",
        ),
        ("constant", [call(1, error="x")], "P99 of realtime was without bound"),
        (
            "burst",
            [*steady(10), call(1, error="x")],
            "1 of 1001 requests of realtime failed (0.100%), and at most 0.000% may",
        ),
        ("burst", [*steady(10), *(call(6.5, 200, "batch") for _ in range(9))], "50 ms or more for 7 s after the start"),
        ("burst", steady(10, ms=60), "50 ms or more at the end, and may be for 5 s at most"),
        ("mixed", [call(1, caller_class="batch")], "no request of realtime was sent"),
    ],
)
def test_a_broken_limit_is_said_in_words(name: str, calls: list[Call], said: str) -> None:
    assert said in "; ".join(broken(name, calls))
