"""Where are the programs that pip does not bring: prometheus, promtool, alertmanager, amtool, haproxy?

    subprocess.run([find("promtool"), "check", "rules", "alerts.yml"])

One that is installed is taken. Otherwise Debian's package is downloaded once (apt verifies it) and unpacked, not installed, into
the virtual environment, which needs no root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonpilot.errors import MeasurementError

FOLDER = Path(sys.prefix) / "programs"
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"  # haproxy's; not on the PATH of every user
APT_TIMEOUT_S = 180
LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")


@dataclass(frozen=True)
class Program:
    """How an executable is called, and the Debian packages that hold it and the libraries that few machines have."""

    executables: tuple[str, ...]
    packages: tuple[str, ...]


PROGRAMS = {
    "prometheus": Program(("prometheus",), ("prometheus",)),
    "promtool": Program(("promtool",), ("prometheus",)),
    "alertmanager": Program(("alertmanager", "prometheus-alertmanager"), ("prometheus-alertmanager",)),
    "amtool": Program(("amtool",), ("prometheus-alertmanager",)),
    "haproxy": Program(("haproxy",), ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")),
}


def find(name: str, folder: Path = FOLDER) -> Path:
    """The executable of `name`, one of PROGRAMS, downloaded into `folder` when it is not installed.

    Raises MeasurementError when it can be neither found nor downloaded; the message says what to install.
    """
    program = PROGRAMS[name]
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), SYSTEM_FOLDERS))
    for executable in program.executables:
        if found := shutil.which(executable, path=path):
            return Path(found)
    unpacked = folder / program.packages[0]
    try:
        if not unpacked.is_dir():
            _download(program.packages, unpacked)
        return _runnable(program, unpacked)
    except (OSError, subprocess.SubprocessError) as error:
        raise MeasurementError(
            f"There is no {name} on this machine, and Debian's package could not be unpacked into {unpacked}: {_said(error)} "
            f"Nothing was run. Install it and repeat: apt-get install {program.packages[0]}, or put {name} on PATH."
        ) from error


def _download(packages: Sequence[str], unpacked: Path) -> None:
    """Unpack the packages into the folder `unpacked`, which appears complete or not at all."""
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=unpacked.parent, prefix=".download-") as name:
        work = Path(name)
        try:
            _run(["apt-get", "download", *packages], work)
        except subprocess.CalledProcessError:  # no lists, or old ones: fetch our own, which needs no root
            own = _own_lists(work)
            _run(["apt-get", *own, "update"], work)
            _run(["apt-get", *own, "download", *packages], work)
        root = work / "root"
        for package in sorted(work.glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(package), str(root)], work)
        try:
            root.rename(unpacked)
        except OSError:  # another process was faster
            if not unpacked.is_dir():
                raise


def _own_lists(work: Path) -> list[str]:
    (work / "lists" / "partial").mkdir(parents=True)
    (work / "cache" / "archives" / "partial").mkdir(parents=True)
    return ["-o", f"Dir::State::lists={work / 'lists'}", "-o", f"Dir::Cache={work / 'cache'}"]


def _runnable(program: Program, unpacked: Path) -> Path:
    """The executable itself, or, where packages bring libraries, a script beside it that shows them to it."""
    places = [unpacked / folder / name for name in program.executables for folder in ("usr/bin", "usr/sbin", "bin")]
    binary = next((place for place in places if place.is_file()), None)
    if binary is None:
        raise FileNotFoundError(f"the package holds no {' or '.join(program.executables)}")
    if len(program.packages) == 1:
        return binary
    script = unpacked / program.executables[0]
    libraries = os.pathsep.join(str(unpacked / folder) for folder in LIBRARY_FOLDERS)
    with tempfile.NamedTemporaryFile("w", dir=unpacked, delete=False, encoding="utf-8") as file:
        file.write(
            f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}" exec "{binary}" "$@"\n'
        )
    Path(file.name).chmod(0o755)
    Path(file.name).replace(script)
    return script


def _run(command: Sequence[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=APT_TIMEOUT_S, check=True)


def _said(error: Exception) -> str:
    """The last thing that a command said, as a sentence."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = (said or str(error)).strip().splitlines()
    return f"{lines[-1].rstrip('.') if lines else type(error).__name__}."
