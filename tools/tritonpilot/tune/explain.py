"""Why this setting? One paragraph for a person, from what was simulated and measured.

paragraph(judge, ranked, chosen, now)        # "Chosen for 3,000 requests/s within 20 ms: delay 2000 us, ..."
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tritonpilot.setting import Setting
from tritonpilot.tune.search import ENOUGH_ROOM, KEPT, TIERS, Judge, Judged, Reachable
from tritonpilot.tune.wish import Wish

EQUAL_MS = 0.05  # a P99 that differs by less, as a part, is the same


def paragraph(judge: Judge, chosen: Judged, now: Setting, settings: Sequence[Setting]) -> str:
    """What is chosen, what batches do for this model, what a step to each side would change, and what is set now."""
    wish, setting, found = judge.wish, chosen.setting, chosen.simulated
    sentences = [
        f"For {_traffic(wish)}, {setting.describe()} is chosen of {len(settings)} settings.",
        _batches(judge, chosen),
        f"Simulated, it executes {_number(found.mean_rows)} rows at a time, keeps its instance{'s' * (setting.instances > 1)} "
        f"{found.utilisation:.0%} busy and answers {found.outcome.attainment:.1%} of the requests in time "
        f"(P99 {_ms(found.outcome.p_ms(0.99))}){_room(chosen)}.",
        *_neighbours(judge, chosen, settings),
    ]
    if now != setting:
        sentences.append(_compared(judge, chosen, now))
    return " ".join(sentences)


def unreachable(wish: Wish, best: Judged, found: Reachable) -> str:
    """What cannot be had, what comes nearest, and what could be promised instead."""
    missed = ", ".join(stream.name for stream, kept in zip(wish.streams, best.kept, strict=True) if not kept)
    instead = (
        f"{found.rate_per_s:,.0f} requests/s within that SLO ({found.at_rate.describe()})"
        if found.at_rate is not None
        else "no rate at all, for a lone request takes longer than that"
    )
    return (
        f"No setting keeps the promise to {missed} at {_traffic(wish)}: the best, {best.setting.describe()}, answers "
        f"{best.simulated.outcome.attainment:.1%} in time, and {KEPT:.0%} are promised. Reachable are {instead}, or a P99 of "
        f"{_ms(found.p99_ms)} at that rate ({found.at_p99.describe()})."
    )


def _traffic(wish: Wish) -> str:
    streams = [
        f"{stream.rate_per_s:,.0f} requests/s"
        + (f" of {stream.name}" if len(wish.streams) > 1 else "")
        + (f" within {stream.slo_ms:g} ms" if math.isfinite(stream.slo_ms) else " without a promise")
        for stream in wish.streams
    ]
    return " and ".join(streams)


def _batches(judge: Judge, chosen: Judged) -> str:
    """What a larger batch costs: the reason for every delay."""
    costs = judge.costs[(chosen.setting.precision, chosen.setting.threads)]
    rows = (
        max(2, min(chosen.setting.max_batch_size, costs.rows[-1]))
        if chosen.setting.max_batch_size > 1
        else costs.rows[-1]
    )
    one, many = costs.execution_mean_us(1), costs.execution_mean_us(rows)
    if rows <= 1 or many <= 0:
        return f"An execution of one row takes {_ms(one / 1e3)}."
    return (
        f"An execution of one row takes {_ms(one / 1e3)} and one of {rows} rows {_ms(many / 1e3)}, "
        f"{rows * one / many:.1f} times the rows in the same time."
    )


def _room(chosen: Judged) -> str:
    if chosen.room is None:
        return ""
    return f"; it would stand {'at least ' * (chosen.room >= ENOUGH_ROOM)}{chosen.room:.2g} times the rate"


def _neighbours(judge: Judge, chosen: Judged, settings: Sequence[Setting]) -> list[str]:
    """What the next smaller and larger delay and batch would do."""
    sentences = []
    for name, word in (("queue_delay_us", "delay"), ("max_batch_size", "batch")):
        alike = [each for each in settings if _but(each, name) == _but(chosen.setting, name)]
        ordered = sorted(alike, key=lambda each: int(getattr(each, name)))
        mine = int(getattr(chosen.setting, name))
        shorter = [each for each in ordered if int(getattr(each, name)) < mine][-1:]
        longer = [each for each in ordered if int(getattr(each, name)) > mine][:1]
        for each, how in [(each, "smaller") for each in shorter] + [(each, "larger") for each in longer]:
            other = judge.judge(replace(each, max_queue_sizes=chosen.setting.max_queue_sizes), TIERS[-1][0])
            sentences.append(f"The next {how} {word}, {getattr(each, name)}, {_against(other, chosen)}.")
    return sentences


def _but(setting: Setting, name: str) -> dict[str, object]:
    """The setting without one of its values, and without limits, which are chosen at the end."""
    return {key: value for key, value in setting.as_dict().items() if key not in (name, "max_queue_sizes")}


def _compared(judge: Judge, chosen: Judged, now: Setting) -> str:
    if (now.precision, now.threads) not in judge.costs:
        return f"Set now is {now.describe()}."
    return f"What is set now, {now.describe()}, {_against(judge.judge(now, TIERS[-1][0]), chosen)}."


def _against(other: Judged, chosen: Judged) -> str:
    """The other's goodput and P99 beside the chosen one's, in words."""
    one, two = other.simulated.outcome, chosen.simulated.outcome
    if one.attainment < two.attainment - 0.005:
        return f"answers {one.attainment:.1%} in time"
    if not math.isfinite(one.p_ms(0.99)) or abs(one.p_ms(0.99) / two.p_ms(0.99) - 1) < EQUAL_MS:
        return "is no better"
    return f"has a P99 of {_ms(one.p_ms(0.99))}"


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
