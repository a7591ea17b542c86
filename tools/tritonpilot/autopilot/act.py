"""Set a served model's queue delay, instances and class limits over gRPC, without harm to who uses it.

    with Actor(endpoints.grpc, key, metrics=endpoints.metrics, repository=Path("model_repository")) as actor:
        actor.knobs("ctr")                                        # what the server has now
        actor.apply("ctr", Knobs(queue_delay_us=2000, instances=3))

Instances change in place and come one at a time. The delay changes live where the model's backend can (ADR 0018). Everything else
loads the model again beside itself. A change is believed when the repository index, the model's config and a real inference say so;
what could not be verified is undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from tritonpilot import metrics
from tritonpilot.autopilot import live
from tritonpilot.autopilot.knobs import as_written, is_same_but_knobs, knobs_of, with_knobs, with_spare
from tritonpilot.autopilot.terms import Knobs, Way
from tritonpilot.control import BusyError, Control, RestrictedError
from tritonpilot.errors import MeasurementError, RepositoryError, ServerError
from tritonpilot.model_config import ModelConfig, parse
from tritonpilot.probes import probe_of
from tritonpilot.repository import CONFIG_FILE

LOAD_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 10.0
POLL_S = 0.05


class Actor:
    """A connection to one Triton, with the key of its restricted APIs.

    `metrics` is host:port of its metrics, without which no delay changes live. `repository` is the folder that it serves from,
    where that can be read: its warmup data make better probes than zeros, and its configs tell what Triton completed by itself.
    """

    def __init__(
        self,
        grpc_endpoint: str,
        key: str | None = None,
        *,
        metrics: str = "",
        repository: Path | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self._control = Control(grpc_endpoint, key)
        self._key = key or ""
        self._metrics = metrics
        self._repository = repository
        self._say = on_progress or (lambda _: None)
        self._given: dict[str, ModelConfig] = {}  # what we loaded last

    def __enter__(self) -> Actor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._control.close()

    def check_key(self) -> None:
        """Raise RestrictedError when the server does not take the key; nothing where it is not there."""
        try:
            self._control.index(timeout_s=ANSWER_TIMEOUT_S)
        except RestrictedError:
            raise
        except ServerError:
            return

    def knobs(self, model: str) -> Knobs:
        """What the server has now; of its own delay and a live one the longer. Raises ServerError."""
        found = knobs_of(self._control.config(model))
        return replace(found, queue_delay_us=max(found.queue_delay_us, self._live_us(model) or 0))

    def is_live(self, model: str) -> bool:
        """Whether the delay of the model can be changed while it serves. Raises ServerError when its metrics cannot be read."""
        return self._live_us(model) is not None

    def apply(self, model: str, target: Knobs, way: Way = "") -> Knobs:
        """Make `target` true and return what is true then. Classes that it does not name keep their limits.

        `way`: "instances" refuses whatever needs a reload. A delay changes live where the backend can; with "reload" only if a live
        one holds already. Triton's own delay must then be the shorter one: where it is not, the first change loads the model again
        with none. Raises ServerError when the target could not be reached; the settings from before are then served again, or it
        says what is.
        """
        served = self._control.config(model)
        before = self.knobs(model)
        target = replace(target, max_queue_sizes={**before.max_queue_sizes, **target.max_queue_sizes})
        if target == before:
            return before
        live_us = self._live_us(model)
        is_new = target.queue_delay_us != before.queue_delay_us and way != "reload"
        is_live = live_us is not None and (live_us > 0 or is_new)
        own_us = int(served.dynamic_batching.max_queue_delay_microseconds)
        if not is_live:
            own_us = target.queue_delay_us
        elif own_us > target.queue_delay_us:
            own_us = 0
        written = self._written(model, served)
        wanted = with_knobs(written, replace(target, queue_delay_us=own_us))
        # Whatever needs a reload comes first, with as few instances as may be: they all start at once.
        first = with_knobs(wanted, replace(knobs_of(wanted), instances=min(before.instances, target.instances)))
        needs_reload = with_knobs(first, replace(knobs_of(first), instances=before.instances)) != written
        if needs_reload and way == "instances":
            raise ServerError(
                f"{model} can have {target.describe()} by a reload only, and instances alone were to change. Nothing was changed."
            )
        try:
            if needs_reload:
                # A retiring queue cannot be woken (ADR 0003), and what waits in it may expire; a spare instance finds it at once.
                self._load(model, with_spare(written))
                self._load(model, first)
                self._set_instances(model, first, knobs_of(first).instances, target.instances)
            else:
                self._set_instances(model, first, before.instances, target.instances)
            delay_us = target.queue_delay_us if is_live else 0
            if live_us not in (None, delay_us):
                self._set_live(model, delay_us)
            return self._verified(model, target)
        except ServerError as failed:
            now = self._undone(model, written, before)
            raise ServerError(f"{model} could not be given {target.describe()}: {failed} {now}") from None

    def _set_instances(self, model: str, config: ModelConfig, now: int, wanted: int) -> None:
        """In place. New ones come one at a time, each warm before it serves; those that go answer what they have first."""
        steps = range(now + 1, wanted + 1) if wanted > now else [wanted] if wanted < now else []
        for count in steps:
            self._load(model, with_knobs(config, replace(knobs_of(config), instances=count)))

    def _load(self, model: str, config: ModelConfig) -> None:
        began = time.monotonic()
        self._control.load(model, config=config, probe=False, timeout_s=LOAD_TIMEOUT_S)
        self._given[model] = config
        has, asked = knobs_of(self._control.config(model)), knobs_of(config)
        if has != asked:
            raise ServerError(f"Triton said that it loaded {model}, and serves it with {has.describe()}.")
        self._check_answers(model)
        self._say(f"{model}: {asked.describe()}, after {time.monotonic() - began:.1f} s")

    def _set_live(self, model: str, delay_us: int) -> None:
        request = self._probe(model)
        request.parameters.pop("priority", None)  # not in the lowest class: it shall come first
        request.parameters[live.PARAMETER].string_param = live.signed(self._key, model, delay_us)
        self._retry(lambda: self._control.infer(request, timeout_s=ANSWER_TIMEOUT_S))
        if (has := self._live_us(model)) != delay_us:
            raise ServerError(f"The backend of {model} took a delay of {delay_us} us and says that it holds {has} us.")
        self._say(f"{model}: delay {delay_us} us, live")

    def _verified(self, model: str, target: Knobs) -> Knobs:
        found = self.knobs(model)
        if found != target:
            raise ServerError(f"Triton serves {model} with {found.describe()}: somebody else changes it too.")
        return found

    def _undone(self, model: str, written: ModelConfig, before: Knobs) -> str:
        """Bring back what was served; says what is true now."""
        try:
            served = self._control.config(model)
            if self.knobs(model) != before or not is_same_but_knobs(as_written(served), as_written(written)):
                self._load(model, written)
                if self._live_us(model) is not None and knobs_of(written).queue_delay_us < before.queue_delay_us:
                    self._set_live(model, before.queue_delay_us)
            self._check_answers(model)
        except ServerError as failed:
            return f"That could not be undone: {failed} Look at the server's log, and load the model again."
        return f"It serves with {before.describe()}, as before."

    def _check_answers(self, model: str) -> None:
        """An inference is answered: ours, or where the queue is full that of somebody else."""
        before = self._answered(model)
        request = self._probe(model)

        def ask() -> None:
            try:
                self._control.infer(request, timeout_s=ANSWER_TIMEOUT_S)
            except BusyError:
                if self._answered(model) <= before:
                    raise

        self._retry(ask)

    def _retry(self, ask: Callable[[], None]) -> None:
        """Again while the queue is full. Raises ServerError."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            try:
                return ask()
            except BusyError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_S)

    def _probe(self, model: str) -> live.Request:
        folder = self._repository / model if self._repository is not None else None
        return probe_of((model, ""), self._control.config(model), folder).request

    def _answered(self, model: str) -> int:
        return sum(version.success.count for version in self._control.statistics(model))

    def _written(self, model: str, served: ModelConfig) -> ModelConfig:
        """The config as Triton was given it, with the settings that it has now."""
        for known in (self._given.get(model), self._on_disk(model)):
            if known is not None and is_same_but_knobs(as_written(known), as_written(served)):
                return with_knobs(known, knobs_of(served))
        return as_written(served)

    def _on_disk(self, model: str) -> ModelConfig | None:
        if self._repository is None:
            return None
        path = self._repository / model / CONFIG_FILE
        try:
            return parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, RepositoryError):
            return None

    def _live_us(self, model: str) -> int | None:
        """The live delay; None: the backend has none, or its metrics are not known."""
        if not self._metrics:
            return None
        try:
            samples = metrics.scrape(self._metrics)
        except MeasurementError as error:
            raise ServerError(str(error)) from None
        return live.delay_us(samples, model)
