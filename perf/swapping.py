"""A service that is swapped again and again: its project, its server, and the command as a person gives it.

with switched([generations.ctr], bench) as site:
    done = site.swap("ctr", 3)               # `tritonpilot swap ctr FILE`, of generation 3; raises MeasurementError when it fails
    site.server.endpoints
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf import generations, memory
from perf.generations import Subject
from tritonpilot import build
from tritonpilot.control_key import VARIABLE
from tritonpilot.errors import MeasurementError
from tritonpilot.repository import versions
from tritonpilot.server import EmbeddedServer

TOOL_S = 120.0
KEPT = 2  # older versions on disk


@dataclass(frozen=True)
class Ran:
    """One run of the command, from `began_s` to `ended_s` of time.perf_counter."""

    began_s: float
    ended_s: float
    code: int
    said: str
    told: Mapping[str, Any]
    """What it printed with --json; empty when it printed nothing."""


@dataclass(frozen=True)
class Site:
    """A project in `folder`, served from its repository."""

    folder: Path
    subjects: Mapping[str, Subject]
    server: EmbeddedServer

    @property
    def repository(self) -> Path:
        """Which the server serves."""
        return self.folder / "model_repository"

    def swap(self, service: str, generation: int, options: Sequence[str] = ()) -> Ran:
        """Swap to a generation. Raises MeasurementError when the command fails."""
        ran = self.run("swap", service, [*self.files(service, generation), *options])
        if ran.code:
            raise MeasurementError(
                f"The swap of {service} to generation {generation} failed: {ran.said} Nothing is reported."
            )
        return ran

    def files(self, service: str, generation: int) -> list[str]:
        """The arguments that name the files of a generation."""
        subject = self.subjects[service]
        files = subject.files(generation, self.folder)
        if len(files) == 1:
            return [str(file) for file in files.values()]
        return [f"{member}={file}" for member, file in files.items()]

    def run(self, command: str, service: str, options: Sequence[str] = ()) -> Ran:
        """`tritonpilot COMMAND SERVICE`, whatever becomes of it."""
        began_s = time.perf_counter()
        with self.started(command, service, options) as process:
            out, said = process.communicate(timeout=TOOL_S)
        return Ran(began_s, time.perf_counter(), process.returncode, said.strip(), _json(out))

    @contextmanager
    def started(
        self, command: str, service: str, options: Sequence[str] = (), program: Sequence[str] = ()
    ) -> Iterator[subprocess.Popen[str]]:
        """The running command, which is killed when the block ends before it. `program` takes the place of `tritonpilot`."""
        argv = [
            *(program or [str(Path(sys.executable).with_name("tritonpilot"))]),
            *(command, service, *options, "--json"),
            *("--models", str(self.folder / "models"), "--repository", str(self.repository)),
            *("--triton-grpc", self.server.endpoints.grpc, "--triton-http", self.server.endpoints.http),
        ]
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, VARIABLE: self.server.control_key},
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def left(self) -> list[str]:
        """What should not be there any more: candidates that are loaded or on disk, versions that nobody goes back to, stubs."""
        with self.server.control() as control:
            found = [f"{each.name} is READY" for each in control.index() if "__" in each.name and each.state == "READY"]
        for folder in self.repository.iterdir():
            if "__" in folder.name:
                found.append(f"the folder {folder.name}")
            elif len(there := versions(self.repository, folder.name)) > KEPT + 1:
                found.append(f"{folder.name} has versions {there}")
        names = [memory.model_of(instance) for instance in memory.stubs(self.server.pid)]
        return [*found, *(f"a stub of {name}" for name in names if "__" in name)]


@contextmanager
def switched(
    subjects: Sequence[Callable[[Path], Subject]], say: Callable[[str], None], **options: Any
) -> Iterator[Site]:
    """A site of these subjects in generation 0, until the block ends. `options` are EmbeddedServer's."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name:
        folder = Path(name)
        made = [make(folder) for make in subjects]
        root = generations.published(folder)
        probes = build.probe_inputs(folder / "models", root)
        with EmbeddedServer(root, probe_inputs=probes, on_progress=say, **options) as server:
            yield Site(folder, {each.service: each for each in made}, server)


def _json(text: str) -> Mapping[str, Any]:
    """The last document of the lines that it printed."""
    try:
        told = json.loads(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.startswith("{")]
        told = json.loads(lines[-1]) if lines else {}
    return told if isinstance(told, dict) else {}
