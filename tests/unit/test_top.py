"""`tritonpilot top` on recorded pages of a real Triton and a real entry: 40 requests of realtime, then 12 callers of batch."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tritonpilot import metrics, top
from tritonpilot.cli import app
from tritonpilot.errors import MeasurementError, SpecError
from tritonpilot.top import Endpoints, Page, Reading

CAPTURED = Path(__file__).parent / "captured"
SECONDS = 4.0
NOWHERE = "127.0.0.1:1"


def page(name: str, at_s: float) -> Page:
    return Page(at_s, metrics.parse((CAPTURED / f"top_{name}.txt").read_text()))


def text(at_s: float, *lines: str) -> Page:
    return Page(at_s, metrics.parse("\n".join(lines)))


BEFORE = Reading(page("triton_before", 10), page("entry_before", 10))
NOW = Reading(
    page("triton_after", 10 + SECONDS), page("entry_after", 10 + SECONDS), "triton 2.51.0", {("classes", "1"): 2}
)


def drawn(view: top.View, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(top.render(view, width))
    return out.getvalue()


def test_models_are_the_difference_of_two_pages() -> None:
    (row,) = top.compare(BEFORE, NOW).models

    assert (row.model, row.version, row.instances, row.pending) == ("classes", "1", 2, 0)
    assert (row.failed_per_s, row.rejected_per_s) == (0, 0)
    assert row.cache_hit_pct is None
    assert (row.requests_per_s, row.inferences_per_s, row.mean_batch) == (46 / SECONDS, 46 / SECONDS, 1)
    assert row.queue_ms == pytest.approx((307_733 - 487) / 46e3)
    assert row.compute_ms == pytest.approx((2_134 - 464 + 1_291_036 - 201_366 + 11_291 - 709) / 46e3)
    assert (row.p50_ms, row.p99_ms) == (pytest.approx(4.641), pytest.approx(152.132)), "Triton's own window"


def test_classes_come_from_the_entry() -> None:
    batch, realtime = top.compare(BEFORE, NOW).classes

    assert (batch.class_name, realtime.class_name) == ("batch", "realtime")
    assert (realtime.ok_per_s, realtime.refused_per_s, realtime.within_slo_pct) == (40 / SECONDS, 0, 100)
    assert realtime.p50_ms == pytest.approx(2.5 + 2.5 * 20 / 21)
    assert realtime.p99_ms == pytest.approx(5 + 5 * (39.6 - 21) / 19)
    assert (batch.ok_per_s, batch.refused_per_s, batch.timeout_per_s, batch.failed_per_s) == (1.5, 22.75, 0, 0)
    assert batch.within_slo_pct == pytest.approx(100 * (6 - 2) / 97), "what is refused is not within the SLO"
    assert (batch.slo_ms, batch.largest_bucket_ms, batch.queue_size) == (pytest.approx(300), 30_000, 0)


def test_wakes_are_no_rejections() -> None:
    def counters(rejected: int, wakes: int, companion: int) -> tuple[str, ...]:
        labels = 'model="m",version="1"'
        return (
            f"nv_inference_request_success{{{labels}}} 1",
            f'nv_inference_request_failure{{reason="REJECTED",{labels}}} {rejected}',
            f"pilot_wakes_total{{{labels}}} {wakes}",
            f'pilot_companion_wakes_total{{model="m"}} {companion}',
        )

    before = Reading(text(0, *counters(10, 5, 5)), None)
    (row,) = top.compare(before, Reading(text(2, *counters(50, 15, 15)), None)).models
    assert row.rejected_per_s == 10
    (row,) = top.compare(before, Reading(text(2, *counters(20, 15, 15)), None)).models
    assert row.rejected_per_s == 0, "the counters are not read at the same moment"


def test_a_restart_counts_from_zero() -> None:
    (row,) = top.compare(Reading(NOW.triton, None), Reading(page("triton_before", 16), None)).models

    assert row.requests_per_s == pytest.approx(9 / 2)


def test_what_is_idle_has_no_means() -> None:
    view = top.compare(NOW, Reading(page("triton_after", 20), page("entry_after", 20)))

    assert view.models[0].requests_per_s == 0
    assert view.models[0].mean_batch is None
    assert view.models[0].queue_ms is None
    assert [row.p99_ms for row in view.classes] == [None, None]
    assert [row.within_slo_pct for row in view.classes] == [None, None]


def test_gpus_and_busy_models_first() -> None:
    lines = (
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.42',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 2000000000',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 8000000000',
        'nv_gpu_power_usage{gpu_uuid="GPU-1"} 71.5',
    )

    def counts(idle: int, busy: int) -> tuple[str, ...]:
        return tuple(
            f'{name}{{model="{model}",version="1"}} {n}'
            for name in ("nv_inference_request_success", "nv_inference_count")
            for model, n in (("idle", idle), ("busy", busy))
        )

    view = top.compare(Reading(text(0, *counts(3, 3)), None), Reading(text(1, *lines, *counts(4, 9)), None))

    assert view.gpus == (top.GpuRow("GPU-1", 42, 2, 8, 71.5),)
    assert [row.model for row in view.models] == ["busy", "idle"]
    assert "GPU-1" in drawn(view)


def test_percentiles_are_those_of_histogram_quantile() -> None:
    buckets = {0.01: 50.0, 0.1: 99.0, 0.5: 99.0, math.inf: 100.0}

    assert top.percentile(buckets, 0.25) == pytest.approx(0.005)
    assert top.percentile(buckets, 0.5) == pytest.approx(0.01)
    assert top.percentile(buckets, 0.745) == pytest.approx(0.055)
    assert top.percentile(buckets, 0.999) == 0.5
    assert top.percentile({0.01: 0.0, math.inf: 0.0}, 0.5) is None
    assert top.percentile({}, 0.5) is None


def test_what_lies_beyond_the_last_bucket_is_marked() -> None:
    def counts(fast: int, all_: int) -> tuple[str, ...]:
        return (
            f'processed_requests_total{{model="m",class="c",status="ok",tenant=""}} {all_}',
            f'inference_latency_seconds_bucket{{model="m",class="c",le="1.0"}} {fast}',
            f'inference_latency_seconds_bucket{{model="m",class="c",le="+Inf"}} {all_}',
        )

    triton = text(0, "nv_cpu_utilization 1")
    view = top.compare(Reading(triton, text(0, *counts(0, 0))), Reading(triton, text(1, *counts(1, 9))))

    assert view.classes[0].p99_ms == view.classes[0].largest_bucket_ms == 1000
    assert ">1,000" in drawn(view)


def test_the_drawing_has_what_the_rows_have() -> None:
    said = drawn(top.compare(BEFORE, NOW))

    for word in (
        "triton 2.51.0, over 4.0 s",
        "classes",
        "realtime",
        "batch",
        "P50",
        "P99",
        "pending",
        "refused",
        "inst",
    ):
        assert word in said
    assert "cache" not in said
    assert "no room" not in said


def test_the_drawing_fits_a_small_terminal() -> None:
    said = drawn(top.compare(BEFORE, NOW), 80)

    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80
    assert "…" not in said
    for word in (
        "requests",
        "pending",
        "P99",
        "152.1",
        "rejected",
        "no room for ver, queue, compute",
        "no room for SLO",
    ):
        assert word in said


def test_json_has_every_figure() -> None:
    said = json.loads(json.dumps(top.compare(BEFORE, NOW).as_dict(), allow_nan=False))

    assert said["seconds"] == SECONDS
    assert said["models"][0]["instances"] == 2
    assert {row["class_name"] for row in said["classes"]} == {"batch", "realtime"}
    assert said["gpus"] == []


def test_a_server_that_went_is_told_and_so_are_its_last_seconds() -> None:
    gone = top.read(Endpoints(NOWHERE, "", NOWHERE))
    view = top.compare(NOW, gone)

    assert (view.models, view.classes, view.seconds) == ((), (), None)
    assert len(view.troubles) == 2
    assert f"http://{NOWHERE}/metrics cannot be read" in drawn(view, 400)
    (row,) = top.compare(gone, NOW).models
    assert (row.requests_per_s, row.rejected_per_s, row.pending) == (None, None, 0), "the first reading has no rates"


def test_unreadable_addresses_are_refused_at_once() -> None:
    for wrong in (Endpoints("nohost"), Endpoints(""), Endpoints(http="http://a:1"), Endpoints(entry="a:70000")):
        with pytest.raises(SpecError, match="must be HOST:PORT"):
            top.views(wrong)
    with pytest.raises(MeasurementError, match="cannot be read"):
        top.views(Endpoints(NOWHERE))


def test_a_triton_is_not_taken_for_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "read", lambda _: Reading(NOW.triton, NOW.triton))
    with pytest.raises(MeasurementError, match="is a Triton's, not an entry's"):
        top.views(Endpoints(entry="127.0.0.1:8002"))


def test_files_and_pipes_get_every_column_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(top, "views", lambda *_: iter([top.compare(BEFORE, NOW)]))
    monkeypatch.setenv("COLUMNS", "60")
    app(["top", "--once"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "compute" in said
    assert "…" not in said


@pytest.mark.parametrize("interval", ["0", "nan", "inf", "1e300"])
def test_intervals_that_nobody_waits_for_are_refused(interval: str) -> None:
    assert CliRunner().invoke(app, ["top", "--interval", interval]).exit_code == 2


def test_the_screen_shows_each_view_in_place_of_the_last() -> None:
    def two() -> Iterator[top.View]:
        yield top.compare(BEFORE, NOW)
        yield top.compare(BEFORE, NOW)

    out = io.StringIO()
    top.show(two(), Console(file=out, force_terminal=True, width=120, height=30))

    assert out.getvalue().count("\x1b[?1049h") == out.getvalue().count("\x1b[?1049l") == 1, "the alternate screen"
    assert out.getvalue().count("realtime") == 2
