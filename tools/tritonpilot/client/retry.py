"""Is a refused request sent again, and when? A pure decision.

decision = decide(Policy(), attempt=1, is_retryable=True, left_s=0.05, tokens=10.0, draw=random())
decision.wait_s is None       # then the error is the answer; decision.reason says why

Waits grow exponentially with full jitter: callers that were refused together do not come back together. A budget keeps
repeats to a share of all requests, so that a server that is down or overloaded is not sent a multiple of the load.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How often and how fast a retryable rejection is repeated. `attempts=1` switches repeats off."""

    attempts: int = 5
    first_wait_ms: float = 10.0
    longest_wait_ms: float = 500.0
    budget_share: float = 0.2  # repeats per request sent, in the long run
    budget_most: float = 50.0  # repeats that may be saved up


@dataclass(frozen=True)
class Decision:
    """Wait that long and send again, or (None) give up."""

    wait_s: float | None
    reason: str


def decide(
    policy: Policy,
    *,
    attempt: int,
    is_retryable: bool,
    left_s: float,
    tokens: float,
    draw: float,
    has_other_endpoint: bool = False,
    retry_after_s: float = 0.0,
) -> Decision:
    """What to do after attempt number `attempt` (from 1) failed, `left_s` before the deadline, with `draw` in [0, 1).

    `retry_after_s` is how long the server asked to be left alone; the drawn wait comes on top.
    """
    if not is_retryable:
        return Decision(None, "this refusal is final")
    if attempt >= policy.attempts:
        return Decision(None, f"refused {attempt} times")
    if tokens < 1:
        return Decision(None, "the budget for repeats is spent")
    if has_other_endpoint:
        return Decision(0.0, "another endpoint has not been asked")
    longest_s = min(policy.longest_wait_ms, policy.first_wait_ms * 2 ** (attempt - 1)) / 1e3
    wait_s = retry_after_s + longest_s * draw
    if wait_s >= left_s:
        return Decision(None, "the deadline comes before the next attempt")
    return Decision(wait_s, f"attempt {attempt + 1} of {policy.attempts}")


class Budget:
    """Tokens for repeats: every request adds a share of one, every repeat takes one."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.tokens = policy.budget_most

    def sent(self) -> None:
        """A request was sent for the first time."""
        self.tokens = min(self._policy.budget_most, self.tokens + self._policy.budget_share)

    def repeated(self) -> None:
        """A request is sent again."""
        self.tokens -= 1
