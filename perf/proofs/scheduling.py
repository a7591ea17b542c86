"""Are the promises of classes and tenants kept when the load is not kind? Through the entry, in front of the real Triton.

One model of about 10 ms a row on a core of its own (perf.busy), so that queues and not the machine decide. The entry and the
callers share the other core.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import yaml

from perf import busy, callers
from perf.callers import Call, Caller, Due
from perf.frame import Bench, NoisyRoundError, Outcome, median, spread
from perf.open_loop import Request, outputs_of
from perf.subjects import Entry, Served, entered, serving_from
from tritonpilot import metrics
from tritonpilot.entry.messages import CLASS_HEADER, KEY_HEADER
from tritonpilot.entry.tenants import hash_key, new_key
from tritonpilot.errors import MeasurementError

MODEL = "busy"
ABOUT = 0.2  # how long the model takes need not be exact: ratios are compared
SLOWEST = 1.4  # served it takes 1.2 to 1.3 times as long as alone; beyond, a slow core would decide

# -- stall_poisson

POISSON_MS = 20.0
POISSON_LOAD = 0.3
POISSON_ROUNDS = 8
POISSON_REQUESTS = 250  # a round, on each model
UNCURED_REQUESTS = 60  # without the cure they wait for each other, half a second each
WORST_MS = 150.0
MUST_STALL = 5  # of a thousand requests without the cure that wait longer than `WORST_MS`
# One row an execution: the model takes longer for more, and with levels Triton makes larger batches, so that would be compared.
LEVELS = """\
model: {{file: model.onnx, parameters: {{pilot_waker: "{waker}"}}}}
batching: {{max_batch_size: 1}}
classes:
  - {{name: first, priority: 1, max_queue_size: 100}}
  - {{name: second, priority: 2, max_queue_size: 100}}
  - {{name: third, priority: 3, max_queue_size: 100}}
"""
PLAIN, CURED, UNCURED = "plain", "levels", "levels_without_waker"


def stall_poisson(bench: Bench) -> Outcome:
    """P99 under Poisson load with three classes and bounded queues, as a ratio to P99 of the same model without them."""
    rounds = 2 if bench.quick else POISSON_ROUNDS
    configs = {
        PLAIN: "batching: {max_batch_size: 1}",
        CURED: LEVELS.format(waker="auto"),
        UNCURED: LEVELS.format(waker="off"),
    }
    random = np.random.default_rng(4)
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        core = bench.cores.server
        root, model_ms = busy.repository_of(Path(folder), core, POISSON_MS, configs, bench.say, ABOUT)
        with serving_from(root, bench, is_pinned=True) as served:

            def one() -> dict[str, list[float]]:
                gaps = random.exponential(model_ms / 1e3 / POISSON_LOAD, POISSON_REQUESTS)
                times = np.cumsum(gaps).tolist()
                levels = random.integers(1, 4, POISSON_REQUESTS).tolist()
                before = metrics.statistics(served.server.endpoints.grpc, CURED)
                found = {}
                for model in (PLAIN, CURED, UNCURED):
                    wanted = [Request(model, busy.row(), 0 if model == PLAIN else level) for level in levels]
                    count = UNCURED_REQUESTS if model == UNCURED else POISSON_REQUESTS
                    answers = served.sender.send(wanted[:count], at_s=times[:count])
                    outputs_of(answers)
                    found[model] = [answer.latency_ms for answer in answers]
                _check_speed(served, CURED, before, model_ms)
                return found

            kept = bench.rounds(rounds, one, check=served.server.check_alive)
    latencies = {model: np.array([ms for found in kept for ms in found[model]]) for model in configs}
    stalled = int((latencies[UNCURED] > WORST_MS).sum())
    if stalled * 1000 < MUST_STALL * len(latencies[UNCURED]):
        raise MeasurementError(
            f"Without the waker only {stalled} of {len(latencies[UNCURED])} requests took more than {WORST_MS:g} ms, so this "
            "test cannot tell whether the stall is cured here. Nothing is reported. Check that the server is pinned to one core."
        )
    ratios = [float(np.quantile(found[CURED], 0.99) / np.quantile(found[PLAIN], 0.99)) for found in kept]
    p99 = {model: round(float(np.quantile(values, 0.99)), 1) for model, values in latencies.items()}
    worst = float(latencies[CURED].max())
    return Outcome(
        p99[CURED] / p99[PLAIN],
        spread=spread(ratios),
        rounds=rounds,
        ok=worst < WORST_MS,
        details={
            "requests": len(latencies[CURED]),
            "model_ms": round(model_ms, 1),
            "p99_ms": p99,
            "worst_ms": {model: [round(max(found[model]), 1) for found in kept] for model in configs},
            "above_150_ms": {model: int((values > WORST_MS).sum()) for model, values in latencies.items()},
        },
    )


# -- starvation

STARVE_ROUNDS = 3
STARVE_S = 10.0
HIGH_CALLERS, LOW_CALLERS = 12, 2
SHARE = 0.1
P99_MOST = 1.25
FLOOR = f"""\
batching: {{max_batch_size: 1}}
slo: {{p99_ms: 1000}}
classes:
  - {{name: high, priority: 1}}
  - {{name: low, priority: 2, share: {SHARE}, timeout_ms: 60000}}
"""


def starvation(bench: Bench) -> Outcome:
    """The low class's part of all answers while the high class saturates the model; the high class keeps its P99."""
    seconds = 4.0 if bench.quick else STARVE_S
    with _entered(bench, 10.0, {MODEL: FLOOR}) as (served, entry, model_ms):
        body = callers.body(MODEL, busy.row())
        high = [Caller("high", body, {CLASS_HEADER: "high"})] * HIGH_CALLERS
        low = [Caller("low", body, {CLASS_HEADER: "low"})] * LOW_CALLERS

        def one() -> tuple[list[Call], list[Call]]:
            before = metrics.statistics(served.server.endpoints.grpc, MODEL)
            alone = callers.in_turn(entry.http, high, seconds)
            together = callers.in_turn(entry.http, high + low, seconds)
            _all_ok([*alone, *together])
            _check_speed(served, MODEL, before, model_ms)
            return alone, together

        kept = bench.rounds(1 if bench.quick else STARVE_ROUNDS, one, check=served.server.check_alive)
    shares = [sum(call.group == "low" for call in together) / len(together) for _, together in kept]
    p99s = [
        (callers.quantile_ms(alone, 0.99), callers.quantile_ms([c for c in together if c.group == "high"], 0.99))
        for alone, together in kept
    ]
    ratios = [together / alone for alone, together in p99s]
    return Outcome(
        median(shares),
        spread=spread(shares),
        rounds=len(kept),
        ok=median(ratios) <= P99_MOST,
        details={
            "share_asked_for": SHARE,
            "shares": [round(share, 4) for share in shares],
            "high_p99_ratio": round(median(ratios), 3),
            "high_p99_ms_alone_and_together": [[round(ms, 1) for ms in pair] for pair in p99s],
            "low_p99_ms": [
                round(callers.quantile_ms([c for c in together if c.group == "low"], 0.99)) for _, together in kept
            ],
            "answers_per_s_alone_and_together": [
                [round(len(alone) / seconds, 1), round(len(together) / seconds, 1)] for alone, together in kept
            ],
        },
    )


# -- mixed_overload

OVERLOAD = 1.5
HIGH_PART = 0.2
OVERLOAD_ROUNDS = 3
OVERLOAD_S = 20.0
CAPACITY_S = 6.0
CAPACITY_CALLERS = 16  # of the class that may wait longer: more would be refused
HIGH_SLO_MS, LOW_SLO_MS = 300.0, 600.0
HIGH_WITHIN = 0.995
REJECTED_P99_MS = 20.0
PROMISES = f"""\
batching: {{max_batch_size: 4}}
classes:
  - {{name: high, priority: 1, p99_ms: {HIGH_SLO_MS:g}}}
  - {{name: low, priority: 2, p99_ms: {LOW_SLO_MS:g}, share: 0.1}}
"""


def mixed_overload(bench: Bench) -> Outcome:
    """Answers within the SLO of their class per second at 1.5 times the capacity, as a part of the capacity."""
    seconds = 6.0 if bench.quick else OVERLOAD_S
    random = np.random.default_rng(5)
    slo_ms = {"high": HIGH_SLO_MS, "low": LOW_SLO_MS}
    with _entered(bench, 10.0, {MODEL: PROMISES}) as (served, entry, model_ms):
        body = callers.body(MODEL, busy.row())
        steady = [Caller("low", body, {CLASS_HEADER: "low"})] * CAPACITY_CALLERS

        def one() -> tuple[float, list[Call]]:
            before = metrics.statistics(served.server.endpoints.grpc, MODEL)
            first = _answers_per_s(callers.in_turn(entry.http, steady, CAPACITY_S))
            times = callers.poisson(OVERLOAD * first, seconds, random)
            groups = np.where(random.uniform(size=len(times)) < HIGH_PART, "high", "low").tolist()
            calls = callers.on_schedule(
                entry.http,
                [Due(at, group, body, {CLASS_HEADER: group}) for at, group in zip(times, groups, strict=True)],
            )
            last = _answers_per_s(callers.in_turn(entry.http, steady, CAPACITY_S))
            _check_speed(served, MODEL, before, model_ms)
            return (first + last) / 2, calls

        kept = bench.rounds(1 if bench.quick else OVERLOAD_ROUNDS, one, check=served.server.check_alive)
    goodputs, withins, rejected_ms, overloads = [], [], [], []
    for capacity, calls in kept:
        good = [call for call in calls if call.ok and call.latency_ms <= slo_ms[call.group]]
        high = [call for call in calls if call.group == "high"]
        took_s = max(call.answered_s for call in calls)
        goodputs.append(len(good) / max(took_s, seconds) / capacity)
        withins.append(sum(call.group == "high" for call in good) / len(high))
        rejected = [call.latency_ms for call in calls if not call.ok]
        rejected_ms.append(float(np.quantile(rejected, 0.99)) if rejected else 0.0)
        overloads.append(len(calls) / seconds / capacity)
        strange = [call for call in calls if call.status not in (200, 503)]
        if strange:
            raise MeasurementError(
                f"A call was answered with {strange[0].status} {strange[0].text}, not with 200 or 503. Nothing is reported."
            )
    return Outcome(
        median(goodputs),
        spread=spread(goodputs),
        rounds=len(kept),
        ok=min(withins) >= HIGH_WITHIN and max(rejected_ms) < REJECTED_P99_MS,
        details={
            "capacity_per_s": [round(capacity, 1) for capacity, _ in kept],
            "offered_of_capacity": [round(value, 3) for value in overloads],
            "high_within_slo": [round(value, 4) for value in withins],
            "rejected_p99_ms": [round(value, 1) for value in rejected_ms],
            "rejected": [sum(not call.ok for call in calls) for _, calls in kept],
            "with_retry_after": [sum(call.retry_after_ms is not None for call in calls) for _, calls in kept],
            "goodput_of_capacity": [round(value, 3) for value in goodputs],
            "p99_ms": [
                {name: round(callers.quantile_ms([c for c in calls if c.group == name], 0.99)) for name in slo_ms}
                for _, calls in kept
            ],
        },
    )


# -- noisy_neighbour

NEIGHBOUR_ROUNDS = 5
NEIGHBOUR_S = 25.0
QUOTA_PER_S = 5.0
QUIET_PER_S = 20.0
NOISE = 10
ONE_CLASS = """\
batching: {max_batch_size: 4}
slo: {p99_ms: 1000}
classes:
  - {name: only, priority: 1}
"""


def noisy_neighbour(bench: Bench) -> Outcome:
    """P99 of tenant B while tenant A of the same class sends ten times its quota, as a ratio to B's P99 alone."""
    rounds, seconds = (1, 6.0) if bench.quick else (NEIGHBOUR_ROUNDS, NEIGHBOUR_S)
    random = np.random.default_rng(6)
    a, b = new_key(), new_key()
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        tenants = Path(folder, "tenants.yaml")
        limits = {"rate_per_s": QUOTA_PER_S, "burst": 1, "concurrency": 1}
        said = [{"name": "a", "keys": [hash_key(a)], **limits}, {"name": "b", "keys": [hash_key(b)]}]
        tenants.write_text(yaml.safe_dump({"tenants": said}))
        with _entered(bench, 10.0, {MODEL: ONE_CLASS}, tenants) as (served, entry, model_ms):
            body = callers.body(MODEL, busy.row())

            def one() -> tuple[list[Call], list[Call]]:
                before = metrics.statistics(served.server.endpoints.grpc, MODEL)
                quiet = [Due(at, "b", body, {KEY_HEADER: b}) for at in callers.poisson(QUIET_PER_S, seconds, random)]
                loud = [
                    Due(at, "a", body, {KEY_HEADER: a}) for at in callers.poisson(NOISE * QUOTA_PER_S, seconds, random)
                ]
                alone = callers.on_schedule(entry.http, quiet)
                together = callers.on_schedule(entry.http, quiet + loud)
                _all_ok([call for call in [*alone, *together] if call.group == "b"])
                _check_speed(served, MODEL, before, model_ms)
                return alone, together

            kept = bench.rounds(rounds, one, check=served.server.check_alive)
    alone = [call for each, _ in kept for call in each]
    beside = [call for _, each in kept for call in each if call.group == "b"]
    noise = [call for _, each in kept for call in each if call.group == "a"]
    ratios = [
        callers.quantile_ms([c for c in together if c.group == "b"], 0.99) / callers.quantile_ms(first, 0.99)
        for first, together in kept
    ]
    return Outcome(
        callers.quantile_ms(beside, 0.99) / callers.quantile_ms(alone, 0.99),
        spread=spread(ratios),
        rounds=len(kept),
        ok=all(call.status in (200, 429) for call in noise),
        details={
            "b_requests": len(beside),
            "b_errors": sum(not call.ok for call in beside),
            "b_p99_ms_alone_and_beside_a": [
                round(callers.quantile_ms(alone, 0.99), 1),
                round(callers.quantile_ms(beside, 0.99), 1),
            ],
            "a_sent": len(noise),
            "a_answered": sum(call.ok for call in noise),
            "a_quota": round(QUOTA_PER_S * seconds * len(kept)),
            "a_rejected_p99_ms": round(float(np.quantile([c.latency_ms for c in noise if not c.ok], 0.99)), 1),
        },
    )


# -- what they share


@contextmanager
def _entered(
    bench: Bench, model_ms: float, configs: Mapping[str, str], tenants: Path | None = None
) -> Iterator[tuple[Served, Entry, float]]:
    """The busy model on a server of its own core, an entry in front, and how long a row takes alone, ms."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        root, alone_ms = busy.repository_of(Path(folder), bench.cores.server, model_ms, configs, bench.say, ABOUT)
        with (
            serving_from(root, bench, is_pinned=True) as served,
            entered(served, core=bench.cores.client, tenants=tenants) as entry,
        ):
            yield served, entry, alone_ms


def _all_ok(calls: Sequence[Call]) -> None:
    bad = [call for call in calls if not call.ok]
    if bad:
        raise MeasurementError(
            f"{len(bad)} of {len(calls)} calls failed, the first with {bad[0].status} {bad[0].text}. Nothing is reported."
        )


def _answers_per_s(calls: Sequence[Call]) -> float:
    _all_ok(calls)
    return len(calls) / max(call.answered_s for call in calls)


def _check_speed(served: Served, model: str, before: metrics.Statistics, model_ms: float) -> None:
    """Raise NoisyRoundError when the core was much slower than at the calibration."""
    found = metrics.statistics(served.server.endpoints.grpc, model) - before
    compute_ms = found.compute_us / 1e3 / found.mean_batch
    if compute_ms > SLOWEST * model_ms:
        raise NoisyRoundError(f"the core was slow: the model took {compute_ms:.0f} ms, {model_ms:.0f} ms before")
