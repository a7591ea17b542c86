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
    endpoint = server.endpoints.http if name in ("http_client.py", "predict.py") else server.endpoints.grpc
    environment = {**os.environ, "TRITONPILOT_CONTROL_KEY": server.control_key}
    command = [sys.executable, str(EXAMPLES / name), "--url", endpoint]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_example_is_left_out() -> None:
    tested = {
        "http_client.py",
        "grpc_client.py",
        "asyncio_client.py",
        "priority_and_deadline.py",
        "shared_memory.py",
        "predict.py",
    }
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
    said = run("priority_and_deadline.py", ctr_server)

    place = int(re.findall(r"answered as number (\d+) of 302", said)[0])
    assert place < 300, "it was sent after 300 others"
    assert "impatient was rejected: StatusCode.UNAVAILABLE deadline exceeded before execution" in said


def test_shared_memory_regions_are_gone_afterwards(ctr_server: EmbeddedServer) -> None:
    run("shared_memory.py", ctr_server)

    assert not list(Path("/dev/shm").glob("example-*"))  # noqa: S108


def test_threads_predict_through_the_client(ctr_server: EmbeddedServer) -> None:
    said = run("predict.py", ctr_server)

    three = re.search(r"click probabilities: \[([\d. ,]+)\]", said)
    plain = re.search(r"\[([\d. ]+)\]", run("http_client.py", ctr_server))
    assert three is not None
    assert plain is not None
    assert [float(each) for each in three[1].split(",")] == pytest.approx(
        [float(each) for each in plain[1].split()], abs=1e-4
    )
    assert "200 answers to 32 threads, mean click probability 0." in said
    assert 'for dense: "dense": shape [27]' in said


def test_the_blocks_of_the_clients_guide_run(ctr_server: EmbeddedServer) -> None:
    guide = (EXAMPLES.parent / "docs" / "client.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    for written, real in (("127.0.0.1:8000", ctr_server.endpoints.http), ("127.0.0.1:8001", ctr_server.endpoints.grpc)):
        assert written in code
        code = code.replace(written, real)

    done = subprocess.run(
        [sys.executable, "-c", code + "\nprint(len(answers), 'answers')"],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[[\d.e-]+\]\ndense\n100 answers\n", done.stdout), done.stdout
