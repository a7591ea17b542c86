"""Run the entry in front of a Triton until a signal comes.

    run(Settings(triton_http="127.0.0.1:8000", triton_grpc="127.0.0.1:8001"), on_ready=print)

SIGTERM and SIGINT stop: no new requests, those inside are answered, at most `GRACE_S` long. SIGHUP reads the tenants file now;
it is also read within a second of a change.
"""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from tritonpilot.entry.cache import Cache
from tritonpilot.entry.canary import Canary
from tritonpilot.entry.desk import Desk
from tritonpilot.entry.extras import Extras
from tritonpilot.entry.gate import Gate
from tritonpilot.entry.generations import Generations
from tritonpilot.entry.grpc_front import GrpcFront
from tritonpilot.entry.guard import Guard
from tritonpilot.entry.http_front import HttpFront
from tritonpilot.entry.metrics import EntryMetrics
from tritonpilot.entry.tenants import KeyFile
from tritonpilot.errors import PortError, SpecError
from tritonpilot.ports import choose_ports

GRACE_S = 10.0
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")
MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """Where Triton is, where callers come in, and who may. Ports of 0 are chosen."""

    triton_http: str
    triton_grpc: str
    host: str = "127.0.0.1"
    http_port: int = 8100
    grpc_port: int = 8101
    metrics_port: int = 8102
    tenants: Path | None = None
    max_request_bytes: int = 64 * MIB


@dataclass(frozen=True)
class Endpoints:
    """host:port of each service of a running entry."""

    http: str
    grpc: str
    metrics: str


def run(settings: Settings, on_ready: Callable[[Endpoints], None], say: Callable[[str], None] = lambda _: None) -> int:
    """Serve until SIGINT or SIGTERM; returns the number of that signal. Call it in the main thread.

    Raises SpecError for a wrong tenants file or address, and PortError for a port that is taken or a host that is not here.
    """
    for option, address in (("--triton-http", settings.triton_http), ("--triton-grpc", settings.triton_grpc)):
        if not _ADDRESS.fullmatch(address) or not 0 < int(address.rpartition(":")[2]) < 65536:
            raise SpecError(f"{option} is {address!r}, but must be HOST:PORT, as 127.0.0.1:8000. Nothing was started.")
    uvloop.install()
    return asyncio.run(_run(settings, on_ready, say))


async def _run(settings: Settings, on_ready: Callable[[Endpoints], None], say: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    keys = KeyFile(settings.tenants, time.monotonic, say) if settings.tenants is not None else None
    http_port, grpc_port, metrics_port = choose_ports([settings.http_port, settings.grpc_port, settings.metrics_port])
    metrics = EntryMetrics()
    # uvloop's own clock stands still within a turn of the loop and counts milliseconds.
    gate = Gate(time.monotonic, lambda at_s, call: loop.call_later(max(0.0, at_s - time.monotonic()), call), metrics)
    metrics.watch(gate, keys)
    canary = Canary(settings.triton_http, settings.triton_grpc, say)
    metrics.registry.register(canary)
    generations = Generations(settings.triton_grpc, say=say)
    cache = Cache(generations)
    metrics.registry.register(cache)
    guard = Guard(settings.triton_http, settings.triton_grpc, generations, say)
    metrics.registry.register(guard)
    # NOTE: the cache first: what it answers is nobody else's. The canary last: where it takes a request, nobody behind it is asked.
    extras = Extras([cache, guard, canary], say)
    canary.look = extras.look
    desk = Desk(gate, settings.triton_http, keys, say=say, on_denied=metrics.denied, extras=extras)
    http = HttpFront(desk, settings.triton_http, max_request_bytes=settings.max_request_bytes)
    grpc = GrpcFront(desk, settings.triton_grpc, max_request_bytes=settings.max_request_bytes)
    received: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not received.done():
            received.set_result(number)

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop, int(each))
    if keys is not None:
        loop.add_signal_handler(signal.SIGHUP, keys.poll)
    try:
        endpoints = Endpoints(
            f"{settings.host}:{await http.start(settings.host, http_port)}",
            f"{settings.host}:{await grpc.start(settings.host, grpc_port)}",
            f"{settings.host}:{metrics.serve(settings.host, metrics_port)}",
        )
    except OSError as error:
        raise PortError(
            f"The entry cannot listen at {settings.host}: {error.strerror or error}. Nothing was started. Give an address of this "
            "machine with --host."
        ) from None
    gc.collect()
    gc.freeze()  # what was imported stays: a full collection would halt every request for it, 50 ms and more
    upkeep = loop.create_task(desk.keep_up())
    try:
        on_ready(endpoints)
        number = await received
        say(f"stopping: requests inside have {GRACE_S:g} s to be answered")
        await asyncio.gather(http.close(GRACE_S), grpc.close(GRACE_S))
    finally:
        upkeep.cancel()
        await desk.close()
    return number
