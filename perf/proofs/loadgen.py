"""Is our own load generator honest? Nothing that a server does is hidden, requests leave on time, and perf_analyzer sees the same.

Server on one core, sender on the other; ctr over HTTP and gRPC, and a model without work for the rate that the sender reaches.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from perf import machine
from perf.frame import Bench, Outcome, median, spread
from perf.proofs.single_row import FLOOR, FLOOR_CONFIG, FLOOR_MODEL
from perf.subjects import Arrays, Served, built, priority, sample_rows, services, serving_from
from tritonpilot import sweep
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.load import SenderFacts, Target, run
from tritonpilot.outcome import Outcome as Load

MODEL = "ctr"
ROUNDS = 3
WARM_UP_S = 2.0
PAUSE_S = 2.0
PAUSE_FROM_S = 2.0
HEARTBEAT_S = 0.5
PAUSE_LOAD_S = 7.0
PAUSE_PER_S = 200.0
SHOWN = 0.98  # of the pause, in P99.9; the rest is the gap to the next request
COUNTED = 0.9  # of the callers of its first half: they wait for the other half
TIMELY_PER_S = 1000.0
TIMELY_S = 4.0
LATE_MS = 1.0
FAST_PER_S = 5000.0
FAST_S = 3.0
ANSWERED = 0.98
FLOOD_PER_S = 60_000.0
FLOOD_S = 0.3
AGREE_PER_S = 300.0
AGREE_S = 5.0
AGREE = 0.10
GRPC_CLIENT_MS = 0.5  # what gRPC for Python may take more than perf_analyzer's C++ for a call; 0.3 were seen


def loadgen_honesty(bench: Bench) -> Outcome:
    """The share of the checks that hold; each is judged on the median of the rounds."""
    service = services([MODEL])[MODEL]
    rows = sample_rows(service)
    level = priority(service, "realtime")
    with (
        built(bench.say, [MODEL]) as root,
        serving_from(_with_floor(root), bench, is_pinned=True) as served,
    ):

        def load(
            protocol: str, rate_per_s: float, seconds: float, *, patient: bool = False, model: str = MODEL
        ) -> tuple[Load, SenderFacts]:
            # A queue timeout of its class would refuse what a pause or a flood makes late.
            stream = Stream("all", rate_per_s, priority=2 if patient else level, slo_ms=200)
            url = served.server.endpoints.grpc if protocol == "grpc" else served.server.endpoints.http
            target = Target(url, "grpc" if protocol == "grpc" else "http")
            return run(target, model, rows, traffic([stream], seconds, seed=round(rate_per_s)), [stream])

        def one() -> dict[str, float]:
            found: dict[str, float] = {}
            for protocol in ("http", "grpc"):
                found[f"{protocol} late P99 ms at 1,000/s"] = load(protocol, TIMELY_PER_S, TIMELY_S)[1].schedule_p99_ms
                ours = load(protocol, AGREE_PER_S, AGREE_S)[0].p_ms(0.5)
                theirs = _perf_analyzer_p50_ms(served, rows, protocol, level)
                found[f"{protocol} P50 ms"], found[f"{protocol} P50 ms by perf_analyzer"] = ours, theirs
                timer = _pause(served, PAUSE_FROM_S)
                paused, _ = load(protocol, PAUSE_PER_S, PAUSE_LOAD_S, patient=True)
                timer.join()
                found[f"{protocol} P99.9 ms with a pause"] = paused.p_ms(0.999)
                slow = 1 - paused.latency.share_within(1e6 * PAUSE_S / 2)
                # Arrivals within the first half of the pause wait for longer than the other half.
                found[f"{protocol} share slower than half the pause"] = (
                    slow * paused.answered / (PAUSE_PER_S * PAUSE_S / 2)
                )
                found[f"{protocol} unanswered with a pause"] = paused.requests - paused.answered
            fast, facts = load("http", FAST_PER_S, FAST_S, model=FLOOR)
            found["answered of 5,000/s"] = fast.throughput_per_s / (fast.requests / fast.seconds)
            found["cores at 5,000/s"], found["limit at 5,000/s"] = facts.busiest_core, float(facts.is_limit)
            found["limit at 60,000/s"] = float(load("http", FLOOD_PER_S, FLOOD_S, model=FLOOR)[1].is_limit)
            return found

        load("http", TIMELY_PER_S, WARM_UP_S)
        kept = bench.rounds(1 if bench.quick else ROUNDS, one, check=served.server.check_alive)
    figures = {name: median([each[name] for each in kept]) for name in kept[0]}
    checks = _checks(figures)
    shares = [sum(_checks(each).values()) / len(checks) for each in kept]
    return Outcome(
        sum(checks.values()) / len(checks),
        spread=spread(shares),
        rounds=len(kept),
        details={"checks": checks, "median": _rounded(figures), "rounds": [_rounded(each) for each in kept]},
    )


def _checks(found: Mapping[str, float]) -> dict[str, bool]:
    checks = {
        "answers 5,000 requests/s over HTTP from one core, and is not the limit": (
            found["answered of 5,000/s"] >= ANSWERED and not found["limit at 5,000/s"]
        ),
        "says at 60,000 requests/s that it is the limit": found["limit at 60,000/s"] == 1.0,
    }
    for protocol in ("http", "grpc"):
        of = f"over {protocol}"
        checks[f"late by less than 1 ms in 99 % at 1,000 requests/s {of}"] = (
            found[f"{protocol} late P99 ms at 1,000/s"] < LATE_MS
        )
        checks[f"a pause of 2 s shows in P99.9 {of}"] = (
            found[f"{protocol} P99.9 ms with a pause"] >= 1e3 * SHOWN * PAUSE_S
        )
        checks[f"everybody who called within the pause is counted {of}"] = (
            found[f"{protocol} share slower than half the pause"] >= COUNTED
            and not found[f"{protocol} unanswered with a pause"]
        )
        ours, theirs = found[f"{protocol} P50 ms"], found[f"{protocol} P50 ms by perf_analyzer"]
        allowed_ms = AGREE * theirs if protocol == "http" else max(AGREE * theirs, GRPC_CLIENT_MS)
        checks[f"P50 as perf_analyzer's within {'10 %' if protocol == 'http' else f'{GRPC_CLIENT_MS} ms'} {of}"] = (
            abs(ours - theirs) <= allowed_ms
        )
    return checks


def _with_floor(root: Path) -> Path:
    """The repository, with a model beside ctr that takes the same and answers a constant."""
    version = root / FLOOR / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(FLOOR_MODEL, encoding="utf-8")
    (version.parent / "config.pbtxt").write_text(FLOOR_CONFIG, encoding="utf-8")
    return root


def _perf_analyzer_p50_ms(served: Served, rows: Arrays, protocol: str, level: int) -> float:
    endpoints = served.server.endpoints
    (point,) = sweep.measure(
        endpoints.grpc,
        MODEL,
        rows,
        rates_per_s=[AGREE_PER_S],
        http_url=endpoints.http if protocol == "http" else None,
        parameters={"priority": level} if protocol == "grpc" else None,
        attempts=1,
    )
    return point.p50_ms


def _pause(served: Served, after_s: float) -> threading.Thread:
    """Stop tritonserver for two seconds, some seconds from now, and its stubs with it."""

    def pause() -> None:
        time.sleep(after_s)
        server, *stubs = machine.tree_pids(served.server.pid)
        _signal_all([*stubs, server], signal.SIGSTOP)
        time.sleep(PAUSE_S - HEARTBEAT_S)
        # tritonserver takes a stub that has not shown its heartbeat for dead, and aborts.
        _signal_all(stubs, signal.SIGCONT)
        time.sleep(HEARTBEAT_S)
        _signal_all([server], signal.SIGCONT)

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    return thread


def _signal_all(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in figures.items()}
