"""What the entry reads from and says to callers beside tensors, the same over HTTP and gRPC.

    raise messages.refused(refusal.kind, refusal.message, refusal.retry_after_s)    # -> Denied: 503, "UNAVAILABLE", ...
    priority = messages.priority_of(parameters.get("priority"))                     # raises Denied 400 naming it

Everything that a front refuses is a `Denied`, which knows its HTTP status and the name of its gRPC code.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

KEY_HEADER = "tritonpilot-key"
AUTHORIZATION_HEADER = "authorization"  # "Bearer <key>", for callers that cannot send KEY_HEADER
CLASS_HEADER = "tritonpilot-class"
DEADLINE_HEADER = "tritonpilot-deadline-ms"
TRACEPARENT_HEADER, TRACESTATE_HEADER = (
    "traceparent",
    "tracestate",
)  # W3C Trace Context; the names in gRPC's metadata too
RETRY_AFTER_HEADER = "retry-after"
RETRY_AFTER_MS_HEADER = "retry-after-ms"  # also the name in gRPC's trailing metadata

PRIORITY_PARAMETER = "priority"
TIMEOUT_PARAMETER = "timeout"
DEADLINE_PARAMETER = "pilot_deadline_ns"  # CLOCK_MONOTONIC of this host, for backends
#: What the entry sets or drops; all others change what is asked.
OWN_PARAMETERS = frozenset([PRIORITY_PARAMETER, TIMEOUT_PARAMETER, DEADLINE_PARAMETER])
SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")  # what is answered depends on what came before
WAITED_TOO_LONG = "The same request is under way, and was not answered by this one's deadline."

MAX_PRIORITY = 2**32 - 1  # Triton's type of priority levels
MAX_TIMEOUT_US = 2**63 - 1  # what KServe's int64 parameters hold
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000.0  # a budget above a week is a mistake of units

# What is parsed holds up everybody else: JSON, and all of a gRPC message but raw_input_contents. The lower one with tenants.
MAX_PARSED_BYTES, MAX_PARSED_BYTES_OF_TENANT = 8 * 2**20, 2**20
MAX_TENSORS = 256  # inputs of a request, and outputs
MAX_DIMENSIONS = 32
MAX_HELD_BYTES = 2**30  # of requests that wait, over each protocol
HELD_TOO_MUCH = "The entry holds too many bytes of waiting requests."

# Kind of refusal -> (HTTP status, name of the gRPC code).
STATUS_OF = {
    "rate": (429, "RESOURCE_EXHAUSTED"),
    "concurrency": (429, "RESOURCE_EXHAUSTED"),
    "queue_full": (503, "UNAVAILABLE"),
    "wait": (503, "UNAVAILABLE"),
    "deadline": (504, "DEADLINE_EXCEEDED"),
    "unknown_class": (400, "INVALID_ARGUMENT"),
    "bad_request": (400, "INVALID_ARGUMENT"),
    "key": (401, "UNAUTHENTICATED"),
    "forbidden": (403, "PERMISSION_DENIED"),
    "unknown_model": (404, "NOT_FOUND"),
    "unknown_path": (404, "UNIMPLEMENTED"),
    "method": (405, "UNIMPLEMENTED"),
    "slow": (408, "DEADLINE_EXCEEDED"),
    "too_large": (413, "RESOURCE_EXHAUSTED"),
    "encoding": (415, "UNIMPLEMENTED"),
    "headers_too_large": (431, "RESOURCE_EXHAUSTED"),
    "broken": (502, "UNAVAILABLE"),
    "starting": (503, "UNAVAILABLE"),
}

# https://www.w3.org/TR/trace-context/: version, trace, parent, flags; IDs of zeros only are none.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")
_SAMPLED = 1  # of the flags
_TRACESTATE_ENTRY = r"[ \t]*(?:[a-z0-9][a-z0-9_*/@-]{0,255}=[ !-+\--<>-~]{1,256})?[ \t]*"
_TRACESTATE = re.compile(rf"{_TRACESTATE_ENTRY}(?:,{_TRACESTATE_ENTRY}){{0,31}}")
_MAX_TRACESTATE_CHARACTERS = 512
_MODEL_NAME = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_VERSION = re.compile(r"[0-9]{1,19}")
_DECIMAL = re.compile(
    r"[0-9]{1,20}(?:\.[0-9]{0,20})?(?:[eE][+-]?[0-9]{1,3})?"
)  # float() also knows 1_000 and digits of all scripts
_SHOWN_CHARACTERS = 40


class Denied(Exception):  # noqa: N818 -- an answer to the caller, not a fault of this process
    """The caller gets no answer of Triton's, but this: `http_status` or `grpc_code` (a name of grpc.StatusCode) and `message`."""

    def __init__(self, http_status: int, grpc_code: str, message: str, retry_after_s: float = 0) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.grpc_code = grpc_code
        self.message = message
        self.retry_after_s = retry_after_s  # 0: nothing is known of when it may work


def refused(kind: str, message: str, retry_after_s: float = 0) -> Denied:
    """The answer for a refusal; `kind` is one of the gate's or another key of STATUS_OF."""
    http_status, grpc_code = STATUS_OF[kind]
    return Denied(http_status, grpc_code, message, retry_after_s)


def error_body(message: str) -> bytes:
    """Triton's own form of an error: {"error": "..."}."""
    return json.dumps({"error": message}).encode()


def retry_after(seconds: float) -> tuple[int, int]:
    """`seconds` as values of Retry-After (whole seconds, at least 1) and retry-after-ms (at least 1), both rounded up."""
    return max(1, math.ceil(seconds)), max(1, math.ceil(seconds * 1000))


def api_key(keys: Sequence[str], authorizations: Sequence[str]) -> str | None:
    """The key among the values of KEY_HEADER and AUTHORIZATION_HEADER, None without one.

    Raises Denied 400 when there are several, for parts in front of the entry may have checked another of them. Of other schemes
    than Bearer nothing is read.
    """
    found = list(keys)
    for value in authorizations:
        scheme, _, credentials = value.strip().partition(" ")
        if scheme.lower() == "bearer":
            found.append(credentials.strip())
    if len(found) > 1 or len(authorizations) > 1:
        raise refused("bad_request", f"The request has several API keys. Send one, as {KEY_HEADER} or as Bearer.")
    return found[0].strip() if found else None


def priority_of(value: object) -> int | None:
    """The priority that a request's parameters ask for; None for none and 0, Triton's word for the default.

    Raises Denied 400 unless `value` is an integer in Triton's range: Triton itself would quietly take the default.
    """
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_PRIORITY:
        raise refused(
            "bad_request",
            f"Parameter 'priority' is {_shown(value)}, but must be an integer from 0 (the default) to {MAX_PRIORITY}.",
        )
    return value or None


def timeout_s_of(value: object) -> float | None:
    """The parameter `timeout` of a request, which is in microseconds, in seconds. Raises Denied 400.

    None for none, for 0, and for more than MAX_DEADLINE_MS: "for ever" in some callers' words.
    """
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_TIMEOUT_US:
        raise refused(
            "bad_request",
            f"Parameter 'timeout' is {_shown(value)}, but must be an integer of microseconds from 0 (none) to {MAX_TIMEOUT_US}.",
        )
    return value / 1e6 if 0 < value <= MAX_DEADLINE_MS * 1000 else None


def deadline_s_of(text: str | None) -> float | None:
    """The budget that DEADLINE_HEADER gives, in seconds; None without one. Raises Denied 400."""
    if text is None:
        return None
    plain = text.strip(" \t")
    milliseconds = float(plain) if _DECIMAL.fullmatch(plain) else math.nan
    if not 0 < milliseconds <= MAX_DEADLINE_MS:
        raise refused(
            "bad_request",
            f"Header {DEADLINE_HEADER!r} is {_shown(text)}, but must be a number of milliseconds above 0 and "
            f"at most {MAX_DEADLINE_MS:.0f}.",
        )
    return milliseconds / 1000


def trace_context(traceparent: str, tracestate: str) -> dict[str, str]:
    """What of a caller's trace context goes to Triton, by header; both texts joined by commas where there are several.

    Empty unless the caller samples: Triton 2.51 traces every request that has a context. What is no trace context is dropped, as
    W3C asks, and the request is answered all the same.
    """
    read = _TRACEPARENT.fullmatch(traceparent)
    if read is None or not int(read[1], 16) & _SAMPLED:
        return {}
    found = {TRACEPARENT_HEADER: traceparent}
    if 0 < len(tracestate) <= _MAX_TRACESTATE_CHARACTERS and _TRACESTATE.fullmatch(tracestate):
        found[TRACESTATE_HEADER] = tracestate
    return found


def earlier(*seconds: float | None) -> float | None:
    """The smallest of the limits that are set, None when none is."""
    known = [one for one in seconds if one is not None]
    return min(known) if known else None


def model_name(encoded: bytes) -> str:
    """The name of a model in a path, percent-decoded once, or as gRPC sends it. Raises Denied 404 for what no model is called."""
    name = unquote_to_bytes(encoded) if b"%" in encoded else encoded
    if not _MODEL_NAME.fullmatch(name):
        raise refused(
            "unknown_model",
            f"No model can be called {_shown(name.decode('utf-8', 'replace'))}: names have letters, digits, '_', '.' and '-', "
            "and do not begin with '.' or '-'.",
        )
    return name.decode("ascii")


def model_version(text: str) -> str:
    """A version of a model, "" for the one that its version policy names. Raises Denied 404."""
    if text and not _VERSION.fullmatch(text):
        raise refused("unknown_model", f"A model's version is a number, not {_shown(text)}.")
    return text


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
