"""One of several sending processes: reads its job, says that it is ready, waits for the time to begin, brings back its log.

python -m tritonpilot.load.worker        # started by tritonpilot.load.run; pickles over its standard streams
"""

from __future__ import annotations

import contextlib
import pickle
import sys

from tritonpilot.load.run import send


def main() -> None:
    """Do one job."""
    job = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    line = sys.stdin.buffer.readline()
    if not line:  # the load was given up before it began
        return
    log = send(job, float(line))
    pickle.dump(log, sys.stdout.buffer)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
