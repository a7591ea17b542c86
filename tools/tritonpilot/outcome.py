"""What came of a load, measured or simulated: latency, throughput, goodput, errors, in all and stream by stream.

    outcome = summarise(traffic, streams, latency_us=latencies, error=codes, kinds=(REJECTED, TIMED_OUT))
    outcome.goodput_per_s, outcome.p_ms(0.99), outcome.by_stream["app"].attainment

Latency counts from the scheduled time of a request, so neither a late sender nor a paused server hides anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from tritonpilot.arrivals import ALL, FloatArray, Stream, Traffic
from tritonpilot.histogram import Histogram

#: Kinds of errors; others are the server's own: "HTTP 400", "INVALID_ARGUMENT".
REJECTED = "rejected"  # the queue was full
TIMED_OUT = "timed_out"  # its time in the queue ran out
CONNECTION = "connection"  # refused or broken
NO_ANSWER = "no_answer"  # within the sender's own patience

SHARES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999, "max_ms": 1.0}


@dataclass(frozen=True)
class Second:
    """One second of a load. `answered` counts in the second of the answer, all others in that of the scheduled time."""

    at_s: int
    offered: int
    answered: int
    errors: int
    within_slo: int
    p99_ms: float  # nan without answers


@dataclass(frozen=True)
class Outcome:
    """`requests` were offered within `seconds`; `latency` holds the good answers, `rows` counts their rows."""

    requests: int
    rows: int
    seconds: float
    errors: Mapping[str, int]  # kind -> requests
    latency: Histogram
    within_slo: int
    by_stream: Mapping[str, Outcome] = field(default_factory=dict)
    series: Sequence[Second] = ()
    last_answer_s: float = 0.0  # since the beginning; past `seconds` when the server had a queue to work off

    @property
    def answered(self) -> int:
        """Good answers."""
        return self.latency.count

    @property
    def answering_s(self) -> float:
        """The time of the load, up to the last answer where that came later."""
        return max(self.seconds, self.last_answer_s)

    @property
    def throughput_per_s(self) -> float:
        """Good answers per second of `answering_s`."""
        return self.answered / self.answering_s

    @property
    def rows_per_s(self) -> float:
        """Rows answered per second of `answering_s`."""
        return self.rows / self.answering_s

    @property
    def goodput_per_s(self) -> float:
        """Answers within the SLO per second of the same time, so never more than the throughput."""
        return self.within_slo / self.answering_s

    @property
    def attainment(self) -> float:
        """The share of all requests that were answered within the SLO; nan without requests."""
        return self.within_slo / self.requests if self.requests else math.nan

    def p_ms(self, share: float) -> float:
        """A quantile of the latency of good answers, ms; nan without any."""
        return self.latency.quantile_us(share) / 1e3

    def as_dict(self) -> dict[str, Any]:
        """The figures for JSON, without histogram and series; a value that does not exist is None."""
        return {
            "requests": self.requests,
            "answered": self.answered,
            "rows": self.rows,
            "seconds": self.seconds,
            "throughput_per_s": self.throughput_per_s,
            "goodput_per_s": self.goodput_per_s,
            "attainment": _finite(self.attainment),
            "mean_ms": _finite(self.latency.mean_us / 1e3),
            **{name: _finite(self.p_ms(share)) for name, share in SHARES.items()},
            "errors": dict(self.errors),
            **({"streams": {name: each.as_dict() for name, each in self.by_stream.items()}} if self.by_stream else {}),
        }

    def table(self, title: str | None = None) -> Table:
        """A row per stream, and one for all of them where there are several."""
        headers = ("stream", "offered\n1/s", "answered\n1/s", "goodput\n1/s", "in SLO\n%")
        drawn = Table(*headers, *(f"{_heading(name)}\nms" for name in SHARES), "errors", title=title)
        for column in drawn.columns[1:-1]:
            column.justify, column.no_wrap = "right", True
        rows = {**self.by_stream, **({ALL: self} if len(self.by_stream) != 1 else {})}
        for name, each in rows.items():
            shown = [each.requests / each.seconds, each.throughput_per_s, each.goodput_per_s]
            drawn.add_row(
                name,
                *(f"{value:,.1f}" for value in shown),
                _cell(100 * each.attainment, ".2f"),
                *(_cell(each.p_ms(share), ".2f") for share in SHARES.values()),
                ", ".join(f"{count} {kind}" for kind, count in each.errors.items()) or "-",
            )
        return drawn


def summarise(
    traffic: Traffic,
    streams: Sequence[Stream],
    *,
    latency_us: FloatArray,
    error: npt.NDArray[np.integer[Any]],
    kinds: Sequence[str],
    has_series: bool = True,
) -> Outcome:
    """The outcome of a load from what became of each request, in the order of `traffic`.

    `latency_us` FP64[n] from the scheduled time; `error` INT[n] is 0 for an answer, else 1 + the index into `kinds`
    (its latency is then when the error came, or nan). The series takes time and memory for every second, also an idle one.
    """
    slo_us = np.array([stream.slo_ms for stream in streams])[traffic.stream] * 1e3
    is_good = error == 0
    in_slo = is_good & (latency_us <= slo_us)

    def part(chosen: npt.NDArray[np.bool_], by_stream: Mapping[str, Outcome], series: Sequence[Second]) -> Outcome:
        good = chosen & is_good
        latency = Histogram()
        latency.record(latency_us[good])
        counts = np.bincount(error[chosen], minlength=len(kinds) + 1)[1:]
        return Outcome(
            requests=int(chosen.sum()),
            rows=int(traffic.rows[good].sum(dtype=np.int64)),
            seconds=traffic.seconds,
            errors={kind: int(count) for kind, count in zip(kinds, counts, strict=True) if count},
            latency=latency,
            within_slo=int((chosen & in_slo).sum()),
            by_stream=by_stream,
            series=series,
            last_answer_s=float((traffic.at_s[good] + latency_us[good] / 1e6).max(initial=0.0)),
        )

    by_stream = {stream.name: part(traffic.stream == place, {}, ()) for place, stream in enumerate(streams)}
    series = _series(traffic, latency_us, is_good, in_slo) if has_series else ()
    return part(np.ones(len(traffic), dtype=bool), by_stream, series)


def _series(
    traffic: Traffic, latency_us: FloatArray, is_good: npt.NDArray[np.bool_], in_slo: npt.NDArray[np.bool_]
) -> tuple[Second, ...]:
    if not len(traffic):
        return ()
    due = traffic.at_s.astype(np.int64)
    answered = (traffic.at_s[is_good] + latency_us[is_good] / 1e6).astype(np.int64)
    length = int(max(due.max(), answered.max(initial=0))) + 1
    offered, answers, errors, within = (
        np.bincount(each, minlength=length).tolist() for each in (due, answered, due[~is_good], due[in_slo])
    )
    edges = np.searchsorted(due[is_good], np.arange(length + 1))
    good_us = latency_us[is_good]
    p99_ms = [_p99_ms(good_us[edges[second] : edges[second + 1]]) for second in range(length)]
    rows = zip(range(length), offered, answers, errors, within, p99_ms, strict=True)
    return tuple(Second(*row) for row in rows)


def _p99_ms(latency_us: FloatArray) -> float:
    return float(np.quantile(latency_us, 0.99)) / 1e3 if len(latency_us) else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _heading(name: str) -> str:
    return {"p999_ms": "P99.9", "max_ms": "max"}.get(name, name.removesuffix("_ms").upper())


def _cell(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"
