"""How long after `docker compose up` does everything work? Engine and images are there, the ctr service is built."""

from __future__ import annotations

import json
import subprocess
import sys

from perf.frame import PROJECT, Bench, Outcome, median, spread
from tritonpilot.errors import MeasurementError

SERVICE = "ctr"
ROUNDS = 3
TIMEOUT_S = 1800
UNAVAILABLE = 69  # of engine.sh


def compose_e2e(bench: Bench) -> Outcome:
    """Seconds of `docker compose up --wait`: every container healthy, Triton's by an inference; `down` has to leave nothing."""
    bench.say("making images that are missing; minutes the first time")
    ran = subprocess.run(
        [
            str(PROJECT / "tests" / "e2e" / "compose.sh"),
            sys.executable,
            "-m",
            "perf.compose",
            SERVICE,
            str(1 if bench.quick else ROUNDS),
        ],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if ran.returncode != 0:
        what = (
            "No Docker engine can be had here"
            if ran.returncode == UNAVAILABLE
            else "The compose project did not come up"
        )
        raise MeasurementError(f"{what}, so there is no figure: {ran.stderr.strip()[-2000:]}")
    found = json.loads(ran.stdout.splitlines()[-1])
    seconds: list[float] = found["healthy_s"]
    return Outcome(
        median(seconds),
        spread=spread(seconds),
        rounds=len(seconds),
        ok=max(seconds) < 30 and not found["left"],
        details={"services": found["services"], "model": SERVICE, "seconds": seconds, "left_after_down": found["left"]},
    )
