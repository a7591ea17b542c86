"""What does one sending process get to do, and what does it bring back?

Job(target, bodies, at_s, place)  ->  a sender  ->  Log(sent_s, done_s, error, ...)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tritonpilot.arrivals import FloatArray
from tritonpilot.load.target import Target
from tritonpilot.outcome import REJECTED, TIMED_OUT

PATIENCE_S = 60.0
CONNECTIONS = 4096


@dataclass(frozen=True)
class Job:
    """Requests in the order of their time, and the bytes that each sends."""

    target: Target
    model: str
    content: tuple[bytes, ...]
    headers: tuple[Mapping[str, str], ...]
    at_s: FloatArray  # [n], since the beginning
    place: npt.NDArray[np.int32]  # [n], index into content
    patience_s: float = PATIENCE_S  # a request without an answer is given up after so long
    connections: int = CONNECTIONS  # most at once, over HTTP


@dataclass
class Log:
    """What became of the requests, seconds since the beginning; `error` is 0 or 1 + the index into `kinds`."""

    sent_s: FloatArray
    done_s: FloatArray
    error: npt.NDArray[np.int16]
    kinds: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)  # of the first error of each kind
    cpu_s: float = 0.0  # of the process, while it sent
    wall_s: float = 0.0  # of the same time: from the beginning to the last request that was due
    most_in_flight: int = 0
    waited_for_connection: int = 0  # requests that were due while every connection was taken
    waited_for_new: int = 0  # that were due while too many connections had no first answer yet
    # Whether a request waited so because the server stood still.
    is_held: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    @classmethod
    def of(cls, count: int) -> Log:
        """Nothing was sent yet."""
        empty = np.full(count, np.nan)
        return cls(empty, empty.copy(), np.zeros(count, dtype=np.int16), is_held=np.zeros(count, dtype=bool))

    def fail(self, request: int, kind: str, text: str, now_s: float) -> None:
        """Note that a request failed."""
        if kind not in self.texts:
            self.texts[kind] = text
            self.kinds.append(kind)
        self.error[request] = 1 + self.kinds.index(kind)
        self.done_s[request] = now_s


def kind_of(status: str, text: str) -> str:
    """How a server's refusal is counted: by Triton's two words about queues, else by its status."""
    words = text.lower()
    if "maximum queue size" in words:
        return REJECTED
    return TIMED_OUT if "timeout expired" in words else status
