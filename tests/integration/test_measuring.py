"""The real perf_analyzer against the real tritonserver, and the statistics of the same run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tritonpilot import metrics, perf_analyzer, sweep
from tritonpilot.errors import MeasurementError
from tritonpilot.perf_analyzer import Load, write_input_data
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

CONFIG = """
backend: "python"
max_batch_size: 16
input [{name: "value" data_type: TYPE_FP32 dims: [2]}, {name: "word" data_type: TYPE_STRING dims: [1]}]
output [{name: "sum" data_type: TYPE_FP32 dims: [1]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching {}
"""

# Answers rows whose word says what their values are: so what arrives is what the samples hold, row by row.
CHECKED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "value").as_numpy()
            word = pb_utils.get_input_tensor_by_name(request, "word").as_numpy()
            if [f"row {int(v)}".encode() for v in value[:, 0]] == word[:, 0].tolist():
                tensor = pb_utils.Tensor("sum", value.sum(axis=1, keepdims=True))
                responses.append(pb_utils.InferenceResponse([tensor]))
            else:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("values and words differ")))
        return responses
"""

ROWS = {
    "value": np.arange(80, dtype=np.float32).reshape(40, 2),
    "word": np.array([[f"row {2 * i}"] for i in range(40)]),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("measured") / "model_repository"
    make_model(repository, "checked", CHECKED, CONFIG)
    probe = {"value": ROWS["value"][:1], "word": ROWS["word"][:1].astype(object)}
    with EmbeddedServer(repository, probe_inputs={"checked": probe}) as running:
        yield running


@pytest.fixture(scope="module")
def input_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "input.json"
    write_input_data(path, ROWS)
    return path


def short(url: str, input_data: Path | None, protocol: str = "grpc", **wanted: object) -> Load:
    load = {"concurrency": 2, "window_ms": 250, "accepts_unstable": True, "max_windows": 3, **wanted}
    return Load("checked", url, protocol=protocol, input_data=input_data, **load)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_real_rows_arrive_and_are_measured(server: EmbeddedServer, input_data: Path, protocol: str) -> None:
    lines: list[str] = []
    load = short(getattr(server.endpoints, protocol), input_data, protocol, batch=4)
    reading = perf_analyzer.run(load, on_progress=lines.append)
    assert reading.throughput_infer_s > 0
    assert 0 < reading.p50_us <= reading.p90_us <= reading.p95_us <= reading.p99_us
    assert len(reading.windows) == 3
    assert reading.compute_us > 0
    assert any(line.startswith("Pass [1]") for line in lines)


def test_open_loop_with_priority_and_profile_is_measured(
    server: EmbeddedServer, input_data: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    load = short(
        server.endpoints.grpc, input_data, concurrency=None, request_rate_per_s=100.0, profile_export=profile,
        parameters={"priority": 1},
    )  # fmt: skip
    reading = perf_analyzer.run(load)
    assert reading.request_count > 20
    assert len(perf_analyzer.read_profile(profile)) > 20


def test_system_shared_memory_needs_the_key_and_says_so(server: EmbeddedServer) -> None:
    with pytest.raises(MeasurementError, match="restricted"):
        perf_analyzer.run(short(server.endpoints.grpc, None, shared_memory="system", extra=("--string-length", "3")))


def test_points_agree_with_the_statistics_of_the_server(server: EmbeddedServer) -> None:
    before = metrics.statistics(server.endpoints.grpc, "checked")
    points = list(
        sweep.measure(server.endpoints.grpc, "checked", ROWS, concurrencies=(1, 8), window_ms=250, attempts=1)
    )
    delta = metrics.statistics(server.endpoints.grpc, "checked") - before
    assert [point.concurrency for point in points] == [1, 8]
    assert points[0].mean_batch == 1
    assert points[1].mean_batch > 1
    assert all(point.p99_ms >= point.p50_ms > 0 and point.compute_ms > 0 for point in points)
    assert delta.success > 100
    assert delta.fail == 0


def test_random_input_that_the_model_refuses_is_an_error_with_its_words(server: EmbeddedServer) -> None:
    with pytest.raises(MeasurementError, match=r"Requests failed.*values and words differ"):
        perf_analyzer.run(short(server.endpoints.grpc, None))


def test_unstable_measurement_is_an_error_unless_accepted(server: EmbeddedServer, input_data: Path) -> None:
    strict = short(server.endpoints.grpc, input_data, accepts_unstable=False, stability_pct=1e-6, window_ms=100)
    with pytest.raises(MeasurementError, match="did not settle"):
        perf_analyzer.run(strict)


def test_pinned_run_stays_on_its_core_and_we_do_not(server: EmbeddedServer, input_data: Path) -> None:
    ours = os.sched_getaffinity(0)
    core = min(ours)
    seen: list[set[int]] = []

    def look(line: str) -> None:
        if line.startswith("Pass"):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            names = {pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
            seen.extend(os.sched_getaffinity(int(pid)) for pid, name in names.items() if name == "perf_analyzer")

    perf_analyzer.run(short(server.endpoints.grpc, input_data), cpus=[core], on_progress=look)
    assert seen
    assert all(affinity == {core} for affinity in seen)
    assert os.sched_getaffinity(0) == ours


def test_ctrl_c_ends_perf_analyzer(server: EmbeddedServer, input_data: Path) -> None:
    code = f"""
        import sys
        from pathlib import Path
        from tritonpilot.perf_analyzer import Load, run
        load = Load("checked", "{server.endpoints.grpc}", concurrency=2, window_ms=20000, input_data=Path("{input_data}"))
        run(load, on_progress=lambda line: print(line, flush=True))
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        while "Request concurrency" not in (line := caller.stdout.readline()):
            assert line, caller.stderr and caller.stderr.read()
        children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
        assert children
        caller.send_signal(signal.SIGINT)
        _, errors = caller.communicate(timeout=10)
    assert "KeyboardInterrupt" in errors
    assert not _alive(children)


def _alive(pids: list[str], within_s: float = 2.0) -> list[str]:
    deadline = time.monotonic() + within_s
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
