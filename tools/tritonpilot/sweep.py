"""How does a served model behave from load to load? perf_analyzer's view and Triton's own, as one point each.

for point in measure("127.0.0.1:8001", "ctr", samples.read(path), concurrencies=(1, 4, 16, 64)):
    ...                                    # each comes as soon as it is measured
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from tritonpilot import metrics, perf_analyzer
from tritonpilot.measurement import Point
from tritonpilot.perf_analyzer import Load, Reading

WINDOW_MS = 1500
STABILITY_PCT = 20.0
ATTEMPTS = 2


def measure(
    grpc_url: str,
    model: str,
    samples: Mapping[str, npt.NDArray[Any]],
    *,
    concurrencies: Sequence[int] = (),
    rates_per_s: Sequence[float] = (),
    batch: int = 1,
    http_url: str | None = None,
    window_ms: int = WINDOW_MS,
    stability_pct: float = STABILITY_PCT,
    attempts: int = ATTEMPTS,
    budget_s: float = float("inf"),
    percentile: int | None = None,
    parameters: Mapping[str, int | str | bool] | None = None,
    shared_memory: Literal["none", "system"] = "none",
    distribution: Literal["constant", "poisson"] = "poisson",
    cpus: Sequence[int] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Iterator[Point]:
    """Measure the model at each load and yield a point per load.

    Requests go over gRPC, or over HTTP when `http_url` is given; statistics always come over gRPC. A load takes three
    windows of about 1.2 * `window_ms`. One whose windows differ by more than `stability_pct` is measured again, up to
    `attempts` times in all; the calmest attempt is yielded and says `is_stable`.
    With `budget_s` an attempt is only repeated while the loads still to come fit into that time.
    Raises HostError without a perf_analyzer, ServerError or MeasurementError when server, model or requests fail.
    """
    say = on_progress or (lambda _: None)
    protocol: Literal["grpc", "http"] = "grpc" if http_url is None else "http"
    with tempfile.TemporaryDirectory(prefix="tritonpilot-sweep-") as folder:
        input_data = Path(folder, "input.json")
        perf_analyzer.write_input_data(input_data, samples)
        loads = [
            Load(
                model=model,
                url=http_url or grpc_url,
                protocol=protocol,
                batch=batch,
                concurrency=concurrency,
                request_rate_per_s=rate,
                distribution=distribution,
                window_ms=window_ms,
                stability_pct=stability_pct,
                max_windows=perf_analyzer.WINDOWS,
                accepts_unstable=True,
                percentile=percentile,
                input_data=input_data,
                parameters=parameters,
                shared_memory=shared_memory,
            )
            for concurrency, rate in [*((c, None) for c in concurrencies), *((None, r) for r in rates_per_s)]
        ]
        deadline = time.monotonic() + budget_s
        for place, load in enumerate(loads, start=1):
            yield _calmest(load, grpc_url, attempts, deadline, len(loads) - place, cpus, say)


def figures(reading: Reading) -> dict[str, float]:
    """The fields of a Point that perf_analyzer itself measures."""
    return {
        "throughput_infer_s": reading.throughput_infer_s,
        "avg_ms": reading.avg_us / 1e3,
        "p50_ms": reading.p50_us / 1e3,
        "p90_ms": reading.p90_us / 1e3,
        "p95_ms": reading.p95_us / 1e3,
        "p99_ms": reading.p99_us / 1e3,
        "network_ms": reading.network_us / 1e3,
        "client_ms": reading.client_us / 1e3,
        "client_cores": reading.client_cpu_s / reading.wall_s if reading.wall_s else float("nan"),
    }


def _calmest(
    load: Load,
    grpc_url: str,
    attempts: int,
    deadline: float,
    loads_to_come: int,
    cpus: Sequence[int] | None,
    say: Callable[[str], None],
) -> Point:
    at = (
        f"concurrency {load.concurrency}" if load.concurrency is not None else f"{load.request_rate_per_s:g} requests/s"
    )
    best: Point | None = None
    for attempt in range(1, attempts + 1):
        say(f"measuring '{load.model}' at {at}" + (f", attempt {attempt} of {attempts}" if attempt > 1 else ""))
        before = metrics.statistics(grpc_url, load.model)
        reading = perf_analyzer.run(load, cpus=cpus)
        point = _point(load, reading, metrics.statistics(grpc_url, load.model) - before)
        if best is None or point.spread_pct < best.spread_pct:
            best = point
        if best.is_stable:
            break
        say(f"the windows at {at} differ by {point.spread_pct:.0f} % (allowed {load.stability_pct:g} %)")
        if time.monotonic() + reading.wall_s * (1 + loads_to_come) > deadline:
            break
    if best is None:
        raise ValueError(f"attempts must be at least 1, not {attempts}")
    return best


def _point(load: Load, reading: Reading, delta: metrics.Statistics) -> Point:
    return Point(
        model=load.model,
        protocol=load.protocol,
        batch=load.batch,
        concurrency=load.concurrency,
        rate_per_s=load.request_rate_per_s,
        mean_batch=delta.mean_batch,
        queue_ms=delta.queue_us / 1e3,
        compute_ms=delta.compute_us / 1e3,
        spread_pct=reading.spread_pct,
        is_stable=reading.is_stable,
        **figures(reading),
    )
