"""Copies of ONNX models that ONNX Runtime laid out for this machine's CPU, so that a server starts sooner (docs/cold-start.md).

    for note in write(Path("model_repository"), ["text_net"]): print(note)

Only for our own onnxruntime backend, which opens them (pilotlib.optimized): Triton's C++ backend has its own way.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tritonpilot import model_config
from tritonpilot.errors import HostError
from tritonpilot.repository import CONFIG_FILE, versions
from tritonpilot.tritonserver import find_installation

BACKEND = "onnxruntime"
#: What a smaller file could save is lost in the start of a process.
SMALLEST_FILE_BYTES = 1 << 20
_WRITER = "pilotlib.optimize"  # in the Python that serves; tools import nothing of what runs inside Triton


def write(root: Path, names: Sequence[str]) -> Iterator[str]:
    """Write the missing copies for the newest versions of models; what was done, a line for each. Nothing here is an error:
    a model without a copy is served as before.
    """
    files = {str(path): name for name in names if (path := _model_file(root, name)) is not None}
    if not files or not _is_for_our_backend():
        return
    command = [sys.executable, "-m", _WRITER, *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        yield f"no optimized copies were made, the server starts without: {error}"
        return
    for line in done.stdout.splitlines():
        told = json.loads(line)
        name = files.pop(told["path"])
        if told["did"] == "written":
            yield f"{name}: a copy is optimized for this CPU"
        elif told["did"] == "nothing":
            yield f"{name}: no optimized copy, the server opens the model itself: {told['said']}"
    if files:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        yield f"{', '.join(files.values())}: no optimized copy, the server opens the model itself: {last}"


def _model_file(root: Path, name: str) -> Path | None:
    """The file of the newest version that our backend opens on a CPU, when it is large enough to matter."""
    existing = versions(root, name)
    config_file = root / name / CONFIG_FILE
    if not existing or not config_file.is_file():
        return None
    config = model_config.parse(config_file.read_text(encoding="utf-8"), str(config_file))
    on_gpu = any(group.kind == group.KIND_GPU for group in config.instance_group)
    if config.backend != BACKEND or on_gpu:
        return None
    path: Path = root / name / str(existing[-1]) / (config.default_model_filename or "model.onnx")
    return path if path.is_file() and path.stat().st_size >= SMALLEST_FILE_BYTES else None


def _is_for_our_backend() -> bool:
    try:
        return not (find_installation().backends / BACKEND).is_dir()
    except HostError:  # no tritonserver here: the repository is served elsewhere
        return False
