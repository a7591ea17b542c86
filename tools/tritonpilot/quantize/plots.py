"""How do the INT8 models of a search compare, as a picture?

    png(result, Path("front.png"))        # accuracy lost against speed, the Pareto front as a line
    html(result, Path("front.html"))      # the same with a table, the reason and the sensitivities; one file, no scripts

Both are written whole or not at all.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from tritonpilot.errors import HostError
from tritonpilot.quantize.search import FP32, Candidate, Result

ACROSS = "times the rows per second of FP32 (mean over batch sizes)"
UP = "error: squared error of the answers over their variance"
CHOSEN, FRONT, BEATEN, WRONG = "#2e7d32", "#1565c0", "#9e9e9e", "#c62828"
WIDTH, HEIGHT, MARGIN = 760, 420, 64
#: FP32 has no error, and an axis of powers of ten no zero: the lowest value that is drawn.
LOWEST = 1e-6
MOST_SENSITIVITIES = 40


def png(result: Result, path: Path) -> None:
    """Draw the candidates. Raises HostError when matplotlib is missing or the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HostError(
            f"{path} was not drawn: this Python has no matplotlib ({error}). The models and front.html do not need it. "
            "`pip install matplotlib`, and start this again; finished steps are not repeated."
        ) from error
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    line = [(result.gain(each), _drawn_error(each)) for each in result.front]
    axes.plot([x for x, _ in line], [y for _, y in line], color=FRONT, linewidth=1, zorder=1)
    for each in result.candidates:
        x, y = result.gain(each), _drawn_error(each)
        axes.scatter([x], [y], color=_colour(result, each), s=90 if each is result.chosen else 40, zorder=2)
        axes.annotate(each.name, (x, y), xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel(ACROSS)
    axes.set_ylabel(UP)
    axes.margins(x=0.2, y=0.1)
    axes.set_title(f"chosen: {result.chosen.name}")
    _write(path, lambda aside: figure.savefig(aside, format="png", dpi=120))


def html(result: Result, path: Path) -> None:
    """A page with the picture, all candidates and what each node costs. Raises HostError when it cannot be written."""
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>INT8: accuracy against speed</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse }} td, th {{ padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }}
td:first-child, th:first-child {{ text-align: left }} .chosen {{ font-weight: bold }} svg {{ width: 100% }}
</style></head><body>
<h1>Accuracy against speed</h1>
<p>{escape(result.reason)}</p>
{_svg(result)}
<p>Green: chosen. Blue: on the Pareto front. Grey: another is better in both. Red: loses more than the limits allow.</p>
{_candidates(result)}
{_sensitivities(result)}
</body></html>
"""
    _write(path, lambda aside: aside.write_text(page, encoding="utf-8"))


def _svg(result: Result) -> str:
    points = [(each, result.gain(each), math.log10(_drawn_error(each))) for each in result.candidates]
    left, right = _span([x for _, x, _ in points], 0.15)
    low, high = _span([y for _, _, y in points], 0.5)

    def across(x: float) -> float:
        return MARGIN + (x - left) / (right - left) * (WIDTH - 2 * MARGIN)

    def up(y: float) -> float:
        return HEIGHT - MARGIN - (y - low) / (high - low) * (HEIGHT - 2 * MARGIN)

    drawn = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(UP)} against {escape(ACROSS)}" font-size="12">',
        f'<path d="M{MARGIN} {MARGIN}V{HEIGHT - MARGIN}H{WIDTH - MARGIN}" fill="none" stroke="#888"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(ACROSS)}</text>',
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle">{escape(UP)}</text>',
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        drawn.append(f'<text x="{MARGIN - 6}" y="{up(power):.1f}" text-anchor="end">1e{power}</text>')
    for step in range(math.ceil(left * 4), math.floor(right * 4) + 1):
        x = across(step / 4)
        drawn.append(f'<text x="{x:.1f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{step / 4:g}</text>')
    line = " ".join(
        f"{across(result.gain(each)):.1f},{up(math.log10(_drawn_error(each))):.1f}" for each in result.front
    )
    drawn.append(f'<polyline points="{line}" fill="none" stroke="{FRONT}"/>')
    for each, x, y in points:
        size = 8 if each is result.chosen else 5
        drawn.append(
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="{size}" fill="{_colour(result, each)}"/>'
            f'<text x="{across(x) + 10:.1f}" y="{up(y) - 6:.1f}">{escape(each.name)}</text>'
        )
    return "\n".join([*drawn, "</svg>"])


def _candidates(result: Result) -> str:
    sizes = result.comparison.batch_sizes
    heads = ["model", "loss", "mean cosine", "error", *[f"rows/s at {batch}" for batch in sizes]]
    heads += [*[f"x FP32 at {batch}" for batch in sizes], "in FP32", "accurate"]
    rows = []
    for each in result.candidates:
        verdict = each.verdict
        cosine = verdict.agreement.cosine if verdict else None
        cells = [
            each.name,
            "" if verdict is None else f"{100 * verdict.loss:.2f} % ({verdict.metric})",
            "" if cosine is None else f"{cosine:.4f}",
            f"{each.noise:.2g}",
            *[f"{result.comparison.of(each.name, batch).rows_per_s:,.0f}" for batch in sizes],
            *[f"{result.comparison.ratio(each.name, FP32, batch):.2f}" for batch in sizes],
            f"{len(each.left)} of {each.nodes}" if each.recipe else "all",
            "yes" if each.is_accurate else "no",
        ]
        rows.append((cells, "chosen" if each is result.chosen else ""))
    return _table(heads, rows)


def _sensitivities(result: Result) -> str:
    if not result.sensitivities:
        return ""
    worst = sorted(result.sensitivities, key=lambda each: each.noise, reverse=True)[:MOST_SENSITIVITIES]
    rows = [([s.node, s.op_type, s.group, f"{s.noise:.2g}", f"{100 * s.time_share:.1f} %"], "") for s in worst]
    table = _table(["node", "operator", "group", "error alone", "share of FP32 time"], rows)
    return f"<h2>What quantising a node alone costs</h2>\n{table}"


def _table(heads: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "\n".join(
        f'<tr class="{mark}">{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>' for cells, mark in rows
    )
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _span(values: Sequence[float], room: float) -> tuple[float, float]:
    return min(values) - room, max(values) + room


def _drawn_error(candidate: Candidate) -> float:
    return max(candidate.noise, LOWEST)


def _colour(result: Result, candidate: Candidate) -> str:
    if candidate is result.chosen:
        return CHOSEN
    if not candidate.is_accurate:
        return WRONG
    return FRONT if candidate in result.front else BEATEN


def _write(path: Path, draw: Callable[[Path], object]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(descriptor)
        aside = Path(name)
        try:
            draw(aside)
            aside.chmod(0o644)
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    except OSError as error:
        raise HostError(
            f"Cannot write {path}: {error}. What is there was not replaced. Make room or give yourself permission to write there."
        ) from error
