"""models/risk: the loans, their split, and that serving's file holds what training fitted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.risk import data, train
from pilotlib.table_fit import Number, arrays, fit
from tritonpilot.errors import HostError

ROOT = Path(__file__).resolve().parents[2]


def test_loans_have_the_columns_of_the_contract() -> None:
    loans = data.load()
    assert len(loans) == 9857
    assert int(loans.is_bad.sum()) == 517
    assert [len([c for c in data.COLUMNS if isinstance(c, Number) is kind]) for kind in (True, False)] == [17, 5]
    numbers, texts = arrays(data.COLUMNS, loans.raw)
    assert np.isfinite(numbers).all()
    assert all(isinstance(text, bytes) for text in texts.ravel())
    assert b"emp_unk" not in set(texts.ravel())
    assert (texts[:, 4] == b"").sum() == 645


def test_split_is_fixed_disjoint_and_even_in_bad_loans() -> None:
    loans = data.load()
    folds = data.fold_numbers(loans, 5)
    np.testing.assert_array_equal(folds, data.fold_numbers(loans, 5))
    train_rows, test_rows = data.split(loans)
    assert len(train_rows) + len(test_rows) == len(loans)
    assert len(test_rows) == (folds == 0).sum() == 1972
    assert [int(loans.is_bad[folds == fold].sum()) for fold in range(5)] == [104, 104, 103, 103, 103]


def test_the_index_of_the_row_and_the_answer_are_no_columns() -> None:
    names = {column.name for column in data.COLUMNS}
    assert not names & {"rownames", data.TARGET}


def test_requests_lack_cells_but_never_those_that_are_insisted_on() -> None:
    _, test_rows = data.split(data.load())
    rows = train.requests(*arrays(data.COLUMNS, test_rows.raw))
    assert rows["numbers"].dtype == np.float32
    assert rows["texts"].dtype.kind == "S"
    assert 0.03 < np.isnan(rows["numbers"][:, 1:]).mean() < 0.07
    assert not np.isnan(rows["numbers"][:, 0]).any()
    assert (rows["texts"][:, 0] != b"").all()
    assert (rows["texts"][:, 1] == b"").any()
    table = fit(data.COLUMNS, data.split(data.load())[0].raw)
    dense, categorical = table.transform(rows["numbers"], rows["texts"].astype(object))
    assert np.isfinite(dense).all()
    assert (categorical < list(table.categorical_sizes.values())).all()


def test_missing_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "DISTRIBUTION", "no-such-distribution")
    data.load.cache_clear()
    with pytest.raises(HostError, match=r"no-such-distribution.*make setup"):
        data.load()


@pytest.mark.parametrize("script", ["models/risk/train.py", "models/ctr_raw/snapshot.py"])
def test_script_without_its_packages_says_make_setup_and_exits_7(script: str) -> None:
    bare = subprocess.run([sys.executable, "-I", "-S", str(ROOT / script)], capture_output=True, text=True, check=False)
    assert bare.returncode == 7
    assert "make setup" in bare.stderr
    assert "Traceback" not in bare.stderr


def test_the_readme_names_the_columns_in_their_order_and_its_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "models/risk/README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(numbers|texts)` \| (.*) \|$", readme, re.MULTILINE))
    assert [name for text in (rows["numbers"], rows["texts"]) for name in re.findall("`(.*?)`", text)] == [
        column.name for column in data.COLUMNS
    ]
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(code, {})  # noqa: S102
    assert capsys.readouterr().out.strip() == re.findall(r"# (\(.*)$", code, re.MULTILINE)[0]
