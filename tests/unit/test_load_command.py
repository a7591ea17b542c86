"""Scenario files, the files that a load leaves, and what the command refuses before anything is sent."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from tritonpilot import perf_analyzer_binary
from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.commands import load
from tritonpilot.errors import HostError, MeasurementError, SpecError
from tritonpilot.histogram import Histogram
from tritonpilot.load import files, http_sender, job, scenario
from tritonpilot.load.target import Signature, Target, bodies
from tritonpilot.outcome import REJECTED, TIMED_OUT, Second
from tritonpilot.spec import Service

app = typer.Typer()
app.command("load", epilog=load.EPILOG)(load.command)

SCENARIO = """
scenario: evening
service: ctr
seconds: 30
streams:
  - {name: app, caller_class: realtime, rate_per_s: 400, rows: {1: 8, 4: 2}}
  - {name: night, caller_class: batch, arrivals: burst, rate_per_s: 5, peak_per_s: 50, every_s: 10, for_s: 2, rows: 64}
  - {name: old, arrivals: recorded, recording: arrivals.csv, slo_ms: 70}
"""
SERVICE = Service.model_validate(
    {
        "service": "ctr",
        "model": {"file": "m.onnx"},
        "slo": {"p99_ms": 200},
        "batching": {"max_batch_size": 8},
        "classes": [{"name": "realtime", "priority": 1}, {"name": "batch", "priority": 2}],
    }
)


def written(folder: Path, text: str = SCENARIO) -> Path:
    path = folder / "evening.yaml"
    path.write_text(text)
    return path


def call(*argv: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in argv])


def test_a_scenario_takes_priorities_and_promises_from_the_service(tmp_path: Path) -> None:
    found = scenario.streams(scenario.read(written(tmp_path)), SERVICE)
    app, night, old = found
    assert (app.priority, app.slo_ms, app.caller_class, app.rows) == (1, 200, "realtime", {1: 8, 4: 2})
    assert (night.priority, night.slo_ms, night.peak_per_s) == (2, math.inf, 50)
    assert (old.priority, old.slo_ms, old.recording) == (0, 70, tmp_path / "arrivals.csv")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("seconds: 30", "seconds: 0"), "evening.yaml:4: seconds"),
        (("rate_per_s: 400", "rate_per_sec: 400"), "did you mean rate_per_s"),
        (("name: night", "name: app"), "two streams are named app"),
        (("service: ctr", "model: ctr"), "`model` and `samples` belong together"),
        (("service: ctr", "service: ctr\nmodel: x"), "not both"),
        (("{1: 8, 4: 2}", "{0: 8}"), "rows"),
        (("400", "'400'"), "evening.yaml:6"),
        (("name: night", "name: all"), "must not be named all"),
        (
            ("seconds: 30", "seconds: 30\nheaders: {x key: a}"),
            r"evening.yaml:5: headers: 'x key' is no name of a header",
        ),
        (("seconds: 30", "seconds: 30\nheaders: {X-Key: a, x-key: b}"), "a header is given twice"),
    ],
)
def test_a_wrong_scenario_is_refused_with_its_line(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        scenario.read(written(tmp_path, SCENARIO.replace(*change)))


def test_headers_are_in_lower_case_as_grpc_takes_them(tmp_path: Path) -> None:
    text = SCENARIO.replace("seconds: 30", "seconds: 30\nheaders: {X-Key: ' abc '}")
    assert scenario.read(written(tmp_path, text)).headers == {"x-key": "abc"}
    assert load._headers(["X-Key: a:b", "other:"]) == {"x-key": "a:b", "other": ""}


def test_an_unknown_class_is_refused(tmp_path: Path) -> None:
    found = scenario.read(written(tmp_path, SCENARIO.replace("realtime", "realtme")))
    with pytest.raises(SpecError, match="no class realtme; did you mean realtime"):
        scenario.streams(found, SERVICE)


def test_histograms_of_two_files_add_up_stream_by_stream(tmp_path: Path) -> None:
    one, two = Histogram(), Histogram()
    one.record([1000.0])
    two.record([3000.0, 5000.0])
    files.write_histograms(tmp_path / "a.json", {"app": one, "all": one})
    files.write_histograms(tmp_path / "b.json", {"night": two, "all": two})
    result = call("--merge", tmp_path / "a.json", tmp_path / "b.json", "--json", "--histogram", tmp_path / "c.json")
    said = json.loads(result.stdout)
    assert list(said) == ["app", "night", "all"]
    assert (said["all"]["answered"], said["all"]["max_ms"], said["app"]["p50_ms"]) == (3, 5.0, 1.0)
    assert files.read_histograms(tmp_path / "c.json")["all"].count == 3


@pytest.mark.parametrize("text", ["", "[]", '{"histograms": {"a": {}}}', '{"histograms": 1}', "\xff"])
def test_what_is_no_histogram_file_is_not_merged(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    assert isinstance(call("--merge", tmp_path / "a.json").exception, SpecError)
    assert isinstance(call("--merge", tmp_path / "none.json").exception, SpecError)


def test_a_series_is_a_line_per_second(tmp_path: Path) -> None:
    files.write_series(tmp_path / "s.csv", [Second(0, 5, 4, 1, 3, 2.5)])
    lines = (tmp_path / "s.csv").read_text().splitlines()
    assert lines == ["at_s,offered,answered,errors,within_slo,p99_ms", "0,5,4,1,3,2.5"]
    assert [path.name for path in tmp_path.iterdir()] == ["s.csv"]


@pytest.mark.parametrize("option", ["--histogram", "--series"])
def test_a_file_that_cannot_be_written_is_refused_before_the_load(tmp_path: Path, option: str) -> None:
    for path in (tmp_path / "none" / "x", tmp_path):
        error = call("ctr", "--rate", 10, option, path).exception
        assert isinstance(error, HostError)
        assert "Nothing was sent" in str(error)
    for path, words in (("/dev/null", "no ordinary file"), ("/proc/x", "nothing may be written into /proc")):
        error = call("ctr", "--rate", 10, option, path).exception
        assert isinstance(error, HostError)
        assert words in str(error)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["ctr"], "a service needs --rate"),
        (["ctr", "--rate", "0"], "no list of positive numbers"),
        (["ctr", "--rate", "5,10"], "one rate at a time"),
        (["ctr", "--concurrency", "4"], "a closed loop is --tool perf_analyzer"),
        (["ctr", "--rate", "5", "--rows", "0"], "no number of rows"),
        (["ctr", "--rate", "5", "--rows", "1:0"], "no number of rows"),
        (["ctr", "--rate", "5", "--header", "key"], "no NAME:VALUE"),
        (["ctr", "--rate", "5", "--header", "x key:a"], "is no name of a header"),
        (["ctr", "--rate", "5", "--header", "x-key:\N{EURO SIGN}"], "must be printable ASCII"),
        (["ctr", "--rate", "5", "--header", "x-key:a\r\nb:c"], "must be printable ASCII"),
        (["ctr", "--rate", "5", "--header", "Content-Length:5"], "is the protocol's own"),
        (["ctr", "--rate", "5", "--header", "a:1", "--header", "A:2"], "a is given twice"),
        (["ctr", "--rate", "1e8"], "--rate: Input should be less than or equal to 10000000"),
        (["ctr", "--rate", "nan"], "no list of positive numbers"),
        (["ctr", "--rate", "5", "--rows", "3000000000"], "--rows: Input should be less than or equal to 2147483647"),
        (["ctr", "--rate", "5", "--slo-ms", "inf"], "--slo-ms: Input should be a finite number"),
        (["ctr", "--rate", "5", "--seconds", "nan"], "Invalid value for '--seconds'"),
        (["ctr", "--rate", "5", "--class", "a b"], "--class: String should match pattern"),
        (["ctr", "--rate", "5", "--histogram", "x", "--series", "./x"], "the same file is named twice"),
        (["ctr", "--rate", "5", "--http", "h:1", "--server-cpus", "0"], "--server-cpus: a server that runs already"),
        (["evening.yaml", "--rate", "5"], "says rate"),
        (["evening.yaml", "--seconds", "10", "--arrivals", "constant"], "--arrivals, --seconds: a scenario file says"),
        (["evening.yaml", "--rows", "1"], "--rows: a scenario file says"),
        *(
            (
                ["ctr", "--tool", "perf_analyzer", "--rate", "5", option, value],
                f"{option}: perf_analyzer is called without",
            )
            for option, value in {
                "--seconds": "1",
                "--slo-ms": "5",
                "--seed": "1",
                "--processes": "3",
                "--histogram": "x",
                "--series": "x",
                "--header": "a:b",
            }.items()
        ),
        (
            ["ctr", "--tool", "perf_analyzer", "--concurrency", "4", "--arrivals", "poisson"],
            "--arrivals: perf_analyzer",
        ),
        (["--merge", "a.json", "--seed", "1", "--series", "x"], "--seed, --series: --merge adds up files"),
        (["evening.yaml", "--tool", "perf_analyzer"], "one stream"),
        (["a.yaml", "b.yaml"], "several files need --merge"),
    ],
)
def test_options_that_contradict_each_other_are_a_usage_error(argv: list[str], words: str) -> None:
    result = call(*argv)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", " ").split())


def test_a_request_asks_for_its_class_its_level_and_its_time_in_the_queue() -> None:
    stream = Stream("app", 1, caller_class="realtime", priority=2, timeout_ms=1.5)
    traffic = Traffic(np.zeros(3), np.array([1, 2, 1], np.int32), np.zeros(3, np.int16), 1.0)
    signature = Signature("m", {"x": "FP32", "t": "BYTES"}, frozenset(), 8)
    rows = {"x": np.arange(4, dtype=np.float32).reshape(4, 1), "t": np.array(["a", "b", "c", "d"]), "else": np.zeros(4)}
    found = bodies(Target("h:1", "http", {"k": "v"}), signature, rows, [stream], traffic)
    first, second, third = (found.content[place] for place in found.place)
    head, _, body = second.partition(b"\r\n\r\n")
    assert b"POST /v2/models/m/infer HTTP/1.1\r\n" in head
    assert b"\r\nk: v\r\ntritonpilot-class: realtime" in head
    length = int(head.lower().partition(b"inference-header-content-length: ")[2].partition(b"\r\n")[0])
    said = json.loads(body[:length])
    assert said["parameters"] == {"binary_data_output": True, "priority": 2, "timeout": 1500}
    assert [(each["name"], each["shape"], each["datatype"]) for each in said["inputs"]] == [
        ("x", [2, 1], "FP32"),
        ("t", [2], "BYTES"),
    ]
    assert body[length:] == np.array([0, 1], np.float32).tobytes() + b"\1\0\0\0a\1\0\0\0b"
    assert first.endswith(b"\1\0\0\0a")
    assert third.endswith(b"\1\0\0\0b")  # the next of its size


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        (Signature("m", {"y": "FP32"}, frozenset(), 8), "takes an input y, which the samples lack"),
        (Signature("m", {"x": "FP32"}, frozenset(), 1), "takes at most 1"),
        (Signature("m", {"x": "FP32"}, frozenset(), 0), "takes at most 1"),
    ],
)
def test_samples_and_sizes_that_do_not_fit_the_model_are_refused(signature: Signature, words: str) -> None:
    traffic = Traffic(np.zeros(1), np.array([2], np.int32), np.zeros(1, np.int16), 1.0)
    with pytest.raises(MeasurementError, match=words):
        bodies(Target("h:1"), signature, {"x": np.zeros((4, 1), np.float32)}, [Stream("app", 1)], traffic)


@pytest.mark.parametrize("url", ["", "host", "host:", "host:0", "host:99999", "http://host:80", ":80"])
def test_an_address_is_host_and_port(url: str) -> None:
    with pytest.raises(MeasurementError, match="no address"):
        _ = Target(url).address


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[request id: 1] Exceeds maximum queue size", REJECTED),
        ("Request timeout expired", TIMED_OUT),
        ("a value of -1", "HTTP 500"),
    ],
)
def test_the_queues_refusals_have_names_of_their_own(text: str, kind: str) -> None:
    assert job.kind_of("HTTP 500", text) == kind


WHOLE = b"HTTP/1.1 200 OK\r\nX-Content-Length: 9\r\ncontent-length: 4\r\n\r\nbody"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"


@pytest.mark.parametrize("answer", [WHOLE, CHUNKS, b"HTTP/1.1 204 No Content\r\n\r\n"])
def test_an_answer_ends_where_its_head_says(answer: bytes) -> None:
    assert http_sender._end(answer + b"HTTP/1.1") == len(answer)
    assert [http_sender._end(answer[:size]) for size in range(len(answer))] == [-1] * len(answer)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP re: junk\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 16),
    ],
)
def test_what_is_no_http_is_no_answer(answer: bytes) -> None:
    with pytest.raises(ValueError, match="server"):
        http_sender._end(answer)


def options_of(folder: Path) -> list[object]:
    """A service whose server is nowhere."""
    service = folder / "models" / "ctr"
    service.mkdir(parents=True)
    (service / "service.yaml").write_text(
        "service: ctr\nmodel: {file: m.onnx, samples: s.npz}\nbatching: {max_batch_size: 8}\n"
    )
    np.savez(service / "s.npz", x=np.zeros((2, 1), np.float32))
    return ["ctr", "--models", folder / "models", "--http", "127.0.0.1:1"]


def test_options_that_make_too_large_a_load_name_no_file(tmp_path: Path) -> None:
    argv = options_of(tmp_path)
    huge = call(*argv, "--rate", "1e7", "--seconds", 86400).exception
    assert isinstance(huge, SpecError)
    assert "would be 864,000,000,000 requests" in str(huge)
    unknown = call(*argv, "--rate", 5, "--class", "realtime").exception
    assert isinstance(unknown, SpecError)
    assert str(unknown).startswith("service ctr has no class realtime (it has none)")
    assert isinstance(call(*argv, "--rate", 5, "--cpus", 99999).exception, HostError)


def test_without_perf_analyzer_a_rate_is_sent_by_our_own_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(perf_analyzer_binary.ENV, str(tmp_path / "none"))
    perf_analyzer_binary.find.cache_clear()
    argv = [*options_of(tmp_path), "--tool", "perf_analyzer", "--grpc", "127.0.0.1:1"]
    try:
        result = call(*argv, "--protocol", "http", "--rate", 5)
        assert not isinstance(result.exception, HostError)
        assert "sent by tritonpilot's own sender instead" in result.stderr
        assert isinstance(call(*argv, "--concurrency", 4).exception, HostError)
    finally:
        perf_analyzer_binary.find.cache_clear()
