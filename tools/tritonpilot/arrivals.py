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
MOST_REQUESTS = 100_000_000  # of one load: their times and sizes take 5 GB while they are put in order
ALL = "all"  # the name of the sum of all streams


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


def traffic(
    streams: Sequence[Stream], seconds: float, seed: int, *, replicas: int = 1, most: int = MOST_REQUESTS
) -> Traffic:
    """The requests of all streams within `seconds`; of several `replicas`, those of one, when each request goes to any of them.

    Raises SpecError for a stream that cannot be, a bad recording, or more than `most` requests.
    """
    if len(streams) > 1 and any(stream.name == ALL for stream in streams):
        raise SpecError(f"A stream beside others is named {ALL}, and so is their sum. No load is made. Rename it.")
    times, rows, places = [], [], []
    room = most
    for place, (stream, own) in enumerate(zip(streams, np.random.SeedSequence(seed).spawn(len(streams)), strict=True)):
        random = np.random.default_rng(own)
        at_s, sizes = _requests(stream, seconds, random, room, replicas)
        room -= len(at_s)
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
    return np.arange(_count_of(rate_per_s, seconds), dtype=np.float64) / rate_per_s


def burst(
    base_per_s: float, peak_per_s: float, every_s: float, for_s: float, seconds: float, random: np.random.Generator
) -> FloatArray:
    """Poisson arrivals at `base_per_s`; the last `for_s` of every `every_s` seconds are at `peak_per_s`."""
    burst_s, between_s = _burst_s(every_s, for_s, seconds), every_s - for_s
    inside = poisson(
        peak_per_s, burst_s, random
    )  # of the bursts one after the other, and then of the time between them
    outside = poisson(base_per_s, seconds - burst_s, random)
    return np.sort(
        np.concatenate(
            [
                inside // for_s * every_s + between_s + inside % for_s,
                outside // between_s * every_s + outside % between_s,
            ]
        )
    )


def recorded(path: Path, seconds: float, rate_per_s: float | None = None) -> FloatArray:
    """Arrivals of a file (see `read_recording`), in its own time, or stretched so that their mean rate is `rate_per_s`.

    It begins again after its end, until `seconds` are full.
    """
    return _replayed(read_recording(path), seconds, rate_per_s, 1, np.random.default_rng(0))[0]


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


def _requests(
    stream: Stream, seconds: float, random: np.random.Generator, room: int, replicas: int
) -> tuple[FloatArray, npt.NDArray[np.int32]]:
    _check(stream, seconds)
    recording = None if stream.recording is None else read_recording(stream.recording)
    _check_room(stream, _expected(stream, seconds, recording) / replicas, seconds, room)
    rate_per_s, peak_per_s = stream.rate_per_s / replicas, stream.peak_per_s / replicas
    if recording is not None:
        at_s, sizes = _replayed(recording, seconds, stream.rate_per_s or None, replicas, random)
        return at_s, sizes if sizes is not None else _sizes(stream.rows, len(at_s), random)
    if stream.arrivals == "constant":
        at_s = _drawn(_count_of(stream.rate_per_s, seconds), replicas, random) / stream.rate_per_s
    elif stream.arrivals == "burst":
        at_s = burst(rate_per_s, peak_per_s, stream.every_s, stream.for_s, seconds, random)
    else:
        at_s = poisson(rate_per_s, seconds, random)
    return at_s, _sizes(stream.rows, len(at_s), random)


def _expected(stream: Stream, seconds: float, recording: Recording | None) -> float:
    """How many requests a stream has within `seconds`, the mean."""
    if recording is not None and not stream.rate_per_s:
        return len(recording.at_s) * (seconds / recording.length_s)
    burst_s = _burst_s(stream.every_s, stream.for_s, seconds) if stream.arrivals == "burst" else 0.0
    return stream.rate_per_s * (seconds - burst_s) + stream.peak_per_s * burst_s


def _burst_s(every_s: float, for_s: float, seconds: float) -> float:
    """How much of a time is within bursts, which are the last `for_s` of every `every_s`."""
    periods, rest_s = divmod(seconds, every_s)
    return periods * for_s + max(0.0, rest_s - (every_s - for_s))


def _count_of(rate_per_s: float, seconds: float) -> int:
    return math.ceil(rate_per_s * seconds - 1e-9)


def _drawn(count: int, replicas: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Which of `count` requests in a row one of the replicas gets, rising, without making the others."""
    if replicas == 1:
        return np.arange(count)
    mean = count / replicas
    gaps = random.geometric(
        1 / replicas, math.ceil(mean + 7 * math.sqrt(mean) + 10)
    )  # enough but for once in 1e11 loads
    places: npt.NDArray[np.int64] = np.cumsum(gaps) - 1
    return places[places < count]


def _check_room(stream: Stream, requests: float, seconds: float, room: int) -> None:
    """Raise SpecError before memory is taken for more requests than a load may have."""
    if requests > room:
        raise SpecError(
            f"Stream {stream.name} would be {requests:,.0f} requests within {seconds:g} s, and a load has room for {room:,} of "
            "them. No load is made. Lower the rate or the time."
        )


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


def check_sizes(streams: Sequence[Stream], max_batch_size: int) -> None:
    """Raise SpecError for requests of more rows than the model takes (a recording's own sizes are not looked at)."""
    for stream in streams:
        largest = stream.rows if isinstance(stream.rows, int) else max(stream.rows)
        if largest > max_batch_size:
            raise SpecError(
                f"Requests of {stream.name} have up to {largest:,} rows, and the model's max_batch_size is "
                f"{max_batch_size}: Triton refuses them. No load is made. Send fewer rows, or raise max_batch_size."
            )


def _sizes(rows: int | Mapping[int, float], count: int, random: np.random.Generator) -> npt.NDArray[np.int32]:
    if isinstance(rows, int):
        return np.full(count, rows, dtype=np.int32)
    weights = np.array(list(rows.values()), dtype=np.float64)
    return random.choice(np.array(list(rows), dtype=np.int32), size=count, p=weights / weights.sum())


def _replayed(
    recording: Recording, seconds: float, rate_per_s: float | None, replicas: int, random: np.random.Generator
) -> tuple[FloatArray, npt.NDArray[np.int32] | None]:
    count = len(recording.at_s)
    stretch = 1.0 if rate_per_s is None else count / recording.length_s / rate_per_s
    length_s = recording.length_s * stretch
    repetition, place = np.divmod(_drawn(math.ceil(seconds / length_s) * count, replicas, random), count)
    at_s = recording.at_s[place] * stretch + repetition * length_s
    within = at_s < seconds
    return at_s[within], None if recording.rows is None else recording.rows[place[within]]


def _seconds(text: str) -> float:
    """Seconds of a number or of an ISO 8601 moment."""
    try:
        found = float(text)
    except ValueError:
        found = datetime.datetime.fromisoformat(text.strip().replace("Z", "+00:00")).timestamp()
    if not math.isfinite(found):
        raise ValueError(f"{text} is no time")
    return found
