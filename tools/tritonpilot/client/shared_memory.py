"""Tensors in memory that the server maps, for big ones on the same machine: registered once, reused, always given back.

    async with regions.borrowed(request_bytes) as region:
        region.write(array, offset) ... infer ... region.read(offset, dtype, shape)

A system region is a file in /dev/shm only until the server has mapped it: then its name is removed at once, and the
memory lives as long as one of the two has it mapped. So a crash of this process leaves no file behind; the mapping that
remains in the server is named by process, and the next client on this machine unregisters those of dead processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import mmap
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritonpilot.client.errors import CallError, DeadlineError, DisconnectedError
from tritonpilot.client.served import Array
from tritonpilot.client.transport import Transport

PREFIX = "tritonpilot_client"
FOLDER = Path("/dev/shm")  # noqa: S108  where shm_open makes its objects
SMALLEST = 1 << 16
FREE_BYTES = 256 << 20  # kept registered for the next requests
DOUBTFUL_BYTES = 1 << 30
DOUBTFUL_S = 60.0
RELEASE_S = 2.0
RELEASE_POLL_S = 0.01
PAUSE_S = 60.0  # after a refusal, until shared memory is tried again


class UnavailableError(CallError):
    """This server takes no shared memory from us; the message says why. Never reaches a caller: the body is used instead."""


class Region:
    """One piece of memory that server and client have mapped."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size

    async def register(self, transport: Transport) -> None:
        """Make it known to the server. Raises UnavailableError."""
        raise NotImplementedError

    async def unregister(self, transport: Transport) -> None:
        """Let the server unmap it. Raises CallError."""
        raise NotImplementedError

    def write(self, array: Array, offset: int) -> None:
        """Copy an array (or the bytes of serialised strings) to that offset."""
        raise NotImplementedError

    def read(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int) -> Array:
        """A copy of what lies at that offset."""
        raise NotImplementedError

    def close(self) -> None:
        """Unmap it here."""
        raise NotImplementedError


class SystemRegion(Region):
    """Memory of this machine, by POSIX shared memory."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(name, size)
        self._path = FOLDER / name
        try:
            descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"{self._path} cannot be made: {error.strerror}.") from None
        try:
            # NOTE: not ftruncate, which succeeds on a full /dev/shm and lets the first write end this process (SIGBUS).
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except (OSError, OverflowError) as error:
            self._path.unlink()
            raise UnavailableError(f"{FOLDER} has no {size} bytes to give: {error}.") from None
        finally:
            os.close(descriptor)
        self._bytes: Array = np.frombuffer(self._map, np.uint8)

    async def register(self, transport: Transport) -> None:
        try:
            await transport.register(self.name, f"/{self.name}", self.size)
        except DisconnectedError:
            raise
        except CallError as refused:  # another machine or container, another user, or the key is not accepted
            raise UnavailableError(str(refused)) from None
        finally:
            self._path.unlink()

    async def unregister(self, transport: Transport) -> None:
        await transport.unregister(self.name)

    def write(self, array: Array, offset: int) -> None:
        target: Array = np.ndarray(array.shape, array.dtype, self._bytes.data, offset)
        np.copyto(target, array)

    def read(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int) -> Array:
        return np.ndarray(shape, dtype, self._bytes.data, offset).copy()

    def close(self) -> None:
        del self._bytes
        with suppress(BufferError):  # somebody still looks at it: it goes with the last view
            self._map.close()


class CudaRegion(Region):
    """Memory of a GPU that this process and the server use: tensors reach a GPU backend without passing the server's host memory.

    NOTE: unverified, as no machine with a GPU was at hand; it follows tritonclient.utils.cuda_shared_memory.
    """

    def __init__(self, name: str, size: int, device: int) -> None:
        super().__init__(name, size)
        try:
            import tritonclient.utils.cuda_shared_memory as cuda

            self._handle = cuda.create_shared_memory_region(name, size, device)
        except Exception as error:  # noqa: BLE001  cuda-python, driver and device each have errors of their own
            raise UnavailableError(f"No CUDA shared memory on device {device}: {error!r}.") from None
        self._cuda: Any = cuda
        self._device = device

    async def register(self, transport: Transport) -> None:
        try:
            await transport.register_cuda(self.name, self._cuda.get_raw_handle(self._handle), self.size, self._device)
        except DisconnectedError:
            raise
        except CallError as refused:
            raise UnavailableError(str(refused)) from None

    async def unregister(self, transport: Transport) -> None:
        await transport.unregister_cuda(self.name)

    def write(self, array: Array, offset: int) -> None:
        self._cuda.set_shared_memory_region(self._handle, [np.ascontiguousarray(array)], offset)

    def read(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int) -> Array:
        found: Array = self._cuda.get_contents_as_numpy(self._handle, np.dtype(dtype), list(shape), offset).copy()
        return found

    def close(self) -> None:
        self._cuda.destroy_shared_memory_region(self._handle)


class Regions:
    """The regions of one server. Used from one event loop."""

    def __init__(self, transport: Transport, device: int | None = None) -> None:
        self.why_not = ""
        self._transport = transport
        self._paused_until = 0.0
        self._make: Callable[[str, int], Region] = (
            SystemRegion if device is None else lambda name, size: CudaRegion(name, size, device)
        )
        self._free: list[Region] = []
        self._doubtful: list[tuple[float, Region]] = []  # the server may still read or write them
        self._names = (f"{_owner(os.getpid())}_{secrets.token_hex(3)}_{number}" for number in itertools.count())
        self._has_swept = False

    @property
    def is_available(self) -> bool:
        """Whether it is worth trying."""
        return time.monotonic() >= self._paused_until

    @asynccontextmanager
    async def borrowed(self, size: int) -> AsyncIterator[Region]:
        """A registered region of at least that size, for one request. Raises UnavailableError when there can be none.

        Leave the block with an exception that is no answer of the server, and the region is not used again.
        """
        region = self._take(size) or await self._new(size)
        is_answered = False
        try:
            yield region
            is_answered = True
        except CallError as error:
            # At a deadline whoever stands before Triton answers, while Triton may still work.
            is_answered = not (
                isinstance(error, DisconnectedError) or (isinstance(error, DeadlineError) and error.is_computed)
            )
            raise
        finally:
            if is_answered:
                self._free.append(region)
            else:
                self._doubtful.append((time.monotonic() + DOUBTFUL_S, region))
        await self._shrink()

    async def forget(self) -> None:
        """The server does not know our regions any more (it was started again): unmap them here too."""
        free, self._free = self._free, []
        for region in free:
            await self._give_back(region)

    async def close(self) -> None:
        """Unregister and unmap everything."""
        doubtful, self._doubtful = self._doubtful, []
        self._free += [region for _, region in doubtful]
        self._pause(math.inf, "the client is closed")
        await self.forget()

    def _take(self, size: int) -> Region | None:
        fitting = [region for region in self._free if region.size >= size]
        if not fitting:
            return None
        region = min(fitting, key=lambda each: each.size)
        self._free.remove(region)
        return region

    async def _new(self, size: int) -> Region:
        if time.monotonic() < self._paused_until:
            raise UnavailableError(self.why_not)
        if not self._has_swept:
            self._has_swept = True
            await self._sweep()
        try:
            if sum(region.size for _, region in self._doubtful) > DOUBTFUL_BYTES:
                raise UnavailableError("Too many requests with shared memory had no answer.")
            region = self._make(next(self._names), max(SMALLEST, 1 << (size - 1).bit_length()))
            try:
                await region.register(self._transport)
            except BaseException:
                region.close()
                raise
        except UnavailableError as error:
            self._pause(PAUSE_S, str(error))
            raise
        return region

    def _pause(self, seconds: float, why: str) -> None:
        self._paused_until, self.why_not = time.monotonic() + seconds, why

    async def _shrink(self) -> None:
        now = time.monotonic()
        over = [region for until, region in self._doubtful if until < now]
        self._doubtful = [(until, region) for until, region in self._doubtful if until >= now]
        while sum(region.size for region in self._free) > FREE_BYTES and len(self._free) > 1:
            over.append(self._free.pop(0))
        for region in over:
            await self._give_back(region)

    async def _give_back(self, region: Region) -> None:
        """Unregister and unmap. Triton refuses while a request holds the region, which it does until after its answer."""
        until = time.monotonic() + RELEASE_S
        while True:
            try:
                await asyncio.wait_for(region.unregister(self._transport), RELEASE_S)
            except asyncio.TimeoutError:
                break  # the server hangs, and close() must not
            except CallError as error:
                if "in use" in str(error) and time.monotonic() < until:
                    await asyncio.sleep(RELEASE_POLL_S)
                    continue
            break  # done; or the server is gone, or does not know it any more
        region.close()

    async def _sweep(self) -> None:
        """Unregister what dead processes of this machine left registered."""
        with contextlib.suppress(CallError):
            for name in await self._transport.regions():
                if is_abandoned(name):
                    await self._transport.unregister(name)
        for path in FOLDER.glob(f"{PREFIX}_*"):  # killed between making a region and the server's answer
            if is_abandoned(path.name):
                with contextlib.suppress(OSError):
                    path.unlink()


def is_abandoned(name: str) -> bool:
    """Whether a region was made by a process of our PID namespace that does not live any more."""
    head, _, rest = name.partition(f"{PREFIX}_")
    parts = rest.split("_")
    if head or len(parts) != 5 or not parts[1].isdigit() or parts[0] != _pid_namespace():
        return False
    return not name.startswith(f"{_owner(int(parts[1]))}_")


def _owner(pid: int) -> str:
    """PREFIX_<PID namespace>_<pid>_<its start time>: no later process has the same."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = "gone"
    return f"{PREFIX}_{_pid_namespace()}_{pid}_{started}"


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "0"
