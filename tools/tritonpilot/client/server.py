"""One server as the client sees it: its endpoint, its connection, and the memory shared with it.

server = Server(endpoint, sharing)
outputs = await server.infer(model, request, rows, errand)        # big tensors by shared memory where that is possible
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tritonclient.utils import serialize_byte_tensor

from tritonpilot.client import served
from tritonpilot.client.calls import Errand
from tritonpilot.client.endpoints import Endpoint
from tritonpilot.client.errors import CallError, DeniedError, UnknownModelError
from tritonpilot.client.placement import Placement, place
from tritonpilot.client.served import Array, Served
from tritonpilot.client.shared_memory import Region, Regions, UnavailableError
from tritonpilot.client.transport import Place, Request, Transport, connect
from tritonpilot.control_key import VARIABLE, control_key, key_file
from tritonpilot.errors import HostError
from tritonpilot.tritonserver import CONTROL_HEADER

SHARED_MEMORY_BYTES = 1 << 18  # measured: docs/client.md

SharedMemory = Literal["auto", "off"] | int


@dataclass(frozen=True)
class Sharing:
    """When tensors go through shared memory: "auto", "off" or the index of a GPU; from how many bytes on; with which key."""

    how: SharedMemory
    bytes: int
    key: str | None  # None: the one of this machine's state, if there is one


class Server:
    """Made and used in one event loop."""

    def __init__(self, endpoint: Endpoint, sharing: Sharing, caller_key: str = "") -> None:
        self.endpoint = endpoint
        self._sharing = sharing
        key = _known_key() if sharing.key is None else sharing.key
        self._transport = connect(endpoint, (CONTROL_HEADER, key) if key else None, caller_key)
        self._regions: Regions | None = None
        if sharing.how != "off" and endpoint.is_loopback:
            self._regions = Regions(self._transport, None if sharing.how == "auto" else sharing.how)

    async def describe(self, model: str, version: str) -> Served:
        """What the model takes; from its metadata where its config is not for everybody. Raises a CallError."""
        read: Callable[[Mapping[str, Any], str], Served] = served.from_config
        try:
            described = await self._transport.config(model, version)
        except (DeniedError, UnknownModelError):
            read, described = served.from_metadata, await self._transport.metadata(model, version)
        with self._transport.reading():
            found = read(described, version)
            if found.name != model:
                raise ValueError(f"asked for the model {model}, it describes {found.name}")
        return found

    async def infer(self, model: Served, request: Request, rows: int, errand: Errand) -> Mapping[str, Array]:
        """The outputs by name. Raises a CallError."""
        if self._regions is not None and self._regions.is_available:
            plan = _placement(model, request, rows, self._sharing.bytes)
            if plan.bytes:
                with suppress(UnavailableError):
                    async with self._regions.borrowed(plan.bytes) as region:
                        errand.is_doubtful = True  # the server reads and writes the region until it has answered
                        try:
                            return await _infer_through(region, plan, self._transport, model, request, rows)
                        except CallError as error:
                            if "shared memory region" not in str(error):
                                raise
                        finally:
                            errand.is_doubtful = False
                    await self._regions.forget()  # the server was started again: it has none of ours
        return (await self._transport.infer(request)).arrays

    async def close(self) -> None:
        """Give the memory back and close the connection."""
        if self._regions is not None:
            await self._regions.close()
        await self._transport.close()


def _placement(model: Served, request: Request, rows: int, threshold: int) -> Placement:
    inputs = {name: served.size_of({name: array}) for name, (kind, array) in request.inputs.items() if kind != "BF16"}
    wanted = request.outputs or tuple(model.outputs)
    outputs = {
        name: served.output_bytes(model.outputs[name], rows, model.max_batch_size > 0)
        for name in wanted
        if model.outputs[name].data_type != "BF16"
    }
    return place(inputs, outputs, threshold)


async def _infer_through(
    region: Region, plan: Placement, transport: Transport, model: Served, request: Request, rows: int
) -> Mapping[str, Array]:
    """The request with the placed tensors in the region instead of in the body."""
    placed_inputs = {}
    for name, offset in plan.inputs.items():
        array = request.inputs[name][1]
        if array.dtype.kind == "O":
            array = np.frombuffer(serialize_byte_tensor(array).item(), np.uint8)
        region.write(array, offset)
        placed_inputs[name] = Place(region.name, array.nbytes, offset)
    placed_outputs = {
        name: Place(region.name, served.output_bytes(model.outputs[name], rows, model.max_batch_size > 0), offset)
        for name, offset in plan.outputs.items()
    }
    answer = await transport.infer(
        dataclasses.replace(
            request,
            outputs=request.outputs or tuple(model.outputs),
            placed_inputs=placed_inputs,
            placed_outputs=placed_outputs,
        )
    )
    arrays = dict(answer.arrays)
    with transport.reading():
        for name, shape in answer.placed_shapes.items():
            arrays[name] = region.read(model.outputs[name].dtype, shape, plan.outputs[name])
    return arrays


def _known_key() -> str:
    """The control key of a server on this machine, "" when this user has none; never makes one."""
    try:
        return control_key().value if VARIABLE in os.environ or Path(key_file()).is_file() else ""
    except HostError:
        return ""
