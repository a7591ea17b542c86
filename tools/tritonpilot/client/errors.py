"""Why was a prediction not made, and what can the caller do about it?

    CallError                    a prediction was not made                                            is_retryable
    ├── InputError               the caller's fault: repair what `field` names                        no
    ├── UnknownModelError        the server has no such model (or version): correct the name          no
    ├── DeniedError              the key is missing, unknown, or may not do this: get another         no
    ├── ModelFaultError          the model failed on these inputs: look at the server's log           no
    ├── DeadlineError            the time was over: ask for more, or for less                         yes
    ├── RejectedError            refused for now: queue full, rate exceeded, model loading, ...       yes, by the client too
    ├── DisconnectedError        no endpoint can be reached, it broke off, or it is no Triton         yes, by the client too
    └── ClosedError              the client was closed, or belongs to the process before a fork       no

The client itself repeats what says so above, within the deadline, a number of attempts and a budget. Predicting changes
nothing on the server, so a prediction may be asked for twice.
"""

from __future__ import annotations

from typing import ClassVar

from tritonpilot.errors import PilotError


class CallError(PilotError):
    """Base: a prediction was not made."""

    is_retryable: ClassVar[bool] = False


class InputError(CallError):
    """The inputs (or the class of callers) do not fit the model; `field` names which, "" when the server did not tell."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class UnknownModelError(CallError):
    """The server has no such model or version."""


class DeniedError(CallError):
    """The server does not let this caller do that: its key is missing, unknown, or not for this model."""


class ModelFaultError(CallError):
    """The model failed while it computed this answer."""


class DeadlineError(CallError):
    """The deadline passed before there was an answer."""

    is_retryable = True
    is_computed: bool = True  # whether the model may have worked, or still work, on it


class RejectedError(CallError):
    """The server does not take this request now; it asks to be left alone for `retry_after_s` seconds, 0 when it did not tell."""

    is_retryable = True

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DisconnectedError(CallError):
    """No connection, or it broke before the answer, or what answers is no Triton."""

    is_retryable = True


class ClosedError(CallError):
    """The client is closed."""
