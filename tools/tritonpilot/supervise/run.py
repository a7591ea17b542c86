"""The loop: notice, decide, heal, tell.

    received = run(Settings(repository=Path("model_repository")), Own(server), on_ready=print)     # until a signal

A stub's death is noticed at once where Triton's processes can be seen, everything else by a real inference of every model each
second. What is done is `decide`'s.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from prometheus_client import CollectorRegistry

from tritonpilot.control import Control, Inputs
from tritonpilot.errors import PilotError, ServerError
from tritonpilot.exporter import serving
from tritonpilot.supervise import memory
from tritonpilot.supervise.decide import Kind, Policy, Seen, State, Trouble, decide, failed, healed, restarted
from tritonpilot.supervise.heal import heal
from tritonpilot.supervise.metrics import SupervisorMetrics
from tritonpilot.supervise.processes import Stubs, model_of, resident_bytes
from tritonpilot.supervise.servers import Attached, Own, Server
from tritonpilot.watch import Endpoints, ModelReport, Report, Watch, WatchMetrics
from tritonpilot.watch import Settings as WatchSettings

TICK_S = 0.2  # at the processes; the end of one wakes us at once
FAILING_LOOKS = 3  # with errors, until a model's stubs are taken for broken
HEALED_WITHIN_S = 10.0
CLEAN_EVERY_S = 5.0
SEEK_EVERY_S = 5.0  # the process of a Triton that is not our own: a search through all of /proc

What = Literal["started", "noticed", "healed", "failed", "restarted", "down", "back", "memory", "stopped"]


@dataclass(frozen=True)
class Settings:
    """How to look, and where to tell. A port of 0 is a free one."""

    repository: Path | None = None
    """For the warmup data that models are asked with; without it zeros."""
    probe_inputs: Mapping[str, Inputs] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8105
    every_s: float = 1.0
    hang_s: float = 5.0
    """Who answers nobody for so long hangs."""
    away_s: float = 10.0
    """For so long a server may answer nothing, until it is restarted."""
    stub_bytes: int = 0
    """A stub that takes more is replaced; 0: never."""
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True)
class Event:
    """What happened, in a sentence."""

    what: What
    said: str
    model: str = ""
    seconds: float | None = None
    time_s: float = field(default_factory=time.time)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is not known is left out."""
        return {name: value for name, value in asdict(self).items() if value not in ("", None)}


def run(
    settings: Settings,
    server: Own | Attached,
    on_ready: Callable[[Endpoints], None],
    tell: Callable[[Event], None] = lambda _: None,
) -> int:
    """Keep `server` serving until SIGINT or SIGTERM; returns the number of that signal. Call it in the main thread.

    A server of our own is started, and stopped at the end. Raises what its start raises, PortError for the metrics' port, and
    ServerError when it cannot be kept alive.
    """
    registry = CollectorRegistry()
    watching, metrics = WatchMetrics(), SupervisorMetrics()
    registry.register(watching)
    registry.register(metrics)
    with _signals(server) as received, serving(registry, settings.host, settings.port, "The supervisor") as address:
        try:
            if isinstance(server, Own):
                server.server.start()
            with (
                _Looks(settings, server, watching) as looks,
                _Supervisor(settings, server, metrics, looks, tell) as at_work,
            ):
                on_ready(Endpoints(address))
                tell(Event("started", f"keeping Triton at {server.grpc} serving"))
                while not received:
                    at_work.turn()
        except PilotError:
            if not received:  # else it is the end that was asked for
                raise
        finally:
            if isinstance(server, Own):
                server.server.stop()
    tell(Event("stopped", "the supervisor ends"))
    return received[0]


class _Looks:
    """Real inferences of every model, again and again, in a thread: one that hangs holds up nothing here."""

    def __init__(self, settings: Settings, server: Server, metrics: WatchMetrics) -> None:
        self._watch_settings = WatchSettings(
            server.grpc,
            settings.repository,
            server.key,
            timeout_s=settings.hang_s,
            probe_inputs=settings.probe_inputs,
        )
        self._every_s = settings.every_s
        self._metrics = metrics
        self._ends = threading.Event()
        self._last: tuple[float, Report] | None = None
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="pilot-looks", daemon=True)

    def __enter__(self) -> _Looks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(2 * self._watch_settings.timeout_s)

    def take(self) -> tuple[float, Report] | None:
        """When the last look began, and what it found; None: nothing new. Raises what ended the looks."""
        if self._failed is not None:
            raise self._failed
        found, self._last = self._last, None
        return found

    def at(self, model: str) -> list[ModelReport]:
        """A look at one model, now. Raises ServerError when Triton does not answer."""
        with Watch(self._watch_settings) as watch:
            report = watch.look(model)
        if not report.is_up:
            raise ServerError(report.said)
        return list(report.models)

    def _run(self) -> None:
        try:
            with Watch(self._watch_settings) as watch:
                while not self._ends.is_set():
                    began_s = time.monotonic()
                    report = watch.look()
                    self._metrics.take(report)
                    self._last = began_s, report
                    self._ends.wait(max(0.0, began_s + self._every_s - time.monotonic()))
        except Exception as error:  # noqa: BLE001  for the main thread: nobody would look any more
            self._failed = error


class _Supervisor:
    """One turn after the other: see, decide, act."""

    def __init__(
        self,
        settings: Settings,
        server: Server,
        metrics: SupervisorMetrics,
        looks: _Looks,
        tell: Callable[[Event], None],
    ) -> None:
        self._settings = settings
        self._server = server
        self._metrics = metrics
        self._looks = looks
        self._tell = tell
        self._state = State()
        self._stubs = Stubs(server.pid())
        self._models: list[str] = []
        self._troubles: dict[str, Trouble] = {}
        self._noticed_s: dict[str, float] = {}
        self._failing: dict[str, int] = {}
        self._changed_s: dict[str, float] = {}
        """When we touched a model: looks that began before say nothing about it."""
        self._away_s: float | None = None
        """Since when Triton has answered nothing; None: it does."""
        self._sought_s = 0.0
        self._series: dict[tuple[str, int], memory.Series] = {}
        self._measured_s = self._cleaned_s = 0.0

    def __enter__(self) -> _Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self._stubs.close()

    def turn(self) -> None:
        """Wait for a moment, look, and do one thing at most. Raises ServerError when nothing helps."""
        self._stubs.wait(TICK_S)
        now_s = time.monotonic()
        is_down = self._look_at_server(now_s)
        if not is_down:
            self._look_at_stubs(now_s)
            self._take_look()
            self._look_at_memory(now_s)
        self._state, decision = decide(self._settings.policy, self._state, Seen(now_s, is_down, self._troubles))
        self._metrics.unwell = {model: trouble.kind for model, trouble in self._troubles.items()}
        if decision.action == "reload":
            self._reload(decision.model, decision.reason)
        elif decision.action == "restart":
            self._restart(decision.reason, now_s)
        elif decision.action == "give_up":
            self._metrics.needs_help = True
            raise ServerError(
                f"Triton at {self._server.grpc} cannot be kept serving: {decision.reason}. It is not served. Look at its log."
            )

    # -- seeing --------------------------------------------------------------------------------------------------------

    def _look_at_server(self, now_s: float) -> str:
        """Why it has to be restarted, "" for no reason."""
        if death := self._server.death():
            return death
        if not (self._stubs.is_server_alive and self._stubs.server) and now_s - self._sought_s > SEEK_EVERY_S:
            self._sought_s = now_s
            pid = self._server.pid()  # of somebody else's that was restarted
            if pid != self._stubs.server:
                self._follow(pid)
        away_s = 0.0 if self._away_s is None else now_s - self._away_s
        if away_s < self._settings.away_s:
            return ""
        said = f"Triton at {self._server.grpc} has not answered for {away_s:.0f} s"
        if self._server.can_restart:
            return said
        if not self._metrics.needs_help:
            self._metrics.needs_help = True
            self._tell(Event("down", f"{said}, and there is no --restart-command: waiting for its return"))
        return ""

    def _follow(self, pid: int) -> None:
        self._metrics.freed_bytes += self._stubs.clean()
        self._stubs.close()
        self._stubs = Stubs(pid)
        self._series.clear()
        self._troubles.clear()

    def _look_at_stubs(self, now_s: float) -> None:
        for stub in self._stubs.died():
            model = model_of(stub.instance, self._models) or stub.instance.rpartition("_")[0].rpartition("_")[0]
            self._metrics.see(model)
            self._metrics.deaths[model] += 1
            self._notice(model, Trouble("dead", f"its stub {stub.instance} (process {stub.pid}) died"), now_s)
        if now_s - self._cleaned_s > CLEAN_EVERY_S:
            self._cleaned_s = now_s
            self._metrics.freed_bytes += self._stubs.clean()

    def _take_look(self) -> None:
        taken = self._looks.take()
        if taken is None:
            return
        began_s, report = taken
        if not report.is_up:
            if self._away_s is None:
                self._away_s = began_s
                self._tell(Event("down", report.said))
            return
        if self._away_s is not None:
            self._away_s = None
            self._metrics.needs_help = False
            self._tell(Event("back", f"Triton answers; models: {len(report.models)}"))
        self._models = sorted({each.model for each in report.models})
        for model in self._models:
            self._metrics.see(model)
        found = {each.model: each for each in report.models if each.result == "failed"}
        for each in report.models:
            if began_s <= self._changed_s.get(each.model, 0.0):
                continue
            if each.model in found:
                self._count_failure(found[each.model], began_s)
            else:
                self._failing.pop(each.model, None)
                if (known := self._troubles.get(each.model)) is not None and known.kind != "dead":
                    del self._troubles[each.model]
        for model in [name for name in self._troubles if name not in self._models]:
            del self._troubles[model]  # unloaded

    def _count_failure(self, each: ModelReport, at_s: float) -> None:
        kind: Kind = "failing"
        if "is not healthy" in each.said or "health mutex" in each.said:
            kind = "dead"
        elif "Deadline Exceeded" in each.said:
            kind = "hung"
        count = self._failing[each.model] = self._failing.get(each.model, 0) + 1
        if kind != "failing" or count >= FAILING_LOOKS:
            self._notice(each.model, Trouble(kind, each.said), at_s)

    def _notice(self, model: str, trouble: Trouble, at_s: float) -> None:
        if model in self._troubles:
            return
        self._troubles[model] = trouble
        self._noticed_s[model] = at_s
        self._tell(Event("noticed", f"{model} is {trouble.kind}: {trouble.said}", model))

    def _look_at_memory(self, now_s: float) -> None:
        if now_s - self._measured_s < memory.EVERY_S or not self._stubs.server:
            return
        self._measured_s = now_s
        stubs = self._stubs.alive()
        readings = {("server", self._stubs.server): resident_bytes(self._stubs.server)}
        readings |= {(stub.instance, stub.pid): resident_bytes(stub.pid) for stub in stubs}
        self._series = {key: self._series.get(key, memory.Series()) for key in readings}
        for key, size in readings.items():
            self._series[key].add(now_s, size)
        self._metrics.memory = {process: size for (process, _), size in readings.items()}
        slopes = {process: series.per_hour for (process, _), series in self._series.items()}
        self._metrics.slopes = {process: slope for process, slope in slopes.items() if slope is not None}
        for stub in stubs if self._settings.stub_bytes else ():
            size = readings[stub.instance, stub.pid]
            model = model_of(stub.instance, self._models)
            if model and size > self._settings.stub_bytes and model not in self._troubles:
                said = f"its stub {stub.instance} takes {size >> 20} MB, more than {self._settings.stub_bytes >> 20}"
                self._notice(model, Trouble("failing", said), now_s)

    # -- acting --------------------------------------------------------------------------------------------------------

    def _reload(self, model: str, reason: str) -> None:
        trouble = self._troubles[model]
        hanging = [stub for stub in self._stubs.alive() if model_of(stub.instance, self._models) == model]
        try:
            with Control(self._server.grpc, self._server.key) as control:
                if not any(each.name == model and each.state == "READY" for each in control.index()):
                    del self._troubles[model]  # unloaded, or being loaded: by somebody who knows why
                    return
                way = heal(
                    control,
                    model,
                    is_whole=self._state.of(model).failed > 0,
                    hanging=hanging if trouble.kind == "hung" else (),
                    stubs=self._stubs,
                    check=lambda: self._check(model),
                )
        except ServerError as error:
            now_s = self._changed_s[model] = time.monotonic()
            self._state = failed(self._settings.policy, self._state, model, now_s)
            self._metrics.heal_failures[model] = self._metrics.heal_failures.get(model, 0) + 1
            self._tell(Event("failed", f"{reason}; new stubs did not help: {error}", model))
            return
        now_s = self._changed_s[model] = time.monotonic()
        seconds = now_s - self._noticed_s[model]
        self._state = healed(self._state, model, now_s)
        self._troubles.pop(model, None)
        self._failing.pop(model, None)
        self._metrics.heals[model, way] = self._metrics.heals.get((model, way), 0) + 1
        self._metrics.heal_seconds[model] = seconds
        said = "new instances answer" if way == "instances" else "a new copy answers"
        self._tell(Event("healed", f"{reason}; {said} after {seconds:.1f} s", model, seconds))

    def _check(self, model: str) -> None:
        """Raises ServerError unless every version of it answers."""
        until_s = time.monotonic() + HEALED_WITHIN_S
        while True:
            found = self._looks.at(model)
            if found and all(each.is_well for each in found):
                return
            if time.monotonic() > until_s:
                said = "; ".join(each.said for each in found if not each.is_well) or "it is not loaded"
                raise ServerError(f"Model {model!r} was given new stubs and does not answer: {said}.")

    def _restart(self, reason: str, noticed_s: float) -> None:
        self._tell(Event("down", reason))
        error: PilotError | None = None
        try:
            self._server.restart()
        except PilotError as refused:
            error = refused
        now_s = time.monotonic()
        self._away_s = None
        self._state = restarted(self._settings.policy, self._state, now_s, is_up=error is None)
        self._follow(self._server.pid())
        self._changed_s = dict.fromkeys(self._models, now_s)
        if error is not None:
            self._metrics.restart_failures += 1
            self._tell(Event("failed", f"Triton could not be restarted: {error}"))
            return
        self._metrics.restarts += 1
        self._metrics.restart_seconds = now_s - noticed_s
        self._tell(
            Event("restarted", f"Triton serves again after {now_s - noticed_s:.1f} s", seconds=now_s - noticed_s)
        )


@contextmanager
def _signals(server: Own | Attached) -> Iterator[list[int]]:
    """The signals that came: SIGINT and SIGTERM. The first ends what is under way, a second one kills a server of our own."""
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        if isinstance(server, Own):
            server.server.request_stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
