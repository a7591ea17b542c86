"""`tritonpilot supervise` with a real Triton: stubs die and hang, the server dies, and the entry in front loses no request."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from conftest import CONFIG, MakeModel

from perf import machine
from perf.frame import Bench
from perf.memory import stubs
from perf.proofs.heal_stub import heal_stub
from tritonpilot import metrics
from tritonpilot.errors import PortError, RepositoryError, SpecError
from tritonpilot.server import EmbeddedServer
from tritonpilot.supervise.processes import SHARED, Stubs, model_of

pytestmark = pytest.mark.server
COMMAND = str(Path(sys.executable).with_name("tritonpilot"))
FREE = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
PATIENT = {"tritonpilot_deadline_ms": "60000"}
BATCHED = CONFIG + "dynamic_batching { }\n"


class Supervisor:
    """A running one: what it told first, and its events as they come."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        told = process.stdout.readline()
        assert told, process.stderr and process.stderr.read()
        self.facts: dict[str, Any] = json.loads(told)
        self.endpoints: dict[str, str] = self.facts["endpoints"]
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        assert process.stderr is not None
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=process.stderr.read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self._events.put(json.loads(line))

    def until(self, what: str, within_s: float = 30) -> dict[str, Any]:
        """The next event of that kind."""
        deadline = time.monotonic() + within_s
        seen = []
        while True:
            try:
                event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {what}, but {seen}") from None
            if event["what"] == what:
                return event
            seen.append(event)

    def figure(self, name: str, **labels: str) -> float:
        endpoint = self.endpoints.get("supervisor") or self.endpoints["metrics"]
        found = [s for s in metrics.scrape(endpoint) if s.name == name and labels.items() <= s.labels.items()]
        return sum(each.value for each in found)


@contextmanager
def supervising(*options: str) -> Iterator[Supervisor]:
    process = subprocess.Popen(
        [COMMAND, "supervise", "--json", "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Supervisor(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def ask(http: str, model: str = "identity", value: float = 0.0, **headers: str) -> None:
    with tritonclient.http.InferenceServerClient(http, network_timeout=30) as client:
        tensor = tritonclient.http.InferInput("INPUT", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), value, np.float32))
        client.infer(model, [tensor], headers={name.replace("_", "-"): text for name, text in headers.items()})


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    root = tmp_path_factory.mktemp("supervise") / "model_repository"
    make_model(root, "identity", config=BATCHED)
    make_model(root, "other", config=BATCHED)
    return root


def test_own_form_heals_a_killed_stub_then_a_killed_server_and_the_entry_loses_nothing_that_never_reached_a_stub(
    repository: Path,
) -> None:
    with supervising("--repository", str(repository), *FREE) as supervisor:
        triton, server = supervisor.endpoints["http"], supervisor.facts["tritonserver"]
        other = stubs(server)["other_0_0"]
        argv = [
            COMMAND,
            "entry",
            "--json",
            *FREE,
            "--triton-http",
            triton,
            "--triton-grpc",
            supervisor.endpoints["grpc"],
        ]
        entry = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert entry.stdout is not None
            through = json.loads(entry.stdout.readline())["endpoints"]["http"]
            ask(through)
            with ThreadPoolExecutor(8) as pool:
                inside = pool.submit(ask, through, value=3.0)
                time.sleep(1)  # it sleeps in the stub, alone
                os.kill(stubs(server)["identity_0_0"], signal.SIGKILL)
                later = [pool.submit(ask, through, **PATIENT) for _ in range(4)]
                event = supervisor.until("healed")
                for each in later:
                    each.result()
                with pytest.raises(tritonclient.utils.InferenceServerException, match="is not healthy"):
                    inside.result()
            assert event["model"] == "identity"
            assert "new instances answer" in event["said"]
            assert stubs(server)["other_0_0"] == other, "nobody else was touched"
            assert supervisor.figure("supervisor_heals_total", model="identity", way="instances") == 1
            assert supervisor.figure("supervisor_stub_deaths_total", model="identity") == 1
            assert supervisor.figure("supervisor_heals_total", model="other") == 0

            os.kill(server, signal.SIGKILL)
            supervisor.until("down")
            ask(through, **PATIENT)  # waits in the entry
            assert "Triton serves again after" in supervisor.until("restarted")["said"]
            ask(triton)
            assert supervisor.figure("supervisor_restarts_total") == 1
        finally:
            entry.kill()
            entry.communicate()
    assert supervisor.process.returncode == 0
    assert not list(SHARED.glob(f"tritonpilot_{supervisor.facts['pid']}_*")), "nothing is left"


def test_attached_form_kills_a_hung_stub_and_reloads_its_model_alone(repository: Path, tmp_path: Path) -> None:
    with EmbeddedServer(repository, exit_timeout_s=1) as server:
        key = tmp_path / "key"
        key.write_text(server.control_key)
        options = ("--repository", str(repository), "--control-key-file", str(key), "--hang", "1", "--every", "0.2")
        with supervising("--attach", server.endpoints.grpc, *options) as supervisor, ThreadPoolExecutor(1) as pool:
            hung = stubs(server.pid)["identity_0_0"]
            hanging = pool.submit(ask, server.endpoints.http, value=60)
            event = supervisor.until("healed")
            with pytest.raises(tritonclient.utils.InferenceServerException):
                hanging.result()
            assert event["model"] == "identity"
            assert "identity is hung" in event["said"]
            ask(server.endpoints.http)
            assert stubs(server.pid)["identity_0_0"] != hung
        assert server.is_alive()


def test_attached_form_tells_that_triton_is_away_and_runs_the_restart_command(repository: Path, tmp_path: Path) -> None:
    with EmbeddedServer(repository, models=["identity"], exit_timeout_s=1) as server:
        key = tmp_path / "key"
        key.write_text(server.control_key)
        options = ("--attach", server.endpoints.grpc, "--control-key-file", str(key), "--away", "1", "--every", "0.2")
        command = f"touch {tmp_path / 'restarted'}; echo no such unit >&2; exit 3"
        with supervising(*options, "--restart-command", command) as supervisor, supervising(*options) as waiting:
            os.kill(server.pid, signal.SIGKILL)
            assert "ended with code 3: no such unit" in supervisor.until("failed")["said"]
            assert (tmp_path / "restarted").exists()
            while "no --restart-command" not in waiting.until("down")["said"]:
                pass
            assert waiting.figure("supervisor_needs_help") == 1


def test_dead_stubs_are_known_by_name_and_by_what_they_left(repository: Path) -> None:
    with EmbeddedServer(repository, exit_timeout_s=1) as server, Stubs(server.pid) as seen:
        assert {stub.instance for stub in seen.alive()} == {"identity_0_0", "other_0_0"}
        assert all((SHARED / stub.segment).exists() for stub in seen.alive())
        victim = next(stub for stub in seen.alive() if model_of(stub.instance, ["identity", "ident"]) == "identity")
        assert seen.kill(victim)
        assert seen.wait(5)
        assert seen.died() == [victim]
        assert seen.died() == []
        assert seen.clean() == 0, "Triton still maps it"
        assert seen.is_server_alive


def test_a_model_that_is_unloaded_is_no_death(repository: Path) -> None:
    with EmbeddedServer(repository, exit_timeout_s=1) as server, Stubs(server.pid) as seen:
        seen.wait(0)
        server.unload("other")
        until(lambda: len(seen.alive()) == 1 or seen.wait(0.05))
        assert seen.died() == []


def until(condition: Callable[[], bool], within_s: float = 30) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--attach", "nowhere"), SpecError.exit_code, "must be HOST:PORT"),
        (("--attach", "127.0.0.1:1", "--repository", "/nowhere"), RepositoryError.exit_code, "no model repository"),
        (("--restart-command", "true"), 2, "needs none"),
        (("--attach", "127.0.0.1:1", "--host", "192.0.2.1"), PortError.exit_code, "cannot listen"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(options: tuple[str, ...], code: int, said: str) -> None:
    done = subprocess.run(
        [COMMAND, "supervise", "--port", "0", *FREE, *options], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.returncode == code, done.stderr
    assert said in " ".join(done.stderr.split())


@pytest.mark.proof
def test_kills_under_load_cost_the_requests_in_the_stub_alone() -> None:
    outcome = heal_stub(Bench(quick=True, needs_quiet=False, say=print, limits=machine.Limits()))

    assert outcome.ok, outcome.details
    assert outcome.value < 3
