"""The load tests: real Locust against a real tritonserver with the entry in front."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tritonpilot.server import EmbeddedServer

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        # NOTE: found, not imported: Locust replaces the sockets of the process that imports it.
        importlib.util.find_spec("locust") is None,
        reason="NOT TESTED: Locust is missing; pip install --constraint requirements.lock '.[load]'",
    ),
]

ROOT = Path(__file__).parents[2]
ENTRY = (str(Path(sys.executable).with_name("tritonpilot")), "entry", "--json", "--http-port", "0", "--grpc-port", "0")


@pytest.fixture(scope="module")
def server(example_repository: Path) -> Iterator[EmbeddedServer]:
    """A Triton with ctr."""
    with EmbeddedServer(example_repository, models=["ctr"]) as server:
        yield server


@pytest.fixture(scope="module")
def entry(server: EmbeddedServer) -> Iterator[tuple[str, ...]]:
    """Options that lead to an entry in front of the server."""
    triton = ("--triton-http", server.endpoints.http, "--triton-grpc", server.endpoints.grpc)
    process = subprocess.Popen([*ENTRY, "--metrics-port", "0", *triton], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        endpoints = json.loads(process.stdout.readline())["endpoints"]
        yield ("--host", f"http://{endpoints['http']}", "--triton-grpc", endpoints["grpc"])
    finally:
        process.kill()
        process.communicate()


def locust(*options: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "locust", "-f", str(ROOT / "perf/locust/locustfile.py"), "--headless"]
    return subprocess.run([*argv, "--only-summary", *options], cwd=cwd, capture_output=True, text=True, timeout=90)


def figures(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_burst_over_both_protocols_leaves_figures_and_a_report(entry: tuple[str, ...], tmp_path: Path) -> None:
    report, file = tmp_path / "report.html", tmp_path / "figures.json"
    burst = ("--scenario", "burst", "--seconds", "1", "--rate-per-s", "50")
    done = locust(*entry, *burst, "--html", str(report), "--figures", str(file))
    found = figures(file)
    assert (found["requests"], found["failures"], found["errors"]) == (50, 0, {}), done.stderr
    assert {name: each["requests"] for name, each in found["by_class"].items()} == {"realtime": 20, "batch": 30}
    assert {name: each["requests"] for name, each in found["by_transport"].items()} == {"http": 25, "grpc": 25}
    assert 0 < found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]
    assert len(found["p99_ms_by_second"]) == 1
    assert done.returncode == bool(found["broken"]), done.stderr
    assert "ctr realtime" in report.read_text()


def test_batch_callers_beside_realtime_straight_to_triton(server: EmbeddedServer, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    triton = ("--host", f"http://{server.endpoints.http}", "--triton-grpc", server.endpoints.grpc)
    done = locust(*triton, "--scenario", "mixed", "--seconds", "1", "--rate-per-s", "20", "--figures", str(file))
    found = figures(file)
    assert found["by_class"]["realtime"]["requests"] == 20, done.stderr
    assert found["by_class"]["batch"]["requests"] > 20, "they never rest"
    assert found["failures"] == 0


def test_a_broken_limit_is_named_and_ends_with_code_1(entry: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    done = locust(
        *entry,
        "--service",
        "absent",
        "--samples",
        "models/ctr/build/samples.npz",
        "--seconds",
        "1",
        "--figures",
        str(file),
    )
    assert done.returncode == 1, done.stderr
    assert "100 of 100 requests of realtime failed (100.000%), and at most 0.020% may" in done.stderr
    assert any("absent" in error for error in figures(file)["errors"])


def test_rows_that_are_missing_are_named(tmp_path: Path) -> None:
    done = locust("--samples", str(tmp_path / "absent.npz"))
    assert done.returncode == 2
    assert "The rows to send cannot be read" in done.stderr
    assert "absent.npz" in done.stderr
