"""What do a request and an execution of a served model cost? Numbers that a simulator can serve traffic with.

costs = Costs.read(Path("build/costs-ctr.json"))      # or profile.profile(...), which measures them
costs.execution_mean_us(rows=48, requests=12)         # us that an instance is busy with that batch
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritonpilot.errors import SpecError

FloatArray = npt.NDArray[np.float64]

SHARES = 101  # quantiles of a spread: 0 %, 1 %, ..., 100 %
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

    def __post_init__(self) -> None:
        """Raises SpecError: costs are read from files, too."""
        for said in _wrong(self):
            raise SpecError(
                f"These costs cannot be: {said}. Nothing is simulated with them. Correct the file, or measure again."
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
        try:
            return cls(**values)
        except TypeError as error:
            raise SpecError(
                f"The file of costs holds a value of the wrong type ({error}). Nothing is simulated with it. Measure again."
            ) from error

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
        except (OSError, ValueError) as error:
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


def _wrong(costs: Costs) -> list[str]:
    """What cannot be, as sentences without their end."""
    found = []
    if not costs.rows or len(costs.rows) != len(costs.execution_us):
        found.append(f"rows has {len(costs.rows)} values and execution_us {len(costs.execution_us)}")
    elif min(costs.rows) < 1 or any(a >= b for a, b in itertools.pairwise(costs.rows)):
        found.append(f"rows do not rise from 1 on: {list(costs.rows)}")
    for name in ("factor", "wire_factor"):
        values = getattr(costs, name)
        if len(values) != SHARES:
            found.append(f"{name} has {len(values)} quantiles, not {SHARES}")
        elif any(a > b for a, b in itertools.pairwise(values)):
            found.append(f"the quantiles of {name} do not rise")
    numbers = {
        field.name: getattr(costs, field.name)
        if isinstance(getattr(costs, field.name), tuple)
        else (getattr(costs, field.name),)
        for field in fields(costs)
        if field.name not in ("is_on_cpu", "rows")
    }
    found += [
        f"{name} holds {value!r}"
        for name, values in numbers.items()
        for value in values
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0
    ]
    if isinstance(costs.cores, int) and costs.cores < 1:
        found.append(f"cores is {costs.cores}")
    return found
