"""What docs/backends.md shows is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tritonpilot import build, repository, spec
from tritonpilot.server import EmbeddedServer
from tritonpilot.testkit import Served

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A service folder with the guide's files."""
    folder = tmp_path / "known"
    folder.mkdir()
    guide = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    for text in re.findall(r"```python\n(.*?)```", guide, re.DOTALL):
        (folder / re.match(r"# (\w+\.py)\n", text)[1]).write_text(text)  # type: ignore[index]
    (text,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (folder / "service.yaml").write_text(text)
    (folder / "words.txt").write_text("tree\nhouse\n")
    return folder


@pytest.mark.server
def test_the_tests_of_the_guide_pass(folder: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert "3 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.server
def test_the_service_of_the_guide_is_built_and_served(folder: Path, tmp_path: Path) -> None:
    services = spec.load_services(folder.parent, ["known"])
    root = tmp_path / "model_repository"
    repository.publish(root, [plan.folder for plan in build.plan(services)])
    with EmbeddedServer(root, strict_config=True) as server:
        ask = Served(server, "known", {"text": "BYTES"})
        case = {"text": np.array([[b"tree xyzzy"]], object)}
        assert ask(case)["share"].item() == 0.5
        with pytest.raises(InferenceServerException, match='"text": row 0: 201 bytes, at most 200 are taken'):
            ask({"text": np.array([[b"x" * 201]], object)})
        ask.close()
