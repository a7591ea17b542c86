"""How does a model behave with so many requests in flight, where perf_analyzer cannot say? Requests over gRPC, errors counted.

    answers = closed_loop(Target(server.endpoints.grpc, "grpc"), "ctr", rows, size=1, concurrency=16, seconds=5)
    answers.latency_ms, answers.errors

A Python client: beyond some 3,000 requests/s it is itself the limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import numpy as np

from tritonpilot.arrivals import FloatArray, Stream, traffic
from tritonpilot.errors import MeasurementError
from tritonpilot.load.grpc_sender import METHOD, OPTIONS
from tritonpilot.load.job import kind_of
from tritonpilot.load.target import VARIANTS, Arrays, Target, bodies, describe

PATIENCE_S = 60.0
GIVE_UP = 200  # errors before the first answer


@dataclass(frozen=True)
class Answers:
    """Good answers in the order of their arrival, in seconds since the beginning, and errors by kind."""

    done_s: FloatArray  # [n]
    latency_ms: FloatArray  # [n]
    errors: dict[str, int]
    words: dict[str, str]  # kind -> the server's about the first one
    client_cores: float


def closed_loop(
    target: Target,
    model: str,
    samples: Arrays,
    *,
    size: int,
    concurrency: int,
    seconds: float,
    cpus: Sequence[int] = (),
) -> Answers:
    """Keep `concurrency` requests of `size` rows in flight for `seconds`. `target` is one over gRPC; `cpus` pins the client.

    Raises ServerError when the server does not know the model, MeasurementError when nothing but errors comes back.
    """
    streams = [Stream("sweep", VARIANTS, arrivals="constant", rows=size)]
    asked = bodies(target, describe(target, model), samples, streams, traffic(streams, 1.0, seed=0))
    clock = time.perf_counter
    done: list[float] = []
    took: list[float] = []
    errors: dict[str, int] = {}
    words: dict[str, str] = {}
    lock, idle = threading.Lock(), threading.Event()
    in_flight, sent = concurrency, 0
    cpu_before = time.process_time()
    with _pinned(cpus), grpc.insecure_channel(target.url, options=OPTIONS) as channel:
        infer = channel.unary_unary(METHOD)
        start = clock()
        end = start + seconds

        def ask() -> None:
            nonlocal sent
            with lock:
                place = sent % len(asked.place)
                sent += 1
            began = clock()
            call = infer.future(asked.content[asked.place[place]], timeout=PATIENCE_S)
            call.add_done_callback(lambda call: keep(call, began))

        def keep(call: Any, began: float) -> None:
            nonlocal in_flight
            now = clock()
            code = call.code()
            with lock:
                if code is grpc.StatusCode.OK:
                    done.append(now - start)
                    took.append((now - began) * 1e3)
                else:
                    text = call.details() or code.name
                    kind = kind_of(code.name, text)
                    errors[kind] = errors.get(kind, 0) + 1
                    words.setdefault(kind, text)
                is_over = now >= end or (not done and sum(errors.values()) >= GIVE_UP)
                if is_over:
                    in_flight -= 1
                    if not in_flight:
                        idle.set()
            if not is_over:
                ask()

        for _ in range(concurrency):
            ask()
        if not idle.wait(seconds + PATIENCE_S + 5):
            raise MeasurementError(
                f"{in_flight} requests to {model} at {target.url} had no answer {PATIENCE_S:g} s after the end of the load. There "
                "is no figure for it. Look at the server's log."
            )
    if not done:
        raise MeasurementError(
            f"Model {model} at {target.url} answered none of {sum(errors.values())} requests "
            f"({'; '.join(f'{kind}: {text}' for kind, text in words.items())}). There is no figure for this load. Look at the "
            "model and the samples."
        )
    wall_s = clock() - start
    return Answers(
        np.array(done), np.array(took), errors, words, (time.process_time() - cpu_before) / max(wall_s, 1e-9)
    )


@contextlib.contextmanager
def _pinned(cpus: Sequence[int]) -> Iterator[None]:
    """All threads of this process on these CPUs while the block lasts: gRPC sends from threads that were there before."""
    if not cpus:
        yield
        return
    before = os.sched_getaffinity(0)
    _move(cpus)
    try:
        yield
    finally:
        _move(before)


def _move(cpus: Iterable[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            os.sched_setaffinity(int(thread.name), cpus)
