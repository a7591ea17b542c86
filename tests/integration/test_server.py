from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from conftest import MakeModel

from tritonpilot import server as server_module
from tritonpilot.control import Control
from tritonpilot.errors import HostError, PortError, RepositoryError, ServerError
from tritonpilot.ports import choose_ports
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

SHM = Path("/dev/shm")  # noqa: S108 -- where Linux keeps POSIX shared memory
REJECTS_ZEROS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT") for request in requests]
        if not all(tensor.as_numpy().any() for tensor in inputs):
            raise ValueError("zero is out of range")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", tensor.as_numpy())]) for tensor in inputs]
"""
HANGS = """
import time


class TritonPythonModel:
    def initialize(self, args):
        time.sleep(600)
"""
# What `tritonpilot serve` does, with its endpoints on stdout.
SERVE = """
import json, sys
from pathlib import Path
from tritonpilot.server import EmbeddedServer, serve
ended_by = serve(
    EmbeddedServer(Path(sys.argv[1]), on_progress=lambda line: print(line, file=sys.stderr, flush=True)),
    on_ready=lambda server: print(json.dumps(server.describe()), flush=True),
)
sys.exit(100 + ended_by)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    root = tmp_path_factory.mktemp("server") / "model_repository"
    make_model(root, "identity")
    make_model(root, "particular", REJECTS_ZEROS)
    make_model(root, "idle")
    return root


@pytest.fixture(scope="module")
def progress() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(repository: Path, progress: list[str], last_cpu: int) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(
        repository,
        models=["identity", "particular"],
        probe_inputs={"particular": {"INPUT": np.ones((1, 1), np.float32)}},
        cpus=[last_cpu],
        env={"IDENTITY_MARK": "the-test"},
        strict_config=True,
        on_progress=progress.append,
    ) as running:
        yield running


def stubs(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def runs(pid: int) -> bool:
    """Whether the process does anything: a zombie that nobody collects does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(claim: Callable[[], bool], timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "this did not come true in time"
        time.sleep(0.02)


def infer(endpoint: str, model: str, value: float) -> float:
    """Over HTTP with JSON; its own connection, which stays open until the answer is read."""
    connection = http.client.HTTPConnection(endpoint, timeout=30)
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, 1], "data": [value]}
    try:
        connection.request("POST", f"/v2/models/{model}/infer", json.dumps({"inputs": [tensor]}))
        answer = json.loads(connection.getresponse().read())
        return float(answer["outputs"][0]["data"][0])
    finally:
        connection.close()


def shm_of(server: EmbeddedServer) -> list[Path]:
    return list(SHM.glob(f"{server._shm_prefix}*"))


# -- a running server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [tritonclient.http, tritonclient.grpc])
def test_answers_over_http_and_grpc(server: EmbeddedServer, protocol: object) -> None:
    over_http = protocol is tritonclient.http
    with protocol.InferenceServerClient(server.endpoints.http if over_http else server.endpoints.grpc) as client:  # type: ignore[attr-defined]
        tensor = protocol.InferInput("INPUT", [2, 3], "FP32")  # type: ignore[attr-defined]
        sent = -np.arange(6, dtype=np.float32).reshape(2, 3)
        tensor.set_data_from_numpy(sent)
        np.testing.assert_array_equal(client.infer("identity", [tensor]).as_numpy("OUTPUT"), sent)


def test_says_what_it_does(server: EmbeddedServer, progress: list[str]) -> None:
    assert progress[0].startswith("starting ")
    assert "loading model identity version 1" in progress
    assert "model identity is ready" in progress
    assert progress[-1].startswith("ready in ")
    described = json.loads(json.dumps(server.describe()))
    assert described["endpoints"]["grpc"] == server.endpoints.grpc
    assert described["models"] == ["identity", "particular"]
    assert server.control_key not in json.dumps(described)
    assert Path(described["control_key_file"]).read_text().strip() == server.control_key


def test_models_run_in_this_environment_with_pilotlib(server: EmbeddedServer) -> None:
    assert "identity runs in the-test" in server.log_tail(1000)
    assert "pilotlib/__init__.py" in server.log_tail(1000)


def test_only_the_chosen_models_are_loaded(server: EmbeddedServer) -> None:
    with server.control() as control:
        assert {state.name for state in control.index() if state.state == "READY"} == {"identity", "particular"}


def test_listens_on_loopback_only(server: EmbeddedServer) -> None:
    wanted = {f"{int(endpoint.rpartition(':')[2]):04X}" for endpoint in server.endpoints.as_dict().values()}
    listening = [
        address
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if (address := line.split()[1]).rpartition(":")[2] in wanted and line.split()[3] == "0A"
    ]
    loopback = {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, ::ffff:127.0.0.1
    assert {address.rpartition(":")[0] for address in listening} <= loopback
    assert len(listening) == 3


def test_server_and_stubs_are_pinned(server: EmbeddedServer, last_cpu: int) -> None:
    processes = [server.pid, *stubs(server.pid)]
    assert len(processes) == 3
    assert {frozenset(os.sched_getaffinity(pid)) for pid in processes} == {frozenset({last_cpu})}


def test_metrics_have_latency_summaries(server: EmbeddedServer) -> None:
    connection = http.client.HTTPConnection(server.endpoints.metrics, timeout=10)
    connection.request("GET", "/metrics")
    assert b"nv_inference_request_summary_us" in connection.getresponse().read()
    connection.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/repository/index"),
        ("POST", "/v2/repository/models/identity/unload"),
        ("GET", "/v2/systemsharedmemory/status"),
        ("GET", "/v2/trace/setting"),
        ("GET", "/v2/logging"),
    ],
)
def test_restricted_apis_want_the_key_over_http(server: EmbeddedServer, method: str, path: str) -> None:
    def status(key: str | None) -> int:
        connection = http.client.HTTPConnection(server.endpoints.http, timeout=10)
        connection.request(method, path, headers={server.control_header: key} if key else {})
        answer = connection.getresponse().status
        connection.close()
        return answer

    assert status(None) == 403
    assert status("wrong") == 403
    if "unload" not in path:
        assert status(server.control_key) == 200


@pytest.mark.parametrize("key", [None, "wrong"])
def test_restricted_apis_want_the_key_over_grpc(server: EmbeddedServer, key: str | None) -> None:
    with Control(server.endpoints.grpc, key) as control:
        with pytest.raises(ServerError, match="refused to list its models"):
            control.index()
        with pytest.raises(ServerError, match="refused to unload model 'identity'"):
            control.unload("identity")
        assert control.statistics("identity")[0].name == "identity"
        assert control.server_version() == "2.51.0"


def test_load_and_unload_are_verified(server: EmbeddedServer) -> None:
    (state,) = server.load("idle")
    assert (state.state, state.version) == ("READY", "1")
    wait_until(lambda: server.statistics("idle")[0].inference_count == 1)  # counted after it is answered
    assert infer(server.endpoints.http, "idle", -1.0) == -1.0
    server.unload("idle")
    with server.control() as control, pytest.raises(ServerError, match="idle"):
        control.probe("idle")


def test_a_load_that_fails_says_why_and_what_is_served(
    server: EmbeddedServer, repository: Path, make_model: MakeModel
) -> None:
    code = make_model(repository, "changing") / "1" / "model.py"
    server.load("changing")
    code.write_text("import a_module_that_is_missing\n")
    os.utime(code, (time.time() + 10, time.time() + 10))  # Triton compares modification times
    with pytest.raises(ServerError, match="a_module_that_is_missing.*version 1 of it is still served"):
        server.load("changing")
    assert infer(server.endpoints.http, "changing", -2.0) == -2.0
    with pytest.raises(ServerError, match="it is not served"):
        server.load("never_was")


def test_statistics_count_rows_and_batches(server: EmbeddedServer) -> None:
    (before,) = server.statistics("identity")
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT", [4, 1], "FP32")
        tensor.set_data_from_numpy(np.zeros((4, 1), np.float32))
        client.infer("identity", [tensor])
    wait_until(lambda: server.statistics("identity")[0].execution_count > before.execution_count)
    (after,) = server.statistics("identity")
    assert after.inference_count - before.inference_count == 4
    assert after.execution_count - before.execution_count == 1
    assert after.batch_executions[4] == 1
    assert after.success.ns > before.success.ns


# -- a start that fails ----------------------------------------------------------------------------------------------


def test_a_model_that_does_not_load_is_explained_and_nothing_is_left(
    identity_repository: Path, make_model: MakeModel, tmp_path: Path
) -> None:
    make_model(identity_repository, "broken", "import a_module_that_is_missing\n")
    make_model(identity_repository, "unreadable", config='backend: "pyth')
    server = EmbeddedServer(identity_repository, log_file=tmp_path / "log")
    pids: list[int] = []
    server.progress = lambda _: pids.append(server.pid)
    with pytest.raises(ServerError) as failed, server:
        pass
    message = str(failed.value)
    assert (
        "Model 'broken' did not load: Internal: ModuleNotFoundError: No module named 'a_module_that_is_missing'"
        in message
    )
    assert "model.py(1): <module>" in message
    assert "Model 'unreadable' did not load: Poll failed for model directory 'unreadable'" in message
    assert "Model 'identity'" not in message
    assert "config.pbtxt: 1:15: Unexpected end of string" in message  # of protobuf, from the log
    assert not server.is_alive()
    assert pids[-1]
    assert not runs(pids[-1])
    assert not shm_of(server)
    assert not server._folder.exists()
    assert "failed to load" in (tmp_path / "log").read_text()


def test_a_model_that_rejects_the_probe_is_not_ready(tmp_path: Path, make_model: MakeModel) -> None:
    make_model(tmp_path / "r", "particular", REJECTS_ZEROS)
    with pytest.raises(ServerError, match="does not answer an inference with zeros: .*zero is out of range"):
        EmbeddedServer(tmp_path / "r").start()


def test_strict_config_refuses_an_incomplete_one(tmp_path: Path, make_model: MakeModel) -> None:
    (make_model(tmp_path / "r", "incomplete") / "config.pbtxt").unlink()  # without strict_config Triton makes one up
    with pytest.raises(ServerError, match="Model 'incomplete' did not load: .*failed to open text file"):
        EmbeddedServer(tmp_path / "r", strict_config=True).start()


def test_a_start_that_takes_too_long_is_given_up(tmp_path: Path, make_model: MakeModel) -> None:
    make_model(tmp_path / "r", "hangs", HANGS)
    server = EmbeddedServer(tmp_path / "r", startup_timeout_s=1.5)
    with pytest.raises(ServerError, match="not ready within 2 s; it is still loading hangs"):
        server.start()
    assert not shm_of(server)


def test_an_unknown_argument_is_quoted_from_the_log(identity_repository: Path) -> None:
    with pytest.raises(ServerError, match=r"ended by itself with status 1[\s\S]*unrecognized option '--no-such'"):
        EmbeddedServer(identity_repository, extra_args=["--no-such"]).start()


def test_a_busy_port_names_its_holder(identity_repository: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(PortError, match=rf"Port {port} is taken by process {os.getpid()} \("):
            EmbeddedServer(identity_repository, http_port=port).start()


@pytest.mark.parametrize("given", [True, False])
def test_a_port_that_is_taken_meanwhile(
    identity_repository: Path, monkeypatch: pytest.MonkeyPatch, free_port: int, given: bool
) -> None:
    """A free one is chosen again; a given one is an error."""
    with socket.socket() as thief:

        def choose_and_lose(wanted: tuple[int, ...]) -> list[int]:
            ports = choose_ports(wanted)
            monkeypatch.setattr(server_module, "choose_ports", choose_ports)
            thief.bind(("127.0.0.1", ports[1]))
            thief.listen()
            return ports

        monkeypatch.setattr(server_module, "choose_ports", choose_and_lose)
        server = EmbeddedServer(identity_repository, grpc_port=free_port if given else 0)
        if given:
            with pytest.raises(PortError, match=f"Port {free_port} is taken by process {os.getpid()}"):
                server.start()
        else:
            with server:
                assert infer(server.endpoints.http, "identity", -1.0) == -1.0


def test_what_can_be_known_before_is_said_before(identity_repository: Path, tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"has no ctr\. Nothing was started\. It has: identity"):
        EmbeddedServer(identity_repository, models=["identity", "ctr"]).start()
    with pytest.raises(RepositoryError, match="no model repository at"):
        EmbeddedServer(tmp_path / "absent").start()
    (tmp_path / "empty" / ".hidden" / "1").mkdir(parents=True)
    with pytest.raises(RepositoryError, match="holds no model"):
        EmbeddedServer(tmp_path / "empty").start()
    (tmp_path / "cloned" / "ctr").mkdir(parents=True)
    (tmp_path / "cloned" / "ctr" / "config.pbtxt").write_text('backend: "python"')
    for models in (None, ["ctr"]):
        with pytest.raises(
            RepositoryError, match=r"no version folder for ctr\. Nothing was started\. .*build --prepare"
        ):
            EmbeddedServer(tmp_path / "cloned", models=models).start()
    with pytest.raises(HostError, match="pinned to the CPUs 9999"):
        EmbeddedServer(identity_repository, cpus=[9999]).start()
    with pytest.raises(HostError, match="log file .* cannot be written"):
        EmbeddedServer(identity_repository, log_file=tmp_path / "absent" / "log").start()
    with pytest.raises(ServerError, match="was not started"):
        _ = EmbeddedServer(identity_repository).endpoints


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def serving(identity_repository: Path) -> Iterator[subprocess.Popen[str]]:
    """`serve` in a process group of its own, as a shell starts a command."""
    argv = [sys.executable, "-c", SERVE, str(identity_repository)]
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_in_flight_be_answered_and_idle_clients_do_not_delay_it(
    serving: subprocess.Popen[str], number: signal.Signals
) -> None:
    assert serving.stdout is not None
    described = json.loads(serving.stdout.readline())
    endpoints = described["endpoints"]
    idle = http.client.HTTPConnection(endpoints["http"])  # holds tritonserver for its whole exit timeout, left alone
    idle.request("GET", "/v2/health/live")
    idle.getresponse().read()
    answers: list[float] = []
    request = threading.Thread(target=lambda: answers.append(infer(endpoints["http"], "identity", 1.0)))
    request.start()
    wait_until(lambda: "identity takes 1.0 s" in Path(described["log_file"]).read_text())
    began = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(serving.pid, number)  # as a terminal does on Ctrl-C
    else:
        serving.send_signal(number)
    request.join()
    assert answers == [1.0]
    assert serving.wait(20) == 100 + number
    assert time.monotonic() - began < 10
    assert not runs(described["pid"])
    assert not Path(described["log_file"]).exists()
    idle.close()


def test_a_killed_parent_takes_the_server_with_it(serving: subprocess.Popen[str]) -> None:
    assert serving.stdout is not None
    described = json.loads(serving.stdout.readline())
    processes = [described["pid"], *stubs(described["pid"])]
    serving.kill()
    wait_until(lambda: not any(runs(pid) for pid in processes))
    wait_until(lambda: not Path(described["log_file"]).parent.exists())
    assert not list(SHM.glob(f"tritonpilot_{serving.pid}_*"))


@pytest.mark.parametrize("victim", ["server", "keeper"])
def test_a_server_that_was_killed_is_noticed_and_cleaned_up(identity_repository: Path, victim: str) -> None:
    with EmbeddedServer(identity_repository) as server:
        processes = [server.pid, *stubs(server.pid)]
        assert shm_of(server)
        assert server._keeper is not None
        os.kill(server.pid if victim == "server" else server._keeper.pid, signal.SIGKILL)
        wait_until(lambda: not server.is_alive())
        with pytest.raises(ServerError, match="died by SIGKILL" if victim == "server" else "keeper"):
            server.check_alive()
        assert "identity runs in" in server.log_tail(100)
    wait_until(lambda: not any(runs(pid) for pid in processes))
    assert not shm_of(server)
    assert not server._folder.exists()


def test_a_dead_stub_is_found_by_an_inference_and_does_not_hold_the_end(
    identity_repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "UNLOAD_GRACE_S", 1)
    with EmbeddedServer(identity_repository) as server:
        os.kill(stubs(server.pid)[0], signal.SIGKILL)
        with server.control() as control:
            assert [state.state for state in control.index()] == ["READY"]
            with pytest.raises(ServerError, match="Stub process 'identity_0_0' is not healthy"):
                control.probe("identity", timeout_s=5)
        assert server.is_alive()
        began = time.monotonic()
    assert time.monotonic() - began < 10
    assert not shm_of(server)


def test_a_server_can_be_started_again_also_by_a_thread_that_ends(
    identity_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    monkeypatch.setenv("TRITONPILOT_CONTROL_KEY", "a-key-of-16-chars")
    server = EmbeddedServer(identity_repository, log_file=tmp_path / "log", grpc_port=free_port)
    with server:
        with pytest.raises(ServerError, match="is running already"):
            server.start()
        assert server.endpoints.grpc == f"127.0.0.1:{free_port}"
        assert server.describe()["control_key_file"] is None
        assert b"TRITONPILOT_CONTROL_KEY" not in Path(f"/proc/{server.pid}/environ").read_bytes()
        with Control(server.endpoints.grpc, "a-key-of-16-chars") as control:
            assert [state.state for state in control.index()] == ["READY"]
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        assert infer(server.endpoints.http, "identity", 0.3) == pytest.approx(0.3)
        server.check_alive()
    finally:
        server.stop()
    server.stop()  # does nothing
    assert (tmp_path / "log").read_text().count("Started HTTPService") == 2
    assert server.log_tail(1000).count("Started HTTPService") == 1
