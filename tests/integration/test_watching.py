"""The watch, and the memory that our backends tell, against a real Triton: one that is busy, hangs, loses a stub, and dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from conftest import MakeModel
from unit.onnx_files import identity

from perf import memory
from pilotlib.stub_memory import PAGE_BYTES
from tritonpilot import build, metrics, repository, spec, watch
from tritonpilot.errors import ServerError
from tritonpilot.ports import choose_ports
from tritonpilot.server import EmbeddedServer
from tritonpilot.watch import Report, Settings

pytestmark = pytest.mark.server

# One at a time, and strictly by priority.
STRICT = """
backend: "python"
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching { priority_levels: 2 default_priority_level: 1 }
"""
SERVICES = {
    "warm": "model: {file: model.onnx, samples: samples.npz}\nwarmup: {batch_sizes: [1]}\n"
    "classes: [{name: realtime, priority: 1}, {name: batch, priority: 2}]\n",
    "cached": "model: {file: model.onnx}\ncache: {kind: triton}\n",
}


@pytest.fixture(scope="module")
def model_repository(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    root = tmp_path_factory.mktemp("watch")
    for name, text in SERVICES.items():
        identity(root / "models" / name / "model.onnx")
        (root / "models" / name / "service.yaml").write_text(
            f"service: {name}\nbatching: {{max_batch_size: 4}}\n{text}"
        )
    np.savez(root / "models" / "warm" / "samples.npz", x=np.ones((3, 4), np.float32))
    plans = build.plan(spec.load_services(root / "models"))
    repository.publish(root / "model_repository", [plan.folder for plan in plans])
    make_model(root / "model_repository", "strict", config=STRICT)
    return root / "model_repository"


@pytest.fixture(scope="module")
def server(model_repository: Path) -> Iterator[EmbeddedServer]:
    (port,) = choose_ports([0])  # of its own, so that it can come back at the same one
    with EmbeddedServer(
        model_repository,
        models=["warm", "cached", "strict"],
        grpc_port=port,
        cache_size_bytes=1 << 20,
        exit_timeout_s=1,
    ) as running:
        yield running


@pytest.fixture
def settings(server: EmbeddedServer, model_repository: Path) -> Settings:
    return Settings(server.endpoints.grpc, model_repository, server.control_key)


def results(report: Report) -> dict[str, str | None]:
    assert report.is_up, report.said
    return {each.model: each.result for each in report.models}


def until(condition: Callable[[], bool], within_s: float = 30) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_every_model_is_asked_for_one_answer(settings: Settings) -> None:
    report = watch.once(settings)

    assert report.is_well, report
    assert results(report) == {"warm": "ok", "cached": "ok", "strict": "ok"}
    assert {each.model: each.has_warmup for each in report.models} == {"warm": True, "cached": False, "strict": None}
    assert all(0 < (each.seconds or 0) < 10 and not each.said for each in report.models)


def test_without_the_key_what_is_loaded_is_asked_all_the_same(settings: Settings) -> None:
    report = watch.once(replace(settings, key="0123456789abcdef-wrong", repository=None))

    assert results(report) == {"warm": "ok", "cached": "ok", "strict": "ok"}
    assert "Models that do not load are not seen: " in report.said
    said = {each.model: each.said for each in report.models}
    assert said.pop("warm") == "asked with zeros, for its warmup data cannot be read: no model repository was named"
    assert set(said.values()) == {""}


def sleep(server: EmbeddedServer, seconds: float) -> None:
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as client:
        data = np.full(1, seconds, np.float32)
        tensor = tritonclient.grpc.InferInput("INPUT", data.shape, "FP32").set_data_from_numpy(data)
        client.infer("strict", [tensor], priority=1)


def test_a_model_that_is_busy_with_better_classes_is_no_dead_one(server: EmbeddedServer, settings: Settings) -> None:
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            sleep(server, 0.05)

    with ThreadPoolExecutor(4) as pool, watch.Watch(replace(settings, timeout_s=0.5)) as watching:
        callers = [pool.submit(call) for _ in range(4)]
        try:
            found = [results(watching.look())["strict"] for _ in range(2)]
        finally:
            done.set()
        for each in callers:
            each.result()
    assert found == ["busy", "busy"]


def test_a_model_that_hangs_is_a_failed_one_and_hides_no_other(server: EmbeddedServer, settings: Settings) -> None:
    with ThreadPoolExecutor(1) as pool, watch.Watch(replace(settings, timeout_s=0.3)) as watching:
        assert results(watching.look())["strict"] == "ok"
        hanging = pool.submit(sleep, server, 2)
        until(lambda: "identity takes 2" in server.log_tail(400))
        found = results(watching.look())
        hanging.result()
        assert found == {"warm": "ok", "cached": "ok", "strict": "failed"}
        assert results(watching.look())["strict"] == "ok"


def memories(server: EmbeddedServer) -> dict[str, float]:
    samples = metrics.scrape(server.endpoints.metrics)
    found = [each for each in samples if each.name == "pilot_stub_memory_bytes"]
    assert all(each.labels["version"] == "1" for each in found)
    assert all(each.labels["stub"] == f"{each.labels['model']}_0_0" for each in found)
    return {each.labels["stub"]: each.value for each in found}


def test_backends_tell_the_memory_of_each_of_their_processes_also_after_a_reload(server: EmbeddedServer) -> None:
    def check() -> None:
        seen, processes = memories(server), memory.stubs(server.pid)
        assert set(seen) == {"warm_0_0", "cached_0_0"}, "strict is not made of our parts"
        for stub, size in seen.items():
            resident = int(Path(f"/proc/{processes[stub]}/statm").read_text().split()[1]) * PAGE_BYTES
            assert size == pytest.approx(resident, rel=0.2)

    check()
    before = memory.stubs(server.pid)["warm_0_0"]
    (server.repository / "warm" / "1" / "model.onnx").touch()
    server.load("warm")
    until(lambda: not Path(f"/proc/{before}").exists())
    check()


def test_an_unloaded_model_is_not_missed_and_one_that_cannot_load_is(
    server: EmbeddedServer, settings: Settings, model_repository: Path, make_model: MakeModel
) -> None:
    make_model(model_repository, "broken", code="raise ImportError('no such library')")
    server.unload("cached")
    with server.control() as control, pytest.raises(ServerError, match="no such library"):
        control.load("broken")

    report = watch.once(settings)
    assert results(report) == {"warm": "ok", "strict": "ok", "broken": None}
    assert not report.is_well
    broken = next(each for each in report.models if each.model == "broken")
    assert (broken.state, "no such library" in broken.said) == ("UNAVAILABLE", True)
    server.load("cached")


# NOTE: last, because the server cannot unload a model whose stub is dead.
def test_prometheus_is_told_of_a_dead_stub_a_dead_triton_and_its_return(
    server: EmbeddedServer, settings: Settings
) -> None:
    # The cache would answer for the dead stub.
    with watching(settings) as (endpoint, process):
        until(lambda: told(endpoint, "model_probe_success", model="cached") == 1)
        assert told(endpoint, "model_warmup", model="warm") == 1

        os.kill(memory.stubs(server.pid)["cached_0_0"], signal.SIGKILL)
        until(lambda: told(endpoint, "model_probe_success", model="cached") == 0)
        assert told(endpoint, "model_ready", model="cached") == 1
        assert told(endpoint, "probes_total", model="cached", result="failed") >= 1
        assert told(endpoint, "model_probe_success", model="warm") == 1

        os.kill(server.pid, signal.SIGKILL)
        until(lambda: told(endpoint, "triton_up") == 0)
        assert told(endpoint, "model_ready", model="cached") is None, "nobody knows"
        server.stop()
        server.start()
        until(lambda: told(endpoint, "model_probe_success", model="cached") == 1)
        assert told(endpoint, "triton_up") == 1

        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=15)[1]
        assert process.returncode == signal.SIGTERM, "what run() returned"
    lines = said.splitlines()
    assert lines[0] == "Triton answers; models: 4"
    assert any(line.startswith("model cached version 1 is READY, but does not answer an inference: ") for line in lines)
    assert any(line.startswith(f"Triton at {settings.triton_grpc} did not describe itself") for line in lines)
    assert settings.key is not None
    assert settings.key not in said


RUN = """
import sys
from pathlib import Path
from tritonpilot.watch import Settings, control_key, run

settings = Settings(sys.argv[1], Path(sys.argv[2]), control_key(), port=0, every_s=0.2, timeout_s=2)
sys.exit(run(settings, lambda at: print(at.metrics, flush=True), lambda line: print(line, file=sys.stderr, flush=True)))
"""


@contextmanager
def watching(settings: Settings) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running watch: the address of its metrics, and its process."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, settings.triton_grpc, str(settings.repository)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TRITONPILOT_CONTROL_KEY": settings.key or ""},
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def told(endpoint: str, name: str, **labels: str) -> float | None:
    """The sum of what the watch tells; None when there is no such sample."""
    samples = [each for each in metrics.scrape(endpoint) if each.name == name]
    found = [each.value for each in samples if labels.items() <= dict(each.labels).items()]
    return sum(found) if found else None
