"""A server of asyncio in a thread of its own, for tests that are its clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

PATIENCE_S = 20.0
Running = TypeVar("Running", bound="LoopThread")


class LoopThread:
    """Starts when its block begins (`start`) and ends with it (`close`); both, and what `do` is given, run on its loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self: Running) -> Running:
        self._thread.start()
        self.do(self.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()

    async def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE_S)
