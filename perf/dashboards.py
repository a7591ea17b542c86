"""What do the dashboards ask Prometheus, and does it have an answer?

asked = queries()                                                 # of all files in deploy/grafana/dashboards
finding = find(prometheus, asked[0], Shown(start_s, end_s, step_s=5))
finding.has_data, finding.nameless
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.frame import PROJECT
from perf.prometheus import Prometheus, Series

FOLDER = PROJECT / "deploy" / "grafana" / "dashboards"
_VARIABLE = re.compile(r"\$(?:\{)?(\w+)\}?")
_LABEL_VALUES = re.compile(r"label_values\((.+),\s*(\w+)\)")


@dataclass(frozen=True)
class Query:
    """What a panel, or a choice at the top of a dashboard, asks."""

    dashboard: str
    panel: str
    expr: str
    legend: str = ""
    is_instant: bool = False
    label: str = ""
    """Of which the values are asked for; only choices do."""

    @property
    def is_of_gpu(self) -> bool:
        """Whether it asks for what only machines with NVIDIA GPUs have."""
        return re.search(r"\b(?:nv_gpu_|triton:gpu_)", self.expr) is not None

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel}: {self.expr}"


@dataclass(frozen=True)
class Shown:
    """The time that a dashboard shows."""

    start_s: float
    end_s: float
    step_s: float

    @property
    def variables(self) -> Mapping[str, str]:
        """Grafana's own: a rate is taken over no less than four scrapes, which are as long as a step here."""
        return {
            "__interval": f"{self.step_s:g}s",
            "__rate_interval": f"{4 * self.step_s:g}s",
            "__range": f"{self.end_s - self.start_s:.0f}s",
        }


@dataclass(frozen=True)
class Finding:
    """What Prometheus had."""

    series: tuple[Series, ...]
    has_data: bool
    nameless: tuple[str, ...] = ()
    """Labels that the lines are named by, and that a line lacks."""


def dashboards(folder: Path = FOLDER) -> dict[str, dict[str, Any]]:
    """File name without its ending -> what the file holds."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Those with queries, also in rows that are folded."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


def queries(folder: Path = FOLDER) -> list[Query]:
    """Everything that is asked, with variables set to all of their values; Grafana's own are left."""
    found = []
    for name, dashboard in dashboards(folder).items():
        choices = {each["name"]: each["allValue"] for each in dashboard["templating"]["list"]}
        for each in dashboard["templating"]["list"]:
            asked = _LABEL_VALUES.fullmatch(each["query"]["query"])
            assert asked is not None, each["query"]
            selector = substituted(asked[1], choices)
            found.append(Query(name, f"choice of {each['name']}", selector, label=asked[2]))
        for panel in panels(dashboard):
            for target in panel["targets"]:
                expr = substituted(target["expr"], choices)
                found.append(Query(name, panel["title"], expr, target["legendFormat"], bool(target.get("instant"))))
    return found


def substituted(expr: str, values: Mapping[str, str]) -> str:
    """The expression with these variables replaced; others stay."""
    return _VARIABLE.sub(lambda found: values.get(found[1], found[0]), expr)


def find(prometheus: Prometheus, query: Query, shown: Shown) -> Finding:
    """Ask as Grafana does. Raises MeasurementError when Prometheus refuses the query."""
    expr = substituted(query.expr, shown.variables)
    if query.label:
        return Finding((), any(prometheus.label_values(query.label, expr)))
    if query.is_instant:
        series = prometheus.at(expr, shown.end_s)
    else:
        series = prometheus.over(expr, shown.start_s, shown.end_s, shown.step_s)
    names = re.findall(r"\{\{(\w+)\}\}", query.legend)
    nameless = tuple(name for name in names if any(name not in each.labels for each in series))
    return Finding(tuple(series), has_data(series), nameless)


def has_data(series: list[Series]) -> bool:
    """Whether there is anything to draw: NaN is nothing."""
    return any(math.isfinite(value) for each in series for value in each.values)
