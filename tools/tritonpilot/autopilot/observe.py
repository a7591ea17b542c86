"""What did a model do in the last interval? Figures from Triton's page, or a Prometheus that scrapes it, beside gRPC statistics.

source = Pages(Endpoints("127.0.0.1:8002", entry="127.0.0.1:8102"))     # or Prometheus("http://127.0.0.1:9090", patience_s=15)
before, now = read(source, "127.0.0.1:8001"), read(source, "127.0.0.1:8001")
observe(before, now, "ctr", knobs, at_s=now_s)                          # an Observation; its `problem` says what is not known

Counters of Triton's page go on when a model is loaded again, and begin anew with tritonserver or after an unload; statistics over
gRPC begin anew with each load. What is not known is never taken for 0.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tritonpilot import metrics, top
from tritonpilot.autopilot.terms import Knobs, Observation
from tritonpilot.control import Control, ModelStatistics
from tritonpilot.errors import MeasurementError, ServerError, SpecError
from tritonpilot.metrics import PENDING, Sample
from tritonpilot.report import Source as PrometheusServer
from tritonpilot.top import COMPANION_WAKES, FAILURE, LATENCY, PROCESSED, SUCCESS, SUMMARY, WAKES

CALL_TIMEOUT_S = 5.0
PROMETHEUS_TIMEOUT_S = 5.0
LOOK_BACK_S = 600  # how long ago a series of Prometheus may have had its last sample to be told about
TOGETHER_S = 1.0  # samples of one scrape bear the same time
#: Triton's own percentiles are of about the last minute.
SUMMARY_S = 60.0
#: A backend tells its wakes once a second (pilotlib.waker), Triton its rejections at once. So many of the wakes of its executions
#: may be among the rejections and not yet among the wakes.
WAKES_UNTOLD_S = 1.6
#: So many requests that gRPC counted and the page did not are no coincidence.
UNSEEN_MOST = 10
_COUNT, _EXECUTIONS = "nv_inference_count", "nv_inference_exec_count"
_QUEUE = "nv_inference_queue_duration_us"
_COMPUTE = tuple(f"nv_inference_compute_{part}_duration_us" for part in ("input", "infer", "output"))
_WAIT, _WAITING, _SLO = "request_queue_seconds", "request_queue_size", "slo_seconds"
#: What instances waited for by a live delay, which Triton counts as compute time.
_HELD = "pilot_held_us_total"
_REJECTED = f"{FAILURE}:REJECTED"
#: What of Triton's only ever grows until tritonserver, or the model, is started again.
_GROWING = (SUCCESS, _COUNT, _EXECUTIONS, _QUEUE, *_COMPUTE)
#: Requests that a tenant may not send at all, and those that nobody waits for, are no demand.
_NO_DEMAND = {
    f"{PROCESSED}:{status}" for status in ("cancelled", "refused_rate", "refused_concurrency", "refused_unknown_class")
}
_FIRST_LOOK = "This is the first look at"
_SERIES = "nv_inference_.+|pilot_wakes_total|pilot_companion_wakes_total|pilot_held_us_total"
_ENTRY_SERIES = f"{PROCESSED}|{LATENCY}|{_WAIT}_(sum|count)|{_WAITING}|{_SLO}"


class Source(Protocol):
    """Where figures come from."""

    def samples(self) -> tuple[float, tuple[Sample, ...]]:
        """When they were true, on the source's clock, and what they are. Raises MeasurementError, with why there are none."""
        ...


class Pages:
    """The pages of a Triton, and of an entry where one is named."""

    def __init__(self, endpoints: top.Endpoints) -> None:
        """Raises SpecError for what is no HOST:PORT."""
        top.check(endpoints)
        self._metrics, self._entry = endpoints.metrics, endpoints.entry

    def samples(self) -> tuple[float, tuple[Sample, ...]]:
        """Both pages, read now."""
        found = metrics.scrape(self._metrics)
        at_s = time.monotonic()
        entry = metrics.scrape(self._entry) if self._entry else ()
        if any(sample.name == SUCCESS for sample in entry):
            raise MeasurementError(
                f"The page at {self._entry} (--entry) is that of a Triton: its requests would count twice. Nothing is known. Name "
                "the entry's page (by default 8102)."
            )
        return at_s, (*found, *entry)


class Prometheus:
    """A Prometheus that scrapes a Triton, and perhaps an entry. `instance` is Triton's label where it scrapes several."""

    def __init__(self, url: str, *, instance: str = "", patience_s: float = 30.0) -> None:
        """Figures older than `patience_s` are none. Raises SpecError for what is no address."""
        if not re.fullmatch(r"[^\"\\]*", instance):
            raise SpecError(
                f"--instance is {instance!r}, but labels of instances are as triton:8002. Nothing was asked."
            )
        self._server = PrometheusServer(url, PROMETHEUS_TIMEOUT_S)
        self._instance, self._patience_s = instance, patience_s

    def samples(self) -> tuple[float, tuple[Sample, ...]]:
        """What was scraped last."""
        wanted = f',instance="{self._instance}"' if self._instance else ""
        triton = self._server.latest(f'{{__name__=~"{_SERIES}"{wanted}}}', LOOK_BACK_S)
        if not triton:
            raise MeasurementError(
                f"Prometheus at {self._server.url} has no figures of a Triton{' named ' + self._instance if wanted else ''} of the "
                f"last {LOOK_BACK_S // 60} min. Nothing is known. Look at its /targets page."
            )
        instances = sorted({point.labels.get("instance", "") for point in triton})
        if len(instances) > 1:
            raise MeasurementError(
                f"Prometheus at {self._server.url} scrapes several Tritons: {', '.join(instances)}. Nothing is known of one alone. "
                "Say which with --instance."
            )
        newest_s = max(point.at_s for point in triton)
        age_s = self._server.now_s() - newest_s
        if age_s > self._patience_s:
            raise MeasurementError(
                f"The newest figures of Triton that Prometheus at {self._server.url} has are {age_s:.0f} s old. Nothing is known "
                "of the time since. Look at its /targets page."
            )
        entry = self._server.latest(f'{{__name__=~"{_ENTRY_SERIES}"}}', LOOK_BACK_S)
        entry_s = max((point.at_s for point in entry), default=0.0)
        recent = [point for point in triton if point.at_s > newest_s - TOGETHER_S]
        recent += [point for point in entry if point.at_s > entry_s - self._patience_s]
        return newest_s, tuple(Sample(point.labels["__name__"], point.labels, point.value) for point in recent)


@dataclass(frozen=True)
class Counts:
    """Statistics of one model over gRPC since it was loaded, all versions together."""

    requests: int
    executions: Mapping[int, int]  # by rows
    busy_ns: int


@dataclass(frozen=True)
class Reading:
    """What was to be seen at one moment. `problem`: why there are no samples; `said`: why there are no statistics."""

    at_s: float  # of the samples, on the source's clock
    asked_s: float  # of the statistics, in time.monotonic()
    samples: tuple[Sample, ...] = ()
    statistics: Mapping[str, Counts] = field(default_factory=dict)
    problem: str = ""
    said: str = ""

    @property
    def is_up(self) -> bool:
        """Whether Triton answered over gRPC."""
        return not self.said


def read(source: Source, grpc_url: str) -> Reading:
    """What is to be seen now. Raises nothing: what cannot be read is told."""
    statistics: dict[str, Counts] = {}
    said = problem = ""
    # NOTE: before the page, which so never lags behind a Triton that is well.
    try:
        with Control(grpc_url) as control:
            statistics = _by_model(control.statistics(timeout_s=CALL_TIMEOUT_S))
    except ServerError as error:
        said = str(error)
    asked_s = time.monotonic()
    try:
        at_s, samples = source.samples()
    except MeasurementError as error:
        at_s, samples, problem = math.nan, (), str(error)
    return Reading(at_s, asked_s, samples, statistics, problem, said)


def is_newer(before: Reading, now: Reading) -> bool:
    """Whether `now` tells more than `before`: a Prometheus may not have scraped since."""
    return bool(now.problem or now.said) or now.at_s != before.at_s


def began_anew(before: Reading, now: Reading, model: str) -> bool:
    """Whether the model's counters on the page started again at 0, with tritonserver or after an unload."""
    earlier, later = _of_model(before.samples, model), _of_model(now.samples, model)
    return any(later.get(name, math.inf) < earlier.get(name, -math.inf) for name in _GROWING)


def is_first_look(problem: str) -> bool:
    """Whether it is none but that one look tells of no rates."""
    return problem.startswith(_FIRST_LOOK)


def observe(
    before: Reading | None,
    now: Reading,
    model: str,
    knobs: Knobs,
    *,
    at_s: float,
    max_batch_size: int = 0,
    delay_is_live: bool = False,
    restarted: bool = False,
) -> Observation:
    """What the model did between two readings; its `problem` says why that is not known.

    `at_s` is the caller's clock.
    """
    figures = _of_model(now.samples, model)
    problem = _problem(before, now, model, figures)
    if problem or before is None:
        return _unknown(knobs, at_s, problem, restarted=restarted, waiting=figures.get(PENDING, math.nan))
    seconds = now.at_s - before.at_s
    grown = {name: value - _of_model(before.samples, model).get(name, 0.0) for name, value in figures.items()}
    entry = _Entry.between(before.samples, now.samples, model)
    answered = grown.get(SUCCESS, 0.0)
    failed = grown.get(f"{FAILURE}:BACKEND", 0.0) + grown.get(f"{FAILURE}:OTHER", 0.0)
    executions = grown.get(_EXECUTIONS, 0.0)
    if entry.is_there:  # it knows whom Triton rejected, also for a full queue, of which Triton counts nothing
        refused = entry.rejected + entry.refused
    else:
        wakes = grown.get(WAKES, 0.0) + grown.get(COMPANION_WAKES, 0.0) + WAKES_UNTOLD_S * executions / seconds
        refused = max(0.0, grown.get(_REJECTED, 0.0) - wakes)
    growth = grown.get(PENDING, 0.0) + entry.growth
    sizes, busy = _executed(before, now, model)
    if busy is None and answered and executions:
        # Batch-mates each count the whole time of their execution.
        busy = sum(grown.get(name, 0.0) for name in _COMPUTE) * executions / answered / 1e6 / seconds
    if busy is not None:
        busy = max(0.0, busy - max(0.0, grown.get(_HELD, 0.0)) / 1e6 / seconds) / knobs.instances
    rows = grown.get(_COUNT, 0.0)
    return Observation(
        at_s=at_s,
        seconds=seconds,
        knobs=knobs,
        arrivals_per_s=max(0.0, answered + failed + refused + growth) / seconds,
        rows_per_request=rows / answered if answered else math.nan,
        answered_per_s=answered / seconds,
        refused_per_s=refused / seconds,
        failed_per_s=(failed + entry.failed) / seconds,
        waiting=figures.get(PENDING, 0.0) + entry.waiting,
        queue_us=grown.get(_QUEUE, 0.0) / answered + entry.wait_us if answered else math.nan,
        mean_batch=rows / executions if executions else math.nan,
        batch_sizes=sizes,
        p99_ms=entry.p99_ms if entry.is_there else _summary_ms(now.samples, model),
        utilisation=busy if answered else 0.0,
        arrivals_by_class={name: count / seconds for name, count in entry.arrivals.items()},
        p99_over_s=0.0 if entry.is_there else SUMMARY_S,
        max_batch_size=max_batch_size,
        delay_is_live=delay_is_live,
        restarted=restarted,
    )


@dataclass(frozen=True)
class _Entry:
    """What an entry counted of a model between two readings."""

    is_there: bool = False
    rejected: float = 0.0  # by Triton
    refused: float = 0.0  # by itself, and those that waited too long
    failed: float = 0.0  # without an answer of Triton's
    waiting: float = 0.0
    growth: float = 0.0  # of those that wait
    wait_us: float = 0.0  # mean, of those that went on to Triton
    p99_ms: float | None = None
    arrivals: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Sequence[Sample], now: Sequence[Sample], model: str) -> _Entry:
        by = ("model", "class")
        figures = {key[1]: each for key, each in top.gather(now, by).items() if key[0] == model}
        earlier = {key[1]: each for key, each in top.gather(before, by).items() if key[0] == model}
        if not figures or not earlier:  # not asked through an entry, or for the first time
            return cls()
        # An entry that was started again counts from 0 on.
        keyed = top.increases(
            {(name,): each for name, each in earlier.items()}, {(name,): each for name, each in figures.items()}
        )
        grown = {name: keyed[name,] for name in figures}

        def count(*statuses: str) -> float:
            return sum(each.get(f"{PROCESSED}:{status}", 0.0) for each in grown.values() for status in statuses)

        statuses = {name for each in grown.values() for name in each if name.startswith(f"{PROCESSED}:")} - _NO_DEMAND
        own = [name.rpartition(":")[2] for name in statuses if name.startswith(f"{PROCESSED}:refused_")]
        waited = sum(each.get(f"{_WAIT}_count", 0.0) for each in grown.values())
        waiting = {name: each.get(_WAITING, 0.0) for name, each in figures.items()}
        growths = {name: waiting[name] - earlier.get(name, {}).get(_WAITING, 0.0) for name in figures}
        return cls(
            is_there=True,
            rejected=count("rejected"),
            refused=count("timeout", *own),
            failed=count("unavailable"),
            waiting=sum(waiting.values()),
            growth=sum(growths.values()),
            wait_us=1e6 * sum(each.get(f"{_WAIT}_sum", 0.0) for each in grown.values()) / waited if waited else 0.0,
            p99_ms=_best_p99_ms(figures, grown),
            arrivals={
                name: max(0.0, sum(each.get(status, 0.0) for status in statuses) + growths[name])
                for name, each in grown.items()
            },
        )


def _problem(before: Reading | None, now: Reading, model: str, figures: Mapping[str, float]) -> str:
    """Why nothing can be concluded; "" when something can."""
    if now.said:
        return now.said
    if model not in now.statistics:
        return f"Triton does not serve the model {model}: it was unloaded, or never loaded."
    if now.problem:
        return now.problem
    if SUCCESS not in figures:
        return f"There are figures of this Triton, but none of {model}."
    if before is None or before.problem or before.said or SUCCESS not in _of_model(before.samples, model):
        return f"{_FIRST_LOOK} {model}; how much it does is known after the next."
    if began_anew(before, now, model):
        return f"The counters of {model} began anew: tritonserver or the model was started again."
    if not now.at_s > before.at_s:
        return f"The time of the figures of {model} did not go on ({before.at_s:.0f}, then {now.at_s:.0f})."
    counted = now.statistics[model].requests - before.statistics[model].requests if model in before.statistics else 0
    if counted > UNSEEN_MOST and not any(
        figures.get(name) != _of_model(before.samples, model).get(name) for name in _GROWING
    ):
        return f"The figures of {model} stand still, but gRPC counted {counted} answers meanwhile: they are not those of now."
    return ""


def _unknown(knobs: Knobs, at_s: float, problem: str, *, restarted: bool, waiting: float) -> Observation:
    nan = math.nan
    return Observation(
        at_s, nan, knobs, nan, nan, nan, nan, nan, waiting, nan, nan, {}, None, None, restarted=restarted, problem=problem
    )  # fmt: skip


def _of_model(samples: Iterable[Sample], model: str) -> dict[str, float]:
    """Triton's figures of a model, all versions together."""
    own = (sample for sample in samples if sample.labels.get("model") == model and "class" not in sample.labels)
    return top.gather(own, ("model",)).get((model,), {})


def _executed(before: Reading, now: Reading, model: str) -> tuple[dict[int, float], float | None]:
    """Executions a second by rows, and how many instances were busy in the mean; nothing when it was loaded meanwhile."""
    earlier, later = before.statistics.get(model), now.statistics[model]
    seconds = now.asked_s - before.asked_s
    if earlier is None or later.busy_ns < earlier.busy_ns or later.requests < earlier.requests or seconds <= 0:
        return {}, None
    grown = {size: count - earlier.executions.get(size, 0) for size, count in later.executions.items()}
    if min(grown.values(), default=0) < 0:
        return {}, None
    sizes = {size: count / seconds for size, count in sorted(grown.items()) if count}
    return sizes, (later.busy_ns - earlier.busy_ns) / 1e9 / seconds


def _by_model(versions: Iterable[ModelStatistics]) -> dict[str, Counts]:
    found: dict[str, Counts] = {}
    for each in versions:
        known = found.get(each.name, Counts(0, {}, 0))
        sizes = {*known.executions, *each.batch_executions}
        found[each.name] = Counts(
            known.requests + each.success.count,
            {size: known.executions.get(size, 0) + each.batch_executions.get(size, 0) for size in sizes},
            known.busy_ns + sum(each.batch_ns.values()),
        )
    return found


def _best_p99_ms(figures: Mapping[str, Mapping[str, float]], grown: Mapping[str, Mapping[str, float]]) -> float | None:
    """P99 of the answers to the class with the shortest SLO; of all classes where none has one. None without answers."""
    slos = {name: each[_SLO] for name, each in figures.items() if _SLO in each}
    best = min(slos.values(), default=None)
    chosen = [name for name in figures if best is None or slos.get(name) == best]
    buckets: dict[float, float] = {}
    for name in chosen:
        for figure, count in grown[name].items():
            if figure.startswith(f"{LATENCY}:"):
                edge = float(figure.rpartition(":")[2])
                buckets[edge] = buckets.get(edge, 0.0) + count
    seconds = top.percentile(buckets, 0.99)
    return None if seconds is None else 1e3 * seconds


def _summary_ms(samples: Iterable[Sample], model: str) -> float | None:
    """P99 of Triton's own summary (`summary_latencies`)."""
    quantiles = [
        sample.value
        for sample in samples
        if sample.name == SUMMARY and sample.labels.get("model") == model and sample.labels.get("quantile") == "0.99"
    ]
    worst = max((each for each in quantiles if math.isfinite(each)), default=None)
    return None if worst is None else worst / 1e3
