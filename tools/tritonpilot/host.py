"""Can this machine and this Python run the embedded tritonserver?

`observe()` looks, `findings(host, stubs)` judges what was seen and returns one sentence for each thing that is wrong, with
what to do about it. The judging is pure, so tests feed it the facts of machines that they do not have.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GLIBC_MINIMUM = (2, 35)  # the tag of the nvidia-pytriton wheel: manylinux_2_35, that is Ubuntu 22.04, Debian 12
PYTHONS = ((3, 10), (3, 11), (3, 12))  # numpy 1.26 has no wheels for later ones, and numpy 2 gives empty outputs

Version = tuple[int, int]


@dataclass(frozen=True)
class Host:
    """What was seen of this machine and of the Python that runs us (and that Triton's stubs will run)."""

    system: str  # "Linux"
    machine: str  # "x86_64"
    glibc: Version | None  # None: another C library
    implementation: str  # "cpython"
    python: Version
    executable: Path
    python3: Path | None  # the `python3` beside the executable: a stub takes the first one on PATH
    libpython_name: str  # "libpython3.11.so.1.0"
    libpython: Path | None  # where that file is; None: nowhere, as with a static Python
    numpy: str | None


def observe() -> Host:
    """Look at this machine and this Python. Imports nothing heavy, runs no process."""
    executable = Path(sys.executable)
    python3 = shutil.which("python3", path=str(executable.parent))
    return Host(
        system=platform.system(),
        machine=platform.machine(),
        glibc=_glibc(),
        implementation=sys.implementation.name,
        python=sys.version_info[:2],
        executable=executable,
        python3=None if python3 is None else Path(python3),
        libpython_name=_libpython_name(),
        libpython=_libpython(),
        numpy=_version_of("numpy"),
    )


def findings(host: Host, stubs: Collection[Version]) -> list[str]:
    """What keeps this host from running the embedded tritonserver: one sentence or two each, none when all is well.

    `stubs` are the Python versions for which the chosen installation has a Python backend stub.

        findings(observe(), installation.stubs)
    """
    found = []
    if host.system != "Linux" or host.machine != "x86_64":
        found.append(
            f"This machine is {host.system} on {host.machine}, and the embedded tritonserver is built for Linux on "
            "x86_64 only. Use such a machine, or a Triton elsewhere."
        )
    elif host.glibc is None or host.glibc < GLIBC_MINIMUM:
        seen = "another C library than glibc" if host.glibc is None else f"glibc {_dotted(host.glibc)}"
        found.append(
            f"This machine has {seen}, and the embedded tritonserver needs glibc {_dotted(GLIBC_MINIMUM)} or later. "
            "Use a newer system (Debian 12, Ubuntu 22.04, RHEL 10), or a container of one."
        )
    if host.implementation != "cpython" or host.python not in PYTHONS:
        wanted = ", ".join(_dotted(version) for version in PYTHONS)
        found.append(
            f"This Python is {host.implementation} {_dotted(host.python)}, and Triton's Python models run here with "
            f"CPython {wanted}. Make the environment with one of these."
        )
    elif host.python not in stubs:
        has = ", ".join(_dotted(version) for version in sorted(stubs)) or "none"
        found.append(
            f"This Python is {_dotted(host.python)}, and the chosen tritonserver has Python backend stubs for: {has}. "
            "Make the environment with one of these, or choose another tritonserver with TRITONPILOT_TRITONSERVER."
        )
    if host.libpython is None:
        found.append(
            f"This Python ({host.executable}) has no shared {host.libpython_name}, which Triton's Python backend stub "
            f"loads. On Debian and Ubuntu install libpython{_dotted(host.python)}; with pyenv rebuild it with "
            "PYTHON_CONFIGURE_OPTS=--enable-shared; Pythons of uv and conda have it."
        )
    if host.python3 is None or host.python3.resolve() != host.executable.resolve():
        beside = (
            "no python3" if host.python3 is None else f"a python3 that is another Python ({host.python3.resolve()})"
        )
        found.append(
            f"Beside this Python ({host.executable}) there is {beside}, and Triton's Python models run whatever "
            "`python3` comes first on PATH. Use a virtual environment (python -m venv)."
        )
    if host.numpy is None or _major(host.numpy) >= 2:
        seen = "no numpy" if host.numpy is None else f"numpy {host.numpy}"
        found.append(
            f"This environment has {seen}, and the Python backend stub of this Triton needs numpy 1.26: with numpy 2 it "
            f"silently returns empty outputs. Run: {host.executable} -m pip install 'numpy>=1.26,<2'"
        )
    return found


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def _major(version: str) -> int:
    return int(version.split(".", 1)[0])


def _glibc() -> Version | None:
    # os.confstr asks the running C library; platform.libc_ver() reads the executable and can be wrong.
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    except (ValueError, OSError):  # musl does not know the name
        return None
    major, _, minor = version.partition(".")
    return (int(major), int(minor.split(".")[0])) if name == "glibc" and major and minor else None


def _libpython_name() -> str:
    return f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"  # as the stubs ask for it


def _libpython() -> Path | None:
    variables = sysconfig.get_config_vars()
    # LIBDIR of a Python that was moved after it was built is wrong, so look beside it as well; Debian's
    # libraries are in a folder named after the architecture.
    folders = [variables.get("LIBDIR"), f"{sys.base_prefix}/lib"]
    folders += [f"{folder}/{variables.get('MULTIARCH')}" for folder in tuple(folders) if variables.get("MULTIARCH")]
    for folder in folders:
        if folder and (Path(folder) / _libpython_name()).exists():
            return Path(folder) / _libpython_name()
    return None


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
