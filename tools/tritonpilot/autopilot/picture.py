"""A day drawn: the traffic, and what each way to set the server did and missed, replayed or measured.

path.write_bytes(png("ctr", traffic, interval_s, lines(comparison)))
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tritonpilot.arrivals import Traffic
from tritonpilot.autopilot.replay import Comparison, Played
from tritonpilot.errors import HostError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STATIC = ("#616161", "#c62828", "#8d6e63")
COLOURS = ("#1565c0", "#ff7f0e", "#2e7d32", "#9467bd")


@dataclass(frozen=True)
class Line:
    """One way to set the server, interval by interval. `missed`: requests due in each that were not answered in time."""

    name: str
    instances: Sequence[float]
    delay_ms: Sequence[float]
    missed: Sequence[int]
    is_static: bool = False


def lines(comparison: Comparison) -> list[Line]:
    """What is drawn of a replay."""
    return [_line_of(each) for each in comparison.all]


def png(title: str, traffic: Traffic, interval_s: float, drawn: Sequence[Line]) -> bytes:
    """The picture. Raises HostError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HostError(
            f"The picture was not drawn: this Python has no matplotlib ({error}). `pip install matplotlib`, and repeat."
        ) from error
    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    arrivals, instances, delays, missed = figure.subplots(4, 1, sharex=True, height_ratios=[2, 2, 1, 2])
    edges = np.minimum(np.arange(len(drawn[0].missed) + 1) * interval_s, traffic.seconds)
    counts, _ = np.histogram(traffic.at_s, bins=edges)
    arrivals.stairs(counts / np.diff(edges), edges, color="#37474f", fill=True, alpha=0.4)
    arrivals.set_ylabel("requests/s")
    arrivals.set_title(title)
    static, moving = iter(STATIC * len(drawn)), iter(COLOURS * len(drawn))
    for line in drawn:
        colour = next(static if line.is_static else moving)
        style = "--" if line.is_static else "-"
        _stairs(instances, edges, line.instances, colour, style, line.name)
        _stairs(delays, edges, line.delay_ms, colour, style)
        _stairs(missed, edges, np.cumsum(line.missed).tolist(), colour, style)
    instances.set_ylabel("instances")
    instances.set_ylim(bottom=0)
    instances.legend(fontsize=8, loc="upper left")
    delays.set_ylabel("queue delay, ms")
    missed.set_ylabel("requests missed\nuntil then")
    missed.set_yscale("symlog", linthresh=10)
    missed.set_ylim(bottom=0)
    missed.set_xlabel("s")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def _line_of(played: Played) -> Line:
    knobs = [step.seen.knobs for step in played.steps] or [played.first] * len(played.missed)
    return Line(
        played.name,
        [each.instances for each in knobs],
        [each.queue_delay_us / 1e3 for each in knobs],
        played.missed,
        is_static=not played.steps,
    )


def _stairs(
    axes: Axes,
    edges: npt.NDArray[np.float64],
    values: Sequence[float],
    colour: str,
    style: str,
    label: str | None = None,
) -> None:
    axes.stairs(values, edges, color=colour, linestyle=style, baseline=None, label=label, linewidth=1.5)
