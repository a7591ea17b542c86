"""Predictions from threads: the calls of all threads meet in one event loop, which joins and sends them.

with Client("127.0.0.1:8000") as client:
    client.predict("ctr", {"dense": ..., "categorical": ...}, deadline_ms=50, caller_class="realtime")["prob"]
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tritonpilot.client.async_client import CLOSE_GRACE_S, AsyncClient
from tritonpilot.client.errors import ClosedError, DeadlineError
from tritonpilot.client.served import Array

LATE_S = 5.0  # the event loop ends every call at its deadline; if it cannot, the thread does not wait for ever


class Client:
    """Any number of threads may call one client. It takes what AsyncClient takes.

    After a fork the child has to make its own: calls of the old one raise ClosedError there.
    """

    def __init__(self, servers: str | Sequence[str], **options: Any) -> None:
        self._client = AsyncClient(servers, **options)
        self._deadline_s = float(options.get("deadline_ms", self._client.deadline_ms)) / 1e3
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._end: weakref.finalize[Any, Any] | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def predict(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        deadline_ms: float | None = None,
        caller_class: str | None = None,
        priority: int | None = None,
        outputs: Sequence[str] = (),
        version: str = "",
    ) -> dict[str, Array]:
        """See AsyncClient.predict."""
        future = self.submit(
            model,
            inputs,
            deadline_ms=deadline_ms,
            caller_class=caller_class,
            priority=priority,
            outputs=outputs,
            version=version,
        )
        longest_s = self._deadline_s if deadline_ms is None else deadline_ms / 1e3
        try:
            return future.result(longest_s + LATE_S)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise DeadlineError(
                "The client's own event loop did not answer in time. Give this process more CPU."
            ) from None
        except concurrent.futures.CancelledError:
            raise ClosedError("The client was closed before there was an answer. Make a new client.") from None

    def submit(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        deadline_ms: float | None = None,
        caller_class: str | None = None,
        priority: int | None = None,
        outputs: Sequence[str] = (),
        version: str = "",
    ) -> concurrent.futures.Future[dict[str, Array]]:
        """As `predict`, but returns at once; do not change the arrays until the future is done."""
        loop = self._running()
        return asyncio.run_coroutine_threadsafe(
            self._client.predict(
                model,
                inputs,
                deadline_ms=deadline_ms,
                caller_class=caller_class,
                priority=priority,
                outputs=outputs,
                version=version,
            ),
            loop,
        )

    def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """See AsyncClient.close. May be called twice, and from any thread."""
        with self._lock:
            self._is_closed = True
            end, self._end = self._end, None
        if end is not None and self._pid == os.getpid():
            end.detach()
            _stop(self._loop, self._client, grace_s)

    def _running(self) -> asyncio.AbstractEventLoop:
        loop = self._loop
        if self._is_closed or self._pid != os.getpid():
            raise ClosedError(
                "This client was closed, or belongs to the process before a fork. Nothing was sent. Make a new one."
            )
        if loop is not None:
            return loop
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=self._loop.run_forever, name="tritonpilot-client", daemon=True)
                thread.start()
                # Also when a program ends without close(): what is registered with a server is given back.
                self._end = weakref.finalize(self, _stop, self._loop, self._client, CLOSE_GRACE_S)
            return self._loop


def _stop(loop: asyncio.AbstractEventLoop | None, client: AsyncClient, grace_s: float) -> None:
    if loop is None or loop.is_closed() or not loop.is_running():
        return
    try:
        is_own_thread = asyncio.get_running_loop() is loop  # a forgotten client may be collected in any thread
    except RuntimeError:
        is_own_thread = False
    ended = asyncio.run_coroutine_threadsafe(_end(client, grace_s), loop)
    if not is_own_thread:
        ended.result()


async def _end(client: AsyncClient, grace_s: float) -> None:
    """Close, let the callers' tasks take their answers, and end the loop."""
    await client.close(grace_s)
    this = asyncio.current_task()
    others = [task for task in asyncio.all_tasks() if task is not this]
    if others:
        await asyncio.wait(others, timeout=1.0)
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
