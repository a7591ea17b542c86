"""What is one measured point of a served model, and how is it shown?

points = list(sweep.measure(...))
rich.print(table(points))        # for people
to_json(points)                  # for programs
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.table import Table


@dataclass(frozen=True)
class Point:
    """A model under one load. Times are ms per request, means unless named otherwise.

    `concurrency` (closed loop) or `rate_per_s` (open loop) is set. Client-side values come from perf_analyzer, server
    ones from the difference of Triton's statistics over the same run.
    """

    model: str
    protocol: Literal["grpc", "http"]
    batch: int
    concurrency: int | None
    rate_per_s: float | None
    throughput_infer_s: float
    avg_ms: float
    p50_ms: float
    p90_ms: float
    p95_ms: float
    p99_ms: float
    mean_batch: float
    queue_ms: float
    compute_ms: float
    network_ms: float
    client_ms: float
    client_cores: float
    spread_pct: float
    is_stable: bool

    @property
    def load(self) -> str:
        """The load in words that fit a cell."""
        return str(self.concurrency) if self.concurrency is not None else f"{self.rate_per_s:g}/s"


@dataclass(frozen=True)
class Metric:
    """A column: where the value comes from and how it is written."""

    name: str  # the attribute of Point
    header: str
    unit: str
    format: str
    source: str
    meaning: str
    is_shown: bool = True  # in the table; JSON has all


METRICS = (
    Metric("load", "load", "", "{}", "asked", "requests in flight (closed loop), or requests per second (open loop)"),
    Metric("throughput_infer_s", "throughput", "infer/s", "{:,.0f}", "perf_analyzer", "rows answered per second"),
    Metric("avg_ms", "avg", "ms", "{:.2f}", "perf_analyzer", "mean latency", is_shown=False),
    Metric("p50_ms", "P50", "ms", "{:.2f}", "perf_analyzer", "median latency"),
    Metric("p90_ms", "P90", "ms", "{:.2f}", "perf_analyzer", "90th percentile of latency", is_shown=False),
    Metric("p95_ms", "P95", "ms", "{:.2f}", "perf_analyzer", "95th percentile of latency", is_shown=False),
    Metric("p99_ms", "P99", "ms", "{:.2f}", "perf_analyzer", "99th percentile of latency"),
    Metric("mean_batch", "mean batch", "rows", "{:.1f}", "Triton statistics", "rows per execution"),
    Metric("queue_ms", "queue", "ms", "{:.2f}", "Triton statistics", "waiting for a batch and a free instance"),
    Metric("compute_ms", "compute", "ms", "{:.2f}", "Triton statistics", "input, inference and output of the batch"),
    Metric("network_ms", "network", "ms", "{:.2f}", "perf_analyzer", "transport and Triton's front end", is_shown=False),
    Metric("client_ms", "client", "ms", "{:.2f}", "perf_analyzer", "sending and receiving", is_shown=False),
    Metric("client_cores", "client CPU", "cores", "{:.2f}", "operating system", "CPU used by perf_analyzer; near the "
           "number of its cores the client is the limit", is_shown=False),
    Metric("spread_pct", "spread", "%", "{:.0f}", "perf_analyzer", "largest over smallest of the last three windows, "
           "less one", is_shown=False),
)  # fmt: skip


def table(points: Sequence[Point], *, title: str | None = None) -> Table:
    """A table of points with the shown columns; one that did not settle is marked with ~ and named below."""
    shown = [metric for metric in METRICS if metric.is_shown]
    drawn = Table(title=title, caption=caption(points))
    for metric in shown:
        header = _load_header(points) if metric.name == "load" else metric.header
        drawn.add_column(f"{header}\n{metric.unit}" if metric.unit else header, justify="right", no_wrap=True)
    for point in points:
        first, *rest = cells(point)
        drawn.add_row(first if point.is_stable else f"~{first}", *rest)
    return drawn


def cells(point: Point) -> tuple[str, ...]:
    """The texts of one row, in the order of the shown METRICS."""
    return tuple(_cell(metric, getattr(point, metric.name)) for metric in METRICS if metric.is_shown)


def caption(points: Sequence[Point]) -> str | None:
    """The sentence under a table that says which points did not settle; None when all did."""
    shaky = [f"{point.load} ({point.spread_pct:.0f} %)" for point in points if not point.is_stable]
    if not shaky:
        return None
    return f"~ did not settle: its three windows differ by more than allowed, at load {', '.join(shaky)}"


def to_json(points: Sequence[Point]) -> str:
    """A JSON array with one object per point: the fields of Point; a value that does not exist is null."""
    return json.dumps([_finite(asdict(point)) for point in points], indent=2)


def _cell(metric: Metric, value: object) -> str:
    write: Callable[[object], str] = metric.format.format
    return "-" if isinstance(value, float) and not math.isfinite(value) else write(value)


def _load_header(points: Sequence[Point]) -> str:
    return "rate" if points and all(point.rate_per_s is not None for point in points) else "concurrency"


def _finite(values: dict[str, object]) -> dict[str, object]:
    """NaN and infinity are no JSON."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
