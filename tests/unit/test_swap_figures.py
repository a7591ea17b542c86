"""What is concluded from counts: how much slower a candidate executes, which latency half of the requests stay below."""

from __future__ import annotations

import math

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tritonpilot.entry.canary import Canary as EntryCanary
from tritonpilot.entry.canary import Plan, plan_of
from tritonpilot.entry.comparison import EDGES_S, Comparison, misfit
from tritonpilot.errors import SpecError
from tritonpilot.metrics import parse
from tritonpilot.swap.canary import check_options, quantile
from tritonpilot.swap.latency import LEAST_ROUNDS, _since, _slower


def rounds(old_us: float, new_us: float, size: int = 4):
    return [({size: (2, int(2000 * old_us))}, {size: (1, int(1000 * new_us))}) for _ in range(LEAST_ROUNDS)]


def test_slower_is_the_worst_size():
    both = [
        ({**first[0], **second[0]}, {**first[1], **second[1]})
        for first, second in zip(rounds(100, 120), rounds(200, 600, 16), strict=True)
    ]
    assert _slower(both) == (3.0, 16)


def test_one_round_in_which_the_machine_was_away_changes_nothing():
    assert _slower([*rounds(100, 100), ({4: (2, 200_000)}, {4: (1, 90_000_000)})]) == (1.0, 4)


def test_sizes_that_only_one_of_them_executed_say_nothing():
    assert _slower([({4: (1, 10)}, {5: (1, 1000)})] * 20) is None


def test_what_happened_since_is_a_difference_and_a_new_load_begins_at_nothing():
    assert _since({1: (5, 500)}, {1: (7, 900), 2: (1, 10)}) == {1: (2, 400), 2: (1, 10)}
    assert _since({1: (5, 500)}, {1: (2, 100)}) == {}


def exposed(seen: Comparison):
    registry = CollectorRegistry()

    class _Collector:
        def collect(self):
            yield from Comparison.collect({"ctr": (0.1, 0.2)}, {"ctr": seen})

    registry.register(_Collector())
    return parse(generate_latest(registry).decode())


def test_a_quantile_is_found_within_a_step_of_the_histogram():
    seen = Comparison()
    for _ in range(100):
        seen.candidate_latency.observe(0.0042)
        seen.served_latency.observe(0.0021)
    found = {who: quantile(exposed(seen), who, 0.5) for who in ("candidate", "served")}
    assert found["candidate"] == pytest.approx(0.0042, rel=0.2)
    assert found["candidate"] / found["served"] == pytest.approx(2, rel=0.2)


def test_without_observations_there_is_no_quantile():
    assert math.isnan(quantile(exposed(Comparison()), "candidate", 0.5))


def test_latencies_beyond_the_last_edge_count_as_that():
    seen = Comparison()
    seen.candidate_latency.observe(1000)
    assert quantile(exposed(seen), "candidate", 0.5) == pytest.approx(EDGES_S[-1], rel=1e-4)


def test_sums_of_differences_are_exported():
    seen = Comparison()
    seen.take({"y": np.array([[1.0], [2.0]], np.float32)}, {"y": np.array([[1.5], [2.0]], np.float32)})
    found = {each.name: each.value for each in exposed(seen) if each.labels.get("output") == "y"}
    assert found == {
        "shadow_values": 2,
        "shadow_unequal": 1,
        "shadow_served": 3,
        "shadow_served_squared": 5,
        "shadow_squared_difference": 0.25,
        "shadow_largest_difference": 0.5,
    }


@pytest.mark.parametrize(
    ("candidate", "word"),
    [
        ({"y": np.ones((2, 1), np.float32)}, ""),
        ({}, "misfit"),
        ({"y": np.ones((2, 2), np.float32)}, "misfit"),
        ({"y": np.ones((2, 1), np.float64)}, "misfit"),
        ({"y": np.full((2, 1), np.nan, np.float32)}, "not_finite"),
    ],
)
def test_what_cannot_be_compared_has_a_word(candidate, word):
    assert misfit({"y": np.zeros((2, 1), np.float32)}, candidate) == word


def config(**parameters: str):
    return {"name": "ctr__next", "parameters": {key: {"string_value": value} for key, value in parameters.items()}}


def test_a_candidate_says_what_it_gets():
    told = config(pilot_canary_of="ctr", pilot_canary_share="0.05", pilot_shadow_share="0.2")
    assert plan_of("ctr", told) == Plan("ctr__next", 0.05, 0.2)


@pytest.mark.parametrize(
    "told",
    [
        config(),
        config(pilot_canary_of="other", pilot_canary_share="0.5"),
        config(pilot_canary_of="ctr", pilot_canary_share="0"),
        config(pilot_canary_of="ctr", pilot_canary_share="half"),
        config(pilot_canary_of="ctr", pilot_canary_share="1.5"),
        config(pilot_canary_of="ctr", pilot_canary_share="nan"),
        config(pilot_canary_of="ctr", pilot_shadow_share="-0.1"),
    ],
)
def test_nonsense_gets_nothing(told):
    assert plan_of("ctr", told) is None


@pytest.mark.parametrize(
    ("share", "requests", "word"), [(0, 5, "share"), (1.1, 5, "share"), (math.nan, 5, "share"), (0.1, 0, "0 requests")]
)
def test_options_that_make_no_sense_are_refused(share, requests, word):
    with pytest.raises(SpecError, match=word):
        check_options(["127.0.0.1:8102"], share, requests, "canary")


def test_a_canary_needs_an_entry():
    with pytest.raises(SpecError, match="--entry"):
        check_options([], 0.1, 5, "canary")


def test_an_entry_without_candidates_exports_its_metrics_too():
    registry = CollectorRegistry()
    registry.register(EntryCanary("127.0.0.1:1", "127.0.0.1:1"))
    assert b"# TYPE shadow_requests_total counter" in generate_latest(registry)
