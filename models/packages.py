"""Where is this file of that installed package? Found by its record, so the package itself is never imported.

path = data_file("recbole", "recbole/dataset_example/ml-100k/ml-100k.inter")
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from tritonpilot.errors import HostError


def data_files(distribution: str) -> dict[str, Path]:
    """Every file that an installed distribution recorded: {path inside site-packages: path on disk}.

    Raises HostError when the distribution is not installed in this interpreter.
    """
    try:
        recorded = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise HostError(
            f"The package {distribution}, which carries data that this example is made from, is not installed in the "
            "interpreter in use. Nothing has been read or written. Run `make setup` (it installs "
            "models/requirements.txt into .venv) and start this again with .venv/bin/python."
        ) from None
    return {str(file): Path(str(file.locate())) for file in recorded or ()}


def data_file(distribution: str, path: str) -> Path:
    """One recorded file, checked to be on disk. Raises HostError when the package or the file is absent."""
    found = data_files(distribution).get(path)
    if found is None or not found.is_file():
        raise HostError(
            f"The installed package {distribution} has no file {path}: it is another version than "
            "models/requirements.txt asks for, or damaged. Nothing has been written. Remove .venv/.ready and run "
            f"`make setup`, or reinstall {distribution} in the pinned version with pip's --no-deps."
        )
    return found
