"""Which choice is better, and which came sooner: the tuner's or Model Analyzer's? For an emulated GPU, a published V100 curve.

Both have the same tritonserver, cores and SLO, one device and one precision. Both search, and are judged, with requests of one row:
the quick search has no other size. A GPU that is emulated leaves the server's core and the sender's
mostly idle, so that neither is what is measured. Each choice then serves, open loop and by turns, the highest rate at which it
keeps the SLO.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from perf import emulated, model_analyzer
from perf.frame import Bench, Outcome, median, spread
from perf.model_analyzer import Search
from perf.offer import highest_rate, offer
from tritonpilot import samples
from tritonpilot.arrivals import traffic
from tritonpilot.errors import MeasurementError
from tritonpilot.outcome import Outcome as Answers
from tritonpilot.setting import Setting
from tritonpilot.spec import Service
from tritonpilot.stage import Stage
from tritonpilot.tune import Space, Tuned, Wish, tune
from tritonpilot.tune.search import KEPT

MODEL = "emulated_v100"
SLO_MS = 50.0
UNTUNED = 8  # max_batch_size of the service that both begin with: nobody has thought about it yet
LEAST_FASTER = 5.0
ROUNDS = 3
VERIFY_S = 3.0
SERVE_S, QUICK_SERVE_S = 5.0, 2.0
RATE_STEP, QUICK_RATE_STEP = 1.02, 1.1  # how exactly the highest rate is found
#: NOTE: no narrower limits of the search: with one instance at most, version 1.58 asks for the same two configurations for ever.
QUICK_SETTINGS = {"concurrency_sweep_disable": True}
TIMEOUT_S = 1200.0
#: As Model Analyzer, the tuner may choose every batch size: no caller is there who sends larger requests.
ANY_BATCH = Space(max_batch_sizes=tuple(2**k for k in range(9)))


@dataclass(frozen=True)
class Served:
    """The highest rate that a setting served within the SLO, and what came of it."""

    rate_per_s: float
    goodput_per_s: float
    p99_ms: float


def tuner_vs_model_analyzer(bench: Bench) -> Outcome:
    """Goodput of the tuner's choice as a ratio to that of Model Analyzer's, each at the highest rate within the SLO."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        text = f"batching: {{max_batch_size: {UNTUNED}}}\nslo: {{p99_ms: {SLO_MS:g}}}"
        service = emulated.services_of(Path(folder), {MODEL: text}, one_device=True)[MODEL]
        tuned, tuned_s = _tuned(bench, service)
        analyzed = _analyzed(bench, service, emulated.published(Path(folder), [service]))
        theirs = _setting(service, analyzed)
        rates = dict.fromkeys((tuned.setting, theirs), tuned.wish.rate_per_s)
        with Stage(service, service.folder.parent, cpus=[bench.cores.server], on_progress=bench.say) as stage:

            def one() -> dict[Setting, Served]:
                seed = int(time.monotonic())
                found = {each: _highest(bench, stage, each, tuned.wish, rate, seed) for each, rate in rates.items()}
                rates.update({each: served.rate_per_s for each, served in found.items()})
                return found

            kept = bench.rounds(1 if bench.quick else ROUNDS, one, check=stage.check_alive)
    ratios = [found[tuned.setting].goodput_per_s / found[theirs].goodput_per_s for found in kept]
    return Outcome(
        median(ratios),
        spread=spread(ratios),
        rounds=len(kept),
        ok=analyzed.seconds >= LEAST_FASTER * tuned_s,
        details={
            "model": MODEL,
            "slo_ms": SLO_MS,
            "rows_per_request": 1,
            "ratios": [round(each, 3) for each in ratios],
            "times_faster": round(analyzed.seconds / tuned_s, 1),
            "times_faster_than_its_search_alone": round(analyzed.search_s / tuned_s, 1),
            "tuner": {
                "chosen": tuned.setting.describe(),
                "seconds": round(tuned_s, 1),
                "of_them": {what: round(part, 1) for what, part in tuned.seconds.items()},
                "reason": tuned.reason,
            },
            "model_analyzer": {
                "version": model_analyzer.VERSION,
                "chosen": theirs.describe(),
                "seconds": round(analyzed.seconds, 1),
                "search_seconds": round(analyzed.search_s, 1),
                "measured": [asdict(each) for each in analyzed.measured],
            },
            "served": {
                each.describe(): [
                    {name: round(value, 2) for name, value in asdict(found[each]).items()} for found in kept
                ]
                for each in rates
            },
        },
    )


def _tuned(bench: Bench, service: Service) -> tuple[Tuned, float]:
    """The tuner's choice for the highest rate within the SLO, and the seconds from the question to the verified answer."""
    began = time.monotonic()
    found = tune(
        service,
        Wish.of(service, is_rate_open=True, space=ANY_BATCH),
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
    assert service.samples is not None
    found = model_analyzer.search(
        root,
        service.service,
        samples.read(service.samples),
        slo_ms=SLO_MS,
        cores=bench.cores,
        say=bench.say,
        settings=QUICK_SETTINGS if bench.quick else None,
        timeout_s=TIMEOUT_S,
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
