"""The entry's cache before a real Triton: equal answers, who gets whose, what ends an answer's life, who waits for whom."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from tritonclient.utils import InferenceServerException

from tritonpilot.control import Control
from tritonpilot.entry.tenants import hash_key
from tritonpilot.entry.terms import CACHE_LEASE_S
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

COMMAND = str(Path(sys.executable).with_name("tritonpilot"))
PATIENCE_S = 20.0
# Answers [how often it has executed, its version, what its file says], `input[1]` seconds later; refuses a negative input[0].
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.count, self.version = 0, int(args["model_version"])

    def execute(self, requests):
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().ravel()
            self.count += 1
            time.sleep(float(value[1:2].sum()))
            if value[0] < 0:
                responses.append(pb_utils.InferenceResponse([], pb_utils.TritonError("negative")))
                continue
            answer = np.array([[self.count, self.version, MARK]], np.float32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", answer)]))
        return responses
"""
CONFIG = """
name: "%s"
max_batch_size: 4
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [3]}]
parameters { key: "pilot_cache" value { string_value: "max_mb:0.25" } }
"""
PYTHON = 'backend: "python"\ninstance_group [{kind: KIND_CPU}]\n'
CLASSES = """
dynamic_batching { priority_levels: 2 default_priority_level: 2 }
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling { step [{
  model_name: "inner" model_version: -1 input_map { key: "INPUT" value: "INPUT" } output_map { key: "OUTPUT" value: "OUTPUT" }
}] }
"""
TENANTS = f"""
tenants:
  - {{name: shop, keys: ["{hash_key("tp_shop")}"]}}
  - {{name: bank, keys: ["{hash_key("tp_bank")}"]}}
"""


def write(repository: Path, name: str, extra: str, versions: tuple[int, ...] = (1,), mark: float = 0) -> None:
    folder = repository / name
    for version in versions:
        (folder / str(version)).mkdir(parents=True)
        if "ensemble" not in extra:
            (folder / str(version) / "model.py").write_text(MODEL.replace("MARK", str(mark)))
    (folder / "config.pbtxt").write_text(CONFIG % name + extra)


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("cached")
    write(repository, "plain", PYTHON)
    write(repository, "classes", PYTHON + CLASSES)
    write(repository, "inner", PYTHON)
    write(repository, "outer", ENSEMBLE)
    write(repository, "versioned", PYTHON)
    write(repository, "replaced", PYTHON)
    with EmbeddedServer(repository) as server:
        yield server


@contextmanager
def entry(server: EmbeddedServer, *options: str) -> Iterator[dict[str, str]]:
    ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
    addresses = ("--triton-http", server.endpoints.http, "--triton-grpc", server.endpoints.grpc)
    process = subprocess.Popen(
        [COMMAND, "entry", "--json", *ports, *addresses, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["endpoints"]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def front(triton: EmbeddedServer) -> Iterator[dict[str, str]]:
    with entry(triton) as endpoints:
        yield endpoints


def figures(front: dict[str, str], model: str, name: str = "pilot_cache_requests_total") -> dict[str, float]:
    """A metric of a model, by outcome where it has some."""
    with urllib.request.urlopen(f"http://{front['metrics']}/metrics", timeout=10) as answer:
        lines = [
            line for line in answer.read().decode().splitlines() if line.startswith(name + "{") and f'"{model}"' in line
        ]
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        outcome = re.search(r'outcome="(\w+)"', line)
        found[outcome[1] if outcome else model] += float(line.rsplit(" ", 1)[1])
    return found


def over_http(
    front: dict[str, str], model: str, value: list[float], *, key: str = "", binary: bool = True, **more: Any
) -> Any:
    client = tritonclient.http.InferenceServerClient(front["http"])
    tensor = tritonclient.http.InferInput("INPUT", [1, len(value)], "FP32")
    tensor.set_data_from_numpy(np.array([value], np.float32), binary_data=binary)
    output = tritonclient.http.InferRequestedOutput("OUTPUT", binary_data=binary)
    headers = {**more.pop("headers", {}), **({"tritonpilot-key": key} if key else {})}
    try:
        return client.infer(model, [tensor], outputs=[output], headers=headers, **more)
    finally:
        client.close()


def over_grpc(front: dict[str, str], model: str, value: list[float], *, key: str = "", **more: Any) -> Any:
    with tritonclient.grpc.InferenceServerClient(front["grpc"]) as client:
        tensor = tritonclient.grpc.InferInput("INPUT", [1, len(value)], "FP32")
        tensor.set_data_from_numpy(np.array([value], np.float32))
        headers = {"tritonpilot-key": key} if key else None
        return client.infer(model, [tensor], headers=headers, **more)


WAYS = [over_http, over_grpc, lambda *a, **k: over_http(*a, binary=False, **k)]
BY_WAY = pytest.mark.parametrize("ask", WAYS, ids=["http", "grpc", "json"])


def numbers(answer: Any) -> tuple[float, ...]:
    return tuple(answer.as_numpy("OUTPUT").ravel().tolist())


def until_cached(ask: Callable[..., Any], front: dict[str, str], model: str, value: list[float], **more: Any) -> Any:
    """The first requests find an entry that has not looked at the model yet."""
    until = time.monotonic() + PATIENCE_S
    before = ask(front, model, value, **more)
    while time.monotonic() < until:
        again = ask(front, model, value, **more)
        if numbers(again) == numbers(before):
            return again
        before = again
        time.sleep(0.05)
    raise AssertionError("nothing was cached")


@BY_WAY
def test_the_same_is_answered_again_with_the_callers_own_id(front: dict[str, str], ask: Callable[..., Any]) -> None:
    value = [float(WAYS.index(ask)), 0.0, 1.0]
    first = until_cached(ask, front, "plain", value, request_id='first \u00e9"')
    again = ask(front, "plain", value, request_id="x" * 200)
    without = ask(front, "plain", value)

    assert numbers(first) == numbers(again) == numbers(without)
    shown = [each.get_response() for each in (first, again, without)]
    if ask is over_grpc:
        assert [each.id for each in shown] == ['first \u00e9"', "x" * 200, ""]
        assert [(each.model_name, each.model_version) for each in shown] == [("plain", "1")] * 3
    else:
        assert [each.get("id") for each in shown] == ['first \u00e9"', "x" * 200, None]
        assert [(each["model_name"], each["model_version"]) for each in shown] == [("plain", "1")] * 3
    assert numbers(ask(front, "plain", [*value[:2], 2.0])) != numbers(first)


def test_an_answer_is_byte_for_byte_tritons(triton: EmbeddedServer, front: dict[str, str]) -> None:
    until_cached(over_http, front, "plain", [3.0, 0.0])
    text = {
        "inputs": [{"name": "INPUT", "datatype": "FP32", "shape": [1, 2], "data": [3.5, 0]}],
        "outputs": [{"name": "OUTPUT"}],
    }

    def ask(address: str, **more: str) -> tuple[bytes, list[tuple[str, str]]]:
        request = urllib.request.Request(
            f"http://{address}/v2/models/plain/infer",
            json.dumps({**text, **more}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read(), sorted(answer.getheaders())

    computed = ask(front["http"], id="a")
    cached = ask(front["http"], id="b")
    assert cached == (computed[0].replace(b'"id":"a"', b'"id":"b"'), computed[1])
    from_triton = ask(triton.endpoints.http, id="a")
    assert [name for name, _ in from_triton[1]] == [name for name, _ in computed[1]]


@BY_WAY
def test_what_is_asked_at_once_is_computed_once(front: dict[str, str], ask: Callable[..., Any]) -> None:
    until_cached(ask, front, "plain", [1.0, 0.0])
    before = figures(front, "plain")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: ask(front, "plain", [float(WAYS.index(ask)), 0.5, 9.0]), range(8)))

    assert len({numbers(each) for each in answers}) == 1
    after = figures(front, "plain")
    assert after["miss"] - before["miss"] == 1
    assert after["joined"] + after["hit"] - before["joined"] - before["hit"] == 7
    assert figures(front, "plain", "pilot_cache_saved_seconds_total")["plain"] > 1


@pytest.mark.parametrize("ask", WAYS[:2], ids=["http", "grpc"])
def test_an_error_is_not_kept_and_those_who_waited_ask_for_themselves(
    front: dict[str, str], ask: Callable[..., Any]
) -> None:
    def refused(_: int) -> str:
        with pytest.raises(InferenceServerException, match="negative"):
            ask(front, "plain", [-1.0, 0.2])
        return "refused"

    before = numbers(until_cached(ask, front, "plain", [11.0, 0.0, float(WAYS.index(ask))]))[0]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(refused, range(4))) == ["refused"] * 4
    refused(0)
    assert numbers(ask(front, "plain", [12.0, 0.0, float(WAYS.index(ask))]))[0] == before + 6


def test_who_waits_for_another_has_a_deadline_of_his_own(front: dict[str, str]) -> None:
    until_cached(over_http, front, "plain", [1.0, 0.0])
    until_cached(over_grpc, front, "plain", [1.0, 0.0])
    for ask, late, more in (
        (over_http, "same request is under way", {"headers": {"tritonpilot-deadline-ms": "100"}}),
        (over_grpc, "(?i)deadline", {"client_timeout": 0.1}),
    ):
        first = threading.Thread(target=ask, args=(front, "plain", [2.0, 1.0]))
        first.start()
        time.sleep(0.3)
        began = time.monotonic()
        with pytest.raises(InferenceServerException, match=late):
            ask(front, "plain", [2.0, 1.0], **more)
        assert time.monotonic() - began < 0.5
        first.join()
        assert numbers(ask(front, "plain", [2.0, 1.0]))[1] == 1


def test_who_asked_first_may_leave(front: dict[str, str]) -> None:
    until_cached(over_grpc, front, "plain", [1.0, 0.0])

    async def leave() -> None:
        async with tritonclient.grpc.aio.InferenceServerClient(front["grpc"]) as client:
            tensor = tritonclient.grpc.InferInput("INPUT", [1, 2], "FP32")
            tensor.set_data_from_numpy(np.array([[4.0, 0.6]], np.float32))
            task = asyncio.ensure_future(client.infer("plain", [tensor]))
            await asyncio.sleep(0.2)
            task.cancel()

    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(asyncio.run, leave())
        time.sleep(0.4)
        assert numbers(over_grpc(front, "plain", [4.0, 0.6]))[1] == 1
        leaving.result()


def test_a_better_class_does_not_wait_behind_a_lower_one(front: dict[str, str]) -> None:
    until_cached(over_grpc, front, "classes", [1.0, 0.0])
    with ThreadPoolExecutor(3) as threads:
        before = figures(front, "classes")
        lower = threads.submit(over_grpc, front, "classes", [5.0, 0.5], priority=2)
        time.sleep(0.2)
        better = threads.submit(over_grpc, front, "classes", [5.0, 0.5], priority=1)
        time.sleep(0.1)
        behind = threads.submit(over_grpc, front, "classes", [5.0, 0.5], priority=2)
        answers = [numbers(each.result()) for each in (lower, better, behind)]
    after = figures(front, "classes")
    assert answers[0] != answers[1]
    assert answers[2] == answers[1], "it waits for the better one, which goes first"
    assert after["miss"] - before["miss"] == 2


def test_no_tenant_gets_an_answer_of_anothers(triton: EmbeddedServer, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(TENANTS)
    with entry(triton, "--tenants", str(tenants)) as front:
        for ask in WAYS:
            value = [1.0, 0.0, 7.0]
            shop = numbers(until_cached(ask, front, "plain", value, key="tp_shop"))
            bank = numbers(until_cached(ask, front, "plain", value, key="tp_bank"))
            assert shop != bank
            assert numbers(ask(front, "plain", value, key="tp_shop")) == shop
            with ThreadPoolExecutor(2) as threads:
                both = threads.map(
                    lambda key, ask=ask: numbers(ask(front, "plain", [2.0, 0.3, 7.0], key=key)), ("tp_shop", "tp_bank")
                )
                assert len(set(both)) == 2, "nor does one wait for the other's"


def test_sequences_are_not_cached(front: dict[str, str]) -> None:
    until_cached(over_grpc, front, "plain", [6.0, 0.0])
    before = figures(front, "plain")["uncacheable"]
    for _ in range(2):
        over_grpc(front, "plain", [6.0, 0.0], sequence_id=7, sequence_start=True)
        over_http(front, "plain", [6.0, 0.0], sequence_id=7, sequence_start=True)
    assert figures(front, "plain")["uncacheable"] == before + 4


def changing(name: str, repository: Path, control: Control) -> dict[str, Callable[[], None]]:
    """Ways to put another model behind a name. All answer a third number of 1 afterwards."""
    folder = repository / name

    def new_version() -> None:
        (folder / "2").mkdir()
        (folder / "2" / "model.py").write_text(MODEL.replace("MARK", "1"))
        control.load(name)

    def in_place() -> None:
        (folder / "1" / "model.py").write_text(MODEL.replace("MARK", "1"))
        control.unload(name)
        control.load(name)

    return {"versioned": new_version, "replaced": in_place, "inner": in_place}


@pytest.mark.parametrize(
    ("asked", "changed"),
    [
        ("versioned", "versioned"),
        pytest.param("replaced", "replaced", marks=pytest.mark.proof),
        pytest.param("outer", "inner", marks=pytest.mark.proof),
    ],
    ids=["version", "in place", "step"],
)
def test_no_answer_of_the_old_model_comes_later_than_the_lease(
    triton: EmbeddedServer, front: dict[str, str], asked: str, changed: str
) -> None:
    for ask in WAYS:
        until_cached(ask, front, asked, [1.0, 0.0])
    stop, stale, last = threading.Event(), [], [0.0]

    def keep_asking(ask: Callable[..., Any]) -> None:
        while not stop.is_set():
            began = time.monotonic()
            try:
                answer = numbers(ask(front, asked, [1.0, 0.0]))
            except InferenceServerException:
                continue  # unloaded
            if answer[2] == 0:
                stale.append(began)
            last[0] = began

    threads = [threading.Thread(target=keep_asking, args=(ask,)) for ask in WAYS]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        with Control(triton.endpoints.grpc, triton.control_key) as control:
            changing(changed, triton.repository, control)[changed]()
            changed_s = time.monotonic()
        until = changed_s + CACHE_LEASE_S + 1
        while last[0] < until and time.monotonic() < until + PATIENCE_S:
            time.sleep(0.05)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert last[0] >= until
    assert stale, "nothing was asked before the change"
    assert max(stale) < changed_s + CACHE_LEASE_S
    for ask in WAYS:
        assert numbers(until_cached(ask, front, asked, [1.0, 0.0]))[2] == 1
    assert figures(front, asked, "pilot_cache_renewals_total")[asked] >= 1


def test_the_cache_stays_within_its_bytes(front: dict[str, str]) -> None:
    with tritonclient.grpc.InferenceServerClient(front["grpc"]) as client:
        until_cached(over_grpc, front, "plain", [1.0, 0.0])
        for number in range(700):
            tensor = tritonclient.grpc.InferInput("INPUT", [1, 2], "FP32")
            tensor.set_data_from_numpy(np.array([[number + 10, 0]], np.float32))
            client.infer("plain", [tensor])
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not 0 < figures(front, "plain", "pilot_cache_bytes")["plain"] <= 2**18:
        time.sleep(0.1)
    assert 0.5 * 2**18 < figures(front, "plain", "pilot_cache_bytes")["plain"] <= 2**18
    assert figures(front, "plain", "pilot_cache_evictions_total")["plain"] > 200
    assert numbers(over_grpc(front, "plain", [1.0, 0.0]))[1] == 1
