"""How large is a ModelInferRequest in parts, before objects are built of it? A few bytes on the wire can be millions of objects.

    model_name = scan(message, 2**20)        # raises Denied that names what there is too much of
    check_sizes(request)                     # of a request of at most SMALL_BYTES, after it was parsed

Reads the tags and lengths of the message and of its inputs and outputs, nothing below them, and stops at the first limit: a
request of a few tensors takes microseconds, the worst that is read about a millisecond.
"""

from __future__ import annotations

from typing import Any

from tritonpilot.entry import messages
from tritonpilot.entry.messages import MAX_DIMENSIONS, MAX_TENSORS, Denied

SMALL_BYTES = 4096  # a request up to here has too few objects to hold anybody up: it is parsed, and then looked at
MOST_FIELDS = 1024  # of a request
MOST_PARAMETERS = 256  # of a request
MOST_TENSOR_FIELDS = 64  # of an input or output: each parameter, and each dimension that is not packed, is one
MOST_NESTED_FIELDS = 4096  # of all inputs and outputs
_LONGEST_VARINT = 10

# Tags of KServe's grpc_predict_v2.proto: the number of the field, and the wire type 2 (with a length).
_MODEL_NAME, _PARAMETERS, _INPUTS, _OUTPUTS, _RAW_INPUT = (number << 3 | 2 for number in (1, 4, 5, 6, 7))
_SHAPE = 3 << 3 | 2  # of an input, packed
LIMITS = {
    _PARAMETERS: ("parameters", MOST_PARAMETERS),
    _INPUTS: ("inputs", MAX_TENSORS),
    _OUTPUTS: ("outputs", MAX_TENSORS),
}


def scan(message: bytes, most_plain_bytes: int) -> str:
    """The model's name. `most_plain_bytes` is the limit of all that is not in raw_input_contents. Raises Denied 400 or 413."""
    name = b""
    counts = {_PARAMETERS: 0, _INPUTS: 0, _OUTPUTS: 0}
    fields = nested = at = raw_bytes = 0
    end = len(message)
    try:
        while at < end:
            fields += 1
            if fields > MOST_FIELDS:
                raise _too_many("fields", MOST_FIELDS, "The request")
            tag, at, after = field(message, at)
            if after > end:
                raise _broken()
            if tag == _RAW_INPUT:
                raw_bytes += after - at
            elif tag in counts:
                counts[tag] += 1
                what, most = LIMITS[tag]
                if counts[tag] > most:
                    raise _too_many(what, most, "The request")
                if tag != _PARAMETERS:
                    nested += _fields_of_tensor(message, at, after, f"The request's {what[:-1]} {counts[tag]}")
                    if nested > MOST_NESTED_FIELDS:
                        raise _too_many("fields", MOST_NESTED_FIELDS, "The request, in its inputs and outputs,")
            elif tag == _MODEL_NAME:
                name = message[at:after]
            at = after
        if end - raw_bytes > most_plain_bytes:
            raise messages.refused(
                "too_large",
                f"The request has {end - raw_bytes} bytes beside raw_input_contents, more than {most_plain_bytes}. "
                "Send its tensors in raw_input_contents.",
            )
        return name.decode()
    except (IndexError, UnicodeDecodeError):
        raise _broken() from None


def check_sizes(request: Any) -> None:
    """The same limits for a request that was parsed, for it is small. Raises Denied."""
    for what, most in LIMITS.values():
        if len(getattr(request, what)) > most:
            raise _too_many(what, most, "The request")
    for number, tensor in enumerate(request.inputs, 1):
        if len(tensor.shape) > MAX_DIMENSIONS:
            raise _too_many("dimensions", MAX_DIMENSIONS, f"The request's input {number}")


def _fields_of_tensor(message: bytes, at: int, end: int, whose: str) -> int:
    fields = 0
    while at < end:
        fields += 1
        if fields > MOST_TENSOR_FIELDS:
            raise _too_many("fields", MOST_TENSOR_FIELDS, whose)
        tag = message[at]
        size = message[at + 1]
        if tag < 128 and tag & 7 == 2 and size < 128:  # as nearly all are
            after = at + 2 + size
        else:
            tag, at, after = field(message, at)
            if tag == _SHAPE and after - at > MAX_DIMENSIONS * _LONGEST_VARINT:
                raise _too_many("dimensions", MAX_DIMENSIONS, whose)
        if after > end:
            raise _broken()
        at = after
    return fields


def field(message: bytes, at: int) -> tuple[int, int, int]:
    """The tag of the field at `at`, and where its value begins and ends. Raises IndexError behind the message's end, and Denied."""
    tag = message[at]
    at += 1
    if tag > 127:
        tag, at = _varint(message, at - 1)
    kind = tag & 7
    if kind == 2:
        size = message[at]
        at += 1
        if size > 127:
            size, at = _varint(message, at - 1)
        return tag, at, at + size
    if kind == 0:
        return tag, at, _varint(message, at)[1]
    if kind == 5:
        return tag, at, at + 4
    if kind == 1:
        return tag, at, at + 8
    raise _broken()  # groups: KServe has none


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    for _ in range(_LONGEST_VARINT):
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _broken()


def varint_bytes(value: int) -> bytes:
    """A number from 0 on, as a message has it."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _too_many(what: str, most: int, whose: str) -> Denied:
    return messages.refused("bad_request", f"{whose} has more than {most} {what}.")


def _broken() -> Denied:
    return messages.refused("bad_request", "The message is not an inference.ModelInferRequest of KServe v2.")
