"""How does an instance take part in the waking of its dynamic batcher (pilotlib.waker says why)? The same in every backend.

wakes, remarks = wakes_of(args, config, parameters)      # in initialize; None when the model needs none
return wakes.execute(requests, answer)                   # in execute; answer(requests) -> responses
wakes.stop()                                             # in finalize
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pilotlib.loopback import ENDPOINT_VARIABLE, answer, http_endpoint, parent_command_line, post, wake_request, zeros
from pilotlib.parameters import CommonParameters
from pilotlib.stub import pb_utils
from pilotlib.waker import WAKE_ANSWER, WAKE_ID, Waker, plan, wait_us

Answer = Callable[[Sequence[Any]], list[Any]]
"""Triton's requests -> as many responses, in their order."""


class Wakes:
    """The waker of one instance, and what happens to a wake that reached `execute`: it is turned away, never answered."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker

    def execute(self, requests: Sequence[Any], answer: Answer) -> list[Any]:
        """One response per request: `answer` is given those that are no wakes."""
        work = [request for request in requests if request.request_id() != WAKE_ID]
        if not work:
            return [_turn_away() for _ in requests]
        self._waker.began()
        try:
            responses = answer(work)
        finally:
            self._waker.ended()
        if len(work) == len(requests):
            return responses
        following = iter(responses)
        return [_turn_away() if request.request_id() == WAKE_ID else next(following) for request in requests]

    def stop(self) -> None:
        """End the waker's thread."""
        self._waker.stop()


def wakes_of(
    args: Mapping[str, str], config: Mapping[str, Any], parameters: CommonParameters
) -> tuple[Wakes | None, tuple[str, ...]]:
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
    )
    family = pb_utils.MetricFamily(
        name="pilot_wakes_total",
        description="Requests that the backend sent to its own model to wake the dynamic batcher",
        kind=pb_utils.MetricFamily.COUNTER,
    )
    counter = family.Metric(labels={"model": model, "version": version})

    def count(wakes: int, family: Any = family) -> None:  # noqa: ARG001  observing needs a reference to the family
        counter.increment(wakes)

    waker = Waker(
        lambda: post(endpoint, request),
        answer,
        after_us=wait_us(config, parameters.pilot_wake_after_us),
        complain=lambda line: pb_utils.Logger.log_warn(f'model "{model}": {line}'),
        count=count,
    )
    return Wakes(waker), remarks


def _turn_away() -> Any:
    # NOTE: one object per request; the same response for two requests makes tritonserver 2.51 crash.
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(WAKE_ANSWER, pb_utils.TritonError.UNAVAILABLE))
