"""The README's first command, less its setup: the demo runs through and ends with its table and the next line to copy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_answers_measures_and_leaves_nothing_running(example_repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from tritonpilot.cli import main; main()", "demo", "--json"]
    folders = ["--models", str(ROOT / "models"), "--repository", str(tmp_path / "model_repository")]

    done = subprocess.run([*command, *folders], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [point["concurrency"] for point in result["points"]] == [1, 4, 16, 64]
    assert all(point["throughput_infer_s"] > 0 and point["p99_ms"] >= point["p50_ms"] > 0 for point in result["points"])
    assert result["points"][-1]["mean_batch"] > result["points"][0]["mean_batch"]
    assert {answer["service"]: len(answer["values"]) for answer in result["answers"]} == {"ctr": 1, "image": 4}
    assert (tmp_path / "model_repository/ctr/config.pbtxt").read_text() == (
        example_repository / "ctr/config.pbtxt"
    ).read_text()
