"""deploy/balancer in front of three real Tritons: one is killed under load, and a request that kills whoever serves it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from programs import program
from tritonclient.utils import InferenceServerException

from perf.balancer import Balancer, balancing
from perf.frame import Bench
from perf.machine import Limits
from perf.proofs.balancer import NEVER_S, RETRY, SERVERS, Call, back_s, balancer_kill, tritons
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

PATIENCE_S = 20.0
KILLS, ANSWERS = 1.0, -1.0
# Ends its server when an input is 1, as a fault in Triton would.
DEADLY = """
import os
import signal

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        if max(array.max() for array in inputs) == 1:
            os.kill(os.getppid(), signal.SIGKILL)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array)]) for array in inputs]
"""
Three = list[EmbeddedServer]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Iterator[Three]:
    program("haproxy")
    root = tmp_path_factory.mktemp("deadly") / "model_repository"
    make_model(root, "deadly", DEADLY)
    with tritons(root, SERVERS) as servers:
        yield servers


@pytest.fixture
def balancer(three: Three, tmp_path: Path) -> Iterator[Balancer]:
    for server in three:
        if not server.is_alive():
            server.stop()
            server.start()
    with balancing([(each.endpoints.http, each.endpoints.grpc) for each in three], tmp_path) as running:
        yield running


def infer(balancer: Balancer, over: str, value: float, columns: int = 1, headers: dict[str, str] | None = None) -> None:
    """Raises InferenceServerException when there is no answer."""
    library = tritonclient.http if over == "http" else tritonclient.grpc
    tensor = library.InferInput("INPUT", [1, columns], "FP32")
    tensor.set_data_from_numpy(np.full((1, columns), value, np.float32))
    with closing(library.InferenceServerClient(getattr(balancer, over))) as client:
        client.infer("deadly", [tensor], headers=dict(headers or {}))  # which tritonclient changes


def alive(servers: Three) -> int:
    """Once a killed one has ended."""
    time.sleep(0.3)
    return sum(server.is_alive() for server in servers)


@pytest.mark.parametrize("over", ["http", "grpc"])
@pytest.mark.parametrize(
    ("headers", "columns", "ended"),
    [({}, 1, 1), (RETRY, 1, 2), ({"tritonpilot-retry": "always"}, 1, 1), (RETRY, 10_000, 1)],
    ids=["without the header", "once", "a word that it does not know", "larger than the buffer"],
)
def test_a_request_that_ends_a_server_is_sent_to_one_other_at_most_and_only_when_asked(
    three: Three, balancer: Balancer, over: str, headers: dict[str, str], columns: int, ended: int
) -> None:
    with pytest.raises(InferenceServerException, match="may be sent again|UNAVAILABLE"):
        infer(balancer, over, KILLS, columns, headers)

    assert alive(three) == SERVERS - ended
    infer(balancer, over, ANSWERS)


def test_servers_that_died_a_moment_ago_cost_nobody_an_answer(three: Three, balancer: Balancer) -> None:
    os.kill(three[0].pid, signal.SIGKILL)
    assert three[0].wait(PATIENCE_S)
    for over in ("http", "grpc") * 10:
        infer(balancer, over, ANSWERS)
    until = time.monotonic() + PATIENCE_S
    while balancer.states()[f"http_servers/{three[0].endpoints.http}"] == "UP":
        assert time.monotonic() < until
        infer(balancer, "http", ANSWERS)


def test_a_server_that_is_stopped_is_replaced_by_the_others(three: Three, balancer: Balancer) -> None:
    failed: list[str] = []
    ends = threading.Event()

    def call() -> None:
        while not ends.is_set():
            try:
                infer(balancer, "http", ANSWERS)
            except InferenceServerException as error:
                failed.append(str(error))

    caller = threading.Thread(target=call)
    caller.start()
    try:
        three[1].stop()
        three[1].start()
        until = time.monotonic() + PATIENCE_S
        while set(balancer.states().values()) != {"UP"}:
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        ends.set()
        caller.join()
    assert failed == []


@pytest.mark.proof
def test_no_retryable_call_fails_when_one_of_three_is_killed_under_load() -> None:
    program("haproxy")
    bench = Bench(quick=True, needs_quiet=False, say=lambda _: None, limits=Limits())

    found = balancer_kill(bench)

    assert found.ok, found.details
    assert found.details["retryable_calls"] > 500  # type: ignore[operator]


def calls(*latencies_ms: float, per_s: int = 100) -> list[Call]:
    """So many a second, from the kill at 10 s on."""
    return [Call("http", 10 + number / per_s, latency, "") for number, latency in enumerate(latencies_ms)]


def test_p99_is_back_from_where_it_is_within_the_limit_to_the_end() -> None:
    assert back_s(calls(*[20] * 500), 10, 30) == 0
    assert back_s(calls(*[500] * 150, *[20] * 350), 10, 30) == pytest.approx(1.5)
    assert back_s(calls(*[20] * 250, *[500] * 250), 10, 30) == NEVER_S
    assert back_s(calls(), 10, 30) == NEVER_S
