"""Three Tritons behind the balancer: one is killed under load. Has everybody who may ask again an answer, and when is P99 back?

The callers: `tritonpilot.client` over HTTP and gRPC, which asks again itself; plain ones over both, which leave that to the
balancer by a header; and plain ones without it, whose requests are lost with their server: they show that the kill hit some.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import tritonclient.grpc.aio

from perf import callers, emulated
from perf.balancer import Balancer, balancing
from perf.callers import Body
from perf.frame import Bench, NoisyRoundError, Outcome
from perf.subjects import Entry
from tritonpilot.client import AsyncClient
from tritonpilot.errors import MeasurementError
from tritonpilot.ports import choose_ports
from tritonpilot.server import EmbeddedServer

MODEL = "emulated_v100"
SERVICES = {MODEL: "batching: {max_batch_size: 16}"}
SERVERS = 3
RETRY = {"tritonpilot-retry": "once"}
#: A stream that haproxy could not send on is refused (RST_STREAM, REFUSED_STREAM), and gRPC's own policy asks again.
ASKS_AGAIN = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 2,
                "initialBackoff": "0.02s",
                "maxBackoff": "0.02s",
                "backoffMultiplier": 1,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
RETRYABLE = ("client_http", "client_grpc", "http", "grpc")
LOST = "http_without_header"
PER_S = {**dict.fromkeys(RETRYABLE, 40.0), LOST: 200.0}  # two of the servers can do three times as much
DEADLINE_S = 5.0
STEADY_S, AFTER_S, ROUNDS = 15.0, 15.0, 3
QUICK_STEADY_S, QUICK_AFTER_S = 5.0, 7.0
WINDOW_S, STEP_S = 1.0, 0.1
NEVER_S = 999.0
#: P99 is back when it is at most so many times what it was before.
BACK = 1.5
BUSY = 12  # calls under way at the kill, which least connections spread evenly
ON_THE_WAY_S = 0.005  # until they have reached a server, where they take 13 ms
PATIENCE_S = 60.0

Ask = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class Call:
    """A call that was due at `at_s` of time.perf_counter; `error` is "" when it was answered."""

    group: str
    at_s: float
    latency_ms: float
    error: str


@dataclass(frozen=True)
class Killed:
    """What a kill did."""

    steady_p99_ms: float
    back_s: float
    """From the kill until P99 is back; NEVER_S when it is not."""
    left_out_s: float
    """Until the balancer knew."""
    calls: Mapping[str, int]
    failed: Mapping[str, int]
    errors: tuple[str, ...]
    """What the retryable calls that failed were told, each once."""
    most_ms: float
    """The longest of the retryable calls."""
    after_p99_ms: tuple[float, ...]
    """Of the retryable calls of each second after the kill."""


def balancer_kill(bench: Bench) -> Outcome:
    """Seconds from kill -9 of one of three Tritons until P99 is back; no retryable call fails."""
    steady_s, after_s = (QUICK_STEADY_S, QUICK_AFTER_S) if bench.quick else (STEADY_S, AFTER_S)
    turns = itertools.cycle(range(SERVERS))
    with (
        tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name,
        tritons(emulated.repository_of(Path(name), SERVICES), SERVERS, cpus=[bench.cores.server]) as servers,
        balancing([(each.endpoints.http, each.endpoints.grpc) for each in servers], Path(name)) as balancer,
    ):

        def check() -> None:
            for each in servers:
                each.check_alive()

        found = bench.rounds(
            1 if bench.quick else ROUNDS,
            lambda: kill(servers[next(turns)], Load(balancer, bench.cores.client), steady_s, after_s),
            check=check,
            retries=2 * ROUNDS,  # not every kill hits a request that shows it
        )
    lost = sum(each.failed[group] for each in found for group in RETRYABLE)
    backs = [each.back_s for each in found]
    return Outcome(
        max(backs),
        max(backs) - min(backs),
        len(found),
        ok=lost == 0,
        details={
            "retryable_calls": sum(each.calls[group] for each in found for group in RETRYABLE),
            "retryable_calls_failed": lost,
            "errors": sorted({error for each in found for error in each.errors}),
            "failed_without_header": [each.failed[LOST] for each in found],
            "p99_before_ms": [round(each.steady_p99_ms, 1) for each in found],
            "back_at_times_p99": BACK,
            "longest_call_ms": [round(each.most_ms, 1) for each in found],
            "p99_of_each_second_after_ms": [[round(value, 1) for value in each.after_p99_ms] for each in found],
            "left_out_after_s": [round(each.left_out_s, 2) for each in found],
            "model": f"emulated: {emulated.V100}",
            "calls_per_s": sum(PER_S.values()),
        },
    )


@contextmanager
def tritons(root: Path, count: int, cpus: Sequence[int] | None = None) -> Iterator[list[EmbeddedServer]]:
    """So many Tritons of one repository, on ports that stay theirs when they are started again."""
    servers = []
    for _ in range(count):
        http, grpc, metrics = choose_ports([0, 0, 0])
        servers.append(EmbeddedServer(root, http_port=http, grpc_port=grpc, metrics_port=metrics, cpus=cpus))
    with ThreadPoolExecutor(count) as threads:
        try:
            list(threads.map(EmbeddedServer.start, servers))
            yield servers
        finally:
            list(threads.map(EmbeddedServer.stop, servers))


def kill(server: EmbeddedServer, load: Load, steady_s: float, after_s: float) -> Killed:
    """Kill -9 of that server under load, and a new start of it, which nobody may notice either."""
    name = f"http_servers/{server.endpoints.http}"
    balancer = load.balancer
    assert isinstance(balancer, Balancer)
    with load:
        load.wait_for_answers()
        began_s = time.perf_counter()
        time.sleep(steady_s)
        _wait(lambda: load.under_way >= BUSY, f"{BUSY} calls at the same time", look_s=0.001)
        time.sleep(ON_THE_WAY_S)
        killed_s = time.perf_counter()
        os.kill(server.pid, signal.SIGKILL)
        _wait(lambda: balancer.states()[name] == "DOWN", "the balancer to leave the killed server out")
        left_out_s = time.perf_counter() - killed_s
        time.sleep(max(0.0, killed_s + after_s - time.perf_counter()))
        judged_s = time.perf_counter()
        server.stop()
        server.start()
        _wait(lambda: balancer.states()[name] == "UP", "the balancer to take the server in again")
        time.sleep(WINDOW_S)
    calls = load.calls
    if not any(call.group == LOST and call.error for call in calls):
        raise NoisyRoundError("the kill hit no request that would show it")
    steady = _p99([call for call in calls if began_s <= call.at_s < killed_s - DEADLINE_S / 10])
    retryable = [call for call in calls if call.group in RETRYABLE]
    after = [call for call in retryable if killed_s <= call.at_s < judged_s]
    groups = (*RETRYABLE, LOST)
    return Killed(
        steady,
        back_s(after, killed_s, BACK * steady),
        left_out_s,
        {group: sum(call.group == group for call in calls) for group in groups},
        {group: sum(call.group == group and bool(call.error) for call in calls) for group in groups},
        tuple(sorted({call.error for call in retryable if call.error})),
        max(call.latency_ms for call in retryable),
        tuple(
            _p99([call for call in after if second <= call.at_s - killed_s < second + 1])
            for second in range(int(after_s))
        ),
    )


def back_s(calls: Sequence[Call], killed_s: float, limit_ms: float) -> float:
    """The first time after the kill from which P99 is within the limit, over the next second and over all that follows."""
    times = np.array([call.at_s - killed_s for call in calls])
    latencies = np.array([call.latency_ms for call in calls])
    for start in np.arange(0.0, float(times.max(initial=0.0)) - WINDOW_S, STEP_S):
        rest = latencies[times >= start]
        window = latencies[(times >= start) & (times < start + WINDOW_S)]
        if window.size and max(np.quantile(window, 0.99), np.quantile(rest, 0.99)) <= limit_ms:
            return float(start)
    return NEVER_S


@dataclass
class Load:
    """Calls of all groups at random times, from a thread on a core of its own, until the block ends; then `calls` has all."""

    balancer: Balancer | Entry
    core: int
    per_s: Mapping[str, float] = field(default_factory=lambda: PER_S)
    deadline_s: float = DEADLINE_S
    calls: list[Call] = field(default_factory=list)
    under_way: int = 0

    def __enter__(self) -> Load:
        self._ends = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._offer()))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def wait_for_answers(self) -> None:
        """Return when every group has had an answer. Raises MeasurementError when one has none."""
        wanted = set(self.per_s)
        _wait(lambda: {call.group for call in list(self.calls) if not call.error} == wanted, "answers for all callers")

    async def _offer(self) -> None:
        os.sched_setaffinity(0, {self.core})  # of this thread
        async with AsyncExitStack() as stack:
            asks = await _asks(stack, self.balancer, self.deadline_s)
            tasks = [self._group(group, ask, seed) for seed, (group, ask) in enumerate(asks.items())]
            await asyncio.gather(*tasks)

    async def _group(self, group: str, ask: Ask, seed: int) -> None:
        random = np.random.default_rng(seed)
        due_s = time.perf_counter()
        pending: set[asyncio.Task[None]] = set()
        while not self._ends.is_set():
            due_s += float(random.exponential(1 / self.per_s[group]))
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            task = asyncio.create_task(self._call(group, due_s, ask))
            pending.add(task)
            task.add_done_callback(pending.discard)
        await asyncio.gather(*pending)

    async def _call(self, group: str, due_s: float, ask: Ask) -> None:
        error = ""
        self.under_way += 1
        try:
            await asyncio.wait_for(ask(), self.deadline_s)
        except Exception as failed:  # noqa: BLE001 -- whatever it is: the call has failed
            error = f"{group}: {type(failed).__name__}: {failed}"[:300]
        self.under_way -= 1
        self.calls.append(Call(group, due_s, (time.perf_counter() - due_s) * 1e3, error))


async def _asks(stack: AsyncExitStack, balancer: Balancer | Entry, deadline_s: float) -> dict[str, Ask]:
    """How each group asks; an `Ask` raises when there is no answer."""
    row = emulated.rows(1)
    body = callers.body(MODEL, row)
    tensor = tritonclient.grpc.InferInput("row", list(row["row"].shape), "FP32")
    tensor.set_data_from_numpy(row["row"])
    options = [("grpc.service_config", json.dumps(ASKS_AGAIN)), ("grpc.enable_http_proxy", 0)]
    http = await stack.enter_async_context(aiohttp.ClientSession(f"http://{balancer.http}"))
    grpc = await stack.enter_async_context(
        tritonclient.grpc.aio.InferenceServerClient(balancer.grpc, channel_args=options)
    )
    joins_nothing = {"coalesce": False, "deadline_ms": deadline_s * 1e3}
    over_http = await stack.enter_async_context(AsyncClient(f"http://{balancer.http}", **joins_nothing))  # type: ignore[arg-type]
    over_grpc = await stack.enter_async_context(AsyncClient(f"grpc://{balancer.grpc}", **joins_nothing))  # type: ignore[arg-type]

    async def predict(client: AsyncClient) -> None:
        await client.predict(MODEL, row)

    async def infer() -> None:
        await grpc.infer(MODEL, [tensor], headers=dict(RETRY))  # which tritonclient changes

    return {
        "client_http": lambda: predict(over_http),
        "client_grpc": lambda: predict(over_grpc),
        "http": lambda: _post(http, body, RETRY),
        "grpc": infer,
        LOST: lambda: _post(http, body, {}),
    }


async def _post(session: aiohttp.ClientSession, body: Body, headers: Mapping[str, str]) -> None:
    async with session.post(body.path, data=body.content, headers={**body.headers, **headers}) as answer:
        said = await answer.read()
        if answer.status != 200:
            raise MeasurementError(f"{answer.status} {said[:200].decode(errors='replace')}")


def _p99(calls: Sequence[Call]) -> float:
    return float(np.quantile([call.latency_ms for call in calls], 0.99))


def _wait(condition: Callable[[], bool], what: str, look_s: float = 0.01) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise MeasurementError(f"Waited {PATIENCE_S:g} s for {what}. Nothing is reported.")
        time.sleep(look_s)
