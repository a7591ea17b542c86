"""The companion beside a real tritonserver whose model is in a backend written in C, as Triton's own are."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from unit.onnx_files import identity

from tritonpilot import model_config
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

SOURCE = Path(__file__).with_name("sleep_backend.c")
HEALTHCHECK = Path(__file__).parents[2] / "deploy" / "triton" / "healthcheck.py"
STALL_S = 0.45
PAIRS = 20
MOST_PAIRS = 60
CONFIG = """
backend: "sleep"
max_batch_size: 8
input [{ name: "x" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ kind: KIND_CPU }]
"""
PRIORITIES = """
dynamic_batching {
  priority_levels: 2
  default_priority_level: 1
  priority_queue_policy { key: 2 value { timeout_action: REJECT default_timeout_microseconds: 1 } }
}
parameters { key: "pilot_wake_priority" value { string_value: "2" } }
"""
UNREJECTED = "dynamic_batching { priority_levels: 2 default_priority_level: 1 }\n"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """libtriton_sleep.so, compiled now."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc to compile the backend in C with")
    found = tmp_path_factory.mktemp("sleep") / "libtriton_sleep.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(found), str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return found


@pytest.fixture
def make_repository(tmp_path: Path, library: Path) -> Callable[..., Path]:
    """A repository with the models that `configs` names and, on wish, the companion with its config changed."""

    def make(configs: dict[str, str], companion: Callable[[str], str] | None) -> Path:
        root = tmp_path / "model_repository"
        for name, config in configs.items():
            (root / name / "1").mkdir(parents=True)
            shutil.copyfile(library, root / name / "1" / library.name)
            (root / name / "config.pbtxt").write_text(CONFIG + config)
        if companion is not None:
            (root / model_config.COMPANION / "1").mkdir(parents=True)
            text = companion(model_config.companion_text())
            (root / model_config.COMPANION / "config.pbtxt").write_text(text)
        return root

    return make


def unchanged(text: str) -> str:
    return text


def metric(server: EmbeddedServer, name: str) -> float | None:
    with urllib.request.urlopen(f"http://{server.endpoints.metrics}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(values) if values else None


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


def slowest_of_pairs(server: EmbeddedServer, model: str, pairs: int = PAIRS) -> list[float]:
    """The slower latency of each pair, s: the second request arrives while the first executes for 20 ms."""
    with (
        tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as client,
        ThreadPoolExecutor(2) as threads,
    ):

        def ask() -> float:
            began = time.monotonic()
            tensor = tritonclient.grpc.InferInput("x", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.array([[20]], np.float32))
            answer = client.infer(model, [tensor])
            assert answer.as_numpy("y").tolist() == [[20.0]]
            return time.monotonic() - began

        found = []
        for _ in range(pairs):
            first = threads.submit(ask)
            time.sleep(0.005)
            second = threads.submit(ask)
            found.append(max(first.result(), second.result()))
            time.sleep(0.5)  # so that the companion can afford each
        return found


def test_a_model_in_c_stalls_without_the_companion_and_not_with_it(make_repository: Callable[..., Path]) -> None:
    root = make_repository({"sleep": PRIORITIES}, unchanged)
    with EmbeddedServer(root, models=["sleep"]) as server:
        without = slowest_of_pairs(server, "sleep")
    with EmbeddedServer(root) as server:
        assert server.models == ("pilot_companion", "sleep")
        wait_for(lambda: server.log_file.read_text().count("has the 500 ms stall") == 1)
        companied = slowest_of_pairs(server, "sleep")
        while not metric(server, "pilot_companion_wakes_total") and len(companied) < MOST_PAIRS:  # no race was lost yet
            companied += slowest_of_pairs(server, "sleep", 5)
        wakes, needed = metric(server, "pilot_companion_wakes_total"), metric(server, "pilot_companion_needed")
        (statistics,) = server.statistics("sleep")
    if max(without) < STALL_S:
        pytest.skip(f"the race that makes the stall was never lost in {PAIRS} pairs: nothing to cure")

    stalls = [sum(seconds >= STALL_S for seconds in each) for each in (without, companied)]
    assert stalls[1] / len(companied) <= stalls[0] / len(without) / 2, (without, companied)
    assert np.median(companied) < 0.3
    assert needed == 1
    assert wakes is not None
    assert wakes > 0
    assert statistics.inference_count == 2 * len(companied) + 1  # and the probe of readiness: no wake was executed


def test_it_switches_itself_off_where_the_server_has_no_stall(make_repository: Callable[..., Path]) -> None:
    """Without priority levels Triton prefetches, as a server would whose batcher is cured."""
    root = make_repository(
        {"sleep": PRIORITIES},
        lambda text: text.replace("priority_levels: 2", "").replace("default_priority_level: 1", ""),
    )
    with EmbeddedServer(root) as server:
        wait_for(lambda: "no stall of the batcher in 1100 trials" in server.log_file.read_text())
        before = metric(server, "pilot_companion_wakes_total") or 0
        slowest_of_pairs(server, "sleep", 5)

        assert metric(server, "pilot_companion_needed") == 0
        assert (metric(server, "pilot_companion_wakes_total") or 0) == before


def test_a_queue_that_cannot_reject_wakes_gets_none_and_the_log_says_so(make_repository: Callable[..., Path]) -> None:
    root = make_repository({"sleep": UNREJECTED}, unchanged)
    with EmbeddedServer(root) as server:
        slowest_of_pairs(server, "sleep", 3)
        wait_for(lambda: "is not woken, so a request" in server.log_file.read_text())

        assert not metric(server, "pilot_companion_wakes_total")


def test_without_metrics_it_says_so_and_the_server_serves(make_repository: Callable[..., Path], tmp_path: Path) -> None:
    root = make_repository({"sleep": PRIORITIES}, unchanged)
    with EmbeddedServer(root, extra_args=["--allow-metrics=false"]) as server:
        assert "this server has no metrics" in server.log_file.read_text()
        (tmp_path / "key").write_text(server.control_key)
        command = [
            sys.executable,
            str(HEALTHCHECK),
            f"http://{server.endpoints.http}",
            str(root),
            str(tmp_path / "key"),
        ]
        checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_a_repository_whose_models_wake_themselves_is_served_without_it(tmp_path: Path) -> None:
    root = tmp_path / "model_repository"
    identity(root / "mine" / "1" / "model.onnx")
    (root / "mine" / "config.pbtxt").write_text('backend: "onnxruntime"\nmax_batch_size: 8\n' + PRIORITIES)
    (root / model_config.COMPANION / "1").mkdir(parents=True)
    (root / model_config.COMPANION / "config.pbtxt").write_text(model_config.companion_text())

    with EmbeddedServer(root) as server:
        assert server.models == ("mine",)
