"""Measure all trials of a sweep, whatever happens to single ones.

    for row in run(stage, trials, known=store.rows(keys), keep=store.add, ...):
        ...                            # each comes as soon as it is measured, and is kept before

A server that dies, also while it loads, is started again and the trial repeated; a setting that Triton refuses costs its own
trials alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from tritonpilot.errors import MeasurementError, ServerError, SpecError
from tritonpilot.grid.measure import Effort, Tool, measure
from tritonpilot.grid.plan import Trial
from tritonpilot.grid.row import Row
from tritonpilot.server import DiedError
from tritonpilot.stage import Stage

LIVES = 2  # of the server, in one trial


def run(
    stage: Stage,
    trials: Sequence[Trial],
    *,
    known: Mapping[Trial, Row] | None = None,
    keep: Callable[[Row], None] | None = None,
    effort: Effort | None = None,
    tool: Tool = "perf_analyzer",
    on_progress: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """Yield the row of each trial in their order: of `known` those that are, the others measured and given to `keep`.

    A row without a point says in `failure` why it has none, and is not kept: the next sweep tries it again. Raises what Stage
    and Store raise when nothing can go on: ModelError, HostError.
    """
    say = on_progress or (lambda _: None)
    there = dict(known or {})
    progress = Progress([trial for trial in trials if trial not in there], say)
    refused: dict[object, str] = {}  # setting -> why it is not served
    for trial in trials:
        if trial in there:
            yield there[trial]
            continue
        progress.begin(trial)
        if trial.setting in refused:
            row = Row(trial, failure=refused[trial.setting])
        else:
            row = _measured(stage, trial, effort or Effort(), tool, say)
            if row.point is None and stage.setting is None and not stage.has_died:
                refused[trial.setting] = row.failure
            if row.point is not None and keep is not None:
                keep(row)
        progress.end(row)
        yield row


def _measured(stage: Stage, trial: Trial, effort: Effort, tool: Tool, say: Callable[[str], None]) -> Row:
    deaths: list[str] = []
    while True:
        try:
            stage.apply(trial.setting)
            row = measure(stage, trial, effort, tool, say)
            return replace(row, notes=(*deaths, *row.notes))
        except (ServerError, MeasurementError, SpecError) as error:
            died = _death(stage, error)
            if not died:
                return Row(trial, failure=str(error), notes=tuple(deaths))
        deaths.append(
            f"{died} while it {'was measured' if stage.setting is not None else 'loaded'}, and was started again"
        )
        if len(deaths) == LIVES:
            return Row(trial, failure=f"{died}, {LIVES} times in this trial. It has no figure.", notes=tuple(deaths))
        say(f"{died}; it is started again and the trial repeated")


def _death(stage: Stage, error: Exception) -> str:
    """How the server died, where an error came of that; nothing for other errors."""
    try:
        if isinstance(error, DiedError):
            raise error
        stage.check_alive()
    except DiedError as died:
        return str(died).partition(". ")[0]
    return ""


class Progress:
    """Says which trial it is, what it gave, and how long the others will take."""

    def __init__(self, trials: Sequence[Trial], say: Callable[[str], None]) -> None:
        self._left = len(trials)
        self._total = len(trials)
        self._say = say
        self._began = time.monotonic()

    def begin(self, trial: Trial) -> None:
        self._say(f"[{self._total - self._left + 1}/{self._total}] {trial.describe()}")

    def end(self, row: Row) -> None:
        self._left -= 1
        done = self._total - self._left
        left_s = (time.monotonic() - self._began) / done * self._left
        left = f"; about {_duration(left_s)} left" if self._left else ""
        if row.point is None or row.throughput is None or row.p99_ms is None:
            self._say(f"    no figure: {row.failure.rstrip('.')}{left}")
            return
        remark = row.remark()
        self._say(
            f"    {row.throughput.mean:,.0f} infer/s \N{PLUS-MINUS SIGN}{row.throughput.pct:.0f} %, P99 {row.p99_ms.mean:.2f} ms "
            f"\N{PLUS-MINUS SIGN}{row.p99_ms.pct:.0f} %{f' ({remark})' if remark else ''}{left}"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
