from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.setting import Setting
from tritonpilot.simulate import Batcher, Level
from tritonpilot.spec import Service, load_service, load_services
from tritonpilot.tune import explain
from tritonpilot.tune.search import (
    Judge,
    differing,
    highest_rates,
    reachable,
    search,
    smaller_would_do_better,
    with_limits,
)
from tritonpilot.tune.wish import Space, Wish, passed_on

#: A device: 10 ms for a row, and little more for 64.
DEVICE = Costs(rows=(1, 16, 64), execution_us=(10_000, 11_000, 16_000), request_us=0, is_on_cpu=False)
#: 4000 rows/s in batches of 8, and 640 in those of 64: what falls behind once stays there.
CROWDED = Costs(rows=(1, 8, 64), execution_us=(1000, 2000, 100_000), request_us=0, is_on_cpu=False)
TEXT = """\
service: device
model: {backend: emulated, samples: rows.npz}
slo: {p99_ms: %(slo)g, rate_per_s: 500}
batching: {max_batch_size: 64}
"""
CLASSES = """\
classes:
  - {name: now, priority: 1, max_queue_size: 0}
  - {name: later, priority: 2, max_queue_size: 0, timeout_ms: 60000}
"""


FEW = Space(max_batch_sizes=(1, 8, 64), queue_delays_us=(0, 2000, 20_000))


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return written(tmp_path, TEXT % {"slo": 100})


def written(folder: Path, text: str) -> Service:
    path = folder / "service.yaml"
    path.write_text(text)
    return load_service(path)


def judge_of(wish: Wish, costs: Costs = DEVICE, batcher: Batcher | None = None) -> Judge:
    return Judge(batcher or Batcher(queue_delay_us=0, max_batch_size=64), {("fp32", 1): costs}, wish)


def test_the_space_holds_every_setting_within_the_limits(service: Service) -> None:
    space = Space(max_batch_sizes=(1, 8, 64), queue_delays_us=(0, 1000), instances=(1, 2))

    found = Wish.of(service, space=space).settings(service, cores=1)

    # A batch of one is full at once, so its delay is not varied.
    assert [(s.max_batch_size, s.queue_delay_us, s.instances) for s in found] == [
        (size, delay, count) for count in (1, 2) for size, delay in ((1, 0), (8, 0), (8, 1000), (64, 0), (64, 1000))
    ]


def test_own_values_leave_time_for_an_execution_within_the_slo(service: Service) -> None:
    found = Wish.of(service).settings(service, cores=1)

    assert max(each.queue_delay_us for each in found) == 80_000
    assert {each.instances for each in found} == {1}  # a device of its own cannot be doubled


def test_batches_below_the_largest_request_of_today_are_chosen_only_when_asked_for(service: Service) -> None:
    wish = Wish.of(service)
    asked = Wish.of(service, space=Space(max_batch_sizes=(4,)))

    assert {each.max_batch_size for each in wish.settings(service, 1)} == {64, 128, 256}
    assert {each.max_batch_size for each in wish.smaller(service, 1)} == {1, 2, 4, 8, 16, 32}
    assert {each.max_batch_size for each in Wish.of(service, rows={1: 1, 9: 1}).smaller(service, 1)} == {16, 32}
    assert {each.max_batch_size for each in asked.settings(service, 1)} == {4}
    assert asked.smaller(service, 1) == []


def test_what_smaller_batches_would_bring_and_refuse_is_said(service: Service) -> None:
    wish = Wish.of(service, rate_per_s=3000, slo_ms=50, space=Space(queue_delays_us=(0,)))
    judge = judge_of(wish, CROWDED)
    (now,) = [each for each in wish.settings(service, 1) if each.max_batch_size == 64]
    chosen = judge.judge(now, 20_000)
    few = [each for each in wish.smaller(service, 1) if each.max_batch_size in (2, 8)]

    found = smaller_would_do_better(judge, chosen, few)

    assert found is not None
    assert found.setting.max_batch_size == 8
    assert (chosen.keeps_all, found.keeps_all) == (False, True)
    text = explain.paragraph(judge, chosen, now, [now], smaller=found)
    assert "is chosen of 1 setting." in text
    assert "refuses requests of more than 8 rows, and up to 64 are answered today; --max-batch 8 allows it." in text
    lowered = explain.paragraph(judge, found, now, [found.setting, now])
    assert "Requests of more than 8 rows will be refused" in lowered
    assert smaller_would_do_better(judge, found, [replace(now, max_batch_size=2)]) is None
    assert smaller_would_do_better(judge, chosen, []) is None


def test_pipelines_that_pass_their_batches_on_are_known() -> None:
    services = load_services(Path(__file__).parents[2] / "models")

    assert passed_on(services, "ctr") == {"ctr_raw": 256}
    assert list(passed_on(services, "image_net")) == ["image"]
    assert passed_on(services, "ctr_raw") == {}


@pytest.mark.parametrize(
    ("space", "rows", "words"),
    [
        (Space(max_batch_sizes=(4,)), 8, "requests have up to 8 rows, more than the largest batch allowed, 4"),
        (Space(queue_delays_us=(90_000,)), 1, "the shortest queue delay allowed is 90000 us.*leave at most 80000 us"),
        (Space(precisions=("int8",)), 1, "int8 is asked for, but only fp32 has a model file"),
        (
            Space(),
            1000,
            r"up to 1000 rows, more than the largest batch allowed, 256 without --max-batch \(--max-batch 1000",
        ),
        (
            Space(instances=(1, 300)),
            1,
            "cannot have the setting .* 300 instances of 1 thread.*less than or equal to 256",
        ),
    ],
)
def test_limits_that_contradict_each_other_are_named(service: Service, space: Space, rows: int, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        Wish.of(service, space=space, rows=rows).settings(service, cores=1)


def test_a_wish_needs_a_rate_an_slo_and_known_classes(tmp_path: Path, service: Service) -> None:
    bare = written(tmp_path, "service: x\nmodel: {backend: emulated}\nbatching: {max_batch_size: 4}\n")

    with pytest.raises(SpecError, match="promises no rate"):
        Wish.of(bare)
    with pytest.raises(SpecError, match="promises no latency"):
        Wish.of(bare, rate_per_s=10)
    with pytest.raises(SpecError, match="1e\\+09 requests/s for device are not above 0 and at most 10,000,000"):
        Wish.of(service, rate_per_s=1e9)
    with pytest.raises(SpecError, match="There is no class first in the mix; the classes are all"):
        Wish.of(service, mix={"first": 1})


def test_classes_have_the_promises_of_the_service_file(tmp_path: Path) -> None:
    service = written(tmp_path, TEXT % {"slo": 100} + CLASSES)

    wish = Wish.of(service, rate_per_s=100, mix={"now": 3, "later": 1}, slo_ms=50)

    assert [(s.name, s.priority, s.rate_per_s, s.slo_ms) for s in wish.streams] == [
        ("now", 1, 75, 50),
        ("later", 2, 25, math.inf),
    ]


def test_the_longer_slo_chooses_larger_batches_and_stands_more(service: Service) -> None:
    """One row at a time is 100 rows/s; 64 at a time 4000 rows/s, but then an answer takes two executions of 16 ms."""
    space = Space(max_batch_sizes=(1, 4, 64), queue_delays_us=(0, 20_000))
    rates = {}
    for slo_ms in (26.0, 100.0):
        wish = Wish.of(service, slo_ms=slo_ms, is_rate_open=True, space=space).with_slo(slo_ms)
        judge = judge_of(wish)
        factor, rates[slo_ms] = highest_rates(judge, wish.settings(service, 1))[0]
        assert factor * wish.rate_per_s > 300

    assert rates[100.0].max_batch_size >= rates[26.0].max_batch_size
    assert rates[100.0].max_batch_size == 64


def test_the_search_finds_what_an_exhaustive_grid_finds(service: Service) -> None:
    wish = Wish.of(service, rate_per_s=1500, slo_ms=60, space=FEW)
    judge = judge_of(wish)
    settings = wish.settings(service, 1)

    found = search(judge, settings)

    grid = {each: judge.judge(each, 20_000) for each in settings}
    best = max(each.goodput_per_s for each in grid.values())
    assert grid[found[0].setting].goodput_per_s >= 0.99 * best
    assert found[0].keeps_all
    assert found[0].room is not None
    assert found[0].room > 1
    assert judge.simulations > len(settings)


def test_settings_that_are_verified_differ(service: Service) -> None:
    wish = Wish.of(service, rate_per_s=1500, slo_ms=60, space=FEW)
    found = differing(search(judge_of(wish), wish.settings(service, 1)), 3)

    assert len({(each.setting.queue_delay_us, each.setting.max_batch_size) for each in found}) == 3


def test_an_slo_out_of_reach_says_what_is_reachable(service: Service) -> None:
    wish = Wish.of(service, rate_per_s=1500, slo_ms=12, space=FEW)
    judge = judge_of(wish)
    settings = wish.settings(service, 1)
    best = search(judge, settings)[0]

    found = reachable(judge, settings)

    assert not best.keeps_all
    assert found.rate_per_s < 100
    assert 12 < found.p99_ms < 60
    text = explain.unreachable(wish, best, found)
    assert text.startswith("No setting keeps the promise to all at 1,500 requests/s within 12 ms")
    assert "Reachable are" in text
    none = explain.unreachable(wish, best, replace(found, at_rate=None, p99_ms=30.0))
    assert "No rate is reachable within that SLO, but a P99 of 30 ms at the rate asked for" in none
    assert "chosen" not in explain.paragraph(judge, best, Setting.of(service), settings, is_reached=False)


def test_the_paragraph_says_why(service: Service) -> None:
    wish = Wish.of(service, rate_per_s=1500, slo_ms=60, space=FEW)
    judge = judge_of(wish)
    settings = wish.settings(service, 1)
    best = search(judge, settings)[0]

    text = explain.paragraph(judge, best, Setting.of(service), settings)

    assert text.startswith(
        f"For 1,500 requests/s within 60 ms, {best.setting.describe()} is chosen of {len(settings)} settings."
    )
    assert "An execution of one row takes 10 ms and one of" in text
    assert "% busy" in text


def test_a_limit_of_the_queue_is_chosen_where_overload_needs_one(tmp_path: Path) -> None:
    service = written(tmp_path, TEXT % {"slo": 100} + CLASSES)
    levels = (Level("now"), Level("later"))
    wish = Wish.of(service, rate_per_s=1500)
    judge = judge_of(wish, batcher=Batcher(0, 64, levels=levels))
    plain = replace(Setting.of(service), queue_delay_us=2000)
    best = replace(judge.judge(plain, 20_000), room=2.0)

    found = with_limits(judge, best)

    assert 8 <= found.setting.max_queue_sizes["now"] <= 512  # about what is served in 100 ms
    overload = [judge.judge(setting, 20_000, 4.0).goodput_per_s for setting in (plain, found.setting)]
    assert overload[1] > 1.5 * overload[0]
    assert found.keeps_all
