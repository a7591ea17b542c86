"""A replay drawn: the traffic, and what each way to set the server did and missed.

path.write_bytes(png(case, comparison, "ctr"))
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tritonpilot.autopilot.controller import Knobs
from tritonpilot.autopilot.replay import Case, Comparison, Played
from tritonpilot.errors import HostError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEST, WORST = "#616161", "#c62828"
COLOURS = ("#1565c0", "#ff7f0e", "#2e7d32", "#9467bd")


def png(case: Case, comparison: Comparison, title: str) -> bytes:
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
    ends_s = _ends_s(case, comparison.best)
    counts, edges = np.histogram(case.traffic.at_s, bins=[0.0, *ends_s])
    arrivals.stairs(counts / np.diff(edges), edges, color="#37474f", fill=True, alpha=0.4)
    arrivals.set_ylabel("requests/s")
    arrivals.set_title(title)
    drawn = [(comparison.best, BEST, "--"), (comparison.worst, WORST, "--")]
    drawn += [(each, COLOURS[place % len(COLOURS)], "-") for place, each in enumerate(comparison.policies)]
    for played, colour, line in drawn:
        _line(instances, edges, [knobs.instances for knobs in _knobs(played, len(ends_s))], colour, line, played.name)
        _line(delays, edges, [knobs.queue_delay_us / 1e3 for knobs in _knobs(played, len(ends_s))], colour, line)
        _line(missed, edges, np.cumsum(played.missed).tolist(), colour, line)
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


def _ends_s(case: Case, played: Played) -> list[float]:
    count = len(played.missed)
    return [min((place + 1) * case.interval_s, case.traffic.seconds) for place in range(count)]


def _knobs(played: Played, count: int) -> Sequence[Knobs]:
    """What was set during each interval."""
    return [step.seen.knobs for step in played.steps] or [played.first] * count


def _line(
    axes: Axes, edges: npt.NDArray[np.float64], values: Sequence[float], colour: str, line: str, label: str = ""
) -> None:
    axes.stairs(values, edges, color=colour, linestyle=line, baseline=None, label=label or None, linewidth=1.5)
