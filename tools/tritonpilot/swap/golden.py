"""Does a candidate answer rightly? It and the old version get the same rows, or there are stored answers; labels are judged too.

    check = Golden(rows=samples.read(path), tolerances={"prob": Tolerance(0.01)})
    check.run(control, candidate, print)              # Finding("golden", ok, "prob: differs by 2 % ...", {...})
    check.promoted(control, candidate, print)         # the same model under its real name: does it answer as the candidate did?

Without a tolerance an answer may differ by half of the spread of the old answers: models that are trained anew differ, and what
is broken differs by more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tritonpilot import samples
from tritonpilot.control import Control
from tritonpilot.errors import MeasurementError, ModelError, ServerError
from tritonpilot.quantize import accuracy
from tritonpilot.quantize.data import Rows
from tritonpilot.swap.asking import Array, Arrays, Asker
from tritonpilot.swap.compare import Outputs, Tolerance, Verdict, compare
from tritonpilot.swap.terms import Candidate, Finding

Say = Callable[[str], None]

MOST_ROWS = 256
MOST_LABELLED = 4000
ANSWER = "answer."  # before the name of an output, in a file of stored answers
AGAINST_OLD = Tolerance(0.5, is_share=True)
AGAINST_STORED = Tolerance(0.05, is_share=True)
AGAINST_ITSELF = Tolerance(0.001, is_share=True)  # in other batches the last bits may differ


@dataclass(frozen=True)
class Labelled:
    """Rows of one model of the service with what is right, and how much may be lost by the metric (`quantize.accuracy.METRICS`)."""

    model: str
    rows: Rows
    metric: str
    max_loss: float


@dataclass(frozen=True)
class Golden:
    """A check of the answers. `rows` are of the public model's inputs, None: its warmup row, or zeros. `stored` are right answers,
    by output, one for each of `rows`; without them the old version's are taken."""

    rows: Arrays | None = None
    stored: Outputs | None = None
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    labelled: Sequence[Labelled] = ()
    repository: Path | None = None
    name: str = "golden"

    def run(self, control: Control, candidate: Candidate, say: Say) -> Finding:
        """Ask both and compare. A model that does not answer is a finding, too."""
        try:
            new = Asker(control, candidate.names[candidate.public])
            new_asked = self._ask(new, say)
            old_answers: list[Outputs]
            if self.stored is not None:
                old_answers = [self._stored_answers(asked.places, new) for asked in new_asked]
            else:
                old_answers = self._ask_old(Asker(control, candidate.public), new_asked)
        except (ServerError, ModelError) as error:
            return Finding(self.name, ok=False, what=str(error))
        otherwise = AGAINST_OLD if self.stored is None else AGAINST_STORED
        verdicts = compare(old_answers, [each.outputs for each in new_asked], self.tolerances, otherwise, new.free)
        whose = "stored answers" if self.stored is not None else f"version {candidate.old_version}"
        remark = "" if self.rows is not None else " (of warmup data or zeros, for there are no samples)"
        found = self._finding(verdicts, f"{sum(len(each.places) for each in new_asked)} rows against {whose}{remark}")
        changed = [each for each in self.labelled if each.model in candidate.members]
        for each in changed if found.ok else ():
            judged = self._judge_labelled(control, candidate, each, say)
            found = Finding(
                self.name, found.ok and judged.ok, f"{found.what}; {judged.what}" if judged.ok else judged.what,
                {**found.figures, **judged.figures},
            )  # fmt: skip
        return found

    def promoted(self, control: Control, candidate: Candidate, say: Say) -> Finding:
        """Whether the public model answers as the candidate, which is still loaded, does."""
        try:
            asked = self._ask(Asker(control, candidate.names[candidate.public]), say)
            public = Asker(control, candidate.public)
            answers = self._ask_old(public, asked)
        except (ServerError, ModelError) as error:
            return Finding(self.name, ok=False, what=str(error))
        verdicts = compare([each.outputs for each in asked], answers, {}, AGAINST_ITSELF, public.free)
        return self._finding(
            verdicts, f"{len(asked)} requests to {candidate.public} itself against {candidate.names[candidate.public]}"
        )

    def _ask(self, asker: Asker, say: Say) -> list[_Asked]:
        if self.rows is None:
            folder = None if self.repository is None else self.repository / asker.model
            return [_Asked(np.zeros(1, np.intp), {}, asker.ask_once(folder)[0])]
        asker.check(self.rows)
        say(f"asking {asker.model} for its answers")
        return [_Asked(places, inputs, asker.ask(inputs)[0]) for places, inputs in asker.requests(self.rows, MOST_ROWS)]

    def _ask_old(self, asker: Asker, asked: Sequence[_Asked]) -> list[Outputs]:
        if self.rows is None:
            folder = None if self.repository is None else self.repository / asker.model
            return [asker.ask_once(folder)[0]]
        return [asker.ask(each.inputs)[0] for each in asked]

    def _stored_answers(self, places: NDArray[np.intp], asker: Asker) -> dict[str, Array]:
        assert self.stored is not None
        return {
            name: array[places].reshape(len(places), *(array.shape[1:] or (1,)))
            if asker.is_batched
            else array[places[0]]
            for name, array in self.stored.items()
        }

    def _finding(self, verdicts: Sequence[Verdict], of: str) -> Finding:
        wrong = [verdict for verdict in verdicts if not verdict.ok]
        figures = {
            f"{verdict.output}_difference": verdict.difference
            for verdict in verdicts
            if verdict.difference == verdict.difference
        }
        what = "; ".join(verdict.what for verdict in wrong or verdicts)
        return Finding(self.name, ok=not wrong, what=f"{what} ({of})", figures=figures)

    def _judge_labelled(self, control: Control, candidate: Candidate, wanted: Labelled, say: Say) -> Finding:
        """By the task's metric: the model of the candidate against that which serves."""
        model, rows = wanted.model, wanted.rows
        if rows.count > MOST_LABELLED:
            rows = rows.take(np.linspace(0, rows.count - 1, MOST_LABELLED).astype(np.int64))
        say(f"judging {model} by {wanted.metric} on {rows.count} labelled rows")
        try:
            old, new = (_all_answers(Asker(control, name), rows) for name in (model, candidate.names[model]))
            verdict = accuracy.gate(old, new, rows, wanted.metric, wanted.max_loss, max_slice_loss=1.0)
        except (ServerError, ModelError) as error:
            return Finding(self.name, ok=False, what=f"{model}: {error}")
        except MeasurementError as error:
            return Finding(self.name, ok=True, what=f"{model} was not judged by its labels: {error}")
        figures = {f"{model}_{wanted.metric}_old": verdict.reference, f"{model}_{wanted.metric}_new": verdict.candidate}
        ok = verdict.loss <= wanted.max_loss
        what = (
            f"{model}: {wanted.metric} {verdict.reference:.4f} -> {verdict.candidate:.4f} on {rows.count} labelled rows"
        )
        return Finding(
            self.name,
            ok,
            what if ok else f"{what}: a loss of {verdict.loss:.2%}, more than {wanted.max_loss:.2%}",
            figures,
        )


@dataclass(frozen=True)
class _Asked:
    """A request, and what came."""

    places: NDArray[np.intp]
    inputs: Arrays
    outputs: dict[str, Array]


def read_stored(path: Path, inputs: Sequence[str]) -> tuple[dict[str, Array], dict[str, Array]]:
    """(rows, stored answers) of an .npz archive that holds `answer.OUTPUT` arrays beside those of the inputs. Raises ModelError."""
    arrays = samples.read(path)
    answers = {name.removeprefix(ANSWER): array for name, array in arrays.items() if name.startswith(ANSWER)}
    rows = {name: array for name, array in arrays.items() if not name.startswith(ANSWER)}
    absent = [name for name in inputs if name not in rows]
    if absent or not answers:
        lacks = f"the input {absent[0]}" if absent else f"answers: arrays named {ANSWER}OUTPUT"
        raise ModelError(
            f"{path} lacks {lacks} (it has {', '.join(arrays)}). Nothing was changed. Write it with numpy.savez: an array for each "
            f"input, and {ANSWER}OUTPUT for each output that is right, row for row."
        )
    return rows, {name: _as_objects(array) for name, array in answers.items()}


def _as_objects(array: Array) -> Array:
    """Strings as Triton answers with them: objects of bytes."""
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    return array.astype(np.object_) if array.dtype.kind == "S" else array


def _all_answers(asker: Asker, rows: Rows) -> dict[str, Array]:
    """[rows, ...] by output. Raises ServerError."""
    size = min(64, asker.config.max_batch_size)
    if size < 1:
        raise ModelError(f"{asker.model} has no batch dimension, and labels are of rows.")
    parts = [asker.ask(feed)[0] for feed in rows.batches(size)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
