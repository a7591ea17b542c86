"""Which points does a sweep measure, in which order, and under which name is each of them known again?

trials = Grid(queue_delays_us=(0, 500), concurrencies=(1, 16)).trials(service)
keys(service, trials, conditions)[trials[0]]         # a hash of all that the figures depend on
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tritonpilot import build, repository
from tritonpilot.errors import SpecError
from tritonpilot.model_config import Target
from tritonpilot.setting import Precision, Setting
from tritonpilot.spec import Service

CONCURRENCIES = (1, 4, 16, 64)


@dataclass(frozen=True)
class Trial:
    """A setting under one load: `concurrency` requests in flight (closed loop) or `rate_per_s` (open loop), of `rows` rows each."""

    setting: Setting
    rows: int = 1
    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def load(self) -> str:
        """The load in words."""
        size = f" of {self.rows} rows" if self.rows > 1 else ""
        if self.concurrency is not None:
            return f"concurrency {self.concurrency}{size}"
        return f"{self.rate_per_s:g} requests/s{size}"

    def describe(self) -> str:
        """The trial in one line."""
        return f"{self.setting.describe()}, {self.load}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "setting": self.setting.as_dict(),
            "rows": self.rows,
            "concurrency": self.concurrency,
            "rate_per_s": self.rate_per_s,
        }

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Trial:
        """The reverse of `as_dict`."""
        return cls(**{**values, "setting": Setting.of_dict(values["setting"])})


@dataclass(frozen=True)
class Grid:
    """Values for each axis; one without values stays as the service file says. Rates, where given, go instead of concurrencies."""

    queue_delays_us: tuple[int, ...] = ()
    max_batch_sizes: tuple[int, ...] = ()
    instances: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    precisions: tuple[Precision, ...] = ()
    rows: tuple[int, ...] = (1,)
    concurrencies: tuple[int, ...] = CONCURRENCIES
    rates_per_s: tuple[float, ...] = ()

    def settings(self, service: Service) -> list[Setting]:
        """Every combination, each checked against the service. Raises SpecError where one contradicts it."""
        now = Setting.of(service)
        found = [
            replace(
                now,
                precision=precision,
                threads=threads,
                max_batch_size=batch,
                queue_delay_us=delay,
                instances=instances,
            )
            # The instances change fastest: Triton changes them without loading the model again.
            for precision, threads, batch, delay, instances in itertools.product(
                self.precisions or (now.precision,),
                self.threads or (now.threads,),
                self.max_batch_sizes or (now.max_batch_size,),
                self.queue_delays_us or (now.queue_delay_us,),
                self.instances or (now.instances,),
            )
        ]
        for setting in found:
            setting.applied(service)
        return list(dict.fromkeys(found))

    def trials(self, service: Service) -> list[Trial]:
        """All points, those of a setting together and from light to heavy load.

        Requests of more rows than a setting's maximum batch are left out; raises SpecError when that leaves nothing.
        """
        closed: list[tuple[int | None, float | None]] = [(each, None) for each in sorted(set(self.concurrencies))]
        loads = [(None, rate) for rate in sorted(set(self.rates_per_s))] or closed
        found = [
            Trial(setting, rows, concurrency, rate)
            for setting in self.settings(service)
            for rows in sorted(set(self.rows))
            for concurrency, rate in loads
            if rows <= max(1, setting.max_batch_size)
        ]
        if not found:
            raise SpecError(
                f"Requests of {min(self.rows, default=0)} rows do not fit into any maximum batch of this grid. Nothing was "
                "measured. Give fewer rows or larger batches."
            )
        return found


def keys(
    service: Service, trials: Sequence[Trial], conditions: Mapping[str, object], target: Target = "auto"
) -> dict[Trial, str]:
    """Trial -> hash of the config that it is served with, the model's files, its samples, the load and `conditions`.

    Whatever changes a figure changes the key, so a point is only taken from an earlier sweep when it is the same. Raises
    SpecError and ModelError as `build.plan`.
    """
    checksum = cache(repository.sha256)
    samples = checksum(service.samples) if service.samples is not None else ""
    served: dict[Setting, object] = {}
    for setting in dict.fromkeys(trial.setting for trial in trials):
        (plan,) = build.plan([setting.applied(service)], target)
        files = {name: checksum(path) for name, path in sorted(plan.folder.version_files.items())}
        served[setting] = [plan.folder.config_text, files]
    return {
        trial: hashlib.sha256(
            json.dumps([served[trial.setting], samples, trial.as_dict(), dict(conditions)], sort_keys=True).encode()
        ).hexdigest()
        for trial in trials
    }
