"""What does one row cost, and who takes it? CPU time of single-row ctr requests over HTTP and gRPC, taken apart in one pinned run.

Five things take turns of a quarter second on the server's core: ctr over HTTP, ctr over gRPC, a model that answers a constant
(what remains of a stub without a model), health questions over both protocols (what remains of tritonserver without an
inference), and ONNX Runtime alone. Differences between them are the parts.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import grpc  # type: ignore[import-untyped]
import numpy.typing as npt
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import np_to_triton_dtype

from perf import machine
from perf.closed_loop import ClosedLoop
from perf.frame import Bench, Outcome, median, spread
from perf.inprocess import InProcess
from perf.subjects import built, cut, model_file, sample_rows, services, serving_from
from tritonpilot.server import EmbeddedServer

CALLERS = 8
ROUNDS = 3
TURNS = 5
QUICK_TURNS = 2
TURN_S = 0.25
FLOOR = "floor"

FLOOR_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.answer = np.zeros((1, 1), np.float32)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("prob", self.answer)]) for _ in requests]
"""
FLOOR_CONFIG = """
backend: "python"
max_batch_size: 256
dynamic_batching { max_queue_delay_microseconds: 500 }
input [{ name: "dense" data_type: TYPE_FP32 dims: [28] }, { name: "categorical" data_type: TYPE_INT64 dims: [8] }]
output [{ name: "prob" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""


class Load(Protocol):
    """What keeps the server busy for a turn."""

    def run(self, seconds: float) -> int:
        """Requests answered."""


@dataclass
class Cost:
    """CPU seconds of the server's processes over the turns of one load."""

    requests: int = 0
    front_s: float = 0.0
    stub_s: float = 0.0

    @property
    def front_us(self) -> float:
        return self.front_s / self.requests * 1e6

    @property
    def stub_us(self) -> float:
        return self.stub_s / self.requests * 1e6


def single_row_cost(bench: Bench) -> Outcome:
    """CPU time of a single-row request over HTTP, tritonserver and stub together, in calls of ONNX Runtime in process."""
    service = services(["ctr"])["ctr"]
    rows = sample_rows(service)
    batches = [cut(rows, start, 1) for start in range(256)]
    with ExitStack() as stack:
        root = stack.enter_context(built(bench.say, ["ctr"]))
        _write_floor(root)
        served = stack.enter_context(serving_from(root, bench, is_pinned=True))
        server, endpoints = served.server, served.server.endpoints
        loads: dict[str, Load] = {
            "http": stack.enter_context(ClosedLoop(endpoints.http, "ctr", batches, CALLERS)),
            "grpc": stack.enter_context(GrpcLoop(endpoints.grpc, _request("ctr", batches[0]))),
            "floor_http": stack.enter_context(ClosedLoop(endpoints.http, FLOOR, batches, CALLERS)),
            "floor_grpc": stack.enter_context(GrpcLoop(endpoints.grpc, _request(FLOOR, batches[0]))),
            "health_http": stack.enter_context(HttpHealth(endpoints.http)),
            "health_grpc": stack.enter_context(GrpcLoop(endpoints.grpc, None)),
        }
        gathered = {protocol: round(_mean_batch(server, loads[protocol])) for protocol in ("http", "grpc")}
        alone = {}
        for count in {1, *gathered.values()}:
            alone[count] = stack.enter_context(InProcess(model_file(service), bench.cores.server))
            alone[count].prepare([cut(rows, start, count) for start in range(0, 64 * count, count)])
        turns = QUICK_TURNS if bench.quick else TURNS
        rounds = bench.rounds(ROUNDS, lambda: _round(server.pid, loads, alone, turns), check=server.check_alive)
    taken = [_parts(costs, row_us, gathered) for costs, row_us in rounds]
    ratios = [(costs["http"].front_us + costs["http"].stub_us) / row_us[1] for costs, row_us in rounds]
    return Outcome(
        median(ratios),
        spread(ratios),
        len(rounds),
        details={
            "us_per_request": {
                protocol: {
                    part: round(median([each[protocol][part] for each in taken]), 1) for part in taken[0][protocol]
                }
                for protocol in ("http", "grpc")
            },
            "in_process_us_per_call": round(median([row_us[1] for _, row_us in rounds]), 1),
            "grpc_of_in_process": round(
                median([(costs["grpc"].front_us + costs["grpc"].stub_us) / row_us[1] for costs, row_us in rounds]), 3
            ),
            "mean_executed_batch": gathered,
            "callers": CALLERS,
            "parts": {
                "transport": "tritonserver, per health question over the same protocol",
                "scheduling_and_ipc": "tritonserver, what an inference costs beyond that",
                "ipc_in_stub": "the stub of a model that answers a constant",
                "model": "ONNX Runtime in process at the mean executed batch, per row",
                "python": "what remains of ctr's stub: reading, gathering, waking, answering",
            },
        },
    )


def _parts(
    costs: Mapping[str, Cost], row_us: Mapping[int, float], gathered: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    found = {}
    for protocol in ("http", "grpc"):
        ctr, floor, health = costs[protocol], costs[f"floor_{protocol}"], costs[f"health_{protocol}"]
        model = row_us[gathered[protocol]]
        found[protocol] = {
            "total": ctr.front_us + ctr.stub_us,
            "transport": health.front_us,
            "scheduling_and_ipc": ctr.front_us - health.front_us,
            "ipc_in_stub": floor.stub_us,
            "model": model,
            "python": ctr.stub_us - floor.stub_us - model,
        }
    return found


def _round(
    pid: int, loads: Mapping[str, Load], alone: Mapping[int, InProcess], turns: int
) -> tuple[dict[str, Cost], dict[int, float]]:
    costs = {name: Cost() for name in loads}
    sums = {count: [0, 0.0] for count in alone}
    for _ in range(turns):
        for name, load in loads.items():
            front, stubs = machine.process_cpu_s(pid), sum(machine.stub_cpu_s(pid).values())
            costs[name].requests += load.run(TURN_S)
            costs[name].front_s += machine.process_cpu_s(pid) - front
            costs[name].stub_s += sum(machine.stub_cpu_s(pid).values()) - stubs
        for count, process in alone.items():
            done, cpu_s = process.run(TURN_S)
            sums[count][0] += done
            sums[count][1] += cpu_s
    return costs, {count: cpu_s / done * 1e6 for count, (done, cpu_s) in sums.items()}


def _mean_batch(server: EmbeddedServer, load: Load) -> float:
    load.run(TURN_S)
    (before,) = server.statistics("ctr")
    load.run(2 * TURN_S)
    (after,) = server.statistics("ctr")
    executions = after.execution_count - before.execution_count
    return (after.inference_count - before.inference_count) / max(1, executions)


def _write_floor(root: Path) -> None:
    folder = root / FLOOR
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(FLOOR_MODEL, encoding="utf-8")
    (folder / "config.pbtxt").write_text(FLOOR_CONFIG, encoding="utf-8")


def _request(model: str, inputs: Mapping[str, npt.NDArray[Any]]) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


class _Callers:
    """`CALLERS` threads that ask again as soon as they have their answer."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(CALLERS)

    def run(self, seconds: float) -> int:
        """Requests answered by calls that were begun within that time."""
        deadline = time.perf_counter() + seconds
        return sum(self._threads.map(lambda ask: self._repeat(ask, deadline), self.asks()))

    def asks(self) -> list[Callable[[], object]]:
        """What each caller does again and again."""
        raise NotImplementedError

    def _repeat(self, ask: Callable[[], object], deadline: float) -> int:
        answered = 0
        while time.perf_counter() < deadline:
            ask()
            answered += 1
        return answered

    def close(self) -> None:
        """End the threads and close the connections."""
        self._threads.shutdown()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class GrpcLoop(_Callers):
    """The same inference again and again over gRPC, encoded beforehand; without one, the question whether the server lives."""

    def __init__(self, endpoint: str, request: service_pb2.ModelInferRequest | None) -> None:
        super().__init__()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        self._channels = [grpc.insecure_channel(endpoint, options=options) for _ in range(CALLERS)]
        self._request = request

    def asks(self) -> list[Callable[[], object]]:
        stubs = [service_pb2_grpc.GRPCInferenceServiceStub(channel) for channel in self._channels]
        if self._request is None:
            return [lambda stub=stub: stub.ServerLive(service_pb2.ServerLiveRequest()) for stub in stubs]  # type: ignore[misc]
        return [lambda stub=stub: stub.ModelInfer(self._request) for stub in stubs]  # type: ignore[misc]

    def close(self) -> None:
        super().close()
        for channel in self._channels:
            channel.close()


class HttpHealth(_Callers):
    """The question whether the server lives, over connections that stay open."""

    def __init__(self, endpoint: str) -> None:
        super().__init__()
        self._connections = [http.client.HTTPConnection(endpoint, timeout=30) for _ in range(CALLERS)]

    def asks(self) -> list[Callable[[], object]]:
        return [lambda one=one: self._ask(one) for one in self._connections]  # type: ignore[misc]

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        connection.request("GET", "/v2/health/live")
        connection.getresponse().read()

    def close(self) -> None:
        super().close()
        for connection in self._connections:
            connection.close()
