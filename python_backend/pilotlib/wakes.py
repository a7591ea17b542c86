"""How does an instance take part in the waking of its dynamic batcher (pilotlib.waker says why)? With a waker of its own.

waker, remarks = waker_of(args, config, parameters)      # in initialize; None when the model needs none
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pilotlib.loopback import ENDPOINT_VARIABLE, Line, http_endpoint, parent_command_line, wake_request, zeros
from pilotlib.parameters import CommonParameters
from pilotlib.stub import pb_utils
from pilotlib.told import printable
from pilotlib.waker import WAKE_ID, Waker, plan, wait_us


def waker_of(
    args: Mapping[str, str], config: Mapping[str, Any], parameters: CommonParameters
) -> tuple[Waker | None, tuple[str, ...]]:
    """What an instance needs, from initialize's `args`, and remarks; None when nothing stalls or nothing can be sent."""
    wanted = plan(config, parameters.pilot_wake_priority)
    if not wanted.is_needed or parameters.pilot_waker == "off":
        return None, ()
    remarks = () if wanted.is_rejected else (wanted.reason,)
    endpoint = http_endpoint(os.environ, parent_command_line())
    if endpoint is None:
        return None, (
            *remarks,
            f"this server has no HTTP service (or its command line does not show it: set {ENDPOINT_VARIABLE}=host:port), so "
            "no wake request can be sent and a request may wait 500 ms for a free instance",
        )
    model, version = args["model_name"], args["model_version"]
    request = wake_request(
        WAKE_ID,
        model,
        int(version),
        zeros(config),
        config["output"][0]["name"],
        parameters.pilot_wake_priority,
        is_kept=True,
    )
    line = Line(endpoint)
    family = pb_utils.MetricFamily(
        name="pilot_wakes_total",
        description="Requests that the backend sent to its own model to wake the dynamic batcher",
        kind=pb_utils.MetricFamily.COUNTER,
    )
    counter = family.Metric(labels={"model": model, "version": version})

    def count(wakes: int, family: Any = family) -> None:  # noqa: ARG001  observing needs a reference to the family
        counter.increment(wakes)

    waker = Waker(
        lambda: line.post(request),
        line.answer,
        after_us=wait_us(config, parameters.pilot_wake_after_us),
        complain=lambda said: pb_utils.Logger.log_warn(printable(f'model "{model}": {said}')),
        count=count,
        rest=line.rest,
    )
    return waker, remarks
