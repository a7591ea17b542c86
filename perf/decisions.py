"""What did an autopilot change during a load? Read from its decision log.

changes_of(state_folder, began_s)      # [(s since began_s, line of the log), ...]
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from tritonpilot.autopilot.record import LOG


def changes_of(state: Path, began_s: float) -> list[tuple[float, dict[str, Any]]]:
    """Every change that was made or tried, in order; `began_s` is of time.time()."""
    lines = [json.loads(line) for line in (state / LOG).read_text(encoding="utf-8").splitlines()]
    return [(_at_s(each) - began_s, each) for each in lines if "now" in each and "seconds" in each]


def _at_s(entry: dict[str, Any]) -> float:
    return datetime.datetime.fromisoformat(entry["time"]).timestamp()
