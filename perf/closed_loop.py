"""How much does a server answer while a few callers never let it rest? Raw HTTP, requests encoded beforehand.

with ClosedLoop("127.0.0.1:8000", "ctr", batches, callers=4) as callers:
    callers.run(seconds=0.3)       # rows answered; returns when every caller has its answer
"""

from __future__ import annotations

import http.client
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import numpy.typing as npt
import tritonclient.http as httpclient
from tritonclient.utils import np_to_triton_dtype

from tritonpilot.errors import MeasurementError

TIMEOUT_S = 30.0

Fill = Callable[[Any, npt.NDArray[Any]], None]
"""Gives a tritonclient InferInput its values."""


def set_bytes(tensor: Any, array: npt.NDArray[Any]) -> None:
    """In the body of the request."""
    tensor.set_data_from_numpy(array)


class ClosedLoop:
    """`callers` connections; each sends the next of the encoded batches as soon as it has its answer.

    Priority 0 is the default. `fill` says where a tensor's values are: in the request, or in shared memory.
    """

    def __init__(
        self,
        http_url: str,
        model: str,
        batches: Sequence[Mapping[str, npt.NDArray[Any]]],
        callers: int,
        *,
        priority: int = 0,
        fill: Fill = set_bytes,
    ) -> None:
        self._path = f"/v2/models/{model}/infer"
        self._bodies = [encoded(batch, priority, fill) for batch in batches]
        self._connections = [http.client.HTTPConnection(http_url, timeout=TIMEOUT_S) for _ in range(callers)]
        self._threads = ThreadPoolExecutor(callers)

    def __enter__(self) -> ClosedLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()

    def run(self, seconds: float) -> int:
        """Rows answered by requests that were begun within that time. Raises MeasurementError when one fails."""
        deadline = time.perf_counter() + seconds
        turns = itertools.cycle(self._bodies)  # next() on it is atomic
        return sum(self._threads.map(lambda connection: self._call(connection, turns, deadline), self._connections))

    def _call(
        self, connection: http.client.HTTPConnection, turns: itertools.cycle[tuple[bytes, str, int]], deadline: float
    ) -> int:
        answered = 0
        while time.perf_counter() < deadline:
            body, json_bytes, rows = next(turns)
            try:
                connection.request("POST", self._path, body, {"Inference-Header-Content-Length": json_bytes})
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise MeasurementError(
                    f"A request to {connection.host}:{connection.port}{self._path} had no answer ({error!r}). Nothing is "
                    "reported. Look at the server's log."
                ) from error
            if answer.status != http.client.OK:
                raise MeasurementError(
                    f"A request to {connection.host}:{connection.port}{self._path} failed with {answer.status}: "
                    f"{content[:200].decode(errors='replace')}. Nothing is reported. Look at the server's log."
                )
            answered += rows
        return answered


def encoded(batch: Mapping[str, npt.NDArray[Any]], priority: int = 0, fill: Fill = set_bytes) -> tuple[bytes, str, int]:
    """(body, length of its JSON part, rows) of a binary inference request."""
    inputs = []
    for name, array in batch.items():
        tensor = httpclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        fill(tensor, array)
        inputs.append(tensor)
    body, json_bytes = httpclient.InferenceServerClient.generate_request_body(inputs, priority=priority)
    # Without binary tensors the whole body is JSON, and tritonclient says no length.
    return bytes(body), str(json_bytes or len(body)), len(next(iter(batch.values())))
