"""Requests several times over, and answers that are remembered: by bytes alone."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2

from tritonpilot.entry.again import rows_of, several, version_of
from tritonpilot.entry.extras import Answer, Content
from tritonpilot.entry.guard import MOST_REMEMBERED_BYTES, Memory

ROW = np.array([[1.0, 2.0]], np.float32)


def test_rows_of_http_are_repeated_in_json_and_in_binary() -> None:
    words = b"\x02\x00\x00\x00ab"
    asked = {
        "inputs": [
            {"name": "x", "shape": [1, 2], "datatype": "FP32", "parameters": {"binary_data_size": 8}},
            {"name": "flat", "shape": [1, 2], "datatype": "INT64", "data": [3, 4]},
            {"name": "nested", "shape": [1, 2], "datatype": "INT64", "data": [[3, 4]]},
            {"name": "word", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}},
        ],
        "outputs": [{"name": "y"}],
    }
    content = Content(orjson.dumps(asked), memoryview(ROW.tobytes() + words))
    found = several(content, "http", 3)
    x, flat, nested, word = orjson.loads(found.text)["inputs"]
    assert x == {**asked["inputs"][0], "shape": [3, 2], "parameters": {"binary_data_size": 24}}
    assert (flat["data"], nested["data"]) == ([3, 4] * 3, [[3, 4]] * 3)
    assert (word["shape"], word["parameters"]) == ([3, 1], {"binary_data_size": 18})
    assert found.tail == ROW.tobytes() * 3 + words * 3
    assert (rows_of(content, "http"), rows_of(found, "http")) == (1, 3)


def test_rows_of_grpc_are_repeated_in_both_forms() -> None:
    request = service_pb2.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    typed = service_pb2.ModelInferRequest()
    typed.CopyFrom(request)
    request.raw_input_contents.append(ROW.tobytes())
    typed.inputs[0].contents.fp32_contents.extend([1.0, 2.0])

    raw = service_pb2.ModelInferRequest.FromString(several(Content(request.SerializeToString()), "grpc", 2).text)
    assert (list(raw.inputs[0].shape), raw.raw_input_contents[0]) == ([2, 2], ROW.tobytes() * 2)
    found = several(Content(typed.SerializeToString()), "grpc", 2)
    read = service_pb2.ModelInferRequest.FromString(found.text)
    assert list(read.inputs[0].contents.fp32_contents) == [1.0, 2.0, 1.0, 2.0]
    assert rows_of(found, "grpc") == 2


def test_an_answer_says_which_version_gave_it() -> None:
    assert version_of(Answer(b'{"model_name":"m","model_version":"7","outputs":[]}'), "http") == "7"
    message = service_pb2.ModelInferResponse(model_name="m", model_version="8").SerializeToString()
    assert version_of(Answer(message), "grpc") == "8"


def test_the_last_asked_answers_are_remembered_within_their_bytes() -> None:
    memory = Memory(most_bytes=300)
    for name in (b"a", b"b", b"c"):
        memory.put(name, Answer(name * 100))
    assert memory.get(b"a") is not None
    memory.put(b"d", Answer(b"d" * 100))
    assert [name in memory for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    memory.put(b"a", Answer(b"", b"x" * 250))
    assert [name in memory for name in (b"a", b"c", b"d")] == [True, False, False]
    memory.put(b"e", Answer(b"e" * (MOST_REMEMBERED_BYTES + 1)))
    assert (len(memory), memory.get(b"e")) == (1, None)


@pytest.mark.parametrize("copies", [2, 8])
def test_a_request_of_several_rows_stays_in_its_order(copies: int) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    asked = {"inputs": [{"name": "x", "shape": [3, 2], "datatype": "FP32", "parameters": {"binary_data_size": 24}}]}
    found = several(Content(orjson.dumps(asked), rows.tobytes()), "http", copies)
    assert np.frombuffer(found.tail, np.float32).reshape(-1, 2).tolist() == np.tile(rows, (copies, 1)).tolist()
