"""Is a candidate slower than the version that serves? Both get the same requests in turn, and Triton says what they computed.

    Latency(rows, max_slower=1.5).run(control, candidate, print)

What is compared is the time of executions of the same size, from Triton's statistics: a queue of live traffic before the old
version would flatter the candidate. In turn, for whatever else the machine does then slows both.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tritonpilot.control import Control
from tritonpilot.errors import ModelError, ServerError
from tritonpilot.swap.asking import BURST_S, Arrays, Asker
from tritonpilot.swap.terms import Candidate, Finding

ROUNDS = 15
ASKED = 3  # requests of each size in a round
LEAST_ROUNDS = 5  # in which both executed batches of a size
MOST_S = 20.0
WARM = 5
SIZES = (1, 4, 16, 64)  # rows: of few the way to the model is the larger part

Ask = Callable[[Asker], object]
#: Executed size -> (executions, ns in all), of one model.
Times = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Latency:
    """A check of how long executions take. Without `rows` the warmup row, or zeros, is asked for."""

    rows: Arrays | None = None
    max_slower: float = 1.5
    name: str = "latency"

    def run(self, control: Control, candidate: Candidate, say: Callable[[str], None]) -> Finding:
        """Ask both in turn, some rounds long."""
        try:
            old, new = Asker(control, candidate.public), Asker(control, candidate.names[candidate.public])
            asks = self._asks(old)
            for _ in range(WARM):
                for ask in asks:
                    ask(old)
                    ask(new)
            say(f"timing {new.model} against {old.model}")
            rounds, took_s = _rounds(control, candidate, asks, (old, new))
        except (ServerError, ModelError) as error:
            return Finding(self.name, ok=False, what=str(error))
        slower = {model: _slower(each) for model, each in rounds.items()}
        compared = {model: found for model, found in slower.items() if found is not None}
        p50_ms = [1e3 * statistics.median(times) for times in took_s]
        figures = {"old_p50_ms": p50_ms[0], "new_p50_ms": p50_ms[1]}
        if len(compared) < len(slower):  # a driver cuts its requests up: no two executions are alike
            compared[candidate.public] = (p50_ms[1] / p50_ms[0], 0)
        figures |= {f"{model}_slower": ratio for model, (ratio, _) in compared.items()}
        model, (ratio, size) = max(compared.items(), key=lambda item: item[1][0])
        ok = ratio <= self.max_slower
        what = f"{model} takes {ratio:.2f} times as long" + (f" for {size} rows" if size else "")
        return Finding(self.name, ok, f"{what}, {'within' if ok else 'more than'} {self.max_slower:g}", figures)

    def _asks(self, old: Asker) -> list[Ask]:
        """Requests of one row, and of as many as the old one executes within BURST_S."""
        if self.rows is None:
            return [Asker.ask_once]
        old.check(self.rows)
        count = len(next(iter(self.rows.values())))
        found: list[Ask] = []
        for size in SIZES if old.is_batched else SIZES[:1]:
            if found and size > old.config.max_batch_size:
                break
            inputs = old.inputs(self.rows, np.arange(size, dtype=np.intp) % count)
            ask: Ask = partial(Asker.ask, inputs=inputs, past_cache=True)
            ask(old)
            ask(old)  # the first of a size takes longer
            if found and old.took_s > BURST_S:
                break
            found = [*found[:1], ask]
        return found


def _rounds(
    control: Control, candidate: Candidate, asks: Sequence[Ask], askers: tuple[Asker, Asker]
) -> tuple[dict[str, list[tuple[Times, Times]]], tuple[list[float], list[float]]]:
    """(what each changed model executed in each round, old and new; how long the smallest requests took, old and new)."""
    rounds: dict[str, list[tuple[Times, Times]]] = {model: [] for model in candidate.members}
    took_s: tuple[list[float], list[float]] = ([], [])
    began = time.monotonic()
    while len(next(iter(rounds.values()))) < ROUNDS and (
        time.monotonic() - began < MOST_S or len(next(iter(rounds.values()))) < LEAST_ROUNDS
    ):
        turn = len(next(iter(rounds.values()))) % 2
        before = {model: (_times(control, model), _times(control, candidate.names[model])) for model in rounds}
        for ask in asks:
            for _ in range(ASKED):
                for whose in (turn, 1 - turn):
                    ask(askers[whose])
                    if ask is asks[0]:
                        took_s[whose].append(askers[whose].took_s)
        for model, (old, new) in before.items():
            rounds[model].append(
                (_since(old, _times(control, model)), _since(new, _times(control, candidate.names[model])))
            )
    return rounds, took_s


def _slower(rounds: Sequence[tuple[Times, Times]]) -> tuple[float, int] | None:
    """(how many times as long the new one takes, for which size), of the size where that is most; None: nothing to compare."""
    means: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for old, new in rounds:
        for size in old.keys() & new.keys():
            means[size].append((old[size][1] / old[size][0], new[size][1] / new[size][0]))
    ratios = {
        size: _undisturbed([new for _, new in pairs]) / _undisturbed([old for old, _ in pairs])
        for size, pairs in means.items()
        if len(pairs) >= LEAST_ROUNDS
    }
    return max(((ratio, size) for size, ratio in ratios.items()), default=None)


def _undisturbed(ns: Sequence[float]) -> float:
    """The lower quartile: what else the machine does only adds."""
    return statistics.quantiles(ns, n=4, method="inclusive")[0]


def _times(control: Control, model: str) -> Times:
    """Of all its versions; those that went take theirs with them."""
    found: Times = {}
    for version in control.statistics(model):
        for size, count in version.batch_executions.items():
            had = found.get(size, (0, 0))
            found[size] = had[0] + count, had[1] + version.batch_ns[size]
    return found


def _since(before: Times, after: Times) -> Times:
    return {
        size: (count - before.get(size, (0, 0))[0], ns - before.get(size, (0, 0))[1])
        for size, (count, ns) in after.items()
        if count > before.get(size, (0, 0))[0]
    }
