"""`guard` of a service file reaches the entry by way of config.pbtxt, and what is wrong with it is said."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format
from onnx_files import identity

from tritonpilot import build, model_config
from tritonpilot.entry.terms import ModelTerms, terms_of
from tritonpilot.errors import RepositoryError, SpecError
from tritonpilot.guard.reference import Reference
from tritonpilot.guard.series import Key
from tritonpilot.guard.terms import Guard
from tritonpilot.spec import load_services

SERVICE = """\
service: iris
model: {file: model.onnx, samples: samples.npz}
batching: {max_batch_size: 8}
"""


def terms(folder: Path, guard: str) -> ModelTerms:
    """What the entry knows of a service with this guard."""
    (folder / "iris").mkdir(exist_ok=True)
    identity(folder / "iris" / "model.onnx")
    np.savez(folder / "iris" / "samples.npz", x=np.zeros((2, 4), np.float32))
    (folder / "iris" / "service.yaml").write_text(SERVICE + guard)
    (plan,) = build.plan(load_services(folder))
    config = model_config.parse(plan.folder.config_text, "test")
    return terms_of(json_format.MessageToDict(config, preserving_proto_field_name=True))


def test_a_guard_reaches_the_entry(tmp_path: Path) -> None:
    assert terms(tmp_path, "").guard is None
    assert terms(tmp_path, "guard: {}").guard == Guard()
    found = terms(tmp_path, "guard: {share: 0.5, tolerances: {y: 0.01}, window_rows: 100}").guard
    assert found is not None
    assert (found.share, found.allowed.limit("y"), found.settings.window_rows) == (0.5, 0.01, 100)


def test_a_reference_goes_with_it(tmp_path: Path) -> None:
    reference = Reference.of({Key("y", "top"): [1.0, 2.0, 3.0]})
    (tmp_path / "iris").mkdir()
    (tmp_path / "iris" / "usual.json").write_text(reference.text())
    assert terms(tmp_path, "guard: {reference: usual.json}").guard_reference == reference


@pytest.mark.parametrize(
    ("guard", "message"),
    [
        ("guard: {tolerances: {prob: 0.1}}", r"guard.tolerances names prob, which is no output of iris \(y\)"),
        ("guard: {reference: none.json}", "none.json cannot be read: .*tritonpilot guard --learn iris"),
        ("guard: {reference: samples.npz}", "samples.npz cannot be read"),
        ("guard: {shares: 0.1}", "did you mean share"),
        ("guard: {share: 2}", "share"),
        ("guard: {reference: other.json}", "is about the output prob, which iris has not"),
        ("model_parameters: {}", "model_parameters"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, guard: str, message: str) -> None:
    (tmp_path / "iris").mkdir()
    (tmp_path / "iris" / "other.json").write_text(Reference.of({Key("prob", "value"): [1.0]}).text())
    with pytest.raises(SpecError, match=message):
        terms(tmp_path, guard)


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("pilot_guard", "{share"), ("pilot_guard", '{"share": 3}'), ("pilot_guard_reference", "[]")],
)
def test_a_parameter_that_is_none_is_named(parameter: str, value: str) -> None:
    with pytest.raises(RepositoryError, match=parameter):
        terms_of({"name": "iris", "parameters": {parameter: {"string_value": value}}})
