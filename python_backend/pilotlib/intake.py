"""Which requests of an execution are computed? All but wakes (pilotlib.waker) and late ones. The same in every backend.

intake, remarks = intake_of(args, config, parameters)    # in initialize
return intake.execute(requests, answer)                  # in execute; answer(requests) -> responses
intake.stop()                                            # in finalize

A request is late when its deadline (pilotlib.deadlines) has passed before it is executed: nobody waits for its answer any more.
It is told so, under UNAVAILABLE (HTTP 503), and its mates are computed. A request without parameters costs 0.3 us. Now and then the
instance's memory is told (pilotlib.stub_memory).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pilotlib.deadlines import LATE, DeadlineParameterError, deadline_ns
from pilotlib.live_delay import PARAMETER, LiveDelay, LiveDelayError, live_delay_of
from pilotlib.loopback import WAKE_PARAMETER
from pilotlib.parameters import CommonParameters
from pilotlib.stub import pb_utils
from pilotlib.stub_memory import stub_memory_of
from pilotlib.told import text_of
from pilotlib.waker import WAKE_ANSWER, Waker
from pilotlib.wakes import waker_of

Answer = Callable[[Sequence[Any]], list[Any]]
"""Triton's requests -> as many responses, in their order."""

MARK = "pilot_"  # no request without it in its parameters is a wake or states a deadline
_WAKE = f'"{WAKE_PARAMETER}":true'


class Intake:
    """Of one instance: turns away what is not to be computed, and tells the waker when executions begin and end.

    `count_late` gets the number of late requests of an execution that had some; call it for those that became late meanwhile.
    `look` is called at the start of each execution, and `delay` lets those wait that come too soon.
    """

    def __init__(
        self,
        waker: Waker | None,
        count_late: Callable[[int], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        *,
        look: Callable[[], None] = lambda: None,
        delay: LiveDelay | None = None,
    ) -> None:
        self._waker = waker
        self._look = look
        self._delay = delay
        self._began, self._ended = (waker.began, waker.ended) if waker is not None else (_nothing, _nothing)
        self.count_late = count_late
        self._clock_ns = clock_ns
        self.latest_ns: int | None = None
        """The latest deadline of the requests that are being answered; None when one of them has none."""

    def execute(self, requests: Sequence[Any], answer: Answer) -> list[Any]:
        """One response per request: `answer` is given those that are to be computed."""
        self._look()
        if self._delay is not None and self._delay.delay_ns and not _are_wakes(requests):
            self._delay.hold(requests, self._began, self._ended)
        marked = {}
        for place, request in enumerate(requests):
            try:
                parameters = request.parameters()
            except UnicodeDecodeError:  # HTTP lets any bytes through; the model does not know them either
                continue
            if MARK in parameters:
                marked[place] = parameters
        if not marked:
            self.latest_ns = None
            return self._computed(requests, answer)
        away, wakes = self._turned_away(marked, len(requests))
        if not away:
            return self._computed(requests, answer)
        work = [request for place, request in enumerate(requests) if place not in away]
        if work:
            following = iter(self._computed(work, answer))
            return [away[place] if place in away else next(following) for place in range(len(requests))]
        if len(wakes) < len(requests):  # the waker must know: also after this execution the batcher may sleep
            self._computed(work, list)
        return [away[place] for place in range(len(requests))]

    def is_over(self) -> bool:
        """Whether all requests that are being answered have become late."""
        return self.latest_ns is not None and self._clock_ns() >= self.latest_ns

    def stop(self) -> None:
        """End the waker's thread."""
        if self._waker is not None:
            self._waker.stop()

    def _computed(self, requests: Sequence[Any], answer: Answer) -> list[Any]:
        if self._waker is None:
            return answer(requests)
        self._waker.began()
        try:
            return answer(requests)
        finally:
            self._waker.ended()

    def _take(self, parameters: str) -> None:
        if self._delay is None:
            raise LiveDelayError(
                f"{PARAMETER} is not taken: this model has no dynamic batcher, or its instances no memory to share"
            )
        self._delay.take(parameters)

    def _turned_away(self, marked: Mapping[int, str], count: int) -> tuple[dict[int, Any], set[int]]:
        """The responses by place, and which of them are to wakes."""
        # NOTE: one object per request; the same response for two requests makes tritonserver 2.51 crash.
        away: dict[int, Any] = {}
        wakes: set[int] = set()
        deadlines = []
        late = 0
        now_ns = self._clock_ns()
        for place, parameters in marked.items():
            if _WAKE in parameters:
                away[place] = _unavailable(WAKE_ANSWER)
                wakes.add(place)
                continue
            if PARAMETER in parameters:
                try:
                    self._take(parameters)
                except LiveDelayError as error:
                    away[place] = _invalid(error)
                    continue
            try:
                deadline = deadline_ns(parameters)
            except DeadlineParameterError as error:
                away[place] = _invalid(error)
                continue
            if deadline is None:
                continue
            if deadline <= now_ns:
                away[place] = _unavailable(LATE)
                late += 1
            else:
                deadlines.append(deadline)
        if late:
            self.count_late(late)
        self.latest_ns = max(deadlines) if deadlines and len(deadlines) + len(away) == count else None
        return away, wakes


def intake_of(
    args: Mapping[str, str], config: Mapping[str, Any], parameters: CommonParameters
) -> tuple[Intake, tuple[str, ...]]:
    """An instance's intake, from initialize's `args`, and remarks about its waker."""
    waker, remarks = waker_of(args, config, parameters)
    family = pb_utils.MetricFamily(
        name="pilot_late_total",
        description="Requests that were not computed because their deadline had passed",
        kind=pb_utils.MetricFamily.COUNTER,
    )
    counter = family.Metric(labels={"model": args["model_name"], "version": args["model_version"]})

    def count(requests: int, family: Any = family) -> None:  # noqa: ARG001  observing needs a reference to the family
        counter.increment(requests)

    return Intake(waker, count, look=stub_memory_of(args).look, delay=live_delay_of(args, config)), remarks


def _are_wakes(requests: Sequence[Any]) -> bool:
    """Whether all are: those are answered at once."""
    try:
        return all(_WAKE in request.parameters() for request in requests)
    except UnicodeDecodeError:
        return False


def _nothing() -> None:
    """For an instance without a waker."""


def _invalid(error: ValueError) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(text_of(error), pb_utils.TritonError.INVALID_ARG))


def _unavailable(said: str) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(said, pb_utils.TritonError.UNAVAILABLE))
