"""Which of the measured points does the SLO want, and why? And which are not beaten in both throughput and P99?

choice = choose(rows, slo_ms=20, now=Setting.of(service), rate_per_s=1000)
choice.row, choice.reason
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tritonpilot.grid.estimate import Estimate
from tritonpilot.grid.row import Row
from tritonpilot.setting import PRECISIONS, Setting

ERRORS_MOST = 0.001  # of the requests: beyond, a point is no candidate
EQUAL = 0.02  # settings whose throughput differs by less are equally fast, whatever their intervals say
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


@dataclass(frozen=True)
class Choice:
    """The recommended row, None where none keeps the SLO, and the paragraph that explains it."""

    row: Row | None
    reason: str


def front(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other one beats in throughput and P99 at once (the Pareto front), from slow to fast."""
    ordered = sorted((row for row in rows if row.point is not None), key=lambda row: (-_throughput(row), _p99_ms(row)))
    found: list[Row] = []
    for row in ordered:
        if not found or _p99_ms(row) < _p99_ms(found[-1]):
            found.append(row)
    return found[::-1]


def choose(
    rows: Sequence[Row], *, slo_ms: float | None, now: Setting | None = None, rate_per_s: float | None = None
) -> Choice:
    """The row with the highest throughput within the SLO, of the cheapest setting where several are equally fast.

    Without an SLO it is the row with the largest quotient of throughput and P99 (Kleinrock's power, 1979). `now` is what
    the service file says, `rate_per_s` what it promises, in requests/s.
    """
    measured = [row for row in rows if row.point is not None]
    if not measured:
        return Choice(None, "Nothing was measured, so nothing can be recommended.")
    sound = [row for row in measured if row.failed_share <= ERRORS_MOST]
    faulty = len(measured) - len(sound)
    errors = (
        f" {_count(faulty, 'point')} with failed requests {'is' if faulty == 1 else 'are'} left out." if faulty else ""
    )
    if not sound:
        return Choice(
            None, f"Under every load more than {ERRORS_MOST:.1%} of the requests failed: no point is recommended."
        )
    if slo_ms is None:
        best = max(sound, key=lambda row: _throughput(row) / _p99_ms(row))
        return Choice(
            best,
            f"The service promises no latency (slo.p99_ms), so this is the point with the best ratio of throughput to P99: "
            f"{best.trial.describe()}, with {_figures(best)}. Highest throughput: {_named(max(sound, key=_throughput))}. "
            f"Lowest P99: {_named(min(sound, key=_p99_ms))}.{errors}",
        )
    within = [row for row in sound if _p99_ms(row) <= slo_ms]
    if not within:
        lowest = min(sound, key=_p99_ms)
        return Choice(
            None,
            f"No measured point keeps P99 within {slo_ms:g} ms. The lowest is {_named(lowest)}: a promise of "
            f"{_round_up(_high_ms(lowest)):g} ms could be kept with that.{errors} Try less load, smaller batches, more instances, "
            "or a faster precision.",
        )
    sure = [row for row in within if _high_ms(row) <= slo_ms] or within
    fastest = max(sure, key=_throughput)
    equal = [row for row in sure if _throughput(row) >= (1 - EQUAL) * _throughput(fastest)]
    best = min(equal, key=lambda row: (*_cost(row.setting), -_throughput(row)))
    return Choice(best, " ".join(_explained(best, sure, equal, measured, slo_ms, now, rate_per_s)) + errors)


def _explained(
    best: Row,
    sure: Sequence[Row],
    equal: Sequence[Row],
    measured: Sequence[Row],
    slo_ms: float,
    now: Setting | None,
    rate_per_s: float | None,
) -> list[str]:
    point = best.point
    assert point is not None
    said = [
        f"{best.trial.describe()}: {_figures(best)}, the highest throughput within the SLO of {slo_ms:g} ms of "
        f"{_count(len(measured), 'measured point')}."
    ]
    if math.isfinite(point.mean_batch):
        waiting = point.queue_ms / (point.queue_ms + point.compute_ms) if point.queue_ms + point.compute_ms else 0.0
        said.append(
            f"Triton executed {point.mean_batch:.1f} rows at a time; requests spent {waiting:.0%} of their time in the model "
            "waiting in its queue."
        )
    if _high_ms(best) > slo_ms:
        said.append(
            f"The interval of its P99 reaches {_high_ms(best):.2f} ms, beyond the SLO: measure longer before you promise it."
        )
    others = {row.setting for row in equal} - {best.setting}
    if others:
        said.append(f"{_count(len(others), 'other setting')} within {EQUAL:.0%} of it {'needs' if len(others) == 1 else 'need'} "
                    "as many cores or more.")  # fmt: skip
    next_best = max((row for row in sure if row.setting != best.setting), key=_throughput, default=None)
    if next_best is not None:
        said.append(f"Next: {_named(next_best)}.")
    if now is not None and best.setting == now:
        said.append("It is what the service file says already.")
    elif now is not None and any(row.setting == now for row in measured):
        own = max((row for row in sure if row.setting == now), key=_throughput, default=None)
        said.append(
            f"The service file's own setting reaches {_throughput(own):,.0f} infer/s within the SLO, so this is "
            f"{_throughput(best) / _throughput(own):.2f} times as much."
            if own is not None
            else "The service file's own setting keeps the SLO under none of these loads."
        )
    if rate_per_s is not None:
        said.append(f"The promised {rate_per_s:g} requests/s {_covered(sure, rate_per_s)}")
    if not best.is_quiet or not best.is_stable:
        said.append(f"Mind that it was {best.remark()}: {'; '.join(best.notes)}.")
    return said


def _covered(sure: Sequence[Row], rate_per_s: float) -> str:
    """What is known about a promised rate (requests/s): what the whole interval of a point says, or that it does not say."""
    rates = [
        Estimate(row.throughput.mean / row.trial.rows, row.throughput.half_width / row.trial.rows, row.throughput.count)
        for row in sure
        if row.throughput is not None
    ]
    if any(rate.low >= rate_per_s * (1 - EQUAL) for rate in rates):
        return "are covered."
    widest = max(rates, key=lambda rate: rate.high)
    if widest.high < rate_per_s:
        return f"are beyond what was measured within the SLO: {max(rate.mean for rate in rates):,.0f}."
    return (
        f"are neither covered nor missed for sure by what was measured within the SLO, "
        f"{_interval(widest.mean, widest.half_width, 0)}: measure more load, or longer, before you promise them."
    )


def _cost(setting: Setting) -> tuple[int, int]:
    """Cores first, then how much was given up of the precision."""
    return setting.instances * max(1, setting.threads), PRECISIONS.index(setting.precision)


def _throughput(row: Row) -> float:
    assert row.throughput is not None
    return row.throughput.mean


def _p99_ms(row: Row) -> float:
    assert row.p99_ms is not None
    return row.p99_ms.mean


def _high_ms(row: Row) -> float:
    """The upper end of the interval of P99, or P99 itself where there is no interval."""
    assert row.p99_ms is not None
    return row.p99_ms.high if math.isfinite(row.p99_ms.high) else row.p99_ms.mean


def _figures(row: Row) -> str:
    assert row.throughput is not None
    assert row.p99_ms is not None
    throughput = _interval(row.throughput.mean, row.throughput.half_width, 0)
    return f"{throughput} infer/s at P99 {_interval(row.p99_ms.mean, row.p99_ms.half_width, 2)} ms"


def _interval(mean: float, half_width: float, places: int) -> str:
    return f"{mean:,.{places}f}" + (f" {PLUS_MINUS} {half_width:,.{places}f}" if math.isfinite(half_width) else "")


def _named(row: Row) -> str:
    return f"{row.trial.describe()} ({_throughput(row):,.0f} infer/s, P99 {_p99_ms(row):.2f} ms)"


def _round_up(value: float) -> float:
    """To two figures, upwards: a promise is a round number."""
    if value <= 0 or not math.isfinite(value):
        return value
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(math.ceil(value / step) * step)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
