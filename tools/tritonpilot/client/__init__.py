"""What callers of served models import: one call per prediction, from asyncio or from threads.

    from tritonpilot.client import Client

    with Client("127.0.0.1:8000") as client:
        answer = client.predict("ctr", {"dense": dense, "categorical": categorical}, deadline_ms=50, caller_class="realtime")
        answer["prob"]

Concurrent small calls of a process share requests, deadlines and classes reach Triton's queues, retryable rejections are
repeated, big tensors go through shared memory on the same machine. Errors: tritonpilot.client.errors. Guide: docs/client.md.
"""

from tritonpilot.client.async_client import AsyncClient
from tritonpilot.client.errors import (
    CallError,
    ClosedError,
    DeadlineError,
    DeniedError,
    DisconnectedError,
    InputError,
    ModelFaultError,
    RejectedError,
    UnknownModelError,
)
from tritonpilot.client.retry import Policy
from tritonpilot.client.thread_client import Client

__all__ = [
    "AsyncClient",
    "CallError",
    "Client",
    "ClosedError",
    "DeadlineError",
    "DeniedError",
    "DisconnectedError",
    "InputError",
    "ModelFaultError",
    "Policy",
    "RejectedError",
    "UnknownModelError",
]
