from __future__ import annotations

from pathlib import Path

import pytest

from tritonpilot import model_config
from tritonpilot.repository import is_complete

COMPLETES = (
    "class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n        return config\n"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text(model_config.HEADER.format(source="models/m/service.yaml"))
    (tmp_path / "companion" / "1").mkdir(parents=True)
    (tmp_path / "companion" / "config.pbtxt").write_text(model_config.COMPANION_HEADER)
    return tmp_path


def test_what_the_build_wrote_is_complete(root: Path) -> None:
    (root / "m" / "1" / "model.py").write_text("class TritonPythonModel: ...\n")
    assert is_complete(root)


def test_a_config_by_hand_may_be_incomplete(root: Path) -> None:
    (root / "m" / "config.pbtxt").write_text("max_batch_size: 8\n")
    assert not is_complete(root)


def test_a_model_without_config_is_incomplete(root: Path) -> None:
    (root / "other" / "1").mkdir(parents=True)
    assert not is_complete(root)


def test_a_model_that_completes_its_own_config_is_let(root: Path) -> None:
    (root / "m" / "1" / "model.py").write_text(COMPLETES)
    assert not is_complete(root)


def test_a_persons_own_backend_that_completes_configs_is_let(root: Path, tmp_path: Path) -> None:
    backends = tmp_path / "own"
    (backends / "mine").mkdir(parents=True)
    (backends / "mine" / "model.py").write_text("class TritonPythonModel: ...\n")
    assert is_complete(root, backends)
    (backends / "mine" / "model.py").write_text(COMPLETES)
    assert not is_complete(root, backends)
