"""What does a Triton do right now, model by model and class by class? From its own pages, without Prometheus.

    endpoints = Endpoints(metrics="127.0.0.1:8002", http="127.0.0.1:8000", entry="127.0.0.1:8102")
    for view in views(endpoints, interval_s=2):      # without end; survives a restart of Triton
        rich.print(render(view))
    show(views(endpoints, 2), console)               # the same on the whole terminal, until Ctrl-C

A view is the difference of two readings. Triton has no histogram of latency: its P50 and P99 are those of its own sliding window,
where it is started with summary_latencies; the entry's are exact to its buckets, over the interval alone.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import math
import re
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tritonpilot import metrics
from tritonpilot.columns import Column, finite, table
from tritonpilot.errors import MeasurementError, SpecError

HTTP_TIMEOUT_S = 2
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")
_DETAILS = ("reason", "quantile", "status", "le")  # labels that tell the parts of one figure

SUCCESS, FAILURE = "nv_inference_request_success", "nv_inference_request_failure"
SUMMARY = "nv_inference_request_summary_us"
PROCESSED, LATENCY = "processed_requests_total", "inference_latency_seconds_bucket"
WAKES, COMPANION_WAKES = "pilot_wakes_total", "pilot_companion_wakes_total"

Key = tuple[str, ...]  # values of labels
Figures = Mapping[Key, Mapping[str, float]]  # "name" or "name:detail" -> value


@dataclass(frozen=True)
class Endpoints:
    """host:port of Triton's metrics and HTTP service, and of the entry's metrics; "" leaves one out."""

    metrics: str = "127.0.0.1:8002"
    http: str = "127.0.0.1:8000"
    entry: str = ""


@dataclass(frozen=True)
class Page:
    """A page of metrics and when it was read, in time.monotonic()."""

    at_s: float
    samples: tuple[metrics.Sample, ...]


@dataclass(frozen=True)
class Reading:
    """What was to be seen at one moment; None where it could not be read, and why."""

    triton: Page | None
    entry: Page | None
    server: str = ""  # "triton 2.51.0"
    instances: Mapping[Key, int] = dataclasses.field(default_factory=dict)  # by model and version
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelRow:
    """A version of a model. Rates are per second, times means over the interval; None where there is nothing to tell.

    A request is what a client sends, an inference one row of it. `pending` requests wait in Triton's queue. `rejected_per_s`
    waited too long in it, without the requests by which our backends wake their batcher; those that a full queue refuses are
    not in Triton 2.51's counters, but in the entry's.
    """

    model: str
    version: str
    instances: int | None
    requests_per_s: float | None
    inferences_per_s: float | None
    mean_batch: float | None
    pending: int
    queue_ms: float | None
    compute_ms: float | None
    p50_ms: float | None
    p99_ms: float | None
    rejected_per_s: float | None
    failed_per_s: float | None
    cache_hit_pct: float | None
    stub_memory_mb: float | None


@dataclass(frozen=True)
class ClassRow:
    """A class of a model, as the entry sees it, from arrival to answer.

    P50 and P99 are interpolated in the histogram; one that is `largest_bucket_ms` lies there or beyond.
    """

    model: str
    class_name: str
    ok_per_s: float | None
    refused_per_s: float | None
    timeout_per_s: float | None
    failed_per_s: float | None
    queue_size: int
    p50_ms: float | None
    p99_ms: float | None
    largest_bucket_ms: float | None
    slo_ms: float | None
    within_slo_pct: float | None


@dataclass(frozen=True)
class GpuRow:
    """A GPU."""

    gpu: str
    utilization_pct: float | None
    memory_used_gb: float | None
    memory_total_gb: float | None
    power_w: float | None


@dataclass(frozen=True)
class View:
    """What happened between two readings."""

    seconds: float | None  # None: there are no rates, because one of two readings failed
    server: str
    models: tuple[ModelRow, ...]
    classes: tuple[ClassRow, ...]
    gpus: tuple[GpuRow, ...]
    cpu_utilization_pct: float | None
    troubles: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        rows = {
            part: [finite(dataclasses.asdict(row)) for row in getattr(self, part)]
            for part in ("models", "classes", "gpus")
        }
        return {**finite(dataclasses.asdict(self)), **rows}


MODEL_COLUMNS = (
    Column("model", "model", is_word=True),
    Column("version", "ver", is_word=True, rank=8),
    Column("instances", "inst", rank=4),
    Column("requests_per_s", "requests", "1/s", "{:,.1f}"),
    Column("inferences_per_s", "rows", "1/s", "{:,.1f}", rank=3),
    Column("mean_batch", "batch", "rows", "{:,.1f}"),
    Column("pending", "pending", "", "{:,}"),
    Column("queue_ms", "queue", "ms", "{:,.1f}", rank=6),
    Column("compute_ms", "compute", "ms", "{:,.1f}", rank=9),
    Column("p50_ms", "P50", "ms", "{:,.1f}"),
    Column("p99_ms", "P99", "ms", "{:,.1f}"),
    Column("rejected_per_s", "rejected", "1/s", "{:,.1f}"),
    Column("failed_per_s", "failed", "1/s", "{:,.1f}"),
    Column("cache_hit_pct", "cache", "% hits", "{:.0f}", rank=7),
    Column("stub_memory_mb", "stubs", "MB", "{:,.0f}", rank=5),
)
CLASS_COLUMNS = (
    Column("model", "model", is_word=True),
    Column("class_name", "class", is_word=True),
    Column("ok_per_s", "ok", "1/s", "{:,.1f}"),
    Column("refused_per_s", "refused", "1/s", "{:,.1f}"),
    Column("timeout_per_s", "timeout", "1/s", "{:,.1f}"),
    Column("failed_per_s", "failed", "1/s", "{:,.1f}"),
    Column("queue_size", "queue", "", "{:,}"),
    Column("p50_ms", "P50", "ms"),
    Column("p99_ms", "P99", "ms"),
    Column("slo_ms", "SLO", "ms", "{:,g}", rank=1),
    Column("within_slo_pct", "within", "%", "{:.2f}"),
)
GPU_COLUMNS = (
    Column("gpu", "GPU", is_word=True),
    Column("utilization_pct", "busy", "%", "{:.0f}"),
    Column("memory_used_gb", "memory", "GB", "{:,.1f}"),
    Column("memory_total_gb", "of", "GB", "{:,.1f}"),
    Column("power_w", "power", "W", "{:,.0f}"),
)


def views(endpoints: Endpoints, interval_s: float = 2.0) -> Iterator[View]:
    """A view every `interval_s`, the first after as long. What cannot be read later on is told in View.troubles.

    Raises SpecError for a wrong address, and MeasurementError when something cannot be read the first time.
    """
    check(endpoints)
    before = read(endpoints)
    if before.triton is None or (endpoints.entry and before.entry is None):
        raise MeasurementError(" ".join(before.troubles))
    if not _is_of_triton(before.triton):
        raise MeasurementError(
            f"The page http://{endpoints.metrics}/metrics is not Triton's: no figure on it begins with nv_. Nothing is shown. "
            "Give Triton's metrics port (8002 by default)."
        )
    if before.entry is not None and _is_of_triton(before.entry):
        raise MeasurementError(
            f"The page http://{endpoints.entry}/metrics is a Triton's, not an entry's. Nothing is shown. Give the entry's metrics "
            "port (8102 by default), or leave --entry out."
        )
    return _follow(endpoints, interval_s, before)


def check(endpoints: Endpoints) -> None:
    """Raises SpecError for what is no HOST:PORT."""
    for field in dataclasses.fields(endpoints):
        address = getattr(endpoints, field.name)
        may_lack = field.name != "metrics" and not address
        if not may_lack and not is_address(address):
            raise SpecError(
                f"--{field.name} is {address!r}, but must be HOST:PORT, as 127.0.0.1:8002. Nothing was read."
            )


def is_address(text: str) -> bool:
    """Whether it is a HOST:PORT."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found[1]) < 65536


def read(endpoints: Endpoints) -> Reading:
    """What is to be seen now. Raises nothing: what cannot be read is told."""
    troubles: list[str] = []
    triton = _page(endpoints.metrics, troubles)
    entry = _page(endpoints.entry, troubles) if endpoints.entry else None
    server = ""
    instances: dict[Key, int] = {}
    if endpoints.http and triton is not None:
        try:
            server = "{name} {version}".format(**_get(endpoints.http, "/v2"))
            models = gather(triton.samples, ("model", "version"))
            instances = {key: count for key in models if (count := _instances(endpoints.http, *key)) is not None}
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:
            troubles.append(
                f"Triton's HTTP service at {endpoints.http} does not describe its models ({error or type(error).__name__}); "
                "instances are not shown."
            )
    return Reading(triton, entry, server, instances, tuple(troubles))


def compare(before: Reading, now: Reading) -> View:
    """What happened between two readings. A counter that ran backwards began anew at 0: its server or model was started again."""
    seconds = now.triton.at_s - before.triton.at_s if before.triton and now.triton else None
    return View(
        seconds,
        now.server,
        tuple(sorted(_model_rows(before.triton, now), key=lambda row: -(row.inferences_per_s or 0))),
        tuple(_class_rows(before.entry, now.entry)),
        tuple(_gpu_rows(now.triton)),
        _pct(gather(now.triton.samples, ()).get((), {}).get("nv_cpu_utilization") if now.triton else None),
        now.troubles,
    )


def render(view: View, width: int | None = None) -> RenderableType:
    """The view for a terminal of that width; without one in full."""
    about = "now, without rates" if view.seconds is None else f"over {view.seconds:.1f} s"
    cpu = "" if view.cpu_utilization_pct is None else f", CPU {view.cpu_utilization_pct:.0f} %"
    parts: list[RenderableType] = [Text(f"{view.server or 'Triton'}, {about}{cpu}", style="bold")]
    parts += [Text(trouble, style="red") for trouble in view.troubles]
    for columns, rows in (
        (CLASS_COLUMNS, [_beyond(row) for row in view.classes]),
        (MODEL_COLUMNS, [dataclasses.asdict(row) for row in view.models]),
        (GPU_COLUMNS, [dataclasses.asdict(row) for row in view.gpus]),
    ):
        if rows:
            parts += [Text(), table(columns, rows, width=width)]
    return Group(*parts)


def show(shown: Iterable[View], console: Console) -> None:
    """Show views on the whole terminal, each in place of the one before."""
    waiting = Text("reading; Ctrl-C ends", style="dim")
    with Live(waiting, console=console, screen=True, auto_refresh=False) as live:
        live.refresh()
        for view in shown:
            live.update(Group(render(view, console.width), Text(), Text("Ctrl-C ends", style="dim")), refresh=True)


def gather(samples: Iterable[metrics.Sample], by: Key) -> dict[Key, dict[str, float]]:
    """The samples that have the labels `by`, under their values; those that differ in other labels alone are summed."""
    found: dict[Key, dict[str, float]] = {}
    for sample in samples:
        if any(label not in sample.labels for label in by) or (not by and sample.labels):
            continue
        details = [sample.labels[label] for label in _DETAILS if label in sample.labels]
        name = ":".join([sample.name, *details])
        figures = found.setdefault(tuple(sample.labels[label] for label in by), {})
        figures[name] = figures.get(name, 0.0) + sample.value
    return found


def increases(before: Figures, now: Figures) -> dict[Key, dict[str, float]]:
    """By how much each figure grew; a counter that is smaller than before was started again at 0, one that is new too."""
    found = {}
    for key, figures in now.items():
        earlier = before.get(key, {})
        found[key] = {
            name: value - earlier.get(name, 0.0) if value >= earlier.get(name, 0.0) else value
            for name, value in figures.items()
        }
    return found


def percentile(buckets: Mapping[float, float], share: float) -> float | None:
    """The value below which `share` of the observations lie, from cumulative counts by upper edge.

    As Prometheus' histogram_quantile: interpolated, and the largest finite edge for what lies beyond it. None without observations.
    """
    edges = sorted(buckets)
    total = buckets[edges[-1]] if edges else 0.0
    finite_edges = [edge for edge in edges if math.isfinite(edge)]
    if total <= 0 or not finite_edges:
        return None
    wanted = share * total
    lower, below = 0.0, 0.0
    for edge in finite_edges:
        if buckets[edge] >= wanted:
            inside = buckets[edge] - below
            return lower + (edge - lower) * (wanted - below) / inside if inside > 0 else edge
        lower, below = edge, buckets[edge]
    return finite_edges[-1]


def _follow(endpoints: Endpoints, interval_s: float, before: Reading) -> Iterator[View]:
    while True:
        time.sleep(interval_s)
        now = read(endpoints)
        yield compare(before, now)
        before = now


def _is_of_triton(page: Page) -> bool:
    return any(sample.name.startswith("nv_") for sample in page.samples)


def _page(address: str, troubles: list[str]) -> Page | None:
    try:
        return Page(time.monotonic(), metrics.scrape(address))
    except MeasurementError as error:
        troubles.append(str(error))
    return None


def _get(address: str, path: str) -> dict[str, Any]:
    with metrics.DIRECT.open(f"http://{address}{path}", timeout=HTTP_TIMEOUT_S) as answer:
        said: dict[str, Any] = json.load(answer)
    return said


def _instances(address: str, model: str, version: str) -> int | None:
    """Instances of all groups, on each of a group's GPUs; None for an ensemble, which has none, and a model that has just gone."""
    name = urllib.parse.quote(model, safe="")
    try:
        groups = _get(address, f"/v2/models/{name}/versions/{version}/config").get("instance_group", [])
    except urllib.error.HTTPError:
        return None
    return sum(int(group.get("count", 1)) * max(1, len(group.get("gpus", []))) for group in groups) or None


def _model_rows(before: Page | None, now: Reading) -> Iterator[ModelRow]:
    if now.triton is None:
        return
    by = ("model", "version")
    figures = gather(now.triton.samples, by)
    grown = increases(gather(before.samples, by), figures) if before else {}
    seconds = now.triton.at_s - before.at_s if before else math.nan
    by_model = ("model",)
    woken = increases(gather(before.samples, by_model), gather(now.triton.samples, by_model)) if before else {}
    for key, figure in figures.items():
        if SUCCESS not in figure:
            continue
        rate, mean = _rates(grown.get(key), seconds)
        wakes = grown.get(key, {}).get(WAKES, 0.0) + woken.get(key[:1], {}).get(COMPANION_WAKES, 0.0)
        rejected = rate(f"{FAILURE}:REJECTED")
        memory = figure.get("pilot_stub_memory_bytes")
        hits, misses = "nv_cache_num_hits_per_model", "nv_cache_num_misses_per_model"
        yield ModelRow(
            model=key[0],
            version=key[1],
            instances=now.instances.get(key),
            requests_per_s=rate(SUCCESS),
            inferences_per_s=rate("nv_inference_count"),
            mean_batch=mean(["nv_inference_count"], ["nv_inference_exec_count"]),
            pending=int(figure.get(metrics.PENDING, 0)),
            queue_ms=_scaled(mean(["nv_inference_queue_duration_us"], [SUCCESS]), 1e-3),
            compute_ms=_scaled(
                mean([f"nv_inference_compute_{part}_duration_us" for part in ("input", "infer", "output")], [SUCCESS]),
                1e-3,
            ),
            p50_ms=_scaled(figure.get(f"{SUMMARY}:0.5"), 1e-3),
            p99_ms=_scaled(figure.get(f"{SUMMARY}:0.99"), 1e-3),
            rejected_per_s=None if rejected is None else max(0.0, rejected - wakes / seconds),
            failed_per_s=rate(*(f"{FAILURE}:{reason}" for reason in ("BACKEND", "OTHER"))),
            cache_hit_pct=_scaled(mean([hits], [hits, misses]), 100),
            stub_memory_mb=_scaled(memory, 1e-6),
        )


def _class_rows(before: Page | None, now: Page | None) -> Iterator[ClassRow]:
    if now is None:
        return
    by = ("model", "class")
    figures = gather(now.samples, by)
    grown = increases(gather(before.samples, by), figures) if before else {}
    seconds = now.at_s - before.at_s if before else math.nan
    for key in sorted(figures):
        figure, growth = figures[key], grown.get(key, {})
        rate, mean = _rates(grown.get(key), seconds)
        statuses = [name for name in figure if name.startswith(f"{PROCESSED}:")]
        refused = [name for name in statuses if name.startswith(f"{PROCESSED}:refused_")]
        buckets = {float(name.rpartition(":")[2]): n for name, n in growth.items() if name.startswith(f"{LATENCY}:")}
        edges = [edge for edge in buckets if math.isfinite(edge)]
        slow = mean(["slow_requests_total"], statuses) if "slo_seconds" in figure else None
        ok = mean([f"{PROCESSED}:ok"], statuses)
        yield ClassRow(
            model=key[0],
            class_name=key[1],
            ok_per_s=rate(f"{PROCESSED}:ok"),
            refused_per_s=rate(f"{PROCESSED}:rejected", *refused),
            timeout_per_s=rate(f"{PROCESSED}:timeout"),
            failed_per_s=rate(f"{PROCESSED}:error", f"{PROCESSED}:unavailable"),
            queue_size=int(figure.get("request_queue_size", 0)),
            p50_ms=_scaled(percentile(buckets, 0.5), 1e3),
            p99_ms=_scaled(percentile(buckets, 0.99), 1e3),
            largest_bucket_ms=_scaled(max(edges, default=None), 1e3),
            slo_ms=_scaled(figure.get("slo_seconds"), 1e3),
            within_slo_pct=None if ok is None or slow is None else 100 * (ok - slow),
        )


def _gpu_rows(page: Page | None) -> Iterator[GpuRow]:
    for (uuid,), figure in sorted(gather(page.samples if page else (), ("gpu_uuid",)).items()):
        yield GpuRow(
            gpu=uuid,
            utilization_pct=_pct(figure.get("nv_gpu_utilization")),
            memory_used_gb=_scaled(figure.get("nv_gpu_memory_used_bytes"), 1e-9),
            memory_total_gb=_scaled(figure.get("nv_gpu_memory_total_bytes"), 1e-9),
            power_w=figure.get("nv_gpu_power_usage"),
        )


def _rates(
    growth: Mapping[str, float] | None, seconds: float
) -> tuple[Callable[..., float | None], Callable[[list[str], list[str]], float | None]]:
    """Two questions to what grew: how much per second, and how much per unit of something else. None: it is not known."""

    def rate(*names: str) -> float | None:
        return None if growth is None else sum(growth.get(name, 0.0) for name in names) / seconds

    def mean(above: list[str], below: list[str]) -> float | None:
        divisor = sum((growth or {}).get(name, 0.0) for name in below)
        return sum((growth or {}).get(name, 0.0) for name in above) / divisor if divisor > 0 else None

    return rate, mean


def _scaled(number: float | None, factor: float) -> float | None:
    return None if number is None or not math.isfinite(number) else number * factor


def _pct(share: float | None) -> float | None:
    return _scaled(share, 100)


def _beyond(row: ClassRow) -> dict[str, object]:
    """The row with percentiles as texts, as ">1,000" where the histogram ends."""
    edge = row.largest_bucket_ms or math.inf
    shown = {
        name: None if value is None else f">{edge:,g}" if value >= edge else f"{value:,.1f}"
        for name, value in (("p50_ms", row.p50_ms), ("p99_ms", row.p99_ms))
    }
    return {**dataclasses.asdict(row), **shown}
