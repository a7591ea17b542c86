"""deploy/balancer with a real haproxy: Tritons, what passes, sizes, TLS, client certificates, wrong files, a dying server."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from certificates import Authority, joined
from programs import program
from tritonclient.utils import InferenceServerException

from perf import balancer as balancers
from perf.balancer import START, Balancer, balancing, surroundings
from perf.proofs.stranger import Door, besiege
from perf.subjects import Served, entered
from tritonpilot.client import Client
from tritonpilot.entry.tenants import hash_key
from tritonpilot.ports import choose_ports
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

PATIENCE_S = 20.0
LIMIT_BYTES = 100_000
ROW = {"INPUT": np.ones((1, 2), np.float32) * -1}
ASK = """
import sys, numpy
from tritonpilot.client import Client
for url in sys.argv[1:]:
    with Client(url) as client:
        client.predict("identity", {"INPUT": numpy.zeros((1, 2), numpy.float32)}, deadline_ms=10_000)
"""
SLOW_TO_LOAD = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        time.sleep(2.5)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(each, "x").as_numpy())])
            for each in requests
        ]
"""
Pair = tuple[EmbeddedServer, EmbeddedServer]


def load_probe() -> Any:
    described = importlib.util.spec_from_file_location("probe", START.with_name("probe.py"))
    assert described is not None
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def probed(server: EmbeddedServer) -> dict[str, str]:
    """Variables for health checks by an inference of "identity"."""
    with urllib.request.urlopen(f"http://{server.endpoints.http}/v2/models/identity/config") as answer:
        return {"BALANCER_PROBE_MODEL": "identity", "BALANCER_PROBE_BODY": load_probe().body(json.load(answer))}


@pytest.fixture(scope="module")
def tritons(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Iterator[Pair]:
    """Two Tritons with "identity"."""
    program("haproxy")
    servers = []
    for name in ("a", "b"):
        root = tmp_path_factory.mktemp(name) / "model_repository"
        make_model(root, "identity")
        servers.append(EmbeddedServer(root))
    with ThreadPoolExecutor() as threads:
        try:
            list(threads.map(EmbeddedServer.start, servers))
            yield servers[0], servers[1]
        finally:
            list(threads.map(EmbeddedServer.stop, servers))


def behind(tritons: Pair) -> list[tuple[str, str]]:
    return [(server.endpoints.http, server.endpoints.grpc) for server in tritons]


@pytest.fixture(scope="module")
def balancer(tritons: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Balancer]:
    """In front of both, without TLS, with a small limit."""
    variables = {"BALANCER_MAX_REQUEST_BYTES": str(LIMIT_BYTES)}
    with balancing(behind(tritons), tmp_path_factory.mktemp("plain"), variables) as running:
        yield running


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "ours")


def inputs(library: Any, array: np.ndarray[Any, Any]) -> list[Any]:
    tensor = library.InferInput("INPUT", list(array.shape), "FP32")
    tensor.set_data_from_numpy(array)
    return [tensor]


def executed(server: EmbeddedServer) -> int:
    return sum(model.inference_count for model in server.statistics())


def post(address: str, path: str, body: bytes = b"{}", **headers: str) -> tuple[int, dict[str, Any]]:
    host, _, port = address.rpartition(":")
    with closing(http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)) as connection:
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.05)


def test_both_protocols_reach_both_tritons_and_its_figures_are_there(tritons: Pair, balancer: Balancer) -> None:
    for url in (balancer.http, f"grpc://{balancer.grpc}"):
        before = [executed(server) for server in tritons]
        with ThreadPoolExecutor(4) as threads, Client(url, coalesce=False) as client:
            answers = list(threads.map(lambda _: client.predict("identity", ROW)["OUTPUT"], range(16)))
        np.testing.assert_array_equal(answers, np.broadcast_to(ROW["INPUT"], (16, 1, 2)))
        wait_for(
            lambda before=before: all(executed(s) > n for s, n in zip(tritons, before, strict=True)),  # type: ignore[misc]
            f"a share of the calls to {url} for each Triton",
        )

    assert set(balancer.states().values()) == {"UP"}
    with urllib.request.urlopen(f"http://{balancer.stats}/metrics") as answer:
        name = tritons[1].endpoints.http
        assert f'haproxy_server_status{{proxy="grpc_servers",server="{name}",state="UP"}} 1' in answer.read().decode()


def test_no_stranger_controls_a_triton_by_its_own_door_or_the_balancer(tritons: Pair, balancer: Balancer) -> None:
    triton = Door("Triton", *behind(tritons)[0], is_triton=True)

    doors = [triton, Door("balancer", balancer.http, balancer.grpc)]
    found = besiege(doors, tritons[0].control_key, "identity", is_short=True)

    assert found.through == []
    assert found.locked_for_owner == []
    assert found.owners_calls == 38
    assert all(count > 400 for count in found.tried.values())


def test_requests_are_limited_in_size_whatever_form_they_have(balancer: Balancer) -> None:
    infer = "/v2/models/identity/infer"
    small, large = np.zeros((1, 20_000), np.float32), np.zeros((1, 26_000), np.float32)
    with closing(tritonclient.http.InferenceServerClient(balancer.http)) as client:
        client.infer("identity", inputs(tritonclient.http, small))
        with pytest.raises(InferenceServerException, match="larger than 100000 bytes"):
            client.infer("identity", inputs(tritonclient.http, large))
    assert "failed to parse the request JSON" in post(balancer.http, infer, b"x" * LIMIT_BYTES)[1]["error"], "Triton's"
    assert post(balancer.http, infer, b"x" * (LIMIT_BYTES + 1))[0] == 413
    assert post(balancer.http, infer, b"2\r\n{}\r\n0\r\n\r\n", transfer_encoding="chunked")[0] == 411
    assert post(balancer.http, infer, content_encoding="gzip")[0] == 415

    with closing(tritonclient.grpc.InferenceServerClient(balancer.grpc)) as client:
        client.infer("identity", inputs(tritonclient.grpc, small))
        for array, compression, said in (
            # Before 3.0 haproxy ends the stream with CANCEL behind its answer, and the client may take that for the answer.
            (large, None, "larger than 100000 bytes|RST_STREAM"),
            (small, "gzip", "not compressed"),
        ):
            with pytest.raises(InferenceServerException, match=said):
                client.infer("identity", inputs(tritonclient.grpc, array), compression_algorithm=compression)


def infer_over_tls(balancer: Balancer, ca: Path, cert: Path | None = None, key: Path | None = None) -> list[str]:
    """What came of an inference over HTTPS and one over gRPC with TLS: "ok", or why not."""
    context = ssl.create_default_context(cafile=str(ca))
    if cert is not None:
        context.load_cert_chain(cert, key)
    said = []
    with closing(
        tritonclient.http.InferenceServerClient(balancer.http, ssl=True, ssl_context_factory=lambda: context)
    ) as over_http:
        try:
            over_http.infer("identity", inputs(tritonclient.http, ROW["INPUT"]))
            said.append("ok")
        except (OSError, InferenceServerException) as failed:
            said.append(str(failed))
    with closing(
        tritonclient.grpc.InferenceServerClient(
            balancer.grpc,
            ssl=True,
            root_certificates=str(ca),
            certificate_chain=str(cert) if cert else None,
            private_key=str(key) if key else None,
        )
    ) as over_grpc:
        try:
            over_grpc.infer("identity", inputs(tritonclient.grpc, ROW["INPUT"]), client_timeout=5)
            said.append("ok")
        except InferenceServerException as failed:
            said.append(str(failed))
    return said


def test_with_a_certificate_it_speaks_tls_only(tritons: Pair, authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other")
    variables = {"BALANCER_TLS_CERT": str(joined(tmp_path, *authority.sign("server")))}
    with balancing(behind(tritons), tmp_path, variables) as balancer:
        assert infer_over_tls(balancer, authority.cert) == ["ok", "ok"]
        assert "ok" not in infer_over_tls(balancer, other.cert)
        trusting = {"SSL_CERT_FILE": str(authority.cert), "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(authority.cert)}
        asked = [sys.executable, "-c", ASK, f"https://{balancer.http}", f"grpcs://{balancer.grpc}"]
        subprocess.run(asked, env=os.environ | trusting, check=True, timeout=3 * PATIENCE_S)
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            post(balancer.http, "/v2/models/identity/infer")
        with pytest.raises(grpc.RpcError), grpc.insecure_channel(balancer.grpc) as channel:
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=5)
        old = ssl.create_default_context(cafile=str(authority.cert))
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(OSError), closing(http.client.HTTPSConnection(balancer.http, context=old)) as connection:  # noqa: PT011
            connection.connect()


def test_with_a_client_ca_it_lets_in_only_whom_that_ca_has_signed_and_not_revoked(
    tritons: Pair, authority: Authority, tmp_path: Path
) -> None:
    known, gone = (authority.sign(name, usage="clientAuth") for name in ("known", "gone"))
    other = Authority(tmp_path, "other").sign("known", usage="clientAuth")
    variables = {
        "BALANCER_TLS_CERT": str(joined(tmp_path, *authority.sign("server"))),
        "BALANCER_CLIENT_CA": str(authority.cert),
        "BALANCER_CLIENT_CRL": str(authority.revoke(gone[0])),
    }
    with balancing(behind(tritons), tmp_path, variables) as balancer:
        assert infer_over_tls(balancer, authority.cert, *known) == ["ok", "ok"]
        for stranger in ((), other, gone, authority.sign("server2")):
            assert "ok" not in infer_over_tls(balancer, authority.cert, *stranger), stranger


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"BALANCER_TLS_CERT": "absent.pem"}, "absent.pem, which is no file"),
        ({"BALANCER_TLS_CERT": "key.pem"}, "key.pem holds no certificate"),
        ({"BALANCER_TLS_CERT": "cert.pem"}, "cert.pem holds no private key"),
        ({"BALANCER_TLS_CERT": "mixed.pem"}, "inconsistencies between private key and certificate"),
        ({"BALANCER_TLS_CERT": "cut.pem"}, "cut.pem"),
        ({"BALANCER_CLIENT_CA": "cert.pem"}, "set BALANCER_TLS_CERT too"),
        ({"BALANCER_TLS_CERT": "good.pem", "BALANCER_CLIENT_CRL": "crl.pem"}, "BALANCER_CLIENT_CA, which is not set"),
        ({"BALANCER_TLS_CERT": "good.pem", "BALANCER_CLIENT_CA": "key.pem"}, "key.pem"),
        (
            {"BALANCER_TLS_CERT": "good.pem", "BALANCER_CLIENT_CA": "cert.pem", "BALANCER_CLIENT_CRL": "cert.pem"},
            "cert.pem holds no list of revoked certificates",
        ),
        ({"BALANCER_PROBE_MODEL": "ctr"}, "BALANCER_PROBE_BODY is not"),
        ({"BALANCER_SERVERS": " "}, "BALANCER_SERVERS is not set"),
        ({"BALANCER_SERVERS": "a:1:2 127.0.0.1:80"}, "has '127.0.0.1:80', but each must be host:HTTP port:gRPC port"),
        ({"BALANCER_SERVERS": "127.0.0.1:1:80x"}, "has '127.0.0.1:1:80x', but each must be"),
        ({"BALANCER_SERVERS": "*:1:2"}, "has '*:1:2', but each must be"),
        ({"BALANCER_SERVERS": "[::1:1:2"}, "has '[::1:1:2', but each must be"),
        ({"BALANCER_SERVERS": "a:1:2 b:1:2 a:1:3"}, "has a:1 twice"),
        ({"BALANCER_MAX_REQUEST_BYTES": "-1"}, "BALANCER_MAX_REQUEST_BYTES is '-1', but must be a whole number"),
        ({"BALANCER_MAX_REFUSALS": "many"}, "BALANCER_MAX_REFUSALS is 'many', but must be a whole number"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_files_and_settings_are_named_and_nothing_is_started(
    wrong_files: Path, variables: dict[str, str], said: str
) -> None:
    binds = [f"127.0.0.1:{port}" for port in choose_ports([0, 0, 0])]
    environment = surroundings([("127.0.0.1:1", "127.0.0.1:2"), ("[::1]:1", "[::1]:2")], binds) | variables

    done = subprocess.run(
        ["sh", START], env=environment, cwd=wrong_files, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )

    assert done.returncode == 1
    assert said in done.stdout + done.stderr


@pytest.fixture(scope="module")
def wrong_files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Path:
    program("haproxy")
    folder = tmp_path_factory.mktemp("wrong")
    cert, key = authority.sign("wrong")
    (folder / "cert.pem").write_text(cert.read_text())
    (folder / "key.pem").write_text(key.read_text())
    (folder / "good.pem").write_text(cert.read_text() + key.read_text())
    (folder / "mixed.pem").write_text(cert.read_text() + authority.sign("another")[1].read_text())
    (folder / "crl.pem").write_text(authority.revoke().read_text())
    lines = cert.read_text().splitlines(keepends=True)
    (folder / "cut.pem").write_text("".join(lines[: len(lines) // 2]) + key.read_text())
    return folder


def test_keys_go_through_to_an_entry_and_who_tries_many_is_told_to_stop(tritons: Pair, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(json.dumps({"tenants": [{"name": "shop", "keys": [hash_key("tp_shop")]}]}))
    tenants.chmod(0o600)
    variables = {
        **probed(tritons[0]),
        "BALANCER_PROBE_KEY_FILE": str(tmp_path / "key"),
        "BALANCER_MAX_REFUSALS": "5",
    }
    (tmp_path / "key").write_text("tp_shop\n")
    with (
        entered(Served(tritons[1], None), tenants=tenants) as entry,  # type: ignore[arg-type]
        balancing([(entry.http, entry.grpc)], tmp_path, variables) as balancer,
    ):
        for url in (balancer.http, f"grpc://{balancer.grpc}"):
            with Client(url, key="tp_shop") as client:
                client.predict("identity", ROW)
        probes = executed(tritons[1])
        wait_for(lambda: executed(tritons[1]) >= probes + 2, "health checks that were answered")
        assert set(balancer.states().values()) == {"UP"}, "the health check has shown its key"

        refusals = [post(balancer.http, "/v2/models/identity/infer", tritonpilot_key="tp_guess")[0] for _ in range(10)]
        assert refusals == [401] * 6 + [429] * 4
        with (
            closing(tritonclient.grpc.InferenceServerClient(balancer.grpc)) as client,
            pytest.raises(InferenceServerException, match="RESOURCE_EXHAUSTED.*too many requests with wrong keys"),
        ):
            client.is_server_live(headers={"tritonpilot-key": "tp_guess"})


def test_the_body_of_a_probe_fits_the_model_and_the_buffer() -> None:
    body = load_probe().body
    config = {
        "max_batch_size": 4,
        "input": [
            {"name": "x", "data_type": "TYPE_FP32", "dims": ["-1", "2"]},
            {"name": "words", "data_type": "TYPE_STRING", "dims": ["1"]},
            {"name": "more", "data_type": "TYPE_BOOL", "dims": ["1"], "optional": True},
        ],
    }

    assert json.loads(body(config))["inputs"] == [
        {"name": "x", "shape": [1, 1, 2], "datatype": "FP32", "data": [0, 0]},
        {"name": "words", "shape": [1, 1], "datatype": "BYTES", "data": [""]},
    ]
    with pytest.raises(ValueError, match="too many for a health check"):
        body({"input": [{"name": "image", "data_type": "TYPE_FP32", "dims": ["3", "224", "224"]}]})


# NOTE: last, for it ends both servers.
def test_a_triton_that_loads_a_model_stays_in(tritons: Pair, balancer: Balancer) -> None:
    """It says all the while that it is not ready, and serves all that it served."""
    (first, _), name = tritons, f"http_servers/{tritons[0].endpoints.http}"
    slow = Path(first.repository) / "slow"
    (slow / "1").mkdir(parents=True)
    (slow / "config.pbtxt").write_text(
        'backend: "python"\ninput { name: "x" data_type: TYPE_FP32 dims: 1 }\noutput { name: "y" data_type: TYPE_FP32 dims: 1 }\n'
    )
    (slow / "1" / "model.py").write_text(SLOW_TO_LOAD)
    seen: set[str] = set()
    refused = 0
    with ThreadPoolExecutor() as threads:
        loading = threads.submit(first.load, "slow")
        while not loading.done():
            seen.add(balancer.states()[name])
            try:
                urllib.request.urlopen(f"http://{first.endpoints.http}/v2/health/ready").close()
            except urllib.error.HTTPError:
                refused += 1
            time.sleep(0.05)
        loading.result()
    first.unload("slow")

    assert refused > 10, "Triton is taken for ready while it loads: ask it whether it is"
    assert seen == {"UP"}


def test_a_triton_without_a_stub_and_one_that_was_killed_are_left_out(tritons: Pair, tmp_path: Path) -> None:
    first, second = tritons
    errors: list[str] = []
    answered = 0
    stop = threading.Event()

    def call(url: str) -> None:
        nonlocal answered
        with Client(url, coalesce=False) as client:
            while not stop.is_set():
                try:
                    client.predict("identity", ROW, deadline_ms=10_000)
                    answered += 1
                except Exception as failed:  # noqa: BLE001
                    errors.append(repr(failed))

    first_name, second_name = (server.endpoints.http for server in tritons)
    with balancing(behind(tritons), tmp_path, probed(first)) as balancer:
        with ThreadPoolExecutor() as threads:
            callers = [threads.submit(call, url) for url in (balancer.http, f"grpc://{balancer.grpc}")]
            try:
                wait_for(lambda: answered > 20, "answers")
                os.kill(first.pid, signal.SIGKILL)
                killed_at = time.monotonic()
                wait_for(
                    lambda: balancer.states()[f"http_servers/{first_name}"] == "DOWN", "the killed one is left out"
                )
                left_out_s = time.monotonic() - killed_at
                seen, failed = answered, len(errors)
                wait_for(lambda: answered > seen + 20, "answers of the other")
            finally:
                stop.set()
            for caller in callers:
                caller.result()
        assert len(errors) == failed, errors
        assert left_out_s < balancers.START_S
        assert balancer.states()[f"grpc_servers/{first_name}"] == "DOWN"

        (stub,) = [
            int(process.name)
            for process in Path("/proc").glob("[0-9]*")
            if (process / "stat").exists()
            and (process / "stat").read_text().rpartition(")")[2].split()[1] == str(second.pid)
        ]
        os.kill(stub, signal.SIGKILL)
        with urllib.request.urlopen(f"http://{second.endpoints.http}/v2/health/ready") as answer:
            assert answer.status == 200, "Triton does not notice"
        wait_for(
            lambda: balancer.states()[f"http_servers/{second_name}"] == "DOWN", "the one without a stub is left out"
        )
        status, said = post(balancer.http, "/v2/models/identity/infer")
        assert (status, said["error"]) == (
            503,
            "The balancer: no server is ready. The request may be sent again.",
        )
        with pytest.raises(grpc.RpcError) as refused, grpc.insecure_channel(balancer.grpc) as channel:
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=5)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"http://{balancer.stats}/ready")
    os.kill(second.pid, signal.SIGKILL)  # Triton would wait for the dead stub
