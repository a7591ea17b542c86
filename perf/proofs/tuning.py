"""Does the tuner choose as well as an exhaustive grid, and does it follow the SLO? On the real server, open loop.

The grid and the tuner are given the same rate, a little below the highest that the service stands. What the tuner chose and the
best of the grid are then measured once more, by turns: the machine changes from minute to minute, and the largest of many
measurements is also the luckiest.
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from perf import emulated
from perf.frame import PROJECT, Bench, Outcome, median, spread
from perf.offer import Offered, offer
from perf.subjects import part, services
from tritonpilot import build
from tritonpilot.arrivals import traffic
from tritonpilot.errors import MeasurementError
from tritonpilot.outcome import Outcome as Answered
from tritonpilot.setting import Setting
from tritonpilot.spec import Service
from tritonpilot.stage import Stage
from tritonpilot.tune import Space, Tuned, Wish, tune

# -- tuner_regret

GRID_S = 8.0  # a point of the grid is measured
VERIFY_S = 3.0
AGAIN_S = 6.0
AGAIN = 2  # of the grid's best, measured again beside the choice
ROUNDS = 3
MOST_TIME = 0.10  # of the grid's measuring time, that the tuner may take
KEPT, KEPT_S = PROJECT / "perf" / "results" / ".tuner_regret", 12 * 3600.0  # subjects of a run that was interrupted
GOOD, LEAST_WORSE = 0.97, 0.25  # at a rate that a quarter of the grid does not stand, settings are told apart
MOST_PER_S = 4000.0  # the sender has one core
CTR_ROWS = 16  # of a request: with fewer the sender would be the limit
#: No caller is there who sends larger requests: every batch size may be chosen, as in the grids.
ONE_KIND = Space(threads=(1,), precisions=("fp32",), max_batch_sizes=tuple(2**k for k in range(9)))


@dataclass(frozen=True)
class Subject:
    """A service, its SLO, and the grid that is searched exhaustively."""

    service: Service
    slo_ms: float
    delays_us: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    instances: tuple[int, ...]
    rows: int = 1  # of a request

    def grid(self) -> list[Setting]:
        """Every setting of the grid."""
        now = replace(Setting.of(self.service), threads=1)
        return [
            replace(now, queue_delay_us=delay, max_batch_size=size, instances=count)
            for count, size, delay in itertools.product(self.instances, self.batch_sizes, self.delays_us)
        ]


@dataclass(frozen=True)
class Regret:
    """What the tuner's choice is worth beside the best of the grid, and what each took."""

    name: str
    share: float
    rounds: tuple[float, ...]
    tuner_s: float
    grid_s: float
    worse: (
        float  # part of the grid that is worse than GOOD of its best: nearly none would mean a rate that says nothing
    )
    details: dict[str, object]


def tuner_regret(bench: Bench) -> Outcome:
    """Goodput of the chosen setting divided by that of the grid's best; the lowest of the subjects."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        found = [_kept(bench, subject) for subject in _subjects(bench, Path(folder))]
    if not bench.quick:
        shutil.rmtree(KEPT, ignore_errors=True)
    worst = min(found, key=lambda each: each.share)
    times = {each.name: round(each.tuner_s / each.grid_s, 3) for each in found}
    return Outcome(
        worst.share,
        spread=spread(worst.rounds),
        rounds=sum(len(each.rounds) for each in found),
        ok=all(value <= MOST_TIME for value in times.values()) and all(each.worse >= LEAST_WORSE for each in found),
        details={
            "of_the_grids_time": times,
            "grid_worse_than_97_percent": {each.name: round(each.worse, 3) for each in found},
            "subjects": {
                each.name: {
                    "share": round(each.share, 4),
                    "rounds": [round(value, 4) for value in each.rounds],
                    "tuner_s": round(each.tuner_s, 1),
                    "grid_s": round(each.grid_s, 1),
                    **each.details,
                }
                for each in found
            },
        },
    )


def _subjects(bench: Bench, folder: Path) -> list[Subject]:
    names = ["ctr"] if bench.quick else ["ctr", "image", "text"]
    build.prepare(list(services(names).values()), "auto", bench.say)
    name, text = "emulated_v100", "batching: {max_batch_size: 256}\nslo: {p99_ms: 50}"
    device = emulated.services_of(folder, {name: text}, emulated.TENSORRT)[name]
    if bench.quick:
        return [
            Subject(part("ctr"), 50, (0, 2000), (16, 256), (1,), CTR_ROWS),
            Subject(device, 50, (0, 20_000), (4, 128), (1,)),
        ]
    return [
        Subject(part("ctr"), 50, (0, 500, 2000, 8000, 20_000), (16, 32, 128, 256), (1, 2), CTR_ROWS),
        Subject(part("image_net"), 300, (0, 2000, 8000, 20_000, 80_000), (1, 4, 8, 16), (1, 2)),
        Subject(part("text_net"), 300, (0, 2000, 8000, 20_000, 80_000), (1, 4, 8, 16), (1, 2)),
        Subject(device, 50, (0, 500, 1000, 2000, 4000, 8000, 16_000, 30_000), (4, 8, 16, 32, 64), (1,)),
    ]


def _kept(bench: Bench, subject: Subject) -> Regret:
    """As measured now, or by an earlier run that did not get to its end: a subject takes ten minutes."""
    if bench.quick:
        return _regret(bench, subject)
    file = KEPT / f"{subject.service.service}.json"
    if file.exists() and time.time() - file.stat().st_mtime < KEPT_S:
        said = json.loads(file.read_text(encoding="utf-8"))
        bench.say(f"{subject.service.service}: measured {said['details']['measured']} by a run that was interrupted")
        return Regret(**{**said, "rounds": tuple(said["rounds"])})
    found = _regret(bench, subject)
    KEPT.mkdir(exist_ok=True)
    file.write_text(json.dumps(asdict(found)), encoding="utf-8")
    return found


def _regret(bench: Bench, subject: Subject) -> Regret:
    name = subject.service.service
    grid_s, again_s = (2.0, 2.0) if bench.quick else (GRID_S, AGAIN_S)
    wish = Wish.of(subject.service, slo_ms=subject.slo_ms, rows=subject.rows, is_rate_open=True, space=ONE_KIND)
    began = time.monotonic()
    tuned = _tuned(bench, subject.service, wish, grid_s / 2)
    tuner_s = time.monotonic() - began - tuned.seconds.get("simulating", 0.0)
    streams = tuned.wish.streams
    bench.say(
        f"{name}: {tuned.wish.rate_per_s:.0f} requests/s within {subject.slo_ms:g} ms; {tuned.setting.describe()}"
    )
    with ExitStack() as stack:
        stage = stack.enter_context(_stage(bench, subject.service))
        began = time.monotonic()
        points = {each: _offered(bench, stage, each, tuned.wish, grid_s, seed=2).answers for each in subject.grid()}
        grid_took_s = time.monotonic() - began
        best = sorted(points, key=lambda each: -points[each].goodput_per_s)[:AGAIN]
        turns = list(dict.fromkeys([tuned.setting, *best]))

        def one() -> dict[Setting, float]:
            seed = int(time.monotonic())
            sent = {each: _offered(bench, stage, each, tuned.wish, again_s, seed) for each in turns}
            return {each: found.undisturbed(may_be_behind=True).goodput_per_s for each, found in sent.items()}

        kept = bench.rounds(1 if bench.quick else ROUNDS, one, check=lambda: stage.server.check_alive())
    means = {each: median([found[each] for found in kept]) for each in turns}
    best_of_grid = max(best, key=lambda each: means[each])
    return Regret(
        name,
        share=means[tuned.setting] / means[best_of_grid],
        rounds=tuple(found[tuned.setting] / found[best_of_grid] for found in kept),
        tuner_s=tuner_s,
        grid_s=grid_took_s,
        worse=sum(each.goodput_per_s < GOOD * points[best[0]].goodput_per_s for each in points.values()) / len(points),
        details={
            "measured": datetime.now(timezone.utc).isoformat(timespec="minutes"),
            "rate_per_s": round(sum(stream.rate_per_s for stream in streams), 1),
            "slo_ms": subject.slo_ms,
            "chosen": tuned.setting.describe(),
            "best_of_grid": best_of_grid.describe(),
            "goodput_per_s": {each.describe(): round(value, 1) for each, value in means.items()},
            "grid_goodput_per_s": {each.describe(): round(found.goodput_per_s, 1) for each, found in points.items()},
            "simulated_settings": tuned.settings,
            "simulations": tuned.simulations,
            "reason": tuned.reason,
        },
    )


# -- tuner_follows_slo

SHORT_MS, LONG_MS = 20.0, 100.0
FOLLOW_S = 8.0
LEAST_REQUESTS = 60  # of a very low rate


def tuner_follows_slo(bench: Bench) -> Outcome:
    """Goodput of what is chosen for an SLO of 100 ms divided by that for 20 ms, each at the highest rate within its SLO.

    On the emulated accelerator, where a batch takes long, the choice must grow; on `ctr` it may stay.
    """
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        text = f"batching: {{max_batch_size: 256}}\nslo: {{p99_ms: {SHORT_MS:g}}}"
        name = "emulated_v100"
        device = emulated.services_of(Path(folder), {name: text}, emulated.TENSORRT)[name]
        subjects = [device] if bench.quick else [device, part("ctr")]
        if not bench.quick:
            build.prepare(list(services(["ctr"]).values()), "auto", bench.say)
        found = {
            subject.service: _followed(bench, subject, 1 if subject is device else CTR_ROWS) for subject in subjects
        }
    ratios = {name: long.goodput_per_s / short.goodput_per_s for name, (_, short, _, long) in found.items()}
    grown = {
        name: (two.setting.max_batch_size, two.setting.queue_delay_us)
        > (one.setting.max_batch_size, one.setting.queue_delay_us)
        for name, (one, _, two, _) in found.items()
    }
    shrunk = {name: two.setting.max_batch_size < one.setting.max_batch_size for name, (one, _, two, _) in found.items()}
    return Outcome(
        ratios[device.service],
        rounds=len(found),
        # A batch of 256 rows of ctr takes 6 ms: both SLOs leave time for the largest, and only the rate can grow.
        ok=grown[device.service] and not any(shrunk.values()) and min(ratios.values()) > 1,
        details={
            name: {
                "ratio": round(ratios[name], 3),
                **{
                    f"{slo_ms:g} ms": {
                        "chosen": tuned.setting.describe(),
                        "offered_per_s": round(tuned.wish.rate_per_s, 1),
                        "goodput_per_s": round(measured.goodput_per_s, 1),
                        "p99_ms": round(measured.p_ms(0.99), 2),
                        "reason": tuned.reason,
                    }
                    for slo_ms, tuned, measured in ((SHORT_MS, one, short), (LONG_MS, two, long))
                },
            }
            for name, (one, short, two, long) in found.items()
        },
    )


def _followed(bench: Bench, service: Service, rows: int) -> tuple[Tuned, Answered, Tuned, Answered]:
    found: list[tuple[Tuned, Answered]] = []
    for slo_ms in (SHORT_MS, LONG_MS):
        wish = Wish.of(service, slo_ms=slo_ms, rows=rows, is_rate_open=True, space=ONE_KIND)
        tuned = _tuned(bench, service, wish, VERIFY_S)
        bench.say(tuned.reason)
        seconds = max(2.0 if bench.quick else FOLLOW_S, LEAST_REQUESTS / tuned.wish.rate_per_s)
        with _stage(bench, service) as stage:

            def sent() -> Answered:
                return _offered(bench, stage, tuned.setting, tuned.wish, seconds, seed=3).undisturbed(  # noqa: B023 -- called here
                    may_be_behind=True
                )

            (answered,) = bench.rounds(1, sent, check=lambda: stage.server.check_alive())
        found.append((tuned, answered))
    (one, short), (two, long) = found
    return one, short, two, long


# -- what they share


def _tuned(bench: Bench, service: Service, wish: Wish, verify_s: float) -> Tuned:
    found = tune(
        service,
        wish,
        models=PROJECT / "models",
        cpus=[bench.cores.server],
        client_cpus=[bench.cores.client],
        verify_s=verify_s,
        most_per_s=MOST_PER_S,
        on_progress=bench.say,
    )
    if found.wish.is_rate_open and found.wish.rate_per_s <= 0:
        raise MeasurementError(f"{service.service} keeps its SLO at no rate. Nothing is reported. Give it more time.")
    return found


def _stage(bench: Bench, service: Service) -> Stage:
    return Stage(service, PROJECT / "models", cpus=[bench.cores.server], on_progress=bench.say)


def _offered(bench: Bench, stage: Stage, setting: Setting, wish: Wish, seconds: float, seed: int) -> Offered:
    """What the real server makes of the wish's traffic with this setting."""
    stage.apply(setting)
    found = offer(stage, traffic(wish.streams, seconds, seed), wish.streams, cpus=[bench.cores.client])
    note = f"; the sender: {found.sender.reason}" if found.sender.is_limit else ""
    answers = found.answers
    bench.say(f"{setting.describe()}: {answers.goodput_per_s:.0f}/s in time, P99 {answers.p_ms(0.99):.1f} ms{note}")
    return found
