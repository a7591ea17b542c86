"""Do the load tests keep their limits? Locust, entry and server share two cores.

At 100 requests a second Locust has one of them to itself. At 500, half of them over gRPC, entry and server take .85 of a core
together and need more than one: the kernel places all three.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from perf import machine
from perf.frame import PROJECT, Bench, Outcome, spread
from perf.locust import scenarios
from perf.subjects import Entry, Served, entered, serving
from tritonpilot.errors import MeasurementError

SERVICE = "ctr"
REPORTS = PROJECT / "build" / "locust"
QUICK_S = 15.0
BURST_ROUNDS = 3
RETRIES = 3  # of all rounds together
JUDGED = (0, 1)  # Locust's exit codes after a test: its limits kept, one broken
SLACK_S = 90.0  # for Locust's start and end

Figures = dict[str, Any]


def locust_constant(bench: Bench) -> Outcome:
    """P99 of five minutes at 100 requests a second, over HTTP and then over gRPC: the larger of the two."""
    limits = scenarios.SCENARIOS["constant"].limits
    found: dict[str, Figures] = {}
    with serving(bench, [SERVICE], is_pinned=True) as served, entered(served, core=bench.cores.server) as entry:
        for transport in scenarios.TRANSPORTS:
            found[transport] = _round(bench, served, entry, "constant", transport)
    p99s = [_ms(each["p99_ms"]) for each in found.values()]
    return Outcome(
        max(p99s),
        spread=spread(p99s),
        rounds=len(found),
        ok=all(each["failures"] <= limits.failures * each["requests"] for each in found.values()),
        details={
            key: {transport: each[key] for transport, each in found.items()}
            for key in (*COUNTS, "p50_ms", "p99_ms", "max_ms", *COSTS)
        },
    )


def locust_burst(bench: Bench) -> Outcome:
    """Seconds after a step from 0 to 500 requests a second, half of them over gRPC, until P99 of a second is back: the worst."""
    with serving(bench, [SERVICE]) as served, entered(served) as entry:
        found = [_round(bench, served, entry, "burst", "both") for _ in range(1 if bench.quick else BURST_ROUNDS)]
    recovered = [
        float(each["seconds"] if each["recovered_after_s"] is None else each["recovered_after_s"]) for each in found
    ]
    judged = scenarios.SCENARIOS["burst"].judged
    return Outcome(
        max(recovered),
        spread=spread(recovered),
        rounds=len(found),
        ok=not any(each["by_class"][judged]["failures"] for each in found),
        details={
            "recovered_after_s": [each["recovered_after_s"] for each in found],  # None: not at all
            **{key: [each[key] for each in found] for key in COUNTS},
            "realtime_failures": [each["by_class"][judged]["failures"] for each in found],
            "p99_ms": [{name: each["by_class"][name]["p99_ms"] for name in each["by_class"]} for each in found],
            "p99_ms_of_the_first_seconds": [each["p99_ms_by_second"][:5] for each in found],
            "largest_p99_ms_of_later_seconds": [max(map(_ms, each["p99_ms_by_second"][5:])) for each in found],
            **{key: [each[key] for each in found] for key in COSTS},
        },
    )


COUNTS = ("requests", "failures", "errors")
COSTS = ("sent_late_p99_ms", "sent_late_max_ms", "sender_cores", "server_cores", "entry_cores")


def _round(bench: Bench, served: Served, entry: Entry, scenario: str, transport: str) -> Figures:
    """A load test on a quiet machine, and what it cost."""

    def one() -> Figures:
        before = machine.tree_cpu_s(served.server.pid), machine.process_cpu_s(entry.pid)
        found = load(entry, scenario, transport, QUICK_S if bench.quick else None)
        after = machine.tree_cpu_s(served.server.pid), machine.process_cpu_s(entry.pid)
        server_s, entry_s = (b - a for a, b in zip(before, after, strict=True))
        return {
            **found,
            "server_cores": round(server_s / found["seconds"], 3),
            "entry_cores": round(entry_s / found["seconds"], 3),
        }

    (found,) = bench.rounds(1, one, check=served.server.check_alive, retries=RETRIES)
    for line in found["broken"]:
        bench.say(f"{scenario} over {transport}: {line}")
    return found


def load(entry: Entry, scenario: str, transport: str, seconds: float | None) -> Figures:
    """Run a scenario and return its figures. Raises MeasurementError when Locust made no test, or not all of its requests."""
    wanted = scenarios.of(scenario, seconds=seconds)
    REPORTS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tritonpilot-locust-") as folder:
        figures = Path(folder, "figures.json")
        argv = [
            *(sys.executable, "-m", "locust", "-f", "perf/locust/locustfile.py", "--headless", "--only-summary"),
            *("--scenario", scenario, "--transport", transport, "--seconds", str(wanted.seconds), "--service", SERVICE),
            *("--host", f"http://{entry.http}", "--triton-grpc", entry.grpc),
            *("--html", str(REPORTS / f"{scenario}_{transport}.html"), "--figures", str(figures)),
        ]
        try:
            done = subprocess.run(
                argv, cwd=PROJECT, capture_output=True, text=True, timeout=wanted.quiet_s + wanted.seconds + SLACK_S
            )
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(
                f"Locust did not end within {error.timeout:g} s. Nothing is reported. Look at the server's log."
            ) from error
        if done.returncode not in JUDGED or not figures.exists():
            raise MeasurementError(
                f"Locust ended with code {done.returncode} and without figures: {done.stderr[-2000:]} Nothing is reported. Locust "
                "itself comes with `pip install '.[load]'`."
            )
        found: Figures = json.loads(figures.read_text())
    due = round(wanted.rate_per_s * wanted.seconds)
    if found["requests"] < due:
        raise MeasurementError(
            f"Locust sent {found['requests']} of {due} requests. Nothing is reported. Repeat it on a machine with two free cores."
        )
    return found


def _ms(value: float | None) -> float:
    """A quantile of a load test; one that has none because of failures is as long as a request may take."""
    return scenarios.TIMEOUT_S * 1e3 if value is None else value
