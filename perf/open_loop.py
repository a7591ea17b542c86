"""How long does an answer take from the moment it was due to be asked for? An open-loop sender over gRPC.

with Sender("127.0.0.1:8001") as sender:
    answers = sender.send([Request("ctr", inputs)] * 2, at_s=(0.0, 0.015))
    answers[1].latency_ms          # from the scheduled time, so a late send is not hidden
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy.typing as npt
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tritonpilot.errors import MeasurementError

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Request:
    """One inference: input name -> array with its batch dimension; priority 0 is the model's default level."""

    model: str
    inputs: Mapping[str, npt.NDArray[Any]]
    priority: int = 0


@dataclass(frozen=True)
class Answer:
    """What came back, and when, in seconds since send() began. `order` counts answers as they arrived, from 0."""

    scheduled_s: float
    sent_s: float
    answered_s: float
    order: int
    outputs: Mapping[str, npt.NDArray[Any]]
    error: str

    @property
    def latency_ms(self) -> float:
        """From the scheduled time to the answer."""
        return (self.answered_s - self.scheduled_s) * 1e3


class Sender:
    """A gRPC connection. Not for load that a Python client cannot keep up with (about 3,000 requests/s)."""

    def __init__(self, grpc_url: str) -> None:
        self.url = grpc_url
        self._client = grpcclient.InferenceServerClient(grpc_url)

    def __enter__(self) -> Sender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def send(
        self, requests: Sequence[Request], *, at_s: Sequence[float] | None = None, in_flight: int | None = None
    ) -> list[Answer]:
        """Send each request at its time (default: all at once) and return the answers in the order of the requests.

        `in_flight` bounds the requests without an answer and so closes the loop: then a latency counts from the moment
        there was room. Raises MeasurementError when an answer is missing after a minute; an answer with an error is
        returned as one.
        """
        times = [0.0] * len(requests) if at_s is None else list(at_s)
        room = threading.Semaphore(in_flight or len(requests))
        answers: list[Answer | None] = [None] * len(requests)
        arrived = threading.Semaphore(0)
        lock = threading.Lock()
        order = iter(range(len(requests)))
        prepared = [[_input(name, array) for name, array in request.inputs.items()] for request in requests]
        start = time.perf_counter()

        def keep(place: int, due: float, sent: float, result: Any, error: InferenceServerException | None) -> None:
            now = time.perf_counter() - start
            room.release()
            with lock:
                said = "" if error is None else str(error.message())
                answers[place] = Answer(due, sent, now, next(order), {} if error else _outputs(result), said)
            arrived.release()

        for place, (request, inputs, scheduled) in enumerate(zip(requests, prepared, times, strict=True)):
            _sleep_until(start + scheduled)
            room.acquire()
            sent = time.perf_counter() - start
            due = scheduled if in_flight is None else sent
            self._client.async_infer(
                request.model,
                inputs,
                lambda result, error, p=place, d=due, s=sent: keep(p, d, s, result, error),
                priority=request.priority,
                client_timeout=TIMEOUT_S,
            )
        for _ in requests:
            if not arrived.acquire(timeout=TIMEOUT_S):
                break
        complete = [answer for answer in answers if answer is not None]
        if len(complete) != len(requests):
            raise MeasurementError(
                f"{len(requests) - len(complete)} of {len(requests)} requests to {self.url} had no answer after "
                f"{TIMEOUT_S:g} s. Nothing is reported. Look at the server's log."
            )
        return complete


def outputs_of(answers: Sequence[Answer]) -> list[Mapping[str, npt.NDArray[Any]]]:
    """The outputs of answers that must all have succeeded. Raises MeasurementError with the first error otherwise."""
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise MeasurementError(
            f"{len(failed)} of {len(answers)} requests failed, the first with: {failed[0]}. Nothing is reported. "
            "Look at the server's log."
        )
    return [answer.outputs for answer in answers]


def _input(name: str, array: npt.NDArray[Any]) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def _outputs(result: grpcclient.InferResult) -> dict[str, npt.NDArray[Any]]:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def _sleep_until(moment: float) -> None:
    """Sleep, and spin the last millisecond: a sleep alone is late by the timer's slack."""
    while (left := moment - time.perf_counter()) > 0:
        if left > 0.001:
            time.sleep(left - 0.001)
