"""What comes of traffic, given a batcher's settings and what requests and executions cost?

found = simulate(batcher, costs, traffic(streams, seconds=60, seed=1), streams, seed=1)
found.outcome.p_ms(0.99), found.mean_rows, found.utilisation

run = Run(batcher, costs, traffic, streams)        # the same, with a server that is changed on the way
run.advance(30.0)
run.look().queue_us                                # what has come of it since the last look
run.change(queue_delay_us=0, instances=2, start_s=0.5)
run.finish()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tritonpilot.arrivals import Stream, Traffic
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.outcome import REJECTED, TIMED_OUT, Outcome, summarise
from tritonpilot.simulate import tables
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
    instance_s: float = 0.0  # seconds of instances, from when one is asked for until it is told to go

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
            "instance_s": round(self.instance_s, 6),
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
    return Run(batcher, costs, traffic, streams, seed, host).finish()


@dataclass(frozen=True)
class Window:
    """What a part of a run has shown: what Triton's statistics say about two moments, and the latencies between them."""

    from_s: float
    to_s: float
    arrived: int  # requests, and of each stream
    by_stream: Mapping[str, int]
    rows: int  # of those that arrived
    answered: int
    refused: int  # for a full queue
    failed: int  # otherwise
    waiting: int  # for an execution, at its end
    queue_us: float  # mean of the answered; nan without any
    latency_ms: FloatArray  # of the answered, in the order of their arrival
    batch_sizes: Mapping[int, int]  # of executions that began
    busy_us: float  # of executions that ended, all instances together

    @property
    def seconds(self) -> float:
        return self.to_s - self.from_s


class Run:
    """A simulation that can be stopped at any time, looked at, changed, and continued.

    Without changes what comes of it does not depend on where it was stopped. `most_instances` is how many it may ever grow to.
    """

    def __init__(
        self,
        batcher: Batcher,
        costs: Costs,
        traffic: Traffic,
        streams: Sequence[Stream],
        seed: int = 0,
        host: Host | None = None,
        *,
        most_instances: int | None = None,
    ) -> None:
        from tritonpilot.simulate import kernel  # numba takes a second to import, and most commands need none of it

        self._kernel = kernel
        self._batcher, self._traffic, self._streams = batcher, traffic, streams
        count, most = len(traffic), max(batcher.instances, most_instances or 1)
        at_us = traffic.at_s * 1e6
        self._wire_us = tables.wire(costs, count, seed)
        arrival_us = at_us + self._wire_us / 2
        self._order = (
            np.argsort(arrival_us, kind="stable") if len(set(costs.wire_factor)) > 1 else np.arange(len(at_us))
        )
        self._arrival_us = arrival_us[self._order]
        self._servers = tables.server(batcher, costs, (host or Host()).of(costs.cores), seed)
        self._requests = tables.requests(batcher, traffic, streams, self._order)
        self._payloads = tables.payloads(count + 3)  # the last one stays empty
        self._instances = tables.instances(batcher, most)
        self._queues = tables.queues(batcher)
        self._sizes = tables.sizes(batcher, costs)
        self._jobs = np.empty(1 << (count + most + 1).bit_length(), np.int64)
        self._instance_us, self._counted_us = 0.0, 0.0
        self._looked_us, self._first, self._arrived = 0.0, 0, 0
        self._looked_sizes: npt.NDArray[np.int64] = self._sizes["executions"].copy()
        self._looked_busy_us = 0.0

    @property
    def now_s(self) -> float:
        """Seconds since the beginning of the traffic."""
        return float(self._counted_us / 1e6)

    @property
    def instances(self) -> int:
        """Those that serve or start."""
        return int(self._servers[0]["instances"] - self._servers[0]["leaving"])

    def advance(self, to_s: float) -> None:
        """Serve until a time."""
        self._serve(to_s * 1e6)
        self._count_instances(to_s * 1e6)

    def change(
        self,
        *,
        queue_delay_us: int | None = None,
        instances: int | None = None,
        max_queue_sizes: Mapping[str, int] | None = None,
        start_s: float = 0.0,
    ) -> None:
        """Change the server now; what is left out stays. New instances serve after `start_s`; those that go end their execution.

        Requests that wait stay in their queue and are batched by the new delay when the batcher next looks.
        """
        server = self._servers[0]
        if queue_delay_us is not None:
            server["delay_us"] = queue_delay_us
        for place, level in enumerate(self._batcher.levels):
            if max_queue_sizes is not None and level.name in max_queue_sizes:
                self._queues["limit"][place] = max_queue_sizes[level.name]
        if instances is not None:
            self._set_instances(instances, start_s)

    def look(self) -> Window:
        """What happened since the last look, or the beginning."""
        kernel, server = self._kernel, self._servers[0]
        now_us, following = self._counted_us, int(server["following"])
        part = self._requests[self._first : following]
        done = part["done_us"]
        is_new = (done > self._looked_us) & (done <= now_us)
        good = is_new & (part["code"] == kernel.ANSWERED)
        place = self._order[self._first : following][good]
        latency_us = done[good] + self._wire_us[place] / 2 - self._traffic.at_s[place] * 1e6
        queue_us = (part["begun_us"] - self._arrival_us[self._first : following])[good]
        arrived = self._order[self._arrived : following]
        streams = np.bincount(self._traffic.stream[arrived], minlength=len(self._streams)).tolist()
        executions = self._sizes["executions"] - self._looked_sizes
        found = Window(
            from_s=self._looked_us / 1e6,
            to_s=now_us / 1e6,
            arrived=len(arrived),
            by_stream={stream.name: count for stream, count in zip(self._streams, streams, strict=True)},
            rows=int(self._traffic.rows[arrived].sum(dtype=np.int64)),
            answered=int(good.sum()),
            refused=int((is_new & (part["code"] == kernel.REJECTED)).sum()),
            failed=int((is_new & (part["code"] > kernel.REJECTED)).sum()),
            waiting=int(((done == 0) & np.isnan(part["begun_us"])).sum()),
            queue_us=float(queue_us.mean()) if len(queue_us) else float("nan"),
            latency_ms=latency_us / 1e3,
            batch_sizes={int(rows): int(executions[rows]) for rows in np.flatnonzero(executions)},
            busy_us=float(server["busy_us"] - self._looked_busy_us),
        )
        open_ = np.flatnonzero((done == 0) | (done > now_us))
        self._first += int(open_[0]) if len(open_) else len(part)
        self._looked_us, self._arrived = now_us, following
        self._looked_sizes, self._looked_busy_us = self._sizes["executions"].copy(), float(server["busy_us"])
        return found

    def finish(self) -> Simulated:
        """Serve all that is left and say what came of the whole."""
        kernel, traffic = self._kernel, self._traffic
        self._serve(np.inf)
        server, begun, codes = self._servers[0], self._requests["begun_us"], self._requests["code"]
        length_us = max(server["now"], traffic.seconds * 1e6)
        self._count_instances(length_us)
        queue_us = (begun - self._arrival_us)[codes == kernel.ANSWERED]
        executions = self._sizes["executions"]
        latency_us, code = self.latencies()
        return Simulated(
            outcome=summarise(traffic, self._streams, latency_us=latency_us, error=code, kinds=KINDS, has_series=False),
            batch_sizes={int(rows): int(executions[rows]) for rows in np.flatnonzero(executions)},
            utilisation=float(server["busy_us"] / self._instance_us),
            cpu_cores=float(server["cpu_us"] / length_us),
            queue_us=float(queue_us.mean()) if len(queue_us) else float("nan"),
            execution_us=float(server["busy_us"] / server["executions"]) if server["executions"] else float("nan"),
            wakes=int(server["wakes"]),
            instance_s=self._instance_us / 1e6,
        )

    def latencies(self) -> tuple[FloatArray, npt.NDArray[np.int64]]:
        """Latency of each request of the traffic, us, and its code (0: answered, else 1 + the index into KINDS), in its order."""
        latency_us = np.empty(len(self._traffic))
        latency_us[self._order] = self._requests["done_us"]
        latency_us += self._wire_us / 2 - self._traffic.at_s * 1e6
        code = np.empty(len(self._traffic), dtype=np.int64)
        code[self._order] = self._requests["code"]
        return latency_us, code

    def _serve(self, until_us: float) -> None:
        own = (
            *(self._arrival_us, self._servers, self._requests, self._payloads),
            *(self._instances, self._queues, self._sizes, self._jobs),
        )
        while not self._kernel.serve(*own, EVENTS, until_us):
            pass

    def _count_instances(self, until_us: float) -> None:
        self._instance_us += self.instances * max(0.0, until_us - self._counted_us)
        self._counted_us = max(self._counted_us, until_us)

    def _set_instances(self, wanted: int, start_s: float) -> None:
        """In place, as Triton does it: nothing that executes is interrupted."""
        kernel, server, rows = self._kernel, self._servers[0], self._instances
        limit = replace(self._batcher, instances=wanted)  # raises for a number that cannot be
        if wanted > len(rows):
            raise SpecError(
                f"This run has room for {len(rows)} instances, not for {wanted}. Nothing changed. Ask for more room."
            )
        server["most_running"] = limit.most_running
        more = wanted - self.instances
        kept = min(max(more, 0), int(server["leaving"]))
        server["leaving"] -= kept
        for place in np.flatnonzero(rows["payload"] == kernel.GONE)[: max(more - kept, 0)]:
            rows[place]["payload"] = len(self._payloads) - 1
            rows[place]["from_us"] = rows[place]["ends_us"] = self._counted_us + start_s * 1e6
            server["instances"] += 1
            server["starts"] += 1
        idle = np.flatnonzero(rows["payload"] == kernel.FREE)[::-1][: max(-more, 0)]
        rows["payload"][idle], rows["wake_at"][idle] = kernel.GONE, np.inf
        server["idle"] -= len(idle)
        server["instances"] -= len(idle)
        server["leaving"] += max(-more, 0) - len(idle)
