"""How does the serving machine run threads? What Linux decides where the front end and executions want the same core."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Host:
    """Linux with its defaults (kernel 6.6 and newer, EEVDF)."""

    timer_slack_us: float = 50.0  # a sleep lasts so much longer (prctl(2), PR_SET_TIMERSLACK)
    #: The front end, which wakes up for each request, takes cores from executions until it has had so much more than its share,
    #: as much as each of its threads; then the executions have them until that is made up for (sched(7), base_slice_ns).
    slice_us: float = 3000.0
    #: Chance that the batcher, notified of an execution's end, looks before the instance is free; None: by the number of cores.
    batcher_first: float | None = None

    def of(self, cores: int) -> Host:
        """With every value set, for a server on so many cores."""
        if self.batcher_first is not None:
            return self
        return replace(self, batcher_first=0.8 if cores == 1 else 0.05)
