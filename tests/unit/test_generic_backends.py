"""The generic backends as a whole: what the tools say of them is what they are, and each of them is shipped and documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pilotlib import reference, testkit
from tritonpilot import backends

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.parent.name for path in (ROOT / "python_backend").glob("*/model.py"))
KNOWN = ("boxes", "ctc", "embedding", "emulated", "image_decode", "labels", "table", "tokenize")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """What the backends read, by its name in the version folder."""
    (tmp_path / "labels.txt").write_text("a\nb\nc\n")
    (tmp_path / "characters.txt").write_text("a\nb\nc\n")
    (tmp_path / "features.json").write_text(
        json.dumps({"widths": {"numbers": 2, "texts": 0, "dense": 3, "categorical": 1}})
    )
    (tmp_path / "curve.json").write_text(
        json.dumps({"name": "a device", "source": "a test", "rows": [1], "execution_us": [1]})
    )
    return {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("backend", "parameters"),
    [
        ("boxes", {"max_boxes": "7"}),
        ("boxes", {}),
        ("ctc", {}),
        ("embedding", {}),
        ("embedding", {"pooling": "none", "dims": "64"}),
        ("emulated", {}),
        ("emulated", {"input_size": "8", "output_size": "3"}),
        ("image_decode", {"size": "96"}),
        ("image_decode", {"data_type": "UINT8"}),
        ("image_decode", {"data_type": "FP16"}),
        ("labels", {"k": "2"}),
    ],
)
def test_a_backend_takes_the_config_that_the_build_makes_of_it(
    backend: str, parameters: dict[str, str], files: dict[str, Path], tmp_path: Path
) -> None:
    signature = backends.signature(backend, parameters, files, is_batched=True)
    assert signature is not None

    def tensors(side: Any) -> list[dict[str, Any]]:
        return [{"name": t.name, "data_type": t.data_type, "dims": list(t.shape[1:])} for t in side]

    config = testkit.config(inputs=tensors(signature.inputs), outputs=tensors(signature.outputs), parameters=parameters)

    with testkit.in_process(ROOT / "python_backend" / backend / "model.py", config, tmp_path):
        pass  # it was set up, so it agrees


def test_columns_that_a_table_does_not_have_are_not_in_its_config(files: dict[str, Path]) -> None:
    signature = backends.signature("table", {}, files, is_batched=True)

    assert signature is not None
    assert [(t.name, t.shape) for t in signature.inputs] == [("numbers", (-1, 2))]
    assert [(t.name, t.shape) for t in signature.outputs] == [("dense", (-1, 3)), ("categorical", (-1, 1))]


def test_a_backend_of_ones_own_has_no_known_tensors() -> None:
    assert backends.signature("mine", {}, {}, is_batched=True) is None


def test_every_backend_is_installed_with_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    for name in NAMES:
        assert f'"share/tritonpilot/python_backend/{name}" = ["python_backend/{name}/model.py"]' in project


def test_the_page_on_generic_backends_is_current() -> None:
    wanted = reference.page(ROOT / "python_backend")

    assert (ROOT / "docs/generic-backends.md").read_text(encoding="utf-8") == wanted, (
        "run: python -m pilotlib.reference python_backend > docs/generic-backends.md"
    )
    assert set(NAMES) - set(reference.STAND_INS) >= set(KNOWN)
