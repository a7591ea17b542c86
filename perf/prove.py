"""Prove published figures: `make prove NAME=<name>`, or `python -m perf.prove NAME [NAME ...]`; without NAME lists them.

stdout gets one line per proof, `<name> <value> <unit> (bar <bar>) ok|short`; stderr the narration. QUICK=1 shortens.
Exit code 0: every bar is reached; 1: one is not; otherwise that of the error (10: no figure can be trusted).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from perf.frame import PROJECT, Claim, carry_out, write
from perf.proofs import CLAIMS
from tritonpilot.errors import PilotError

RESULTS = PROJECT / "perf" / "results"
SHORT = 1
USAGE = 2
INTERRUPTED = 130


def main(
    names: Sequence[str],
    *,
    claims: Mapping[str, Claim] = CLAIMS,
    results: Path = RESULTS,
    quick: bool = False,
    say: Callable[[str], None] | None = None,
) -> int:
    """Carry out the named proofs in turn; returns the exit code."""
    narrate = say or _narrate
    if not names:
        print(listing(claims))
        return 0
    unknown = [name for name in names if name not in claims]
    if unknown:
        narrate(f"There is no proof named {', '.join(unknown)}. Nothing was run. The names are: {', '.join(claims)}.")
        return USAGE
    codes = [_prove(claims[name], results, quick, narrate) for name in names]
    return next((code for code in codes if code), 0)


def listing(claims: Mapping[str, Claim]) -> str:
    """The proofs, one a line, with bar and meaning."""
    width = max(len(name) for name in claims)
    bars = {name: f"{claim.bar} {claim.unit}" for name, claim in claims.items()}
    bar_width = max(map(len, bars.values()))
    return "\n".join(f"{name:<{width}}  {bars[name]:<{bar_width}}  {claim.line}" for name, claim in claims.items())


def _prove(claim: Claim, results: Path, quick: bool, say: Callable[[str], None]) -> int:
    say(f"{claim.name}: {claim.line}")
    try:
        result = carry_out(claim, quick=quick, say=lambda line: say(f"  {line}"))
        write(result, results)
    except PilotError as error:
        say(f"{claim.name}: no figure. {error}")
        return error.exit_code
    for key, value in result.details.items():
        say(f"  {key}: {value}")
    print(result.line(), flush=True)
    return 0 if result.ok else SHORT


def _narrate(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:], quick=os.environ.get("QUICK", "") not in ("", "0"))
    except KeyboardInterrupt:
        _narrate("interrupted: no figure is reported, earlier results stay")
        code = INTERRUPTED
    sys.exit(code)
