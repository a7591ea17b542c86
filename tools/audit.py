"""Ask PyPI for known vulnerabilities of every version in requirements.lock, with pip-audit. Needs a network.

    python tools/audit.py [REQUIREMENTS]

Exit code 0: none is known; 1: some are, and are listed; 3: PyPI could not be asked about some or all, which is not the same as
none.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LOCK = Path(__file__).resolve().parents[1] / "requirements.lock"
TIMEOUT_S = 600
FOUND, NOT_ASKED = 1, 3


def main(requirements: Path = LOCK) -> int:
    """Run pip-audit and say what it found; returns the exit code."""
    # Without --no-deps pip would resolve again; the lock is complete.
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(requirements), "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    try:
        report = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or [f"pip-audit ended with code {done.returncode}"])[-1]
        say(f"audit: nobody could be asked: {last[:300]}")
        return NOT_ASKED
    lines, code = verdict(report)
    say(*lines)
    return code


def verdict(dependencies: list[dict[str, Any]]) -> tuple[list[str], int]:
    """What a report of pip-audit says, in lines, and the exit code.

    NOTE: pip-audit itself calls a package that the index does not describe skipped, and ends with 0: behind a mirror that has no
    such descriptions it finds nothing in anything.
    """
    # One line for a version that is pinned twice, for different versions of Python.
    vulnerable = {
        f"audit: {each['name']} {each['version']}: {found['id']}, mended in {', '.join(found['fix_versions']) or 'no version yet'}"
        for each in dependencies
        for found in each.get("vulns", ())
    }
    skipped = sorted({each["name"] for each in dependencies if "skip_reason" in each})
    asked = len({(each["name"], each.get("version")) for each in dependencies if "skip_reason" not in each})
    lines = sorted(vulnerable)
    if skipped:
        lines.append(f"audit: nothing could be learnt about {len(skipped)} packages: {', '.join(skipped[:8])} ...")
    lines.append(f"audit: {asked} versions were looked up, {len(vulnerable)} known vulnerabilities")
    return lines, FOUND if vulnerable else NOT_ASKED if skipped or not asked else 0


def say(*lines: str) -> None:
    """To stderr: the result is the exit code."""
    sys.stderr.writelines(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:2])))
