"""What do the generic backends take, make and read? Their docstrings and parameter tables as one page of documentation.

python -m pilotlib.reference python_backend > docs/generic-backends.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from pilotlib.parameters import table
from pilotlib.testkit import load

STAND_INS = ("onnxruntime", "pytorch")  # their parameters are Triton's: docs/architecture.md
COMPANION = "companion"  # no service names it: docs/adr/0010-companion.md
HEAD = """# Generic backends

What runs before and behind a model, without code in the model folder: name one as `model.backend` of a step
([services.md](services.md)). Dims are those of one row; -1 is any length. A parameter in `model.parameters` that is unknown or
out of range refuses the model when it is loaded. This page is made from the backends:
`python -m pilotlib.reference python_backend`.
"""


def page(backends: Path) -> str:
    """The page, one section for each folder with a model.py, in the order of their names."""
    names = [
        path.parent.name
        for path in sorted(backends.glob("*/model.py"))
        if path.parent.name not in (*STAND_INS, COMPANION)
    ]
    return "\n".join([HEAD, *(_section(name, backends / name / "model.py") for name in names)])


def _section(name: str, path: Path) -> str:
    backend = load(path, path.parent)
    text = sys.modules[backend.__module__].__doc__ or ""
    rows = [
        f"| `{row.name}` | {row.type} | {f'`{row.default}`' if row.default else ''} | {row.meaning} |"
        for row in table(backend.parameters)
        if not row.name.startswith("pilot_")
    ]
    head = ["| Parameter | Type | Default | Meaning |", "|---|---|---|---|"]
    return "\n".join([f"## {name}\n", text.strip(), "", *(head if rows else []), *rows, ""])


if __name__ == "__main__":
    sys.stdout.write(page(Path(sys.argv[1])))
