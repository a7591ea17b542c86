"""Calls that make a server do over HTTP what it does slowly the first time, so that no caller waits for that.

    call("127.0.0.1:8000", "ctr", {"dense": array, ...}, connections=8, seconds=0.05)

A thread of the front end touches its memory, an instance its buffers, when they answer for the first time: a first request
takes 1.4 to 1.8 times a later one.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import numpy.typing as npt
from tritonclient.utils import np_to_triton_dtype

from tritonpilot import samples

TIMEOUT_S = 5.0  # of nobody's request
FEWEST = 2


def call(
    endpoint: str, model: str, inputs: Mapping[str, npt.NDArray[Any]], *, connections: int, seconds: float
) -> None:
    """Ask a model in turn over connections that are open together and so spread over the threads: twice over each, but when these
    seconds are over no more, after two calls at least.

    What fails is nobody's request and is left: who starts the server looks whether it lives.
    """
    body, json_bytes = request_of(inputs)
    headers = {"Inference-Header-Content-Length": str(json_bytes)}
    with ExitStack() as stack, suppress(OSError, http.client.HTTPException):
        opened = [http.client.HTTPConnection(endpoint, timeout=TIMEOUT_S) for _ in range(connections)]
        for connection in opened:
            stack.callback(connection.close)
            connection.connect()
        deadline = time.monotonic() + seconds
        for done, connection in enumerate(opened * 2):
            if done >= FEWEST and time.monotonic() > deadline:
                return
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            connection.getresponse().read()


def request_of(inputs: Mapping[str, npt.NDArray[Any]]) -> tuple[bytes, int]:
    """The body of a binary inference request, and how long its JSON part is."""
    tensors, data = [], []
    for name, array in inputs.items():
        data.append(_strings(array) if array.dtype.hasobject else samples.raw(array))
        tensors.append(
            {
                "name": name,
                "datatype": np_to_triton_dtype(array.dtype),
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(data[-1])},
            }
        )
    head = json.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}}).encode()
    return b"".join((head, *data)), len(head)


def _strings(array: npt.NDArray[Any]) -> bytes:
    values = [each if isinstance(each, bytes) else str(each).encode() for each in array.ravel().tolist()]
    return b"".join(len(value).to_bytes(4, "little") + value for value in values)
