"""Which points were measured before? A file with a line of JSON per point, so that a sweep goes on where it was ended.

store = Store(Path("build/sweep-ctr"))
store.rows(keys)            # trial -> row, of those that are known
store.add(key, row)         # on disk when it returns
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tritonpilot.errors import HostError
from tritonpilot.grid.plan import Trial
from tritonpilot.grid.row import Row

POINTS_FILE = "points.jsonl"


class Store:
    """The folder of a sweep. Raises HostError when it cannot be written, at once rather than after the first measurement."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / POINTS_FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.file.open("a+b"), tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise unwritable(folder, error) from error

    def rows(self, keys: Mapping[Trial, str]) -> dict[Trial, Row]:
        """The rows of these trials that are known under their keys; the newest of several.

        Lines that are none (the last one of a sweep that was killed, a damaged one) do not count.
        """
        wanted = {key: trial for trial, key in keys.items()}
        found: dict[Trial, Row] = {}
        for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                content = json.loads(line)
                trial = wanted.get(content["key"])
                row = Row.of_dict(content["row"]) if trial is not None else None
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            if row is not None and row.trial == trial and row.point is not None:
                found[trial] = row
        return found

    def add(self, key: str, row: Row) -> None:
        """Keep a row."""
        line = json.dumps({"key": key, "row": row.as_dict()}, allow_nan=False)
        try:
            with self.file.open("ab") as file:
                # A line that was cut off stays a line of its own.
                file.write(f"\n{line}\n".encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def write(self, name: str, content: bytes) -> Path:
        """Write a file of results so that a reader sees the old one or the new one, never a part."""
        path = self.folder / name
        try:
            descriptor, aside = tempfile.mkstemp(prefix=f".{name}-", dir=self.folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                Path(aside).chmod(0o644)
                Path(aside).replace(path)
            finally:
                Path(aside).unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(self.folder, error, name) from error
        return path


def unwritable(folder: Path, error: OSError, name: str = "") -> HostError:
    """What to say when the folder of results, or the file `name` in it, cannot be written."""
    what = f"{name} in the folder of results {folder}" if name else f"The folder of results {folder}"
    return HostError(
        f"{what} cannot be written: {error.strerror or error}. Points that were measured before are kept. "
        "Make room or give yourself permission, or name another with --output."
    )
