"""What comes of traffic, given a batcher's settings and what requests and executions cost?

found = simulate(batcher, costs, traffic(streams, seconds=60, seed=1), streams, seed=1)
found.outcome.p_ms(0.99), found.mean_rows, found.utilisation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.costs import Costs, execution_curve
from tritonpilot.outcome import REJECTED, TIMED_OUT, Outcome, summarise
from tritonpilot.simulate.batcher import Batcher
from tritonpilot.simulate.host import Host

FloatArray = npt.NDArray[np.float64]
#: What Triton answers to more rows than the model takes (INVALID_ARGUMENT, HTTP 400); a kind of Outcome.errors.
TOO_LARGE = "too_large"
EVENTS = 1_000_000  # between two looks at Ctrl-C: about half a second
KINDS = (REJECTED, TIMED_OUT, TOO_LARGE)  # in the order of the kernel's codes


@dataclass(frozen=True)
class Simulated:
    """What came of simulated traffic."""

    outcome: Outcome
    batch_sizes: Mapping[int, int]  # rows of an execution -> executions
    utilisation: float  # share of the time that an instance executes, mean of the instances
    cpu_cores: float  # of the server that were busy, mean
    queue_us: float  # mean time in the queue of answered requests; nan without any
    execution_us: float  # mean time of an execution; nan without any
    wakes: int = 0  # requests by which an idle instance woke the batcher

    @property
    def executions(self) -> int:
        return sum(self.batch_sizes.values())

    @property
    def mean_rows(self) -> float:
        """Of an execution; nan without any."""
        return sum(rows * times for rows, times in self.batch_sizes.items()) / (self.executions or np.nan)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "outcome": self.outcome.as_dict(),
            "executions": self.executions,
            "batch_sizes": {str(rows): times for rows, times in self.batch_sizes.items()},
            **{
                name: round(value, 6) if np.isfinite(value) else None
                for name, value in (
                    ("mean_rows", self.mean_rows),
                    ("utilisation", self.utilisation),
                    ("cpu_cores", self.cpu_cores),
                    ("queue_us", self.queue_us),
                    ("execution_us", self.execution_us),
                )
            },
            "wakes": self.wakes,
        }


def simulate(
    batcher: Batcher,
    costs: Costs,
    traffic: Traffic,
    streams: Sequence[Stream],
    seed: int = 0,
    host: Host | None = None,
) -> Simulated:
    """Serve `traffic` and say what came of it; the same arguments give the same answer.

    Latencies count from the scheduled time: half of the wire, the front end, the queue, the execution, the reply, the other
    half. The first call in a process loads or compiles the kernel (seconds, once a machine).
    Raises SpecError for a stream whose class the batcher does not know.
    """
    from tritonpilot.simulate import kernel  # numba takes a second to import, and most commands need none of it

    at_us = traffic.at_s * 1e6
    wire_us = _wire(costs, len(at_us), seed)
    arrival_us = at_us + wire_us / 2
    order = np.argsort(arrival_us, kind="stable") if len(set(costs.wire_factor)) > 1 else np.arange(len(at_us))
    servers = _server(batcher, costs, (host or Host()).of(costs.cores), seed)
    requests = _requests(batcher, traffic, streams, order)
    sizes = _sizes(batcher, costs)
    tables = (
        arrival_us[order],
        servers,
        requests,
        _payloads(len(at_us) + 2),
        _instances(batcher),
        _queues(batcher),
        sizes,
        np.empty(1 << (len(at_us) + batcher.instances + 1).bit_length(), np.int64),
    )
    while not kernel.serve(*tables, EVENTS):
        pass
    server, begun, codes = servers[0], requests["begun_us"], requests["code"]
    queue_us = (begun - arrival_us[order])[codes == kernel.ANSWERED]
    latency_us = np.empty(len(at_us))
    latency_us[order] = requests["done_us"]
    latency_us += wire_us / 2 - at_us
    code = np.empty(len(at_us), dtype=np.int64)
    code[order] = codes
    length_us = max(server["now"], traffic.seconds * 1e6)
    return Simulated(
        outcome=summarise(traffic, streams, latency_us=latency_us, error=code, kinds=KINDS, has_series=False),
        batch_sizes={int(rows): int(sizes["executions"][rows]) for rows in np.flatnonzero(sizes["executions"])},
        utilisation=float(server["busy_us"] / length_us / batcher.instances),
        cpu_cores=float(server["cpu_us"] / length_us),
        queue_us=float(queue_us.mean()) if len(queue_us) else float("nan"),
        execution_us=float(server["busy_us"] / server["executions"]) if server["executions"] else float("nan"),
        wakes=int(server["wakes"]),
    )


def _wire(costs: Costs, count: int, seed: int) -> FloatArray:
    """Time on the wire of each request, us; independent of what the kernel draws."""
    if len(set(costs.wire_factor)) == 1:
        return np.full(count, costs.wire_us * costs.wire_factor[0])
    quantiles = np.array(costs.wire_factor)
    place = np.random.default_rng((seed, 1)).random(count) * (len(quantiles) - 1)
    below = place.astype(np.int64)
    wire: FloatArray = costs.wire_us * (quantiles[below] + (place - below) * np.diff(quantiles)[below])
    return wire


def _requests(
    batcher: Batcher, traffic: Traffic, streams: Sequence[Stream], order: npt.NDArray[np.intp]
) -> npt.NDArray[Any]:
    """The kernel's table of requests, in the order of their arrival."""
    from tritonpilot.simulate import kernel

    found = np.zeros(len(traffic.at_s), kernel.REQUEST)
    stream = traffic.stream[order]
    found["rows"] = traffic.rows[order]
    places = np.array([batcher.place(each) for each in streams], dtype=np.int16)
    found["level"] = np.where(found["rows"] > batcher.max_batch_size, kernel.NO_LEVEL, places[stream])
    found["patience_us"] = np.array([_patience_us(batcher, each) for each in streams])[stream]
    found["begun_us"] = np.nan
    return found


def _patience_us(batcher: Batcher, stream: Stream) -> float:
    """How long a request may queue, us; 0 is for ever. PolicyQueue::Enqueue in scheduler_utils.cc."""
    level = batcher.levels[batcher.place(stream)]
    own_us = 0.0 if stream.timeout_ms is None else stream.timeout_ms * 1e3
    overrides = level.allow_timeout_override and 0 < own_us < level.timeout_us
    return own_us if overrides else float(level.timeout_us)


def _server(batcher: Batcher, costs: Costs, host: Host, seed: int) -> npt.NDArray[Any]:
    from tritonpilot.simulate import kernel

    found = np.zeros(1, kernel.SERVER)
    row = found[0]
    for name, value in {
        "instances": batcher.instances,
        "max_batch": batcher.max_batch_size,
        "threads": min(batcher.threads, costs.cores),
        "cores": costs.cores,
        "most_running": batcher.most_running,
        "most_preferred": batcher.preferred[-1],
        "prefetches": batcher.prefetches,
        "keeps_order": batcher.preserve_ordering,
        "has_waker": batcher.has_waker and not batcher.prefetches,
        "delay_us": batcher.queue_delay_us,
        **{name: getattr(costs, name) for name in ("request_us", "front_us", "front_row_us", "reply_us")},
        **{name: getattr(costs, name) for name in ("host_us", "host_request_us", "is_on_cpu", "factor")},
        "slack_us": host.timer_slack_us,
        "slice_us": host.slice_us,
        "batcher_first": host.batcher_first,
        "idle": batcher.instances,
        "random": np.random.SeedSequence(seed).generate_state(1, np.uint64)[0],
        **dict.fromkeys(("batcher_at", "gate_at", "resumed_at", "front_ends"), np.inf),
    }.items():
        row[name] = value
    return found


def _payloads(count: int) -> npt.NDArray[Any]:
    from tritonpilot.simulate import kernel

    found = np.zeros(count, kernel.PAYLOAD)
    found["head"] = -1
    return found


def _instances(batcher: Batcher) -> npt.NDArray[Any]:
    from tritonpilot.simulate import kernel

    found = np.zeros(batcher.instances, kernel.INSTANCE)
    found["payload"] = -1
    found["wake_came"] = 1.0
    found["wake_budget"] = kernel.WAKES_SAVED
    for name in ("ends_cpu", "ends_us", "wake_at"):
        found[name] = np.inf
    return found


def _queues(batcher: Batcher) -> npt.NDArray[Any]:
    from tritonpilot.simulate import kernel

    found = np.zeros(len(batcher.levels), kernel.QUEUE)
    found["limit"] = [level.max_queue_size for level in batcher.levels]
    found["delays"] = [level.action == "delay" for level in batcher.levels]
    return found


def _sizes(batcher: Batcher, costs: Costs) -> npt.NDArray[Any]:
    """The kernel's table of batch sizes, from 0 rows to the maximum."""
    from tritonpilot.simulate import kernel

    found = np.zeros(batcher.max_batch_size + 1, kernel.SIZE)
    preferred = np.array(batcher.preferred)
    rows = np.arange(len(found))
    found["execution_us"] = execution_curve(costs, rows.astype(np.float64))
    found["is_preferred"] = np.isin(rows, preferred)
    # std::set::upper_bound, else the first
    found["next_preferred"] = np.append(preferred, preferred[0])[np.searchsorted(preferred, rows, side="right")]
    return found
