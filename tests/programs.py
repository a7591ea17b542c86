"""Programs that pip does not bring, for tests: `program("promtool")` is its path, or the test is skipped and says why."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from perf import programs
from tritonpilot.errors import MeasurementError


def program(name: str) -> Path:
    """The executable, downloaded once where it is not installed; skips where it cannot be had."""
    found = _find(name)
    if isinstance(found, str):
        pytest.skip(f"no {name} here: {found}")
    return found


@functools.cache
def _find(name: str) -> Path | str:
    """The path, or why there is none: a machine without a network is asked once."""
    try:
        return programs.find(name)
    except MeasurementError as error:
        return str(error)
