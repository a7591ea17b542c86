"""`tritonpilot top` and `tritonpilot report` against a real Triton, a real entry and a real Prometheus that scraped both."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from programs import program
from typer.testing import CliRunner

from tritonpilot import top
from tritonpilot.cli import app
from tritonpilot.client import Client
from tritonpilot.errors import MeasurementError
from tritonpilot.report import Source
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

COMMAND = str(Path(sys.executable).with_name("tritonpilot"))
PATIENCE_S = 30.0
CONFIG = """
backend: "python"
max_batch_size: 4
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU count: 2}]
dynamic_batching { priority_levels: 2 default_priority_level: 1 }
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
parameters { key: "pilot_slos_ms" value { string_value: "realtime:2000" } }
"""

# Ten minutes of history, three hours ago: what grows by how much per second, and what stays.
MINUTES = 10
ENTRY, MODEL = 'model="past",class="realtime"', 'model="past",version="1"'
GROWING = {
    f"nv_inference_request_success{{{MODEL}}}": 10,
    f"nv_inference_count{{{MODEL}}}": 40,
    f"nv_inference_exec_count{{{MODEL}}}": 5,
    f"nv_inference_queue_duration_us{{{MODEL}}}": 20_000,
    f"nv_inference_compute_input_duration_us{{{MODEL}}}": 1_000,
    f"nv_inference_compute_infer_duration_us{{{MODEL}}}": 30_000,
    f"nv_inference_compute_output_duration_us{{{MODEL}}}": 1_000,
    f'nv_inference_request_failure{{{MODEL},reason="REJECTED"}}': 0.5,
    f'nv_inference_request_failure{{{MODEL},reason="BACKEND"}}': 0.1,
    f'nv_inference_request_failure{{{MODEL},reason="CANCELED"}}': 3,
    f"pilot_wakes_total{{{MODEL}}}": 0.2,
    f'processed_requests_total{{{ENTRY},status="ok",tenant="shop"}}': 9,
    f'processed_requests_total{{{ENTRY},status="refused_rate",tenant="shop"}}': 0.4,
    f'processed_requests_total{{{ENTRY},status="rejected",tenant="shop"}}': 0.1,
    f'processed_requests_total{{{ENTRY},status="timeout",tenant="shop"}}': 0.3,
    f'processed_requests_total{{{ENTRY},status="unavailable",tenant="shop"}}': 0.2,
    f"slow_requests_total{{{ENTRY}}}": 0.09,
    f'inference_latency_seconds_bucket{{{ENTRY},le="0.01"}}': 4.5,
    f'inference_latency_seconds_bucket{{{ENTRY},le="0.05"}}': 8.91,
    f'inference_latency_seconds_bucket{{{ENTRY},le="0.1"}}': 9,
    f'inference_latency_seconds_bucket{{{ENTRY},le="+Inf"}}': 9,
    'nv_inference_request_success{model="other",version="1"}': 1,
}
STEADY = {
    f"slo_seconds{{{ENTRY}}}": 0.05,
    f"request_queue_size{{{ENTRY}}}": 4,
    f"nv_inference_pending_request_count{{{MODEL}}}": 7,
    f'nv_inference_request_summary_us{{{MODEL},quantile="0.5"}}': 4_000,
    f'pilot_stub_memory_bytes{{{MODEL},stub="past_0_0"}}': 30e6,
    f'pilot_stub_memory_bytes{{{MODEL},stub="past_0_1"}}': 20e6,
    f"model_probe_success{{{MODEL}}}": 1,
    'nv_gpu_utilization{gpu_uuid="GPU-1"}': 0.5,
    'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"}': 3e9,
    'up{job="triton",instance="triton:8002"}': 1,
}


@dataclass(frozen=True)
class Site:
    """Everything runs."""

    server: EmbeddedServer
    entry: dict[str, str]
    prometheus: str
    history: tuple[datetime, datetime]

    @property
    def endpoints(self) -> top.Endpoints:
        return top.Endpoints(self.server.endpoints.metrics, self.server.endpoints.http, self.entry["metrics"])

    @property
    def options(self) -> tuple[str, ...]:
        watched = self.endpoints
        return ("--metrics", watched.metrics, "--http", watched.http, "--entry", watched.entry)

    def call(self, times: int) -> None:
        with Client(self.entry["http"]) as client:
            for _ in range(times):
                client.predict("classes", {"INPUT": np.zeros((1, 2), np.float32)}, caller_class="realtime")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Iterator[Site]:
    """Triton with a model, the entry in front of it, and a Prometheus that scrapes both and remembers the history."""
    prometheus, promtool = program("prometheus"), program("promtool")
    folder = tmp_path_factory.mktemp("site")
    make_model(folder / "model_repository", "classes", config=CONFIG)
    end = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(hours=3)
    history = (end - timedelta(minutes=MINUTES), end)
    write_history(folder / "history.txt", history[0].timestamp())
    subprocess.run(
        [promtool, "tsdb", "create-blocks-from", "openmetrics", folder / "history.txt", folder / "data"],
        check=True, capture_output=True,
    )  # fmt: skip
    with EmbeddedServer(folder / "model_repository") as server:
        served = ("--triton-http", server.endpoints.http, "--triton-grpc", server.endpoints.grpc)
        free = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        with subprocess.Popen([COMMAND, "entry", "--json", *free, *served], stdout=subprocess.PIPE, text=True) as entry:
            try:
                assert entry.stdout is not None
                endpoints = json.loads(entry.stdout.readline())["endpoints"]
                jobs = {"triton": server.endpoints.metrics, "entry": endpoints["metrics"]}
                with running_prometheus(prometheus, folder, jobs) as address:
                    yield Site(server, endpoints, address, history)
            finally:
                entry.terminate()


def write_history(path: Path, begin_s: float) -> None:
    times = range(0, MINUTES * 60 + 1, 5)
    lines = [f"{name} {rate * at} {begin_s + at}" for name, rate in GROWING.items() for at in times]
    lines += [f"{name} {value} {begin_s + at}" for name, value in STEADY.items() for at in times]
    p99 = f'nv_inference_request_summary_us{{{MODEL},quantile="0.99"}}'
    lines += [f"{p99} {'NaN' if at < 60 else 90_000 if at == 300 else 20_000} {begin_s + at}" for at in times]
    alert = 'ALERTS{alertname="SloBurns",alertstate="firing",model="past",class="realtime"}'
    lines += [f"{alert} 1 {begin_s + at}" for at in times if at >= MINUTES * 60 - 60]
    path.write_text("\n".join([*lines, "# EOF\n"]))


class running_prometheus:  # noqa: N801
    """`with running_prometheus(...) as address`: a Prometheus on a free port, ready."""

    def __init__(self, binary: Path, folder: Path, jobs: dict[str, str]) -> None:
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in jobs.items()
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{one.getsockname()[1]}"
        self.log = (folder / "prometheus.log").open("w")
        self.process = subprocess.Popen(
            [binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
             f"--web.listen-address={self.address}"],
            stdout=self.log, stderr=self.log,
        )  # fmt: skip

    def __enter__(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                urllib.request.urlopen(f"http://{self.address}/-/ready", timeout=5).close()
            except (OSError, urllib.error.URLError):
                assert time.monotonic() < deadline, Path(self.log.name).read_text()
                assert self.process.poll() is None, Path(self.log.name).read_text()
                time.sleep(0.1)
            else:
                return self.address

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=PATIENCE_S)
        self.log.close()


def ask(*arguments: str) -> str:
    """What the command prints; in this process, which saves its start."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_top_counts_the_requests_between_two_readings(site: Site) -> None:
    site.call(1)  # the entry knows a model from its first request on
    views = top.views(site.endpoints, 0.2)
    site.call(20)
    answered, through = 0, 0
    deadline = time.monotonic() + PATIENCE_S
    while (answered, through) != (20, 20) and time.monotonic() < deadline:  # Triton counts after it has answered
        view = next(views)
        (model,), seconds = view.models, view.seconds or 0
        realtime = next(row for row in view.classes if row.class_name == "realtime")
        answered += round((model.requests_per_s or 0) * seconds)
        through += round((realtime.ok_per_s or 0) * seconds)
        if answered and model.mean_batch is not None:
            assert model.mean_batch == 1
            assert 0 < (model.p50_ms or 0) <= (model.p99_ms or 0)
    assert (answered, through) == (20, 20)
    assert view.server == "triton 2.51.0"
    assert (model.model, model.version, model.instances) == ("classes", "1", 2)
    assert realtime.slo_ms == 2000


def test_top_once_as_json_and_as_text(site: Site) -> None:
    said = json.loads(ask("top", "--once", "--json", "--interval", "0.2", *site.options))
    assert said["models"][0]["instances"] == 2
    text = ask("top", "--once", "--interval", "0.2", *site.options)
    assert "triton 2.51.0, over 0." in text
    assert "realtime" in text


def test_top_takes_the_terminal_and_gives_it_back(site: Site) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [COMMAND, "top", "--interval", "0.2", *site.options], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        seen = b""
        while b"pending" not in seen:
            seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # so a terminal ends
            pass
        assert process.wait(timeout=15) == 130
    os.close(ours)
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
    assert b"Traceback" not in seen


def test_the_command_says_what_is_not_there() -> None:
    for command in ("top --once --metrics 127.0.0.1:1", "report --prometheus 127.0.0.1:1"):
        failed = CliRunner().invoke(app, command.split()).exception
        assert isinstance(failed, MeasurementError), command
        assert "127.0.0.1:1" in str(failed)


def test_what_is_not_triton_is_named(site: Site) -> None:
    with pytest.raises(MeasurementError, match="is not Triton's"):
        top.views(top.Endpoints(site.prometheus))
    with pytest.raises(MeasurementError, match=r"cannot be read|no HTTP server"):
        top.views(top.Endpoints(site.server.endpoints.grpc))
    assert (
        "does not describe its models" in top.read(top.Endpoints(site.endpoints.metrics, site.prometheus)).troubles[0]
    )
    with pytest.raises(MeasurementError, match="did not answer"):
        Source(site.server.endpoints.http).now_s()


def test_the_report_of_a_known_history_is_exact(site: Site) -> None:
    report = Source(site.prometheus).report(*site.history)

    assert report.covered_share == 1
    (realtime,) = report.sections["classes"]
    assert realtime == pytest.approx(
        {"model": "past", "class": "realtime", "requests": 6000, "ok": 5400, "refused": 300, "timeouts": 180,
         "failed": 120, "peak_ok_per_s": 9, "p50_ms": 10, "p99_ms": 50, "slo_ms": 50, "within_slo_pct": 89.1,
         "peak_queue_size": 4}
    )  # fmt: skip
    other, past = report.sections["models"]
    assert past == pytest.approx(
        {"model": "past", "requests": 6000, "rows": 24000, "peak_requests_per_s": 10, "mean_batch": 8, "queue_ms": 2,
         "compute_ms": 3.2, "usual_p50_ms": 4, "worst_p99_ms": 90, "rejected": 180, "failed": 60, "peak_pending": 7,
         "cache_hit_pct": None, "probes_ok_pct": 100, "stub_memory_mb": 50}
    )  # fmt: skip
    assert (other["model"], other["requests"], other["mean_batch"]) == ("other", pytest.approx(600), None)
    assert report.sections["tenants"] == ({"tenant": "shop", "requests": pytest.approx(6000), "ok": pytest.approx(5400),
                                           "refused": pytest.approx(300)},)  # fmt: skip
    assert report.sections["gpus"] == ({"gpu_uuid": "GPU-1", "utilization_pct": 50, "peak_memory_gb": 3},)
    assert report.sections["targets"] == ({"job": "triton", "instance": "triton:8002", "up_pct": 100},)
    (alert,) = report.sections["alerts"]
    assert (alert["alertname"], alert["model"], alert["class"]) == ("SloBurns", "past", "realtime")
    assert 60 <= alert["firing_s"] <= 65  # type: ignore[operator]


def test_a_range_with_gaps_and_an_unknown_model_are_told(site: Site) -> None:
    source, (start, end) = Source(site.prometheus), site.history
    assert 0.4 < source.report(start - (end - start), end).covered_share < 0.6
    only = source.report(start, end, model="other")
    assert [row["model"] for rows in only.sections.values() for row in rows] == ["other"]
    assert {name for curve in source.series(only) for name in curve.lines} == {"other", "GPU-1"}
    with pytest.raises(MeasurementError, match=r"no figure of a model 'absent'.*knows other, past"):
        source.report(start, end, model="absent")
    with pytest.raises(MeasurementError, match="no figure of a Triton or an entry"):
        source.report(start - timedelta(days=2), start - timedelta(days=1))


def test_the_report_of_the_last_seconds_is_of_the_real_triton(site: Site, tmp_path: Path) -> None:
    source = Source(site.prometheus)
    deadline = time.monotonic() + PATIENCE_S
    counted = dict.fromkeys(("models", "classes"), 0.0)
    worst_p99_ms = None  # Prometheus looks back in whole steps, so it comes later than the counts
    while not (all(counted.values()) and worst_p99_ms):
        assert time.monotonic() < deadline, (counted, worst_p99_ms)
        site.call(5)
        with contextlib.suppress(MeasurementError):  # nothing was scraped yet
            found = source.report(*source.range(last="5m"), model="classes")
            counted = {name: sum(row["requests"] or 0 for row in found.sections[name]) for name in counted}  # type: ignore[misc]
            worst_p99_ms = max((row["worst_p99_ms"] or 0 for row in found.sections["models"]), default=None)
        time.sleep(0.5)
    page = tmp_path / "report.html"
    said = json.loads(ask("report", "--prometheus", site.prometheus, "--last", "5m", "--json", "--html", str(page)))
    assert said["classes"][-1]["class"] == "realtime"
    assert said["classes"][-1]["within_slo_pct"] == pytest.approx(100)
    assert said["models"][0]["worst_p99_ms"] > 0
    assert {row["job"] for row in said["targets"]} == {"triton", "entry"}
    assert said["covered_share"] < 0.9
    assert "Answered by model" in page.read_text()
    text = ask("report", "--prometheus", site.prometheus, "--last", "5m")
    assert "of this range alone" in text
    assert "What Prometheus scraped" in text
