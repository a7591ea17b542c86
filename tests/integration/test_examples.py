"""Every client example runs against the real server and says what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tritonpilot.server import EmbeddedServer

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def ctr_server(example_repository: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(example_repository, models=["ctr"]) as server:
        yield server


def run(name: str, server: EmbeddedServer) -> str:
    endpoint = server.endpoints.http if name.startswith("http") else server.endpoints.grpc
    environment = {**os.environ, "TRITONPILOT_CONTROL_KEY": server.control_key}
    command = [sys.executable, str(EXAMPLES / name), "--url", endpoint]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_example_is_left_out() -> None:
    tested = {"http_client.py", "grpc_client.py", "asyncio_client.py", "priority_and_timeout.py", "shared_memory.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested | {"rows.py"}


def test_http_grpc_and_shared_memory_give_the_same_answers(ctr_server: EmbeddedServer) -> None:
    first_three = [
        re.search(r"\[([\d. ]+)\]", run(name, ctr_server))
        for name in ("http_client.py", "grpc_client.py", "shared_memory.py")
    ]

    assert first_three[0] is not None
    assert len({match and match[1] for match in first_three}) == 1


def test_asyncio_gets_every_answer(ctr_server: EmbeddedServer) -> None:
    assert "200 answers, mean click probability 0." in run("asyncio_client.py", ctr_server)


def test_the_realtime_request_overtakes_and_the_impatient_one_is_rejected(ctr_server: EmbeddedServer) -> None:
    said = run("priority_and_timeout.py", ctr_server)

    place = int(re.findall(r"answered as number (\d+) of 302", said)[0])
    assert place < 300, "it was sent after 300 others"
    assert "impatient was rejected: StatusCode.UNAVAILABLE Request timeout expired" in said


def test_shared_memory_regions_are_gone_afterwards(ctr_server: EmbeddedServer) -> None:
    run("shared_memory.py", ctr_server)

    assert not list(Path("/dev/shm").glob("example-*"))  # noqa: S108
