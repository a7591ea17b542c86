"""How long from `tritonpilot serve` to a first right answer, and is a first request as fast as later ones?

Each example is started as it is now, and without what shortens a start: with configs completed by Triton, without the copies
optimized for this CPU, and with all libraries of the command imported beforehand. The files are in the page cache in both.
"""

from __future__ import annotations

import datetime
import http.client
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from perf import subjects
from perf.closed_loop import encoded
from perf.frame import PROJECT, Bench, Outcome, median, spread
from tritonpilot import optimized
from tritonpilot.errors import MeasurementError

EXAMPLES = ("ctr", "ctr_raw", "image", "ocr", "risk", "text")
QUICK_EXAMPLES = ("ctr", "text")
ROUNDS, QUICK_ROUNDS = 5, 1
LATER, QUICK_LATER = 100, 30  # requests after the first, of which P50 is taken
PAUSE_S = 0.02  # before each: the first comes after a rest of caller, cores and server too
ROW = 0  # that proves readiness; a first request of a shape that the server has not seen is slower, and is told in the details
OTHER_ROW = 1
TIMEOUT_S = 60.0
#: The command as it was before, and the options that make Triton start as before.
BEFORE = (sys.executable, "-c", "from tritonpilot.cli import main; main()"), ("--no-strict-config",)
_TIME = re.compile(r"^[IWE]\d{4} (\d\d):(\d\d):(\d\d\.\d+)")


@dataclass(frozen=True)
class Start:
    """One start of a server with one example."""

    answered_s: float  # from the start of the command to its first answer
    launched_s: float  # until Triton begins to load models: imports, the server's own start
    loaded_s: float  # until they are loaded and warm
    ready_s: float  # until each has answered one row, which the command waits for
    first_ms: float  # the first request after that
    later_ms: float  # P50 of the same request after that
    other_first_ms: float  # the first request with another row, which may be of another shape
    other_later_ms: float
    answers: tuple[bytes, bytes]

    @property
    def first_to_later(self) -> float:
        return self.first_ms / self.later_ms


def cold_start(bench: Bench) -> Outcome:
    """The slowest first request of an example against the P50 of the later ones."""
    examples = QUICK_EXAMPLES if bench.quick else EXAMPLES
    count = QUICK_ROUNDS if bench.quick else ROUNDS
    later = QUICK_LATER if bench.quick else LATER
    table: dict[str, object] = {}
    ratios, wrong, spreads = [], [], []
    for name in examples:
        with ExitStack() as stack:
            plain, ready = (stack.enter_context(subjects.built(bench.say, [name])) for _ in range(2))
            for note in optimized.write(ready, sorted(path.name for path in ready.iterdir())):
                bench.say(note)

            def both(name: str = name, plain: Path = plain, ready: Path = ready) -> tuple[Start, Start]:
                return _start(name, plain, later, before=True), _start(name, ready, later, before=False)

            pairs = bench.rounds(count, both, check=lambda: None)
        befores, afters = zip(*pairs, strict=True)
        rows = {"before": _row(befores), "now": _row(afters)}
        # What came first and what came later are each the median of their starts: one first request is a single number.
        ratio = median([each.first_ms for each in afters]) / median([each.later_ms for each in afters])
        ratios.append(ratio)
        spreads.append(spread([each.first_to_later for each in afters]))
        other = median([each.other_first_ms for each in afters]) / median([each.other_later_ms for each in afters])
        table[name] = {**rows, "first_to_later": round(ratio, 3), "other_row_first_to_later": round(other, 3)}
        bench.say(
            f"{name}: {median([b.answered_s for b in befores]):.2f} s before, {median([a.answered_s for a in afters]):.2f} s "
            f"now; its first request takes {ratio:.2f} times a later one"
        )
        if len({each.answers for each in (*befores, *afters)}) > 1:
            wrong.append(f"{name}: its answers differ from start to start")
        if median([a.answered_s for a in afters]) >= median([b.answered_s for b in befores]):
            wrong.append(f"{name}: starts no sooner than before")
    return Outcome(
        max(ratios), spread=max(spreads), rounds=count, ok=not wrong, details={"examples": table, "wrong": wrong}
    )


def _start(name: str, root: Path, later: int, *, before: bool) -> Start:
    """Start the command, send its model a row, send it again, then another one, stop it."""
    rows = subjects.sample_rows(subjects.part(name))
    program, options = BEFORE if before else ((), ())
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        log = Path(folder, "log")
        ports = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
        argv = ["--repository", str(root), "--models", str(PROJECT / "models"), "--log-file", str(log), *ports]
        wall, began = time.time(), time.perf_counter()
        with subjects.command("serve", [*argv, *options], program=program) as (endpoints, _):
            ready_s = time.perf_counter() - began
            answer, first_ms, later_ms = _ask_again(endpoints["http"], name, subjects.cut(rows, ROW, 1), later)
            other = _ask_again(endpoints["http"], name, subjects.cut(rows, OTHER_ROW, 1), later)
        text = log.read_text(encoding="utf-8", errors="replace")
    return Start(
        answered_s=ready_s + first_ms / 1e3,
        launched_s=_seconds_until('"loading: ', text, wall, last=False),
        loaded_s=_seconds_until('"successfully loaded ', text, wall, last=True),
        ready_s=ready_s,
        first_ms=first_ms,
        later_ms=later_ms,
        other_first_ms=other[1],
        other_later_ms=other[2],
        answers=(answer, other[0]),
    )


def _ask_again(url: str, name: str, row: subjects.Arrays, later: int) -> tuple[bytes, float, float]:
    """The answer to a row, how long the first request took, and P50 of so many later ones (ms)."""
    body, json_bytes, _ = encoded(row)
    time.sleep(PAUSE_S)
    answer, first_ms = _ask(url, name, body, json_bytes)
    times = []
    for _ in range(later):
        time.sleep(PAUSE_S)
        again, ms = _ask(url, name, body, json_bytes)
        times.append(ms)
        if again != answer:
            raise MeasurementError(
                f"{name} answered a row first so and then otherwise. Nothing is reported. Look at the model: it should answer "
                "a row alone always the same."
            )
    return answer, first_ms, statistics.median(times)


def _ask(url: str, name: str, body: bytes, json_bytes: str) -> tuple[bytes, float]:
    """Over a connection of its own, as the first request needs one; the answer and how long it took (ms)."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", f"/v2/models/{name}/infer", body, {"Inference-Header-Content-Length": json_bytes})
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise MeasurementError(
            f"{name} refused its own sample with {response.status}: {content[:200].decode(errors='replace')}. Nothing is "
            "reported. Look at the server's log."
        )
    return content, (time.perf_counter() - began) * 1e3


def _seconds_until(words: str, log: str, since: float, *, last: bool) -> float:
    """From the wall clock's `since` to the first or last line with these words; Triton writes the local time of day."""
    lines = [line for line in log.splitlines() if words in line]
    found = _TIME.match(lines[-1 if last else 0]) if lines else None
    if found is None:
        raise MeasurementError(
            f"Triton's log has no line with {words!r} and a time. Nothing is reported. Look at its log's format."
        )
    midnight = datetime.datetime.fromtimestamp(since).replace(hour=0, minute=0, second=0, microsecond=0)
    seconds = int(found[1]) * 3600 + int(found[2]) * 60 + float(found[3])
    return (midnight.timestamp() + seconds - since) % 86400


def _row(starts: Sequence[Start]) -> dict[str, float]:
    """Medians, for the table."""
    names = (
        "launched_s",
        "loaded_s",
        "ready_s",
        "answered_s",
        "first_ms",
        "later_ms",
        "other_first_ms",
        "other_later_ms",
    )
    return {name: round(median([getattr(each, name) for each in starts]), 2) for name in names}
