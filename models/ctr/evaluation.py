"""Write the rows that a smaller click model is calibrated on and judged by.

    python models/ctr/evaluation.py --output models/ctr/build

Leaves calibration.npz and evaluation.npz in --output: the earlier and the later half of the test split, cut between two seconds.
Neither was seen in training, and what is judged comes after what was calibrated on, as in service. `slice.hour` (UTC),
`slice.user` ("known" in training or "new") and `slice.age_group` are in both, the click is the label.
Exit codes: those of tritonpilot.errors (7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np

    from models.ctr import data
    from models.ctr.features import CATEGORICAL, DENSE, age_group
    from models.rows_script import CALIBRATION, EVALUATION, write_rows
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

CALIBRATION_SHARE = 0.5
AGE_NAMES = ("under 18", "18-24", "25-34", "35-44", "45-49", "50-55", "56 and over")


def main(argv: list[str] | None = None) -> int:
    return write_rows(
        argv,
        Path(__file__).parent / "build",
        "Write the click model's calibration and evaluation rows.",
        "ctr: reading 100,000 ratings and computing their features, about 6 s",
        lambda _: dict(zip((CALIBRATION, EVALUATION), make(), strict=True)),
    )


def make() -> tuple[Rows, Rows]:
    """(calibration, evaluation). Raises HostError when the data is absent or damaged."""
    test = data.load().test
    cut = data.split_index(test.timestamp, CALIBRATION_SHARE)
    return _rows(test.part(0, cut)), _rows(test.part(cut, len(test)))


def _rows(split: data.Split) -> Rows:
    ages = np.rint(split.dense[:, DENSE.index("user_age")] * 10).astype(np.int64)
    groups = np.array(AGE_NAMES)[[age_group(age) for age in ages.tolist()]]
    slices = {
        "hour": split.timestamp // 3600 % 24,
        "user": np.where(split.categorical[:, CATEGORICAL.index("user")] == 0, "new", "known"),
        "age_group": groups,
    }
    return Rows(split.inputs, slices, split.click, {"dense": DENSE, "categorical": CATEGORICAL})


if __name__ == "__main__":
    sys.exit(main())
