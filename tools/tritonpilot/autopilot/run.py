"""The autopilot as a process: one decision an interval until a signal, one leader, its own metrics.

run(Settings(policy=Path("autopilot.yaml"), state=Path("state")), actor, on_ready=print)               # /metrics at 8104
entries = once(settings, actor)                                             # one interval, one decision a model
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tritonpilot.autopilot.loop import PATIENCE_INTERVALS, Acts, Autopilot, Settings, said_of
from tritonpilot.autopilot.record import Entry, Folder
from tritonpilot.exporter import serving


@dataclass(frozen=True)
class Endpoints:
    """host:port of each service of a running autopilot."""

    metrics: str


def run(
    settings: Settings,
    actor: Acts,
    on_ready: Callable[[Endpoints], None],
    tell: Callable[[Entry], None] = lambda _: None,
) -> int:
    """Decide once an interval until SIGINT or SIGTERM; returns the number of that signal. Call it in the main thread.

    A change that is under way is finished first. Triton need not run. Raises SpecError for a wrong policy file or address,
    HostError where another autopilot works with that folder, and PortError for a port that is taken.
    """
    with Folder(settings.state) as folder, _signals() as stopped:
        pilot = Autopilot(settings, folder, actor, tell=tell)
        with serving(pilot.metrics.registry, settings.host, settings.port, "The autopilot") as address:
            on_ready(Endpoints(address))
            dry = " Nothing is changed: it is a dry run." if settings.is_dry_run else ""
            pilot.log(Entry("", "started", f"The autopilot follows {said_of(pilot.policy)}.{dry}"))
            pilot.check_key()
            pilot.look()
            while not stopped.is_set_within(pilot.left_s()):
                pilot.step()
            pilot.log(Entry("", "stopped", "The autopilot was stopped; the settings stay as they are."))
    return stopped.number


def once(settings: Settings, actor: Acts, tell: Callable[[Entry], None] = lambda _: None) -> list[Entry]:
    """Look for one interval, decide once for each model, and do it. Raises as `run`, and nothing for a Triton that is not there."""
    with Folder(settings.state) as folder:
        pilot = Autopilot(settings, folder, actor, tell=tell)
        pilot.check_key()
        pilot.look()
        for _ in range(PATIENCE_INTERVALS):  # a Prometheus may scrape more rarely
            time.sleep(max(0.0, pilot.left_s()))
            if entries := pilot.step():
                return entries
    return []


class _Stopped:
    """Whether a signal came, and which."""

    def __init__(self) -> None:
        self.number = 0
        self._event = threading.Event()

    def set(self, number: int) -> None:
        self.number = number
        self._event.set()

    def is_set_within(self, seconds: float) -> bool:
        """Wait for it."""
        return self._event.wait(max(0.0, seconds))


@contextmanager
def _signals() -> Iterator[_Stopped]:
    """The first SIGINT or SIGTERM is noted; the next one does what it always does."""
    stopped = _Stopped()
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _: object) -> None:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        stopped.set(number)

    for each in handlers:
        signal.signal(each, note)
    try:
        yield stopped
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
