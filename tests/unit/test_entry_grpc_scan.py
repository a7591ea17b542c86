from __future__ import annotations

import random

import pytest
from tritonclient.grpc import service_pb2

from tritonpilot.entry.grpc_scan import check_sizes, scan
from tritonpilot.entry.messages import Denied

MIB = 2**20
VALUE = service_pb2.InferParameter()
NAME = b"\x0a\x03ctr"


def request(inputs: int = 2, outputs: int = 1) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name="ctr", id="17", raw_input_contents=[b"\x2a\x00" * 5000] * inputs)
    for number in range(inputs):
        one = message.inputs.add(name=f"input_{number}", datatype="FP32", shape=[2**40, -1])
        one.contents.fp32_contents.extend([1.0] * 100)
        one.parameters["binary_data_size"].int64_param = 10
    for number in range(outputs):
        message.outputs.add(name=f"output_{number}").parameters["classification"].int64_param = 3
    message.parameters["priority"].int64_param = 1
    return message


def field(number: int, value: bytes) -> bytes:
    return (
        service_pb2.ModelInferRequest(raw_input_contents=[value])
        .SerializeToString()
        .replace(b"\x3a", bytes([number << 3 | 2]), 1)
    )


def test_what_callers_send_passes_and_names_its_model() -> None:
    assert scan(request().SerializeToString(), MIB) == "ctr"
    assert scan(request(256, 256).SerializeToString(), MIB) == "ctr"
    check_sizes(request(256, 256))
    assert scan(b"", MIB) == ""


def test_the_last_name_counts_as_protobuf_reads_it() -> None:
    message = NAME + request().SerializeToString() + b"\x8a\x00\x01b"  # its tag in two bytes
    assert scan(message, MIB) == service_pb2.ModelInferRequest.FromString(message).model_name == "b"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (b"\x2a\x00" * 8_000_000, "more than 256 inputs"),
        (b"\x32\x00" * 257, "more than 256 outputs"),
        (b"\xaa\x00\x00" * 257, "more than 256 inputs"),
        (b"\x22\x00" * 257, "more than 256 parameters"),
        (b"\x3a\x00" * 1025, "more than 1024 fields"),
        (b"\x98\x06\x01" * 1025, "more than 1024 fields"),
        (field(5, b"\x18\x01" * 65), "input 1 has more than 64 fields"),
        (field(5, b"\x22\x00" * 65), "input 1 has more than 64 fields"),
        (field(6, b"") + field(6, b"\x12\x00" * 65), "output 2 has more than 64 fields"),
        (field(5, field(3, b"\x01" * 321)), "input 1 has more than 32 dimensions"),
        (field(5, b"\x0a\x00" * 64) * 65, "more than 4096 fields"),
    ],
)
def test_what_there_is_too_much_of_is_named(message: bytes, says: str) -> None:
    with pytest.raises(Denied, match=says) as denied:
        scan(NAME + message, 64 * MIB)
    assert (denied.value.http_status, denied.value.grpc_code) == (400, "INVALID_ARGUMENT")


def test_only_raw_contents_may_be_large() -> None:
    message = request().SerializeToString()
    assert scan(message + field(7, b"\0" * 2 * MIB), MIB) == "ctr"
    for large in (field(5, field(5, field(8, b"") * MIB)), field(3, b"a" * 2 * MIB), field(15, b"\0" * 2 * MIB)):
        with pytest.raises(Denied, match="raw_input_contents") as denied:
            scan(message + large, MIB)
        assert (denied.value.http_status, denied.value.grpc_code) == (413, "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (service_pb2.ModelInferRequest(outputs=[{}] * 257), "256 outputs"),
        (service_pb2.ModelInferRequest(inputs=[{}] * 257), "256 inputs"),
        (service_pb2.ModelInferRequest(parameters=dict.fromkeys(map(str, range(257)), VALUE)), "256 parameters"),
        (service_pb2.ModelInferRequest(inputs=[{}, {"shape": [1] * 33}]), "input 2 has more than 32 dimensions"),
    ],
)
def test_a_small_request_has_the_same_limits(message: service_pb2.ModelInferRequest, says: str) -> None:
    with pytest.raises(Denied, match=says):
        check_sizes(message)


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a",
        b"\x0a\x05ab",
        b"\x2a\x02\x0a\x01",
        b"\x2a\x01\x0a",
        b"\x0b\x0c",
        b"\x80",
        b"\xff" * 20,
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\x01\xff",
    ],
)
def test_what_is_no_message_is_said(message: bytes) -> None:
    with pytest.raises(Denied, match="not an inference.ModelInferRequest") as denied:
        scan(message, MIB)
    assert denied.value.grpc_code == "INVALID_ARGUMENT"


def test_garbled_messages_are_read_or_denied() -> None:
    chance, whole = random.Random(5), request().SerializeToString()
    for _ in range(2000):
        garbled = bytearray(whole[: chance.randrange(len(whole))])
        for _ in range(chance.randrange(5)):
            if garbled:
                garbled[chance.randrange(min(300, len(garbled)))] = chance.randrange(256)
        try:
            name = scan(bytes(garbled), 64 * MIB)
        except Denied:
            continue
        try:
            read = service_pb2.ModelInferRequest.FromString(bytes(garbled))
        except Exception:  # noqa: BLE001, S112  the parser may see more that is wrong
            continue
        assert name == read.model_name
        assert len(read.inputs) <= 256
