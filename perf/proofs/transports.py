"""Does the answer depend on how the request travelled? Every example service, by every way and through the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from perf.frame import Bench, Outcome
from perf.subjects import Served, cut, services, serving
from perf.transports import Arrays, Send, Ways
from tritonpilot import samples
from tritonpilot.client import Client
from tritonpilot.spec import Service

FIRST_SIZES = (1, 3)
REQUESTS = 4  # of each size
DIFFERENT = float(np.finfo(np.float64).max)  # another name, shape, type or string: no number says how far off

Answer = Mapping[str, npt.NDArray[Any]]


def transports_agree(bench: Bench) -> Outcome:
    """The largest difference of any number in any answer from the same request's by HTTP with binary tensors.

    One request is on the way at a time, so that the server computes each of them with the same company: none. Photos and pages
    are left out of JSON, which has no form for bytes that are not UTF-8.
    """
    found: dict[str, float] = {}
    compared = 0
    for name, service in services().items():
        rows = samples.read(service.samples) if service.samples and service.samples.is_file() else None
        if rows is None:
            bench.say(f"{name} is left out: it has no samples yet")
            continue
        with serving(bench, [name]) as served, Ways(served.server) as ways:
            for way, (difference, count) in _compare(served, ways, service, rows).items():
                found[f"{name}, {way}"] = difference
                compared += count
            served.server.check_alive()
    worst = max(found.values())
    return Outcome(
        worst,
        spread=worst - min(found.values()),
        rounds=len(found),
        details={
            "max_difference": found,
            "answers_compared": compared,
            "reference": "http binary",
            "services": sorted({each.partition(",")[0] for each in found}),
        },
    )


def _compare(served: Served, ways: Ways, service: Service, rows: Arrays) -> dict[str, tuple[float, int]]:
    """Way -> (largest difference, answers compared)."""
    sizes = [size for size in FIRST_SIZES if size <= max(1, service.batching.max_batch_size)]
    requests = [_for_client(cut(rows, start * size, size)) for size in sizes for start in range(REQUESTS)]
    expected = [ways.binary(service.service, request) for request in requests]
    found = {}
    with (
        Client(f"http://{served.server.endpoints.http}", shared_memory="off") as http,
        Client(f"grpc://{served.server.endpoints.grpc}", shared_memory_bytes=1) as shared,
    ):
        everything: dict[str, Send] = {
            **{way: send for way, send in ways.all().items() if way != "http binary"},
            "client over http": http.predict,
            "client in shared memory": shared.predict,
        }
        for way, send in everything.items():
            # What is not UTF-8 has no form in JSON.
            usable = [
                (request, answer)
                for request, answer in zip(requests, expected, strict=True)
                if way != "http json" or _is_text(request)
            ]
            if usable:
                differences = [_difference(send(service.service, request), answer) for request, answer in usable]
                found[way] = max(differences), len(usable)
    return found


def _difference(answer: Answer, expected: Answer) -> float:
    """The largest difference of any number; DIFFERENT when something else differs."""
    if set(answer) != set(expected):
        return DIFFERENT
    worst = 0.0
    for name, array in expected.items():
        other = answer[name]
        if other.shape != array.shape or other.dtype != array.dtype:
            return DIFFERENT
        if array.dtype == np.object_:
            if other.tolist() != array.tolist():
                return DIFFERENT
        elif array.size:
            worst = max(worst, float(np.abs(other.astype(np.float64) - array.astype(np.float64)).max()))
    return worst


def _for_client(arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    return {
        name: (np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array).astype(np.object_)
        if array.dtype.kind in "SU"
        else array
        for name, array in arrays.items()
    }


def _is_text(request: Arrays) -> bool:
    try:
        for array in request.values():
            if array.dtype == np.object_:
                for each in array.ravel():
                    each.decode()
    except UnicodeDecodeError:
        return False
    return True
