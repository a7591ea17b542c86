from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pilotlib.companion_thread import PROBE_MS, cpu_clock, probe_request, target
from pilotlib.stall_probe import STALL_S, StallProbe, is_answered

TENSORS: dict[str, Any] = {
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["4"]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["1"]}],
}
REJECTING = {
    "priority_levels": "3",
    "default_priority_level": "1",
    "priority_queue_policy": {"3": {"timeout_action": "REJECT", "default_timeout_microseconds": "1"}},
}


def config(batching: dict[str, Any] | None, **parameters: str) -> dict[str, Any]:
    found = TENSORS | {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    return found if batching is None else found | {"dynamic_batching": batching}


def test_a_model_with_a_wake_level_is_sent_zeros_at_that_level() -> None:
    found = target(("ctr", "2"), config(REJECTING, pilot_wake_priority="3"))

    assert found.wake is not None
    assert found.wake.startswith(b"POST /v2/models/ctr/versions/2/infer HTTP/1.1")
    assert b'"priority": 3' in found.wake
    assert found.wake.endswith(bytes(16))
    assert found.remark == ""


@pytest.mark.parametrize(
    ("batching", "parameters"),
    [
        (None, {}),
        ({}, {}),
        ({"max_queue_delay_microseconds": "100"}, {}),
        (REJECTING, {"pilot_wake_priority": "3", "pilot_waker": "off"}),
    ],
)
def test_models_that_cannot_stall_or_shall_not_be_woken_are_left_alone(
    batching: dict[str, Any] | None, parameters: dict[str, str]
) -> None:
    found = target(("ctr", "1"), config(batching, **parameters))

    assert (found.wake, found.remark) == (None, "")


def test_a_model_that_would_execute_the_wake_gets_none_and_a_remark() -> None:
    found = target(("ctr", "1"), config({"priority_levels": 2, "default_priority_level": 1}))

    assert found.wake is None
    assert 'model "ctr" is not woken' in found.remark


def test_the_probe_asks_for_an_execution_of_its_length() -> None:
    lines, _, body = probe_request("mine").partition(b"\r\n\r\n")
    assert lines.startswith(b"POST /v2/models/mine/infer HTTP/1.1")
    assert b"Connection: close" not in lines
    assert json.loads(body[:-4])["inputs"][0]["parameters"]["binary_data_size"] == 4
    assert PROBE_MS == 1.0
    assert body[-4:] == b"\x00\x00\x80\x3f"


def test_an_answer_is_whole_when_its_length_is_there_and_an_error_is_none() -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    assert [is_answered(whole[:end]) for end in (10, 38, len(whole) - 1, len(whole))] == [False, False, False, True]
    with pytest.raises(ConnectionError, match="no such model"):
        is_answered(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 13\r\n\r\nno such model")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Answers every request at once, but keeps silent for a stall when asked for "slow"."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(connection: socket.socket) -> None:
            with connection:
                while request := connection.recv(1000):
                    time.sleep(STALL_S + 0.1 if b"slow" in request else 0)
                    try:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                    except OSError:  # it was given up
                        return

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

        threading.Thread(target=run, daemon=True).start()
        yield listener


def test_no_train_that_takes_long_is_no_stall(server: socket.socket) -> None:
    trains = []
    probe = StallProbe(server.getsockname(), b"quick", train=4)

    assert probe.stalls(30, lambda: bool(trains.append(1))) is False
    assert len(trains) == 10  # three trials each


def test_one_train_that_takes_long_is_a_stall(server: socket.socket) -> None:
    assert StallProbe(server.getsockname(), b"slow", train=4).stalls(30) is True


def test_a_probe_that_is_stopped_says_nothing(server: socket.socket) -> None:
    assert StallProbe(server.getsockname(), b"quick", train=4).stalls(30, lambda: True) is None


def test_a_server_that_is_away_is_an_error(free_port: int) -> None:
    with pytest.raises(OSError, match="refused"):
        StallProbe(("127.0.0.1", free_port), b"quick").stalls(30)


def test_the_cpu_time_of_another_process_is_read_to_the_microsecond() -> None:
    before = time.clock_gettime(cpu_clock(os.getpid()))
    while time.clock_gettime(cpu_clock(os.getpid())) - before < 0.001:
        pass
    assert time.process_time() >= before + 0.001
