from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from pilotlib.server_metrics import Counts, Scraper, counts, metrics_endpoint, names

# Of tritonserver 2.51, cut.
TEXT = b"""\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="ctr",version="1"} 5
nv_inference_request_success{model="ctr",version="2"} 7
nv_inference_request_success{model="ensemble",version="1"} 7
# HELP nv_inference_request_failure Number of failed inference requests, all batch sizes
# TYPE nv_inference_request_failure counter
nv_inference_request_failure{model="ctr",reason="OTHER",version="1"} 1
nv_inference_request_failure{model="ctr",reason="REJECTED",version="1"} 2
# HELP nv_inference_exec_count Number of model executions performed (does not include cached requests)
# TYPE nv_inference_exec_count counter
nv_inference_exec_count{model="ctr",version="1"} 4
# HELP nv_inference_pending_request_count Instantaneous number of pending requests awaiting execution per-model.
# TYPE nv_inference_pending_request_count gauge
nv_inference_pending_request_count{model="ctr",version="1"} 3
nv_inference_pending_request_count{model="ctr",version="2"} 0
# HELP pilot_wakes_total Requests that the backend sent to its own model to wake the dynamic batcher
# TYPE pilot_wakes_total counter
pilot_wakes_total{model="image",version="1"} 0
"""


def test_the_counts_of_every_queue_are_read() -> None:
    assert counts(TEXT) == {
        ("ctr", "1"): Counts(pending=3, arrived=3 + 5 + 1 + 2, executed=4),
        ("ctr", "2"): Counts(pending=0, arrived=7, executed=0),
    }
    assert counts(b"") == {}


def test_models_that_wake_themselves_are_known_by_their_metric() -> None:
    assert names(TEXT, b"pilot_wakes_total") == {"image"}
    assert names(TEXT, b"pilot_absent_total") == frozenset()


@pytest.mark.parametrize(
    ("environ", "arguments", "endpoint"),
    [
        ({}, ("/opt/bin/tritonserver",), ("127.0.0.1", 8002)),
        ({}, ("tritonserver", "--metrics-port=9002", "--metrics-address=127.0.0.2"), ("127.0.0.2", 9002)),
        ({}, ("tritonserver", "--http-address", "127.0.0.3", "--metrics-port", "9"), ("127.0.0.3", 9)),
        ({}, ("tritonserver", "--allow-metrics=false"), None),
        ({}, ("tritonserver", "--metrics-port=none"), None),
        ({}, ("python3",), None),
        ({"PILOT_METRICS_ENDPOINT": "127.0.0.1:82"}, (), ("127.0.0.1", 82)),
        ({"PILOT_METRICS_ENDPOINT": "nonsense"}, ("tritonserver",), None),
    ],
)
def test_the_endpoint_is_read_from_environment_or_command_line(
    environ: dict[str, str], arguments: tuple[str, ...], endpoint: tuple[str, int] | None
) -> None:
    assert metrics_endpoint(environ, arguments) == endpoint


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def serve(listener: socket.socket, answers: list[bytes]) -> threading.Thread:
    """One connection that gets these answers, in parts, and is then closed."""

    def run() -> None:
        with listener.accept()[0] as connection:
            for answer in answers:
                connection.recv(1 << 16)
                for start in range(0, len(answer), 40):
                    connection.sendall(answer[start : start + 40])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: text/plain\r\n\r\n%s" % (len(body), body)


def test_one_connection_serves_many_scrapes_and_a_lost_one_is_made_again(listener: socket.socket) -> None:
    scraper = Scraper(listener.getsockname())
    for _ in range(2):
        thread = serve(listener, [http(TEXT), http(b"x 1\n")])
        assert scraper.scrape() == http(TEXT)
        assert scraper.scrape() == http(b"x 1\n")
        thread.join()
        with pytest.raises(OSError, match=r"closed|reset|[Bb]roken"):
            scraper.scrape()
    scraper.close()
