from __future__ import annotations

import functools
import http.server
import math
import os
import socketserver
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tritonpilot import metrics
from tritonpilot.errors import MeasurementError
from tritonpilot.metrics import Sample, Statistics, parse

CAPTURED = Path(__file__).parent / "captured"
BEFORE = Statistics(10, 1, 20, 5, 0, 10_000_000, 5_000_000, 1_000_000, 2_000_000, 500_000)


def test_real_metrics_of_triton_parse() -> None:
    samples = parse((CAPTURED / "metrics.txt").read_text())
    assert metrics.value(samples, "nv_inference_count", model="toy") == 4021
    assert metrics.failures(samples, "toy") == {"BACKEND": 0, "CANCELED": 0, "OTHER": 0, "REJECTED": 0}
    assert metrics.pending(samples, "toy") == 0
    assert metrics.value(samples, "nv_inference_count", model="absent") == 0


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("up 1", Sample("up", {}, 1)),
        ("a:b_c{} 1.5e3", Sample("a:b_c", {}, 1500)),
        ('x{a="1",b="2",} 3 1700000000000', Sample("x", {"a": "1", "b": "2"}, 3)),
        (r'x{path="C:\\dir",say="a \"b\"\n,c}"} +Inf', Sample("x", {"path": r"C:\dir", "say": 'a "b"\n,c}'}, math.inf)),
        ("x -4", Sample("x", {}, -4)),
        ("x .5", Sample("x", {}, 0.5)),
    ],
)
def test_sample_lines(line: str, sample: Sample) -> None:
    assert parse(f"# HELP x what\n\n{line}\n") == (sample,)


def test_not_a_number_parses() -> None:
    assert math.isnan(parse('q{quantile="0.5"} NaN')[0].value)


@pytest.mark.parametrize("line", ["<html>", "x", "x{a=1} b", 'x{a="1" 2'])
def test_other_text_is_refused(line: str) -> None:
    with pytest.raises(MeasurementError, match="no Prometheus sample"):
        parse(line)


def test_difference_gives_means_per_request_and_per_execution() -> None:
    delta = (
        replace(BEFORE, success=14, inferences=44, executions=9, queue_ns=9_000_000, compute_infer_ns=4_000_000)
        - BEFORE
    )
    assert delta.mean_batch == 6
    assert delta.queue_us == 1000
    assert delta.compute_us == 500
    assert delta.request_us == 0


def test_idle_model_has_no_means() -> None:
    idle = BEFORE - BEFORE
    assert math.isnan(idle.mean_batch)
    assert math.isnan(idle.queue_us)


def test_counters_that_ran_backwards_are_not_reported() -> None:
    with pytest.raises(MeasurementError, match="reloaded or the server restarted"):
        BEFORE - replace(BEFORE, success=11)


def test_a_proxy_is_not_asked_for_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("nv_energy_consumption 1\n")
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    asked = "from tritonpilot import metrics; import sys; print(metrics.scrape(sys.argv[1])[0].value)"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            done = subprocess.run(
                [sys.executable, "-c", asked, f"127.0.0.1:{server.server_port}"],
                env={**os.environ, "http_proxy": "http://127.0.0.1:1", "no_proxy": ""},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            server.shutdown()
            thread.join()
    assert done.stdout == "1.0\n", done.stderr


def test_unreachable_metrics_name_the_address() -> None:
    with pytest.raises(MeasurementError, match="http://127.0.0.1:1/metrics"):
        metrics.scrape("127.0.0.1:1")


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nnv_inf",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_another_protocol_at_the_port_is_said(said: bytes) -> None:
    class Other(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1000)
            self.request.sendall(said)

    with socketserver.TCPServer(("127.0.0.1", 0), Other) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        try:
            with pytest.raises(MeasurementError, match="no HTTP server with metrics"):
                metrics.scrape(f"127.0.0.1:{server.server_address[1]}")
        finally:
            thread.join()


def test_a_host_that_can_be_none_is_said() -> None:
    with pytest.raises(MeasurementError, match="no figures"):
        metrics.scrape("nowhere at all:1")
