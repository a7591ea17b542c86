"""How does a training or export script end? With its result, or one line that says what is wrong, and an exit code.

return exit_code(lambda: print(make(options.output)), options.output)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from tritonpilot.errors import PilotError


def exit_code(work: Callable[[], None], output: Path) -> int:
    """0 when `work` is done; else its error is on stderr, and the code is that of tritonpilot.errors, or 130 for Ctrl-C."""
    try:
        work()
    except PilotError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"error: stopped by Ctrl-C; {output} is as it was. Start again to finish.", file=sys.stderr)
        return 130
    return 0
