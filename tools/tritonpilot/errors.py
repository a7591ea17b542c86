"""What can go wrong, split by what the caller can do about it. Each error owns an exit code of the command.

    PilotError                1   anything else
    ├── SpecError             3   a file that a person wrote is wrong: fix the file
    ├── ModelError            4   the model file is missing, corrupt or contradicts the service file: look at the model
    ├── RepositoryError       5   the repository cannot be written: the old one is untouched
    │   └── DriftError        6   the repository on disk differs from what the service files say: run build
    ├── HostError             7   this machine lacks something (Python, glibc, numpy < 2, CPU, tritonserver, ...)
    ├── PortError             8   a port is taken: says by whom
    ├── ServerError           9   a Triton did not start, is not ready, refused, or died
    └── MeasurementError     10   a measurement cannot be trusted or made
    (2 is a usage error, 130 is Ctrl-C)

A message is one paragraph: what happened, what is true now, what to do.
"""

from __future__ import annotations


class PilotError(Exception):
    """Base of every error that the command reports without a traceback."""

    exit_code = 1


class SpecError(PilotError):
    """A file that a person wrote is wrong."""

    exit_code = 3


class ModelError(PilotError):
    """A model file is missing, corrupt, or contradicts its service file."""

    exit_code = 4


class RepositoryError(PilotError):
    """The model repository cannot be read or written; what was there before is untouched."""

    exit_code = 5


class DriftError(RepositoryError):
    """The repository on disk is not what the service files say."""

    exit_code = 6


class HostError(PilotError):
    """This machine lacks something that the work needs."""

    exit_code = 7


class PortError(PilotError):
    """A port is already taken."""

    exit_code = 8


class ServerError(PilotError):
    """A Triton server did not start, is not ready, refused a call, or died."""

    exit_code = 9


class MeasurementError(PilotError):
    """A measurement cannot be made or cannot be trusted."""

    exit_code = 10
