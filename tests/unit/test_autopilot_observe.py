"""Two readings become an observation, or the reason why nothing can be concluded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from tritonpilot import metrics
from tritonpilot.autopilot.loop import Settings
from tritonpilot.autopilot.observe import (
    Counts,
    Pages,
    Prometheus,
    Reading,
    began_anew,
    is_first_look,
    is_newer,
    observe,
)
from tritonpilot.autopilot.terms import Knobs
from tritonpilot.errors import MeasurementError, SpecError
from tritonpilot.top import Endpoints

KNOBS = Knobs(500, 2)
# Of ten seconds: 100 answers of 400 rows in 50 executions.
STEP = {
    "nv_inference_request_success": 100,
    "nv_inference_count": 400,
    "nv_inference_exec_count": 50,
    "nv_inference_queue_duration_us": 200_000,
    "nv_inference_compute_input_duration_us": 0,
    "nv_inference_compute_infer_duration_us": 4_000_000,
    "nv_inference_compute_output_duration_us": 0,
}


def page(times: float, pending: int = 0, also: str = "", model: str = "ctr") -> str:
    lines = [f'{name}{{model="{model}",version="1"}} {value * times}' for name, value in STEP.items()]
    return "\n".join([*lines, f'nv_inference_pending_request_count{{model="{model}",version="1"}} {pending}', also])


def reading(
    at_s: float,
    text: str,
    requests: int = 0,
    sizes: Mapping[int, int] | None = None,
    busy_s: float = 0.0,
    said: str = "",
) -> Reading:
    counts = {} if said else {"ctr": Counts(requests, sizes or {}, int(busy_s * 1e9))}
    return Reading(at_s, at_s + 1000, metrics.parse(text), counts, said=said)


def test_rates_are_the_differences_of_two_readings() -> None:
    before = reading(0, page(1), 100, {8: 50}, 5.0)
    now = reading(10, page(2, pending=20), 200, {8: 75, 4: 25}, 11.0)

    seen = observe(before, now, "ctr", KNOBS, at_s=77.0, max_batch_size=64)

    assert seen.problem == ""
    assert (seen.at_s, seen.seconds, seen.knobs, seen.max_batch_size) == (77.0, 10, KNOBS, 64)
    assert (seen.answered_per_s, seen.refused_per_s, seen.failed_per_s) == (10, 0, 0)
    assert seen.arrivals_per_s == 12, "the queue grew by 20"
    assert (seen.waiting, seen.rows_per_request, seen.queue_us, seen.mean_batch) == (20, 4, 2000, 8)
    assert seen.batch_sizes == {4: 2.5, 8: 2.5}
    assert seen.utilisation == pytest.approx(6 / 20)


def test_a_queue_that_is_worked_off_is_no_arrival() -> None:
    seen = observe(reading(0, page(1, pending=150)), reading(10, page(2)), "ctr", KNOBS, at_s=1)

    assert seen.arrivals_per_s == 0, "100 were answered, and 150 had been waiting"


def test_wakes_are_no_refusals_and_other_failures_are_told_apart() -> None:
    failed = 'nv_inference_request_failure{{model="ctr",version="1",reason="{}"}} {}'
    wakes = 'pilot_wakes_total{{model="ctr",version="1"}} {}'
    also = [
        "\n".join(
            [failed.format("REJECTED", n), failed.format("BACKEND", n), failed.format("CANCELED", n), wakes.format(w)]
        )
        for n, w in ((0, 0), (300, 192))
    ]

    seen = observe(reading(0, page(1, also=also[0])), reading(10, page(2, also=also[1])), "ctr", KNOBS, at_s=1)

    assert (seen.refused_per_s, seen.failed_per_s, seen.arrivals_per_s) == (10, 30, 50), "8 wakes may be told later"


def test_an_idle_model_is_idle_and_not_unknown() -> None:
    seen = observe(reading(0, page(1), 100), reading(10, page(1), 100), "ctr", KNOBS, at_s=1)

    assert seen.problem == ""
    assert (seen.arrivals_per_s, seen.utilisation, seen.batch_sizes) == (0, 0.0, {})
    assert math.isnan(seen.queue_us)
    assert math.isnan(seen.mean_batch)


def test_after_a_reload_statistics_begin_anew_and_the_page_goes_on() -> None:
    before, now = reading(0, page(1), 100, {8: 50}, 5.0), reading(10, page(2), 12, {8: 6}, 0.6)

    seen = observe(before, now, "ctr", KNOBS, at_s=1)

    assert seen.problem == ""
    assert (seen.answered_per_s, seen.batch_sizes) == (10, {})
    assert seen.utilisation == pytest.approx(4.0 / 2 / 20), "from the page: two requests share an execution of 40 ms"


def test_instances_that_hold_for_a_live_delay_are_not_busy() -> None:
    held = 'pilot_held_us_total{model="ctr",version="1"} %d'
    before = reading(0, page(1, also=held % 0), 100, {8: 50}, 5.0)
    now = reading(10, page(2, also=held % 2_000_000), 200, {8: 100}, 11.0)

    assert observe(before, now, "ctr", KNOBS, at_s=1).utilisation == pytest.approx((6 - 2) / 20)


def test_counters_that_run_backwards_are_neither_an_outage_nor_a_flood() -> None:
    before, now = reading(0, page(5), 500), reading(10, page(2), 200)

    seen = observe(before, now, "ctr", KNOBS, at_s=1, restarted=True)

    assert seen.problem == "The counters of ctr began anew: tritonserver or the model was started again."
    assert seen.restarted
    assert math.isnan(seen.arrivals_per_s)
    assert began_anew(before, now, "ctr")
    assert not began_anew(now, before, "ctr")


def test_one_counter_that_runs_backwards_is_enough() -> None:
    now = page(2).replace("nv_inference_queue_duration_us{", "x{")
    backwards = now + '\nnv_inference_queue_duration_us{model="ctr",version="1"} 1'

    assert "began anew" in observe(reading(0, page(1)), reading(10, backwards), "ctr", KNOBS, at_s=1).problem


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (None, reading(10, page(2)), "This is the first look at ctr"),
        (Reading(math.nan, 0, problem="cut"), reading(10, page(2)), "This is the first look at ctr"),
        (reading(0, page(1)), reading(10, page(2), said="Triton did not answer."), "Triton did not answer."),
        (reading(0, page(1)), Reading(10, 10, statistics={}), "Triton does not serve the model ctr"),
        (reading(0, page(1)), Reading(math.nan, 10, (), {"ctr": Counts(0, {}, 0)}, "The page is cut."), "The page is cut."),
        (reading(0, page(1)), reading(10, page(1, model="other")), "There are figures of this Triton, but none of ctr."),
        (reading(10, page(1)), reading(10, page(2)), "The time of the figures of ctr did not go on"),
        (reading(10, page(1)), reading(5, page(2)), "The time of the figures of ctr did not go on"),
        (reading(0, page(1), 100), reading(10, page(1), 150), "stand still, but gRPC counted 50 answers meanwhile"),
    ],
)  # fmt: skip
def test_what_cannot_be_known_is_a_problem_and_never_zero(before: Reading | None, now: Reading, said: str) -> None:
    seen = observe(before, now, "ctr", KNOBS, at_s=1)

    assert said in seen.problem
    assert math.isnan(seen.arrivals_per_s)
    assert (seen.utilisation, seen.p99_ms, seen.knobs) == (None, None, KNOBS)
    assert is_first_look(seen.problem) == said.startswith("This is the first look")


def test_figures_that_stand_still_while_hardly_anybody_calls_are_believed() -> None:
    assert observe(reading(0, page(1), 100), reading(10, page(1), 105), "ctr", KNOBS, at_s=1).problem == ""


def test_a_prometheus_that_has_not_scraped_since_has_nothing_newer() -> None:
    assert not is_newer(reading(10, page(1)), reading(10, page(1), 50))
    assert is_newer(reading(10, page(1)), reading(10, page(1), said="Triton did not answer."))


def entry(ok: int, other: int, waiting: int, slow_ok: int = 0) -> str:
    """What an entry tells of a class that is promised 50 ms, and of one that is promised nothing."""
    best, rest = 'model="ctr",class="realtime"', 'model="ctr",class="batch"'
    statuses = ("timeout", "refused_full", "refused_rate", "rejected", "cancelled", "unavailable")
    lines = [f'processed_requests_total{{{best},tenant="a",status="ok"}} {ok}']
    lines += [f'processed_requests_total{{{best},tenant="a",status="{status}"}} {other}' for status in statuses]
    lines += [f'processed_requests_total{{{rest},tenant="b",status="ok"}} {slow_ok}']
    for labels, count, edge in ((best, ok, "0.05"), (rest, slow_ok, "5.0")):
        lines += [f'inference_latency_seconds_bucket{{{labels},le="{le}"}} {count if float(le) >= float(edge) else 0}'
                  for le in ("0.04", "0.05", "5.0", "+Inf")]  # fmt: skip
    lines += [f"slo_seconds{{{best}}} 0.05", f"request_queue_size{{{best}}} {waiting}"]
    lines += [f"request_queue_seconds_sum{{{best}}} {0.01 * ok}", f"request_queue_seconds_count{{{best}}} {ok}"]
    return "\n".join(lines)


def test_the_entry_tells_who_waits_in_it_whom_it_refuses_and_p99_of_the_best_class() -> None:
    before = reading(0, page(1, also=entry(0, 0, 0)))
    now = reading(10, page(2, also=entry(100, 10, 40, slow_ok=7)))

    seen = observe(before, now, "ctr", KNOBS, at_s=1)

    assert seen.refused_per_s == 3, "timeout, refused_full and rejected, but not what a tenant may not send"
    assert (seen.waiting, seen.failed_per_s) == (40, 1)
    assert seen.arrivals_per_s == 10 + 3 + 4
    assert seen.p99_ms == pytest.approx(50, abs=1)
    assert seen.p99_over_s == 0
    assert seen.queue_us == pytest.approx(2000 + 10_000)
    assert seen.arrivals_by_class == {"realtime": 10 + 4 + 4, "batch": 0.7}


def test_an_entry_that_was_started_again_counts_from_zero() -> None:
    before = reading(0, page(1, also=entry(1000, 100, 0)))
    now = reading(10, page(2, also=entry(90, 2, 0)))

    seen = observe(before, now, "ctr", KNOBS, at_s=1)

    assert (seen.problem, seen.refused_per_s, seen.arrivals_by_class["realtime"]) == ("", 0.6, 9 + 0.8)


def test_an_entry_that_appears_does_not_look_like_a_flood() -> None:
    seen = observe(reading(0, page(1)), reading(10, page(2, also=entry(10_000, 500, 0))), "ctr", KNOBS, at_s=1)

    assert (seen.refused_per_s, seen.arrivals_per_s, seen.p99_ms) == (0, 10, None)


def test_without_an_entry_p99_is_tritons_of_about_the_last_minute() -> None:
    also = 'nv_inference_request_summary_us{model="ctr",version="1",quantile="0.99"} %s'
    before = reading(0, page(1, also=also % "1000"))

    seen = observe(before, reading(10, page(2, also=also % "42000")), "ctr", KNOBS, at_s=1)
    idle = observe(before, reading(10, page(2, also=also % "NaN")), "ctr", KNOBS, at_s=1)

    assert (seen.p99_ms, seen.p99_over_s) == (42, 60)
    assert idle.p99_ms is None


def test_wrong_addresses_are_refused() -> None:
    with pytest.raises(SpecError, match="--metrics is 'nowhere'"):
        Pages(Endpoints("nowhere", http=""))
    with pytest.raises(SpecError, match="--prometheus is"):
        Prometheus("ftp://x")
    with pytest.raises(SpecError, match="--instance is"):
        Prometheus("http://127.0.0.1:9090", instance='x"} or vector(1)')
    with pytest.raises(SpecError, match="--triton-grpc is 'http://triton:8001'"):
        Settings(Path("autopilot.yaml"), Path("state"), triton_grpc="http://triton:8001").source(5)
    with pytest.raises(SpecError, match="no --prometheus is named"):
        Settings(Path("autopilot.yaml"), Path("state"), instance="triton:8002").source(5)


def test_a_tritons_page_is_not_taken_for_an_entrys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "scrape", lambda _: metrics.parse(page(1)))

    with pytest.raises(MeasurementError, match=r"--entry\) is that of a Triton"):
        Pages(Endpoints("triton:8002", http="", entry="triton:8002")).samples()


def test_a_page_that_nobody_serves_is_a_problem(free_port: int) -> None:
    with pytest.raises(MeasurementError, match="cannot be read"):
        Pages(Endpoints(f"127.0.0.1:{free_port}", http="")).samples()
    with pytest.raises(MeasurementError, match="did not answer"):
        Prometheus(f"127.0.0.1:{free_port}").samples()
