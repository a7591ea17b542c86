"""Write what the click model's features are made from in serving: the history at the end of training.

    python models/ctr_raw/snapshot.py --output models/ctr_raw/build

Leaves history.json (counters, catalogue, vocabulary), requests.npz (4096 rows of the test split as callers send them) and
facts.json in --output, all or none. The model itself is that of models/ctr.
Exit codes: those of tritonpilot.errors (7 something is missing), 2 usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

try:
    import numpy as np
    import numpy.typing as npt

    from models.artefacts import REQUESTS, publication, versions, write_facts
    from models.ctr import data
    from models.ctr.features import Event
    from models.script import exit_code
except ModuleNotFoundError as missing:
    if __name__ != "__main__":
        raise
    print(
        f"error: this Python ({sys.executable}) has no {missing.name}, which the script needs. Nothing has been written. "
        "Run `make setup` and start this again with .venv/bin/python.",
        file=sys.stderr,
    )
    sys.exit(7)

HISTORY = "history.json"
SAMPLE_ROWS = 4096


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the click history at the end of training, for serving.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "build", help="folder to publish into")
    options = parser.parse_args(argv)

    def work() -> None:
        print(f"{options.output / HISTORY} counters {make(options.output)}")

    return exit_code(work, options.output)


def make(output: Path) -> int:
    """Replay, write, publish. Returns how many counters the history has."""
    started = time.monotonic()
    with publication(output, (HISTORY, REQUESTS)) as partial:
        print("ctr_raw: replaying 80,000 events, about 6 s left", file=sys.stderr)
        snapshot = data.snapshot_of_training()
        counters = len(snapshot.history.tallies)
        (partial / HISTORY).write_text(snapshot.to_json(), encoding="utf-8")
        later = test_events(snapshot.end)
        np.savez(partial / REQUESTS, **requests([later[row] for row in sample(len(later))]))
        facts = {
            "service": "ctr_raw",
            "counters": counters,
            "users": len(snapshot.history.catalogue.users),
            "items": len(snapshot.history.catalogue.items),
            "end": snapshot.end,
            "seconds": {"total": round(time.monotonic() - started, 1)},
            "versions": versions("numpy", data.DISTRIBUTION),
        }
        write_facts(partial, facts)
    return counters


def test_events(end: int) -> list[Event]:
    """The events after training: the test split, in its order."""
    return [event for event in data.read_events() if event.timestamp > end]


def requests(events: list[Event]) -> dict[str, npt.NDArray[np.generic]]:
    """The events as requests: user and item as numpy strings S[n,1], timestamp INT64[n,1]."""
    return {
        "user": np.array([[event.user.encode()] for event in events]),
        "item": np.array([[event.item.encode()] for event in events]),
        "timestamp": np.array([[event.timestamp] for event in events], dtype=np.int64),
    }


def sample(rows: int) -> list[int]:
    """SAMPLE_ROWS of so many, spread evenly."""
    return [int(row) for row in np.linspace(0, rows - 1, SAMPLE_ROWS)]


if __name__ == "__main__":
    sys.exit(main())
