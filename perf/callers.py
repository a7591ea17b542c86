"""Groups of HTTP callers with their own headers: on a schedule, or as fast as the answers come.

calls = on_schedule("127.0.0.1:8100", [Due(0.01, "high", body, {"tritonpilot-class": "high"}), ...])
calls = in_turn("127.0.0.1:8100", [Caller("high", body, headers)] * 12, seconds=10.0)

A call's latency counts from its scheduled time. One asyncio thread: for some hundred calls a second, not for thousands.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from perf.closed_loop import encoded

TIMEOUT_S = 60.0
NO_ANSWER = 0  # status of a call whose connection broke


@dataclass(frozen=True)
class Body:
    """One request in Triton's binary form."""

    path: str
    content: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Due:
    """A call at a time; `number` is the caller's own."""

    at_s: float
    group: str
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True)
class Caller:
    """One that calls again as soon as it has an answer."""

    group: str
    body: Body
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """What became of a call, in seconds since the beginning."""

    group: str
    number: int
    scheduled_s: float
    sent_s: float
    answered_s: float
    status: int
    retry_after_ms: float | None
    text: str

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def latency_ms(self) -> float:
        """From the scheduled time to the answer."""
        return (self.answered_s - self.scheduled_s) * 1e3

    @property
    def sent_latency_ms(self) -> float:
        """From the actual sending to the answer: what a deadline counts from."""
        return (self.answered_s - self.sent_s) * 1e3


def body(model: str, inputs: Mapping[str, npt.NDArray[Any]]) -> Body:
    """Encode an inference."""
    content, json_bytes, _ = encoded(inputs)
    return Body(f"/v2/models/{model}/infer", content, {"Inference-Header-Content-Length": json_bytes})


def poisson(rate_per_s: float, seconds: float, random: np.random.Generator) -> npt.NDArray[np.float64]:
    """Arrival times of a Poisson process, sorted."""
    count = random.poisson(rate_per_s * seconds)
    return np.sort(random.uniform(0, seconds, count))


def on_schedule(http_url: str, calls: Sequence[Due]) -> list[Call]:
    """Make every call at its time, whatever became of the others; in their order."""
    return asyncio.run(_with_session(http_url, _scheduled, sorted(calls, key=lambda each: each.at_s)))


def in_turn(http_url: str, callers: Sequence[Caller], seconds: float) -> list[Call]:
    """Calls that were begun within that time."""
    return asyncio.run(_with_session(http_url, _turns, callers, seconds))


def quantile_ms(calls: Sequence[Call], share: float) -> float:
    """A quantile of the latencies of successful calls, ms; infinite without any."""
    found = [call.latency_ms for call in calls if call.ok]
    return float(np.quantile(found, share)) if found else float("inf")


async def _with_session(http_url: str, work: Any, *what: Any) -> list[Call]:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(
        f"http://{http_url}", connector=connector, timeout=timeout, auto_decompress=False
    ) as session:
        done: Coroutine[Any, Any, list[Call]] = work(session, *what)
        return await done


async def _scheduled(session: aiohttp.ClientSession, calls: Sequence[Due]) -> list[Call]:
    start = time.perf_counter()
    tasks = []
    for each in calls:
        left = start + each.at_s - time.perf_counter()
        if left > 0:
            await asyncio.sleep(left)
        tasks.append(asyncio.ensure_future(_call(session, each, start, each.at_s, each.number)))
    return list(await asyncio.gather(*tasks))


async def _turns(session: aiohttp.ClientSession, callers: Sequence[Caller], seconds: float) -> list[Call]:
    start = time.perf_counter()

    async def turns(caller: Caller) -> list[Call]:
        found = []
        while (now := time.perf_counter() - start) < seconds:
            found.append(await _call(session, caller, start, now))
        return found

    return [call for each in await asyncio.gather(*[turns(caller) for caller in callers]) for call in each]


async def _call(
    session: aiohttp.ClientSession, asked: Due | Caller, start: float, scheduled_s: float, number: int = 0
) -> Call:
    headers = {**asked.body.headers, **asked.headers}
    status, retry, text = NO_ANSWER, None, ""
    sent_s = time.perf_counter() - start
    try:
        async with session.post(asked.body.path, data=asked.body.content, headers=headers) as answer:
            content = await answer.read()
            status = answer.status
            retry = answer.headers.get("retry-after-ms")
            if status != 200:
                text = content[:200].decode(errors="replace")
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
        text = repr(error)
    now = time.perf_counter() - start
    return Call(asked.group, number, scheduled_s, sent_s, now, status, float(retry) if retry else None, text)
