from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tritonpilot import perf_analyzer, perf_analyzer_binary
from tritonpilot.errors import HostError, MeasurementError
from tritonpilot.perf_analyzer import Load, parse, read_profile, run, write_input_data

CAPTURED = Path(__file__).parent / "captured"  # real output of perf_analyzer 2.51 against a toy model


def captured(name: str) -> str:
    return (CAPTURED / name).read_text(encoding="utf-8")


def parsed(name: str, stability_pct: float = 10) -> perf_analyzer.Reading:
    return parse(captured(f"perf_analyzer_{name}.csv"), captured(f"perf_analyzer_{name}.txt"), stability_pct)


@pytest.fixture
def fake_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A script in place of perf_analyzer; tests/integration runs the real one."""
    script = tmp_path / "perf_analyzer"
    script.write_text("#!/bin/sh\necho Perf Analyzer Version 9.9\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv(perf_analyzer_binary.ENV, str(script))
    perf_analyzer_binary.find.cache_clear()
    yield script
    perf_analyzer_binary.find.cache_clear()


def test_report_and_output_become_a_reading() -> None:
    reading = parsed("stable")
    assert reading.throughput_infer_s == 1031.19
    assert (reading.p50_us, reading.p90_us, reading.p95_us, reading.p99_us) == (3745, 4400, 4702, 6411)
    assert reading.avg_us == 3740
    assert (reading.request_count, reading.inference_count, reading.execution_count) == (1866, 1866, 830)
    assert reading.compute_us == 43 + 1615 + 338
    assert [window.latency_us for window in reading.windows] == [4304, 3633, 3393]


def test_average_is_the_sum_of_the_parts_when_a_percentile_was_asked_for() -> None:
    reading = parsed("percentile")
    assert reading.avg_us == pytest.approx(2535, rel=0.01)  # "Avg gRPC time" of the same output
    assert reading.p99_us == 5716


def test_stability_is_the_ratio_of_the_last_three_windows() -> None:
    assert parsed("stable").spread_pct == pytest.approx(100 * (4304 / 3393 - 1))
    assert not parsed("stable", stability_pct=20).is_stable
    assert parsed("stable", stability_pct=30).is_stable


def test_one_window_is_never_called_stable() -> None:
    output = captured("perf_analyzer_stable.txt").replace("Pass [2]", "").replace("Pass [3]", "")
    assert not parse(captured("perf_analyzer_stable.csv"), output, 100).is_stable


def test_report_without_a_column_names_it() -> None:
    report = captured("perf_analyzer_stable.csv").replace("p99 latency", "p98 latency")
    with pytest.raises(MeasurementError, match="p99 latency"):
        parse(report, "", 10)


def test_report_without_a_row_is_no_measurement() -> None:
    header = captured("perf_analyzer_stable.csv").splitlines()[0]
    with pytest.raises(MeasurementError, match="0 measurements"):
        parse(header, "", 10)


@pytest.mark.parametrize(
    ("name", "code", "said", "todo"),
    [
        ("unknown_model", 99, "does not serve this model", "load it"),
        ("no_server", 99, "No server answered", "tritonpilot serve"),
        ("failed_requests", 99, "Requests failed", "bad input array"),
        ("unstable", 2, "did not settle", "Quieten the machine"),
    ],
)
def test_failure_says_what_happened_and_what_to_do(
    fake_binary: Path, name: str, code: int, said: str, todo: str
) -> None:
    fake_binary.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo Perf Analyzer Version 9.9 && exit 0\n'
        f"cat {CAPTURED / f'perf_analyzer_{name}.txt'}\nexit {code}\n"
    )
    with pytest.raises(MeasurementError, match=said) as error:
        run(Load("toy", "127.0.0.1:1", concurrency=1))
    assert todo in str(error.value)
    assert "no figure" in str(error.value)


def test_run_without_a_report_is_an_error_even_with_exit_code_0(fake_binary: Path) -> None:  # noqa: ARG001
    with pytest.raises(MeasurementError, match="gave up"):
        run(Load("toy", "127.0.0.1:1", concurrency=1))


def test_timeout_ends_the_child(fake_binary: Path, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    fake_binary.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo Perf Analyzer Version 9.9 && exit 0\n'
        f"echo $$ > {pid_file}\necho working\nexec sleep 60\n"
    )
    with pytest.raises(MeasurementError, match=r"within 0\.3 s.*working"):
        run(Load("toy", "127.0.0.1:1", concurrency=1), timeout_s=0.3)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_argv_of_a_closed_loop() -> None:
    load = Load("ctr", "h:1", batch=64, concurrency=4, parameters={"priority": 2, "tag": "x", "flag": True})
    argv = load.argv(Path("pa"), Path("r.csv"))
    text = " ".join(argv)
    assert "-m ctr -u h:1 -i grpc -b 64 -f r.csv" in text
    assert "--concurrency-range 4" in text
    assert "--request-parameter priority:2:int" in text
    assert "--request-parameter tag:x:string" in text
    assert "--request-parameter flag:true:bool" in text
    assert "--stability-percentage 10" in text


def test_argv_of_an_open_loop_that_reports_in_any_case() -> None:
    load = Load("ctr", "h:1", protocol="http", request_rate_per_s=150.5, accepts_unstable=True, shared_memory="system")
    text = " ".join(load.argv(Path("pa"), Path("r.csv")))
    assert "--request-rate-range 150.5 --request-distribution poisson" in text
    assert "--stability-percentage 1e+09" in text
    assert "--shared-memory system" in text


def test_argv_counts_requests_when_asked_to() -> None:
    load = Load("ctr", "h:1", concurrency=1, count_window=500)
    assert "--measurement-mode count_windows --measurement-request-count 500" in " ".join(load.argv(Path("p"), Path()))


@pytest.mark.parametrize("wrong", [{}, {"concurrency": 1, "request_rate_per_s": 5.0}])
def test_load_is_either_closed_or_open(wrong: dict[str, float]) -> None:
    with pytest.raises(MeasurementError, match="Give one of them"):
        Load("ctr", "h:1", **wrong)  # type: ignore[arg-type]


def test_request_parameters_need_grpc() -> None:
    with pytest.raises(MeasurementError, match="gRPC only"):
        Load("ctr", "h:1", protocol="http", concurrency=1, parameters={"priority": 1})


def test_input_data_holds_the_rows_bit_by_bit(tmp_path: Path) -> None:
    samples = {
        "dense": np.arange(6, dtype=np.float32).reshape(3, 2) / 3,
        "ids": np.array([[1], [2], [2**40]]),
        "text": np.array([["a"], ["ü"], ["c"]]),
        "flat": np.array([1.0, 2.0, 3.0]),
    }
    assert write_input_data(tmp_path / "in.json", samples) == 3
    rows = json.loads((tmp_path / "in.json").read_text())["data"]
    assert np.frombuffer(base64.b64decode(rows[2]["dense"]["b64"]), "<f4").tolist() == samples["dense"][2].tolist()
    assert np.frombuffer(base64.b64decode(rows[2]["ids"]["b64"]), "<i8").tolist() == [2**40]
    assert rows[1]["text"] == {"content": ["ü"], "shape": [1]}
    assert rows[0]["flat"]["shape"] == [1]
    assert rows[0]["dense"]["shape"] == [2]


def test_input_data_stays_small_for_large_tensors(tmp_path: Path) -> None:
    photos = {"image": np.zeros((20, 3, 64, 64), np.float32)}
    assert write_input_data(tmp_path / "in.json", photos, max_bytes=200_000) == 3
    assert (tmp_path / "in.json").stat().st_size < 220_000


def test_input_data_holds_bytes_that_are_no_text_as_triton_sends_them(tmp_path: Path) -> None:
    write_input_data(tmp_path / "in.json", {"photo": np.array([[b"\xff\xd8\xff"], [b"plain"]])})
    first, second = (row["photo"] for row in json.loads((tmp_path / "in.json").read_text())["data"])
    assert first["shape"] == [1]
    assert base64.b64decode(first["b64"]) == b"\x03\0\0\0\xff\xd8\xff"
    assert second == {"content": ["plain"], "shape": [1]}


def test_profile_holds_the_times_of_each_request() -> None:
    times = read_profile(CAPTURED / "perf_analyzer_profile.json")
    assert times.shape == (6, 2)
    assert (times[:, 1] > times[:, 0]).all()


def test_named_binary_is_used(fake_binary: Path) -> None:
    found = perf_analyzer_binary.find()
    assert (found.path, found.version) == (fake_binary, "9.9")


def test_named_binary_that_does_not_run_is_an_error_with_its_words(fake_binary: Path) -> None:
    fake_binary.write_text("#!/bin/sh\necho no libfoo >&2\nexit 127\n")
    with pytest.raises(HostError, match=r"exit code 127, no libfoo.*TRITONPILOT_PERF_ANALYZER"):
        perf_analyzer_binary.find()


def test_missing_named_binary_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(perf_analyzer_binary.ENV, str(tmp_path / "absent"))
    perf_analyzer_binary.find.cache_clear()
    with pytest.raises(HostError, match="No such file"):
        perf_analyzer_binary.find()


def test_binary_of_this_environment_runs() -> None:
    perf_analyzer_binary.find.cache_clear()
    assert tuple(int(part) for part in perf_analyzer_binary.find().version.split(".")[:2]) >= (2, 51)
