"""Which choice is better, and which came sooner: the tuner's or Model Analyzer's? Both for ctr, on the same tritonserver and cores.

Each then serves, open loop and by turns, the highest rate at which it keeps the SLO, of requests of 8 rows: with smaller ones the
sender would be the limit. Model Analyzer searches with one row a request, for it has no other size. It gets the model without
classes (its closed loops would fill their queues) and without warmup (tritonserver 2.51 crashes where a warmup's batch exceeds
the `max_batch_size` that Model Analyzer tries).
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from perf import model_analyzer
from perf.frame import PROJECT, Bench, Outcome, median, spread
from perf.model_analyzer import Search
from perf.subjects import services
from tritonpilot import build, load, repository, samples
from tritonpilot.arrivals import Stream, traffic
from tritonpilot.errors import MeasurementError
from tritonpilot.outcome import Outcome as Answered
from tritonpilot.quantize import run as quantization
from tritonpilot.setting import Setting
from tritonpilot.spec import Service, load_services
from tritonpilot.stage import Stage
from tritonpilot.tune import Space, Tuned, Wish, tune
from tritonpilot.tune.search import KEPT

SLO_MS = 50.0
ROWS = 8  # of a request
MOST_PER_S = 4000.0  # requests that it is asked to send
LEAST_FASTER = 5.0
ROUNDS = 3
SERVE_S, QUICK_SERVE_S = 5.0, 2.0
RATE_STEP, QUICK_RATE_STEP = 1.03, 1.2  # how exactly the highest rate is found
QUICK_SETTINGS = {
    "run_config_search_max_model_batch_size": 16,
    "run_config_search_max_instance_count": 1,
    "concurrency_sweep_disable": True,
}
#: As Model Analyzer, the tuner may choose every batch size: no caller is there who sends larger requests.
ANY = Space(max_batch_sizes=tuple(2**k for k in range(9)))
FP32_ALONE = replace(ANY, precisions=("fp32",))


@dataclass(frozen=True)
class Served:
    """The highest rate that a setting served within the SLO, and what came of it."""

    rate_per_s: float
    goodput_per_s: float
    p99_ms: float


def tuner_vs_model_analyzer(bench: Bench) -> Outcome:
    """Goodput of the tuner's choice as a ratio to that of Model Analyzer's, each at the highest rate within the SLO."""
    build.prepare(list(services(["ctr"]).values()), "auto", bench.say)
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        # A copy, for the INT8 file that quantization proves is one of the things that may be chosen.
        shutil.copytree(PROJECT / "models" / "ctr", Path(folder, "ctr"))
        (service,) = load_services(Path(folder), ["ctr"])
        bench.say("making the INT8 file, as `tritonpilot quantize ctr` does")
        quantization.quantize(service, bench.say, seconds=0.5 if bench.quick else 4.0)
        tuned, tuned_s = _tuned(bench, service, ANY)
        plain, _ = _tuned(bench, service, FP32_ALONE, known=tuned)
        analyzed = _analyzed(bench, service, Path(folder, "model_repository"))
        theirs = _setting(service, analyzed)
        settings = list(dict.fromkeys([tuned.setting, plain.setting, theirs]))
        with Stage(service, Path(folder), cpus=[bench.cores.server], on_progress=bench.say) as stage:

            def one() -> dict[Setting, Served]:
                seed = int(time.monotonic())
                start = tuned.wish.rate_per_s
                return {each: _highest(bench, stage, each, tuned.wish, start, seed) for each in settings}

            kept = bench.rounds(1 if bench.quick else ROUNDS, one, check=lambda: stage.server.check_alive())

    def ratios(ours: Setting) -> list[float]:
        return [found[ours].goodput_per_s / found[theirs].goodput_per_s for found in kept]

    found = ratios(tuned.setting)
    assert analyzed.best is not None
    return Outcome(
        median(found),
        spread=spread(found),
        rounds=len(found),
        ok=analyzed.seconds >= LEAST_FASTER * tuned_s,
        details={
            "service": "ctr",
            "slo_ms": SLO_MS,
            "rows_per_request": ROWS,
            "times_faster": round(analyzed.seconds / tuned_s, 1),
            "times_faster_than_its_search_alone": round(analyzed.search_s / tuned_s, 1),
            "with_fp32_alone": round(median(ratios(plain.setting)), 3),
            "tuner": {"chosen": tuned.setting.describe(), "seconds": round(tuned_s, 1), "reason": tuned.reason},
            "tuner_with_fp32_alone": {"chosen": plain.setting.describe()},
            "model_analyzer": {
                "version": model_analyzer.VERSION,
                "chosen": theirs.describe(),
                "seconds": round(analyzed.seconds, 1),
                "search_seconds": round(analyzed.search_s, 1),
                "measured": len(analyzed.measured),
                "best": asdict(analyzed.best),
            },
            "served": {
                each.describe(): [
                    {name: round(value, 2) for name, value in asdict(found[each]).items()} for found in kept
                ]
                for each in settings
            },
        },
    )


def _tuned(bench: Bench, service: Service, space: Space, known: Tuned | None = None) -> tuple[Tuned, float]:
    """The tuner's choice for the highest rate within the SLO, and the seconds from the question to the verified answer."""
    began = time.monotonic()
    found = tune(
        service,
        Wish.of(service, slo_ms=SLO_MS, rows=ROWS, is_rate_open=True, space=space),
        models=service.folder.parent,
        cpus=[bench.cores.server],
        client_cpus=[bench.cores.client],
        costs=None if known is None else known.costs,
        verified=3 if known is None else 0,
        most_per_s=MOST_PER_S,
        on_progress=bench.say,
    )
    return found, time.monotonic() - began


def _analyzed(bench: Bench, service: Service, root: Path) -> Search:
    """What Model Analyzer finds for the same model, SLO and cores, with its own size of requests: one row."""
    plain = service.model_copy(update={"classes": [], "default_class": None, "warmup": None})
    root.mkdir()
    repository.publish(root, [plan.folder for plan in build.plan([plain], "auto")])
    assert service.samples is not None
    found = model_analyzer.search(
        root,
        service.service,
        samples.read(service.samples),
        slo_ms=SLO_MS,
        cores=bench.cores,
        say=bench.say,
        settings=QUICK_SETTINGS if bench.quick else None,
    )
    if found.best is None:
        raise MeasurementError(
            f"None of the {len(found.measured)} configurations that Model Analyzer measured keeps {SLO_MS:g} ms. There is "
            "nothing to compare with, and no figure is reported. Stop other work and repeat."
        )
    return found


def _setting(service: Service, analyzed: Search) -> Setting:
    """Model Analyzer's choice: what it does not search stays as the service file says."""
    assert analyzed.best is not None
    return replace(Setting.of(service), max_batch_size=analyzed.best.max_batch_size, instances=analyzed.best.instances)


def _highest(bench: Bench, stage: Stage, setting: Setting, wish: Wish, start_per_s: float, seed: int) -> Served:
    """The highest rate at which the setting keeps the SLO, by halving the interval of rates on the real server."""
    stage.apply(setting)
    seconds = QUICK_SERVE_S if bench.quick else SERVE_S
    step = QUICK_RATE_STEP if bench.quick else RATE_STEP
    best: tuple[float, Answered] | None = None
    low, high = start_per_s / 8, start_per_s * 2
    rate = start_per_s
    while high / low > step:
        answered = _answered(bench, stage, wish.at(rate / wish.rate_per_s), seconds, seed)
        if answered.attainment >= KEPT:
            low, best = rate, (rate, answered)
        else:
            high = rate
        rate = math.sqrt(low * high)
    if best is None:
        raise MeasurementError(
            f"With {setting.describe()} the SLO of {SLO_MS:g} ms is kept at no rate down to {low:.0f} requests/s. No figure is "
            "reported. Stop other work and repeat."
        )
    rate, answered = best
    bench.say(f"{setting.describe()}: {rate:.0f} requests/s within {SLO_MS:g} ms")
    return Served(rate, answered.goodput_per_s, answered.p_ms(0.99))


def _answered(bench: Bench, stage: Stage, streams: tuple[Stream, ...], seconds: float, seed: int) -> Answered:
    outcome, _ = load.run(
        load.Target(stage.endpoints.http, "http"),
        stage.model,
        stage.samples,
        traffic(streams, seconds, seed),
        streams,
        cpus=[bench.cores.client],
    )
    stage.server.check_alive()
    return outcome
