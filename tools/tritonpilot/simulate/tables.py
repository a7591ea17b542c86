"""The tables that the kernel works on: a batcher's settings, costs and traffic, row by row.

numba takes a second to import, and most commands need none of it: the kernel is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.costs import Costs, execution_curve
from tritonpilot.simulate.batcher import Batcher
from tritonpilot.simulate.host import Host

FloatArray = npt.NDArray[np.float64]


def wire(costs: Costs, count: int, seed: int) -> FloatArray:
    """Time on the wire of each request, us; independent of what the kernel draws."""
    if len(set(costs.wire_factor)) == 1:
        return np.full(count, costs.wire_us * costs.wire_factor[0])
    quantiles = np.array(costs.wire_factor)
    place = np.random.default_rng((seed, 1)).random(count) * (len(quantiles) - 1)
    below = place.astype(np.int64)
    wire: FloatArray = costs.wire_us * (quantiles[below] + (place - below) * np.diff(quantiles)[below])
    return wire


def requests(
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


def server(batcher: Batcher, costs: Costs, host: Host, seed: int) -> npt.NDArray[Any]:
    """The kernel's one row of what is given and what changes."""
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
        "guard_us": costs.guard_us,
        "batcher_first": host.batcher_first,
        "idle": batcher.instances,
        "random": np.random.SeedSequence(seed).generate_state(1, np.uint64)[0],
        **dict.fromkeys(("batcher_at", "gate_at", "resumed_at", "front_ends"), np.inf),
    }.items():
        row[name] = value
    return found


def payloads(count: int) -> npt.NDArray[Any]:
    """So many empty ones."""
    from tritonpilot.simulate import kernel

    found = np.zeros(count, kernel.PAYLOAD)
    found["head"] = -1
    return found


def instances(batcher: Batcher, most: int) -> npt.NDArray[Any]:
    """A row for each that there ever may be."""
    from tritonpilot.simulate import kernel

    found = np.zeros(most, kernel.INSTANCE)
    found["payload"] = np.where(np.arange(most) < batcher.instances, kernel.FREE, kernel.GONE)
    found["wake_came"] = 1.0
    found["wake_budget"] = kernel.WAKES_SAVED
    for name in ("ends_cpu", "ends_us", "wake_at"):
        found[name] = np.inf
    return found


def queues(batcher: Batcher) -> npt.NDArray[Any]:
    """A row for each level."""
    from tritonpilot.simulate import kernel

    found = np.zeros(len(batcher.levels), kernel.QUEUE)
    found["limit"] = [level.max_queue_size for level in batcher.levels]
    found["delays"] = [level.action == "delay" for level in batcher.levels]
    return found


def sizes(batcher: Batcher, costs: Costs) -> npt.NDArray[Any]:
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
