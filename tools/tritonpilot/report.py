"""What did the services do between two moments in the past? A Prometheus that scraped Triton, and perhaps an entry, knows.

    source = Source("http://127.0.0.1:9090")
    report = source.report(*source.range(last="1h"))
    rich.print(*render(report))
    html(report, source.series(report), Path("report.html"))      # with curves; one file, no scripts

It asks for the exporters' own metrics, so it needs no recording rules. Counts are Prometheus' increase(): extrapolated to the ends
of the range, therefore estimates that may miss a counter's first value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_api_client import PrometheusConnect
from prometheus_api_client.exceptions import PrometheusApiClientException
from rich.console import RenderableType
from rich.text import Text

from tritonpilot import columns
from tritonpilot.columns import Column
from tritonpilot.errors import HostError, MeasurementError, SpecError

TIMEOUT_S = 30
LONGEST = timedelta(days=3660)
POINTS = 240  # of a curve
SHORTEST_STEP_S = 5
SHORTEST_WINDOW_S = 60  # of a rate: several scrapes must lie in it
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_COVERED = 'count({__name__=~"nv_inference_request_success|processed_requests_total"})'


@dataclass(frozen=True)
class Figure(Column):
    """A column and its PromQL: RANGE is the whole range, STEP the resolution, WINDOW what a rate looks back."""

    query: str = ""


@dataclass(frozen=True)
class Section:
    """Figures of the same things, which the labels `by` name."""

    name: str
    title: str
    by: tuple[str, ...]
    figures: tuple[Figure, ...]


def _grown(metric: str, by: str) -> str:
    return f"sum by ({by}) (increase({metric}[RANGE]))"


def _quantile(share: float) -> str:
    return f"1000 * histogram_quantile({share}, {_grown('inference_latency_seconds_bucket', 'model, class, le')})"


def _status(pattern: str, by: str) -> str:
    return _grown(f'processed_requests_total{{status=~"{pattern}"}}', by)


_ENTRY, _MODEL = "model, class", "model"
_SLO = f"max by ({_ENTRY}) (last_over_time(slo_seconds[RANGE]))"
_SUCCESS = _grown("nv_inference_request_success", _MODEL)
_REJECTED = _grown('nv_inference_request_failure{reason="REJECTED"}', _MODEL)
_WAKES = "sum by (model) (increase(pilot_wakes_total[RANGE]) or increase(pilot_companion_wakes_total[RANGE]))"
_COMPUTE = " + ".join(
    _grown(f"nv_inference_compute_{part}_duration_us", _MODEL) for part in ("input", "infer", "output")
)
_SUMMARY = 'nv_inference_request_summary_us{quantile="QUANTILE"}'
_HITS, _MISSES = (_grown(f"nv_cache_num_{what}_per_model", _MODEL) for what in ("hits", "misses"))

REFUSED, FAILED = "rejected|refused_.+", "error|unavailable"
COUNT, RATE, MS, PERCENT = "{:,.0f}", "{:,.1f}", "{:,.1f}", "{:.2f}"

SECTIONS = (
    Section("classes", "Classes, as the entry sees them", ("model", "class"), (
        Figure("requests", "requests", "", COUNT, query=_grown("processed_requests_total", _ENTRY)),
        Figure("ok", "ok", "", COUNT, query=_status("ok", _ENTRY)),
        Figure("refused", "refused", "", COUNT, query=_status(REFUSED, _ENTRY)),
        Figure("timeouts", "timeouts", "", COUNT, rank=2, query=_status("timeout", _ENTRY)),
        Figure("failed", "failed", "", COUNT, rank=1, query=_status(FAILED, _ENTRY)),
        Figure("peak_ok_per_s", "peak ok", "1/s", RATE, rank=5,
               query=f"max_over_time(sum by ({_ENTRY}) (rate(processed_requests_total{{status='ok'}}[WINDOW]))[RANGE:STEP])"),
        Figure("p50_ms", "P50", "ms", MS, rank=4, query=_quantile(0.5)),
        Figure("p99_ms", "P99", "ms", MS, query=_quantile(0.99)),
        Figure("slo_ms", "SLO", "ms", "{:,g}", rank=3, query=f"1000 * {_SLO}"),
        Figure("within_slo_pct", "within", "%", PERCENT,
               query=f"100 * ({_status('ok', _ENTRY)} - {_grown('slow_requests_total', _ENTRY)}) "
                     f"/ {_grown('processed_requests_total', _ENTRY)} and {_SLO}"),
        Figure("peak_queue_size", "peak queue", "", COUNT,
               query=f"max by ({_ENTRY}) (max_over_time(request_queue_size[RANGE]))"),
    )),
    Section("tenants", "Tenants", ("tenant",), (
        Figure("requests", "requests", "", COUNT, query=_grown('processed_requests_total{tenant!=""}', "tenant")),
        Figure("ok", "ok", "", COUNT, query=_grown('processed_requests_total{tenant!="",status="ok"}', "tenant")),
        Figure("refused", "refused", "", COUNT,
               query=_grown(f'processed_requests_total{{tenant!="",status=~"{REFUSED}"}}', "tenant")),
    )),
    Section("models", "Models, as Triton sees them", ("model",), (
        Figure("requests", "requests", "", COUNT, query=_SUCCESS),
        Figure("rows", "rows", "", COUNT, rank=8, query=_grown("nv_inference_count", _MODEL)),
        Figure("peak_requests_per_s", "peak", "1/s", RATE, rank=4,
               query="max_over_time(sum by (model) (rate(nv_inference_request_success[WINDOW]))[RANGE:STEP])"),
        Figure("mean_batch", "batch", "rows", RATE,
               query=f"{_grown('nv_inference_count', _MODEL)} / {_grown('nv_inference_exec_count', _MODEL)}"),
        Figure("queue_ms", "queue", "ms", MS, rank=6,
               query=f"{_grown('nv_inference_queue_duration_us', _MODEL)} / {_SUCCESS} / 1000"),
        Figure("compute_ms", "compute", "ms", MS, rank=9,
               query=f"({_COMPUTE}) / {_SUCCESS} / 1000"),
        Figure("usual_p50_ms", "usual P50", "ms", MS, rank=2, query="max by (model) (quantile_over_time(0.5, "
               f"({_SUMMARY.replace('QUANTILE', '0.5')} >= 0)[RANGE:STEP])) / 1000"),
        Figure("worst_p99_ms", "worst P99", "ms", MS, query="max by (model) (max_over_time("
               f"({_SUMMARY.replace('QUANTILE', '0.99')} >= 0)[RANGE:STEP])) / 1000"),
        Figure("rejected", "rejected", "", COUNT, query=f"clamp_min({_REJECTED} - ({_WAKES} or 0 * {_REJECTED}), 0)"),
        Figure("failed", "failed", "", COUNT,
               query=_grown('nv_inference_request_failure{reason!~"REJECTED|CANCELED"}', _MODEL)),
        Figure("peak_pending", "pending", "peak", COUNT,
               query="max by (model) (max_over_time(nv_inference_pending_request_count[RANGE]))"),
        Figure("cache_hit_pct", "cache", "% hits", PERCENT, rank=3, query=f"100 * {_HITS} / ({_HITS} + {_MISSES})"),
        Figure("probes_ok_pct", "probes ok", "%", PERCENT, rank=7,
               query="100 * min by (model) (avg_over_time(model_probe_success[RANGE]))"),
        Figure("stub_memory_mb", "stubs", "MB, peak", COUNT, rank=5,
               query="max_over_time(sum by (model) (pilot_stub_memory_bytes)[RANGE:STEP]) / 1e6"),
    )),
    Section("gpus", "GPUs", ("gpu_uuid",), (
        Figure("utilization_pct", "busy", "%", COUNT, query="100 * max by (gpu_uuid) (avg_over_time(nv_gpu_utilization[RANGE]))"),
        Figure("peak_memory_gb", "memory", "GB, peak", RATE,
               query="max by (gpu_uuid) (max_over_time(nv_gpu_memory_used_bytes[RANGE])) / 1e9"),
    )),
    Section("targets", "What Prometheus scraped", ("job", "instance"), (
        Figure("up_pct", "up", "%", PERCENT, query="100 * avg_over_time(up[RANGE])"),
    )),
    Section("alerts", "Alerts that fired", ("alertname", "model", "class"), (
        Figure("firing_s", "firing", "s", COUNT,
               query='sum by (alertname, model, class) (count_over_time(ALERTS{alertstate="firing"}[RANGE:STEP])) * STEP_S'),
    )),
)  # fmt: skip

CURVES = (
    Figure("ok_per_s", "Answered by class", "requests/s",
           query=f"sum by ({_ENTRY}) (rate(processed_requests_total{{status='ok'}}[WINDOW]))"),
    Figure("class_p99_ms", "P99 by class, from arrival at the entry", "ms", query="1000 * histogram_quantile(0.99, sum by "
           "(model, class, le) (rate(inference_latency_seconds_bucket[WINDOW])))"),
    Figure("refused_per_s", "Refused by class", "requests/s",
           query=f'sum by ({_ENTRY}) (rate(processed_requests_total{{status=~"{REFUSED}"}}[WINDOW]))'),
    Figure("requests_per_s", "Answered by model", "requests/s",
           query="sum by (model) (rate(nv_inference_request_success[WINDOW]))"),
    Figure("p99_ms", "P99 by model, of Triton's sliding window", "ms",
           query=f"max by (model) ({_SUMMARY.replace('QUANTILE', '0.99')}) / 1000"),
    Figure("mean_batch", "Rows per execution", "rows", query="sum by (model) (rate(nv_inference_count[WINDOW])) "
           "/ sum by (model) (rate(nv_inference_exec_count[WINDOW]))"),
    Figure("pending", "Waiting in Triton's queues", "requests", query="sum by (model) (nv_inference_pending_request_count)"),
    Figure("gpu_utilization", "GPU utilisation", "%", query="100 * sum by (gpu_uuid) (nv_gpu_utilization)"),
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """The figures of a range: rows by section, each with its labels; None where there is nothing to tell."""

    prometheus: str
    start: datetime
    end: datetime
    covered_share: float  # of the range: when anything was scraped
    sections: Mapping[str, tuple[columns.Row, ...]]

    @property
    def seconds(self) -> int:
        """The length of the range."""
        return round((self.end - self.start).total_seconds())

    def as_dict(self) -> dict[str, object]:
        """For JSON; times in ISO 8601, UTC."""
        return {
            "prometheus": self.prometheus,
            "start": self.start.astimezone(timezone.utc).isoformat(),
            "end": self.end.astimezone(timezone.utc).isoformat(),
            "covered_share": self.covered_share,
            **{name: [columns.finite(row) for row in rows] for name, rows in self.sections.items()},
        }


@dataclass(frozen=True)
class Curve:
    """One figure over time, for each of its things."""

    figure: Figure
    lines: Mapping[str, tuple[tuple[float, float], ...]]  # (seconds since the epoch, value); NaN is left out


@dataclass(frozen=True)
class Point:
    """A sample of a series; its name is the label __name__. Times are Prometheus' clock, in seconds since the epoch."""

    labels: Mapping[str, str]
    at_s: float
    value: float


class Source:
    """A Prometheus. Its methods raise MeasurementError when it does not answer as one."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        """`url` as http://127.0.0.1:9090, or HOST:PORT. Raises SpecError for what is neither."""
        address = (url if "://" in url else f"http://{url}").rstrip("/")
        self.url = re.sub(r"//[^/@]*@", "//", address)  # without a password, for reports
        try:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
                raise ValueError("no http:// or https:// with a host")
            self._prometheus = PrometheusConnect(address, retry=0, timeout=timeout_s)
        except ValueError as error:
            raise SpecError(
                f"--prometheus is {self.url!r}, which is no address ({error}). Nothing was asked. Give one as http://127.0.0.1:9090."
            ) from None

    def range(self, *, last: str = "", start: str = "", end: str = "") -> tuple[datetime, datetime]:
        """The range that a person means: `last`, as 90s, 30m, 1h or 7d, before `end`, or from `start` to `end`, in ISO 8601.

        The end is now where it is not given, by Prometheus' clock, not by this machine's. Raises SpecError for what is no range.
        """
        if bool(last) == bool(start):
            raise SpecError("Give either --last or --from. Nothing was asked.")
        now = datetime.fromtimestamp(self.now_s(), timezone.utc)
        until = min(_moment(end, "--to"), now) if end else now
        since = _moment(start, "--from") if start else until - _duration(last)
        if (until - since).total_seconds() < SHORTEST_STEP_S:
            raise SpecError(
                f"From {since.isoformat()} to {until.isoformat()} is no range of at least {SHORTEST_STEP_S} s; Prometheus' clock "
                f"says {now.isoformat()}. Nothing was asked."
            )
        return since, until

    def now_s(self) -> float:
        """Prometheus' clock, in seconds since the epoch."""
        return float(self._ask("custom_query", "time()")[1])

    def latest(self, selector: str, within_s: int) -> list[Point]:
        """The last sample of each series within that time, and when it was scraped: {job="triton"}."""
        found = self._ask("custom_query", f"{selector}[{within_s}s]")
        points = [(each["metric"], each["values"][-1]) for each in found if each.get("values")]
        return [Point(labels, float(at), float(text)) for labels, (at, text) in points]

    def report(self, start: datetime, end: datetime, *, model: str = "") -> Report:
        """The figures of the range, of all models or of one. Raises MeasurementError when Prometheus has none."""
        span = _Span(start, end)
        covered = self._ask_range(_COVERED, span)
        if not covered:
            raise MeasurementError(
                f"Prometheus at {self.url} has no figure of a Triton or an entry from {start.isoformat()} to {end.isoformat()}. "
                "There is nothing to report. Look at its /targets page, or choose another range (--last, --from, --to)."
            )
        found = {section.name: self._rows(section, span) for section in SECTIONS}
        if model:
            known = {str(row["model"]) for row in (*found["models"], *found["classes"])}
            if model not in known:
                raise MeasurementError(
                    f"Prometheus at {self.url} has no figure of a model {model!r} in this range. There is nothing to report. It "
                    f"knows {', '.join(sorted(known)) or 'none'}."
                )
            found = {name: tuple(row for row in rows if row.get("model") == model) for name, rows in found.items()}
        return Report(self.url, start, end, min(1.0, len(covered[0]["values"]) / span.points), found)

    def series(self, report: Report) -> list[Curve]:
        """The curves of the same range and the same models; those that have nothing are left out."""
        span = _Span(report.start, report.end)
        models = {row["model"] for row in (*report.sections["models"], *report.sections["classes"])}
        curves = []
        for figure in CURVES:
            lines = {}
            for each in self._ask_range(figure.query, span):
                points = tuple((float(at), float(text)) for at, text in each["values"])
                points = tuple((at, value) for at, value in points if math.isfinite(value))
                if points and each["metric"].get("model") in {None, *models}:
                    lines[" ".join(each["metric"].values())] = points
            if lines:
                curves.append(Curve(figure, lines))
        return curves

    def _rows(self, section: Section, span: _Span) -> tuple[columns.Row, ...]:
        rows: dict[tuple[str, ...], dict[str, Any]] = {}
        for figure in section.figures:
            for each in self._ask("custom_query", span.filled(figure.query), params={"time": span.end_s}):
                key = tuple(each["metric"].get(label, "") for label in section.by)
                names = [column.name for column in section.figures]
                row = rows.setdefault(key, {**dict(zip(section.by, key, strict=True)), **dict.fromkeys(names)})
                value = float(each["value"][1])
                row[figure.name] = value if math.isfinite(value) else None
        return tuple(rows[key] for key in sorted(rows))

    def _ask_range(self, query: str, span: _Span) -> list[Any]:
        start, end = (datetime.fromtimestamp(at_s, timezone.utc) for at_s in (span.start_s, span.end_s))
        found: list[Any] = self._ask("custom_query_range", span.filled(query), start, end, str(span.step_s))
        return found

    def _ask(self, way: str, *asked: Any, **options: Any) -> Any:
        try:
            return getattr(self._prometheus, way)(*asked, **options)
        except (OSError, ValueError, KeyError, TypeError, PrometheusApiClientException) as error:
            raise MeasurementError(
                f"Prometheus at {self.url} did not answer ({error}). There are no figures from it. Check that it runs and that "
                "this is its address (--prometheus)."
            ) from error


class _Span:
    """A range in whole seconds, and how finely it is looked at."""

    def __init__(self, start: datetime, end: datetime) -> None:
        self.start_s, self.end_s = round(start.timestamp()), round(end.timestamp())
        self.step_s = max(SHORTEST_STEP_S, math.ceil((self.end_s - self.start_s) / POINTS))
        self.points = (self.end_s - self.start_s) // self.step_s + 1

    def filled(self, query: str) -> str:
        """The query for this range."""
        window_s = max(SHORTEST_WINDOW_S, self.step_s)
        return (
            query.replace("STEP_S", str(self.step_s))
            .replace("STEP", f"{self.step_s}s")
            .replace("WINDOW", f"{window_s}s")
            .replace("RANGE", f"{self.end_s - self.start_s}s")
        )


def render(report: Report, width: int | None = None) -> list[RenderableType]:
    """The report for a terminal of that width; without one in full."""
    parts: list[RenderableType] = [Text(_headline(report), style="bold")]
    warning = _warning(report)
    if warning:
        parts.append(Text(warning, style="red"))
    for section in SECTIONS:
        rows = report.sections[section.name]
        if rows:
            parts += [Text(), columns.table(_columns(section), rows, title=section.title, width=width)]
    return parts


def html(report: Report, curves: Sequence[Curve], path: Path) -> None:
    """A page with the same tables and the curves. Raises HostError when it cannot be written."""
    tables = "\n".join(
        f"<h2>{escape(section.title)}</h2>\n{columns.html(_columns(section), report.sections[section.name])}"
        for section in SECTIONS
        if report.sections[section.name]
    )
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(_headline(report))}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse }} td, th {{ padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }}
td.word, th:first-child {{ text-align: left }} small {{ font-weight: normal; color: #666 }} .warning {{ color: #b00 }}
figure {{ display: inline-block; width: 34em; margin: 1em 1em 0 0; vertical-align: top }} svg {{ width: 100% }}
</style></head><body>
<h1>{escape(_headline(report))}</h1>
<p class="warning">{escape(_warning(report))}</p>
{tables}
{"".join(_drawn(curve, report) for curve in curves)}
</body></html>
"""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HostError(f"{path} was not written: {error}. Give another file, or make room (--html).") from error


WIDTH, HEIGHT, MARGIN = 560, 200, 24
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")


def _drawn(curve: Curve, report: Report) -> str:
    """A figure with a line for each thing. Where there is nothing for two steps the line is interrupted."""
    span = _Span(report.start, report.end)
    top = max((value for line in curve.lines.values() for _, value in line), default=0.0) or 1.0
    floor = HEIGHT - MARGIN

    def at(when: float, value: float) -> str:
        across = (when - span.start_s) / (span.end_s - span.start_s) * WIDTH
        return f"{across:.1f},{floor - value / top * (floor - MARGIN):.1f}"

    drawn, legend = [], []
    for place, (name, line) in enumerate(sorted(curve.lines.items())):
        colour = COLOURS[place % len(COLOURS)]
        pieces = [[line[0]]]
        for before, point in pairwise(line):
            if point[0] - before[0] > 2 * span.step_s:
                pieces.append([])
            pieces[-1].append(point)
        drawn += [
            f'<polyline fill="none" stroke="{colour}" stroke-linecap="round" stroke-width="1.5" points="'
            + " ".join(at(*point) for point in (*piece, piece[-1]))
            + '"/>'
            for piece in pieces
        ]
        legend.append(f'<span style="color:{colour}">{escape(name)}</span>')
    first, last = (moment.astimezone().strftime("%d %b %H:%M:%S") for moment in (report.start, report.end))
    return f"""<figure><figcaption>{escape(curve.figure.header)} <small>{escape(curve.figure.unit)}</small></figcaption>
<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(curve.figure.header)}" font-size="12">
<path d="M0 {MARGIN}H{WIDTH}M0 {floor}H{WIDTH}" stroke="#ddd"/>
<text x="0" y="{MARGIN - 6}">{top:,.4g}</text>
<text x="0" y="{HEIGHT - 6}">{first}</text><text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{last}</text>
{"".join(drawn)}</svg>{" ".join(legend)}</figure>
"""


def _columns(section: Section) -> tuple[Column, ...]:
    return (*(Column(label, label, is_word=True) for label in section.by), *section.figures)


def _headline(report: Report) -> str:
    first, last = (moment.astimezone().isoformat(" ", "seconds") for moment in (report.start, report.end))
    return f"{first} to {last}, from {report.prometheus}"


def _warning(report: Report) -> str:
    if report.covered_share > 0.98:
        return ""
    return (
        f"Prometheus has figures for {report.covered_share:.0%} of this range alone; rates and counts are of that part."
    )


def _duration(text: str) -> timedelta:
    found = re.fullmatch(r"([0-9]{1,6})([smhdw])", text)
    length = timedelta(seconds=int(found[1]) * _UNITS_S[found[2]]) if found else timedelta.max
    if length > LONGEST:
        raise SpecError(
            f"--last is {text!r}, but must be a length as 90s, 30m, 1h or 7d, of {LONGEST.days} days at most. Nothing was asked."
        )
    return length


def _moment(text: str, option: str) -> datetime:
    """Local time where no zone is given."""
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).astimezone()
    except (ValueError, OverflowError):
        raise SpecError(
            f"{option} is {text!r}, but must be a time in ISO 8601, as 2026-05-04T13:30 or 2026-05-04T13:30:00Z. Nothing was asked."
        ) from None
