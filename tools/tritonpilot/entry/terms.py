"""On which terms does a model serve its callers? Its classes, their queues and shares, read from Triton's config.

terms = terms_of(config)                          # Triton's ModelConfig in JSON form, GET /v2/models/M/config
terms.classes, terms.default_class, terms.window_rows
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tritonpilot.errors import RepositoryError, SpecError
from tritonpilot.guard.reference import Reference
from tritonpilot.guard.terms import Guard, of_parameter
from tritonpilot.spec import NO_TIMEOUT_MS

#: An answer of the entry's cache is given only when Triton was seen to serve its model this shortly before. Who changes a model
#: waits so long until nobody gets an answer of the old one (docs/caching.md).
CACHE_LEASE_S = 2.0
#: Requests that may wait where the config states no queue policy.
DEFAULT_MAX_QUEUE = 1000


@dataclass(frozen=True)
class ClassTerms:
    """What one class of callers may expect, and what it may ask of the others."""

    name: str
    level: int
    """Triton's priority level, 1 is served first; 0: the model has no levels."""
    max_queue: int
    """Requests that may wait; 0: unlimited."""
    timeout_s: float | None
    """Longest wait in the queue."""
    share: float = 0.0
    """Part of the model's capacity that the class gets while it has requests waiting, whatever the classes above it do."""
    max_wait_s: float | None = None
    """After this wait its oldest request goes before the classes above it."""
    slo_s: float | None = None


@dataclass(frozen=True)
class CacheTerms:
    """What the entry may keep of a model's answers."""

    max_bytes: int
    ttl_s: float | None = None


@dataclass(frozen=True)
class ModelTerms:
    """What the entry knows about a model."""

    name: str
    classes: tuple[ClassTerms, ...]
    """By level, the first is served first; never empty."""
    default_class: str
    window_rows: int
    """Rows that may be in Triton at a time: those that execute, and one more batch that forms."""
    max_batch_size: int
    """0: the model has no batch dimension, and every request counts as one row."""
    inputs: tuple[str, ...] = ()
    caches: bool = False
    """Triton does, by itself."""
    cache: CacheTerms | None = None
    """The entry does."""
    guard: Guard | None = field(default=None, hash=False)
    guard_reference: Reference | None = field(default=None, hash=False)
    may_override_timeout: bool = True
    """Whether Triton honours a request's own timeout, for every class."""


def terms_of(config: Mapping[str, Any]) -> ModelTerms:
    """Read Triton's ModelConfig in JSON form (numbers may be strings).

    Raises RepositoryError naming the parameter that is wrong. A queue policy whose action is DELAY rejects nobody, so it sets no
    timeout. An ensemble has no queues of its own: its parameters state what a batcher's policies state elsewhere,
    `pilot_timeouts_ms` = "realtime:200", `pilot_max_queue_sizes` = "batch:10000", `pilot_default_class` = "batch".
    Of any model `pilot_window_rows` sets the window; otherwise it is (instances + 1) * max_batch_size: full batches that execute,
    and one more that forms. The steps of an ensemble count as its instances.
    """
    name = str(config.get("name", ""))
    parameters = _Parameters(name, config.get("parameters") or {})
    batcher: Mapping[str, Any] = config.get("dynamic_batching") or {}
    levels = parameters.levels()
    shares = parameters.numbers("pilot_shares", levels)
    max_waits_ms = parameters.numbers("pilot_max_waits_ms", levels)
    slos_ms = parameters.numbers("pilot_slos_ms", levels)
    timeouts_ms = parameters.numbers("pilot_timeouts_ms", levels)
    max_queues = parameters.numbers("pilot_max_queue_sizes", levels, least=0)
    if sum(shares.values()) >= 1:
        parameters.wrong("pilot_shares", f"the shares add up to {sum(shares.values()):g}, and must stay below 1")
    policies = {class_name: _policy(batcher, level) for class_name, level in levels.items()}
    classes = tuple(
        ClassTerms(
            name=class_name,
            level=level,
            max_queue=int(max_queues.get(class_name, _max_queue(policies[class_name]))),
            timeout_s=_timeout_s(timeouts_ms.get(class_name, _timeout_ms(policies[class_name]))),
            share=shares.get(class_name, 0.0),
            max_wait_s=_seconds(max_waits_ms.get(class_name)),
            slo_s=_seconds(slos_ms.get(class_name)),
        )
        for class_name, level in sorted(levels.items(), key=lambda item: item[1])
    )
    largest = int(config.get("max_batch_size", 0))
    return ModelTerms(
        name=name,
        classes=classes,
        default_class=parameters.default_class(levels, int(batcher.get("default_priority_level", 0))),
        window_rows=parameters.window_rows() or (_instances(config) + 1) * max(1, largest),
        max_batch_size=largest,
        inputs=tuple(str(each["name"]) for each in config.get("input", ())),
        caches=bool((config.get("response_cache") or {}).get("enable", False)),
        cache=parameters.cache(),
        guard=parameters.guard(),
        guard_reference=parameters.guard_reference(),
        may_override_timeout="ensemble_scheduling" in config
        or (not int(batcher.get("max_queue_delay_microseconds", 0)) and all(map(_may_override, policies.values()))),
    )


class _Parameters:
    """A model's `parameters`, and the errors about them."""

    def __init__(self, model: str, stated: Mapping[str, Any]) -> None:
        self._model = model
        self._stated = stated

    def wrong(self, key: str, why: str) -> NoReturn:
        raise RepositoryError(
            f"The model {self._model}: parameter {key} is {self._text(key)!r}, but {why}. Its requests cannot be scheduled. "
            "Correct it in the service file and run `tritonpilot build`, or in its config.pbtxt, and load the model again."
        )

    def levels(self) -> dict[str, int]:
        """Priority level by class name; the nameless class alone where no classes are stated."""
        levels: dict[str, int] = {}
        for class_name, value in self._pairs("pilot_classes"):
            if not value.isdecimal() or int(value) < 1:
                self.wrong("pilot_classes", f"{class_name} has the level {value!r}, and levels are 1, 2, ...")
            if class_name in levels:
                self.wrong("pilot_classes", f"it names {class_name} twice")
            if int(value) in levels.values():
                self.wrong("pilot_classes", f"it gives level {int(value)} to two classes")
            levels[class_name] = int(value)
        return levels or {"": 0}

    def numbers(self, key: str, levels: Mapping[str, int], *, least: int | None = None) -> dict[str, float]:
        """Numbers by class name, positive ones or whole ones from `least` on."""
        found: dict[str, float] = {}
        for class_name, value in self._pairs(key):
            if class_name not in levels:
                known = ", ".join(filter(None, levels))
                self.wrong(key, f"the model has no class {class_name!r} (pilot_classes: {known or 'not stated'})")
            try:
                number = float(value)
            except ValueError:
                number = math.nan
            if least is None and not 0 < number < math.inf:
                self.wrong(key, f"{value!r} of {class_name} is no number above 0")
            if least is not None and not (number >= least and number.is_integer()):
                self.wrong(key, f"{value!r} of {class_name} is no whole number from {least} on")
            if class_name in found:
                self.wrong(key, f"it names {class_name} twice")
            found[class_name] = number
        return found

    def default_class(self, levels: Mapping[str, int], default_level: int) -> str:
        """The class of a request that names none: as stated, or of the batcher's default level, or the first."""
        stated = self._text("pilot_default_class")
        if stated:
            if stated not in levels:
                self.wrong("pilot_default_class", f"the model's classes are {', '.join(levels)}")
            return stated
        by_level = {level: class_name for class_name, level in levels.items()}
        if 0 not in by_level and default_level and default_level not in by_level:
            self.wrong("pilot_classes", f"no class has the level {default_level}, the batcher's default_priority_level")
        return by_level.get(default_level, by_level[min(by_level)])

    def cache(self) -> CacheTerms | None:
        """`pilot_cache` = "max_mb:64,ttl_s:600"; the second may be left out."""
        found: dict[str, float] = {}
        for name, value in self._pairs("pilot_cache"):
            if name not in ("max_mb", "ttl_s") or name in found:
                self.wrong("pilot_cache", f"{name!r} is there twice or not known (max_mb, ttl_s)")
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = math.nan
            if not 0 < found[name] < math.inf:
                self.wrong("pilot_cache", f"{value!r} of {name} is no number above 0")
        if not found:
            return None
        if "max_mb" not in found:
            self.wrong("pilot_cache", "max_mb is not given")
        return CacheTerms(int(found["max_mb"] * 2**20), found.get("ttl_s"))

    def guard(self) -> Guard | None:
        """`pilot_guard`, as JSON."""
        text = self._text("pilot_guard")
        try:
            return of_parameter(text) if text else None
        except ValueError as error:
            self.wrong("pilot_guard", f"it is no guard: {error}")

    def guard_reference(self) -> Reference | None:
        """`pilot_guard_reference`, as JSON."""
        text = self._text("pilot_guard_reference")
        try:
            return Reference.parse(text, "it") if text else None
        except SpecError:
            self.wrong("pilot_guard_reference", "it is no reference of a guard")

    def window_rows(self) -> int:
        """As stated; 0: not stated."""
        text = self._text("pilot_window_rows")
        if text and (not text.isdecimal() or int(text) < 1):
            self.wrong("pilot_window_rows", "it must be a whole number of rows, 1 or more")
        return int(text or 0)

    def _text(self, key: str) -> str:
        return str((self._stated.get(key) or {}).get("string_value", ""))

    def _pairs(self, key: str) -> list[tuple[str, str]]:
        pairs = []
        for part in filter(None, (part.strip() for part in self._text(key).split(","))):
            class_name, colon, value = part.partition(":")
            if not class_name or not colon:
                self.wrong(key, f"{part!r} is not NAME:NUMBER")
            pairs.append((class_name, value))
        return pairs


def _policy(batcher: Mapping[str, Any], level: int) -> Mapping[str, Any] | None:
    """The queue policy of a level as Triton finds it."""
    by_level: Mapping[str, Any] = batcher.get("priority_queue_policy") or {}
    return by_level.get(str(level)) or batcher.get("default_queue_policy")


def _max_queue(policy: Mapping[str, Any] | None) -> int:
    return DEFAULT_MAX_QUEUE if policy is None else int(policy.get("max_queue_size", 0))


def _timeout_ms(policy: Mapping[str, Any] | None) -> float:
    if policy is None or policy.get("timeout_action", "REJECT") != "REJECT":
        return NO_TIMEOUT_MS
    return int(policy.get("default_timeout_microseconds", 0)) / 1000 or NO_TIMEOUT_MS


def _timeout_s(timeout_ms: float) -> float | None:
    return timeout_ms / 1000 if timeout_ms < NO_TIMEOUT_MS else None


def _may_override(policy: Mapping[str, Any] | None) -> bool:
    """Triton ignores a request's timeout where the queue has none. (With a queue delay it would do harm: docs/adr/0012.)"""
    return bool(
        policy and policy.get("allow_timeout_override") and int(policy.get("default_timeout_microseconds", 0)) > 0
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _instances(config: Mapping[str, Any]) -> int:
    groups = config.get("instance_group") or ()
    if not groups:
        return max(1, len((config.get("ensemble_scheduling") or {}).get("step", ())))
    return max(1, sum(int(group.get("count", 1)) * max(1, len(group.get("gpus") or ())) for group in groups))
