"""What is a service tuned for: who calls, what is promised to them, and between which settings may be chosen?

wish = Wish.of(service, rate_per_s=2000, mix={"realtime": 0.9, "batch": 0.1})
wish.settings(service, cores=1)               # every setting that its limits leave
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tritonpilot.arrivals import Stream, read_recording
from tritonpilot.emulated import is_emulated
from tritonpilot.errors import SpecError
from tritonpilot.pipeline import parts, step_model
from tritonpilot.setting import Precision, Setting, precisions
from tritonpilot.spec import Service
from tritonpilot.written import nearest

#: Queue delays that are tried, us; those that leave no time within the SLO are left out.
DELAYS_US = (0, 200, 500, 1000, 2000, 4000, 7000, 12_000, 20_000, 40_000, 80_000, 160_000)
DELAY_OF_SLO = 0.8  # a request that waits longer for company has no time left for its execution
BATCH_MOST = 256  # largest batch that is tried where neither the service file nor the caller says more
RATE_MOST_PER_S = 10_000_000  # as in a scenario
ANYONE = "all"  # the stream's name where a service has no classes


@dataclass(frozen=True)
class Space:
    """What the choice is limited to; an empty tuple leaves a value to the tuner.

    Triton's max_batch_size is also the largest request that a model takes. Sizes below the present one would refuse requests that
    are answered today, so they are chosen only from `max_batch_sizes`.
    """

    max_batch_sizes: tuple[int, ...] = ()
    queue_delays_us: tuple[int, ...] = ()
    instances: tuple[int, ...] = ()
    threads: tuple[int, ...] = ()
    precisions: tuple[Precision, ...] = ()

    def kinds(self, service: Service, cores: int) -> list[tuple[Precision, int]]:
        """(precision, threads) of every kind of instance that may be chosen: each is measured once.

        Raises SpecError when a precision is asked for that has no model file, or more threads than the server has cores.
        """
        now = Setting.of(service)
        there = precisions(service)
        missing = [each for each in self.precisions if each not in there]
        if missing:
            raise _contradiction(
                service,
                f"{missing[0]} is asked for, but only {', '.join(there)} "
                f"{'has' if len(there) == 1 else 'have'} a model file; `tritonpilot quantize {service.service}` makes others",
            )
        if runs_on_cpu(service):
            threads = self.threads or tuple(2**k for k in range(cores.bit_length()) if 2**k <= cores)
            if max(threads) > cores:
                raise _contradiction(service, f"{max(threads)} threads are asked for, but the server has {cores} cores")
        else:
            threads = self.threads or (now.threads,)
        return list(itertools.product(self.precisions or there, sorted(set(threads))))

    def settings(self, service: Service, cores: int, slo_ms: float, least_rows: int = 1) -> list[Setting]:
        """Every setting within the limits: batches that take a request of `least_rows`, delays that leave time within `slo_ms`.

        Raises SpecError when nothing is left, with the limit that leaves nothing, or when the service cannot have one of them.
        """
        now = Setting.of(service)
        if now.max_batch_size == 0:
            raise _contradiction(
                service, "its model has no batch dimension (max_batch_size 0), so Triton does not batch it"
            )
        allowed = self.max_batch_sizes or _sizes(now.max_batch_size)
        sizes = tuple(each for each in allowed if each >= least_rows)
        if not sizes:
            more = "" if self.max_batch_sizes else f" without --max-batch (--max-batch {least_rows} allows it)"
            raise _contradiction(
                service,
                f"requests have up to {least_rows} rows, more than the largest batch allowed, {max(allowed)}{more}",
            )
        delays = self.queue_delays_us or tuple(sorted({*DELAYS_US, now.queue_delay_us}))
        longest_us = min(
            DELAY_OF_SLO * slo_ms * 1000, *(service.timeout_ms(each) * 1000 - 1 for each in service.classes), 6e7
        )
        fitting = tuple(delay for delay in delays if delay <= longest_us)
        if not fitting:
            raise _contradiction(
                service,
                f"the shortest queue delay allowed is {min(delays)} us, but promises and queue timeouts leave at most "
                f"{longest_us:.0f} us",
            )
        counts = self.instances or _counts(service, now.instances, cores)
        found = [
            replace(
                now, queue_delay_us=delay, max_batch_size=size, instances=count, threads=threads, precision=precision
            )
            for (precision, threads), count, size, delay in itertools.product(
                self.kinds(service, cores), counts, sorted(set(sizes)), sorted(set(fitting))
            )
            # A batch of one is full at once: a delay changes nothing.
            if not (size == 1 and delay != min(fitting))
            and (count * threads <= cores + 1 or not runs_on_cpu(service) or self.instances)
        ]
        if not found:
            raise _contradiction(service, f"no number of instances ({_list(counts)}) fits its threads on {cores} cores")
        for each in found:
            each.applied(service)  # raises now what would else be known after the measurements
        return found

    def with_smaller_batches(self, service: Service, least_rows: int = 1) -> Space | None:
        """The batch sizes that are not chosen from because the service takes larger requests today; None where there are none."""
        now = Setting.of(service).max_batch_size
        sizes = tuple(2**k for k in range(now.bit_length()) if least_rows <= 2**k < now)
        return replace(self, max_batch_sizes=sizes) if sizes and not self.max_batch_sizes else None


@dataclass(frozen=True)
class Wish:
    """`streams` say who calls, how often, and what is promised (P99 within `slo_ms`). Without a rate (`is_rate_open`) the
    highest is sought that keeps the promises, and the streams' rates only say their mix. Memory is that of tritonserver and its
    stubs together.
    """

    streams: tuple[Stream, ...]
    is_rate_open: bool = False
    space: Space = Space()
    memory_mb: float | None = None

    @property
    def rate_per_s(self) -> float:
        """Requests per second of all streams together, the mean over bursts."""
        return sum(mean_rate_per_s(stream) for stream in self.streams)

    @property
    def rows_per_s(self) -> float:
        """Rows per second of all streams together; of recordings as if they had no rows of their own."""
        return sum(mean_rate_per_s(stream) * _mean(stream.rows) for stream in self.streams)

    @property
    def largest_rows(self) -> int:
        """Rows of the largest request."""
        return max(_largest(stream.rows) for stream in self.streams)

    @property
    def slo_ms(self) -> float:
        """The shortest promise, ms; infinite where nothing is promised."""
        return min(stream.slo_ms for stream in self.streams)

    def settings(self, service: Service, cores: int) -> list[Setting]:
        """Every setting that the space leaves for these callers. Raises SpecError when there is none."""
        return self.space.settings(service, cores, self.slo_ms, self.largest_rows)

    def smaller(self, service: Service, cores: int) -> list[Setting]:
        """The settings whose batches are smaller than requests may be today: only to say what they would bring."""
        space = self.space.with_smaller_batches(service, self.largest_rows)
        return [] if space is None else space.settings(service, cores, self.slo_ms, self.largest_rows)

    def at(self, factor: float) -> tuple[Stream, ...]:
        """The streams with `factor` times their rates."""
        return scaled(self.streams, factor)

    def with_slo(self, slo_ms: float) -> Wish:
        """The same wish with another promise to everyone."""
        return replace(self, streams=tuple(replace(stream, slo_ms=slo_ms) for stream in self.streams))

    @classmethod
    def of(
        cls,
        service: Service,
        *,
        rate_per_s: float | None = None,
        slo_ms: float | None = None,
        mix: Mapping[str, float] | None = None,
        rows: int | Mapping[int, float] = 1,
        is_rate_open: bool = False,
        space: Space | None = None,
        memory_mb: float | None = None,
    ) -> Wish:
        """Poisson arrivals of requests of `rows` rows, at the rate and the SLO of the service file where none is given.

        `mix` gives classes their parts of the rate (default: all of it is the default class's). Raises SpecError without a rate
        or an SLO, for a rate that nobody sends, and for a class that does not exist.
        """
        rate = rate_per_s or (service.slo.rate_per_s if service.slo else None) or (1.0 if is_rate_open else None)
        if rate is None:
            raise SpecError(
                f"{service.path} promises no rate (slo.rate_per_s), and none is given. Nothing was measured. Say --rate, or "
                "--rate max for the highest that keeps the SLO."
            )
        if not 0 < rate <= RATE_MOST_PER_S:
            raise SpecError(
                f"{rate:,.6g} requests/s for {service.service} are not above 0 and at most {RATE_MOST_PER_S:,}. Nothing was "
                "measured. Say a lower rate."
            )
        shares = dict(mix or {(_default_class(service) or ANYONE): 1.0})
        known = [each.name for each in service.classes] or [ANYONE]
        unknown = [name for name in shares if name not in known]
        if unknown or min(shares.values()) <= 0:
            what = (
                f"There is no class {unknown[0]}{nearest(unknown[0], known)}" if unknown else "A part is not positive"
            )
            raise SpecError(
                f"{service.path}: {what} in the mix; the classes are {', '.join(known)}. Nothing was measured."
            )
        streams = tuple(
            Stream(
                name=name,
                rate_per_s=rate * share / sum(shares.values()),
                arrivals="poisson",
                rows=rows,
                caller_class="" if name == ANYONE else name,
                priority=next((each.priority for each in service.classes if each.name == name), 0),
                slo_ms=_promise_ms(service, name, slo_ms),
            )
            for name, share in shares.items()
        )
        return cls(streams, is_rate_open=is_rate_open, space=space or Space(), memory_mb=memory_mb)


def scaled(streams: Sequence[Stream], factor: float) -> tuple[Stream, ...]:
    """The same callers, `factor` times as many."""
    return tuple(
        replace(
            stream,
            rate_per_s=(stream.rate_per_s or mean_rate_per_s(stream)) * factor,
            peak_per_s=stream.peak_per_s * factor,
        )
        for stream in streams
    )


def mean_rate_per_s(stream: Stream) -> float:
    """Requests per second over a long time: bursts and recordings counted in. Raises SpecError for a bad recording."""
    if stream.arrivals == "burst":
        return stream.rate_per_s + (stream.peak_per_s - stream.rate_per_s) * stream.for_s / stream.every_s
    if stream.arrivals == "recorded" and not stream.rate_per_s and stream.recording is not None:
        seen = read_recording(stream.recording)
        return len(seen.at_s) / seen.length_s
    return stream.rate_per_s


def _mean(rows: int | Mapping[int, float]) -> float:
    return rows if isinstance(rows, int) else sum(size * weight for size, weight in rows.items()) / sum(rows.values())


def _largest(rows: int | Mapping[int, float]) -> int:
    return rows if isinstance(rows, int) else max(rows)


def passed_on(services: Sequence[Service], name: str) -> dict[str, int]:
    """Pipelines that pass their batches on to the model as they are -> the largest of them, rows."""
    return {
        each.service: each.batching.max_batch_size
        for service in services
        for each in parts(service)
        if each.pipeline is not None and name in [step_model(each, step) for step in each.pipeline.steps]
    }


def runs_on_cpu(service: Service) -> bool:
    """Whether instances take the server's cores: model files without a GPU and Python backends do, emulated devices do not."""
    return not is_emulated(service)


def _promise_ms(service: Service, name: str, slo_ms: float | None) -> float:
    """The P99 a class is promised, ms; `slo_ms` replaces the service's own for its default class."""
    caller = next((each for each in service.classes if each.name == name), None)
    promised = service.promise_ms(caller) if caller is not None else service.slo.p99_ms if service.slo else None
    if slo_ms is not None and (caller is None or caller.name == _default_class(service)):
        return slo_ms
    if promised is None and caller is not None and caller.name != _default_class(service):
        return math.inf  # nothing is promised: every answer counts
    if promised is None:
        raise SpecError(
            f"{service.path} promises no latency (slo.p99_ms), and none is given. Nothing was measured. Say --slo-ms, or write "
            "it into the service file."
        )
    return promised


def _default_class(service: Service) -> str | None:
    return service.default_class or (service.classes[0].name if service.classes else None)


def _sizes(now: int) -> tuple[int, ...]:
    """What is set now, and larger powers of two up to the largest batch that is tried."""
    return (now, *(2**k for k in range(BATCH_MOST.bit_length()) if 2**k > now))


def _counts(service: Service, now: int, cores: int) -> tuple[int, ...]:
    """Instances share the server's cores, so one more than cores at most; a device's are its own: as many as there are now."""
    return tuple(sorted({*range(1, cores + 2), now})) if runs_on_cpu(service) else (now,)


def _list(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def _contradiction(service: Service, why: str) -> SpecError:
    return SpecError(
        f"{service.path}: no setting of {service.service} satisfies what is asked: {why}. Nothing was measured or changed. "
        "Loosen one of the limits."
    )
