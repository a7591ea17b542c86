"""What is proved: the example services, built afresh into a repository of our own and served for real.

with serving(bench, ["ctr"]) as served:
    served.sender.send([Request("ctr", inputs, priority=2)])
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from perf import machine
from perf.frame import PROJECT, Bench
from perf.open_loop import Sender
from tritonpilot import build, repository, samples
from tritonpilot.errors import MeasurementError
from tritonpilot.pipeline import parts
from tritonpilot.server import EmbeddedServer
from tritonpilot.spec import Service, load_services

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Served:
    """A running server and a way to send it requests."""

    server: EmbeddedServer
    sender: Sender


def services(names: Sequence[str] = ()) -> dict[str, Service]:
    """The service files of this project: name -> service."""
    return {service.service: service for service in load_services(PROJECT / "models", names)}


def part(model: str) -> Service:
    """What the Triton model `model` is made from: a service, or a step of a pipeline (`image_net`) as a service of its own."""
    return next(part for service in services().values() for part in parts(service) if part.service == model)


def priority(service: Service, caller: str) -> int:
    """The priority level of a class of callers."""
    return next(c.priority for c in service.classes if c.name == caller)


def model_file(service: Service) -> Path:
    """The ONNX file that the service is built from."""
    assert service.model is not None
    return service.folder / str(service.model.file)


def sample_rows(service: Service) -> dict[str, npt.NDArray[Any]]:
    """The service's samples: input name -> [rows, ...]."""
    assert service.samples is not None
    return samples.read(service.samples)


@contextmanager
def built(say: Callable[[str], None], names: Sequence[str] = ()) -> Iterator[Path]:
    """A repository in a temporary folder with the named services (default: all) and those that they name, generated now."""
    chosen = build.with_members(list(services(names).values()), services())
    build.prepare(chosen, "auto", say)
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        root = Path(folder, "model_repository")
        root.mkdir()
        repository.publish(root, [plan.folder for plan in build.plan(chosen, "auto")])
        yield root


@contextmanager
def serving(bench: Bench, names: Sequence[str], *, is_pinned: bool = False, http_threads: int = 0) -> Iterator[Served]:
    """The named services on a server that ends with the block; see `serving_from`."""
    with (
        built(bench.say, names) as root,
        serving_from(root, bench, is_pinned=is_pinned, http_threads=http_threads) as served,
    ):
        yield served


@contextmanager
def serving_from(root: Path, bench: Bench, *, is_pinned: bool, http_threads: int = 0) -> Iterator[Served]:
    """All models of a repository; `is_pinned`: the server to the bench's server core and we to its client core."""
    cpus = [bench.cores.server] if is_pinned else None
    probes = build.probe_inputs(PROJECT / "models", root)
    with (
        EmbeddedServer(
            root, cpus=cpus, on_progress=bench.say, probe_inputs=probes, http_threads=http_threads
        ) as server,
        ExitStack() as stack,
    ):
        # NOTE: after the start, for the server may only be given cores that we have ourselves.
        if is_pinned:
            stack.enter_context(machine.pinned(bench.cores.client))
        sender = stack.enter_context(Sender(server.endpoints.grpc))
        yield Served(server, sender)


def cut(arrays: Arrays, start: int, count: int) -> dict[str, npt.NDArray[Any]]:
    """`count` rows from `start` on, beginning again at the first row after the last."""
    return {name: array.take(range(start, start + count), axis=0, mode="wrap") for name, array in arrays.items()}


@dataclass(frozen=True)
class Entry:
    """A running entry: host:port of its services, and its process."""

    http: str
    grpc: str
    metrics: str
    pid: int


@contextmanager
def entered(served: Served, *, core: int | None = None, tenants: Path | None = None) -> Iterator[Entry]:
    """An entry in front of a server, on one core when asked, that ends with the block."""
    argv = [
        *("--triton-http", served.server.endpoints.http, "--triton-grpc", served.server.endpoints.grpc),
        *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"),
        *(() if core is None else ("--cpus", str(core))),
        *(() if tenants is None else ("--tenants", str(tenants))),
    ]
    with command("entry", argv) as (endpoints, process):
        yield Entry(endpoints["http"], endpoints["grpc"], endpoints["metrics"], process.pid)
        if process.poll() is not None:
            raise MeasurementError(f"The entry ended with code {process.returncode}. Nothing is reported.")


@contextmanager
def watched(server: EmbeddedServer, root: Path) -> Iterator[str]:
    """host:port of the metrics of a running watch of that server."""
    argv = ["--port", "0", "--triton-grpc", server.endpoints.grpc, "--repository", str(root)]
    with command("watch", argv) as (endpoints, _):
        yield endpoints["metrics"]


@contextmanager
def command(
    name: str, options: Sequence[str], program: Sequence[str] = ()
) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    """A running `tritonpilot NAME --json` that tells its endpoints, and its process, which ends with the block.

    `program` is run instead of the command `tritonpilot`.
    """
    argv = [*(program or [str(Path(sys.executable).with_name("tritonpilot"))]), name, "--json", *options]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        told = process.stdout.readline()
        if not told:
            raise MeasurementError(f"The {name} did not start: {process.stderr.read()}. Nothing is reported.")
        # What it says later is read, so that it never waits for a reader.
        for pipe in (process.stdout, process.stderr):
            threading.Thread(target=pipe.read, daemon=True).start()
        yield json.loads(told)["endpoints"], process
    finally:
        process.terminate()
        process.wait(timeout=30)
