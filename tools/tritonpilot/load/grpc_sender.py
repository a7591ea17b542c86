"""How are gRPC requests sent at their times? As bytes that were made before, over one channel.

log = send(job, start=time.perf_counter() + 0.05)
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc  # type: ignore[import-untyped]

from tritonpilot.load.job import Job, Log, kind_of
from tritonpilot.outcome import CONNECTION, NO_ANSWER

METHOD = "/inference.GRPCInferenceService/ModelInfer"
LOOK_S = 0.5
SWITCH_S = 0.00005  # how long another thread may hold the interpreter; its default of 5 ms would show as latency
OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]


def send(job: Job, start: float, on_look: Callable[[int, int, Log], None] | None = None) -> Log:
    """Send every request at `start` (time.perf_counter()) + its time, and wait for the answers; see http_sender.send."""
    job.target.address  # noqa: B018 -- refuses what is none
    log = Log.of(len(job.at_s))
    metadata = [tuple(headers.items()) for headers in job.headers]
    at = (job.at_s + start).tolist()
    lock, arrived = threading.Lock(), threading.Event()
    clock = time.perf_counter
    count, in_flight = len(at), 0

    def keep(request: int, call: Any) -> None:
        nonlocal in_flight
        now_s = clock() - start
        code = call.code()
        if code is grpc.StatusCode.OK:
            log.done_s[request] = now_s
        else:
            text = call.details() or code.name
            kind = kind_of(code.name, text)
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and now_s - log.sent_s[request] >= 0.99 * job.patience_s:
                kind = NO_ANSWER
            elif code is grpc.StatusCode.UNAVAILABLE and _is_about_the_connection(text):
                kind = CONNECTION
            with lock:
                log.fail(request, kind, text, now_s)
        with lock:
            in_flight -= 1
            if not in_flight:
                arrived.set()

    switch = sys.getswitchinterval()
    cpu_before = time.process_time()
    with grpc.insecure_channel(job.target.url, options=OPTIONS) as channel:
        infer = channel.unary_unary(METHOD)
        sys.setswitchinterval(SWITCH_S)
        try:
            look = start + LOOK_S
            for request in range(count):
                while (left := at[request] - clock()) > 0:
                    time.sleep(min(left, max(0.0, look - clock())))
                    if clock() >= look:
                        look = clock() + LOOK_S
                        if on_look is not None:
                            on_look(request, in_flight, log)
                place = job.place[request]
                with lock:
                    in_flight += 1
                    arrived.clear()
                log.most_in_flight = max(log.most_in_flight, in_flight)
                log.sent_s[request] = clock() - start
                call = infer.future(job.content[place], timeout=job.patience_s, metadata=metadata[place])
                call.add_done_callback(lambda call, request=request: keep(request, call))
            log.cpu_s, log.wall_s = time.process_time() - cpu_before, clock() - start
            while in_flight:
                arrived.wait(LOOK_S)
                if on_look is not None:
                    on_look(count, in_flight, log)
        finally:
            sys.setswitchinterval(switch)
    return log


def _is_about_the_connection(text: str) -> bool:
    words = text.lower()
    return any(word in words for word in ("connect", "socket", "transport", "ping", "tcp"))
