"""The command `tritonpilot` before its libraries are imported, which takes a second: Ctrl-C leaves no traceback then either."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Entry point of the `tritonpilot` command."""
    try:
        if sys.argv[1:2] == ["serve"]:
            from tritonpilot.commands.serve import main as of_command
        else:
            from tritonpilot.cli import main as of_command
    except KeyboardInterrupt:
        sys.exit(130)
    of_command()
