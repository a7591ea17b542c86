"""What came of a load test? Percentiles, failures, when P99 recovered after a step, and which limits were broken.

found = figures.of(scenario, calls)              # JSON: found["p99_ms"], found["by_class"]["realtime"]["failures"]
figures.broken(scenario, found)                  # ["P99 of realtime was 71.2 ms, and must stay below 50 ms"]

A latency counts from the time at which the request was due, so that a sender who is late hides nothing. A request that failed
counts as one whose answer never came.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from perf.locust.scenarios import Scenario

MOST_ERRORS = 10


@dataclass(frozen=True, slots=True)
class Call:
    """One request; times in seconds after the start of the load."""

    caller_class: str
    transport: str
    due_s: float
    sent_s: float
    answered_s: float
    error: str = ""

    @property
    def latency_ms(self) -> float:
        """From the time at which it was due to its answer."""
        return math.inf if self.error else (self.answered_s - self.due_s) * 1e3

    @property
    def late_ms(self) -> float:
        """How much later it was sent than it was due."""
        return (self.sent_s - self.due_s) * 1e3


def of(scenario: Scenario, calls: Sequence[Call]) -> dict[str, Any]:
    """All figures of a load test, as JSON takes them: None where there is no number."""
    answered_s = max((call.answered_s for call in calls), default=0.0)
    return {
        "scenario": scenario.name,
        "seconds": scenario.seconds,
        "requests_per_s": round(len(calls) / max(answered_s, scenario.seconds), 2),
        **_summary(calls),
        "by_class": _groups(calls, lambda call: call.caller_class),
        "by_transport": _groups(calls, lambda call: call.transport),
        "sent_late_p99_ms": _ms(quantile([call.late_ms for call in calls], 0.99)),
        "sent_late_max_ms": _ms(max((call.late_ms for call in calls), default=math.nan)),
        "p99_ms_by_second": [_ms(value) for value in p99_by_second(calls)],
        "recovered_after_s": recovered_after_s(calls, scenario.limits.p99_ms),
        "errors": dict(Counter(call.error for call in calls if call.error).most_common(MOST_ERRORS)),
    }


def broken(scenario: Scenario, found: dict[str, Any]) -> list[str]:
    """The limits that were broken, in words; `found` comes from `of`."""
    limits, judged = scenario.limits, found["by_class"].get(scenario.judged)
    if judged is None:
        return [f"no request of {scenario.judged} was sent"]
    said = []
    share = judged["failures"] / judged["requests"]
    if share > limits.failures:
        said.append(
            f"{judged['failures']} of {judged['requests']} requests of {scenario.judged} failed ({share:.3%}), and at most "
            f"{limits.failures:.3%} may"
        )
    if limits.recover_s is not None:
        after_s = found["recovered_after_s"]
        if after_s is None or after_s > limits.recover_s:
            when = "at the end" if after_s is None else f"for {after_s} s after the start"
            said.append(
                f"P99 of a second was {limits.p99_ms:g} ms or more {when}, and may be for {limits.recover_s:g} s at most"
            )
    elif judged["p99_ms"] is None or judged["p99_ms"] >= limits.p99_ms:
        was = "without bound" if judged["p99_ms"] is None else f"{judged['p99_ms']} ms"
        said.append(f"P99 of {scenario.judged} was {was}, and must stay below {limits.p99_ms:g} ms")
    return said


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that is not below that share of them; not a number without any."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else math.nan


def p99_by_second(calls: Sequence[Call]) -> list[float]:
    """P99, ms, of the requests that were due in each second; not a number for a second without any."""
    seconds: dict[int, list[float]] = {}
    for call in calls:
        seconds.setdefault(int(call.due_s), []).append(call.latency_ms)
    return [quantile(seconds.get(second, ()), 0.99) for second in range(max(seconds, default=-1) + 1)]


def recovered_after_s(calls: Sequence[Call], p99_ms: float) -> int | None:
    """Whole seconds after which P99 of every second stays below `p99_ms`: 0 when it always does, None when never."""
    by_second = p99_by_second(calls)
    bad = [second for second, value in enumerate(by_second) if value >= p99_ms]
    if not bad:
        return 0 if by_second else None
    return bad[-1] + 1 if bad[-1] + 1 < len(by_second) else None


def _groups(calls: Sequence[Call], key: Callable[[Call], str]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Call]] = {}
    for call in calls:
        groups.setdefault(key(call), []).append(call)
    return {name: _summary(group) for name, group in groups.items()}


def _summary(calls: Sequence[Call]) -> dict[str, Any]:
    latencies = [call.latency_ms for call in calls]
    return {
        "requests": len(calls),
        "failures": sum(bool(call.error) for call in calls),
        "p50_ms": _ms(quantile(latencies, 0.5)),
        "p99_ms": _ms(quantile(latencies, 0.99)),
        "max_ms": _ms(max(latencies, default=math.nan)),
    }


def _ms(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
