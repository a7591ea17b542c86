"""What does the way through the entry cost? CPU time of ctr requests of 1 and 64 rows over HTTP, direct and through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf import machine
from perf.closed_loop import ClosedLoop
from perf.frame import Bench, Outcome, median, spread
from perf.subjects import Arrays, Entry, Served, cut, entered, sample_rows, services, serving

ROUNDS = 5
TURN_S = 1.0
CALLERS = 8
BATCHES = 64
SIZES = (1, 64)


@dataclass(frozen=True)
class Turn:
    """CPU us a request, and requests a second."""

    server_us: float
    entry_us: float
    per_s: float


def entry_cost(bench: Bench) -> Outcome:
    """CPU time of a single-row request through the entry, of entry and server, against the server's when asked directly."""
    rows = sample_rows(services(["ctr"])["ctr"])
    batches = {size: [cut(rows, i * size, size) for i in range(BATCHES)] for size in SIZES}
    found: dict[int, list[tuple[Turn, Turn]]] = {size: [] for size in SIZES}
    with serving(bench, ["ctr"], is_pinned=True) as served, entered(served, core=bench.cores.client) as entry:

        def one() -> dict[int, tuple[Turn, Turn]]:
            return {
                size: (
                    _turn(served, entry, served.server.endpoints.http, batches[size], size),
                    _turn(served, entry, entry.http, batches[size], size),
                )
                for size in SIZES
            }

        for each in bench.rounds(2 if bench.quick else ROUNDS, one, check=served.server.check_alive):
            for size, turns in each.items():
                found[size].append(turns)
    ratios = {
        size: [(through.server_us + through.entry_us) / direct.server_us for direct, through in turns]
        for size, turns in found.items()
    }
    return Outcome(
        median(ratios[1]),
        spread=spread(ratios[1]),
        rounds=len(ratios[1]),
        details={
            "entry_us": {size: round(median([t.entry_us for _, t in turns])) for size, turns in found.items()},
            "server_us_direct": {size: round(median([d.server_us for d, _ in turns])) for size, turns in found.items()},
            "server_us_through": {
                size: round(median([t.server_us for _, t in turns])) for size, turns in found.items()
            },
            "ratio_of_64_rows": round(median(ratios[64]), 3),
            "per_s_direct_and_through": {
                size: [round(median([d.per_s for d, _ in turns])), round(median([t.per_s for _, t in turns]))]
                for size, turns in found.items()
            },
        },
    )


def _turn(served: Served, entry: Entry, url: str, batches: Sequence[Arrays], size: int) -> Turn:
    with ClosedLoop(url, "ctr", batches, CALLERS) as callers:
        callers.run(0.2)
        before = machine.tree_cpu_s(served.server.pid), machine.process_cpu_s(entry.pid)
        requests = callers.run(TURN_S) / size
        after = machine.tree_cpu_s(served.server.pid), machine.process_cpu_s(entry.pid)
    server_us, entry_us = ((b - a) * 1e6 / requests for a, b in zip(before, after, strict=True))
    return Turn(server_us, entry_us, requests / TURN_S)
