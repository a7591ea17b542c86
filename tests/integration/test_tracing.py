"""Traces of the real Triton at an OTLP receiver: through an ensemble, a driver and the entry, over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from loop_thread import LoopThread
from otlp import Receiver, Span

from tritonpilot.entry.desk import Desk
from tritonpilot.entry.gate import Gate
from tritonpilot.entry.grpc_front import GrpcFront
from tritonpilot.entry.http_front import HttpFront
from tritonpilot.entry.metrics import EntryMetrics
from tritonpilot.errors import ServerError
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
STEP = """
backend: "python"
max_batch_size: 8
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU}]
"""
SAMPLED = STEP + 'parameters { key: "pilot_trace_rate" value { string_value: "2" } }\n'
ENSEMBLE = """
platform: "ensemble"
max_batch_size: 8
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
ensemble_scheduling {
  step [
    {model_name: "first" model_version: -1 input_map {key: "INPUT" value: "INPUT"} output_map {key: "OUTPUT" value: "half"}},
    {model_name: "second" model_version: -1 input_map {key: "INPUT" value: "half"} output_map {key: "OUTPUT" value: "OUTPUT"}}
  ]
}
"""
# Calls "first" twice, from threads of its own.
DRIVER = """
from concurrent.futures import ThreadPoolExecutor

from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend


class Driver(Backend):
    def set_up(self, context):
        self.infer = context.infer
        self.threads = ThreadPoolExecutor(2)

    def decode(self, inputs):
        return inputs["INPUT"]

    def predict(self, items):
        ask = lambda item: self.infer("first", {"INPUT": item}, ["OUTPUT"])["OUTPUT"]
        return [a + b for a, b in zip(self.threads.map(ask, items), self.threads.map(ask, items))]

    def encode(self, result):
        return {"OUTPUT": result}

    def tear_down(self):
        self.threads.shutdown()


TritonPythonModel = triton_model(Driver)
"""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def served(
    receiver: Receiver, tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]
) -> Iterator[EmbeddedServer]:
    root = tmp_path_factory.mktemp("tracing") / "model_repository"
    make_model(root, "first", config=STEP)
    make_model(root, "second", config=SAMPLED)
    make_model(root, "driver", DRIVER, STEP)
    both = make_model(root, "both", "", ENSEMBLE)
    (both / "1" / "model.py").unlink()
    # Triton sends spans every 5 s, or as this says.
    often = ["--trace-config=opentelemetry,bsp_schedule_delay=100"]
    with EmbeddedServer(root, trace_url=receiver.url, extra_args=often) as server:
        yield server
        server.check_alive()


def contexts(module: Any) -> list[str]:
    """Trace contexts of as many requests as it takes that Triton takes one for what it is; over gRPC it loses 2 to 5 %."""
    return [
        f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01" for _ in range(5 if module is tritonclient.grpc else 1)
    ]


def ask(url: str, module: Any, model: str, headers: dict[str, str] | None = None) -> float:
    with module.InferenceServerClient(url) as client:
        tensor = module.InferInput("INPUT", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
        return float(client.infer(model, [tensor], headers=headers).as_numpy("OUTPUT")[0, 0])


def endpoint(server: EmbeddedServer, module: Any) -> str:
    return server.endpoints.http if module is tritonclient.http else server.endpoints.grpc


def models_by_depth(spans: list[Span], traceparent: str) -> list[set[str]]:
    """Models of the spans below the caller's own: of its children, of theirs, and so on."""
    parents, found = {traceparent.split("-")[2]}, []
    while children := [span for span in spans if span.parent_id in parents]:
        if models := {span.model for span in children} - {""}:
            found.append(models)
        parents = {span.span_id for span in children}
    return found


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc])
def test_a_callers_trace_goes_through_all_steps_of_an_ensemble(
    served: EmbeddedServer, receiver: Receiver, module: Any
) -> None:
    sent = contexts(module)
    for traceparent in sent:
        ask(endpoint(served, module), module, "both", {"traceparent": traceparent})

    traceparent, spans = receiver.first(sent, 6)
    assert models_by_depth(spans, traceparent) == [{"both"}, {"first", "second"}]
    assert sorted(span.name for span in spans if not span.model) == ["InferRequest", "compute", "compute"]


def test_a_driver_passes_its_callers_trace_on(served: EmbeddedServer, receiver: Receiver) -> None:
    (traceparent,) = contexts(tritonclient.http)
    ask(served.endpoints.http, tritonclient.http, "driver", {"traceparent": traceparent, "tracestate": "shop=7"})

    _, spans = receiver.first([traceparent], 7)
    assert models_by_depth(spans, traceparent) == [{"driver"}, {"first"}]
    assert [span.model for span in spans].count("first") == 2
    assert {span.state for span in spans} == {"shop=7"}


def test_a_driver_survives_many_callers_of_whom_some_are_traced(served: EmbeddedServer, receiver: Receiver) -> None:
    traces = [secrets.token_hex(16) for _ in range(40)]
    headers = [{"traceparent": f"00-{trace}-{secrets.token_hex(8)}-01"} for trace in traces]
    asked = [pair for each in headers for pair in (each, None)]

    def call(mine: list[dict[str, str] | None]) -> None:
        for each in mine:
            ask(served.endpoints.http, tritonclient.http, "driver", each)

    callers = [threading.Thread(target=call, args=(asked[first::8],)) for first in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    def have_all() -> bool:
        return {span.trace_id for span in receiver.spans if span.model == "driver"} >= set(traces)

    assert receiver.until(have_all)
    served.check_alive()


def test_one_of_so_many_requests_is_traced_as_the_service_says(served: EmbeddedServer, receiver: Receiver) -> None:
    def roots(model: str) -> int:
        begun_here = {span.trace_id for span in receiver.spans if not span.parent_id}
        return sum(span.model == model and span.trace_id in begun_here for span in receiver.spans)

    for _ in range(10):
        ask(served.endpoints.grpc, tritonclient.grpc, "second")
        ask(served.endpoints.grpc, tritonclient.grpc, "first")

    assert receiver.until(lambda: roots("second") == 5)
    assert roots("first") == 0


def test_a_load_sets_the_rate_and_the_containers_script_does_the_same(
    served: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "deploy" / "triton"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    import trace_rates  # type: ignore[import-not-found]

    (tmp_path / "key").write_text(served.control_key + "\n")
    header = {f"triton-grpc-protocol-{served.control_header}": served.control_key}

    def rate(change: int = 0) -> list[str]:
        settings = {"trace_rate": str(change)} if change else {}
        with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
            update = client.update_trace_settings
            found = update("second", settings, header, as_json=True)
        return list(found["settings"]["trace_rate"]["value"])

    assert rate(9) == ["9"]
    assert trace_rates.main(f"http://{served.endpoints.http}", str(tmp_path / "key")) is None
    assert rate() == ["2"]
    rate(9)
    served.load("second")
    assert rate() == ["2"]


def test_the_entry_passes_a_callers_trace_on_and_drops_what_is_none(served: EmbeddedServer, receiver: Receiver) -> None:
    not_sampled = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"
    none = ["00-x-y-01", f"00-{'0' * 32}-{'1' * 16}-01", not_sampled]
    with _Entry(served) as entry:
        for module, url in ((tritonclient.http, entry.http), (tritonclient.grpc, entry.grpc)):
            sent = contexts(module)
            for value in (*none, *sent):
                ask(url, module, "first", {"traceparent": value, "tracestate": "shop=7,,bank=a b"})
            traceparent, spans = receiver.first(sent, 3)
            assert models_by_depth(spans, traceparent) == [{"first"}]
            assert {span.state for span in spans} == ({"shop=7,bank=a b"} if module is tritonclient.http else {""})

    assert not [span for span in receiver.spans if span.trace_id in not_sampled]


def test_a_receiver_that_is_no_url_is_refused(served: EmbeddedServer) -> None:
    with pytest.raises(ServerError, match="must be a URL such as http://127.0.0.1:4318/v1/traces. Nothing was started"):
        EmbeddedServer(served.repository, trace_url="127.0.0.1:4318").start()


def test_requests_are_answered_when_the_receiver_is_gone(served: EmbeddedServer, receiver: Receiver) -> None:
    receiver.close()

    assert [ask(served.endpoints.http, tritonclient.http, "second") for _ in range(8)] == [0.0] * 8
    served.check_alive()


class _Entry(LoopThread):
    """Both fronts of an entry, in a thread."""

    def __init__(self, server: EmbeddedServer) -> None:
        super().__init__()
        self._server = server

    async def start(self) -> None:
        loop, triton = asyncio.get_running_loop(), self._server.endpoints
        gate = Gate(
            time.monotonic, lambda at_s, call: loop.call_later(max(0.0, at_s - time.monotonic()), call), EntryMetrics()
        )
        self._desk = Desk(gate, triton.http, None)
        self._fronts = HttpFront(self._desk, triton.http), GrpcFront(self._desk, triton.grpc)
        self.http, self.grpc = [f"127.0.0.1:{await front.start('127.0.0.1', 0)}" for front in self._fronts]

    async def close(self) -> None:
        for front in self._fronts:
            await front.close(0)
        await self._desk.close()
