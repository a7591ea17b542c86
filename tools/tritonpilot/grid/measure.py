"""What does one trial give, measured until its figures can be believed? Windows are repeated until their interval is narrow.

    row = measure(stage, trial, Effort(), tool="perf_analyzer", say=print)
    row.throughput, row.p99_ms, row.is_stable

An attempt is three windows or more of one run. One during which other processes or the host took the cores does not count,
unless all were like that: then the row says so.
"""

from __future__ import annotations

import datetime
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tritonpilot import machine, metrics, perf_analyzer, sweep
from tritonpilot.arrivals import FloatArray, Stream, traffic
from tritonpilot.control import ModelStatistics
from tritonpilot.errors import HostError, MeasurementError
from tritonpilot.grid.closed_loop import closed_loop
from tritonpilot.grid.estimate import Estimate, estimate
from tritonpilot.grid.plan import Trial
from tritonpilot.grid.row import Row
from tritonpilot.load import Target, run
from tritonpilot.machine import Limits, Noise
from tritonpilot.measurement import Point
from tritonpilot.stage import Stage

Protocol = Literal["grpc", "http"]
Tool = Literal["perf_analyzer", "load"]

CLIENT_CORES = 0.9  # of each of its cores: beyond, the client may be the limit
TIMEOUT_WINDOWS = 30  # a run of three windows that takes as long as thirty hangs
TIMEOUT_LEAST_S = 60.0


@dataclass(frozen=True)
class Effort:
    """How carefully a trial is measured, and from where.

    It has settled when the 95 % intervals of throughput and P99 reach no farther than `throughput_pct` and `p99_pct` from their
    means; until then it is attempted again, `attempts` times in all. `cpus` pins the client.
    """

    window_ms: int = 1500
    attempts: int = 3
    throughput_pct: float = 5.0
    p99_pct: float = 15.0
    protocol: Protocol = "grpc"
    cpus: tuple[int, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Seen:
    """What a client saw of one attempt: fields of Point, and each window's figures."""

    figures: Mapping[str, Any]
    throughputs: FloatArray  # infer/s
    p99s_ms: FloatArray
    errors: Mapping[str, int] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)  # the server's about the first error of each kind


@dataclass(frozen=True)
class Shot:
    """One attempt: its figures, its windows, and what else the machine did."""

    point: Point
    throughputs: tuple[float, ...]  # infer/s, of each window
    p99s_ms: tuple[float, ...]
    batch_sizes: Mapping[int, int]
    errors: Mapping[str, int]
    requests: int
    noise: Noise
    words: Mapping[str, str] = field(default_factory=dict)


def measure(stage: Stage, trial: Trial, effort: Effort, tool: Tool, say: Callable[[str], None]) -> Row:
    """Measure what is served on the stage under the load of a trial.

    Where perf_analyzer is missing, crashes or refuses the model's errors, our own load measures instead and the row says so.
    Raises ServerError when the server died, MeasurementError when both fail.
    """
    began = time.monotonic()
    notes: tuple[str, ...] = ()
    if tool == "perf_analyzer":
        try:
            shots = _attempts(stage, trial, effort, _by_perf_analyzer, say)
        except (MeasurementError, HostError) as error:
            stage.check_alive()
            reason = str(error).partition(". Nothing was measured")[0].partition(". There is no figure")[0]
            say(f"perf_analyzer does not measure this, so `tritonpilot load` does: {reason}")
            notes += (f"measured by tritonpilot's own load, for perf_analyzer failed: {reason}",)
            tool = "load"
            try:
                shots = _attempts(stage, trial, effort, _by_load, say)
            except MeasurementError as second:
                raise MeasurementError(f"perf_analyzer failed: {reason}. {second}") from second
    else:
        shots = _attempts(stage, trial, effort, _by_load, say)
    stage.server.check_alive()
    row = summed(trial, shots, effort, tool)
    return replace(
        row,
        notes=notes + row.notes,
        seconds=time.monotonic() - began,
        measured_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )


def summed(trial: Trial, shots: Sequence[Shot], effort: Effort, tool: Tool) -> Row:
    """The row of a trial from its attempts: of the quiet ones, or of all where none was quiet."""
    kept = [shot for shot in shots if shot.noise.is_quiet] or list(shots)
    throughput, p99_ms = _estimates(kept)
    worst = max((shot.noise for shot in kept), key=lambda noise: (not noise.is_quiet, noise.other_cores))
    is_stable = _has_settled(throughput, p99_ms, effort)
    notes = []
    if not worst.is_quiet:
        notes.append(f"the machine was not quiet: {worst.reason}")
    if not is_stable:
        notes.append(
            f"did not settle in {len(kept)} attempt{'s' * (len(kept) > 1)}: throughput \N{PLUS-MINUS SIGN}{throughput.pct:.0f} %, "
            f"P99 \N{PLUS-MINUS SIGN}{p99_ms.pct:.0f} %"
        )
    busiest = max(shot.point.client_cores for shot in kept)
    cores = len(effort.cpus or os.sched_getaffinity(0)) if tool == "perf_analyzer" else 1
    if busiest > CLIENT_CORES * cores:
        notes.append(f"the client used {busiest:.2f} cores and may have been the limit")
    words = {kind: text for shot in kept for kind, text in shot.words.items()}
    notes += [f"requests failed, {kind}: {text}" for kind, text in words.items()]
    point = _mean([shot.point for shot in kept], throughput, p99_ms, is_stable)
    return Row(
        trial=trial,
        point=point,
        throughput=throughput,
        p99_ms=p99_ms,
        batch_sizes=_added([shot.batch_sizes for shot in kept]),
        errors=_added([shot.errors for shot in kept]),
        requests=sum(shot.requests for shot in kept),
        noise=worst,
        tool=tool,
        is_stable=is_stable,
        notes=tuple(notes),
    )


Way = Callable[[Stage, Trial, Effort], Seen]


def _attempts(stage: Stage, trial: Trial, effort: Effort, way: Way, say: Callable[[str], None]) -> list[Shot]:
    shots: list[Shot] = []
    for attempt in range(1, effort.attempts + 1):
        shots.append(_shot(stage, trial, effort, way))
        quiet = [shot for shot in shots if shot.noise.is_quiet]
        if quiet and _has_settled(*_estimates(quiet), effort):
            break
        if attempt < effort.attempts:
            noise = shots[-1].noise
            why = noise.reason if not noise.is_quiet else "it has not settled"
            say(f"{trial.load} is measured again: {why}")
    return shots


def _shot(stage: Stage, trial: Trial, effort: Effort, way: Way) -> Shot:
    """One attempt, with Triton's counters and the machine's around it."""
    cores = sorted(os.sched_getaffinity(0))
    before, machine_before = _statistics(stage), machine.sample(cores)
    seen = way(stage, trial, effort)
    noise = machine.judge(machine_before, machine.sample(cores), len(cores), effort.limits)
    after = _statistics(stage)
    delta = metrics.total(after) - metrics.total(before)
    point = Point(
        model=stage.model,
        batch=trial.rows,
        concurrency=trial.concurrency,
        rate_per_s=trial.rate_per_s,
        mean_batch=delta.mean_batch,
        queue_ms=delta.queue_us / 1e3,
        compute_ms=delta.compute_us / 1e3,
        is_stable=False,
        spread_pct=_spread_pct(seen.throughputs, seen.p99s_ms),
        **seen.figures,
    )
    sizes_before, sizes_after = (_added([v.batch_executions for v in each]) for each in (before, after))
    sizes = {size: count - sizes_before.get(size, 0) for size, count in sizes_after.items()}
    return Shot(
        point=point,
        throughputs=tuple(seen.throughputs.tolist()),
        p99s_ms=tuple(seen.p99s_ms.tolist()),
        batch_sizes={size: count for size, count in sorted(sizes.items()) if count > 0},
        errors=seen.errors,
        requests=delta.success,
        noise=noise,
        words=seen.words,
    )


def _by_perf_analyzer(stage: Stage, trial: Trial, effort: Effort) -> Seen:
    with tempfile.TemporaryDirectory(prefix="tritonpilot-sweep-") as folder:
        input_data = Path(folder, "input.json")
        perf_analyzer.write_input_data(input_data, stage.samples)
        load = perf_analyzer.Load(
            model=stage.model,
            url=stage.endpoints.http if effort.protocol == "http" else stage.endpoints.grpc,
            protocol=effort.protocol,
            batch=trial.rows,
            concurrency=trial.concurrency,
            request_rate_per_s=trial.rate_per_s,
            window_ms=effort.window_ms,
            max_windows=perf_analyzer.WINDOWS,
            accepts_unstable=True,
            percentile=99,
            input_data=input_data,
        )
        timeout_s = max(TIMEOUT_LEAST_S, TIMEOUT_WINDOWS * effort.window_ms / 1e3)
        reading = perf_analyzer.run(load, cpus=effort.cpus or None, timeout_s=timeout_s)
    return Seen(
        {"protocol": effort.protocol, **sweep.figures(reading)},
        np.array([window.throughput_infer_s for window in reading.windows]),
        np.array([window.latency_us / 1e3 for window in reading.windows]),
    )


def _by_load(stage: Stage, trial: Trial, effort: Effort) -> Seen:
    seconds = max(3.0, perf_analyzer.WINDOWS * effort.window_ms / 1e3)
    way = _closed if trial.concurrency is not None else _open
    return way(stage, trial, effort, seconds)


def _closed(stage: Stage, trial: Trial, effort: Effort, seconds: float) -> Seen:
    assert trial.concurrency is not None
    if effort.protocol != "grpc":
        raise MeasurementError(
            f"tritonpilot's own load keeps requests in flight over gRPC alone, and {effort.protocol} was asked for. There is no "
            "figure for this load. Use --rate, or --protocol grpc."
        )
    found = closed_loop(
        Target(stage.endpoints.grpc, "grpc"),
        stage.model,
        stage.samples,
        size=trial.rows,
        concurrency=trial.concurrency,
        seconds=seconds,
        cpus=effort.cpus,
    )
    p50, p90, p95, p99 = np.quantile(found.latency_ms, (0.5, 0.9, 0.95, 0.99)).tolist()
    windows = [found.latency_ms[found.done_s.astype(int) == second] for second in range(int(seconds))]
    figures = {
        "protocol": "grpc",
        "throughput_infer_s": trial.rows * float((found.done_s < seconds).sum()) / seconds,
        "avg_ms": float(found.latency_ms.mean()),
        "p50_ms": p50,
        "p90_ms": p90,
        "p95_ms": p95,
        "p99_ms": p99,
        "network_ms": math.nan,
        "client_ms": math.nan,
        "client_cores": found.client_cores,
    }
    throughputs = np.array([float(trial.rows * len(window)) for window in windows])
    p99s_ms = np.array([float(np.quantile(window, 0.99)) for window in windows if len(window)])
    return Seen(figures, throughputs, p99s_ms, found.errors, found.words)


def _open(stage: Stage, trial: Trial, effort: Effort, seconds: float) -> Seen:
    assert trial.rate_per_s is not None
    streams = [Stream("sweep", trial.rate_per_s, rows=trial.rows)]
    url = stage.endpoints.http if effort.protocol == "http" else stage.endpoints.grpc
    outcome, facts = run(
        Target(url, effort.protocol),
        stage.model,
        stage.samples,
        traffic(streams, seconds, seed=0),
        streams,
        cpus=effort.cpus or None,
    )
    figures = {
        "protocol": effort.protocol,
        "throughput_infer_s": outcome.rows_per_s,
        "avg_ms": outcome.latency.mean_us / 1e3,
        **{f"p{pct}_ms": outcome.p_ms(pct / 100) for pct in (50, 90, 95, 99)},
        "network_ms": math.nan,
        "client_ms": math.nan,
        "client_cores": facts.cores,
    }
    series = outcome.series[: int(seconds)]
    throughputs = np.array([float(trial.rows * each.answered) for each in series])
    p99s_ms = np.array([each.p99_ms for each in series if math.isfinite(each.p99_ms)])
    return Seen(figures, throughputs, p99s_ms, outcome.errors, facts.errors)


def _statistics(stage: Stage) -> list[ModelStatistics]:
    return stage.server.statistics(stage.model)


def _estimates(shots: Sequence[Shot]) -> tuple[Estimate, Estimate]:
    throughputs = [each for shot in shots for each in shot.throughputs]
    p99s = [each for shot in shots for each in shot.p99s_ms]
    if not throughputs or not p99s:
        raise MeasurementError(
            "No window of the measurement has a figure: no request was answered within one. There is no figure for this load. "
            "Lengthen the windows (--window-ms), or send more."
        )
    return estimate(throughputs), estimate(p99s)


def _has_settled(throughput: Estimate, p99_ms: Estimate, effort: Effort) -> bool:
    return throughput.pct <= effort.throughput_pct and p99_ms.pct <= effort.p99_pct


def _spread_pct(throughputs: FloatArray, p99s_ms: FloatArray) -> float:
    """As perf_analyzer counts: largest over smallest window, less one, the larger of both figures."""
    ratios = [float(each.max() / each.min()) for each in (throughputs, p99s_ms) if len(each) and each.min() > 0]
    return 100 * (max(ratios) - 1) if ratios else math.inf


def _mean(points: Sequence[Point], throughput: Estimate, p99_ms: Estimate, is_stable: bool) -> Point:
    """The figures of several attempts as one point: their means; the spread is that of the worst."""
    every = [asdict(point) for point in points]
    means: dict[str, Any] = {
        name: float(np.mean([each[name] for each in every]))
        for name, value in every[0].items()
        if isinstance(value, float) and name != "rate_per_s"
    }
    means.update(
        throughput_infer_s=throughput.mean,
        p99_ms=p99_ms.mean,
        spread_pct=max(point.spread_pct for point in points),
        is_stable=is_stable,
    )
    return replace(points[0], **means)


def _added(counts: Sequence[Mapping[Any, int]]) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return dict(sorted(found.items()))
