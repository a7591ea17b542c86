"""The folder of a stage: removed at its end, or by the next stage when its process was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tritonpilot.spec import load_service
from tritonpilot.stage import Stage

SERVICE = """\
service: digits
model:
  backend: python
  file: serving.py
  inputs: [{name: x, data_type: FP32, dims: [1]}]
  outputs: [{name: y, data_type: FP32, dims: [1]}]
batching: {max_batch_size: 8, queue_delay_us: 500}
"""
ENTER = """
import sys
from pathlib import Path
from tritonpilot.spec import load_service
from tritonpilot.stage import Stage

with Stage(load_service(Path(sys.argv[1]))):
    print("entered", flush=True)
    sys.stdin.read()
"""


def test_folder_of_a_killed_process_is_removed_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(SERVICE)
    (tmp_path / "serving.py").touch()
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    stranger = temporary / "tritonpilot-stage-being-made"  # without a lock: nobody's to remove
    stranger.mkdir()
    argv = [sys.executable, "-c", ENTER, str(path)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(temporary)}
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"entered\n"
            (theirs,) = set(temporary.iterdir()) - {stranger}
            with Stage(load_service(path)):
                assert theirs.is_dir()
        finally:
            process.send_signal(signal.SIGKILL)
    assert theirs.is_dir()
    with Stage(load_service(path)):
        assert not theirs.exists()
        assert len(list(temporary.iterdir())) == 2
    assert list(temporary.iterdir()) == [stranger]
