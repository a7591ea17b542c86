"""The file that a person writes for a load: which service, how long, and who calls how often.

scenario = read(Path("evening.yaml"))
found = streams(scenario, service)         # with the classes and promises of the service file

scenario: evening
service: ctr
seconds: 60
streams:
  - {name: app, caller_class: realtime, rate_per_s: 400, rows: {1: 8, 4: 2}}
  - {name: night, caller_class: batch, arrivals: burst, rate_per_s: 5, peak_per_s: 50, every_s: 20, for_s: 4, rows: 64}
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from tritonpilot import written
from tritonpilot.arrivals import ALL, Arrivals, Stream
from tritonpilot.errors import SpecError
from tritonpilot.load.target import header
from tritonpilot.spec import CallerClass, Name, Positive, Service
from tritonpilot.written import Written, nearest

Rate = Annotated[float, Field(ge=0, le=10_000_000)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
MOST_STREAMS = 2**15 - 1  # arrivals.Traffic names them in INT16


class WrittenStream(Written):
    """Callers of one kind, as arrivals.Stream."""

    name: Name
    rate_per_s: Rate = Field(0, description="requests; with bursts between them; recorded: 0 keeps the recording's own")
    arrivals: Arrivals = "poisson"
    rows: Positive | dict[Positive, Annotated[float, Field(ge=0)]] = Field(
        1, description="rows of a request, or sizes with their weights"
    )
    caller_class: Name | None = Field(
        None, description="class of the service; sets priority and SLO, and is told an entry"
    )
    priority: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = Field(None, description="Triton's priority level")
    timeout_ms: Annotated[float, Field(gt=0)] | None = Field(None, description="the request's own queue timeout")
    slo_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="an answer within it is goodput; default: the promise of the class or service"
    )
    peak_per_s: Rate = Field(0, description="bursts: the rate inside one")
    every_s: Annotated[float, Field(ge=0)] = Field(0, description="bursts: from the end of one to the end of the next")
    for_s: Annotated[float, Field(ge=0)] = Field(0, description="bursts: the length of one")
    recording: str | None = Field(None, description="recorded: CSV of arrival times, relative to this file")


class Scenario(Written):
    """One load. Either `service`, or `model` with `samples`, is given."""

    scenario: Name
    service: Name | None = None
    model: Name | None = Field(None, description="a model of any Triton, without a service file")
    samples: str | None = Field(None, description=".npz of rows of that model's inputs")
    seconds: Seconds
    seed: Annotated[int, Field(ge=0)] = 0
    protocol: Literal["http", "grpc"] = "http"
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    headers: dict[str, str] = Field({}, description="sent with every request, e.g. an API key of an entry")
    streams: Annotated[list[WrittenStream], Field(min_length=1, max_length=MOST_STREAMS)]

    _path: Path | None = PrivateAttr(default=None)

    @property
    def path(self) -> Path | None:
        """The file that it was read from; None when options say it."""
        return self._path

    @property
    def folder(self) -> Path:
        """What its paths are relative to."""
        return self._path.parent if self._path is not None else Path()

    @field_validator("headers")
    @classmethod
    def _headers_are_some(cls, headers: dict[str, str]) -> dict[str, str]:
        found = dict(header(name, value) for name, value in headers.items())
        if len(found) < len(headers):
            raise ValueError("a header is given twice; upper and lower case are the same")
        return found

    @model_validator(mode="after")
    def _parts_agree(self) -> Scenario:
        if (self.service is None) == (self.model is None):
            raise ValueError("give either `service`, or `model` and `samples`, and not both")
        if (self.model is None) != (self.samples is None):
            raise ValueError("`model` and `samples` belong together; a service has samples of its own")
        names = [stream.name for stream in self.streams]
        again = [name for name in names if names.count(name) > 1]
        if again:
            raise ValueError(f"two streams are named {again[0]}; give each its own name")
        if len(names) > 1 and ALL in names:
            raise ValueError(f"a stream beside others must not be named {ALL}: so is the sum of them all")
        return self


def read(path: Path) -> Scenario:
    """Read a scenario. Raises SpecError when it is wrong."""
    found = written.read(path, Scenario, "`scenario: NAME`")
    found._path = path
    return found


def streams(scenario: Scenario, service: Service | None) -> tuple[Stream, ...]:
    """The streams with what the service promises to their classes. Raises SpecError for a class that it does not have."""
    return tuple(_stream(each, service, scenario) for each in scenario.streams)


def class_of(service: Service, name: str, where: str = "") -> CallerClass:
    """The class of that name. Raises SpecError, that begins with `where`, when the service has none."""
    known = {each.name: each for each in service.classes}
    if name not in known:
        has = nearest(name, list(known)) or f" (it has {', '.join(known) or 'none'})"
        raise SpecError(f"{where}service {service.service} has no class {name}{has}. No load is made.")
    return known[name]


def _stream(wanted: WrittenStream, service: Service | None, scenario: Scenario) -> Stream:
    priority, slo_ms = wanted.priority or 0, wanted.slo_ms
    if wanted.caller_class is not None and service is not None:
        where = f"{scenario.path}: stream {wanted.name}: " if scenario.path is not None else ""
        caller = class_of(service, wanted.caller_class, where)
        priority = caller.priority if wanted.priority is None else wanted.priority
        slo_ms = slo_ms if slo_ms is not None else service.promise_ms(caller)
    elif slo_ms is None and service is not None and service.slo is not None:
        slo_ms = service.slo.p99_ms
    return Stream(
        name=wanted.name,
        rate_per_s=wanted.rate_per_s,
        arrivals=wanted.arrivals,
        rows=wanted.rows,
        caller_class=wanted.caller_class or "",
        priority=priority,
        timeout_ms=wanted.timeout_ms,
        slo_ms=math.inf if slo_ms is None else slo_ms,
        peak_per_s=wanted.peak_per_s,
        every_s=wanted.every_s,
        for_s=wanted.for_s,
        recording=None if wanted.recording is None else scenario.folder / wanted.recording,
    )
