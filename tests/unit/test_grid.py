"""Sweeps: which points, how well they are known, which one is recommended, and what is left on disk."""

import json
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tritonpilot.commands import sweep
from tritonpilot.errors import HostError, MeasurementError, PilotError, SpecError
from tritonpilot.grid import Effort, Grid, Row, Store, Trial, choose, front, keys, report
from tritonpilot.grid.closed_loop import _pinned
from tritonpilot.grid.estimate import Estimate, estimate
from tritonpilot.grid.measure import Shot, summed
from tritonpilot.grid.run import Progress
from tritonpilot.machine import Noise
from tritonpilot.measurement import Point
from tritonpilot.setting import Setting
from tritonpilot.spec import Service, load_service

SERVICE = """\
service: digits
model:
  backend: python
  file: serving.py
  inputs: [{name: x, data_type: FP32, dims: [1]}]
  outputs: [{name: y, data_type: FP32, dims: [1]}]
batching: {max_batch_size: 8, queue_delay_us: 500}
slo: {p99_ms: 20}
classes: [{name: app, priority: 1}]
"""
QUIET = Noise(0.0, 0.0, True, "quiet")
NOISY = Noise(0.5, 0.0, False, "other processes used 0.50 cores (allowed 0.10)")


@pytest.fixture
def service(tmp_path: Path) -> Service:
    path = tmp_path / "models" / "digits" / "service.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(SERVICE)
    (path.parent / "serving.py").write_text("")
    return load_service(path)


def point(throughput: float = 100.0, p99_ms: float = 10.0) -> Point:
    return Point(
        model="digits", protocol="grpc", batch=1, concurrency=4, rate_per_s=None, throughput_infer_s=throughput, avg_ms=5.0,
        p50_ms=4.0, p90_ms=8.0, p95_ms=9.0, p99_ms=p99_ms, mean_batch=2.0, queue_ms=1.0, compute_ms=3.0, network_ms=math.nan,
        client_ms=0.1, client_cores=0.2, spread_pct=3.0, is_stable=True,
    )  # fmt: skip


def row(throughput: float, p99_ms: float, *, concurrency: int = 4, p99_half_ms: float = 0.1, **setting: object) -> Row:
    chosen = replace(Setting(500, 8, 1, 1), **setting)  # type: ignore[arg-type]
    return Row(
        trial=Trial(chosen, concurrency=concurrency),
        point=point(throughput, p99_ms),
        throughput=Estimate(throughput, 1.0, 6),
        p99_ms=Estimate(p99_ms, p99_half_ms, 6),
        batch_sizes={1: 30, 3: 10},
        requests=1000,
        noise=QUIET,
        is_stable=True,
    )


# -- estimates


def test_interval_is_students() -> None:
    found = estimate([9.0, 10.0, 11.0])
    assert (found.mean, found.count) == (10.0, 3)
    assert found.half_width == pytest.approx(4.303 / math.sqrt(3))  # a standard deviation of 1, two degrees of freedom
    assert found.pct == pytest.approx(24.84, abs=0.01)
    assert estimate([5.0]).half_width == math.inf
    assert estimate([0.0, 1.0] * 50).half_width == pytest.approx(1.96 * 0.50252 / 10, rel=1e-3)
    with pytest.raises(ValueError, match="needs a value"):
        estimate([])


def shot(throughput: float, noise: Noise) -> Shot:
    windows = (throughput * 0.99, throughput, throughput * 1.01)
    return Shot(point(throughput), windows, (10.0, 10.1, 9.9), {1: 5, 2: 5}, {}, 30, noise)


def test_noisy_attempts_do_not_count_beside_quiet_ones() -> None:
    trial = Trial(Setting(0, 8), concurrency=4)
    found = summed(trial, [shot(50, NOISY), shot(100, QUIET), shot(102, QUIET)], Effort(), "perf_analyzer")
    assert found.throughput is not None
    assert found.point is not None
    assert found.throughput.mean == pytest.approx(101)
    assert found.point.throughput_infer_s == pytest.approx(101)
    assert found.batch_sizes == {1: 10, 2: 10}
    assert (found.is_quiet, found.is_stable, found.remark()) == (True, True, "")


def test_row_says_that_no_attempt_was_quiet_and_that_it_did_not_settle() -> None:
    trial = Trial(Setting(0, 8), concurrency=4)
    found = summed(trial, [shot(50, NOISY), shot(100, NOISY)], Effort(), "load")
    assert found.remark() == "noisy, unsettled, load"
    assert found.notes[0] == "the machine was not quiet: other processes used 0.50 cores (allowed 0.10)"
    assert found.notes[1].startswith("did not settle in 2 attempts: throughput \N{PLUS-MINUS SIGN}")


def test_attempts_without_an_answer_are_no_figure() -> None:
    nothing = replace(shot(50, QUIET), throughputs=(), p99s_ms=())
    with pytest.raises(MeasurementError, match="No window of the measurement has a figure"):
        summed(Trial(Setting(0, 8), concurrency=4), [nothing], Effort(), "load")


# -- the grid


def test_grid_has_every_combination_with_light_loads_first(service: Service) -> None:
    grid = Grid(queue_delays_us=(0, 500), instances=(1, 2, 1), rows=(1, 8), concurrencies=(16, 1))
    trials = grid.trials(service)
    assert len(trials) == 2 * 2 * 2 * 2
    assert [trial.concurrency for trial in trials[:4]] == [1, 16, 1, 16]
    assert [trial.rows for trial in trials[:4]] == [1, 1, 8, 8]
    assert [(t.setting.queue_delay_us, t.setting.instances) for t in trials[::4]] == [
        (0, 1),
        (0, 2),
        (500, 1),
        (500, 2),
    ]
    assert {trial.setting.max_batch_size for trial in trials} == {8}
    assert trials[3].describe() == "delay 0 us, batch 8, 1 instance of 1 thread, fp32, concurrency 16 of 8 rows"


def test_rates_go_instead_of_concurrencies_and_requests_must_fit(service: Service) -> None:
    trials = Grid(max_batch_sizes=(2, 4), rows=(4,), rates_per_s=(20.0, 10.0)).trials(service)
    assert [(t.setting.max_batch_size, t.rate_per_s) for t in trials] == [(4, 10.0), (4, 20.0)]
    with pytest.raises(SpecError, match="Requests of 16 rows do not fit into any maximum batch"):
        Grid(rows=(16,)).trials(service)


def test_contradicting_setting_refuses_the_whole_grid(service: Service) -> None:
    with pytest.raises(SpecError, match="class app may wait 16 ms, no longer than this delay"):
        Grid(queue_delays_us=(0, 20_000)).trials(service)


def test_key_changes_with_all_that_a_figure_depends_on(service: Service) -> None:
    trials = Grid(queue_delays_us=(0, 500), concurrencies=(1, 2)).trials(service)
    first = keys(service, trials, {"window_ms": 100})
    assert len(set(first.values())) == 4
    assert keys(service, trials, {"window_ms": 100}) == first
    assert not set(keys(service, trials, {"window_ms": 200}).values()) & set(first.values())
    (service.folder / "serving.py").write_text("changed = True")
    assert not set(keys(service, trials, {"window_ms": 100}).values()) & set(first.values())


def test_progress_says_what_a_point_gave_and_how_long_the_others_take() -> None:
    said: list[str] = []
    known = [row(100, 10), row(200, 20), row(300, 30)]
    progress = Progress([each.trial for each in known], said.append)
    progress.begin(known[0].trial)
    progress.end(replace(known[0], is_stable=False))
    progress.end(Row(known[1].trial, failure="it died."))
    progress.end(known[2])
    assert said == [
        "[1/3] delay 500 us, batch 8, 1 instance of 1 thread, fp32, concurrency 4",
        "    100 infer/s \N{PLUS-MINUS SIGN}1 %, P99 10.00 ms \N{PLUS-MINUS SIGN}1 % (unsettled); about 0 s left",
        "    no figure: it died; about 0 s left",
        "    300 infer/s \N{PLUS-MINUS SIGN}0 %, P99 30.00 ms \N{PLUS-MINUS SIGN}0 %",
    ]


# -- the choice


def test_front_is_what_no_other_point_beats() -> None:
    rows = [row(100, 10), row(200, 20), row(150, 25), row(200, 19), row(50, 10)]
    assert [each.point.throughput_infer_s for each in front(rows) if each.point] == [100, 200]
    assert front([*rows, replace(row(900, 1), point=None)]) == [rows[0], rows[3]]


def test_highest_throughput_within_the_slo_is_recommended_and_compared() -> None:
    now = Setting(500, 8, 1, 1)
    rows = [row(100, 8), row(300, 30), row(200, 18, queue_delay_us=2000), row(150, 15, queue_delay_us=0)]
    found = choose(rows, slo_ms=20, now=now, rate_per_s=150)
    assert found.row is rows[2]
    assert "200 \N{PLUS-MINUS SIGN} 1 infer/s at P99 18.00 \N{PLUS-MINUS SIGN} 0.10 ms" in found.reason
    assert (
        "The service file's own setting reaches 100 infer/s within the SLO, so this is 2.00 times as much."
        in found.reason
    )
    assert (
        "Next: delay 0 us, batch 8, 1 instance of 1 thread, fp32, concurrency 4 (150 infer/s, P99 15.00 ms)."
        in found.reason
    )
    assert "25% of their time" in found.reason
    assert "The promised 150 requests/s are covered." in found.reason
    assert (
        "900 requests/s are beyond what was measured within the SLO: 200."
        in choose(rows, slo_ms=20, rate_per_s=900).reason
    )
    assert choose(rows, slo_ms=40, now=now).reason.endswith("It is what the service file says already.")


def test_equally_fast_settings_are_decided_by_their_cores() -> None:
    rows = [row(201, 10, instances=2), row(200, 12), row(200, 9, precision="int8")]
    found = choose(rows, slo_ms=20)
    assert found.row is rows[1]
    assert "2 other settings within 2% of it need as many cores or more." in found.reason


def test_promised_rate_is_covered_only_where_the_interval_says_so() -> None:
    def said(throughput: float, half_width: float) -> str:
        measured = replace(row(throughput, 10), throughput=Estimate(throughput, half_width, 3))
        return choose([measured], slo_ms=20, rate_per_s=1000).reason

    assert "The promised 1000 requests/s are covered." in said(1100, 80)
    assert "The promised 1000 requests/s are covered." in said(1000, 15)  # within what counts as equal
    unsure = "are neither covered nor missed for sure by what was measured within the SLO, 993 \N{PLUS-MINUS SIGN} 149:"
    assert f"The promised 1000 requests/s {unsure}" in said(993, 149)
    assert "are neither covered nor missed for sure" in said(1200, math.inf)
    assert "are beyond what was measured within the SLO: 800." in said(800, 100)


def test_interval_that_crosses_the_slo_is_chosen_only_when_nothing_else_is() -> None:
    unsure, sure = row(300, 19, p99_half_ms=5.0), row(100, 10)
    assert choose([unsure, sure], slo_ms=20).row is sure
    alone = choose([unsure], slo_ms=20)
    assert alone.row is unsure
    assert "The interval of its P99 reaches 24.00 ms, beyond the SLO" in alone.reason


def test_unreachable_slo_says_what_is_reachable() -> None:
    found = choose([row(100, 30.4), row(50, 22.2)], slo_ms=20)
    assert found.row is None
    assert found.reason.startswith("No measured point keeps P99 within 20 ms. The lowest is delay 500 us")
    assert "(50 infer/s, P99 22.20 ms): a promise of 23 ms could be kept" in found.reason


def test_without_an_slo_throughput_over_latency_decides() -> None:
    rows = [row(100, 10), row(300, 20), row(310, 60)]
    found = choose(rows, slo_ms=None)
    assert found.row is rows[1]
    assert "promises no latency" in found.reason


def test_points_with_failed_requests_are_no_candidates() -> None:
    faulty = replace(row(500, 5), errors={"INVALID_ARGUMENT": 30})
    found = choose([faulty, row(100, 10)], slo_ms=20)
    assert found.row is not faulty
    assert found.reason.endswith("1 point with failed requests is left out.")
    assert choose([faulty], slo_ms=20).row is None
    assert "Nothing was measured" in choose([Row(faulty.trial, failure="no")], slo_ms=20).reason


# -- what is left on disk


def test_row_survives_json_with_what_has_no_figure() -> None:
    first = replace(row(100, 10), p99_ms=Estimate(10, math.inf, 1), notes=("one",), errors={"rejected": 2})
    again = Row.of_dict(json.loads(json.dumps(first.as_dict(), allow_nan=False)))
    assert again.point is not None
    assert math.isnan(again.point.network_ms)
    assert replace(again, point=None) == replace(first, point=None)
    assert again.as_dict() == first.as_dict()


def test_store_knows_points_again_and_ignores_a_line_that_was_cut_off(service: Service, tmp_path: Path) -> None:
    trials = Grid(concurrencies=(1, 4)).trials(service)
    names = keys(service, trials, {})
    measured = replace(row(100, 10), trial=trials[0])
    Store(tmp_path / "out").add(names[trials[0]], measured)
    with (tmp_path / "out" / "points.jsonl").open("a") as file:
        file.write('{"key": "' + names[trials[1]] + '", "row": {"sett')
    store = Store(tmp_path / "out")
    assert {trial: each.as_dict() for trial, each in store.rows(names).items()} == {trials[0]: measured.as_dict()}
    store.add(names[trials[1]], replace(row(200, 20), trial=trials[1]))
    assert set(store.rows(names)) == set(trials)
    assert store.rows(keys(service, trials, {"other": 1})) == {}


@pytest.mark.parametrize(
    "damage",
    [
        {"point": {"p99_ms": "abc"}},
        {"point": {"concurrency": "many"}},
        {"throughput": {"mean": None}},
        {"throughput": None},
        {"p99_ms": 5},
        {"noise": {"other_cores": math.inf}},
        {"noise": {"is_quiet": "perhaps"}},
        {"batch_sizes": [1, 2]},
        {"errors": {"rejected": "two"}},
        {"notes": 5},
        {"rows": "x"},
        {"setting": {"queue_delay_us": "soon"}},
        {"setting": 3},
        {"rows": 2},  # another trial's
    ],
)
def test_damaged_line_does_not_count(service: Service, tmp_path: Path, damage: dict[str, object]) -> None:
    (trial,) = Grid(concurrencies=(4,)).trials(service)
    names = keys(service, [trial], {})
    measured = replace(row(100, 10), trial=trial)
    store = Store(tmp_path / "out")
    store.add(names[trial], measured)
    assert set(store.rows(names)) == {trial}
    content = measured.as_dict()
    for name, value in damage.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    store.file.write_text(json.dumps({"key": names[trial], "row": content}) + "\n")
    assert store.rows(names) == {}


def test_row_of_another_tool_than_the_one_asked_for_has_a_remark() -> None:
    measured = replace(row(100, 10), tool="load")
    assert measured.remark("perf_analyzer") == "load"
    assert measured.remark("load") == ""


def test_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostError, match="folder of results .* cannot be written: Not a directory.*--output"):
        Store(tmp_path / "file" / "out")


@pytest.mark.parametrize("count", [0, 2])
def test_report_is_written_for_any_number_of_points(tmp_path: Path, count: int) -> None:
    rows = [row(100 * (n + 1), 10 * (n + 1), concurrency=n + 1) for n in range(count)]
    rows.append(Row(Trial(Setting(0, 8), rate_per_s=5.0), failure="<b>it died</b>"))
    result = report.Result("digits", rows, choose(rows, slo_ms=25), 25.0, {"machine": {"cores": 2}, "command": "sweep"})
    store = Store(tmp_path / "out")
    names = report.write(result, store)
    assert sorted(path.name for path in store.folder.iterdir()) == sorted([*names, "points.jsonl"])
    assert (store.folder / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (store.folder / "report.html").read_text()
    assert "<svg" in page
    assert "&lt;b&gt;it died" in page
    assert ("<td class=word>recommended</td>" in page) == (count > 0)
    content = json.loads((store.folder / "results.json").read_text())
    assert len(content["rows"]) == count + 1
    assert content["pareto"] == list(range(count))
    lines = (store.folder / "results.csv").read_text().splitlines()
    assert len(lines) == count + 2
    assert lines[-1].endswith("<b>it died</b>")


# -- the command


@pytest.fixture
def ask(service: Service) -> Callable[..., BaseException | None]:
    app = typer.Typer()
    app.command()(sweep.command)

    def run(*argv: str) -> BaseException | None:
        return CliRunner().invoke(app, [*argv, "--models", str(service.folder.parent)]).exception

    return run


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["digit"], "no service or model digit; did you mean digits?"),
        (["digits", "--delay-us", "0,30000"], "no longer than this delay"),
        (["digits", "--precision", "int8"], "runs no ONNX file"),
        (["digits", "--rows", "9"], "do not fit"),
        (["digits", "--output", "OUT"], "names no samples"),
        (["digits", "--output", "/proc/none/out"], "cannot be written"),
        (["digits", "--output", "TAKEN"], "report.html is a folder"),
        (["digits", "--cpus", "4095"], "cannot run on 4095, and --cpus 4095 asks for that CPU"),
        (["digits", "--server-cpus", "0-4095"], "--server-cpus 0-4095 asks"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_server_starts(
    ask: Callable[..., BaseException | None], tmp_path: Path, argv: list[str], said: str
) -> None:
    (tmp_path / "taken" / "report.html").mkdir(parents=True)
    places = {"OUT": str(tmp_path / "out"), "TAKEN": str(tmp_path / "taken")}
    refused = ask(*[places.get(each, each) for each in argv])
    assert isinstance(refused, PilotError)
    assert said in str(refused)


@pytest.mark.parametrize(
    "argv",
    [
        ["--delay-us", "x"],
        ["--instances", "0"],
        ["--precision", "fp8"],
        ["--concurrency", ""],
        ["--rate", "nan"],
        ["--rate", "100,inf"],
        ["--slo-ms", "inf"],
        ["--slo-ms", "nan"],
        ["--p99-pct", "inf"],
        ["--throughput-pct", "nan"],
        ["--rate", "100", "--concurrency", "2"],
        ["--tool", "load", "--protocol", "http"],
        ["--cpus", "3-1"],
    ],
)
def test_values_that_are_none_or_exclude_each_other_are_usage_errors(
    ask: Callable[..., BaseException | None], argv: list[str]
) -> None:
    refused = ask("digits", *argv)
    assert isinstance(refused, SystemExit)
    assert refused.code == 2


def test_client_is_pinned_with_the_threads_that_it_had_before() -> None:
    before = os.sched_getaffinity(0)
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        with _pinned([min(before)]):
            assert os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) == {min(before)}
        assert os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) == before
    finally:
        over.set()
        thread.join()
