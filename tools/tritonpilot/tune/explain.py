"""Why this setting? One paragraph for a person, from what was simulated and measured.

paragraph(judge, ranked, chosen, now)        # "Chosen for 3,000 requests/s within 20 ms: delay 2000 us, ..."
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tritonpilot.outcome import Outcome
from tritonpilot.setting import Setting
from tritonpilot.tune.search import ENOUGH_ROOM, KEPT, TIERS, Judge, Judged, Reachable
from tritonpilot.tune.wish import Wish

EQUAL_MS = 0.05  # a P99 that differs by less, as a part, is the same


def paragraph(
    judge: Judge,
    chosen: Judged,
    now: Setting,
    settings: Sequence[Setting],
    *,
    is_reached: bool = True,
    smaller: Judged | None = None,
) -> str:
    """What is chosen, what batches do for this model, what a step to each side would change, and what is set now.

    Without `is_reached` nothing is chosen, and `unreachable` says what comes nearest. `smaller` would do better, with batches
    that refuse requests which are answered today.
    """
    wish, setting, found = judge.wish, chosen.setting, chosen.simulated
    sentences = [
        _batches(judge, chosen),
        f"Simulated, {'it' if is_reached else setting.describe()} executes {_number(found.mean_rows)} rows at a time, keeps its "
        f"instance{'s' * (setting.instances > 1)} {found.utilisation:.0%} busy and answers {found.outcome.attainment:.1%} of the "
        f"requests in time (P99 {_ms(found.outcome.p_ms(0.99))}){_room(chosen)}.",
        *_neighbours(judge, chosen, settings),
    ]
    if is_reached:
        count = f"{len(settings)} setting{'s' * (len(settings) != 1)}"
        sentences.insert(0, f"For {_traffic(wish)}, {setting.describe()} is chosen of {count}.")
    if now != setting:
        sentences.append(_compared(judge, chosen, now))
    if setting.max_batch_size < now.max_batch_size:
        sentences.append(
            f"Requests of more than {setting.max_batch_size} rows will be refused: max_batch_size is also the largest request, and "
            f"up to {now.max_batch_size} rows are answered today."
        )
    if smaller is not None:
        sentences.append(_smaller(smaller, chosen, now))
    return " ".join(sentences)


def unreachable(wish: Wish, best: Judged, found: Reachable, measured: Outcome | None = None) -> str:
    """What cannot be had, what comes nearest, and what could be promised instead. `measured`: the best on the real server."""
    missed = [stream.name for stream, kept in zip(wish.streams, best.kept, strict=True) if not kept]
    if missed or measured is None:
        what = (
            f"No setting keeps the promise to {', '.join(missed)} at {_traffic(wish)}: the best, {best.setting.describe()}, "
            f"answers {best.simulated.outcome.attainment:.1%} in time, and {KEPT:.0%} are promised."
        )
    else:
        missed = [name for name, each in measured.by_stream.items() if each.attainment < KEPT]
        what = (
            f"On the real server no setting that was verified keeps the promise to {', '.join(missed)} at {_traffic(wish)}: the "
            f"best, {best.setting.describe()}, answers {measured.attainment:.1%} in time there, and {KEPT:.0%} are promised. The "
            "simulator, by which the following is reachable, is too hopeful here."
        )
    shortest = f"a P99 of {_ms(found.p99_ms)} at the rate asked for ({found.at_p99.describe()})"
    if found.at_rate is None:
        return f"{what} No rate is reachable within that SLO" + (
            f", but {shortest}." if found.p99_ms < math.inf else "."
        )
    within = f"{_per_second(found.rate_per_s)} within that SLO ({found.at_rate.describe()})"
    return f"{what} Reachable are {within}" + (f", or {shortest}." if found.p99_ms < math.inf else ".")


def _traffic(wish: Wish) -> str:
    streams = [
        _per_second(stream.rate_per_s)
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


def _smaller(smaller: Judged, chosen: Judged, now: Setting) -> str:
    """What smaller batches would bring, and what they would refuse."""
    outcome, rows = smaller.simulated.outcome, smaller.setting.max_batch_size
    if smaller.keeps_all and chosen.keeps_all and smaller.room is not None:
        would = f"would stand {'at least ' * (smaller.room >= ENOUGH_ROOM)}{smaller.room:.2g} times the rate"
    else:
        would = f"would answer {outcome.attainment:.1%} in time"
    return (
        f"A smaller max_batch_size, as in {smaller.setting.describe()}, {would}, simulated, but refuses requests of more than "
        f"{rows} row{'s' * (rows != 1)}, and up to {now.max_batch_size} are answered today; --max-batch {rows} allows it."
    )


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


def _per_second(rate: float) -> str:
    return f"{rate:,.0f} requests/s" if rate >= 10 else f"{rate:.2g} requests/s"


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value:,.0f} ms"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
