"""A load of perf/generations.py from a process and a session of its own: what else its starter does does not make it late.

with LoadApart(server.endpoints, rates) as load:
    load.wait_for_answers()
load.take()
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from perf.generations import TIMEOUT_S, Call, Load, Rate
from tritonpilot.errors import MeasurementError
from tritonpilot.server import Endpoints


class LoadApart:
    """As Load. `take` disturbs the load while it runs: call it afterwards."""

    def __init__(self, endpoints: Endpoints, rates: Sequence[Rate]) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._ours, self._theirs = self._context.Pipe()
        self._rest: list[Call] = []
        self._process = self._context.Process(target=_send, args=(self._theirs, endpoints, list(rates)), daemon=True)

    def __enter__(self) -> LoadApart:
        self._process.start()
        self._theirs.close()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._rest = self._asked("end")
        finally:
            self._process.join(TIMEOUT_S)
            self._process.kill()

    def wait_for_answers(self) -> None:
        """As Load's."""
        self._asked("wait")

    def take(self) -> list[Call]:
        """As Load's."""
        if self._process.is_alive():
            self._rest += self._asked("take")
        rest, self._rest = self._rest, []
        return rest

    def _asked(self, word: str) -> Any:
        try:
            self._ours.send(word)
            found = self._ours.recv()
        except (OSError, EOFError) as error:
            raise MeasurementError(f"The sender of the load ended: {error!r}. Nothing is reported. Repeat.") from error
        if isinstance(found, MeasurementError):
            raise found
        return found


def _send(starter: Connection, endpoints: Endpoints, rates: Sequence[Rate]) -> None:
    """In the child."""
    os.setsid()  # Linux shares cores between sessions first (autogroup of sched(7))
    try:
        with Load(endpoints, rates) as load:
            while (word := starter.recv()) != "end":
                if word == "wait":
                    load.wait_for_answers()
                starter.send(load.take() if word == "take" else None)
        starter.send(load.take())
    except MeasurementError as error:
        starter.send(error)
    except EOFError:  # the starter has ended
        return
