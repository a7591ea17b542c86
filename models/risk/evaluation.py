"""Write the rows that a smaller credit network is calibrated on and judged by.

    python models/risk/evaluation.py --output models/risk/build

Leaves calibration.npz and evaluation.npz in --output, as the network takes them from the table in front of it. Calibration: the
loans of the train split as callers send them, some cells missing. Evaluation: the whole test split, as train.py judges it; only
104 of its loans are bad, too few to share. `slice.term`, `slice.grade` and `slice.verification` are in both, `slice.state` only
in the first (most states have no bad loan in the test split); the label is whether the loan was not paid back.
Exit codes: those of tritonpilot.errors (7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np

    from models.risk import data, train
    from models.rows_script import CALIBRATION, EVALUATION, write_rows
    from pilotlib.table_fit import arrays, fit
    from pilotlib.tensors import Array
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


def main(argv: list[str] | None = None) -> int:
    return write_rows(
        argv,
        Path(__file__).parent / "build",
        "Write the credit network's calibration and evaluation rows.",
        "risk: reading 9,857 loans and fitting their table, about 5 s",
        lambda _: dict(zip((CALIBRATION, EVALUATION), make(), strict=True)),
    )


def make() -> tuple[Rows, Rows]:
    """(calibration, evaluation). Raises HostError when the data is absent or damaged."""
    train_loans, test_loans = data.split(data.load())
    table = fit(data.COLUMNS, train_loans.raw)
    columns = {"dense": table.dense_names, "categorical": tuple(table.categorical_sizes)}
    sent = train.requests(*arrays(data.COLUMNS, train_loans.raw))

    def rows(inputs: tuple[Array, Array], loans: data.Loans, slices: dict[str, Array]) -> Rows:
        dense, categorical = inputs
        return Rows({"dense": dense, "categorical": categorical}, slices, loans.is_bad, columns)

    calibration = rows(
        table.transform(sent["numbers"], sent["texts"].astype(object)),
        train_loans,
        {**_slices(train_loans), "state": train_loans.raw["addr_state"].astype(str)},
    )
    return calibration, rows(table.transform(*arrays(data.COLUMNS, test_loans.raw)), test_loans, _slices(test_loans))


def _slices(loans: data.Loans) -> dict[str, Array]:
    return {
        "term": loans.raw["term"].astype(str),
        "grade": np.array([text[:1] for text in loans.raw["sub_grade"]]),
        "verification": loans.raw["verification_status"].astype(str),
    }


if __name__ == "__main__":
    sys.exit(main())
