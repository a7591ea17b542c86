"""Is a file beside a model what it must be to be read? Seen when it is built, not when a server loads it.

    check(Path("build/history.json"))               # raises ModelError for an empty file, or one cut off
    lines = text(Path("build/labels.txt")).splitlines()
    content = json_content(Path("build/features.json"))

Messages say where a file is wrong, and quote nothing of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tritonpilot.errors import ModelError

LARGEST_JSON_BYTES = 64 << 20  # a larger one is not read just to be looked at
_FIRST_QUOTE = re.compile(r"""\s*\bb?["'].*""", re.DOTALL)


def check(path: Path) -> None:
    """Raise ModelError for an empty file, other than Python code, and for a .json that is no JSON."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if not size and path.suffix != ".py":
        raise ModelError(f"{path} is empty. Nothing was changed. Make it again, or check that it was copied whole.")
    if path.suffix == ".json" and size <= LARGEST_JSON_BYTES:
        json_content(path)


def text(path: Path) -> str:
    """The content of a UTF-8 text file. Raises ModelError."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path} is no UTF-8 text: {reason(error)}. Nothing was changed. Make it again, or check that it was copied whole."
        ) from error


def json_content(path: Path) -> Any:
    """The content of a JSON file. Raises ModelError."""
    written = text(path)
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is no JSON: {reason(error)}. Nothing was changed. Make it again, or check that it was copied whole."
        ) from error


def reason(error: Exception) -> str:
    """What a reader's exception says, up to where it begins to quote the file."""
    if isinstance(error, UnicodeDecodeError):
        return f"{error.reason} at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.partition(':')[0]} (line {error.lineno}, column {error.colno})"
    said = " ".join(_FIRST_QUOTE.sub("", str(error)).split()).rstrip(".:, ")
    return said if said.isprintable() and said else type(error).__name__


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read: {error.strerror}. Nothing was changed. Repair it and repeat.")
