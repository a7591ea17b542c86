"""Open-loop loads on a real tritonserver: everything is counted once, nothing is hidden, and errors have their kinds."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tritonpilot import metrics
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.commands import load as command
from tritonpilot.errors import MeasurementError, ServerError
from tritonpilot.load import Target, files, http_sender, run
from tritonpilot.load.run import PROBES
from tritonpilot.machine import tree_pids
from tritonpilot.outcome import CONNECTION, NO_ANSWER, REJECTED
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

# Answers its input after as many seconds as its largest value says; -1 is an error of its request alone.
CODE = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        time.sleep(max(0.0, max(float(value.max()) for value in values)))
        return [
            pb_utils.InferenceResponse([], pb_utils.TritonError("a value of -1"))
            if value.min() == -1
            else pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)])
            for value in values
        ]
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [{name: "INPUT" data_type: TYPE_FP32 dims: [1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [1]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching { %s }
"""
QUICK = np.zeros((5, 1), np.float32)
Protocol = Literal["http", "grpc"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("load") / "model_repository"
    make_model(repository, "plain", CODE, CONFIG % "")
    make_model(repository, "short", CODE, CONFIG % "default_queue_policy { max_queue_size: 2 }")
    with EmbeddedServer(repository) as running:
        yield running
        running.check_alive()


def target(server: EmbeddedServer, protocol: Protocol) -> Target:
    return Target(server.endpoints.grpc if protocol == "grpc" else server.endpoints.http, protocol)


def send(server: EmbeddedServer, streams: list[Stream], rows: Any = QUICK, **options: Any) -> Any:
    protocol = options.pop("protocol", "http")
    model, seconds = options.pop("model", "plain"), options.pop("seconds", 1.0)
    requests = traffic(streams, seconds, seed=1)
    return run(target(server, protocol), model, {"INPUT": rows}, requests, streams, **options)


@pytest.mark.parametrize(("protocol", "processes"), [("http", 1), ("http", 2), ("grpc", 1)])
def test_every_request_is_sent_and_answered_once(server: EmbeddedServer, protocol: Protocol, processes: int) -> None:
    streams = [Stream("small", 150, slo_ms=10_000), Stream("large", 50, rows={2: 1, 8: 1}, slo_ms=1e-3)]
    due = traffic(streams, 1.0, seed=1)
    before = metrics.statistics(server.endpoints.grpc, "plain")
    outcome, facts = send(server, streams, protocol=protocol, processes=processes)
    seen = metrics.statistics(server.endpoints.grpc, "plain") - before
    assert (outcome.requests, outcome.answered, outcome.errors) == (len(due), len(due), {})
    assert outcome.rows == due.rows.sum()
    assert len(due) + 2 <= seen.success <= len(due) + 2 * PROBES  # one request of each stream goes ahead
    assert outcome.by_stream["small"].attainment == 1.0
    assert outcome.by_stream["large"].within_slo == 0
    assert sum(second.answered for second in outcome.series) == len(due)
    assert facts.processes == processes
    assert facts.most_in_flight >= 1


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_paused_server_shows_in_full(
    server: EmbeddedServer, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_s, most_new = 0.6, 40
    monkeypatch.setattr(http_sender, "MOST_NEW", most_new)

    def pause() -> None:
        time.sleep(0.4)
        pids = tree_pids(server.pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(pause_s)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=pause)
    thread.start()
    outcome, facts = send(server, [Stream("all", 200, "constant")], protocol=protocol, seconds=1.5)
    thread.join()
    if protocol == "http":
        # 120 are due within the pause; some 40 take new connections, and the others wait for the server.
        assert facts.held >= 40
        assert "no first answer" not in facts.reason
    assert outcome.answered == 300
    assert outcome.p_ms(1.0) >= 1e3 * pause_s - 10  # somebody called in its first 10 ms
    # Whoever called within the first half of the pause waited for longer than the other half.
    assert 1 - outcome.latency.share_within(1e6 * pause_s / 2) >= 0.8 * 200 * pause_s / 2 / 300


@pytest.mark.parametrize(("protocol", "kind"), [("http", "HTTP 500"), ("grpc", "INTERNAL")])
def test_a_model_that_errors_on_part_of_its_input_is_still_measured(
    server: EmbeddedServer, protocol: Protocol, kind: str
) -> None:
    rows = np.array([[-1], [0], [0], [0], [0]], np.float32)
    outcome, facts = send(server, [Stream("all", 100, "constant")], rows, protocol=protocol)
    assert outcome.errors == {kind: 20}
    assert outcome.answered == 80
    assert "a value of -1" in facts.errors[kind]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_full_queue_rejects_and_is_counted_so(server: EmbeddedServer, protocol: Protocol) -> None:
    rows = np.full((3, 1), 0.05, np.float32)
    outcome, _ = send(server, [Stream("all", 400, rows=8)], rows, model="short", protocol=protocol, seconds=0.5)
    assert set(outcome.errors) == {REJECTED}
    assert outcome.errors[REJECTED] + outcome.answered == outcome.requests
    assert outcome.answered >= 3


def test_an_answer_is_not_waited_for_for_ever(server: EmbeddedServer) -> None:
    rows = np.array([[0.0], [1.5]], np.float32)
    outcome, _ = send(server, [Stream("all", 4, "constant")], rows, seconds=0.5, patience_s=0.4)
    assert outcome.errors == {NO_ANSWER: 1}
    send(server, [Stream("all", 4, "constant")], seconds=0.5)  # the model is free again


def test_requests_wait_for_a_connection_when_there_are_few(server: EmbeddedServer) -> None:
    rows = np.full((3, 1), 0.05, np.float32)
    outcome, facts = send(server, [Stream("all", 100, "constant")], rows, seconds=0.3, connections=2)
    assert outcome.answered == 30
    assert facts.most_in_flight == 2
    assert facts.is_limit
    assert "every connection of the sender was waiting" in facts.reason
    assert outcome.p_ms(1.0) > 250  # 15 turns of 50 ms within 300 ms: it counts from the scheduled time


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_nothing_is_sent_to_what_is_not_there(server: EmbeddedServer, free_port: int, protocol: Protocol) -> None:
    stream = [Stream("all", 10)]
    with pytest.raises(ServerError, match="does not describe model other"):
        send(server, stream, model="other", protocol=protocol)
    with pytest.raises(ServerError, match="does not describe model plain"):
        run(Target(f"127.0.0.1:{free_port}", protocol), "plain", {"INPUT": QUICK}, traffic(stream, 1, seed=1), stream)
    with pytest.raises(MeasurementError, match=r"answered none of .* requests of stream all .*a value of -1"):
        send(server, stream, np.full((2, 1), -1, np.float32), protocol=protocol)


def test_the_command_tells_writes_and_merges(server: EmbeddedServer, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", INPUT=QUICK)
    (tmp_path / "two.yaml").write_text(
        "scenario: two\nmodel: plain\nsamples: rows.npz\nseconds: 0.5\nstreams:\n"
        "  - {name: a, rate_per_s: 100, arrivals: constant, slo_ms: 10000}\n"
        "  - {name: b, rate_per_s: 40, arrivals: constant, rows: 4, slo_ms: 10000}\n"
    )
    app = typer.Typer()
    app.command("load")(command.command)
    argv = [str(tmp_path / "two.yaml"), "--http", server.endpoints.http, "--series", str(tmp_path / "s.csv")]
    result = CliRunner().invoke(app, [*argv, "--histogram", str(tmp_path / "h.json"), "--json"])
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["requests"], said["answered"], said["attainment"], said["rows"]) == (70, 70, 1.0, 50 + 80)
    assert (
        said["streams"]["b"]["goodput_per_s"] == said["streams"]["b"]["throughput_per_s"] == pytest.approx(40, rel=0.5)
    )
    assert said["sender"]["processes"] == 1
    assert (tmp_path / "s.csv").read_text().splitlines()[1].startswith("0,70,")
    assert {name: each.count for name, each in files.read_histograms(tmp_path / "h.json").items()} == {
        "a": 50,
        "b": 20,
        "all": 70,
    }
    text = CliRunner().invoke(app, [*argv[:3], "--protocol", "http"]).stdout
    assert "plain over http" in text
    assert "sender: late by" in text


def test_a_server_that_dies_in_mid_load_leaves_errors_files_and_figures(
    tmp_path: Path, make_model: Callable[..., Path]
) -> None:
    make_model(tmp_path / "model_repository", "plain", CODE, CONFIG % "")
    np.savez(tmp_path / "rows.npz", INPUT=QUICK)
    (tmp_path / "one.yaml").write_text(
        "scenario: one\nmodel: plain\nsamples: rows.npz\nseconds: 1.5\n"
        "streams: [{name: a, rate_per_s: 100, arrivals: constant}]\n"
    )
    app = typer.Typer()
    app.command("load")(command.command)
    with EmbeddedServer(tmp_path / "model_repository") as server:
        argv = [str(tmp_path / "one.yaml"), "--http", server.endpoints.http, "--histogram", str(tmp_path / "h.json")]
        thread = threading.Timer(0.8, lambda: os.kill(server.pid, signal.SIGKILL))
        thread.start()
        result = CliRunner().invoke(app, [*argv, "--json"])
        thread.join()
        said = json.loads(result.stdout)
        assert said["answered"] >= 20
        assert said["errors"][CONNECTION] >= 20
        assert said["answered"] + sum(said["errors"].values()) == 150
        assert said["sender"]["errors"][CONNECTION]
        assert files.read_histograms(tmp_path / "h.json")["all"].count == said["answered"]
        assert isinstance(result.exception, ServerError)
        assert "accepts no connections any more" in str(result.exception)
        with pytest.raises(ServerError, match="SIGKILL"):
            server.check_alive()
