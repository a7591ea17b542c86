"""Fifty new models in a row, under load: does anybody notice but by better answers?

`ctr` and a pipeline of two networks are swapped in turn while callers ask both over HTTP and gRPC at random times. Every answer
tells which generation computed it (perf/generations.py): one of two generations, or of one that was retired, is seen.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from perf import generations, memory
from perf.apart import LoadApart
from perf.frame import Bench, NoisyRoundError, Outcome
from perf.generations import Call, Rate
from perf.swapping import Ran, Site, switched
from tritonpilot.errors import MeasurementError

SWAPS, QUICK_SWAPS = 50, 2
SETTLE = 2  # swaps before the first that counts: what the server allocates once, it has then
EVERY = 5  # each fifth is of the pipeline's members together
REST_S, QUICK_REST_S = 4.0, 4.0  # of steady load before each swap
CALM_S = 1.0  # after a swap, until retired instances are gone
CTR_PER_S, PAIR_PER_S = 100.0, 25.0  # over each protocol
SLOWER = 1.5
#: The sum of the resident memory may be so much larger at the end: what Python and the allocator keep differs between runs.
GROWN_MB = 40.0


@dataclass(frozen=True)
class Swapped:
    """A swap that was carried out, after a time in which nothing was."""

    service: str
    generation: int
    rest_s: tuple[float, float]
    ran: Ran


@dataclass(frozen=True)
class Judged:
    """What the callers saw."""

    requests: int
    failed: int
    mixed: int
    """Answers of several generations, or of values that no generation gives."""
    stale: int
    """Answers of a generation that did not serve between their question and them."""
    strangers: int
    """Versions under which two generations answered."""
    errors: tuple[str, ...]


def swap_50(bench: Bench) -> Outcome:
    """P99 of the calls during 50 swaps, of the P99 in the times between them."""
    (found,) = bench.rounds(1, lambda: _round(bench), check=lambda: None)
    return found


def _round(bench: Bench) -> Outcome:
    with switched([generations.ctr, generations.pair], bench.say, exit_timeout_s=5) as site:
        rates = [
            Rate(subject, over, CTR_PER_S if subject.service == "ctr" else PAIR_PER_S)
            for subject in site.subjects.values()
            for over in ("http", "grpc")
        ]
        count = SETTLE + (QUICK_SWAPS if bench.quick else SWAPS)
        for number in range(count):  # not under load, whose thread shares this process
            site.files(_service(number), number + 1)
        with LoadApart(site.server.endpoints, rates) as load:
            load.wait_for_answers()
            done = [_swap(site, number, 0.0) for number in range(SETTLE)]
            time.sleep(CALM_S)
            before_mb = _memory_mb(site)
            for number in range(SETTLE, count):
                done.append(_swap(site, number, QUICK_REST_S if bench.quick else REST_S))
                site.server.check_alive()
                bench.say(f"{done[-1].service} generation {done[-1].generation} after {_took_s(done[-1]):.1f} s")
            time.sleep(CALM_S)
            after_mb = _memory_mb(site)
        calls = load.take()
        left = site.left()
    judged = judge(calls, done)
    counted = done[SETTLE:]
    steady = latencies(calls, [each.rest_s for each in counted])
    during = latencies(calls, [(each.ran.began_s, each.ran.ended_s) for each in counted])
    if not len(steady) or not len(during):
        raise NoisyRoundError("there was no answer to compare")
    grown = {name: after_mb[name] - before_mb[name] for name in before_mb}
    ratio = float(np.quantile(during, 0.99) / np.quantile(steady, 0.99))
    return Outcome(
        ratio,
        ok=judged.failed == judged.mixed == judged.stale == judged.strangers == 0
        and sum(grown.values()) < GROWN_MB
        and not left,
        details={
            "swaps": len(counted),
            "of_the_pipeline": sum(each.service == "pair" for each in counted),
            "requests": judged.requests,
            "failed": judged.failed,
            "of_several_generations": judged.mixed,
            "of_a_retired_generation": judged.stale,
            "versions_of_several_generations": judged.strangers,
            "errors": list(judged.errors),
            "steady_p99_ms": round(float(np.quantile(steady, 0.99)), 2),
            "during_p99_ms": round(float(np.quantile(during, 0.99)), 2),
            "during_max_ms": round(float(during.max()), 1),
            "p99_of_each_swap_ms": [
                round(float(np.quantile(latencies(calls, [(each.ran.began_s, each.ran.ended_s)]), 0.99)), 1)
                for each in counted
            ],
            "swap_s": {"median": round(float(np.median([_took_s(each) for each in counted])), 2),
                       "most": round(max(_took_s(each) for each in counted), 2)},
            "memory_before_mb": {name: round(value, 1) for name, value in before_mb.items()},
            "memory_grown_mb": {name: round(value, 1) for name, value in grown.items()},
            "left_behind": left,
        },
    )  # fmt: skip


def judge(calls: Sequence[Call], done: Sequence[Swapped]) -> Judged:
    """Whether every call was answered, by one generation, and by one that served then.

    A generation may answer from the beginning of the swap to it on, and until the end of the swap to the next one.
    """
    answered = [call for call in calls if not call.error]
    of_service: dict[str, list[Swapped]] = defaultdict(list)
    for each in done:
        of_service[each.service].append(each)
    by_version: dict[tuple[str, str], set[int]] = defaultdict(set)
    mixed = stale = 0
    for call in answered:
        if len(call.generations) != 1 or -1 in call.generations:
            mixed += 1
            continue
        by_version[call.service, call.version] |= call.generations
        stale += not call.generations <= _serving(call, of_service[call.service])
    # An ensemble's own version stays when its members change.
    strangers = sum(len(found) > 1 for (service, _), found in by_version.items() if service == "ctr")
    errors = sorted({call.error for call in calls if call.error})
    return Judged(len(calls), len(calls) - len(answered), mixed, stale, strangers, tuple(errors[:10]))


def latencies(calls: Iterable[Call], spans: Sequence[tuple[float, float]]) -> npt.NDArray[np.float64]:
    """Of the answered calls that were due in one of the spans, ms."""
    starts = np.array([start for start, _ in spans])
    ends = np.array([end for _, end in spans])
    answered = [call for call in calls if not call.error]
    due = np.array([call.due_s for call in answered])
    place = np.searchsorted(starts, due, side="right") - 1
    inside = (place >= 0) & (due < ends[place])
    found: npt.NDArray[np.float64] = np.array([call.latency_ms for call in answered])[inside]
    return found


def _serving(call: Call, swaps: Sequence[Swapped]) -> set[int]:
    """The generations that may have answered it."""
    found = set()
    generation, since_s = 0, -np.inf
    for each in swaps:
        if since_s <= call.done_s and call.sent_s <= each.ran.ended_s:
            found.add(generation)
        generation, since_s = each.generation, each.ran.began_s
    return found | ({generation} if since_s <= call.done_s else set())


def _swap(site: Site, number: int, rest_s: float) -> Swapped:
    service = _service(number)
    began_s = time.perf_counter()
    time.sleep(rest_s)
    rested_s = time.perf_counter()
    ran = site.swap(service, number + 1)
    ended_s = time.perf_counter()
    time.sleep(CALM_S)
    return Swapped(service, number + 1, (began_s, rested_s), Ran(ran.began_s, ended_s, ran.code, ran.said, ran.told))


def _service(number: int) -> str:
    return "pair" if number % EVERY == SETTLE - 1 else "ctr"


def _took_s(each: Swapped) -> float:
    return each.ran.ended_s - each.ran.began_s


def _memory_mb(site: Site) -> dict[str, float]:
    """Of tritonserver, of its stubs together, and of the shared memory that they exchange tensors in."""
    stubs = memory.stubs(site.server.pid)
    if not stubs:
        raise MeasurementError("The server has no stubs. Nothing is reported. Look at its log.")
    return {
        "tritonserver": memory.of_process(site.server.pid).rss_mb,
        "stubs": sum(memory.of_process(pid).anonymous_mb for pid in stubs.values()),
        "shared": sum(memory.own_regions().values()),
    }
