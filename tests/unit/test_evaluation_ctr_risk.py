"""models/ctr/evaluation.py and models/risk/evaluation.py: the rows they write fit the model and share none with training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from models.ctr import data as ctr_data
from models.ctr import evaluation as ctr
from models.ctr.features import CATEGORICAL, DENSE
from models.risk import data as risk_data
from models.risk import evaluation as risk
from tritonpilot.onnx_model import Signature, TensorSignature
from tritonpilot.quantize.data import Rows, read

ROOT = Path(__file__).resolve().parents[2]


def of_shape(dense: int, categorical: int) -> Signature:
    inputs = (TensorSignature("dense", "FP32", (-1, dense)), TensorSignature("categorical", "INT64", (-1, categorical)))
    return Signature(inputs, (TensorSignature("prob", "FP32", (-1, 1)),))


def clicks(rows: Rows) -> int:
    assert rows.label is not None
    return int(rows.label.sum())


def test_ctr_calibrates_on_the_earlier_half_of_the_test_split_and_judges_by_the_later() -> None:
    calibration, evaluation = ctr.make()
    test = ctr_data.load().test
    assert (calibration.count, evaluation.count) == (9998, 9999)
    np.testing.assert_array_equal(calibration.inputs["dense"], test.dense[:9998])
    np.testing.assert_array_equal(evaluation.inputs["categorical"], test.categorical[9998:])
    assert test.timestamp[9997] < test.timestamp[9998]
    assert clicks(calibration) + clicks(evaluation) == int(test.click.sum())
    assert evaluation.columns == {"dense": DENSE, "categorical": CATEGORICAL}


def test_ctr_slices_say_hour_user_and_age_group_of_each_row() -> None:
    calibration, evaluation = ctr.make()
    test = ctr_data.load().test
    assert set(calibration.slices) == set(evaluation.slices) == {"hour", "user", "age_group"}
    assert sorted(set(calibration.slices["hour"].tolist())) == list(range(24))
    np.testing.assert_array_equal(calibration.slices["hour"], test.timestamp[:9998] % 86400 // 3600)
    assert (calibration.slices["user"] == "new").mean() == pytest.approx(0.8469, abs=1e-4)
    assert set(evaluation.slices["age_group"].tolist()) == set(ctr.AGE_NAMES)
    ages = evaluation.inputs["dense"][:, DENSE.index("user_age")] * 10
    young = evaluation.slices["age_group"] == "18-24"
    assert (ages[young].round().min(), ages[young].round().max()) == (18, 24)
    # the group index is that of the embedding, so each embedded group is one name
    embedded = evaluation.inputs["categorical"][:, CATEGORICAL.index("age_group")]
    assert all(len(set(evaluation.slices["age_group"][embedded == group].tolist())) == 1 for group in set(embedded))


def test_risk_calibrates_on_the_train_split_and_judges_by_the_whole_test_split() -> None:
    calibration, evaluation = risk.make()
    assert (calibration.count, evaluation.count) == (7885, 1972)
    assert (clicks(calibration), clicks(evaluation)) == (413, 104)
    assert {name: array.shape[1:] for name, array in evaluation.inputs.items()} == {"dense": (33,), "categorical": (5,)}
    assert list(evaluation.columns["dense"])[:2] == ["funded_amnt", "int_rate"]
    assert len(evaluation.columns["dense"]) == 33


def test_risk_calibration_rows_lack_cells_as_requests_do() -> None:
    calibration, evaluation = risk.make()
    indicators = [place for place, name in enumerate(calibration.columns["dense"]) if name.endswith(" is missing")]
    assert len(indicators) == 16
    shares = calibration.inputs["dense"][:, indicators].mean(axis=0)
    assert (shares > 0.03).all()
    assert (shares < 0.07).all()
    assert (evaluation.inputs["dense"][:, indicators] == 0).all()


def test_risk_slices_have_the_terms_grades_and_states_of_the_loans() -> None:
    calibration, evaluation = risk.make()
    loans, _ = risk_data.split(risk_data.load())
    assert set(calibration.slices) == {"term", "grade", "verification", "state"}
    assert set(evaluation.slices) == {"term", "grade", "verification"}
    assert sorted(set(calibration.slices["grade"].tolist())) == list("ABCDEFG")
    assert len(set(calibration.slices["term"].tolist())) == 2
    assert calibration.slices["state"].tolist() == loans.raw["addr_state"].tolist()


@pytest.mark.parametrize(("module", "widths"), [(ctr, (28, 8)), (risk, (33, 5))])
def test_the_files_are_read_as_the_models_inputs(
    tmp_path: Path, module: ModuleType, widths: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert module.main(["--output", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.npz", "evaluation.npz"]
    printed = capsys.readouterr().out.splitlines()
    for line, name, rows in zip(printed, ("calibration.npz", "evaluation.npz"), module.make(), strict=True):
        assert line == f"{tmp_path / name} {rows.count} rows"
        again = read(tmp_path / name, of_shape(*widths))
        np.testing.assert_array_equal(again.inputs["dense"], rows.inputs["dense"])


@pytest.mark.parametrize("script", ["models/ctr/evaluation.py", "models/risk/evaluation.py"])
def test_script_without_its_packages_says_make_setup_and_exits_7(script: str) -> None:
    bare = subprocess.run([sys.executable, "-I", "-S", str(ROOT / script)], capture_output=True, text=True, check=False)
    assert bare.returncode == 7
    assert "make setup" in bare.stderr
    assert "Traceback" not in bare.stderr
