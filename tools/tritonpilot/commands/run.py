"""How a command ends: with the exit code of what happened, one line on stderr, and never a traceback for what a person can mend.

run(app)      # a typer.Typer; does not return
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import NoReturn

import typer

from tritonpilot.errors import HostError, PilotError


def run(app: typer.Typer) -> NoReturn:
    """Run the command that this process was started with."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(standalone_mode=True)
    except PilotError as error:
        print(f"tritonpilot: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `tritonpilot ... | head`
        sys.stderr.close()
        sys.exit(141)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has no place either
        print(f"tritonpilot: something could not be written: {error}. Make room and repeat.", file=sys.stderr)
        sys.exit(HostError.exit_code)
    sys.exit(0)


def _interrupt(number: int, frame: object) -> None:  # noqa: ARG001 -- the signature of a handler
    """SIGTERM ends the command as Ctrl-C does, so that `with` blocks clean up."""
    raise KeyboardInterrupt
