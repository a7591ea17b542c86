"""A real haproxy with deploy/balancer/haproxy.cfg in front of servers, for the time of a `with` block.

with balancing([("127.0.0.1:8100", "127.0.0.1:8101"), ("127.0.0.1:8110", "127.0.0.1:8111")], folder) as balancer:
    tritonclient.http.InferenceServerClient(balancer.http)
"""

from __future__ import annotations

import csv
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perf.frame import PROJECT
from perf.programs import find
from tritonpilot.errors import MeasurementError
from tritonpilot.ports import LOOPBACK, choose_ports

START = PROJECT / "deploy" / "balancer" / "start.sh"
START_S = 20.0
_POLL_S = 0.03


@dataclass(frozen=True)
class Balancer:
    """A running haproxy: host:port of its services, its process, and the file that it logs to."""

    http: str
    grpc: str
    stats: str
    pid: int
    log: Path

    def states(self) -> dict[str, str]:
        """UP or DOWN of each server, as {"http_servers/127.0.0.1:8100": "UP", ...}."""
        return {server: row["status"].split()[0] for server, row in self.figures().items()}

    def figures(self) -> dict[str, dict[str, str]]:
        """What haproxy's CSV says of each server: "scur" requests in it now, "wredis" that were sent to another one, ..."""
        with urllib.request.urlopen(f"http://{self.stats}/;csv", timeout=5) as answer:
            rows = csv.DictReader(answer.read().decode().removeprefix("# ").splitlines())
        return {
            f"{row['pxname']}/{row['svname']}": row
            for row in rows
            if row["pxname"].endswith("_servers") and row["svname"] != "BACKEND"
        }


@contextmanager
def balancing(
    servers: Sequence[tuple[str, str]], folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[Balancer]:
    """The balancer in front of servers, each as (HTTP, gRPC) of one host; it logs into `folder` and ends with the block.

    `variables` are added to its environment, as haproxy.cfg lists them. Raises MeasurementError with what haproxy said when it
    does not start.
    """
    ports = [f"{LOOPBACK}:{port}" for port in choose_ports([0, 0, 0])]
    environment = surroundings(servers, ports) | dict(variables or {})
    log = folder / "haproxy.log"
    with log.open("wb") as file:
        process = subprocess.Popen(["sh", START], env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        _wait_until_listening(process, ports[2], log)
        yield Balancer(ports[0], ports[1], ports[2], process.pid, log)
    finally:
        process.terminate()
        process.wait(timeout=10)


def surroundings(servers: Sequence[tuple[str, str]], binds: Sequence[str]) -> dict[str, str]:
    """The environment of start.sh: the servers, where to listen (HTTP, gRPC, figures), and where haproxy is."""
    return {
        "PATH": os.pathsep.join([str(find("haproxy").parent), os.environ.get("PATH", os.defpath)]),
        "BALANCER_SERVERS": " ".join(f"{http}:{grpc.rpartition(':')[2]}" for http, grpc in servers),
        **dict(zip(("BALANCER_HTTP_BIND", "BALANCER_GRPC_BIND", "BALANCER_STATS_BIND"), binds, strict=True)),
    }


def _wait_until_listening(process: subprocess.Popen[bytes], stats: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise MeasurementError(f"haproxy did not start: {log.read_text(errors='replace')} Nothing is reported.")
        try:
            urllib.request.urlopen(f"http://{stats}/ready", timeout=5).close()
        except urllib.error.HTTPError:
            return  # it listens, its servers are not ready
        except OSError:
            time.sleep(_POLL_S)
        else:
            return
    raise MeasurementError(f"haproxy does not listen at {stats} after {START_S:g} s. Nothing is reported. See {log}.")
