"""Does this server have the 500 ms stall? An experiment on a model of one's own, not a list of versions.

    probe = StallProbe(endpoint, request)        # `request`: an inference of a model with priority levels that takes 1 ms
    probe.stalls(TRIALS, is_stopping)            # True at the first stall, False after so many trials without any

A train of requests arrives at once and is executed one by one. At the end of each execution but the last the batcher can miss
that the instance is free (pilotlib.waker): a trial. Nothing arrives afterwards that could wake it, so a train in which it
happens takes half a second longer.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable

from pilotlib.loopback import CONTENT_LENGTH, TIMEOUT_S

TRAIN = 12  # requests at once
STALL_S = 0.4  # a train without a stall takes 20 ms; the stall is 500 ms


class StallProbe:
    """Keeps the connections of a train open while it probes."""

    def __init__(self, endpoint: tuple[str, int], request: bytes, train: int = TRAIN) -> None:
        self._endpoint = endpoint
        self._request = request
        self._train = train

    def stalls(self, trials: int, is_stopping: Callable[[], bool] = lambda: False) -> bool | None:
        """Whether the model stalled; None when it was stopped before that was known. Raises OSError when it is not answered."""
        with contextlib.ExitStack() as stack:
            connections = [
                stack.enter_context(contextlib.closing(socket.create_connection(self._endpoint, timeout=TIMEOUT_S)))
                for _ in range(self._train)
            ]
            for connection in connections:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(-(-trials // (self._train - 1))):
                if is_stopping():
                    return None
                if self._run(connections) >= STALL_S:
                    return True
        return False

    def _run(self, connections: list[socket.socket]) -> float:
        """How long one train takes, s. It is given up when it has stalled."""
        began = time.monotonic()
        for connection in connections:
            connection.sendall(self._request)
        waiting = dict.fromkeys(connections, b"")
        while waiting and (left_s := began + STALL_S - time.monotonic()) > 0:
            for connection in select.select(list(waiting), [], [], left_s)[0]:
                part = connection.recv(1 << 16)
                if not part:
                    raise ConnectionError("the server closed the connection of a probe")
                waiting[connection] += part
                if is_answered(waiting[connection]):
                    del waiting[connection]
        return time.monotonic() - began


def is_answered(received: bytes) -> bool:
    """Whether an HTTP answer is there. Raises ConnectionError when it is none to an inference that worked."""
    head, end, body = received.partition(b"\r\n\r\n")
    length = CONTENT_LENGTH.search(head + end) if end else None
    if length is None or len(body) < int(length[1]):
        return False
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise ConnectionError(body[:200].decode(errors="replace"))
    return True
