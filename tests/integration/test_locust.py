"""The load tests: real Locust against a real tritonserver with the entry in front."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
    assert "InferenceServerException()" not in done.stderr, "Locust's own table says why"


def test_rows_that_are_missing_are_named(tmp_path: Path) -> None:
    done = locust("--samples", str(tmp_path / "absent.npz"))
    assert done.returncode == 2
    assert "The rows to send cannot be read" in done.stderr
    assert "absent.npz" in done.stderr


@pytest.mark.parametrize("wrong", ["cut.npz", "empty.npz", "one.npy", "nothing.npz", "no_rows.npz", "times.npz"])
def test_files_without_rows_are_named(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / wrong
    if wrong == "one.npy":
        np.save(file, np.zeros((3, 2)))
    elif wrong == "empty.npz":
        file.touch()
    else:
        arrays = {
            "nothing.npz": {},
            "no_rows.npz": {"INPUT": np.zeros((0, 2))},
            "times.npz": {"AT": np.zeros(3, "M8[s]")},
        }
        np.savez(file, **arrays.get(wrong, {"INPUT": np.zeros((3, 2))}))
    if wrong == "cut.npz":
        file.write_bytes(file.read_bytes()[:-100])
    done = locust("--samples", str(file))
    assert done.returncode == 2
    assert "The rows to send cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--figures", "--html"])
def test_a_report_that_cannot_be_written_is_refused_before_the_test(option: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", INPUT=np.zeros((3, 2)))
    for file, said in ((tmp_path / "absent" / "x", "does not exist"), (tmp_path, "is a folder")):
        done = locust("--samples", str(tmp_path / "rows.npz"), option, str(file))
        assert done.returncode == 2
        assert f"{option}: " in done.stderr
        assert said in done.stderr
