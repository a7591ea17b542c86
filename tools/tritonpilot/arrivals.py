"""Who calls when? The arrival times and sizes of a load, the same for the real server and for the simulation.

    streams = [
        Stream("app", 400, caller_class="realtime", slo_ms=50),
        Stream("night", 20, rows={64: 1}, arrivals="burst", peak_per_s=200, every_s=10, for_s=2),
    ]
    traffic(streams, seconds=30, seed=1).at_s          # pure: the same seed makes the same arrivals

A stream has random numbers of its own, so that another one beside it does not change its arrivals.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from tritonpilot.errors import SpecError

FloatArray = npt.NDArray[np.float64]
Arrivals = Literal["poisson", "constant", "burst", "recorded"]
TIME_COLUMNS = ("at_s", "timestamp", "time")
ROWS_COLUMN = "rows"


@dataclass(frozen=True)
class Stream:
    """Callers of one kind. `rows` of a request: a number, or sizes with their weights."""

    name: str
    rate_per_s: float  # the mean; with bursts, the rate between them; with a recording, 0 keeps its own
    arrivals: Arrivals = "poisson"
    rows: int | Mapping[int, float] = 1
    caller_class: str = ""
    priority: int = 0  # Triton's level; 0: the model's default
    timeout_ms: float | None = None  # the request's own queue timeout
    slo_ms: float = math.inf  # an answer within it counts as goodput
    peak_per_s: float = 0.0  # with bursts: the rate inside one,
    every_s: float = 0.0  # from the beginning of one to the next,
    for_s: float = 0.0  # and its length
    recording: Path | None = None


@dataclass(frozen=True)
class Traffic:
    """Every request of a load in the order of its time, in seconds since the beginning."""

    at_s: FloatArray  # [n], sorted
    rows: npt.NDArray[np.int32]  # [n]
    stream: npt.NDArray[np.int16]  # [n], index into the streams
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True)
class Recording:
    """Arrivals that were seen: seconds since the first, sorted, and the rows of each where they are known."""

    at_s: FloatArray
    rows: npt.NDArray[np.int32] | None

    @property
    def length_s(self) -> float:
        """Its length: to the last arrival, and the mean gap after it, so that a repetition goes on at the same rate."""
        return float(self.at_s[-1]) * len(self.at_s) / (len(self.at_s) - 1)


def traffic(streams: Sequence[Stream], seconds: float, seed: int) -> Traffic:
    """The requests of all streams within `seconds`. Raises SpecError for a stream that cannot be, or a bad recording."""
    times, rows, places = [], [], []
    for place, (stream, own) in enumerate(zip(streams, np.random.SeedSequence(seed).spawn(len(streams)), strict=True)):
        random = np.random.default_rng(own)
        at_s, sizes = _requests(stream, seconds, random)
        times.append(at_s)
        rows.append(sizes)
        places.append(np.full(len(at_s), place, dtype=np.int16))
    if not times:
        raise SpecError("A load needs at least one stream of requests. No load is made. Give one.")
    at_s = np.concatenate(times)
    order = np.argsort(at_s, kind="stable")
    return Traffic(at_s[order], np.concatenate(rows)[order], np.concatenate(places)[order], seconds)


def poisson(rate_per_s: float, seconds: float, random: np.random.Generator) -> FloatArray:
    """Arrivals independent of each other, at a mean rate."""
    return np.sort(random.uniform(0, seconds, random.poisson(rate_per_s * seconds)))


def constant(rate_per_s: float, seconds: float) -> FloatArray:
    """Arrivals at equal distances, the first at 0."""
    return np.arange(math.ceil(rate_per_s * seconds - 1e-9), dtype=np.float64) / rate_per_s


def burst(
    base_per_s: float, peak_per_s: float, every_s: float, for_s: float, seconds: float, random: np.random.Generator
) -> FloatArray:
    """Poisson arrivals at `base_per_s`; the last `for_s` of every `every_s` seconds are at `peak_per_s`."""
    most = max(base_per_s, peak_per_s)
    at_s = poisson(most, seconds, random)  # thinned to the rate of its moment (Lewis and Shedler)
    rate = np.where(at_s % every_s >= every_s - for_s, peak_per_s, base_per_s)
    return at_s[random.uniform(0, most, len(at_s)) < rate]


def recorded(path: Path, seconds: float, rate_per_s: float | None = None) -> FloatArray:
    """Arrivals of a file (see `read_recording`), in its own time, or stretched so that their mean rate is `rate_per_s`.

    It begins again after its end, until `seconds` are full.
    """
    return _replayed(read_recording(path), seconds, rate_per_s)[0]


def read_recording(path: Path) -> Recording:
    """A CSV of arrivals: a column at_s, timestamp or time (seconds, or ISO 8601), and a column rows where it is known.

    Without a heading the first column is the time and the second, if any, the rows. Raises SpecError for another file.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            lines = [(reader.line_num, line) for line in reader if line]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"The recording {path} cannot be read: {error}. No load is made.") from error
    heading = [cell.strip().lower() for cell in lines[0][1]] if lines else []
    named = next((name for name in TIME_COLUMNS if name in heading), None)
    time_column = heading.index(named) if named else 0
    rows_column = heading.index(ROWS_COLUMN) if named and ROWS_COLUMN in heading else None
    if named:
        lines = lines[1:]
    elif len(heading) > 1:
        rows_column = 1
    times, rows = [], []
    for number, line in lines:
        try:
            times.append(_seconds(line[time_column]))
            if rows_column is not None:
                rows.append(int(line[rows_column]))
                if not 0 < rows[-1] < 2**31:
                    raise ValueError(f"{rows[-1]} rows")
        except (ValueError, IndexError) as error:
            raise SpecError(
                f"{path}:{number}: {','.join(line)[:80]!r} is no arrival ({error}). No load is made. A recording is a CSV with a "
                f"column {' or '.join(TIME_COLUMNS)} (seconds, or ISO 8601) and, where it is known, a column {ROWS_COLUMN}."
            ) from error
    if len(times) < 2 or max(times) <= min(times):
        raise SpecError(f"{path} holds fewer than two different arrival times. No load is made. Record a longer time.")
    at_s = np.array(times, dtype=np.float64)
    order = np.argsort(at_s, kind="stable")
    sizes = np.array(rows, dtype=np.int32)[order] if rows else None
    return Recording(at_s[order] - at_s.min(), sizes)


def _requests(stream: Stream, seconds: float, random: np.random.Generator) -> tuple[FloatArray, npt.NDArray[np.int32]]:
    _check(stream, seconds)
    if stream.arrivals == "recorded":
        assert stream.recording is not None
        at_s, sizes = _replayed(read_recording(stream.recording), seconds, stream.rate_per_s or None)
        return at_s, sizes if sizes is not None else _sizes(stream.rows, len(at_s), random)
    if stream.arrivals == "constant":
        at_s = constant(stream.rate_per_s, seconds)
    elif stream.arrivals == "burst":
        at_s = burst(stream.rate_per_s, stream.peak_per_s, stream.every_s, stream.for_s, seconds, random)
    else:
        at_s = poisson(stream.rate_per_s, seconds, random)
    return at_s, _sizes(stream.rows, len(at_s), random)


def _check(stream: Stream, seconds: float) -> None:
    """Raise SpecError for numbers that make no load."""
    sizes = {stream.rows: 1.0} if isinstance(stream.rows, int) else stream.rows
    problems = {
        f"it has to last longer than 0 s, not {seconds:g}": not 0 < seconds < math.inf,
        f"a rate of {stream.rate_per_s:g} requests/s is none": not 0 <= stream.rate_per_s < math.inf,
        "it has no rate": stream.rate_per_s == 0 and stream.arrivals in ("poisson", "constant"),
        f"rows {stream.rows} are no sizes of requests": not sizes or min(sizes) < 1 or max(sizes) >= 2**31,
        "the weights of its sizes must not be negative, nor all 0": min(sizes.values(), default=0) < 0
        or not 0 < sum(sizes.values()) < math.inf,
        "arrivals burst need peak_per_s, every_s and for_s, a burst shorter than from one to the next": (
            stream.arrivals == "burst"
            and not (0 < stream.for_s < stream.every_s < math.inf and 0 < stream.peak_per_s < math.inf)
        ),
        "arrivals recorded need a recording": stream.arrivals == "recorded" and stream.recording is None,
        "only arrivals recorded have a recording": stream.arrivals != "recorded" and stream.recording is not None,
        "its slo_ms must be above 0": not stream.slo_ms > 0,
    }
    wrong = [words for words, is_wrong in problems.items() if is_wrong]
    if wrong:
        raise SpecError(f"Stream {stream.name} cannot be: {'; '.join(wrong)}. No load is made. Correct it.")


def _sizes(rows: int | Mapping[int, float], count: int, random: np.random.Generator) -> npt.NDArray[np.int32]:
    if isinstance(rows, int):
        return np.full(count, rows, dtype=np.int32)
    weights = np.array(list(rows.values()), dtype=np.float64)
    return random.choice(np.array(list(rows), dtype=np.int32), size=count, p=weights / weights.sum())


def _replayed(
    recording: Recording, seconds: float, rate_per_s: float | None
) -> tuple[FloatArray, npt.NDArray[np.int32] | None]:
    count = len(recording.at_s)
    stretch = 1.0 if rate_per_s is None else count / recording.length_s / rate_per_s
    length_s = recording.length_s * stretch
    times = math.ceil(seconds / length_s)
    at_s = (recording.at_s * stretch + np.arange(times)[:, np.newaxis] * length_s).ravel()
    within = at_s < seconds
    return at_s[within], None if recording.rows is None else np.tile(recording.rows, times)[within]


def _seconds(text: str) -> float:
    """Seconds of a number or of an ISO 8601 moment."""
    try:
        found = float(text)
    except ValueError:
        found = datetime.datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()
    if not math.isfinite(found):
        raise ValueError(f"{text} is no time")
    return found
