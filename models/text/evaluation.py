"""Write the texts that a smaller text network is calibrated on and judged by.

    python models/text/evaluation.py --output models/text/build

Leaves calibration.npz and evaluation.npz in --output, as tokens. Calibration: 300 news texts and 150 film reviews. Evaluation: the
50 news texts whose similarity people have rated, and the 50 other reviews; the label FP64[100,100] is the rating of each pair,
-1 where nobody rated it. `slice.length` (tokens) and `slice.kind` are in both.
Exit codes: those of tritonpilot.errors (7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np
    import numpy.typing as npt

    from models.packages import data_file
    from models.rows_script import CALIBRATION, EVALUATION, write_rows
    from models.text import data
    from tritonpilot.quantize.data import Rows
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    print(
        f"error: this Python ({sys.executable}) has no {missing.name}, which this needs. Nothing has been written. "
        "Run `make setup` and start this again with .venv/bin/python.",
        file=sys.stderr,
    )
    sys.exit(7)

OLDER_NEWS = "lee_background.cor"
JUDGED_REVIEWS = 50
NOT_RATED = -1.0
LENGTH_BOUNDS = (16, 32, 64, 128, data.MAX_TOKENS)
LENGTH_NAMES = tuple(f"up to {bound}" for bound in LENGTH_BOUNDS)


def main(argv: list[str] | None = None) -> int:
    return write_rows(
        argv,
        Path(__file__).parent / "build",
        "Write the text network's calibration and evaluation rows.",
        "text: tokenising 550 texts, about 2 s",
        lambda _: dict(zip((CALIBRATION, EVALUATION), make(), strict=True)),
    )


def make() -> tuple[Rows, Rows]:
    """(calibration, evaluation). Raises HostError when the texts are absent or damaged."""
    news, ratings = data.rated_documents()
    reviews = [text for text in data.texts() if text not in set(news)]
    older = data_file(data.TEXTS, f"{data.FOLDER}/{OLDER_NEWS}").read_text("latin-1").strip("\n").split("\n")
    label = np.full((len(news) + JUDGED_REVIEWS,) * 2, NOT_RATED)
    above = np.triu(ratings, 1)  # the file has each pair once
    label[: len(news), : len(news)] = above + above.T + np.eye(len(news))
    return _rows(older, reviews[JUDGED_REVIEWS:]), _rows(news, reviews[:JUDGED_REVIEWS], label)


def _rows(news: Sequence[str], reviews: Sequence[str], label: npt.NDArray[np.float64] | None = None) -> Rows:
    (found,) = data.tokenizer().encode([[*news, *reviews]])
    lengths = np.array(LENGTH_NAMES)[np.searchsorted(LENGTH_BOUNDS, found.attention_mask.sum(axis=1))]
    return Rows(
        {"input_ids": found.input_ids, "attention_mask": found.attention_mask},
        {"length": lengths, "kind": np.array(["news"] * len(news) + ["review"] * len(reviews))},
        label,
        sequences=frozenset({"input_ids", "attention_mask"}),
    )


if __name__ == "__main__":
    sys.exit(main())
