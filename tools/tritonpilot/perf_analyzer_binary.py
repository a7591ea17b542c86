"""Which perf_analyzer runs on this machine?

    binary = find()          # the first candidate that answers --version; HostError tells what to do when none does
    binary.path, binary.version, binary.environment()

The binary inside the tritonclient wheel lacks two libraries that few machines have (libb64, libcudart). The
nvidia-pytriton wheel carries both under other names, so a private folder of links makes the pair complete.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tritonpilot.errors import HostError

ENV = "TRITONPILOT_PERF_ANALYZER"
VERSION_TIMEOUT_S = 20
BORROWED = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}


@dataclass(frozen=True)
class Binary:
    """A perf_analyzer that answered `--version`."""

    path: Path
    version: str
    libraries: Path | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False, compare=False)  # kept alive

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Variables to run it with: `base` (default: ours) plus the folder of borrowed libraries."""
        env = dict(os.environ if base is None else base)
        if self.libraries is not None:
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(self.libraries), env.get("LD_LIBRARY_PATH")]))
        return env


@functools.cache
def find() -> Binary:
    """The perf_analyzer of $TRITONPILOT_PERF_ANALYZER, else of PyPI's perf-analyzer, tritonclient's wheel or PATH.

    Raises HostError with what each candidate said when none of them runs.
    """
    folder = tempfile.TemporaryDirectory(prefix="tritonpilot-lib-")
    libraries = _borrow_libraries(Path(folder.name))
    refusals: list[str] = []
    for path in _candidates():
        for borrowed in (None, libraries):
            found = Binary(path, "", borrowed, folder)
            said, version = _ask_version(found)
            if version:
                return Binary(path, version, borrowed, folder)
            if borrowed is libraries:
                refusals.append(f"{path}: {said}")
                break
    folder.cleanup()
    libc = " ".join(platform.libc_ver())
    raise HostError(
        f"No perf_analyzer runs on this machine ({platform.machine()}, {libc}). "
        + (f"Tried: {'; '.join(refusals)}. " if refusals else "There is none in this environment or on PATH. ")
        + "Nothing was measured. Install one: pip install 'tritonclient[all]==2.51.0' nvidia-pytriton==0.7.0 (any "
        "glibc since 2.35), or pip install 'perf-analyzer>=2.58' (glibc >= 2.38), or name one that runs in "
        f"the environment variable {ENV}."
    )


def _candidates() -> Iterator[Path]:
    named = os.environ.get(ENV)
    if named:  # whoever names one wants that one or an error
        yield Path(named)
        return
    seen = set()
    for path in (*_files_of("perf-analyzer"), *_files_of("tritonclient"), *_on_path()):
        resolved = path.resolve()
        if resolved not in seen:
            seen.add(resolved)
            yield path


def _files_of(distribution: str) -> Iterator[Path]:
    """Executables named perf_analyzer that the distribution installed (its empty 0.1.0 on PyPI has none)."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        path = Path(str(file.locate()))
        if file.name == "perf_analyzer" and os.access(path, os.X_OK) and path.is_file():
            yield path.resolve()


def _on_path() -> Iterator[Path]:
    found = shutil.which("perf_analyzer")
    if found:
        yield Path(found)


def _borrow_libraries(folder: Path) -> Path:
    """Links under the names that the binary asks for to the copies in the nvidia-pytriton wheel, if it is here."""
    try:
        files = importlib.metadata.files("nvidia-pytriton") or []
    except importlib.metadata.PackageNotFoundError:
        return folder
    for wanted, pattern in BORROWED.items():
        match = next((file for file in files if file.match(pattern)), None)
        if match is not None:
            (folder / wanted).symlink_to(Path(str(match.locate())).resolve())
    return folder


def _ask_version(binary: Binary) -> tuple[str, str]:
    """(what it said, its version or "" when it does not run)."""
    try:
        answer = subprocess.run(
            [binary.path, "--version"],
            env=binary.environment(),
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), ""
    said = (answer.stdout + answer.stderr).strip()
    words = said.split()
    if answer.returncode == 0 and words[:3] == ["Perf", "Analyzer", "Version"] and len(words) > 3:
        return said, words[3]
    return f"exit code {answer.returncode}, {said or 'no output'}", ""
