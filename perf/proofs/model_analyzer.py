"""Which choice is better, and which came sooner: the tuner's or Model Analyzer's? For the network of `text`, on one core.

Both search, and are judged, with the same rows, one a request: the quick search has no other size, and with so heavy a network the
server is the limit and not the sender. Both have the same tritonserver, cores and SLO. The tuner is asked twice: with FP32 alone,
for Model Analyzer searches no precision, and with the INT8 file too that `tritonpilot quantize` proved accurate. Each choice then
serves, open loop and by turns, the highest rate at which it keeps the SLO.

Model Analyzer gets the model without classes (its closed loops would fill their queues) and without warmup (tritonserver 2.51
crashes where a warmup's batch exceeds the `max_batch_size` that Model Analyzer tries).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from perf import model_analyzer
from perf.frame import PROJECT, Bench, Outcome, median, spread
from perf.model_analyzer import Search
from perf.offer import highest_rate, offer
from perf.subjects import services
from tritonpilot import build, repository, samples
from tritonpilot.arrivals import traffic
from tritonpilot.errors import MeasurementError
from tritonpilot.outcome import Outcome as Answers
from tritonpilot.pipeline import parts
from tritonpilot.quantize import run as quantization
from tritonpilot.setting import Setting, precisions
from tritonpilot.spec import Service, load_services
from tritonpilot.stage import Stage
from tritonpilot.tune import Space, Tuned, Wish, tune
from tritonpilot.tune.search import KEPT

SERVICE, MODEL = "text", "text_net"
SLO_MS = 300.0
LEAST_FASTER = 5.0
NO_WORSE = 0.97  # with FP32 alone both may find the same; rates are found to within RATE_STEP
ROUNDS = 3
VERIFY_S = 3.0
SERVE_S, QUICK_SERVE_S = 8.0, 2.0
RATE_STEP, QUICK_RATE_STEP = 1.03, 1.2  # how exactly the highest rate is found
QUICK_SETTINGS = {
    "run_config_search_max_model_batch_size": 4,
    "run_config_search_max_instance_count": 1,
    "concurrency_sweep_disable": True,
}
#: As Model Analyzer, the tuner may choose every batch size: no caller is there who sends larger requests.
FP32 = Space(max_batch_sizes=tuple(2**k for k in range(9)), precisions=("fp32",))
FP32_INT8 = replace(FP32, precisions=("fp32", "int8"))


@dataclass(frozen=True)
class Served:
    """The highest rate that a setting served within the SLO, and what came of it."""

    rate_per_s: float
    goodput_per_s: float
    p99_ms: float


def tuner_vs_model_analyzer(bench: Bench) -> Outcome:
    """Goodput of the tuner's choice as a ratio to that of Model Analyzer's, each at the highest rate within the SLO.

    The quick form has FP32 alone: to make the INT8 file takes minutes.
    """
    spaces = {"fp32": FP32} if bench.quick else {"fp32": FP32, "fp32, int8": FP32_INT8}
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        service = _copy(bench, Path(folder))
        if not bench.quick:
            _make_int8(service, bench.say)
        asked = {name: _tuned(bench, service, space) for name, space in spaces.items()}
        analyzed = _analyzed(bench, service, Path(folder, "model_repository"))
        theirs = _setting(service, analyzed)
        rates = {tuned.setting: tuned.wish.rate_per_s for tuned, _ in asked.values()}
        wish = asked["fp32"][0].wish
        rates.setdefault(theirs, wish.rate_per_s)
        with Stage(service, Path(folder), cpus=[bench.cores.server], on_progress=bench.say) as stage:

            def one() -> dict[Setting, Served]:
                seed = int(time.monotonic())
                found = {each: _highest(bench, stage, each, wish, rate, seed) for each, rate in rates.items()}
                rates.update({each: served.rate_per_s for each, served in found.items()})
                return found

            kept = bench.rounds(1 if bench.quick else ROUNDS, one, check=stage.check_alive)
    ratios = {
        name: [found[tuned.setting].goodput_per_s / found[theirs].goodput_per_s for found in kept]
        for name, (tuned, _) in asked.items()
    }
    widest = ratios[list(spaces)[-1]]
    return Outcome(
        median(widest),
        spread=spread(widest),
        rounds=len(kept),
        ok=analyzed.seconds >= LEAST_FASTER * max(seconds for _, seconds in asked.values())
        and median(ratios["fp32"]) >= NO_WORSE,
        details={
            "model": MODEL,
            "slo_ms": SLO_MS,
            "rows_per_request": 1,
            "tuner": {
                name: {
                    "of_model_analyzer": [round(each, 3) for each in ratios[name]],
                    "times_faster": round(analyzed.seconds / seconds, 1),
                    "times_faster_than_its_search_alone": round(analyzed.search_s / seconds, 1),
                    "chosen": tuned.setting.describe(),
                    "seconds": round(seconds, 1),
                    "of_them": {what: round(part, 1) for what, part in tuned.seconds.items()},
                    "reason": tuned.reason,
                }
                for name, (tuned, seconds) in asked.items()
            },
            "model_analyzer": {
                "version": model_analyzer.VERSION,
                "chosen": theirs.describe(),
                "seconds": round(analyzed.seconds, 1),
                "search_seconds": round(analyzed.search_s, 1),
                "measured": [asdict(each) for each in analyzed.measured],
            },
            "served": [
                {
                    **each.as_dict(),
                    "rounds": [
                        {name: round(value, 2) for name, value in asdict(found[each]).items()} for found in kept
                    ],
                }
                for each in rates
            ],
        },
    )


def _copy(bench: Bench, folder: Path) -> Service:
    """The model, in a copy of its service's folder: the INT8 file that is made there is not to stay."""
    build.prepare(list(services([SERVICE]).values()), "auto", bench.say)
    shutil.copytree(PROJECT / "models" / SERVICE, folder / SERVICE)
    return next(part for each in load_services(folder) for part in parts(each) if part.service == MODEL)


def _make_int8(service: Service, say: Callable[[str], None]) -> None:
    """As `tritonpilot quantize` does, where it was not done before."""
    if "int8" in precisions(service):
        return
    assert service.model is not None
    wanted = service.model.quantize
    assert wanted is not None
    assert wanted.prepare is not None
    files = [service.folder / wanted.calibration, service.folder / wanted.evaluation]
    build.run_script(service.folder / wanted.prepare, files, say)
    quantization.quantize(service, say)


def _tuned(bench: Bench, service: Service, space: Space) -> tuple[Tuned, float]:
    """The tuner's choice for the highest rate within the SLO, and the seconds from the question to the verified answer."""
    began = time.monotonic()
    found = tune(
        service,
        Wish.of(service, slo_ms=SLO_MS, is_rate_open=True, space=space),
        models=service.folder.parent,
        cpus=[bench.cores.server],
        client_cpus=[bench.cores.client],
        verify_s=VERIFY_S,
        on_progress=bench.say,
    )
    seconds = time.monotonic() - began
    bench.say(f"the tuner took {seconds:.0f} s: {found.reason}")
    return found, seconds


def _analyzed(bench: Bench, service: Service, root: Path) -> Search:
    """What Model Analyzer finds for the same model, SLO and cores."""
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
    """The highest rate at which the setting keeps the SLO on the real server.

    Raises NoisyRoundError when the sender was the limit at a rate that was not kept.
    """
    stage.apply(setting)
    found: dict[float, Answers] = {}

    def keeps(rate_per_s: float) -> bool:
        streams = wish.at(rate_per_s / wish.rate_per_s)
        sent = traffic(streams, QUICK_SERVE_S if bench.quick else SERVE_S, seed)
        offered = offer(stage, sent, streams, cpus=[bench.cores.client])
        found[rate_per_s] = offered.answers
        # What is kept is kept: a sender that was late has only made it harder.
        return offered.answers.attainment >= KEPT or offered.undisturbed(may_be_behind=True).attainment >= KEPT

    rate = highest_rate(keeps, start_per_s, step=QUICK_RATE_STEP if bench.quick else RATE_STEP)
    bench.say(f"{setting.describe()}: {rate:.0f} requests/s within {SLO_MS:g} ms")
    return Served(rate, found[rate].goodput_per_s, found[rate].p_ms(0.99))
