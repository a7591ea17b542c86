"""By when does a request want its answer? What its parameter `pilot_deadline_ns` says: CLOCK_MONOTONIC of the server's host.

    deadline_ns(request.parameters())      # '{"pilot_deadline_ns":81234567890123}' -> 81234567890123; None: it states none

Whoever sends from the same host reads the clock: time.monotonic_ns() + 50_000_000. Zero and below have passed like any other time
before now. What is no integer, or none of 64 bits, raises DeadlineParameterError.
"""

from __future__ import annotations

import json

DEADLINE_PARAMETER = "pilot_deadline_ns"
LATE = "deadline exceeded before execution"
_ALONE = f'{{"{DEADLINE_PARAMETER}":'


class DeadlineParameterError(ValueError):
    """The parameter is there, but is no point in time."""


def deadline_ns(parameters: str) -> int | None:
    """From a request's parameters as Triton gives them: a JSON object."""
    if parameters.startswith(_ALONE):
        try:
            return int(
                parameters[len(_ALONE) : -1]
            )  # it is the only one, as nearly always: a third of the time of JSON
        except ValueError:
            pass
    found = json.loads(parameters)
    if DEADLINE_PARAMETER not in found:
        return None
    value = found[DEADLINE_PARAMETER]
    if type(value) is int:
        return value
    raise DeadlineParameterError(
        f"{DEADLINE_PARAMETER} is {json.dumps(value)}, but takes nanoseconds of the server's CLOCK_MONOTONIC as an integer of 64 "
        "bits; the request was not computed"
    )
