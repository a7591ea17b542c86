"""Send a load and say what came of it, and whether the sender itself was the limit.

    outcome, facts = run(Target("127.0.0.1:8000"), "ctr", rows, traffic, streams)
    if facts.is_limit:
        print(facts.reason)

Several processes share one clock (CLOCK_MONOTONIC) and the requests in turn.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.errors import HostError, MeasurementError
from tritonpilot.load import grpc_sender, http_sender
from tritonpilot.load.job import CONNECTIONS, PATIENCE_S, Job, Log
from tritonpilot.load.target import Arrays, Target, bodies, describe
from tritonpilot.outcome import Outcome, summarise

LATE_MS = 1.0  # a sender whose P99 of schedule errors is above measures itself
BUSY_CORES = 0.9  # and so does a process that uses more of a core
BEGIN_S = 0.05
WORKER_START_S = 60.0
PROBES = 8
TELL_S = 2.0
SENDERS = {"http": http_sender.send, "grpc": grpc_sender.send}


@dataclass(frozen=True)
class SenderFacts:
    """How well the load was made. A schedule error is how much later than its time a request was sent."""

    schedule_p50_ms: float
    schedule_p99_ms: float
    schedule_max_ms: float
    cores: float  # CPU time of all sending processes per second
    busiest_core: float  # that of the busiest process
    processes: int
    most_in_flight: int
    is_limit: bool
    reason: str
    errors: Mapping[str, str]  # kind -> the server's words about the first one
    held: int = 0  # over HTTP: requests that waited here for a server that stood still, and count in no schedule error

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def run(
    target: Target,
    model: str,
    samples: Arrays,
    traffic: Traffic,
    streams: Sequence[Stream],
    *,
    processes: int = 1,
    cpus: Sequence[int] | None = None,
    patience_s: float = PATIENCE_S,
    connections: int = CONNECTIONS,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Outcome, SenderFacts]:
    """Send `traffic` to a model and wait for the answers; latency counts from the scheduled times.

    `samples` maps inputs to arrays [rows, ...] that the requests are made of. `cpus` pins the sender, each process to one of
    them when there are several. A request without an answer for `patience_s` is an error. Raises ServerError when the server
    does not know the model, HostError for CPUs that this process may not use, MeasurementError when nothing can be sent or no
    request of a stream is answered beforehand.
    """
    say = on_progress or (lambda _: None)
    if not len(traffic):
        raise MeasurementError("No request is due within this time. Nothing was sent. Raise the rate or the time.")
    if processes < 1:
        raise MeasurementError(f"A load needs at least one process, not {processes}. Nothing was sent.")
    asked = bodies(target, describe(target, model), samples, streams, traffic)
    job = Job(target, model, asked.content, asked.headers, traffic.at_s, asked.place, patience_s, connections)
    _probe(job, traffic, streams)
    with _pinned(cpus):
        logs, parts = _carry_out(job, processes, cpus, traffic.seconds, say)
    return _judge(traffic, streams, logs, parts)


def send(job: Job, start: float, on_look: Callable[[int, int, Log], None] | None = None) -> Log:
    """Send a job from this process, undisturbed by its own garbage collection."""
    was_on = gc.isenabled()
    gc.disable()  # NOTE: no collection now either: in a large process it takes longer than there is time before `start`
    try:
        return SENDERS[job.target.protocol](job, start, on_look)
    finally:
        if was_on:
            gc.enable()


def _probe(job: Job, traffic: Traffic, streams: Sequence[Stream]) -> None:
    """Let one request of each stream be answered first: a model that answers none needs no load."""
    for place, stream in enumerate(streams):
        own = np.unique(job.place[traffic.stream == place])[:PROBES]
        if not len(own):
            continue
        words = ""
        for body in own:
            one = replace(job, at_s=np.zeros(1), place=np.array([body], dtype=np.int32))
            log = send(one, time.perf_counter())
            if not log.error[0]:
                break
            words = words or f"{log.kinds[0]}: {log.texts[log.kinds[0]].strip().rstrip('.')}"
        else:
            raise MeasurementError(
                f"Model {job.model} at {job.target.url} answered none of {len(own)} requests of stream {stream.name} "
                f"({words}). The load was not begun. Look at the model, the samples, and the class and headers of the stream."
            )


def _carry_out(
    job: Job, processes: int, cpus: Sequence[int] | None, seconds: float, say: Callable[[str], None]
) -> tuple[list[Log], list[slice]]:
    """The logs, and which requests each of them is about."""
    parts = [slice(number, None, processes) for number in range(processes)]
    if processes == 1:
        return [send(job, time.perf_counter() + BEGIN_S, _teller(seconds, say))], parts
    jobs = [replace(job, at_s=job.at_s[part], place=job.place[part]) for part in parts]
    say(f"sending for {seconds:g} s from {processes} processes")
    with _workers(jobs, cpus) as workers:
        for worker in workers:
            if worker.stdout is None or worker.stdout.readline() != b"ready\n":
                raise _worker_died(worker)
        start = time.perf_counter() + BEGIN_S
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(f"{start!r}\n".encode())
            worker.stdin.flush()
        return [_answer(worker) for worker in workers], parts


@contextlib.contextmanager
def _workers(jobs: Sequence[Job], cpus: Sequence[int] | None) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process per job, waiting for the start; none of them outlives the block."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for number, job in enumerate(jobs):
            # A session of its own: Ctrl-C in the terminal reaches us, and we end the workers.
            worker = subprocess.Popen(
                [sys.executable, "-m", "tritonpilot.load.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
            workers.append(worker)
            if cpus:
                os.sched_setaffinity(worker.pid, {cpus[number % len(cpus)]})
            assert worker.stdin is not None
            try:
                pickle.dump(job, worker.stdin)
                worker.stdin.flush()
            except BrokenPipeError:
                raise _worker_died(worker) from None
        yield workers
    finally:
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
        for worker in workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()


def _answer(worker: subprocess.Popen[bytes]) -> Log:
    assert worker.stdout is not None
    try:
        found = pickle.load(worker.stdout)
    except (EOFError, pickle.UnpicklingError):
        raise _worker_died(worker) from None
    assert isinstance(found, Log)
    return found


def _worker_died(worker: subprocess.Popen[bytes]) -> MeasurementError:
    return MeasurementError(
        f"A sending process ended with status {worker.wait()}. Nothing is reported and the others were ended. See its words above."
    )


@contextlib.contextmanager
def _pinned(cpus: Sequence[int] | None) -> Iterator[None]:
    """This thread, and the threads and processes that it starts, on these CPUs while the block lasts."""
    before = os.sched_getaffinity(0)
    if cpus:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            raise HostError(
                f"The sender cannot run on the CPUs {list(cpus)} ({error}); this process may use {sorted(before)}. Nothing was "
                "sent. Choose among those."
            ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _teller(seconds: float, say: Callable[[str], None]) -> Callable[[int, int, Log], None]:
    """Says every few seconds how far it is."""
    began = last = time.perf_counter()

    def tell(sent: int, in_flight: int, log: Log) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last < TELL_S:
            return
        last = now
        failed = int(np.count_nonzero(log.error))
        errors = f", {failed} errors" if failed else ""
        say(f"{now - began:.0f} of {seconds:.0f} s: {sent} sent, {in_flight} in flight{errors}")

    return tell


def _judge(
    traffic: Traffic, streams: Sequence[Stream], logs: Sequence[Log], parts: Sequence[slice]
) -> tuple[Outcome, SenderFacts]:
    whole = Log.of(len(traffic))
    kinds: dict[str, str] = {}
    for log, part in zip(logs, parts, strict=True):
        for kind in log.kinds:
            kinds.setdefault(kind, log.texts[kind])
        places = [0, *(1 + list(kinds).index(kind) for kind in log.kinds)]
        whole.error[part] = np.array(places, dtype=np.int16)[log.error]
        whole.sent_s[part], whole.done_s[part], whole.is_held[part] = log.sent_s, log.done_s, log.is_held
    outcome = summarise(
        traffic,
        streams,
        latency_us=np.maximum(0.0, whole.done_s - traffic.at_s) * 1e6,
        error=whole.error,
        kinds=tuple(kinds),
    )
    late_ms = np.maximum(0.0, whole.sent_s - traffic.at_s)[~whole.is_held] * 1e3
    p50_ms, p99_ms, max_ms = (float(each) for each in np.quantile(late_ms, (0.5, 0.99, 1.0)))
    cores = [log.cpu_s / log.wall_s if log.wall_s > 0 else 0.0 for log in logs]
    waited = sum(log.waited_for_connection for log in logs)
    waited_for_new = sum(log.waited_for_new for log in logs)
    is_busy, is_late = max(cores) > BUSY_CORES, p99_ms > LATE_MS
    is_known = is_busy or waited or waited_for_new
    why = "" if is_known else f", and used {max(cores):.2f} of a core: other work kept its core"
    reasons = {
        f"{waited} requests were due while every connection of the sender was waiting for an answer": waited,
        f"{waited_for_new} requests were due while {http_sender.MOST_NEW} connections had no first answer yet, and the sender "
        "opens no more at once": waited_for_new,
        f"a sending process used {max(cores):.2f} of a core: use several, with --processes": is_busy,
        f"the sender sent 1 % of the requests {p99_ms:.2f} ms or more after their time{why}": is_late,
    }
    said = [reason for reason, is_so in reasons.items() if is_so]
    return outcome, SenderFacts(
        schedule_p50_ms=p50_ms,
        schedule_p99_ms=p99_ms,
        schedule_max_ms=max_ms,
        cores=sum(cores),
        busiest_core=max(cores),
        processes=len(logs),
        most_in_flight=sum(log.most_in_flight for log in logs),
        is_limit=bool(said),
        reason="; ".join(said) or "every request was sent in time",
        errors=kinds,
        held=int(whole.is_held.sum()),
    )
