"""Does a model answer as it used to? The last answers against a reference, which its first answers are where none is given.

    watch = Watch(Settings(), is_batched=True)
    watch.serves("1", now_s)
    watch.take({"prob": array}, "1", now_s)
    watch.judge()                          # [Verdict(Key("prob", "value"), Distance(...), drifts=False)]

A window is a number of rows, not a time: what is found does not depend on how fast requests come, only how soon. When another
version of the model answers, the reference stays for a while: the new one is held against what the old one answered. Then it
gets a reference of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tritonpilot.guard.reference import Distance, Reference
from tritonpilot.guard.series import Key, series_of

#: A window counts as one from this part of its rows on.
LEAST_WINDOW = 0.5


@dataclass(frozen=True)
class Settings:
    """When the answers are called different from usual."""

    reference_rows: int = 1000
    window_rows: int = 300
    psi: float = 0.25
    ks: float = 0.2
    new_version_s: float = 3600.0


@dataclass(frozen=True)
class Verdict:
    """What is thought of one series now."""

    key: Key
    distance: Distance
    drifts: bool


@dataclass(frozen=True)
class Change:
    """Another version than before is served."""

    version: str
    previous: str
    at_s: float


class Watch:
    """One model. Not for several threads."""

    def __init__(self, settings: Settings, *, is_batched: bool, reference: Reference | None = None) -> None:
        self.settings = settings
        self.version = ""
        self.since_s = 0.0
        self.change: Change | None = None
        """The last one, if there was one."""
        self.not_finite: Counter[str] = Counter()
        """Rows with NaN or infinity, by output."""
        self.rows = 0
        self._is_batched = is_batched
        self._given = reference
        self._reference = reference
        self._learned: dict[Key, list[Any]] = {}
        self._learned_rows = 0
        self._window: dict[Key, deque[Any]] = {}

    @property
    def reference_rows(self) -> int:
        """Rows of the reference, or that were learned so far."""
        if self._reference is None:
            return self._learned_rows
        return max((each.rows for each in self._reference.series.values()), default=0)

    @property
    def is_learning(self) -> bool:
        """Whether there is no complete reference yet."""
        return self._reference is None

    def serves(self, version: str, now_s: float) -> None:
        """This version is served from now on. The window begins anew, the reference stays for a while."""
        if version == self.version:
            return
        if self.version:
            self.change = Change(version, self.version, now_s)
            self.not_finite.clear()
        self.version, self.since_s = version, now_s
        self._window.clear()
        self._learned, self._learned_rows = {}, 0

    def take(self, answer: Mapping[str, NDArray[Any]], version: str, now_s: float) -> None:
        """Add an answer; those of a version that drains are left out."""
        if version != self.version:
            return
        found = series_of(answer, is_batched=self._is_batched)
        self.rows += found.rows
        self.not_finite.update(found.not_finite)
        change = self.change
        if change is not None and self._given is None and now_s - change.at_s > self.settings.new_version_s:
            self.change = None
            self._learn_anew()
        if self._reference is None:
            self._learned_rows += found.rows
            for key, values in found.values.items():
                self._learned.setdefault(key, []).extend(values)
            if self._learned_rows >= self.settings.reference_rows:
                self._reference, self._learned = Reference.of(self._learned), {}
            return
        for key, values in found.values.items():
            window = self._window.get(key)
            if window is None:
                window = self._window[key] = deque(maxlen=self.settings.window_rows)
            window.extend(values)

    def judge(self) -> list[Verdict]:
        """A verdict on each series of which a window and a reference are there."""
        if self._reference is None:
            return []
        found = []
        for key, window in self._window.items():
            reference = self._reference.series.get(key)
            if reference is None or len(window) < LEAST_WINDOW * self.settings.window_rows:
                continue
            distance = reference.distance(tuple(window))
            found.append(Verdict(key, distance, self._drifts(distance)))
        return found

    def _drifts(self, distance: Distance) -> bool:
        return distance.psi > max(self.settings.psi, distance.psi_of_chance) or distance.ks > max(
            self.settings.ks, distance.ks_of_chance
        )

    def _learn_anew(self) -> None:
        self._reference, self._learned, self._learned_rows = None, {}, 0
        self._window.clear()
