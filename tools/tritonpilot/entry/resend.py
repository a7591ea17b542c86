"""Which request that Triton did not answer is sent again? One that nobody has computed, until its caller's deadline.

    deaths = Deaths()
    deaths.never_reached(said, now_s)      # None: another error; True: the stub was dead before the request came to it

A stub that dies takes the requests of one execution with it. Triton 2.51 goes on to give it executions, each of which fails after a
second, until somebody heals the model (`tritonpilot supervise`). What fails first on an instance was in its stub, or may have been:
it could be what killed it, and is sent again only for callers who ask for that (`tritonpilot-retry: once`), once. What fails later
on the same instance never reached a stub. Neither did what finds no Triton at its port.
"""

from __future__ import annotations

import math
import re

RETRY_HEADER = "tritonpilot-retry"
ONCE = "once"
#: How long a request without a deadline waits for a Triton or a model that comes back.
PATIENCE_S = 10.0
PAUSE_S = 0.1
PAUSE_BROKEN_S = 0.5  # a tritonserver that is dying still lets the system accept connections for it
#: The requests of one execution fail within this time; the next execution on a dead stub takes a second.
TOGETHER_S = 0.5
#: An instance that has failed nothing for so long was healed meanwhile.
FORGET_S = 3.0
_DEAD = re.compile(rb"Stub process '([^']{1,300})' is not healthy")


class Deaths:
    """The stubs that died, as the errors of their requests tell."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[float, float]] = {}  # instance -> its first failure, and its last

    def never_reached(self, said: bytes, now_s: float) -> bool | None:
        """Whether a request that failed with these words came to a stub that was dead already; None: no stub died."""
        found = _DEAD.search(said)
        if found is None:
            return None
        instance = found[1]
        first_s, last_s = self._seen.get(instance, (now_s, now_s))
        if now_s - last_s > FORGET_S:
            first_s = now_s
        self._seen[instance] = first_s, now_s
        return now_s - first_s > TOGETHER_S


class Again:
    """How often one request may be sent again, and how long."""

    __slots__ = ("_asks", "_first_s", "_patience_s")

    def __init__(self, asks: bool, has_deadline: bool, patience_s: float = PATIENCE_S) -> None:
        self._asks = asks
        self._patience_s = math.inf if has_deadline else patience_s  # the gate ends the wait at a deadline
        self._first_s = 0.0

    def may(self, never_reached: bool, now_s: float) -> bool:
        """Whether it is sent again now."""
        if not never_reached:
            if not self._asks:
                return False
            self._asks = False
        self._first_s = self._first_s or now_s
        return now_s - self._first_s < self._patience_s
