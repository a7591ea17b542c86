"""The command `tritonpilot` before its libraries are imported, which takes a second: Ctrl-C leaves no traceback then either."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Entry point of the `tritonpilot` command."""
    try:
        from tritonpilot import cli
    except KeyboardInterrupt:
        sys.exit(130)
    cli.main()
