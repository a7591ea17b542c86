"""How does a request get to Triton's HTTP port, and its answer back? A pool of keep-alive connections.

    backend = Backend("127.0.0.1", 8000)
    backend.send(request, receiver)       # receiver.answered(...), then perhaps receiver.more(...); or receiver.broke(...)
    backend.close()

There are as many connections as there are requests in Triton: the gate's window limits them.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Protocol, cast

IDLE_S = 30.0
CONNECT_TIMEOUT_S = 5.0
RECONNECT_S = 0.05
MAX_HEAD_BYTES = 64 * 1024
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r\n", re.IGNORECASE)
_BLANK_LINE = b"\r\n\r\n"
_IN_HEAD = -1

Request = bytes | tuple[bytes | memoryview, ...]


class Receiver(Protocol):
    """Who gets the answer to one request: answered(), more() until `is_last`; instead of one of these, broke()."""

    connection: BackendConnection | None
    """Where the answer comes from, for pause() and resume(); set while it does."""

    @property
    def is_waited_for(self) -> bool:
        """Whether a caller is still there: if not, nothing is sent again for him."""
        ...

    def stalled(self) -> None:
        """Nobody listens; it is tried again."""
        ...

    def answered(self, status: int, data: bytes, head_size: int, is_last: bool) -> None:
        """`data` is the answer as Triton sent it: `head_size` bytes of head, then the body as far as it has come."""
        ...

    def more(self, data: bytes, is_last: bool) -> None:
        """More of the body."""
        ...

    def broke(self, reason: str) -> None:
        """There is no (further) answer."""
        ...


class Backend:
    """Connections to one Triton. All of it happens in one event loop."""

    def __init__(self, host: str, port: int, *, idle_s: float = IDLE_S) -> None:
        self.host = host
        self.port = port
        self._idle_s = idle_s
        self._idle: list[BackendConnection] = []  # the last used one is at the end, and used first
        self._open: set[BackendConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def connections(self) -> int:
        """Open ones, idle or not."""
        return len(self._open)

    def send(self, request: Request, receiver: Receiver, patience_s: float = 0.0) -> None:
        """Send `request` (head and body) over an idle connection, or over a new one; where nobody listens, try for `patience_s`."""
        if self._idle:
            self._idle.pop().send(request, receiver, is_reused=True)
        else:
            self.send_over_new(request, receiver, patience_s)

    def send_over_new(self, request: Request, receiver: Receiver, patience_s: float = 0.0) -> None:
        """Connect first."""
        task = asyncio.get_running_loop().create_task(self._connect(request, receiver, patience_s))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def close(self) -> None:
        """Close all connections; receivers that wait are told that theirs broke."""
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.abort()

    # -- for BackendConnection -----------------------------------------------------------------------------------------

    def opened(self, connection: BackendConnection) -> None:
        """A connection is there."""
        self._open.add(connection)

    def lost(self, connection: BackendConnection) -> None:
        """A connection is gone."""
        self._open.discard(connection)
        if connection.receiver is None and connection in self._idle:
            self._idle.remove(connection)

    def idle(self, connection: BackendConnection) -> None:
        """A connection has had its whole answer."""
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(self._idle_s / 2, self._close_idle)

    async def _connect(self, request: Request, receiver: Receiver, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + patience_s
        while True:
            try:
                _, connection = await asyncio.wait_for(
                    loop.create_connection(lambda: BackendConnection(self), self.host, self.port), CONNECT_TIMEOUT_S
                )
                break
            except asyncio.CancelledError:
                receiver.broke("the entry ends")
                raise
            except (OSError, asyncio.TimeoutError) as failed:
                if not receiver.is_waited_for or loop.time() >= until_s:
                    reason = (failed.strerror if isinstance(failed, OSError) else None) or "no connection in time"
                    receiver.broke(f"{self.host}:{self.port}: {reason}")
                    return
            receiver.stalled()
            try:
                await asyncio.sleep(RECONNECT_S)
            except asyncio.CancelledError:
                receiver.broke("the entry ends")
                raise
        connection.send(request, receiver, is_reused=False)

    def _close_idle(self) -> None:
        before = time.monotonic() - self._idle_s
        for connection in [one for one in self._idle if one.idle_since <= before]:
            connection.abort()
            self._idle.remove(connection)
        again = bool(self._idle) and not self._is_closed
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(self._idle_s / 2, self._close_idle) if again else None


class BackendConnection(asyncio.Protocol):
    """One connection: idle, or busy with the request of `receiver`."""

    __slots__ = (
        "_backend",
        "_buffer",
        "_is_lost",
        "_is_paused",
        "_is_reused",
        "_left",
        "_request",
        "_transport",
        "idle_since",
        "receiver",
    )

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._transport: asyncio.Transport | None = None
        self._buffer = b""
        self._left = _IN_HEAD  # bytes of the body to come
        self._request: Request | None = None  # until its answer begins
        self._is_reused = False
        self._is_paused = False
        self._is_lost = False
        self.receiver: Receiver | None = None
        self.idle_since = 0.0

    def send(self, request: Request, receiver: Receiver, *, is_reused: bool) -> None:
        """Send a request; the connection is idle."""
        self._request = request
        self._is_reused = is_reused
        self.receiver = receiver
        receiver.connection = self
        if self._is_lost:  # between its opening and now
            self._end("the connection broke")
            return
        assert self._transport is not None
        if type(request) is bytes:
            self._transport.write(request)
        else:
            self._transport.writelines(cast(tuple[bytes, ...], request))

    def pause(self) -> None:
        """Read no more of the answer: its reader is slow."""
        if not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._backend.opened(self)

    def data_received(self, data: bytes) -> None:
        receiver = self.receiver
        if receiver is None:
            self.abort()  # nobody asked
            return
        if self._left != _IN_HEAD:
            self._left -= len(data)
            if self._left > 0:
                receiver.more(data, False)
            elif self._left == 0:
                self._release()
                receiver.more(data, True)
            else:
                self._unreadable()
            return
        if self._buffer:
            data = self._buffer + data
        head_size = data.find(_BLANK_LINE) + 4
        if head_size < 4:
            self._buffer = data
            if len(data) > MAX_HEAD_BYTES:
                self._unreadable()
            return
        length = _LENGTH.search(data, 0, head_size)
        status = data[9:12]
        if length is None or not status.isdigit() or status < b"200":
            self._unreadable()
            return
        left = int(length[1]) + head_size - len(data)
        if left > 0:
            self._left = left
            self._request = None
            receiver.answered(int(status), data, head_size, False)
        elif left == 0:
            # NOTE: before the receiver is told, for that may start the next request, which then uses this connection.
            self._release()
            receiver.answered(int(status), data, head_size, True)
        else:
            self._unreadable()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._backend.lost(self)
        if self.receiver is not None:
            self._end(
                f"the connection to {self._backend.host}:{self._backend.port} broke" + (f": {error}" if error else "")
            )

    # ------------------------------------------------------------------------------------------------------------------

    def _release(self) -> None:
        assert self.receiver is not None
        self.receiver.connection = None
        self.receiver = None
        self._request = None
        self._buffer = b""
        self._left = _IN_HEAD
        self.resume()
        self.idle_since = time.monotonic()
        self._backend.idle(self)

    def _unreadable(self) -> None:
        self._is_reused = False  # this is no stale connection
        self._end("it sent what is no HTTP answer of known length")
        self.abort()

    def _end(self, reason: str) -> None:
        receiver, request = self.receiver, self._request
        assert receiver is not None
        self.receiver = self._request = receiver.connection = None
        # Triton closes idle connections when it likes. If this one was closed before the request came, it was not executed.
        is_stale = self._is_reused and request is not None and not self._buffer
        if is_stale and request is not None and receiver.is_waited_for:
            self._backend.send_over_new(request, receiver)
        else:
            receiver.broke(reason)
