"""Back to a version that is still on disk: `rollback(control, root, "ctr", say=print)`.

The same steps as a swap's last ones: the kept version is loaded, takes the place of the served one in one step, and is verified.
"""

from __future__ import annotations

from pathlib import Path

from tritonpilot.control import Control
from tritonpilot.swap.run import LOAD_TIMEOUT_S, Done, shift_to
from tritonpilot.swap.shift import of_rollback
from tritonpilot.swap.terms import Say


def rollback(
    control: Control,
    root: Path,
    service: str,
    *,
    to: int | None = None,
    load_timeout_s: float = LOAD_TIMEOUT_S,
    say: Say,
) -> Done:
    """Let a service serve version `to`, or what it served before the last swap. The members of a pipeline go back together.

    Raises PilotError; what was served before is then served, unless the message says otherwise.
    """
    return shift_to(
        control,
        root,
        service,
        lambda journal: of_rollback(root, service, journal, to),
        load_timeout_s=load_timeout_s,
        say=say,
    )
