"""What is left of a sweep for people and programs: results.json, results.csv, report.html and report.png in one folder.

result = Result(service, rows, choice, slo_ms=20, facts={...})
write(result, store)
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from tritonpilot import columns
from tritonpilot.errors import HostError
from tritonpilot.grid.choice import Choice, front
from tritonpilot.grid.row import COLUMNS, DETAILS, Row
from tritonpilot.grid.store import Store
from tritonpilot.setting import Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESULTS, TABLE, PAGE, PICTURE = "results.json", "results.csv", "report.html", "report.png"
CHOSEN, FRONT, PALE, LIMIT = "#2e7d32", "#1565c0", "#bdbdbd", "#c62828"
COLOURS = ("#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#e377c2", "#bcbd22", "#1f77b4", "#7f7f7f")
MOST_CURVES = 8  # in colour; others are grey


@dataclass(frozen=True)
class Result:
    """A sweep that has ended. `facts` are the machine, the versions and the command."""

    model: str
    rows: Sequence[Row]
    choice: Choice
    slo_ms: float | None
    facts: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        best = front(self.rows)
        return {
            "model": self.model,
            "slo_ms": self.slo_ms,
            "recommended": self.choice.row.as_dict() if self.choice.row is not None else None,
            "reason": self.choice.reason,
            "pareto": [self.rows.index(row) for row in best],
            "rows": [row.as_dict() for row in self.rows],
            "facts": dict(self.facts),
        }


def check(store: Store) -> None:
    """Raise HostError where the files could not be written in the end, for something else has one of their names."""
    for name in (RESULTS, TABLE, PAGE, PICTURE):
        path = store.folder / name
        if path.is_dir() and not path.is_symlink():
            raise HostError(
                f"{path} is a folder, and the sweep will write a file of that name. Nothing was measured. Move it away, or name "
                "another folder with --output."
            )


def write(result: Result, store: Store) -> list[str]:
    """Write the four files; returns their names. Raises HostError when the folder cannot be written or there is no matplotlib."""
    store.write(RESULTS, (json.dumps(result.as_dict(), indent=2, allow_nan=False) + "\n").encode())
    store.write(TABLE, table(result.rows).encode())
    try:
        import matplotlib
    except ImportError as error:
        raise HostError(
            f"{PAGE} and {PICTURE} were not drawn: this Python has no matplotlib ({error}). {RESULTS} and {TABLE} are there. "
            "`pip install matplotlib`, and start this again; measured points are not repeated."
        ) from error
    drawn = io.BytesIO()
    # Text stays text, and the same rows give the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tritonpilot"}):
        figure = _figure(result)
        figure.savefig(drawn, format="png", dpi=110)
        store.write(PICTURE, drawn.getvalue())
        vectors = io.StringIO()
        figure.savefig(vectors, format="svg", metadata={"Date": None})
    store.write(PAGE, _page(result, vectors.getvalue()[vectors.getvalue().index("<svg") :]).encode())
    return [RESULTS, TABLE, PAGE, PICTURE]


def table(rows: Sequence[Row]) -> str:
    """All figures as CSV, a line per row."""
    text = io.StringIO()
    names = [column.name for column in (*COLUMNS, *DETAILS)]
    writer = csv.DictWriter(text, [*names, "notes", "failure"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({**row.cells(), "notes": "; ".join(row.notes), "failure": row.failure})
    return text.getvalue()


def _figure(result: Result) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    figure = Drawing(figsize=(10, 9), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplot_mosaic([["curves", "curves"], ["batches", "parts"]], height_ratios=[3, 2])
    measured = [row for row in result.rows if row.point is not None]
    shown = result.choice.row or (front(measured)[-1] if measured else None)
    _curves(places["curves"], result, measured)
    if shown is not None:
        _batches(places["batches"], shown)
        _parts(
            places["parts"],
            [row for row in measured if row.setting == shown.setting and row.trial.rows == shown.trial.rows],
        )
    return figure


def _curves(axes: Axes, result: Result, measured: Sequence[Row]) -> None:
    """Throughput to the right, P99 upwards, a line per setting."""
    lines: dict[tuple[Setting, int], list[Row]] = {}
    for row in measured:
        lines.setdefault((row.setting, row.trial.rows), []).append(row)
    # In colour: those that get farthest within the SLO.
    limit = result.slo_ms if result.slo_ms is not None else math.inf

    def reach(key: tuple[Setting, int]) -> float:
        return max((_at(row)[0] for row in lines[key] if _at(row)[1] <= limit), default=0.0)

    ranked = sorted(lines, key=reach, reverse=True)
    for place, key in enumerate(ranked):
        rows = sorted(lines[key], key=lambda row: (row.trial.concurrency or 0, row.trial.rate_per_s or 0))
        is_shown = place < MOST_CURVES
        axes.errorbar(
            [_at(row)[0] for row in rows],
            [_at(row)[1] for row in rows],
            xerr=[_half(row.throughput) for row in rows],
            yerr=[_half(row.p99_ms) for row in rows],
            color=COLOURS[place % len(COLOURS)] if is_shown else PALE,
            label=_label(*key) if is_shown else None,
            marker="o",
            markersize=4,
            linewidth=1.2,
            elinewidth=0.7,
            zorder=2 if is_shown else 1,
        )
    best = front(measured)
    axes.plot(
        [_at(row)[0] for row in best], [_at(row)[1] for row in best], color=FRONT, linewidth=3, alpha=0.3, label="Pareto front"
    )  # fmt: skip
    if result.slo_ms is not None:
        axes.axhline(result.slo_ms, color=LIMIT, linestyle="--", linewidth=1, label=f"SLO {result.slo_ms:g} ms")
    if result.choice.row is not None:
        x, y = _at(result.choice.row)
        axes.scatter([x], [y], s=220, marker="*", color=CHOSEN, zorder=4, label="recommended")
    if measured:
        axes.set_yscale("log")
    axes.set_xlabel("throughput, infer/s")
    axes.set_ylabel("P99, ms")
    axes.set_title(f"{result.model}: throughput and latency, with 95 % intervals")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def _batches(axes: Axes, row: Row) -> None:
    sizes = sorted(row.batch_sizes)
    executions = sum(row.batch_sizes.values()) or 1
    width = max(1.0, (sizes[-1] - sizes[0]) / 80) if sizes else 1.0
    axes.bar(sizes, [100 * row.batch_sizes[size] / executions for size in sizes], width=width, color=CHOSEN)
    axes.set_xlabel("rows in a batch")
    axes.set_ylabel("executions, %")
    axes.set_title(f"batches at {row.trial.load}", fontsize=10)


def _parts(axes: Axes, rows: Sequence[Row]) -> None:
    """Where the time of a request goes, load by load."""
    points = [row.point for row in rows if row.point is not None]
    labels = [point.load for point in points]
    below = [0.0] * len(points)
    for name, header, colour in (
        ("queue_ms", "queue", "#ff7f0e"),
        ("compute_ms", "compute", "#1565c0"),
        ("network_ms", "network and front end", "#bdbdbd"),
    ):
        heights = [value if math.isfinite(value := getattr(point, name)) else 0.0 for point in points]
        axes.bar(labels, heights, bottom=below, color=colour, label=header)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_xlabel("load (requests in flight, or requests/s)")
    axes.set_ylabel("mean, ms")
    axes.set_title("queue against compute time of that setting", fontsize=10)
    axes.legend(fontsize=8)


def _page(result: Result, vectors: str) -> str:
    heading = f"{result.model}: sweep of {len(result.rows)} point{'s' * (len(result.rows) != 1)}"
    best = front(result.rows)
    rows = []
    for row in result.rows:
        marks = ["recommended"] if row is result.choice.row else ["Pareto front"] if row in best else []
        rows.append({**row.cells(), "remark": ", ".join([*marks, *([row.remark()] if row.remark() else [])])})
    notes = "".join(
        f"<li>{escape(row.trial.describe())}: {escape('; '.join(row.notes) or row.failure)}</li>"
        for row in result.rows
        if row.notes or row.failure
    )
    facts = "".join(
        f"<tr><th>{escape(name)}</th><td class=word>{escape(_said(value))}</td></tr>"
        for name, value in result.facts.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse }} td, th {{ padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }}
td.word, th:first-child {{ text-align: left }} small {{ font-weight: normal; color: #666 }} svg {{ width: 100%; height: auto }}
.reason {{ border-left: 4px solid {CHOSEN}; padding-left: 1em }}
</style></head><body>
<h1>{escape(heading)}</h1>
<p class="reason">{escape(result.choice.reason)}</p>
{vectors}
<h2>All points</h2>
{columns.html(COLUMNS, rows)}
<p>Intervals are of 95 %, over the measurement windows. Noisy: other processes or the host took part of the cores while it was
measured. Unsettled: the intervals stayed wider than asked for.</p>
{f"<h2>Remarks</h2><ul>{notes}</ul>" if notes else ""}
<h2>Measured with</h2>
<table>{facts}</table>
</body></html>
"""


def _said(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return str(value)


def _at(row: Row) -> tuple[float, float]:
    assert row.throughput is not None
    assert row.p99_ms is not None
    return row.throughput.mean, row.p99_ms.mean


def _half(estimate: Any) -> float:
    return estimate.half_width if math.isfinite(estimate.half_width) else 0.0


def _label(setting: Setting, rows: int) -> str:
    return setting.describe() + (f", {rows} rows a request" if rows > 1 else "")
