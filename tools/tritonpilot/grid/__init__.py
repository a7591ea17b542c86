"""How does a service behave over a grid of settings and loads, and which setting does its SLO want? `tritonpilot sweep`.

    trials = Grid(queue_delays_us=(0, 2000), concurrencies=(1, 16, 64)).trials(service)
    with Stage(service) as stage:
        rows = list(run(stage, trials))
    choose(rows, slo_ms=20, now=Setting.of(service)).reason

Guide: docs/sweeping.md.
"""

from tritonpilot.grid.choice import Choice, choose, front
from tritonpilot.grid.measure import Effort
from tritonpilot.grid.plan import Grid, Trial, keys
from tritonpilot.grid.row import Row
from tritonpilot.grid.run import run
from tritonpilot.grid.store import Store

__all__ = ["Choice", "Effort", "Grid", "Row", "Store", "Trial", "choose", "front", "keys", "run"]
