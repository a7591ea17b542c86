"""What came of one trial: its figures with their intervals, or why there are none. As a row of a table, JSON or CSV.

row.point.p99_ms, row.p99_ms.half_width, row.is_stable, row.noise.reason
rich.print(columns.table(COLUMNS, [each.cells() for each in rows]))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from tritonpilot import columns
from tritonpilot.columns import Column
from tritonpilot.grid.estimate import Estimate
from tritonpilot.grid.plan import Trial
from tritonpilot.machine import Noise
from tritonpilot.measurement import Point
from tritonpilot.setting import Setting

COLUMNS = (
    Column("queue_delay_us", "delay", "us", "{:,}"),
    Column("max_batch_size", "max batch", "rows", "{:,}"),
    Column("instances", "inst.", "", "{}"),
    Column("threads", "thr.", "", "{}"),
    Column("precision", "prec.", is_word=True),
    Column("rows", "rows", "/request", "{}", rank=3),
    Column("load", "load", is_word=True),
    Column("throughput_infer_s", "throughput", "infer/s", "{:,.0f}"),
    Column("throughput_pct", "\N{PLUS-MINUS SIGN}", "%", "{:.0f}", rank=6),
    Column("p50_ms", "P50", "ms", "{:.2f}", rank=5),
    Column("p99_ms", "P99", "ms", "{:.2f}"),
    Column("p99_pct", "\N{PLUS-MINUS SIGN}", "%", "{:.0f}", rank=4),
    Column("mean_batch", "mean batch", "rows", "{:.1f}"),
    Column("queue_ms", "queue", "ms", "{:.2f}", rank=1),
    Column("compute_ms", "compute", "ms", "{:.2f}", rank=2),
    Column("failed", "failed", "requests", "{:,}", rank=7),
    Column("remark", "", is_word=True),
)
#: What a CSV file has besides.
DETAILS = (
    Column("concurrency", "concurrency"),
    Column("rate_per_s", "rate", "1/s"),
    Column("avg_ms", "avg", "ms"),
    Column("p90_ms", "P90", "ms"),
    Column("p95_ms", "P95", "ms"),
    Column("throughput_half_width", "interval of throughput", "infer/s"),
    Column("p99_half_width_ms", "interval of P99", "ms"),
    Column("network_ms", "network", "ms"),
    Column("client_ms", "client", "ms"),
    Column("client_cores", "client CPU", "cores"),
    Column("windows", "windows"),
    Column("tool", "tool"),
    Column("is_stable", "settled"),
    Column("other_cores", "other processes", "cores"),
    Column("steal_share", "stolen"),
    Column("seconds", "took", "s"),
    Column("measured_at", "measured at"),
)


@dataclass(frozen=True)
class Row:
    """A trial and what was measured. Without a `point` there is no figure, and `failure` says why.

    `throughput` (infer/s) and `p99_ms` are estimates over all windows; the other figures of `point` are means over the attempts
    that were kept. `batch_sizes` maps sizes to executions. `errors` maps kinds to requests. `noise` is the worst that was kept.
    """

    trial: Trial
    point: Point | None = None
    throughput: Estimate | None = None
    p99_ms: Estimate | None = None
    batch_sizes: Mapping[int, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    requests: int = 0
    noise: Noise | None = None
    tool: str = "perf_analyzer"
    is_stable: bool = False
    notes: tuple[str, ...] = ()
    failure: str = ""
    seconds: float = 0.0
    measured_at: str = ""

    @property
    def setting(self) -> Setting:
        return self.trial.setting

    @property
    def is_quiet(self) -> bool:
        """Whether the machine did nothing else while it was measured."""
        return self.noise is None or self.noise.is_quiet

    @property
    def failed_share(self) -> float:
        """The part of the requests that were answered with an error."""
        failed = sum(self.errors.values())
        return failed / (failed + self.requests) if failed else 0.0

    def remark(self, asked: str = "perf_analyzer") -> str:
        """What a reader must know before he believes it: noisy, not settled, another tool than the one `asked` for, failed."""
        if self.point is None:
            return "failed"
        said = [
            "" if self.is_quiet else "noisy",
            "" if self.is_stable else "unsettled",
            "" if self.tool == asked else self.tool,
        ]
        return ", ".join(each for each in said if each)

    def cells(self) -> dict[str, object]:
        """The values of COLUMNS and DETAILS; None where there is none."""
        point = asdict(self.point) if self.point is not None else {}
        found: dict[str, object] = {column.name: point.get(column.name) for column in (*COLUMNS, *DETAILS)}
        setting = self.setting.as_dict()
        for name in ("queue_delay_us", "max_batch_size", "instances", "threads", "precision"):
            found[name] = setting[name]
        found.update(
            rows=self.trial.rows,
            concurrency=self.trial.concurrency,
            rate_per_s=self.trial.rate_per_s,
            load=str(self.trial.concurrency) if self.trial.concurrency is not None else f"{self.trial.rate_per_s:g}/s",
            failed=sum(self.errors.values()) or None,
            remark=self.remark(),
            tool=self.tool,
            is_stable=self.is_stable,
            seconds=round(self.seconds, 1),
            measured_at=self.measured_at,
        )
        if self.throughput is not None and self.p99_ms is not None:
            found.update(
                throughput_pct=self.throughput.pct,
                p99_pct=self.p99_ms.pct,
                throughput_half_width=self.throughput.half_width,
                p99_half_width_ms=self.p99_ms.half_width,
                windows=self.p99_ms.count,
            )
        if self.noise is not None:
            found.update(other_cores=self.noise.other_cores, steal_share=self.noise.steal_share)
        return columns.finite(found)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `of_dict` reverses it."""
        estimates = {
            name: columns.finite(asdict(value)) if value is not None else None
            for name, value in (("throughput", self.throughput), ("p99_ms", self.p99_ms))
        }
        return {
            **self.trial.as_dict(),
            "point": columns.finite(asdict(self.point)) if self.point is not None else None,
            **estimates,
            "batch_sizes": {str(size): count for size, count in self.batch_sizes.items()},
            "errors": dict(self.errors),
            "requests": self.requests,
            "noise": asdict(self.noise) if self.noise is not None else None,
            "tool": self.tool,
            "is_stable": self.is_stable,
            "notes": list(self.notes),
            "failure": self.failure,
            "seconds": round(self.seconds, 2),
            "measured_at": self.measured_at,
        }

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Row:
        """The reverse of `as_dict`. Raises KeyError, TypeError, AttributeError or ValueError for what is none."""
        rest = dict(values)
        trial = {name: rest.pop(name) for name in ("setting", "rows", "concurrency", "rate_per_s")}
        point, throughput, p99_ms = (rest.pop(name) for name in ("point", "throughput", "p99_ms"))
        found = _rows().validate_python(
            {
                **rest,
                "trial": trial,
                "point": {**point, **_nan(point)} if point else None,
                "throughput": _whole(throughput),
                "p99_ms": _whole(p99_ms),
            }
        )
        if found.point is not None and (found.throughput is None or found.p99_ms is None):
            raise ValueError("a point has an interval of throughput and one of P99")
        json.dumps(found.as_dict(), allow_nan=False)  # what could not be kept was none
        return found


@cache
def _rows() -> TypeAdapter[Row]:
    """Checks the type of every value, down to those of the point."""
    return TypeAdapter(Row)


def _whole(values: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """JSON has no infinity: the half of an interval that a single value has came as null."""
    if values is None:
        return None
    return {**values, "half_width": float("inf") if values["half_width"] is None else values["half_width"]}


def _nan(point: Mapping[str, Any]) -> dict[str, float]:
    """JSON has no NaN: what a tool does not tell came as null, loads aside, of which one is none."""
    return {
        name: float("nan")
        for name, value in point.items()
        if value is None and name not in ("concurrency", "rate_per_s")
    }
