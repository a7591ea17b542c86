"""The command of a script that writes calibration and evaluation rows: --output, what it is doing, each file's rows.

if __name__ == "__main__":
    sys.exit(write_rows(None, folder, "Write ... rows.", "ctr: reading 100,000 ratings, about 6 s", lambda output: {...}))
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from models.script import exit_code
from tritonpilot.quantize.data import Rows, write

CALIBRATION, EVALUATION = "calibration.npz", "evaluation.npz"


def write_rows(
    argv: list[str] | None,
    default: Path,
    description: str,
    doing: str,
    make: Callable[[Path], Mapping[str, Rows]],
) -> int:
    """Write what `make(output)` gives, by file name, into --output (`default`), each file whole; the exit code of the script."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=default, help="folder to write into")
    output: Path = parser.parse_args(argv).output

    def work() -> None:
        print(doing, file=sys.stderr)
        for name, rows in make(output).items():
            write(rows, output / name)
            print(f"{output / name} {rows.count} rows")

    return exit_code(work, output)
