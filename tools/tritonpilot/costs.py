"""What do a request and an execution of a served model cost? Numbers that a simulator can serve traffic with.

costs = Costs.read(Path("build/costs-ctr.json"))      # or profile.profile(...), which measures them
costs.execution_mean_us(rows=48, requests=12)         # us that an instance is busy with that batch
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritonpilot.errors import SpecError

FloatArray = npt.NDArray[np.float64]

SHARES = 101  # quantiles of a spread: 0 %, 1 %, ..., 100 %
MOST_ROWS, MOST_CORES = 2**31 - 1, 4096
HOUR_US = 3.6e9
MOST_FACTOR, MOST_OFF = 1000.0, 0.1  # of a quantile, and of the mean from 1
NAMED, MOST_TEXT = 3, 40  # values and their characters in a message
STEADY = (1.0,) * SHARES
_CPU_TIMES = ("front_us", "front_row_us", "reply_us", "wire_us", "host_us", "host_request_us")


@dataclass(frozen=True)
class Costs:
    """What a model costs on one kind of instance (precision, threads, machine). Times are us.

    A request passes: the wire (half of it before, half after), tritonserver's front end (`front_us` + `front_row_us` per row
    of CPU), the queue, an execution, and the reply (`reply_us` of CPU). Front end, reply and, with `is_on_cpu`, executions share
    `cores`; without it an execution takes only `host_us` + `host_request_us` per request of them and waits for its device
    for the rest of its time.
    """

    rows: tuple[int, ...]  # sizes of a batch, rising
    execution_us: tuple[float, ...]  # mean time of an execution of so many rows, the stub's fixed cost included
    request_us: float  # more for each request in it: gather, split, IPC
    factor: tuple[float, ...] = STEADY  # quantiles of an execution's time divided by its mean
    front_us: float = 0.0
    front_row_us: float = 0.0
    reply_us: float = 0.0
    wire_us: float = 0.0  # mean latency outside the server's CPU: the client and the kernel
    wire_factor: tuple[float, ...] = STEADY  # quantiles of it divided by its mean
    cores: int = 1
    is_on_cpu: bool = True
    host_us: float = 0.0  # CPU of an execution whose device is not the CPU
    host_request_us: float = 0.0  # more for each request in it
    guard_us: float = 0.0  # so long an execution that begins keeps its core from who wakes up (machine.slice_us)

    def __post_init__(self) -> None:
        """Raises SpecError: costs are read from files, too."""
        if wrong := _wrong(self):
            raise SpecError(
                f"These costs cannot be: {'; '.join(wrong)}. Nothing is simulated with them. Correct the file, or measure again."
            )

    def execution_mean_us(self, rows: float, requests: float = 1) -> float:
        """Mean time of an execution of `rows` rows that came in `requests` requests, us.

        Linear between the known sizes, and beyond the last as between the last two (a single one: in proportion).
        """
        return float(execution_curve(self, np.array([rows], dtype=np.float64))[0]) + self.request_us * requests

    def scaled(self, by: float) -> Costs:
        """What everything costs on a machine on which all takes `by` times as long: a device that is not the CPU stays as it is."""
        times = {name: getattr(self, name) * by for name in _CPU_TIMES}
        if self.is_on_cpu:
            times["execution_us"] = tuple(value * by for value in self.execution_us)
            times["request_us"] = self.request_us * by
        return replace(self, **times)

    def as_dict(self) -> dict[str, Any]:
        """What `of_dict` reads; plain JSON values."""
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def of_dict(cls, said: Mapping[str, Any]) -> Costs:
        """Raises SpecError for a missing, unknown or impossible value."""
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(said) - known)
        missing = sorted({"rows", "execution_us", "request_us"} - set(said))
        if unknown or missing:
            what = f"has no {', '.join(missing)}" if missing else f"names {', '.join(unknown)}, which costs do not have"
            raise SpecError(
                f"The file of costs {what}. Nothing is simulated with it. Known are {', '.join(sorted(known))}."
            )
        values: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in said.items()}
        return cls(**values)

    def write(self, path: Path) -> None:
        """Write as JSON. Raises SpecError when the folder cannot be written to."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise SpecError(
                f"The costs cannot be written to {path} ({error}). They are lost. Choose another file."
            ) from error

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Raises SpecError when the file is missing, no JSON, or says what cannot be."""
        try:
            said = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise SpecError(
                f"The costs in {path} cannot be read ({error}). Measure them, or name another file."
            ) from error
        if not isinstance(said, dict):
            raise SpecError(f"{path} holds no costs: a JSON object is expected. Measure them, or name another file.")
        return cls.of_dict(said)


def execution_curve(costs: Costs, rows: FloatArray) -> FloatArray:
    """Mean execution time for each number of rows, us, without what is added for each request."""
    known, times = np.array(costs.rows, dtype=np.float64), np.array(costs.execution_us, dtype=np.float64)
    if len(known) == 1:
        only: FloatArray = times[0] * np.maximum(rows / known[0], 1.0)
        return only
    slope = (times[-1] - times[-2]) / (known[-1] - known[-2])
    found: FloatArray = np.interp(rows, known, times) + np.maximum(rows - known[-1], 0.0) * max(slope, 0.0)
    return found


def mean_of(quantiles: FloatArray) -> float:
    """The mean of a distribution with these equidistant quantiles, linear between them, as the simulator draws from it."""
    return float((quantiles[1:] + quantiles[:-1]).mean() / 2)


def _wrong(costs: Costs) -> list[str]:
    """What cannot be, as sentences without their end: all of it."""
    lists = {name: getattr(costs, name) for name in ("rows", "execution_us", "factor", "wire_factor")}
    found = [
        f"{name} is no list, but {_short(value)}" for name, value in lists.items() if type(value) not in (tuple, list)
    ]
    if found:
        return found
    rows, times = costs.rows, costs.execution_us
    if not rows or len(rows) != len(times):
        found.append(f"rows has {len(rows)} values and execution_us {len(times)}")
    strange = [value for value in rows if type(value) is not int or not 1 <= value <= MOST_ROWS]
    if strange:
        found.append(f"rows holds {_named(strange)}, not whole numbers from 1 to {MOST_ROWS}")
    elif any(a >= b for a, b in itertools.pairwise(rows)):
        found.append(f"rows do not rise: {list(rows)}")
    for name in ("execution_us", "request_us", "guard_us", *_CPU_TIMES):
        value = getattr(costs, name)
        strange = [time for time in (value if name in lists else (value,)) if not _is_within(time, HOUR_US)]
        if strange:
            found.append(f"{name} holds {_named(strange)}, not times from 0 to an hour")
    for name in ("factor", "wire_factor"):
        values = lists[name]
        strange = [value for value in values if not _is_within(value, MOST_FACTOR)]
        if len(values) != SHARES:
            found.append(f"{name} has {len(values)} quantiles, not {SHARES}")
        elif strange:
            found.append(f"{name} holds {_named(strange)}, not numbers from 0 to {MOST_FACTOR:g}")
        elif any(a > b for a, b in itertools.pairwise(values)):
            found.append(f"the quantiles of {name} do not rise")
        elif abs(mean_of(np.array(values)) - 1) > MOST_OFF:
            found.append(f"{name} has the mean {mean_of(np.array(values)):.3g}, not 1")
    if type(costs.cores) is not int or not 1 <= costs.cores <= MOST_CORES:
        found.append(f"cores is {_short(costs.cores)}, not a whole number from 1 to {MOST_CORES}")
    if type(costs.is_on_cpu) is not bool:
        found.append(f"is_on_cpu is {_short(costs.is_on_cpu)}, not true or false")
    return found


def _is_within(value: object, most: float) -> bool:
    """Whether it is a number from 0 to `most`; whole numbers may be too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most


def _named(values: Sequence[object]) -> str:
    more = f" and {len(values) - NAMED} more" if len(values) > NAMED else ""
    return ", ".join(_short(value) for value in values[:NAMED]) + more


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."
