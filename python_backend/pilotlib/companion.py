"""When does the companion look at the server's metrics, and whom does it wake? Decisions only; pilotlib.companion_thread acts.

    lookout = Lookout(); lookout.tick(now_s, server_cpu_s, own_cpu_s)        -> Step(look=True, wake=())
    lookout.looked(now_s, counts, waiting_wakes, cost_s, server_cpu_s)       -> models to wake now

A scrape of /metrics costs half a millisecond of CPU time and more with many models, so it is not repeated blindly. Two numbers
are free: the CPU time that tritonserver has used, and our own. Nothing arrives and no execution of its C++ backends ends
without its CPU time growing, and a stall is followed by silence. So the companion looks when the server has worked and then
is quiet, under work without a pause seldom. All of it is paid from a budget of a share of one core; the less is left of it, the
longer a silence has to be before it is worth a look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pilotlib.server_metrics import Counts, Model

TICK_S = 0.04
IDLE_TICK_S = 0.06  # when nothing has happened for IDLE_AFTER_S
IDLE_AFTER_S = 1.0
QUIET_S = 60e-6  # a server that uses less between two ticks has had no request: that takes 90 us and more
SILENCE_MOST_S = 0.2  # before a look, with an empty budget; with a full one it is a tick
BUSY_LOOK_S = 0.1  # least time between looks at a server that is never quiet
BUDGET_SHARE = 0.006  # of one core, for ticks, scrapes and wakes together, the server's part included
BUDGET_MOST_S = 0.01  # what is saved up in quiet times: some fifteen looks
WAKE_COST_S = 0.0005  # the server's part: HTTP, the batcher's thread, the answer
WAKE_COST_PER_BYTE_S = 0.8e-9  # of the zeros that it carries
WAKES_MOST = 8  # for a model of which no execution ends: that one is long, and its end is seen
FIRST_WAIT_S = 0.05  # wakes follow each other after 50, 100, 200 ms
WAIT_MOST_S = 0.4


@dataclass(frozen=True)
class Step:
    """What to do at a tick: scrape the metrics, and send these models another wake."""

    look: bool
    wake: tuple[Model, ...] = ()


@dataclass
class _Stuck:
    """A model with waiting requests: when its next wake is due, how long it waits after that, and how many were sent."""

    due_s: float
    wait_s: float
    wakes: int = 0

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.due_s and self.wakes < WAKES_MOST


class Lookout:
    """The companion's state. Times are seconds of one clock, CPU times seconds since any moment."""

    def __init__(self, *, budget_share: float = BUDGET_SHARE) -> None:
        self._budget_share = budget_share
        self._budget_s = BUDGET_MOST_S
        self._last: tuple[float, float] | None = None
        self._server_cpu_s: float | None = None
        self._happened = True  # something, since the last look
        self.has_news = True  # requests had arrived at the last look
        self._is_quiet = False
        self._rested = False  # since the last tick
        self._quiet_s = self._active_s = float("-inf")
        self._looked_s = float("-inf")
        self._seen: Mapping[Model, Counts] = {}
        self._stuck: dict[Model, _Stuck] = {}
        self._woken: dict[Model, int] = {}  # since the last look: they are counted as arrivals too

    def is_at_rest(self, server_cpu_s: float | None) -> bool:
        """Whether nothing has happened and nothing waits, so that `tick` may be left out: half of what a tick costs."""
        before_s = self._server_cpu_s
        if self._happened or self._stuck or server_cpu_s is None or before_s is None:
            return False
        if server_cpu_s - before_s >= QUIET_S:
            return False
        self._server_cpu_s, self._rested = server_cpu_s, True
        return True

    def tick(self, now_s: float, server_cpu_s: float | None, own_cpu_s: float) -> Step:
        """Decide from the clock and the CPU times of server (None: unknown, taken for busy) and companion."""
        self._is_quiet = is_quiet = self._account(now_s, server_cpu_s, own_cpu_s)
        if is_quiet or self._rested:
            self._quiet_s, self._rested = now_s, False
        if not is_quiet:
            self._happened, self._active_s = True, now_s
        busy_since_s = max(self._quiet_s, self._looked_s)
        silence_s = max(0.0, 1 - self._budget_s / BUDGET_MOST_S) * SILENCE_MOST_S
        is_silent = is_quiet and now_s - self._active_s >= silence_s and self._budget_s > 0
        # A silence tells more than work without a pause: half of the budget is kept for it.
        is_long_busy = now_s - busy_since_s >= BUSY_LOOK_S and self._budget_s > BUDGET_MOST_S / 2
        look = self._happened and (is_silent or is_long_busy)
        may_wake = is_quiet and not look and self._budget_s > 0
        due = [model for model, stuck in self._stuck.items() if may_wake and stuck.is_due(now_s)]
        return Step(look, tuple(self._wake(model, now_s) for model in due))

    def looked(
        self,
        now_s: float,
        seen: Mapping[Model, Counts],
        waiting: Mapping[Model, int],
        cost_s: float,
        server_cpu_s: float | None = None,
    ) -> list[Model]:
        """Which models to wake after a look at `seen`, that cost the server `cost_s`.

        `waiting`: how many of our own wakes have no answer yet: they are pending too. `server_cpu_s`: its CPU time after the
        look, so that the look itself is not taken for work; None when it did other work meanwhile.
        """
        if server_cpu_s is not None and self._is_quiet:
            self._server_cpu_s = server_cpu_s
        self._budget_s -= cost_s
        since_s, before = now_s - self._looked_s, self._seen
        self._looked_s, self._seen = now_s, seen
        self._happened = not self._is_quiet  # what came after the text was written is looked for when silence falls
        self.has_news = any(model not in before or before[model].arrived != seen[model].arrived for model in seen)
        woken, self._woken = self._woken, {}
        chosen = []
        for model, counts in seen.items():
            if counts.pending - waiting.get(model, 0) <= 0:
                self._stuck.pop(model, None)
                continue
            earlier = before.get(model)
            arrived = counts.arrived - earlier.arrived - woken.get(model, 0) if earlier else 0
            if not self._is_quiet and arrived * TICK_S >= since_s:
                self._stuck.pop(model, None)  # requests arrive at every tick: each wakes the batcher
                continue
            if earlier is None or counts.executed != earlier.executed:
                # An execution has ended, and what waits was not taken at its end.
                self._stuck[model] = _Stuck(now_s, FIRST_WAIT_S)
            elif model not in self._stuck:
                # The instance is likely to work for those that came before: its end will be seen.
                self._stuck[model] = _Stuck(now_s + FIRST_WAIT_S, FIRST_WAIT_S)
            if self._stuck[model].is_due(now_s):
                chosen.append(self._wake(model, now_s))
        for model in [model for model in self._stuck if model not in seen]:
            del self._stuck[model]
        return chosen

    def paid(self, wake_bytes: int) -> None:
        """A wake of so many bytes was sent."""
        self._budget_s -= WAKE_COST_S + wake_bytes * WAKE_COST_PER_BYTE_S

    def _account(self, now_s: float, server_cpu_s: float | None, own_cpu_s: float) -> bool:
        """Fill the budget, take from it what we used ourselves; whether the server was quiet since the last tick."""
        last, self._last = self._last, (now_s, own_cpu_s)
        before_s, self._server_cpu_s = self._server_cpu_s, server_cpu_s
        if last is None:
            return False
        self._budget_s += self._budget_share * (now_s - last[0]) - (own_cpu_s - last[1])
        self._budget_s = min(self._budget_s, BUDGET_MOST_S)
        return server_cpu_s is not None and before_s is not None and server_cpu_s - before_s < QUIET_S

    def _wake(self, model: Model, now_s: float) -> Model:
        stuck = self._stuck[model]
        stuck.due_s, stuck.wait_s = now_s + stuck.wait_s, min(2 * stuck.wait_s, WAIT_MOST_S)
        stuck.wakes += 1
        self._woken[model] = self._woken.get(model, 0) + 1
        return model
