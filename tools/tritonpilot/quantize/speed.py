"""Which of these models answers more rows per second on this CPU, at the batch sizes that the service sees?

    found = compare({"fp32": fp32, "int8": int8}, rows, [1, 16, 64], threads=1, seconds=2.0)
    found.ratio("int8", "fp32", 64)                     # 2.6: INT8 answers 2.6 times as many rows as FP32
    found.of("int8", 64).rows_per_s

All models are loaded in one process and take turns (ABBA), so that a change of clock or a busy neighbour meets all of them. Ratios
are medians over rounds of rows per CPU second, which other processes on the machine distort least; with a core to itself a model's
CPU second is a second.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tritonpilot.errors import MeasurementError, ModelError
from tritonpilot.quantize.data import Rows

Feed = dict[str, NDArray[Any]]
#: Called with what is being done, how much of it is done, and how much there is.
Progress = Callable[[str, int, int], None]

ROUNDS = 5
FEEDS = 8  # different batches that a model cycles through


@dataclass(frozen=True)
class Speed:
    """One model at one batch size; medians over the rounds."""

    model: str
    batch: int
    rows_per_s: float
    rows_per_cpu_s: float
    batch_ms: float
    """Wall time of a batch"""
    spread: float
    """(largest - smallest) / median of rows per CPU second over the rounds"""
    rounds: tuple[float, ...]
    """Rows per CPU second of each round"""


@dataclass(frozen=True)
class Comparison:
    """Speeds of all models at all batch sizes, measured in turns."""

    speeds: tuple[Speed, ...]
    threads: int

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(speed.batch for speed in self.speeds))

    def of(self, model: str, batch: int) -> Speed:
        """The speed of a model at a batch size; KeyError when it was not measured."""
        for speed in self.speeds:
            if (speed.model, speed.batch) == (model, batch):
                return speed
        raise KeyError((model, batch))

    def ratio(self, model: str, reference: str, batch: int) -> float:
        """How many times the rows of `reference` the model answers: the median over rounds of the two, side by side."""
        pairs = zip(self.of(model, batch).rounds, self.of(reference, batch).rounds, strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def least_ratio(self, model: str, reference: str) -> float:
        """The ratio at the batch size where the model gains least."""
        return min(self.ratio(model, reference, batch) for batch in self.batch_sizes)


def compare(
    models: Mapping[str, Path],
    rows: Rows,
    batch_sizes: Sequence[int],
    threads: int = 1,
    seconds: float = 2.0,
    *,
    rounds: int = ROUNDS,
    progress: Progress | None = None,
) -> Comparison:
    """Measure each model for about `seconds` at each batch size, split over `rounds` turns.

    When `rows` are fewer than a batch they are repeated. Padding that a whole batch shares is cut off, as a caller would not
    send it. Raises ModelError when a model cannot be run, MeasurementError when there is nothing to measure.
    """
    if not models or not batch_sizes or not rows.count or rounds < 1 or min(batch_sizes, default=0) < 1:
        raise MeasurementError(
            f"Nothing can be compared with {len(models)} models, {rows.count} rows, batch sizes {list(batch_sizes)} and "
            f"{rounds} rounds. Nothing was changed. Give at least one of each, and batches of one row or more."
        )
    found: list[Speed] = []
    with pinned(threads):
        sessions = {name: _session(path, threads) for name, path in models.items()}
        for place, batch in enumerate(batch_sizes):
            if progress is not None:
                progress(f"measuring {len(models)} models at batch {batch}", place, len(batch_sizes))
            feeds = list(_feeds(rows, batch))
            for name, session in sessions.items():
                _warm(session, models[name], feeds[0])
            turns: dict[str, list[tuple[float, float, int]]] = {name: [] for name in models}
            for turn in range(rounds):
                for name in list(models) if turn % 2 == 0 else reversed(list(models)):
                    turns[name].append(_turn(sessions[name], feeds, seconds / rounds))
            found += [_speed(name, batch, turns[name]) for name in models]
    return Comparison(tuple(found), threads)


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Keep this thread, and those that it starts, on `threads` of the CPUs it may use, as an instance of the server is.

    Without that right (or on a system without the call) nothing is pinned.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, sorted(before)[-threads:])
    except OSError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _feeds(rows: Rows, batch: int) -> Iterator[Feed]:
    """Up to FEEDS batches of exactly `batch` rows, spread over all rows."""
    wanted = FEEDS if rows.count >= batch * FEEDS else max(1, rows.count // batch)
    places = np.arange(wanted * batch) * max(1, rows.count // (wanted * batch)) % rows.count
    for feed in rows.take(places).batches(batch):
        yield trimmed(feed, rows.sequences)


def trimmed(feed: Feed, sequences: frozenset[str]) -> Feed:
    """Without the zeros at the end of all sequences [rows, length] of the batch; at least one column stays."""
    padded = [array for name, array in feed.items() if name in sequences and array.ndim == 2]
    if not padded or len({array.shape for array in padded}) > 1:
        return feed
    used = np.flatnonzero(np.any([(array != 0).any(axis=0) for array in padded], axis=0))
    length = int(used[-1]) + 1 if used.size else 1
    return {
        name: np.ascontiguousarray(array[:, :length]) if name in sequences and array.ndim == 2 else array
        for name, array in feed.items()
    }


def _session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting must not count as work
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ModelError(
            f"ONNX Runtime {ort.__version__} cannot load {path}: {_first_line(error)}. Nothing was changed. Quantise it again."
        ) from error


def _warm(session: ort.InferenceSession, path: Path, feed: Feed) -> None:
    try:
        session.run(None, feed)
    except Exception as error:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
        raise ModelError(
            f"{path} cannot be run on {shapes}: {_first_line(error)}. Nothing was changed. Check that the rows fit the model and "
            "that its batch dimension is dynamic."
        ) from error


def _turn(session: ort.InferenceSession, feeds: Sequence[Feed], seconds: float) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds, batches): whole cycles through the feeds, so that every model has the same work."""
    batches = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in itertools.count():
        for feed in feeds:
            session.run(None, feed)
        batches += len(feeds)
        if time.process_time() - cpu >= seconds:
            break
    return time.perf_counter() - wall, time.process_time() - cpu, batches


def _speed(name: str, batch: int, turns: Sequence[tuple[float, float, int]]) -> Speed:
    rates = [batch * batches / cpu for _, cpu, batches in turns]
    middle = statistics.median(rates)
    return Speed(
        model=name,
        batch=batch,
        rows_per_s=statistics.median(batch * batches / wall for wall, _, batches in turns),
        rows_per_cpu_s=middle,
        batch_ms=1000 * statistics.median(wall / batches for wall, _, batches in turns),
        spread=(max(rates) - min(rates)) / middle,
        rounds=tuple(rates),
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
