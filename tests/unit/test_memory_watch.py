from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from perf import memory, small_models
from perf.mixed_load import MixedLoad, Request, Stream
from perf.proofs import memory as proof
from tritonpilot.errors import MeasurementError


def test_the_slope_is_that_of_the_later_half_whatever_single_samples_say() -> None:
    requests = np.arange(0, 200_000, 1000)
    mb = np.where(requests < 100_000, 500 - requests / 400, 250 + requests * 3e-5)
    mb[150] += 80
    assert memory.slope(requests, mb) == pytest.approx(3.0, abs=0.01)
    assert memory.slope(requests, np.full(200, 70.0)) == 0


@pytest.mark.parametrize("requests", [[], list(range(10)), [5] * 40])
def test_too_few_samples_give_no_slope(requests: list[float]) -> None:
    with pytest.raises(MeasurementError, match="too few for a slope"):
        memory.slope(requests, [1.0] * len(requests))


def test_the_memory_of_a_process_is_read() -> None:
    found = memory.of_process(os.getpid())
    assert 5 < found.anonymous_mb < found.rss_mb
    with pytest.raises(MeasurementError, match="ended during the measurement"):
        memory.of_process(2**22 + 1)  # above the largest process id


def test_a_stub_is_named_by_its_instance() -> None:
    assert memory.model_of("image_decode_0_1") == "image_decode"


def test_small_models_cover_all_backends_and_one_request_in_a_hundred_is_bad(tmp_path: Path) -> None:
    models = small_models.write(tmp_path)
    folders = (Path(__file__).parents[2] / "python_backend").glob("*/model.py")
    # The companion serves nobody but itself, an emulated device nobody in production.
    served = {path.parent.name for path in folders} - {"companion", "emulated"}
    assert {model.backend for model in models} == served
    for model in models:
        if model.requests:
            assert sum(not request.is_good for request in model.requests) * 100 == len(model.requests)


Answer = Callable[[bytes], bytes]


@pytest.fixture
def answering() -> Iterator[Callable[[Answer], str]]:
    """A server that gives each request, up to its blank line, what the function says; in two parts."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads = []

    def serve(connection: socket.socket, answer: Answer) -> None:
        with connection:
            while received := connection.recv(1 << 16):
                found = answer(received)
                connection.sendall(found[:20])
                connection.sendall(found[20:])

    def accept(answer: Answer) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            one = threading.Thread(target=serve, args=(connection, answer), daemon=True)
            one.start()

    def start(answer: Answer) -> str:
        one = threading.Thread(target=accept, args=(answer,), daemon=True)
        one.start()
        threads.append(one)
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield start
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for one in threads:
        one.join()


def told(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nInference-Header-Content-Length: 2\r\nContent-Length: 5\r\n\r\nhello".encode()


GOOD, BAD = Request(b"good\r\n\r\n", True), Request(b"bad\r\n\r\n", False)


def test_every_stream_gets_as_many_answers_as_it_wants(answering: Callable[[Answer], str]) -> None:
    url = answering(lambda received: told("200 OK" if received.startswith(b"good") else "400 Bad Request"))
    streams = [Stream("a", [GOOD, BAD], 2, 7), Stream("b", [GOOD], 4, 3)]
    ticks: list[None] = []
    with MixedLoad(url, streams) as load:
        load.run(lambda: ticks.append(None), tick_s=10)
    assert [(stream.done, stream.refused) for stream in streams] == [(7, 3), (3, 0)]
    assert ticks == [None]  # one at the end at least


@pytest.mark.parametrize(
    ("status", "asked", "says"),
    [("200 OK", BAD, "should have refused"), ("500 Error", GOOD, "refused a good request: hello")],
)
def test_an_answer_of_the_wrong_kind_ends_it(
    answering: Callable[[Answer], str], status: str, asked: Request, says: str
) -> None:
    url = answering(lambda _: told(status))
    with MixedLoad(url, [Stream("a", [asked], 1, 4)]) as load, pytest.raises(MeasurementError, match=says):
        load.run(lambda: None, tick_s=10)


def test_a_quick_run_takes_the_first_steps_of_malloc_for_none() -> None:
    stream = Stream("a", [GOOD], 1, 10)
    watched = proof.Watched(pid=1, streams=(stream,), requests=[0, 10_000], rss_mb=[40, 42], anonymous_mb=[30, 32])
    assert proof._told(20.0, watched, is_quick=True) == 0
    assert proof._told(20.0, watched, is_quick=False) == 20
    assert proof._told(80.0, watched, is_quick=True) == 80
