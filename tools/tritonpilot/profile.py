"""What do requests and executions of a served model cost here? A few seconds of a real server, as Costs.

    found = profile(server, "ctr", samples.read(path), max_batch_size=256)
    found.costs.write(Path("build/costs-ctr.json"))

The server must have nothing else to do. Bursts of requests of one size are sent over HTTP, one burst after the other is answered:
of one request with more and more rows, and of more and more requests with one row. Triton's statistics say how long executions of
each size took, /proc how much CPU time tritonserver and the model's stubs used, and the clock how long the answer took.
"""

from __future__ import annotations

import itertools
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype

from tritonpilot import machine
from tritonpilot.control import Control, ModelStatistics
from tritonpilot.costs import SHARES, Costs, FloatArray, mean_of
from tritonpilot.errors import MeasurementError
from tritonpilot.server import EmbeddedServer

Arrays = Mapping[str, npt.NDArray[Any]]

PASSES = (
    7  # over all shapes, each for a moment: a machine that is slow for a while is so for all of them, in few passes
)
MOMENT_S = 0.06
LEAST_BURSTS = 3  # in a moment
LONG_US = 50_000.0  # bursts that take longer are sent twice
# Between bursts: executions back to back are faster than those of a load, after long rests slower, and after 1 ms the waker of
# models with classes (docs/adr/0003-waker.md) begins to work.
PAUSE_S = 0.0004
MOST_ROWS = 64  # steps between sizes are 2 up to here, 4 beyond
TOGETHER = (2, 4, 8, 16)
REPLY_SHARE = 0.4  # of the front end's CPU time for a request; the rest is spent before the queue
MOST_FACTOR = 10.0
TIMEOUT_S = 60.0
VARIANTS, VARIANTS_BYTES = 64, 64 << 20  # different requests of a size


@dataclass(frozen=True)
class Burst:
    """Equal requests sent at once, many times over. Times are us: medians over the passes of their means."""

    rows: int  # of each request
    requests: int
    bursts: int
    latency_us: float  # until the last answer
    queue_us: float  # of a request
    executing_us: float  # of all executions of a burst
    executions: float  # of a burst
    server_cpu_us: float  # for a burst
    stub_cpu_us: float
    spread: FloatArray  # latencies less their pass's mean, us


@dataclass(frozen=True)
class Profile:
    """What was measured, and what it comes to."""

    model: str
    costs: Costs
    bursts: tuple[Burst, ...]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        shown = [{name: value for name, value in vars(burst).items() if name != "spread"} for burst in self.bursts]
        return {"model": self.model, "costs": self.costs.as_dict(), "bursts": shown, "seconds": round(self.seconds, 1)}


def profile(
    server: EmbeddedServer,
    model: str,
    samples: Arrays,
    *,
    max_batch_size: int,
    cores: int = 1,
    is_on_cpu: bool = True,
    passes: int = PASSES,
    on_progress: Callable[[str], None] | None = None,
) -> Profile:
    """Measure the model as it is served now. `cores`: how many the server may use; `is_on_cpu`: what its executions run on.

    The queue should delay requests for about 0.5 ms, so that 16 at once become one batch, and refuse none of them. Raises
    MeasurementError when a request fails, ServerError when the server is gone.
    """
    say = on_progress or (lambda _: None)
    began = time.monotonic()
    shapes = shapes_of(max_batch_size)
    with _Caller(server, model, samples) as caller:
        caller.once(shapes)
        found = []
        for number in range(1, passes + 1):
            say(f"profiling {model!r}: pass {number} of {passes} over {len(shapes)} shapes of requests")
            found.append(caller.once(shapes))
    bursts = [_median([each[place] for each in found]) for place in range(len(shapes))]
    costs = replace(fit(bursts, cores=cores, is_on_cpu=is_on_cpu), guard_us=machine.slice_us())
    return Profile(model, costs, tuple(bursts), time.monotonic() - began)


def speed(server: EmbeddedServer, model: str, samples: Arrays, known: Profile, *, max_rows: int = MOST_ROWS) -> float:
    """How much longer things take now than when `known` was measured: 1.1 is 10 % slower.

    CPU times of one request of up to `max_rows` rows are compared, so that the queue's settings do not matter. Half a second.
    """
    alone = [each for each in known.bursts if each.requests == 1 and each.rows <= max_rows]
    before = max((each for each in alone if each.latency_us <= LONG_US), key=lambda each: each.rows, default=alone[0])
    with _Caller(server, model, samples) as caller:
        now = [caller.once([(before.rows, 1)])[0] for _ in range(PASSES)]
    return _cpu_us(_median(now)) / _cpu_us(before)


def shapes_of(max_batch_size: int) -> list[tuple[int, int]]:
    """(rows, requests) of the bursts for a model of that batch size: one request of many rows, and many of one."""
    sizes, size = [], 1
    while size < max_batch_size:
        sizes.append(size)
        size *= 2 if size < MOST_ROWS else 4
    return [(rows, 1) for rows in [*sizes, max_batch_size]] + [
        (1, count) for count in TOGETHER if count <= max_batch_size
    ]


def fit(bursts: Sequence[Burst], *, cores: int, is_on_cpu: bool) -> Costs:
    """Costs from bursts.

    One request alone gives the time of an execution by its rows, several together what each of them adds. What tritonserver
    and the stubs compute besides executions is the front end's, before and after them, as far as it grows with the requests; the
    rest, such as the batcher's thread, comes with each execution, and on the CPU it is counted as a part of it.
    """
    alone = sorted((burst for burst in bursts if burst.requests == 1), key=lambda burst: burst.rows)
    first, together = alone[0], [burst for burst in bursts if burst.rows == 1]
    rows = np.array([burst.rows for burst in alone], dtype=np.float64)
    curve = np.array([burst.executing_us for burst in alone])
    more = []
    for burst in together:
        if burst.requests > burst.executions:  # of the same size all, or nearly
            each = burst.requests / burst.executions
            more.append(
                (
                    burst.requests - burst.executions,
                    burst.executing_us - burst.executions * float(np.interp(each, rows, curve)),
                )
            )
    request_us = max(0.0, _slope(more)) if more else 0.0
    curve = np.maximum.accumulate(np.maximum(curve - request_us, 1.0))
    besides = 0.0
    if is_on_cpu:
        host = host_request = front_row = 0.0
        rest = [(burst.requests, _cpu_us(burst) - burst.executing_us) for burst in together]
        front, besides = (max(0.0, value) for value in (_line(rest) if len(rest) > 1 else (rest[0][1], 0.0)))
        curve = curve + besides
    else:
        per_request, _ = _line([(burst.requests, burst.server_cpu_us) for burst in together])
        front = max(0.0, per_request)
        host_request = max(0.0, _line([(burst.requests, burst.stub_cpu_us) for burst in together])[0])
        host = max(0.0, _cpu_us(first) - front - host_request)
        by_rows = [(burst.rows - 1, burst.server_cpu_us - first.server_cpu_us) for burst in alone if burst.rows > 1]
        front_row = max(0.0, _slope(by_rows)) if by_rows else 0.0
    return Costs(
        rows=tuple(burst.rows for burst in alone),
        execution_us=tuple(float(value) for value in curve),
        request_us=request_us,
        factor=_factor(alone),
        front_us=front * (1 - REPLY_SHARE),
        front_row_us=front_row,
        reply_us=front * REPLY_SHARE,
        wire_us=max(0.0, first.latency_us - first.queue_us - first.executing_us - front),
        cores=cores,
        is_on_cpu=is_on_cpu,
        host_us=host,
        host_request_us=host_request,
    )


class _Caller:
    """Connections to the server, and readings of what it did meanwhile."""

    def __init__(self, server: EmbeddedServer, model: str, samples: Arrays) -> None:
        self._server, self._model, self._samples = server, model, samples
        self._stack = ExitStack()
        self._sockets: list[socket.socket] = []
        self._bodies: dict[int, Iterator[bytes]] = {}

    def __enter__(self) -> _Caller:
        self._control = self._stack.enter_context(Control(self._server.endpoints.grpc))
        host, _, port = self._server.endpoints.http.rpartition(":")
        for _ in range(max(TOGETHER)):
            connection = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.append(self._stack.enter_context(connection))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def once(self, shapes: Sequence[tuple[int, int]]) -> list[Burst]:
        """Every shape for a moment."""
        return [self._measure(rows, requests) for rows, requests in shapes]

    def _measure(self, rows: int, requests: int) -> Burst:
        if rows not in self._bodies:
            self._bodies[rows] = itertools.cycle(_requests(self._model, self._samples, rows))
        stats, cpu = self._read(), self._cpu_us()
        latencies = self._run(self._bodies[rows], requests, 0.0, 1)  # what came before is out of the caches
        if latencies[0] > LONG_US:  # caches do not matter to it, and time does
            latencies = np.append(latencies, self._run(self._bodies[rows], requests, 0.0, 1))
        else:
            stats, cpu = self._read(), self._cpu_us()
            latencies = self._run(self._bodies[rows], requests, MOMENT_S, LEAST_BURSTS)
        now, cpu_now = self._read(), self._cpu_us()
        count = len(latencies)
        widened = math.sqrt(count / (count - 1))  # a mean of few lies too near to each of them
        return Burst(
            rows=rows,
            requests=requests,
            bursts=count,
            latency_us=float(latencies.mean()),
            queue_us=(now.queue.ns - stats.queue.ns) / 1e3 / count / requests,
            executing_us=(sum(now.batch_ns.values()) - sum(stats.batch_ns.values())) / 1e3 / count,
            executions=(now.execution_count - stats.execution_count) / count,
            server_cpu_us=(cpu_now[0] - cpu[0]) / count,
            stub_cpu_us=(cpu_now[1] - cpu[1]) / count,
            spread=(latencies - latencies.mean()) * widened,
        )

    def _run(self, bodies: Iterator[bytes], requests: int, seconds: float, least: int) -> FloatArray:
        """Burst after burst of the next requests, for `seconds` and at least so many; the latency of each, us."""
        used = self._sockets[:requests]
        found: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(found) < least:
            sent = [next(bodies) for _ in used]
            began = time.perf_counter()
            try:
                for connection, body in zip(used, sent, strict=True):
                    connection.sendall(body)
                for connection in used:
                    _read_answer(connection, self._model)
            except OSError as error:
                self._server.check_alive()
                raise MeasurementError(
                    f"A request to {self._model!r} was not answered ({error}). Its costs are not known. Look at the server's log."
                ) from error
            found.append((time.perf_counter() - began) * 1e6)
            time.sleep(PAUSE_S)
        return np.array(found)

    def _read(self) -> ModelStatistics:
        return self._control.statistics(self._model)[-1]

    def _cpu_us(self) -> tuple[float, float]:
        """CPU time so far: of tritonserver, and of the model's stubs."""
        stubs = machine.stub_pids(self._server.pid).get(self._model, [])
        return _threads_us(self._server.pid), sum(_threads_us(pid) for pid in stubs)


def _threads_us(pid: int) -> float:
    """CPU time of the threads of a process that live now (schedstat of proc(5): ns on the CPU), us."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread may end in between
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e3


def _requests(model: str, samples: Arrays, rows: int) -> list[bytes]:
    """HTTP requests for so many of the samples' rows each, made of the samples in turn as a load is: texts differ in length."""
    available = len(next(iter(samples.values())))
    row_bytes = sum(array.nbytes for array in samples.values()) / available
    different = math.ceil(available / math.gcd(available, rows))
    count = max(1, min(VARIANTS, different, int(VARIANTS_BYTES / max(1.0, row_bytes * rows))))
    return [_request(model, samples, range(start, start + rows)) for start in range(0, count * rows, rows)]


def _request(model: str, samples: Arrays, rows: range) -> bytes:
    """An HTTP request for these rows of the samples, from the beginning again after the last, as bytes."""
    inputs = []
    for name, array in samples.items():
        taken = array.take(rows, axis=0, mode="wrap")
        if taken.dtype.kind in "SU":
            taken = taken.astype(np.object_)
        tensor = httpclient.InferInput(name, list(taken.shape), np_to_triton_dtype(taken.dtype))
        tensor.set_data_from_numpy(taken)
        inputs.append(tensor)
    body, json_size = httpclient.InferenceServerClient.generate_request_body(inputs)
    head = f"POST /v2/models/{model}/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    if json_size is not None:
        head += f"Inference-Header-Content-Length: {json_size}\r\n"
    return f"{head}\r\n".encode() + bytes(body)


def _read_answer(connection: socket.socket, model: str) -> None:
    """Raises MeasurementError for an answer that is an error, OSError when the connection ends."""
    data = b""
    while b"\r\n\r\n" not in data:
        got = connection.recv(65536)
        if not got:
            raise ConnectionResetError("the server closed the connection")
        data += got
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")), 0)
    while len(body) < length:
        got = connection.recv(1 << 20)
        if not got:
            raise ConnectionResetError("the server closed the connection")
        body += got
    if b" 200 " not in lines[0]:
        said = body[:300].decode(errors="replace")
        raise MeasurementError(
            f"The model {model!r} answered a sample with {lines[0].decode(errors='replace')}: {said}. Its costs are not known. "
            "Correct its samples, or its queue's limits."
        )


def _median(bursts: Sequence[Burst]) -> Burst:
    """One burst out of those of several passes."""
    names = ("latency_us", "queue_us", "executing_us", "executions", "server_cpu_us", "stub_cpu_us")
    found: dict[str, Any] = {name: float(np.median([getattr(burst, name) for burst in bursts])) for name in names}
    spread = np.concatenate([burst.spread for burst in bursts])
    return replace(bursts[0], bursts=sum(burst.bursts for burst in bursts), spread=spread, **found)


def _cpu_us(burst: Burst) -> float:
    return burst.server_cpu_us + burst.stub_cpu_us


def _factor(alone: Sequence[Burst]) -> tuple[float, ...]:
    """Quantiles of an execution's time divided by its mean, from how the latencies of single requests spread.

    Sizes whose latency is mostly execution count, each as much as the other. What is rarer than 1 in 100 is the machine's.
    """
    most = max(burst.executing_us / burst.latency_us for burst in alone)
    shares = np.linspace(0, 1, SHARES)
    known = [burst for burst in alone if burst.executing_us / burst.latency_us >= 0.9 * most]
    middle = np.median([np.quantile(burst.spread, shares) / burst.executing_us for burst in known], axis=0) + 1
    middle[-1] = 2 * middle[-2] - middle[-3]
    middle = np.maximum.accumulate(np.clip(middle, 0.0, MOST_FACTOR))
    return tuple(float(value) for value in middle / mean_of(middle))


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares through the origin."""
    x, y = np.array(points, dtype=np.float64).T
    return float((x * y).sum() / (x * x).sum())


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Least squares: slope and constant; the slope through the origin of a single point."""
    if len(points) < 2:
        return _slope(points), 0.0
    x, y = np.array(points, dtype=np.float64).T
    slope, constant = np.polyfit(x, y, 1)
    return float(slope), float(constant)
