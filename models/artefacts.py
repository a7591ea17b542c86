"""What a training or export script leaves for the rest, and how it gets there whole.

    with publication(Path("models/ctr/build")) as partial:    # a folder inside, on the same file system
        ...                                                   # write model.onnx and samples.npz into it
        write_facts(partial, {"test_auc": auc})
    is_complete(Path("models/ctr/build"))                     # True: the three files are there and belong together

    with publication(output, ("rec.onnx", "det.onnx", "characters.txt")) as partial: ...    # any other set of files

A failure or a kill inside the block leaves the old files. facts.json holds the checksums of all others, so a kill
in the instant between two renames shows as incomplete, and running the script again completes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tritonpilot.errors import HostError

MODEL = "model.onnx"
SAMPLES = "samples.npz"
REQUESTS = "requests.npz"  # rows as callers of a pipeline send them
FACTS = "facts.json"
PARTIAL = ".partial-"
LONG_KNOWN = {"sha256": MODEL, "samples_sha256": SAMPLES}


@contextmanager
def publication(output: Path, names: Sequence[str] = (MODEL, SAMPLES)) -> Iterator[Path]:
    """A folder to write the files `names` and FACTS into; at the end of the block they replace those in `output`.

    The first of `names` is put in place last: whoever finds it finds the others. Name them all in the services' files
    too, so that a missing one starts the script again.
    Raises HostError when `output` cannot be written (also for an OSError inside the block: a full disk).
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(output)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=output))
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it however this process ends
            yield partial
            if strange := sorted({path.name for path in partial.iterdir()} - {*names, FACTS}):
                raise ValueError(
                    f"{', '.join(strange)} written, but not among the names to publish: {', '.join(names)}"
                )
            published = (*reversed(names[1:]), FACTS, names[0])  # NOTE: the first of `names` last, as promised above
            for name in published:
                _sync(partial / name)
            for name in published:
                (partial / name).replace(output / name)
            _sync(output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise HostError(
            f"Cannot write the model into {output}: {error}. What is there has not been replaced by anything "
            "half-written. Make room or give yourself permission to write there, or choose another folder with "
            "--output, and start this again."
        ) from error


def write_facts(partial: Path, facts: Mapping[str, Any]) -> None:
    """Write FACTS: `facts` and the SHA-256 of every other file, all already in `partial`, by name under "files".

    Those of MODEL and SAMPLES stand under "sha256" and "samples_sha256" too.
    """
    sums = {path.name: sha256(path) for path in sorted(partial.iterdir()) if path.name != FACTS}
    known = {key: sums[name] for key, name in LONG_KNOWN.items() if name in sums}
    (partial / FACTS).write_text(json.dumps({**facts, **known, "files": sums}, indent=2) + "\n", encoding="utf-8")


def is_complete(output: Path) -> bool:
    """Are all files that FACTS names in `output`, whole and of one run?"""
    try:
        facts = json.loads((output / FACTS).read_text(encoding="utf-8"))
        # Facts from before "files" was written know two files.
        expected = facts.get("files") or {name: facts[key] for key, name in LONG_KNOWN.items()}
        return all(sha256(output / name) == expected_sum for name, expected_sum in expected.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions(*distributions: str) -> dict[str, str]:
    """Installed versions by distribution name."""
    return {name: importlib.metadata.version(name) for name in distributions}


def _remove_leftovers(output: Path) -> None:
    """Folders of runs that were killed; a run that lives holds the lock on its own."""
    for folder in output.glob(f"{PARTIAL}*"):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
