"""The simulated batcher against schedules computed by hand, textbook queues, and its own books."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tritonpilot import build, model_config, spec
from tritonpilot.arrivals import Stream, Traffic, traffic
from tritonpilot.commands import simulate as command
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.outcome import REJECTED, TIMED_OUT
from tritonpilot.simulate import Batcher, Host, Level, Simulated, kernel, simulate
from tritonpilot.simulate import run as simulating
from tritonpilot.simulate.run import TOO_LARGE

ROOT = Path(__file__).resolve().parents[2]
#: 1 ms for any batch, nothing else costs.
FLAT = Costs(rows=(1, 64), execution_us=(1000.0, 1000.0), request_us=0.0)
SHARP = Host(timer_slack_us=0.0, batcher_first=0.0)
LEVELS = (Level("high"), Level("low"))


def arriving(*at_ms: float, rows: int | tuple[int, ...] = 1, stream: tuple[int, ...] = ()) -> Traffic:
    sizes = np.full(len(at_ms), rows, dtype=np.int32) if isinstance(rows, int) else np.array(rows, dtype=np.int32)
    return Traffic(
        np.array(at_ms) / 1e3, sizes, np.array(stream or [0] * len(at_ms), dtype=np.int16), max(at_ms) / 1e3 + 1
    )


def served(batcher: Batcher, load: Traffic, costs: Costs = FLAT, host: Host = SHARP, streams: int = 1) -> Simulated:
    named = [Stream(f"s{n}", 1, priority=n + 1 if len(batcher.levels) > 1 else 0) for n in range(streams)]
    return simulate(batcher, costs, load, named, host=host)


def latencies_ms(found: Simulated) -> tuple[float, float]:
    """Smallest and largest, which the histogram keeps exactly."""
    return found.outcome.latency.min_us / 1e3, found.outcome.latency.max_us / 1e3


def test_a_lone_request_waits_for_the_queue_delay():
    found = served(Batcher(queue_delay_us=500, max_batch_size=8), arriving(0))
    assert latencies_ms(found) == pytest.approx((1.5, 1.5))
    assert found.batch_sizes == {1: 1}
    assert found.queue_us == pytest.approx(500)


def test_requests_within_the_delay_of_the_first_share_its_batch():
    found = served(Batcher(500, 8), arriving(0, 0.2, 0.4))
    assert found.batch_sizes == {3: 1}
    assert latencies_ms(found) == pytest.approx((1.1, 1.5))


def test_a_full_batch_does_not_wait():
    assert latencies_ms(served(Batcher(500_000, 2), arriving(0, 0.2))) == pytest.approx((1.0, 1.2))


def test_without_a_delay_batches_form_while_the_instance_is_busy():
    found = served(Batcher(0, 8), arriving(0, 0.1, 0.2, 0.3))
    assert found.batch_sizes == {1: 1, 3: 1}
    assert latencies_ms(found) == pytest.approx((1.0, 1.9))


def test_a_preferred_size_goes_at_once_and_the_rest_waits_for_its_own_delay():
    found = served(Batcher(2000, 8, preferred_batch_sizes=(4,)), arriving(0, 0.1, 0.2, 0.3, 0.4))
    assert found.batch_sizes == {4: 1, 1: 1}
    assert latencies_ms(found) == pytest.approx((1.0, 3.0))  # the fifth waits from 0.4 to 2.4


def test_payloads_that_wait_are_merged_up_to_the_maximum():
    # 6 rows do not fit to the first 5; they wait behind it in the instance's queue and go together with the last.
    found = served(Batcher(100, 8), arriving(0, 0.5, 0.6, 0.7, rows=(1, 5, 6, 2)))
    assert found.batch_sizes == {1: 1, 5: 1, 8: 1}


def test_rows_count_and_not_requests():
    assert served(Batcher(1000, 8), arriving(0, 0.1, 0.2, rows=(3, 3, 3))).batch_sizes == {6: 1, 3: 1}


def test_the_higher_level_goes_first():
    # A low request runs to 1 ms; of those that wait then, the high one goes first although it came last.
    found = served(Batcher(0, 1, levels=LEVELS), arriving(0, 0.1, 0.2, 0.3, stream=(1, 1, 1, 0)), streams=2)
    assert found.outcome.by_stream["s0"].p_ms(1) == pytest.approx(1.7)
    assert found.outcome.by_stream["s1"].p_ms(1) == pytest.approx(3.8)


def test_a_full_queue_rejects_and_every_request_ends_once():
    levels = (Level("high", max_queue_size=2), Level("low"))
    found = served(Batcher(0, 1, levels=levels), arriving(0, 0.1, 0.2, 0.3, 0.4))
    assert found.outcome.errors == {REJECTED: 2}
    assert found.outcome.answered == 3


def test_a_request_is_rejected_when_the_batcher_looks_after_its_timeout():
    levels = (Level("high", timeout_us=500), Level("low"))
    found = served(Batcher(0, 1, levels=levels), arriving(0, 0.1, 0.9))
    assert found.outcome.errors == {TIMED_OUT: 1}
    assert latencies_ms(found) == pytest.approx((1.0, 1.1))


def test_a_delayed_request_goes_behind_its_own_level_instead():
    levels = (Level("high", timeout_us=500, action="delay"), Level("low"))
    found = served(Batcher(0, 1, levels=levels), arriving(0, 0.1, 0.9))
    assert found.outcome.errors == {}
    assert latencies_ms(found) == pytest.approx((1.0, 2.9))  # 0.9 overtakes 0.1


def test_a_request_shortens_its_timeout_only_where_its_level_allows():
    late = [Stream("s", 1, priority=1, timeout_ms=0.5)]
    for allows, errors in ((True, {TIMED_OUT: 1}), (False, {})):
        levels = (Level("high", timeout_us=10**6, allow_timeout_override=allows), Level("low"))
        assert simulate(Batcher(0, 1, levels=levels), FLAT, arriving(0, 0.1), late, host=SHARP).outcome.errors == errors


@pytest.mark.parametrize(("has_waker", "latency_ms"), [(False, 585.0), (True, 86.11)])
def test_a_missed_end_stalls_for_500_ms_unless_the_waker_comes(has_waker: bool, latency_ms: float):
    slow = replace(FLAT, execution_us=(50_000.0, 50_000.0))
    batcher = Batcher(0, 8, levels=LEVELS, has_waker=has_waker)
    found = served(batcher, arriving(0, 15), slow, replace(SHARP, batcher_first=1.0))
    assert latencies_ms(found) == pytest.approx((50.0, latency_ms))


def test_without_levels_nothing_stalls():
    slow = replace(FLAT, execution_us=(50_000.0, 50_000.0))
    found = served(Batcher(0, 8, has_waker=False), arriving(0, 15), slow, replace(SHARP, batcher_first=1.0))
    assert latencies_ms(found) == pytest.approx((50.0, 85.0))


def test_the_rate_limiter_bounds_what_runs_at_once():
    two = Batcher(0, 1, instances=2)
    free = replace(FLAT, cores=2)
    assert latencies_ms(served(two, arriving(0, 0.1), free)) == pytest.approx((1.0, 1.0))
    limited = replace(two, resources={"memory": 2}, resource_counts={"memory": 3})
    assert latencies_ms(served(limited, arriving(0, 0.1), free)) == pytest.approx((1.0, 1.9))


def test_preserve_ordering_holds_answers_back():
    costs = replace(FLAT, rows=(1, 64), execution_us=(1000.0, 64_000.0), cores=2)
    load = arriving(0, 0.1, rows=(32, 1))
    assert latencies_ms(served(Batcher(0, 32, instances=2), load, costs))[0] == pytest.approx(1.0)
    assert latencies_ms(served(Batcher(0, 32, instances=2, preserve_ordering=True), load, costs)) == pytest.approx(
        (31.9, 32.0)
    )


def test_the_front_end_and_an_execution_share_a_core():
    costs = replace(FLAT, front_us=100.0, reply_us=50.0)
    found = served(Batcher(0, 1), arriving(0, 0.5), costs)
    # First: in at 0.1, 1 ms of execution with 0.1 ms taken from it, out 0.05 later. Second: executed from 1.2 on.
    assert latencies_ms(found) == pytest.approx((1.25, 1.8))
    apart = served(Batcher(0, 1), arriving(0, 0.5), replace(costs, cores=2))
    assert latencies_ms(apart)[0] == pytest.approx(1.15)
    assert found.cpu_cores == pytest.approx(2.3 / 1000.5)


@pytest.mark.parametrize(
    ("guard_us", "execution_us"),
    # The second request comes after 0.4 ms of the first one's execution and takes 0.1 ms from it, or waits for its end. The reply
    # waits before the second execution begins and takes 0.05 ms from it always.
    [(0.0, (1100 + 1050) / 2), (300.0, (1100 + 1050) / 2), (600.0, (1100 + 1050) / 2), (1400.0, (1000 + 1050) / 2)],
)
def test_an_execution_keeps_its_core_for_its_first_slice(guard_us: float, execution_us: float):
    costs = replace(FLAT, front_us=100.0, reply_us=50.0, guard_us=guard_us)
    found = served(Batcher(0, 1), arriving(0, 0.5), costs)
    assert found.execution_us == pytest.approx(execution_us)
    assert latencies_ms(found) == pytest.approx((1.25, 1.8))


def test_what_comes_within_the_first_slice_is_queued_at_its_end():
    costs = replace(FLAT, front_us=100.0, guard_us=600.0)
    # The first is executed from 1.1 on. The second comes at 1.2, gets the core at once or at 1.7, and is delayed by 1 ms from
    # 0.1 ms later on.
    first = served(Batcher(1000, 2), arriving(0, 1.2), replace(costs, guard_us=0.0))
    assert latencies_ms(first) == pytest.approx((2.1, 2.2))  # the second, the first
    assert latencies_ms(served(Batcher(1000, 2), arriving(0, 1.2), costs)) == pytest.approx((2.2, 2.6))


def test_an_execution_gets_its_core_back_once_the_front_end_had_a_slice_too_much():
    load, costs = arriving(0, *[0.5] * 100), replace(FLAT, front_us=100.0)
    found = served(Batcher(0, 128), load, costs, replace(SHARP, slice_us=300.0))
    # 0.4 ms are executed when the others come. The first takes 0.1 ms, then eight threads share the core with the execution: with
    # 16 more of their 0.1 ms it is owed 0.3 ms, with 24 more again, and ends at 5.2. The next ends at 12.1, 0.4 after the last
    # of the others; what came meanwhile takes 1 ms.
    assert found.batch_sizes == {1: 1, 41: 1, 59: 1}
    assert found.execution_us == pytest.approx((5100 + 6900 + 1000) / 3)
    greedy = served(Batcher(0, 128), load, costs, replace(SHARP, slice_us=math.inf))
    assert greedy.execution_us == pytest.approx((11_000 + 1000) / 2)


@pytest.mark.parametrize("levels", [(Level("high", 1000, 150_000),), (Level(),)])
def test_under_overload_the_front_end_leaves_executions_their_share(levels: tuple[Level, ...]):
    costs = Costs((1, 64), (800.0, 4000.0), 5.0, front_us=50.0, reply_us=20.0)
    found = {}
    for rate_per_s in (7_000, 14_000, 20_000, 40_000):
        streams = [Stream("s", rate_per_s, slo_ms=200)]
        requests = traffic(streams, 4, 1)
        found[rate_per_s] = simulate(
            Batcher(500, 256, levels=levels), costs, requests, streams
        ).outcome.throughput_per_s
    assert found[7_000] == pytest.approx(7_000, rel=0.03)
    assert min(found.values()) > 400
    assert found[40_000] > 0.6 * found[20_000]


def test_a_simulation_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch):
    load, costs = arriving(*range(40)), replace(FLAT, front_us=100.0)
    whole = served(Batcher(500, 8, levels=LEVELS), load, costs)
    monkeypatch.setattr(simulating, "EVENTS", 7)
    assert served(Batcher(500, 8, levels=LEVELS), load, costs).as_dict() == whole.as_dict()


def test_an_idle_server_costs_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(simulating, "EVENTS", 20)
    calls, serve = [], kernel.serve
    monkeypatch.setattr(kernel, "serve", lambda *tables: calls.append(serve(*tables)) or calls[-1])
    found = served(Batcher(500, 8, levels=LEVELS), arriving(0, 3600e3))  # an hour: 7,200 looks at an empty queue
    assert latencies_ms(found) == pytest.approx((1.5, 1.5))
    assert len(calls) < 3


def test_a_device_leaves_the_core_to_the_front_end():
    costs = replace(FLAT, front_us=100.0, is_on_cpu=False, host_us=200.0)
    found = served(Batcher(0, 1), arriving(0, 0.5), costs)
    assert latencies_ms(found) == pytest.approx((1.1, 1.6))
    assert found.cpu_cores == pytest.approx(0.6 / 1000.5)


def test_the_wire_counts_in_the_latency_and_not_in_the_queue():
    found = served(Batcher(0, 1), arriving(0), replace(FLAT, wire_us=300.0))
    assert latencies_ms(found) == pytest.approx((1.3, 1.3))
    assert found.queue_us == pytest.approx(0)


def test_a_request_of_too_many_rows_is_refused():
    assert served(Batcher(0, 4), arriving(0, 1, rows=(5, 4))).outcome.errors == {TOO_LARGE: 1}


def poisson(rate_per_s: float, seconds: float) -> tuple[Traffic, list[Stream]]:
    streams = [Stream("s", rate_per_s, slo_ms=10)]
    return traffic(streams, seconds, 3), streams


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_server_waits_as_pollaczek_and_khinchine_say(load: float):
    spread = tuple(np.linspace(0.5, 1.5, 101))  # uniform: E[S^2] = S^2 (1 + 1/12)
    for factor, second_moment in (((1.0,) * 101, 1.0), (spread, 1 + 1 / 12)):
        requests, streams = poisson(load * 1000, 300)
        found = simulate(Batcher(0, 1), replace(FLAT, factor=factor), requests, streams, host=SHARP)
        assert found.queue_us == pytest.approx(load * second_moment * 1000 / (2 * (1 - load)), rel=0.05)
        assert found.utilisation == pytest.approx(load, rel=0.02)


def test_several_servers_wait_as_erlang_says():
    servers, load = 4, 0.8
    share = np.linspace(0, 0.99, 100)
    factor = np.append(
        -np.log(1 - share), 2 * (1 - np.log(0.01)) + np.log(0.01)
    )  # exponential; the tail keeps its mean
    requests, streams = poisson(load * servers * 1000, 120)
    batcher, costs = Batcher(0, 1, instances=servers), replace(FLAT, factor=tuple(factor), cores=8)
    found = simulate(batcher, costs, requests, streams, host=SHARP)
    offered = load * servers
    last = offered**servers / math.factorial(servers) / (1 - load)
    waits = last / (sum(offered**k / math.factorial(k) for k in range(servers)) + last)
    assert found.queue_us == pytest.approx(waits * 1000 / (servers - offered), rel=0.08)


def test_every_request_ends_once_and_the_seed_decides_all():
    levels = (Level("high", 50, 20_000), Level("low", 100, 5_000, "delay"), Level("rest", 20, 3_000))
    streams = [Stream(str(n), 3000, rows={1: 3, 7: 1}, priority=n + 1, slo_ms=20) for n in range(3)]
    requests = traffic(streams, 3, 5)
    costs = Costs(
        (1, 64), (400.0, 3000.0), 3.0, tuple(np.linspace(0.8, 1.2, 101)), 20.0, 1.0, 10.0, 100.0,
        tuple(np.linspace(0.1, 1.9, 101)),
    )  # fmt: skip
    for batcher in (Batcher(300, 32, (8, 16), 2, levels), Batcher(0, 16, (), 1, levels, has_waker=False)):
        found = simulate(batcher, costs, requests, streams, seed=1)
        outcome = found.outcome
        assert outcome.answered + sum(outcome.errors.values()) == len(requests)
        assert sum(rows * times for rows, times in found.batch_sizes.items()) == outcome.rows
        assert outcome.errors[REJECTED] > 0
        assert outcome.errors[TIMED_OUT] > 0
        assert simulate(batcher, costs, requests, streams, seed=1).as_dict() == found.as_dict()
        assert simulate(batcher, costs, requests, streams, seed=2).as_dict() != found.as_dict()


@pytest.mark.parametrize("max_batch_size", [1, 8])
def test_an_overloaded_batcher_without_a_delay_works_off_its_queue(max_batch_size: int):
    costs = Costs((1, 16, 64), (10_000.0, 11_000.0, 16_000.0), 0.0, is_on_cpu=False)
    requests, streams = poisson(1500, 0.2)
    found = simulate(Batcher(0, max_batch_size), costs, requests, streams)
    assert found.outcome.answered == len(requests)
    assert found.mean_rows == pytest.approx(max_batch_size, rel=0.1)


def test_a_batcher_is_read_from_a_config():
    config = model_config.parse((ROOT / "model_repository/ctr/config.pbtxt").read_text(), "ctr")
    found = Batcher.of(config)
    assert (found.queue_delay_us, found.max_batch_size, found.instances, found.default_level) == (500, 256, 1, 1)
    assert [level.name for level in found.levels] == ["realtime", "batch", "wake"]
    assert found.levels[0] == Level("realtime", 1000, 150_000, "reject", False)
    assert not found.prefetches
    assert found.place(Stream("s", 1, caller_class="batch")) == 1
    assert found.place(Stream("s", 1, priority=9)) == 0
    with pytest.raises(SpecError, match="did you mean realtime"):
        found.place(Stream("s", 1, caller_class="realtme"))
    del config.dynamic_batching.priority_queue_policy[1]
    config.ClearField("dynamic_batching")
    with pytest.raises(SpecError, match="no dynamic batcher"):
        Batcher.of(config)


def test_impossible_batchers_are_refused():
    with pytest.raises(SpecError, match="preferred batch size"):
        Batcher(0, 4, preferred_batch_sizes=(8,))
    with pytest.raises(SpecError, match="more of a resource than there is"):
        Batcher(0, 4, resources={"a": 2}, resource_counts={"a": 1})


def run(*argv: str, folder: Path) -> tuple[int, str, BaseException | None]:
    app = typer.Typer()
    app.command("simulate")(command.command)
    (folder / "costs.json").write_text(json.dumps(FLAT.as_dict()))
    done = CliRunner().invoke(app, [*argv, "--models", str(ROOT / "models"), "--costs", str(folder / "costs.json")])
    return done.exit_code, done.stdout, done.exception


def test_the_command_says_what_becomes_of_a_load(tmp_path: Path) -> None:
    build.prepare(spec.load_services(ROOT / "models", ["ctr"]), "auto", print)
    argv = ("ctr", "--rate", "500", "--rate", "batch=100", "--seconds", "5")
    code, said, _ = run(*argv, "--json", folder=tmp_path)
    assert code == 0
    found = json.loads(said[said.index("{") :])
    assert set(found["outcome"]["streams"]) == {"realtime", "batch"}
    assert found["outcome"]["answered"] == found["outcome"]["requests"] > 2500
    assert sum(found["batch_sizes"].values()) == found["executions"]
    code, said, _ = run(*argv, folder=tmp_path)
    assert code == 0
    assert "rows of a batch" in said
    assert run("ctr", "--rate", "night=1", folder=tmp_path)[2].__class__ is SpecError
    assert run("ctr", "--rate", "many", folder=tmp_path)[0] == 2
