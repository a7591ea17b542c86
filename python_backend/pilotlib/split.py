"""How does each request get its rows of a run's outputs? By cutting them where its rows of the inputs lay.

split([scores], ["score"], rows=[2, 1], total=3)  -> [[scores[:2]], [scores[2:]]]
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotlib.tensors import Array


class SplitError(RuntimeError):
    """An output does not have one row per row of input, so it cannot be split among requests."""


def split(outputs: Sequence[Array], names: Sequence[str], rows: Sequence[int], total: int) -> list[list[Array]]:
    """The outputs cut into `rows` per request. Raises SplitError when one has not `total` rows."""
    for name, output in zip(names, outputs, strict=True):
        if output.shape[:1] != (total,):
            raise SplitError(
                f'output "{name}" has shape {list(output.shape)} for {total} rows of input, so its rows cannot be given '
                "to their requests; set max_batch_size: 0 for this model, or export it with the batch dimension first"
            )
    if len(rows) == 1:
        return [list(outputs)]
    answers = []
    start = 0
    for count in rows:
        answers.append([output[start : start + count] for output in outputs])
        start += count
    return answers
