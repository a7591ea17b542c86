"""Measure a little, simulate a lot, verify the best: the whole way from a service and a wish to a setting.

found = tune(service, Wish.of(service, rate_per_s=2000), cpus=[0], on_progress=print)
found.setting, found.reason, found.as_dict()
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tritonpilot import build, load, machine, model_config
from tritonpilot.arrivals import traffic
from tritonpilot.costs import Costs
from tritonpilot.emulated import noted
from tritonpilot.errors import MeasurementError, ServerError, SpecError
from tritonpilot.model_config import Target
from tritonpilot.outcome import REJECTED, TIMED_OUT, Outcome
from tritonpilot.profile import Profile, profile, speed
from tritonpilot.setting import Setting
from tritonpilot.simulate import Batcher
from tritonpilot.spec import Service
from tritonpilot.stage import Stage
from tritonpilot.tune import explain
from tritonpilot.tune.search import (
    KEPT,
    TIERS,
    Judge,
    Judged,
    Kind,
    Reachable,
    differing,
    highest_rates,
    reachable,
    search,
    smaller_would_do_better,
    with_limits,
)
from tritonpilot.tune.wish import Wish, runs_on_cpu

VERIFIED = 3
VERIFY_S = 6.0
BELOW_HIGHEST = 0.95  # without a rate, verify a little below the highest that the simulator finds
LOWERED, LOWERED_MOST = 0.92, 4  # and lower again, so often, while the real server does not keep the promises
EQUAL_MEASURED = 0.02  # goodputs that a few seconds on a real machine cannot tell apart
SPEED_CHANGE = 0.15  # of the machine since the costs were measured, that is worth telling
PROFILE_DELAY_US = 500  # profile's: bursts become one batch
FEW_ROWS = 0.02  # so many of a load's requests may fail for another reason than the queue: the model's own bad rows
VERIFY_REQUESTS_MOST = 20_000_000  # in one verification
PROFILED_MS = 100.0  # batches that take so long are measured also for a shorter SLO: they form where requests pile up
MOST_BYTES = 64 << 20  # of a batch that is tried for the costs
SHOWN = 10  # of the simulated settings, in the evidence
IN_TIME = (REJECTED, TIMED_OUT)  # what the queue says of a request when more come than it can serve


@dataclass(frozen=True)
class Verified:
    """A setting in the simulator and on the real server, under the same traffic with other arrivals."""

    judged: Judged
    measured: Outcome
    memory_mb: float
    note: str = ""  # what disturbed the measurement

    @property
    def keeps_all(self) -> bool:
        return all(not each.attainment < KEPT for each in self.measured.by_stream.values())


@dataclass(frozen=True)
class Tuned:
    """What was chosen, why, and what it took: `seconds` of measuring and of simulating."""

    service: str
    now: Setting
    wish: Wish
    setting: Setting
    reason: str
    is_reached: bool  # every promise is kept, simulated and measured
    verified: tuple[Verified, ...]
    ranked: tuple[Judged, ...]  # the best of the simulated ones
    reachable: Reachable | None
    costs: Mapping[Kind, Costs]
    settings: int
    simulations: int
    simulated_requests: int
    seconds: Mapping[str, float]
    notes: tuple[str, ...] = ()
    details: Mapping[str, object] = field(default_factory=dict)

    @property
    def measured(self) -> Outcome | None:
        """What the real server made of the chosen setting; None when nothing was verified."""
        return next((each.measured for each in self.verified if each.judged.setting == self.setting), None)

    @property
    def seconds_in_all(self) -> float:
        """From the start to the choice."""
        return sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        """The evidence, for JSON."""
        return {
            "service": self.service,
            "streams": [_stream(each) for each in self.wish.streams],
            "is_rate_open": self.wish.is_rate_open,
            "now": self.now.as_dict(),
            "chosen": self.setting.as_dict() if self.is_reached else None,
            "nearest": None if self.is_reached else self.setting.as_dict(),
            "reason": self.reason,
            "is_reached": self.is_reached,
            "reachable": _reachable(self.reachable),
            "verified": [
                {
                    **each.judged.setting.as_dict(),
                    "simulated": each.judged.simulated.outcome.as_dict(),
                    "measured": each.measured.as_dict(),
                    "memory_mb": round(each.memory_mb, 1),
                    "note": each.note,
                }
                for each in self.verified
            ],
            "simulated": [_judged(each) for each in self.ranked[:SHOWN]],
            "settings": self.settings,
            "simulations": self.simulations,
            "simulated_requests": self.simulated_requests,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "costs": [
                {"precision": precision, "threads": threads, **costs.as_dict()}
                for (precision, threads), costs in self.costs.items()
            ],
            "notes": list(self.notes),
            "machine": machine.describe(),
            **self.details,
        }


def tune(
    service: Service,
    wish: Wish,
    *,
    models: Path = Path("models"),
    cpus: Sequence[int] | None = None,
    client_cpus: Sequence[int] | None = None,
    costs: Mapping[Kind, Costs] | None = None,
    verified: int = VERIFIED,
    verify_s: float = VERIFY_S,
    most_per_s: float = math.inf,
    target: Target = "auto",
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> Tuned:
    """Choose a setting for one Triton model (see `setting.find`) on a server of its own.

    The server is pinned to `cpus`, the load that verifies to `client_cpus`. `costs` of an earlier run (precision and threads ->
    Costs) are not measured again; with `verified` 0 nothing is. Where the wish
    leaves the rate open, it is at most `most_per_s`: what the sender can make. Nothing is written. Raises SpecError for limits that
    contradict each other or the service, MeasurementError when the model fails on its own samples, ServerError and HostError
    as the server does.
    """
    say = on_progress or (lambda _: None)
    cores = len(cpus) if cpus else len(os.sched_getaffinity(0))
    now = Setting.of(service)
    settings = wish.settings(service, cores)  # before anything is started
    smaller = wish.smaller(service, cores)
    if verified:
        _check_can_be_sent(wish, verify_s)
        most_per_s = min(most_per_s, VERIFY_REQUESTS_MOST / verify_s)
    clock = _Clock()
    with Stage(service, models, cpus=cpus, target=target, on_progress=say) as stage:
        with clock("measuring"):
            known = dict(costs or {})
            profiles: dict[Kind, Profile] = {}
            memory: dict[Kind, tuple[float, float]] = {}
            for kind in wish.space.kinds(service, cores):
                if kind not in known or wish.memory_mb is not None:
                    profiles[kind] = _profiled(stage, kind, now, settings, wish, cores, say)
                    known[kind] = profiles[kind].costs
                    memory[kind] = _memory(stage)
        settings = _within_memory(service, settings, wish.memory_mb, memory)
        smaller = _in_time(_within_memory(service, smaller, wish.memory_mb, memory), known, wish)
        settings = _in_time(settings, known, wish) or _with_least_batch(settings)
        with clock("simulating"):
            judge = Judge(batcher_of(service, target), known, wish, seed)
            wish, judge = _with_rate(judge, settings, most_per_s, say)
            ranked = search(judge, settings, say)
            best = [with_limits(judge, each) for each in differing(ranked, max(1, verified))]
        seen: list[Verified] = []
        notes: list[str] = []
        lowered = 0
        while verified:
            with clock("measuring"):
                found, failed = _verified_in_turn(
                    stage, judge, best[:verified], profiles, verify_s, seed + 1, client_cpus, say
                )
            seen, notes = found or seen, notes + failed
            if not found or not wish.is_rate_open or any(each.keeps_all for each in seen) or lowered == LOWERED_MOST:
                break
            lowered += 1
            notes.append(
                f"at {wish.rate_per_s:.0f} requests/s the real server kept the promises with none of {len(found)}"
            )
            say(f"{notes[-1]}; {LOWERED:.0%} of that rate is tried")
            with clock("simulating"):
                wish = replace(wish, streams=wish.at(LOWERED))
                judge = replace(judge, wish=wish, _traffic={})
                best = [judge.with_room(_winner(seen, best).setting, *TIERS[-1][:2])]
        if verified and not seen:
            raise MeasurementError(
                f"None of the {len(best)} best settings of {service.service} could be verified on the real server. "
                f"Nothing was changed. The last one: {notes[-1]}"
            )
    with clock("simulating"):
        chosen = _winner(seen, best)
        is_reached = chosen.keeps_all and all(v.keeps_all for v in seen if v.judged is chosen)
        instead = None if is_reached else reachable(judge, settings)
        hint = smaller_would_do_better(judge, chosen, smaller)
        reason = explain.paragraph(judge, chosen, now, settings, is_reached=is_reached, smaller=hint)
    measured = next((v for v in seen if v.judged is chosen), None)
    if measured is not None:
        reason += f" {_measured_in_words(measured, len(seen))}"
    if instead is not None:
        outcome = None if measured is None else measured.measured
        reason = f"{explain.unreachable(wish, chosen, instead, outcome)} {reason}"
    return Tuned(
        service=service.service,
        now=now,
        wish=wish,
        setting=chosen.setting,
        reason=noted(service, reason),
        is_reached=is_reached,
        verified=tuple(seen),
        ranked=tuple(ranked),
        reachable=instead,
        costs=known,
        settings=len(settings),
        simulations=judge.simulations,
        simulated_requests=judge.requests,
        seconds=clock.seconds,
        notes=tuple(notes + [v.note for v in seen if v.note]),
    )


def batcher_of(service: Service, target: Target = "auto") -> Batcher:
    """The batcher of the model as the service file has it."""
    (plan,) = [plan for plan in build.plan([service], target) if plan.service.service == service.service]
    return Batcher.of(model_config.parse(plan.folder.config_text, service.service))


def _profiled(
    stage: Stage,
    kind: Kind,
    now: Setting,
    settings: Sequence[Setting],
    wish: Wish,
    cores: int,
    say: Callable[[str], None],
) -> Profile:
    """The costs of one kind of instance."""
    precision, threads = kind
    most = max(each.max_batch_size for each in settings)
    sizes = sorted({*(2**k for k in range(most.bit_length())), *(each.max_batch_size for each in settings)})
    one = replace(now, queue_delay_us=PROFILE_DELAY_US, instances=1, threads=threads, precision=precision)
    stage.apply(replace(one, max_batch_size=sizes[-1]))
    return profile(
        stage.server,
        stage.model,
        stage.samples,
        max_batch_size=_rows_in_time(stage, sizes, wish.slo_ms),
        cores=cores,
        is_on_cpu=runs_on_cpu(stage.service),
        on_progress=say,
    )


def _memory(stage: Stage) -> tuple[float, float]:
    """What a server with one instance takes without it, and the instance, MB."""
    stub_mb = sum(_memory_mb(pid) for pids in machine.stub_pids(stage.server.pid).values() for pid in pids)
    return _tree_mb(stage) - stub_mb, stub_mb


def _rows_in_time(stage: Stage, sizes: Sequence[int], slo_ms: float) -> int:
    """The largest batch that a lone request is answered in time with, or soon: larger ones are not worth a measurement."""
    largest = sizes[0]
    row_bytes = sum(array.nbytes // len(array) for array in stage.samples.values())
    with stage.server.control() as control:
        for size in sizes:
            if size > 1 and size * row_bytes > MOST_BYTES:
                break
            inputs = {name: _rows(array, size) for name, array in stage.samples.items()}
            took_ms = []
            for _ in range(2):  # the first may allocate
                began = time.monotonic()
                control.probe(stage.model, inputs)
                took_ms.append((time.monotonic() - began) * 1e3)
            if min(took_ms) > max(slo_ms, PROFILED_MS):
                break
            largest = size
    return largest


def _rows(array: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """So many rows of the samples, strings as the bytes that tritonclient takes."""
    taken = array.take(range(count), axis=0, mode="wrap")
    if taken.dtype.kind == "U":
        taken = np.char.encode(taken, "utf-8")
    return taken.astype(np.object_) if taken.dtype.kind == "S" else taken


def _check_can_be_sent(wish: Wish, seconds: float) -> None:
    """Raises SpecError when a verification would be of more requests than can be sent."""
    if not wish.is_rate_open and wish.rate_per_s * seconds > VERIFY_REQUESTS_MOST:
        raise SpecError(
            f"{wish.rate_per_s:,.0f} requests/s for {seconds:g} s are more than the {VERIFY_REQUESTS_MOST:,} requests that are "
            "sent to verify a setting. Nothing was measured. Say a lower rate; `tritonpilot plan` is for many servers."
        )


def _in_time(settings: Sequence[Setting], costs: Mapping[Kind, Costs], wish: Wish) -> list[Setting]:
    """Those without batches that would take longer than the SLO."""
    return [
        each
        for each in settings
        if costs[each.precision, each.threads].execution_mean_us(each.max_batch_size) <= wish.slo_ms * 1e3
    ]


def _with_least_batch(settings: Sequence[Setting]) -> list[Setting]:
    """Those with the smallest of the batches, which the largest request may fill alone."""
    least = min(each.max_batch_size for each in settings)
    return [each for each in settings if each.max_batch_size == least]


def _within_memory(
    service: Service, settings: Sequence[Setting], most_mb: float | None, memory: Mapping[Kind, tuple[float, float]]
) -> list[Setting]:
    if most_mb is None or not settings:
        return list(settings)

    def needed(setting: Setting) -> float:
        server, instance = memory[setting.precision, setting.threads]
        return server + setting.instances * instance

    found = [each for each in settings if needed(each) <= most_mb]
    if not found:
        least = min(settings, key=needed)
        raise SpecError(
            f"{service.path}: no setting of {service.service} fits {most_mb:g} MB of memory; the smallest, "
            f"{least.describe()}, needs {needed(least):.0f} MB. Nothing was changed. Allow more, or another precision."
        )
    return found


def _with_rate(
    judge: Judge, settings: Sequence[Setting], most_per_s: float, say: Callable[[str], None]
) -> tuple[Wish, Judge]:
    """The wish with a rate to be verified at, where it leaves it open: a little below the highest that keeps the promises."""
    wish = judge.wish
    if not wish.is_rate_open:
        return wish, judge
    factor, _ = highest_rates(judge, settings, say)[0]
    if factor == 0:
        return wish, judge
    wish = replace(wish, streams=wish.at(min(factor * BELOW_HIGHEST, most_per_s / wish.rate_per_s)))
    judge = replace(judge, wish=wish, _traffic={})
    return wish, judge


def _verified_in_turn(
    stage: Stage,
    judge: Judge,
    best: Sequence[Judged],
    profiles: Mapping[Kind, Profile],
    seconds: float,
    seed: int,
    cpus: Sequence[int] | None,
    say: Callable[[str], None],
) -> tuple[list[Verified], list[str]]:
    """Those that could be measured, and why the others could not."""
    seen, notes = [], []
    for each in best:
        try:
            seen.append(_verified(stage, judge, each, profiles, seconds, seed, cpus, say))
        except (ServerError, MeasurementError) as error:
            notes.append(f"{each.setting.describe()} was not verified: {error}")
            say(notes[-1])
            _recover(stage)
    return seen, notes


def _verified(
    stage: Stage,
    judge: Judge,
    each: Judged,
    profiles: Mapping[Kind, Profile],
    seconds: float,
    seed: int,
    cpus: Sequence[int] | None,
    say: Callable[[str], None],
) -> Verified:
    """Serve the wish's traffic with this setting for real. A server that dies is started again once."""
    for is_last in (False, True):
        try:
            stage.apply(each.setting)
            arrivals = traffic(judge.wish.streams, seconds, seed)
            measured, sender = load.run(
                load.Target(stage.endpoints.http, "http"),
                stage.model,
                stage.samples,
                arrivals,
                judge.wish.streams,
                cpus=cpus,
            )
            stage.server.check_alive()
            break
        except ServerError as error:
            if is_last:
                raise
            say(f"{error} It is started again.")
            stage.restart()
    strange = {kind: count for kind, count in measured.errors.items() if kind not in IN_TIME}
    failed = sum(strange.values())
    if failed > FEW_ROWS * measured.requests or not measured.answered:
        raise MeasurementError(
            f"{failed} of {measured.requests} requests failed ({_counted(strange)}), so its latency says nothing. "
            "Look at the server's log and at the service's samples."
        )
    notes = [f"{failed} of {measured.requests} requests failed ({_counted(strange)})"] if failed else []
    if sender.is_limit:
        notes.append(f"the sender was the limit: {sender.reason}")
    known = profiles.get((each.setting.precision, each.setting.threads))
    if known is not None:
        slower = speed(stage.server, stage.model, stage.samples, known, max_rows=each.setting.max_batch_size)
        if abs(slower - 1) > SPEED_CHANGE:
            notes.append(f"the machine took {slower:.2f} times as long for a request as when its costs were measured")
    say(
        f"measured {each.setting.describe()}: {measured.attainment:.1%} in time, P99 {measured.p_ms(0.99):.3g} ms "
        f"(simulated {each.simulated.outcome.attainment:.1%}, {each.simulated.outcome.p_ms(0.99):.3g} ms)"
    )
    return Verified(each, measured, _tree_mb(stage), "; ".join(notes))


def _winner(seen: Sequence[Verified], best: Sequence[Judged]) -> Judged:
    """The measured one that keeps its promises and answers most in time; of equals the simulator's favourite."""
    if not seen:
        return best[0]
    kept = [each for each in seen if each.keeps_all] or list(seen)
    most = max(each.measured.goodput_per_s for each in kept)
    return next(each for each in kept if each.measured.goodput_per_s >= (1 - EQUAL_MEASURED) * most).judged


def _recover(stage: Stage) -> None:
    try:
        stage.server.check_alive()
    except ServerError:
        stage.restart()


def _measured_in_words(verified: Verified, count: int) -> str:
    found = verified.measured
    beside = f", the best of {count} that were verified" if count > 1 else ""
    return (
        f"On the real server it answered {found.attainment:.1%} of {found.requests:,} requests in time, P99 "
        f"{found.p_ms(0.99):.3g} ms{beside}."
    )


def _tree_mb(stage: Stage) -> float:
    return sum(_memory_mb(pid) for pid in machine.tree_pids(stage.server.pid))


def _memory_mb(pid: int) -> float:
    """Proportional set size: pages that several processes share are counted once. 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1e3


class _Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stack: list[tuple[str, float]] = []

    def __call__(self, name: str) -> _Clock:
        self._stack.append((name, time.monotonic()))
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        name, began = self._stack.pop()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began


def _stream(stream: Any) -> dict[str, object]:
    return {
        "name": stream.name,
        "rate_per_s": stream.rate_per_s,
        "arrivals": stream.arrivals,
        "rows": stream.rows if isinstance(stream.rows, int) else {str(k): v for k, v in stream.rows.items()},
        "slo_ms": stream.slo_ms if math.isfinite(stream.slo_ms) else None,
    }


def _judged(each: Judged) -> dict[str, object]:
    found = each.simulated
    return {
        **each.setting.as_dict(),
        "goodput_per_s": found.outcome.goodput_per_s,
        "attainment": found.outcome.attainment,
        "p99_ms": found.outcome.p_ms(0.99) if found.outcome.answered else None,
        "utilisation": found.utilisation,
        "mean_rows": found.mean_rows if math.isfinite(found.mean_rows) else None,
        "room": each.room,
    }


def _reachable(found: Reachable | None) -> dict[str, object] | None:
    if found is None:
        return None
    return {
        "rate_per_s": found.rate_per_s,
        "at_rate": found.at_rate.as_dict() if found.at_rate else None,
        "p99_ms": found.p99_ms if math.isfinite(found.p99_ms) else None,
        "at_p99": found.at_p99.as_dict(),
    }


def _counted(errors: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in errors.items()) or "none answered"
