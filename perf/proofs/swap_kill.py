"""What if the tool that swaps a model dies in the middle? kill -9 after each line of its journal, and somewhere in each step.

After every kill the server must go on answering every call by one whole generation, a server started from what is on disk must do
so too, and a re-run must finish the swap or take it back, leaving nothing behind.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perf import generations
from perf.frame import Bench, Outcome
from perf.generations import Call, Load, Rate
from perf.swapping import Site, switched
from tritonpilot.errors import MeasurementError, PilotError
from tritonpilot.server import EmbeddedServer

PER_S = 20.0  # over each protocol
AFTER_S = 0.5  # of answers that are looked at after each kill and each re-run
INSIDE = 2  # kills within each step of the full form, besides those at its beginning and its end
QUICK_KILLS = 5
KILLED = -signal.SIGKILL
OPTIONS = ("--max-slower", "20")  # it is the order of steps that is proved here
#: `tritonpilot`, which ends by SIGKILL so many seconds after it has synced so many lines of the journal.
DYING = """
import os
import signal
import sys
import threading

at, delay_s = int(sys.argv.pop(1)), float(sys.argv.pop(1))
sync, seen = os.fsync, 0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fsync(file):
    global seen
    sync(file)
    handle = file if isinstance(file, int) else file.fileno()
    if os.readlink(f"/proc/self/fd/{handle}").endswith(".jsonl"):
        seen += 1
        if seen == at:
            threading.Timer(delay_s, die).start() if delay_s else die()


os.fsync = fsync
from tritonpilot.cli import main

main()
"""


@dataclass(frozen=True)
class Kill:
    """One run that was killed, and the re-run."""

    service: str
    after: str
    """The last line of the journal."""
    outcome: str
    """Of the re-run: "finished", "taken back", or what was wrong."""
    trouble: tuple[str, ...]


def swap_kill_each_step(bench: Bench) -> Outcome:
    """Kills after which a call failed, a restart did not serve, or a re-run did not bring order."""
    subjects = [generations.ctr] if bench.quick else [generations.ctr, generations.pair]
    with switched(subjects, bench.say, exit_timeout_s=5) as site:
        rates = [Rate(subject, over, PER_S) for subject in site.subjects.values() for over in ("http", "grpc")]
        with Load(site.server.endpoints, rates) as load:
            load.wait_for_answers()
            found = [kill for service in site.subjects for kill in _kills(bench, site, load, service)]
        site.server.check_alive()
    bad = [kill for kill in found if kill.trouble]
    return Outcome(
        len(bad),
        rounds=len(found),
        ok=bool(found),
        details={
            "kills": len(found),
            "outcomes": dict(Counter(kill.outcome for kill in found)),
            "killed_after": sorted({f"{kill.service}: {kill.after}" for kill in found}),
            "trouble": [f"{kill.service} after {kill.after}: {each}" for kill in bad for each in kill.trouble],
        },
    )


def _kills(bench: Bench, site: Site, load: Load, service: str) -> Iterator[Kill]:
    """A swap that nobody kills says how many lines there are; then one is killed at each of them."""
    at_s = _clean(site, service)
    bench.say(f"{service}: a swap writes {len(at_s)} lines in {at_s[-1]:.1f} s")
    points: list[tuple[int, float]] = [(line, 0.0) for line in range(1, len(at_s))]
    if bench.quick:
        points = [points[place] for place in np.linspace(0, len(points) - 1, QUICK_KILLS, dtype=int)]
    else:
        random = np.random.default_rng(1)
        gaps = [(line, later - now) for line, (now, later) in enumerate(itertools.pairwise(at_s), 1)]
        points += [(line, float(random.uniform(0, gap))) for line, gap in gaps for _ in range(INSIDE) if gap > 0.01]
    serves = 1  # the clean swap's
    for number, (line, delay_s) in enumerate(points, 2):
        kill, serves = _kill(site, load, service, serves, number, line, delay_s, restarts=not delay_s)
        bench.say(f"{service}: killed {delay_s:.2f} s after {kill.after}: {'; '.join(kill.trouble) or kill.outcome}")
        yield kill


def _clean(site: Site, service: str) -> list[float]:
    """When the lines of an undisturbed swap were written, s since it began to write."""
    site.swap(service, 1, OPTIONS)
    lines = _journal(site, service)
    times = [float(line["at"]) for line in lines]
    return [time_s - times[0] for time_s in times]


def _kill(
    site: Site, load: Load, service: str, old: int, new: int, line: int, delay_s: float, *, restarts: bool
) -> tuple[Kill, int]:
    """The kill, and which generation is served afterwards."""
    load.take()
    trouble: list[str] = []
    _killed(site, service, new, line, delay_s)
    after = _words(_journal(site, service))
    trouble += [f"after the kill {each}" for each in _unsound(_answers(load, service), {old, new})]
    if restarts:
        trouble += [f"a restart {each}" for each in _restart(site, service, {old, new})]
    ran = site.run("swap", service, ["--resume"])
    if ran.code:
        trouble.append(f"the re-run ended with {ran.code}: {ran.said}")
    load.take()  # until here either may have answered
    calls = _answers(load, service)
    trouble += [f"after the re-run {each}" for each in _unsound(calls, {old, new})]
    served = {generation for call in calls for generation in call.generations}
    if len(served) > 1:
        trouble.append(f"after the re-run both generations {served} answer")
    trouble += [f"after the re-run there is {each}" for each in site.left()]
    serves = max(served, default=old)
    return Kill(service, after, "finished" if serves == new else "taken back", tuple(trouble)), serves


def _killed(site: Site, service: str, generation: int, line: int, delay_s: float) -> None:
    program = [sys.executable, "-c", DYING, str(line), str(delay_s)]
    files = site.files(service, generation)
    with site.started("swap", service, [*files, *OPTIONS], program=program) as process:
        try:
            _, said = process.communicate(timeout=120)
        except subprocess.TimeoutExpired as error:
            raise MeasurementError(f"The swap of {service} did not end by itself. Nothing is reported.") from error
    if process.returncode not in (KILLED, 0):  # 0: it was done before the delay was over
        raise MeasurementError(f"The swap of {service} failed before its kill: {said} Nothing is reported.")


def _answers(load: Load, service: str) -> list[Call]:
    """All calls since the last time, and those of the next half second."""
    time.sleep(AFTER_S)
    return [call for call in load.take() if call.service == service]


def _unsound(calls: Sequence[Call], allowed: set[int]) -> list[str]:
    """What is wrong with the calls."""
    failed = [call.error for call in calls if call.error]
    mixed = [call for call in calls if not call.error and len(call.generations) != 1]
    strange = [call for call in calls if not call.error and not call.generations <= allowed]
    return [
        *([f"{len(failed)} calls of {len(calls)} failed: {failed[0]}"] if failed else []),
        *([f"{len(mixed)} answers are of several generations"] if mixed else []),
        *([f"{len(strange)} answers are of {sorted(strange[0].generations)}"] if strange else []),
        *([] if calls else ["no call was answered"]),
    ]


def _restart(site: Site, service: str, allowed: set[int]) -> list[str]:
    """What is wrong with a server that starts from what is on disk now."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-", dir=site.folder) as name:
        root = Path(name) / "model_repository"
        shutil.copytree(site.repository, root, ignore=shutil.ignore_patterns(".*"))
        try:
            with EmbeddedServer(root, exit_timeout_s=2) as server:
                rates = [Rate(site.subjects[service], "http", 50.0)]
                with Load(server.endpoints, rates) as load:
                    load.wait_for_answers()
                return _unsound([call for call in load.take() if call.service == service], allowed)
        except PilotError as error:
            return [f"does not serve: {error}"]


def _journal(site: Site, service: str) -> list[dict[str, Any]]:
    """Its lines, of the newest swap."""
    file = site.repository / ".pilot" / "swaps" / f"{service}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _words(lines: Sequence[dict[str, Any]]) -> str:
    last = lines[-1]
    return " ".join(str(last[key]) for key in ("step", "result", "state") if last.get(key))
