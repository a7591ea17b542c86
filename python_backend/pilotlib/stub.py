"""Triton's module inside its stub process. Outside, where a test imports a backend's model.py, it is None and nobody calls it."""

from __future__ import annotations

import importlib
from typing import Any

try:
    pb_utils: Any = importlib.import_module("triton_python_backend_utils")
except ModuleNotFoundError:
    pb_utils = None
