from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tritonpilot import repository
from tritonpilot.errors import RepositoryError
from tritonpilot.repository import ModelFolder, compare, models, publish, versions


@pytest.fixture
def wanted(tmp_path: Path) -> ModelFolder:
    source = tmp_path / "source.onnx"
    source.write_bytes(b"weights 1")
    return ModelFolder("m", "name: 'm'\n", {"model.onnx": source}, {"x.bin": b"row"})


def tree(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def beside(root: Path) -> list[str]:
    return [p.name for p in root.parent.iterdir() if p.name.startswith(f".{root.name}")]


def test_publishing_writes_config_version_manifest_and_warmup(tmp_path: Path, wanted: ModelFolder) -> None:
    root = tmp_path / "repository"

    (change,) = publish(root, [wanted])

    assert change.describe() == "m: publish version 1, write config.pbtxt, write warmup data"
    assert set(tree(root)) == {"m/config.pbtxt", "m/1/model.onnx", "m/1/manifest.json", "m/warmup/x.bin"}
    assert models(root) == ["m"]
    assert beside(root) == []


def test_publishing_again_changes_no_byte(tmp_path: Path, wanted: ModelFolder) -> None:
    root = tmp_path / "repository"
    publish(root, [wanted])
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}

    (change,) = publish(root, [wanted])

    assert not change
    assert change.describe() == "m: up to date (version 1)"
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


def test_a_new_model_file_becomes_the_next_version_and_the_old_one_stays(tmp_path: Path, wanted: ModelFolder) -> None:
    root = tmp_path / "repository"
    publish(root, [wanted])
    (root / "m" / "notes.txt").write_text("a person's own file")
    wanted.version_files["model.onnx"].write_bytes(b"weights 2")

    publish(root, [wanted])

    assert versions(root, "m") == [1, 2]
    assert (root / "m/1/model.onnx").read_bytes() == b"weights 1"
    assert (root / "m/2/model.onnx").read_bytes() == b"weights 2"
    assert (root / "m" / "notes.txt").read_text() == "a person's own file"


def test_a_damaged_published_file_is_noticed(tmp_path: Path, wanted: ModelFolder) -> None:
    root = tmp_path / "repository"
    publish(root, [wanted])
    (root / "m/1/model.onnx").write_bytes(b"weights x")

    assert compare(root, wanted).publishes_version


def test_folders_that_triton_would_not_take_for_versions_do_not_count(tmp_path: Path, wanted: ModelFolder) -> None:
    root = tmp_path / "repository"
    publish(root, [wanted])
    for name in ("v2", "02", "-3", "0", "٣"):
        (root / "m" / name).mkdir()

    assert versions(root, "m") == [1]


def test_a_repository_under_a_file_is_refused(tmp_path: Path, wanted: ModelFolder) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(RepositoryError, match="cannot be written: a part of its path is no folder"):
        publish(tmp_path / "file" / "repository", [wanted])


def test_a_second_writer_is_refused(tmp_path: Path, wanted: ModelFolder) -> None:
    root = tmp_path / "repository"
    root.mkdir()
    handle = os.open(root, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(RepositoryError, match="Another process is writing"):
            publish(root, [wanted])
    finally:
        os.close(handle)


def test_a_disk_that_takes_no_more_leaves_the_old_folder_untouched(tmp_path: Path, wanted: ModelFolder) -> None:
    """The kernel refuses to write past a limit, as a full disk does (EFBIG here, ENOSPC there)."""
    root = tmp_path / "repository"
    publish(root, [wanted])
    before = tree(root)
    big = tmp_path / "big.onnx"
    big.write_bytes(b"x" * 200_000)
    code = f"""
        import resource, signal
        from pathlib import Path
        from tritonpilot.errors import RepositoryError
        from tritonpilot.repository import ModelFolder, publish
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        small, big = Path({str(tmp_path / "source.onnx")!r}), Path({str(big)!r})
        folders = [ModelFolder("new", "c", {{"model.onnx": small}}), ModelFolder("m", "other", {{"model.onnx": big}})]
        try:
            publish(Path({str(root)!r}), folders)
        except RepositoryError as error:
            print(error)
    """

    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)

    assert "cannot be written" in done.stdout
    assert "What was there before is untouched." in done.stdout
    assert tree(root) == before
    assert beside(root) == []


def test_a_full_disk_is_named_and_leaves_the_old_folder_untouched(tmp_path: Path, wanted: ModelFolder) -> None:
    """A real ENOSPC, on a small tmpfs in a mount namespace of its own."""
    code = """
        import sys
        from pathlib import Path
        from tritonpilot.errors import RepositoryError
        from tritonpilot.repository import ModelFolder, publish
        root, small, big = Path(sys.argv[1]) / "disk" / "repository", Path(sys.argv[2]), Path(sys.argv[3])
        publish(root, [ModelFolder("m", "c", {"model.onnx": small})])
        before = sorted((str(p), p.is_file() and p.read_bytes()) for p in root.parent.rglob("*"))
        try:
            publish(root, [ModelFolder("m", "c2", {"model.onnx": big})])
        except RepositoryError as error:
            print(error)
        print("same" if before == sorted((str(p), p.is_file() and p.read_bytes()) for p in root.parent.rglob("*")) else "CHANGED")
    """
    (tmp_path / "disk").mkdir()
    big = tmp_path / "big.onnx"
    big.write_bytes(os.urandom(3 << 20))
    mount = f'mount -t tmpfs -o size=1m none {tmp_path / "disk"} && exec "$@"'
    python = [
        sys.executable,
        "-c",
        textwrap.dedent(code),
        str(tmp_path),
        str(wanted.version_files["model.onnx"]),
        str(big),
    ]

    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", *python], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"this machine allows no mount namespace, so no full disk can be made: {done.stderr.strip()}")

    assert "the disk is full. What was there before is untouched." in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "same"


def test_a_writer_killed_at_any_moment_leaves_a_whole_folder(tmp_path: Path, wanted: ModelFolder) -> None:
    """Kill a process that republishes in a loop; the folder is always one of the two complete states."""
    root = tmp_path / "repository"
    a, b = tmp_path / "a.onnx", tmp_path / "b.onnx"
    a.write_bytes(b"a" * 50_000)
    b.write_bytes(b"b" * 50_000)
    code = f"""
        import itertools
        from pathlib import Path
        from tritonpilot.repository import ModelFolder, publish
        for letter in itertools.cycle("ab"):
            folder = ModelFolder("m", letter, {{"model.onnx": Path({str(tmp_path)!r}) / (letter + ".onnx")}})
            publish(Path({str(root)!r}), [folder])
    """
    for delay in (0.3, 0.35, 0.41, 0.47):
        writer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
        deadline = time.monotonic() + 20
        while not models(root) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait()

        letter = (root / "m/config.pbtxt").read_text()
        newest = root / "m" / str(versions(root, "m")[-1])
        assert (newest / "model.onnx").read_bytes() == letter.encode() * 50_000
        assert (newest / "manifest.json").is_file()

    publish(root, [wanted])
    assert beside(root) == [], "leftovers of killed writers are removed by the next one"


def test_without_exchange_two_renames_do_the_same(
    tmp_path: Path, wanted: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "repository"
    publish(root, [wanted])
    monkeypatch.setattr(repository, "_RENAME_EXCHANGE", 1 << 20)  # a flag that every kernel refuses with EINVAL

    publish(root, [replace(wanted, config_text="name: 'm'\n# new\n")])

    assert (root / "m/config.pbtxt").read_text().endswith("# new\n")
    assert (root / "m/1/model.onnx").read_bytes() == b"weights 1"
    assert beside(root) == []


def test_a_read_only_file_system_is_named(tmp_path: Path, wanted: ModelFolder) -> None:
    code = """
        import sys
        from pathlib import Path
        from tritonpilot.errors import RepositoryError
        from tritonpilot.repository import ModelFolder, publish
        try:
            publish(Path(sys.argv[1]), [ModelFolder("m", "c", {"model.onnx": Path(sys.argv[2])})])
        except RepositoryError as error:
            print(error)
    """
    (tmp_path / "disk").mkdir()
    mount = f'mount -t tmpfs -o ro none {tmp_path / "disk"} && exec "$@"'
    python = [
        sys.executable,
        "-c",
        textwrap.dedent(code),
        str(tmp_path / "disk"),
        str(wanted.version_files["model.onnx"]),
    ]

    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", *python], capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"this machine allows no mount namespace: {done.stderr.strip()}")

    assert "its file system is read-only. What was there before is untouched." in done.stdout, done.stderr
