"""The figures of the README, written from perf/results: `python -m perf.readme` rewrites them, `--check` compares.

A figure in the README is one that a committed result holds; nobody types it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perf.frame import PROJECT
from perf.proofs import CLAIMS, OPEN

README = PROJECT / "README.md"
RESULTS = PROJECT / "perf" / "results"
BLOCK = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", re.DOTALL)
STALE = 1


def main(arguments: list[str]) -> int:
    """Rewrite or check the README; returns the exit code."""
    text = README.read_text(encoding="utf-8")
    wanted = filled(text, results())
    if "--check" not in arguments:
        README.write_text(wanted, encoding="utf-8")
        return 0
    if wanted != text:
        print("README.md does not say what perf/results hold. Run: python -m perf.readme", file=sys.stderr)
        return STALE
    return 0


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The committed results by name, in the registry's order."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")}
    return {name: found[name] for name in CLAIMS if name in found}


def filled(text: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """`text` with its marked blocks filled from the results."""
    blocks = {"headline": _headline(found), "proofs": _table(found)}
    return BLOCK.sub(lambda match: f"{match[1]}{blocks[match[2]]}{match[3]}", text)


def _headline(found: Mapping[str, Mapping[str, Any]]) -> str:
    efficiency = found.get("ctr64_efficiency")
    if efficiency is None:
        return ""
    return (
        f"**{efficiency['value']:.0%} of in-process ONNX Runtime's rows per CPU second** for 64-row requests of the `ctr` "
        f"service, through Triton's front end, queue, batcher and a Python backend together, on one core of "
        f"{efficiency['machine']['cpu']} (`make prove NAME=ctr64_efficiency`).\n"
    )


def _table(found: Mapping[str, Mapping[str, Any]]) -> str:
    rows = ["| Proof | Figure | Bar | What it is | Date |", "|---|---|---|---|---|"]
    for name, result in found.items():
        figure = f"{_short(result['value'])} {result['unit']}"
        if result["rounds"] > 1:
            figure += f" (spread {_short(result['spread'])}, {result['rounds']} rounds)"
        mark = "" if result["ok"] else " **short**"
        rows.append(
            f"| `{name}` | {figure}{mark} | {result['bar']} | {CLAIMS[name].line} | {str(result['date'])[:10]} |"
        )
    rows += [
        f"| `{name}` | **not proved yet** | {CLAIMS[name].bar} | {CLAIMS[name].line} | |"
        for name in OPEN
        if name not in found
    ]
    return "\n".join(rows) + "\n"


def _short(value: float) -> str:
    return f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
