"""A model repository on disk: what it holds, and how one model's folder changes in a single step.

    change = compare(root, wanted)
    publish(root, [wanted])

A folder is prepared aside, synced, and exchanged with the old one by renameat2(RENAME_EXCHANGE): a reader sees the old
folder or the new one, never a mixture, whatever kills the writer. Older versions stay (as hard links).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tritonpilot.errors import RepositoryError

CONFIG_FILE = "config.pbtxt"
MANIFEST_FILE = "manifest.json"
WARMUP_FOLDER = "warmup"

_CALLED = re.compile(r'key: "pilot_steps"\s+value \{\s+string_value: "([^"]+)"')

_BACKEND = re.compile(r'^\s*(?:backend|platform):\s*"([^"]+)"', re.MULTILINE)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@dataclass(frozen=True)
class ModelFolder:
    """What one model's folder should hold: config text, the files of its newest version, warmup data."""

    name: str
    config_text: str
    version_files: Mapping[str, Path]
    warmup: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """What differs between a model's folder on disk and what it should hold."""

    name: str
    is_new: bool
    version: int
    """Version that holds the wanted files after publishing."""
    publishes_version: bool
    writes_config: bool
    writes_warmup: bool

    def __bool__(self) -> bool:
        return self.publishes_version or self.writes_config or self.writes_warmup

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "changes": bool(self)}

    def describe(self) -> str:
        """One line for a person: `ctr: publish version 2, write config.pbtxt`."""
        steps = [
            f"publish version {self.version}" if self.publishes_version else "",
            f"write {CONFIG_FILE}" if self.writes_config else "",
            "write warmup data" if self.writes_warmup else "",
        ]
        return f"{self.name}: {', '.join(step for step in steps if step) or f'up to date (version {self.version})'}"


def models(root: Path) -> list[str]:
    """Names of the models in a repository, sorted: the folders that hold a config.pbtxt or a version folder."""
    if not root.is_dir():
        return []
    found = (entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(entry.name for entry in found if (entry / CONFIG_FILE).is_file() or versions(root, entry.name))


def versions(root: Path, name: str) -> list[int]:
    """Versions of a model on disk, ascending. Like Triton, folders whose names are no positive numbers do not count."""
    folder = root / name
    if not folder.is_dir():
        return []
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name[0] != "0")


def called(root: Path, name: str) -> list[str]:
    """The models that a pipeline's driver calls (BLS): Triton loads those of an ensemble with it, but does not know these."""
    config = (_read(root / name / CONFIG_FILE) or b"").decode(errors="replace")
    found = _CALLED.search(config)
    return found[1].split(",") if found else []


def backend(root: Path, name: str) -> str:
    """The Triton backend that a model's config names, "ensemble" for an ensemble, "" when it names none."""
    config = (_read(root / name / CONFIG_FILE) or b"").decode(errors="replace")
    found = _BACKEND.search(config)
    # A platform is a backend with a file format: onnxruntime_onnx, tensorrt_plan, pytorch_libtorch.
    return re.sub("_(onnx|plan|libtorch)$", "", found[1]) if found else ""


def compare(root: Path, wanted: ModelFolder) -> Change:
    """What publishing `wanted` would change. Published files are hashed, so a damaged version counts as different."""
    folder = root / wanted.name
    existing = versions(root, wanted.name)
    newest = existing[-1] if existing else 0
    checksums = {name: sha256(path) for name, path in wanted.version_files.items()}
    is_current = newest > 0 and _checksums(folder / str(newest)) == checksums
    return Change(
        name=wanted.name,
        is_new=not folder.exists(),
        version=newest if is_current else newest + 1,
        publishes_version=not is_current,
        writes_config=_read(folder / CONFIG_FILE) != wanted.config_text.encode(),
        writes_warmup=any(_read(folder / WARMUP_FOLDER / name) != data for name, data in wanted.warmup.items()),
    )


def publish(root: Path, wanted: Sequence[ModelFolder]) -> list[Change]:
    """Bring the folders of `wanted` up to date, one exchange each; returns what changed.

    Everything is prepared before the first exchange, so that a full disk or a bad file changes nothing.
    Raises RepositoryError; the old folders are then untouched.
    """
    with _translated(root), _locked(root), _staging(root) as staging:
        changes = [(folder, compare(root, folder)) for folder in wanted]
        for folder, change in changes:
            if change:
                _prepare(root, folder, change, staging / folder.name)
        for folder, change in changes:
            if change:
                _exchange(staging / folder.name, root / folder.name)
        _sync_folder(root)
    return [change for _, change in changes]


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _prepare(root: Path, wanted: ModelFolder, change: Change, target: Path) -> None:
    current = root / wanted.name
    target.mkdir(mode=0o755)
    if current.is_dir():
        shutil.copytree(current, target, copy_function=os.link, symlinks=True, dirs_exist_ok=True)
    if change.publishes_version:
        folder = target / str(change.version)
        folder.mkdir(mode=0o755)
        for name, source in wanted.version_files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / name)
            _sync_file(folder / name)
        if wanted.version_files:
            files = {name: sha256(folder / name) for name in sorted(wanted.version_files)}
            _write(folder / MANIFEST_FILE, (json.dumps({"sha256": files}, indent=2) + "\n").encode())
        _sync_folder(folder)
    if wanted.warmup:
        (target / WARMUP_FOLDER).mkdir(exist_ok=True)
        for name, data in wanted.warmup.items():
            _write(target / WARMUP_FOLDER / name, data)
        _sync_folder(target / WARMUP_FOLDER)
    _write(target / CONFIG_FILE, wanted.config_text.encode())
    _sync_folder(target)


def _exchange(prepared: Path, current: Path) -> None:
    """Put `prepared` in the place of `current`; what was there lies at `prepared` afterwards."""
    if not current.exists():
        prepared.rename(current)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(prepared), os.fsencode(current)
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(current))
    # File systems without exchange (some overlays and network mounts): two renames, undone when the second fails.
    old = prepared.with_name(prepared.name + ".old")
    current.rename(old)
    try:
        prepared.rename(current)
    except OSError:
        old.rename(current)
        raise


@contextmanager
def _staging(root: Path) -> Iterator[Path]:
    """A private folder on the repository's file system, beside it where possible so that no Triton takes it for a model.

    Leftovers of killed builds are removed first (the lock is held).
    """
    prefix = f".{root.name}.staging-"
    for place in (root.parent, root):
        for left in place.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
    beside = root.parent
    same_disk = beside.stat().st_dev == root.stat().st_dev and os.access(beside, os.W_OK)
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=beside if same_disk else root))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RepositoryError(
                f"Another process is writing the model repository {root}. Nothing was changed. Wait for it and repeat."
            ) from error
        yield
    finally:
        os.close(handle)


@contextmanager
def _translated(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: ("the disk is full", "Free space"),
            errno.EDQUOT: ("the disk quota is used up", "Free space"),
            errno.EACCES: (
                "it is not writable for this user",
                "Change its owner or mode, or name another --repository",
            ),
            errno.EPERM: ("it is not writable for this user", "Change its owner or mode, or name another --repository"),
            errno.EROFS: ("its file system is read-only", "Name another --repository"),
            errno.ENOTDIR: ("a part of its path is no folder", "Name another --repository"),
            errno.EEXIST: ("a part of its path is no folder", "Name another --repository"),
        }
        reason, cure = reasons.get(error.errno or 0, (str(error), "See the reason"))
        raise RepositoryError(
            f"The model repository {root} cannot be written: {reason}. What was there before is untouched. "
            f"{cure}, then repeat."
        ) from error


def _checksums(version_folder: Path) -> dict[str, str]:
    files = (path for path in version_folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(version_folder).as_posix(): sha256(path) for path in files}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def _write(path: Path, data: bytes) -> None:
    # The old file may be a hard link that the live folder shares: replace it, never write through it.
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    _sync_file(path)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
