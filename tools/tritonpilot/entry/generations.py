"""Does Triton still serve the model whose answers are kept? Watched, for nobody tells: any tool may load a model.

    generations = Generations("127.0.0.1:8001"); task = create_task(generations.keep_up())
    now = generations.of("text")         # Generation(number, version), or None: not known at the moment

A number is never used again. It changes when Triton shows another version, another config, or counters that began anew (a model
that was loaded again may be another one under the same version), of the model or of one that it calls. What holds was seen to hold
at most CACHE_LEASE_S ago: so long after Triton has changed a model, nobody gets an answer of the old one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonpilot.entry.terms import CACHE_LEASE_S

LOOK_S = 0.25
ASK_TIMEOUT_S = 1.0
IDLE_S = 30.0  # a model that nobody asks for so long is not looked at
MOST_MODELS = 64  # that one model calls, in all
_STEP_VERSIONS = "pilot_step_versions"  # which versions a driver calls, as name:version
#: What Triton changes without another model behind it: how many instances, how they batch.
_SAME_MODEL = ("instance_group", "dynamic_batching")


class Generation(NamedTuple):
    """What a model is now."""

    number: int
    version: int
    """The highest that is ready: Triton takes it for callers that name none."""
    ready: frozenset[str]
    called: tuple[int, ...] = ()
    """Versions of the models that it calls, steps first: a pipeline's own stays when its members change."""

    @property
    def label(self) -> str:
        """What is served: 3, or of a pipeline 1.3.2."""
        return ".".join(map(str, (self.version, *self.called)))


class _Seen(NamedTuple):
    """One look at a model and all that it calls."""

    described: tuple[Any, ...]
    versions: frozenset[str]
    counts: dict[tuple[str, str], int]


class _Known:
    """What is known of one model."""

    __slots__ = ("generation", "until_s", "wanted_s", "was_seen")

    def __init__(self, wanted_s: float) -> None:
        self.generation: Generation | None = None
        self.was_seen: _Seen | None = None
        self.until_s = 0.0
        self.wanted_s = wanted_s


class Generations:
    """The models of one Triton. `triton` is host:port of its gRPC service."""

    def __init__(
        self,
        triton: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._triton = triton
        self._clock = clock
        self.on_new: Callable[[str], None] = lambda _: None
        """Called with the name of a model that is another one now."""
        self._say = say
        self._numbers = itertools.count(1)
        self._known: dict[str, _Known] = {}
        self._stub: Any = None
        self._wake = asyncio.Event()

    def of(self, model: str) -> Generation | None:
        """What the model is; None when that was not seen lately. Then it is looked at."""
        now = self._clock()
        known = self._known.get(model)
        if known is None:
            known = self._known[model] = _Known(now)
        known.wanted_s = now
        if now < known.until_s:
            return known.generation
        self._wake.set()
        return None

    def forget(self, model: str) -> None:
        """Nobody keeps answers of it any more."""
        self._known.pop(model, None)

    async def keep_up(self) -> None:
        """Look at the models that are asked, until cancelled."""
        async with grpc.aio.insecure_channel(self._triton) as channel:
            self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            while True:
                self._wake.clear()
                since = self._clock() - IDLE_S
                wanted = [(model, known) for model, known in self._known.items() if known.wanted_s >= since]
                await asyncio.gather(*(self._look(model, known) for model, known in wanted))
                await self._rest(LOOK_S if wanted else None)

    async def _rest(self, most_s: float | None) -> None:
        """Until it is time to look, or a model is asked that was not looked at; not without end in between."""
        try:
            await asyncio.wait_for(self._wake.wait(), most_s)
        except asyncio.TimeoutError:
            return
        await asyncio.sleep(LOOK_S / 10)

    async def _look(self, model: str, known: _Known) -> None:
        began_s = self._clock()
        try:
            seen = await self._see(model)
        except grpc.aio.AioRpcError:
            return  # what was seen before holds until its time is over
        before = known.was_seen
        known.was_seen = seen
        if before is None or not _is_the_same(before, seen):
            version = _highest(seen.versions)
            known.generation = Generation(next(self._numbers), version, seen.versions, _called(seen))
            if before is not None:
                self._say(
                    f"model {model} is another one now (version {version}): answers that were kept are not given again"
                )
                self.on_new(model)
        known.until_s = began_s + CACHE_LEASE_S

    async def _see(self, model: str) -> _Seen:
        described: list[Any] = []
        counts: dict[tuple[str, str], int] = {}
        versions: frozenset[str] = frozenset()
        names = [model]
        done: set[str] = set()
        while names and len(done) < MOST_MODELS:
            name = names.pop(0)
            done.add(name)
            config, metadata, statistics = await asyncio.gather(
                self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=name), timeout=ASK_TIMEOUT_S),
                self._stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=name), timeout=ASK_TIMEOUT_S),
                self._stub.ModelStatistics(service_pb2.ModelStatisticsRequest(name=name), timeout=ASK_TIMEOUT_S),
            )
            ready = frozenset(metadata.versions)
            if name == model:
                versions = ready
            names += [each for each in called_by(config.config) if each not in done and each not in names]
            for field in _SAME_MODEL:
                config.config.ClearField(field)
            described.append((name, ready, config.config))
            counts |= {(each.name, each.version): each.inference_count for each in statistics.model_stats}
        return _Seen(tuple(described), versions, counts)


def called_by(config: Any) -> list[str]:
    """The models that this one calls, by its ModelConfig: steps of an ensemble or of a driver. Other Python code does not say."""
    steps = [step.model_name for step in config.ensemble_scheduling.step]
    if "pilot_steps" in config.parameters:
        steps += filter(None, (each.strip() for each in config.parameters["pilot_steps"].string_value.split(",")))
    return steps


def _called(seen: _Seen) -> tuple[int, ...]:
    """Each in the version that is asked of it, else in its highest."""
    asked = {
        step.model_name: int(step.model_version)
        for _, _, config in seen.described
        for step in config.ensemble_scheduling.step
        if step.model_version > 0
    }
    for _, _, config in seen.described:
        if _STEP_VERSIONS in config.parameters:
            pairs = (each.rpartition(":") for each in config.parameters[_STEP_VERSIONS].string_value.split(","))
            asked |= {name: int(version) for name, _, version in pairs if version.isdecimal()}
    return tuple(asked.get(name) or _highest(ready) for name, ready, _ in seen.described[1:])


def _highest(versions: frozenset[str]) -> int:
    return max((int(each) for each in versions if each.isdecimal()), default=0)


def _is_the_same(before: _Seen, now: _Seen) -> bool:
    if before.described != now.described:
        return False
    return all(now.counts.get(key, 0) >= count for key, count in before.counts.items())
