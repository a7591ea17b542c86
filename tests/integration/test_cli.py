"""The command as a person types it: results, exit codes, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tritonclient.http
from unit.onnx_files import identity

from tritonpilot import build, spec
from tritonpilot.repository import CONFIG_FILE

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from tritonpilot.start import main; main()"]
SERVICE = """\
service: {name}
model: {{file: model.onnx}}
batching: {{max_batch_size: 8}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "iris"
    identity(folder / "model.onnx")
    (folder / "service.yaml").write_text(SERVICE.format(name="iris"))
    return tmp_path


def run(project: Path, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], cwd=project, capture_output=True, text=True, timeout=120, check=False, **options
    )


def test_build_then_check_then_drift(project: Path) -> None:
    assert run(project, "build", "--check").returncode == 6, "nothing is built yet"
    dry = run(project, "build", "--dry-run")
    assert (dry.returncode, dry.stdout) == (0, "iris: publish version 1, write config.pbtxt\n")
    assert not (project / "model_repository").exists()

    built = run(project, "build", "--json")
    assert built.returncode == 0, built.stderr
    assert json.loads(built.stdout)[0] == {
        "name": "iris",
        "is_new": True,
        "version": 1,
        "publishes_version": True,
        "writes_config": True,
        "writes_warmup": False,
        "changes": True,
        "is_held": False,
    }
    assert run(project, "build", "--check").returncode == 0
    assert run(project, "build").stdout == "iris: up to date (version 1)\n"

    (project / "model_repository/iris/config.pbtxt").write_text("name: 'iris'")
    drift = run(project, "build", "--check")
    assert drift.returncode == 6
    assert "iris: write config.pbtxt" in drift.stderr


@pytest.mark.parametrize(
    ("break_it", "code", "said"),
    [
        (lambda p: (p / "models/iris/service.yaml").write_text("servise: x"), 3, "did you mean service?"),
        (lambda p: (p / "models/iris/service.yaml").unlink(), 3, "There is no service.yaml"),
        (lambda p: (p / "models/iris/model.onnx").unlink(), 4, "does not exist"),
        (lambda p: (p / "models/iris/model.onnx").write_bytes(b"junk"), 4, "is not a valid ONNX model"),
        (lambda p: (p / "model_repository").write_text("a file"), 5, "no folder"),
    ],
)
def test_bad_input_gives_one_paragraph_and_its_exit_code(project: Path, break_it: Any, code: int, said: str) -> None:
    break_it(project)

    done = run(project, "build")

    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.startswith("tritonpilot: ")
    assert "Traceback" not in done.stderr
    assert "\n\n" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "--target", "tpu"),
        ("bild",),
        ("serve", "--http-port", "70000"),
        ("serve", "--cpus", "a"),
        ("measure",),
    ],
)
def test_usage_errors_exit_2(project: Path, arguments: tuple[str, ...]) -> None:
    done = run(project, *arguments)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "build",
        "serve",
        "measure",
        "demo",
        "schema",
        "watch",
        "top",
        "report",
        "entry",
        "load",
        "sweep",
        "simulate",
        "tune",
        "plan",
    ],
)
def test_every_command_explains_itself_with_an_example(project: Path, command: str) -> None:
    done = run(project, command, "--help")

    assert done.returncode == 0
    assert f"Example: tritonpilot {command}" in " ".join(done.stdout.split())


def test_a_full_disk_behind_the_results_is_told(project: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "schema"], cwd=project, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )

    assert done.returncode == 7
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_while_libraries_are_imported_leaves_no_traceback(project: Path) -> None:
    interrupted = """
import sys
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "tritonpilot.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
from tritonpilot.start import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", interrupted], cwd=project, capture_output=True, text=True, timeout=60, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_unknown_service_names_the_nearest(project: Path) -> None:
    done = run(project, "build", "irs")

    assert done.returncode == 3
    assert "did you mean iris?" in done.stderr


def test_serving_nothing_says_how_to_build(project: Path) -> None:
    done = run(project, "serve")

    assert done.returncode == 5
    assert "tritonpilot build" in done.stderr


def test_a_busy_port_names_its_holder(project: Path) -> None:
    assert run(project, "build").returncode == 0
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(project, "serve", "--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0")

    assert done.returncode == 8
    assert str(port) in done.stderr
    assert str(os.getpid()) in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_serve_prints_endpoints_and_a_signal_stops_it_cleanly(project: Path, number: int, code: int) -> None:
    assert run(project, "build").returncode == 0
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    server = subprocess.Popen([*COMMAND, "serve", "--json", *ports], cwd=project, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    facts = json.loads(server.stdout.readline())
    with tritonclient.http.InferenceServerClient(facts["endpoints"]["http"]) as client:
        assert client.is_model_ready("iris")

    server.send_signal(number)

    assert server.wait(30) == code
    assert not Path(f"/proc/{facts['pid']}").exists()


def test_a_build_that_is_killed_while_it_prepares_leaves_the_repository_untouched(project: Path) -> None:
    assert run(project, "build").returncode == 0
    folder = project / "models" / "iris"
    before = (project / "model_repository/iris/config.pbtxt").read_bytes()
    (folder / "service.yaml").write_text(
        SERVICE.format(name="iris").replace("model.onnx", "build/m.onnx, prepare: train.py")
    )
    (folder / "train.py").write_text("import time\nprint('training', flush=True)\ntime.sleep(60)")

    building = subprocess.Popen([*COMMAND, "build", "--prepare"], cwd=project, stderr=subprocess.PIPE, text=True)
    assert building.stderr is not None
    while "training" not in building.stderr.readline():
        assert building.poll() is None
    building.send_signal(signal.SIGINT)

    assert building.wait(20) == 130
    assert (project / "model_repository/iris/config.pbtxt").read_bytes() == before


@pytest.fixture(scope="module")
def services() -> list[spec.Service]:
    """All example services, with the files that their scripts make."""
    found = spec.load_services(ROOT / "models")
    build.prepare(found, "auto", lambda line: sys.stderr.write(f"{line}\n"))
    return found


def test_the_committed_configs_are_what_the_service_files_say(services: list[spec.Service]) -> None:
    plans = {folder.name: folder.config_text for folder in build.folders(build.plan(services))}
    committed = {path.parent.name: path.read_text() for path in (ROOT / "model_repository").glob(f"*/{CONFIG_FILE}")}

    assert committed == plans, "run `tritonpilot build` and commit the configs"


def test_the_gpu_target_of_the_examples_is_generated(services: list[spec.Service]) -> None:
    for plan in build.plan(services, "gpu"):
        text = plan.folder.config_text
        kinds = set(re.findall(r"kind: (KIND_\w+)", text))
        assert kinds == (
            {"KIND_GPU"}
            if 'backend: "onnxruntime"' in text
            else set()
            if 'platform: "ensemble"' in text
            else {"KIND_CPU"}
        ), plan.folder.name
