"""What does the client save? One-row calls of 64 callers through it, against as many plain tritonclient requests, in turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import tritonclient.http.aio as triton

from perf import machine
from perf.frame import Bench, Outcome, median, spread
from perf.inprocess import session
from perf.subjects import Arrays, Served, model_file, part, sample_rows, services, serving
from tritonpilot.client import AsyncClient, InputError

CALLERS = 64
ROUNDS = 5
QUICK_ROUNDS = 2
TURNS = 6
TURN_S = 0.5
TOLERANCE = 1e-5
PHOTOS = 16

Ask = Callable[[int], Awaitable[npt.NDArray[Any]]]
"""Number of a row -> its click probability."""


@dataclass(frozen=True)
class Side:
    """One way of asking, over the turns of a round."""

    rows: int
    server_cpu_s: float
    client_cpu_s: float
    wall_s: float
    latencies_ms: npt.NDArray[np.float64]
    wrong: int

    @property
    def rate(self) -> float:
        """Rows per CPU second of the server."""
        return self.rows / self.server_cpu_s

    def p(self, share: float) -> float:
        return float(np.percentile(self.latencies_ms, share))


@dataclass(frozen=True)
class Round:
    """Both ways, in turns."""

    plain: Side
    joined: Side

    @property
    def ratio(self) -> float:
        return self.joined.rate / self.plain.rate


def client_coalescing(bench: Bench) -> Outcome:
    """Median over rounds of rows per CPU second of the server, through the client over plain.

    Both sides use HTTP with binary tensors and uncompressed answers from one event loop with 64 callers, each of which asks for
    its next row when it has an answer. Every answer is compared with ONNX Runtime in this process.
    """
    service = services(["ctr"])["ctr"]
    rows = sample_rows(service)
    expected = session(model_file(service)).run(["prob"], dict(rows))[0][:, 0]
    with serving(bench, ["ctr", "image"], is_pinned=True) as served:
        with closing(asyncio.new_event_loop()) as loop:
            sides = loop.run_until_complete(_sides(served, rows))
            try:
                for ask in (sides.plain, sides.joined):
                    loop.run_until_complete(_turn(ask, expected, TURN_S))  # connections and caches
                rounds = bench.rounds(
                    QUICK_ROUNDS if bench.quick else ROUNDS,
                    lambda: _round(loop, served.server.pid, sides, expected),
                    check=served.server.check_alive,
                )
                bad_alone = loop.run_until_complete(_bad_call_fails_alone(sides.client))
            finally:
                loop.run_until_complete(sides.close())
        served.server.check_alive()
    ratios = [each.ratio for each in rounds]
    wrong = sum(each.plain.wrong + each.joined.wrong for each in rounds)
    p99 = {name: median([getattr(each, name).p(99) for each in rounds]) for name in ("plain", "joined")}
    return Outcome(
        median(ratios),
        spread(ratios),
        len(rounds),
        ok=wrong == 0 and bad_alone and p99["joined"] <= p99["plain"],
        details={
            "ratios": [round(ratio, 3) for ratio in ratios],
            "plain_rows_per_server_cpu_s": [round(each.plain.rate) for each in rounds],
            "joined_rows_per_server_cpu_s": [round(each.joined.rate) for each in rounds],
            "plain_rows_per_s": [round(each.plain.rows / each.plain.wall_s) for each in rounds],
            "joined_rows_per_s": [round(each.joined.rows / each.joined.wall_s) for each in rounds],
            "plain_client_us_per_row": _client_us([each.plain for each in rounds]),
            "joined_client_us_per_row": _client_us([each.joined for each in rounds]),
            "plain_p50_ms": round(median([each.plain.p(50) for each in rounds]), 2),
            "joined_p50_ms": round(median([each.joined.p(50) for each in rounds]), 2),
            "plain_p99_ms": round(p99["plain"], 2),
            "joined_p99_ms": round(p99["joined"], 2),
            "answers_checked": sum(each.plain.rows + each.joined.rows for each in rounds),
            "answers_wrong": wrong,
            "one_bad_call_fails_alone": bad_alone,
            "callers": CALLERS,
            "protocol": "http",
        },
    )


@dataclass(frozen=True)
class _Sides:
    plain: Ask
    joined: Ask
    client: AsyncClient
    plain_client: Any

    async def close(self) -> None:
        await self.client.close()
        await self.plain_client.close()


async def _sides(served: Served, rows: Arrays) -> _Sides:
    plain_client = triton.InferenceServerClient(served.server.endpoints.http, conn_limit=CALLERS)
    client = AsyncClient(f"http://{served.server.endpoints.http}")

    async def plain(row: int) -> npt.NDArray[Any]:
        inputs = [triton.InferInput("dense", [1, 28], "FP32"), triton.InferInput("categorical", [1, 8], "INT64")]
        for tensor in inputs:
            tensor.set_data_from_numpy(rows[tensor.name()][row : row + 1])
        # Without the header tritonclient asks for compressed answers, which would flatter the other side.
        result = await plain_client.infer("ctr", inputs, headers={"Accept-Encoding": "identity"})
        answer: npt.NDArray[Any] = result.as_numpy("prob")[0]
        return answer

    async def joined(row: int) -> npt.NDArray[Any]:
        return (await client.predict("ctr", {name: array[row] for name, array in rows.items()}))["prob"]

    return _Sides(plain, joined, client, plain_client)


def _round(loop: asyncio.AbstractEventLoop, pid: int, sides: _Sides, expected: npt.NDArray[Any]) -> Round:
    turns: dict[str, list[Side]] = {"plain": [], "joined": []}
    for _ in range(TURNS):
        for name, ask in (("plain", sides.plain), ("joined", sides.joined)):
            server_before, client_before, began = machine.tree_cpu_s(pid), time.process_time(), time.monotonic()
            latencies, wrong = loop.run_until_complete(_turn(ask, expected, TURN_S))
            wall_s, client_s = time.monotonic() - began, time.process_time() - client_before
            server_s = machine.tree_cpu_s(pid) - server_before
            turns[name].append(Side(len(latencies), server_s, client_s, wall_s, np.array(latencies), wrong))
    return Round(_sum(turns["plain"]), _sum(turns["joined"]))


async def _turn(ask: Ask, expected: npt.NDArray[Any], seconds: float) -> tuple[list[float], int]:
    """(latency of every call in ms, how many answers were not those of their row)."""
    latencies: list[float] = []
    wrong = 0
    deadline = time.perf_counter() + seconds

    async def caller(row: int) -> None:
        nonlocal wrong
        while (began := time.perf_counter()) < deadline:
            answer = await ask(row)
            latencies.append((time.perf_counter() - began) * 1e3)
            wrong += not abs(float(answer[0]) - float(expected[row])) <= TOLERANCE
            row = (row + CALLERS) % len(expected)

    await asyncio.gather(*(caller(row) for row in range(CALLERS)))
    return latencies, wrong


async def _bad_call_fails_alone(client: AsyncClient) -> bool:
    """Photos called for together, one of them cut off: it fails with its field's name, the others as if alone."""
    photos = sample_rows(part("image_decode"))["photo"].ravel().tolist()[:PHOTOS]
    alone = [await client.predict("image", {"photo": photo}) for photo in photos]
    bad = len(photos) // 2
    sent = [photo[: len(photo) // 2] if place == bad else photo for place, photo in enumerate(photos)]
    together = await asyncio.gather(
        *(client.predict("image", {"photo": photo}) for photo in sent), return_exceptions=True
    )
    for place, answer in enumerate(together):
        if place == bad:
            if not (isinstance(answer, InputError) and answer.field == "photo"):
                return False
        elif isinstance(answer, BaseException) or answer["label"].tolist() != alone[place]["label"].tolist():
            return False
    return True


def _sum(turns: list[Side]) -> Side:
    return Side(
        sum(turn.rows for turn in turns),
        sum(turn.server_cpu_s for turn in turns),
        sum(turn.client_cpu_s for turn in turns),
        sum(turn.wall_s for turn in turns),
        np.concatenate([turn.latencies_ms for turn in turns]),
        sum(turn.wrong for turn in turns),
    )


def _client_us(sides: list[Side]) -> int:
    return round(median([side.client_cpu_s / side.rows for side in sides]) * 1e6)
