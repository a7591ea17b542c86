"""How are thousands of HTTP requests a second sent at their times from one thread? Raw sockets and one epoll.

    log = send(job, start=time.perf_counter() + 0.05)

A request takes a connection of its own, the one that was used last; there are as many as requests in flight, up to a limit.
"""

from __future__ import annotations

import collections
import errno
import math
import re
import resource
import select
import socket
import time
from collections.abc import Callable

from tritonpilot.errors import MeasurementError
from tritonpilot.load.job import Job, Log, kind_of
from tritonpilot.outcome import CONNECTION, NO_ANSWER

RECEIVE_BYTES = 1 << 18
EVENTS = 64  # answers read before the clock is looked at again
LOOK_S = 0.5
OK = b"HTTP/1.1 200"
START = re.compile(rb"HTTP/1\.[01] [1-5][0-9][0-9]")
START_BYTES = len(OK)
MOST_HEAD_BYTES = 1 << 16
HEAD_END = b"\r\n\r\n"
LENGTH = b"\r\ncontent-length:"
CHUNKED = b"\r\ntransfer-encoding: chunked"
CLOSE = b"\r\nconnection: close"
SPARE_FILES = 64
# Connections without a first answer: what does not fit into the queue of a listener that has not accepted them, the kernel drops
# and repeats after seconds. 900 at once were too many for Triton with one HTTP thread.
MOST_NEW = 400
STILL_S = 0.1  # a server that answers nothing for so long stands still: what waits meanwhile, waits for the server


class _Connection:
    """A socket and the request that it carries."""

    __slots__ = ("is_new", "is_open", "left", "received", "request", "socket")

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.request = -1
        self.left: memoryview | None = None  # what is not sent yet
        self.received = b""
        self.is_open = False
        self.is_new = True  # no answer came over it yet


def send(job: Job, start: float, on_look: Callable[[int, int, Log], None] | None = None) -> Log:
    """Send every request at `start` (time.perf_counter()) + its time, and wait for the answers.

    `on_look` is called twice a second with how many were sent, how many are in flight, and the log so far.
    """
    with _Sender(job, start, on_look) as sender:
        return sender.run()


class _Sender:
    def __init__(self, job: Job, start: float, on_look: Callable[[int, int, Log], None] | None) -> None:
        self._job = job
        self._start = start
        self._on_look = on_look
        self._log = Log.of(len(job.at_s))
        self._epoll = select.epoll()
        self._family, self._address = _resolve(job)
        self._most = min(job.connections, _open_files() - SPARE_FILES)
        self._all: dict[int, _Connection] = {}
        self._free: list[_Connection] = []
        self._busy = 0
        self._new = 0
        self._waiting: collections.deque[int] = collections.deque()  # due, but every connection is taken
        self._unexplained: list[
            int
        ] = []  # of these, since the last answer: there were MOST_NEW connections without one
        self._silent_s = math.inf  # since when nothing was there to read although answers were due
        self._caught_up_s = -math.inf  # when a server that stood still should have caught up

    def __enter__(self) -> _Sender:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._all.values():
            connection.socket.close()
        self._epoll.close()

    def run(self) -> Log:
        at = (self._job.at_s + self._start).tolist()
        count, sent = len(at), 0
        clock, poll, begin, happened = time.perf_counter, self._epoll.poll, self._begin, self._happened
        cpu_before, sending = time.thread_time(), True
        look = self._start + LOOK_S
        while sent < count or self._busy or self._waiting:
            now = clock()
            while sent < count and at[sent] <= now:
                begin(sent)
                sent += 1
                now = clock()
            if sending and sent == count:
                sending = False
                self._log.cpu_s = time.thread_time() - cpu_before
                self._log.wall_s = now - self._start
            events = poll(0, EVENTS)
            if events:
                for number, event in events:
                    happened(number, event)
            else:
                if self._busy and self._silent_s == math.inf:
                    self._silent_s = now - self._start
                # epoll takes whole milliseconds, select microseconds; an epoll can itself be waited for.
                until = min(at[sent] if sent < count else look, look)
                left = until - clock()
                if left > 0:
                    select.select([self._epoll], [], [], left)
            if now >= look:
                look = now + LOOK_S
                self._give_up(now)
                if self._on_look is not None:
                    self._on_look(sent, self._busy, self._log)
        self._explain(clock() - self._start)
        return self._log

    def _begin(self, request: int) -> None:
        if self._started(request):
            return
        self._waiting.append(request)
        if len(self._all) < self._most:
            self._unexplained.append(request)
        else:
            self._log.waited_for_connection += 1

    def _explain(self, now_s: float) -> None:
        """Was it the server that requests waited for until now: did it stand still, or catch up for as long as it had?"""
        still_s = now_s - self._silent_s
        if still_s > STILL_S:
            self._caught_up_s = now_s + still_s
        if now_s <= self._caught_up_s:
            self._log.is_held[self._unexplained] = True
        else:
            self._log.waited_for_new += len(self._unexplained)
        self._unexplained.clear()

    def _started(self, request: int) -> bool:
        """Whether there was a connection for the request, or room for one."""
        if self._free:
            self._put(self._free.pop(), request)
        elif len(self._all) < self._most and self._new < MOST_NEW:
            opened = self._open(request)
            if opened is not None:
                self._put(opened, request)
        else:
            return False
        return True

    def _put(self, connection: _Connection, request: int) -> None:
        """Send a request on a connection that has none."""
        content = self._job.content[self._job.place[request]]
        connection.request = request
        self._busy += 1
        if self._busy > self._log.most_in_flight:
            self._log.most_in_flight = self._busy
        self._log.sent_s[request] = time.perf_counter() - self._start
        if not connection.is_open:
            connection.left = memoryview(content)
            return
        try:
            done = connection.socket.send(content)
        except BlockingIOError:
            done = 0
        except OSError as error:
            self._lose(connection, repr(error))
            return
        if done < len(content):
            connection.left = memoryview(content)[done:]
            self._epoll.modify(connection.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _open(self, request: int) -> _Connection | None:
        """A connection that is being opened; None when that failed at once."""
        raw = socket.socket(self._family, socket.SOCK_STREAM)
        raw.setblocking(False)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = raw.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            raw.close()
            now = time.perf_counter() - self._start
            self._log.sent_s[request] = now
            self._log.fail(request, CONNECTION, errno.errorcode.get(code, str(code)), now)
            return None
        connection = _Connection(raw)
        self._all[raw.fileno()] = connection
        self._new += 1
        self._epoll.register(raw.fileno(), select.EPOLLIN | select.EPOLLOUT)
        return connection

    def _happened(self, number: int, event: int) -> None:
        connection = self._all.get(number)
        if connection is None:
            return
        if event & select.EPOLLOUT:
            self._write(connection)
        if event & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and number in self._all:
            self._read(connection)

    def _write(self, connection: _Connection) -> None:
        if not connection.is_open:
            code = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._lose(connection, errno.errorcode.get(code, str(code)))
                return
            connection.is_open = True
        if connection.left is not None:
            try:
                done = connection.socket.send(connection.left)
            except BlockingIOError:
                return
            except OSError as error:
                self._lose(connection, repr(error))
                return
            connection.left = connection.left[done:]
            if connection.left:
                return
            connection.left = None
        self._epoll.modify(connection.socket.fileno(), select.EPOLLIN)

    def _read(self, connection: _Connection) -> None:
        try:
            part = connection.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, repr(error))
            return
        now = time.perf_counter() - self._start
        if not part:
            self._lose(connection, "the server closed the connection")
            return
        received = connection.received + part if connection.received else part
        try:
            end = _end(received)
        except ValueError as error:
            self._lose(connection, str(error))
            return
        if end < 0:
            connection.received = received
            return
        connection.received = b""
        if self._unexplained:
            self._explain(now)
        self._silent_s = math.inf
        request, connection.request = connection.request, -1
        if request < 0:  # an answer to nothing: the server is about to close
            self._drop(connection)
            return
        self._busy -= 1
        if connection.is_new:
            connection.is_new = False
            self._new -= 1
        if received.startswith(OK):
            self._log.done_s[request] = now
        else:
            status = received[9:12].decode(errors="replace")
            text = received[received.find(HEAD_END) + 4 :][:300].decode(errors="replace")
            self._log.fail(request, kind_of(f"HTTP {status}", text), text or status, now)
        if connection.left is not None or CLOSE in received[:end].partition(HEAD_END)[0].lower():
            self._drop(connection)
        else:
            self._free.append(connection)
        if self._waiting:
            self._next()

    def _lose(self, connection: _Connection, why: str) -> None:
        """The connection broke; so did its request."""
        request = connection.request
        if request >= 0:
            self._busy -= 1
            self._log.fail(request, CONNECTION, why, time.perf_counter() - self._start)
        self._drop(connection)
        self._next()

    def _drop(self, connection: _Connection) -> None:
        number = connection.socket.fileno()
        if self._all.pop(number, None) is None:
            return
        self._new -= connection.is_new
        if connection in self._free:
            self._free.remove(connection)
        self._epoll.unregister(number)
        connection.socket.close()

    def _next(self) -> None:
        """Send what waits for a connection, as far as there is room."""
        while self._waiting and self._started(self._waiting[0]):
            self._waiting.popleft()

    def _give_up(self, now: float) -> None:
        """Fail the requests that have waited for longer than the patience."""
        due = now - self._start - self._job.patience_s
        if due < 0:
            return
        for connection in list(self._all.values()):
            request = connection.request
            if request >= 0 and self._log.sent_s[request] < due:
                self._busy -= 1
                words = f"no answer within {self._job.patience_s:g} s"
                self._log.fail(request, NO_ANSWER, words, now - self._start)
                self._drop(connection)
        self._next()


def _resolve(job: Job) -> tuple[int, tuple[str, int]]:
    host, port = job.target.address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise MeasurementError(
            f"The host of {job.target.url} is not known ({error}). Nothing was sent. Correct the address."
        ) from error
    return found[0], found[4]  # type: ignore[return-value]


def _open_files() -> int:
    """How many files this process may open; as many as the system lets it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = 65536 if most == resource.RLIM_INFINITY else most
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))
    return soft


def _end(received: bytes) -> int:
    """Where the first HTTP answer ends; -1 when it is not all there. Raises ValueError for what is none."""
    if len(received) >= START_BYTES and not START.match(received):
        raise ValueError(f"the server answered what is no HTTP: {received[:40]!r}")
    head_end = received.find(HEAD_END)
    if head_end < 0:
        if len(received) > MOST_HEAD_BYTES:
            raise ValueError("the head of the server's answer does not end")
        return -1
    head = received[: head_end + 2].lower()
    start = head.find(LENGTH)
    if start >= 0:
        stop = head.find(b"\r\n", start + len(LENGTH))
        length = head[start + len(LENGTH) : stop].strip()
        if not length.isdigit():
            raise ValueError(f"the server's answer has the length {length[:40]!r}")
        end = head_end + 4 + int(length)
        return end if len(received) >= end else -1
    if CHUNKED in head:
        last = received.find(b"\r\n0\r\n\r\n", head_end + 2)
        return last + 7 if last >= 0 else -1
    return head_end + 4
