"""The client against real servers: whose answer is whose, what fails alone, and that nothing hangs or stays behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from tritonpilot.client import (
    AsyncClient,
    CallError,
    Client,
    ClosedError,
    DeadlineError,
    DisconnectedError,
    InputError,
    Policy,
    RejectedError,
    UnknownModelError,
)
from tritonpilot.client.shared_memory import PREFIX
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

CALLERS = 64
PICKY = """
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            if np.isnan(array).any():
                said = f'"INPUT": row {int(np.isnan(array).any(axis=1).argmax())} has no value'
                error = pb_utils.TritonError(said, pb_utils.TritonError.INVALID_ARG)
                responses.append(pb_utils.InferenceResponse(error=error))
            else:
                time.sleep(0.001)
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array * 2)]))
        return responses
"""
PICKY_CONFIG = """
backend: "python"
max_batch_size: 32
input [{name: "INPUT" data_type: TYPE_FP32 dims: [2]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [2]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching {}
"""
NARROW_CONFIG = """
backend: "python"
max_batch_size: 1
input [{name: "INPUT" data_type: TYPE_FP32 dims: [1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [1]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching { default_queue_policy { max_queue_size: 1 } }
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
STRINGS_CONFIG = """
backend: "python"
max_batch_size: 4
input [{name: "INPUT" data_type: TYPE_STRING dims: [1]}]
output [{name: "OUTPUT" data_type: TYPE_STRING dims: [1]}]
instance_group [{kind: KIND_CPU}]
"""
ECHO = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array)]) for array in inputs]
"""
BIG_CONFIG = """
backend: "python"
max_batch_size: 4
input [{name: "INPUT" data_type: TYPE_FP32 dims: [300000]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [300000]}]
instance_group [{kind: KIND_CPU}]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("client") / "model_repository"
    make_model(root, "identity")
    make_model(root, "picky", PICKY, PICKY_CONFIG)
    make_model(root, "narrow", config=NARROW_CONFIG)
    make_model(root, "strings", ECHO, STRINGS_CONFIG)
    make_model(root, "big", ECHO, BIG_CONFIG)
    return root


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(repository) as server:
        yield server
        server.check_alive()


@pytest.fixture
def mortal(repository: Path) -> Iterator[EmbeddedServer]:
    """A server that a test may kill."""
    with EmbeddedServer(repository, models=["identity", "picky"]) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def url(request: pytest.FixtureRequest, server: EmbeddedServer) -> str:
    return url_of(server, request.param)


def url_of(server: EmbeddedServer, scheme: str) -> str:
    return f"{scheme}://{server.endpoints.http if scheme == 'http' else server.endpoints.grpc}"


def row(number: float) -> dict[str, Any]:
    return {"INPUT": np.array([number, -number], np.float32)}


def sleeping(seconds: float) -> dict[str, Any]:
    return {"INPUT": np.array([seconds], np.float32)}


def requests_and_rows(server: EmbeddedServer, model: str) -> tuple[int, int]:
    counters = server.statistics(model)[0]
    return counters.success.count + counters.fail.count, counters.inference_count


def regions(server: EmbeddedServer) -> list[str]:
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as asking:
        headers = {f"triton-grpc-protocol-{server.control_header}": server.control_key}
        return list(asking.get_system_shared_memory_status(headers=headers).regions)


def errors_of(answers: list[Any]) -> list[type]:
    return [type(answer) for answer in answers if isinstance(answer, BaseException)]


async def test_every_task_gets_its_own_answer_and_calls_share_requests(server: EmbeddedServer, url: str) -> None:
    before = requests_and_rows(server, "picky")
    async with AsyncClient(url) as client:

        async def caller(number: int) -> list[bool]:
            answers = [await client.predict("picky", row(number + turn / 64)) for turn in range(20)]
            return [
                answer["OUTPUT"].tolist() == [2 * (number + turn / 64), -2 * (number + turn / 64)]
                for turn, answer in enumerate(answers)
            ]

        right = await asyncio.gather(*(caller(number) for number in range(CALLERS)))

    requests, rows = (after - old for after, old in zip(requests_and_rows(server, "picky"), before, strict=True))
    assert all(all(each) for each in right)
    assert rows == CALLERS * 20
    assert requests < rows / 4


def test_every_thread_gets_its_own_answer(url: str) -> None:
    with Client(url) as client, ThreadPoolExecutor(CALLERS) as threads:

        def caller(number: int) -> list[list[float]]:
            return [client.predict("picky", row(number))["OUTPUT"].tolist() for _ in range(10)]

        found = list(threads.map(caller, range(CALLERS)))

    assert found == [[[2 * number, -2 * number]] * 10 for number in range(CALLERS)]


async def test_answers_of_several_rows_are_split_where_their_calls_end(url: str) -> None:
    async with AsyncClient(url) as client:
        batches = [np.full((1 + number % 5, 2), number, np.float32) for number in range(40)]
        answers = await asyncio.gather(*(client.predict("picky", {"INPUT": batch}) for batch in batches))

    for batch, answer in zip(batches, answers, strict=True):
        np.testing.assert_array_equal(answer["OUTPUT"], batch * 2)


async def test_joined_requests_hold_no_more_rows_than_is_asked(server: EmbeddedServer, url: str) -> None:
    async with AsyncClient(url, coalesce_rows=4) as client:
        await client.predict("picky", row(0))
        before = requests_and_rows(server, "picky")
        await asyncio.gather(*(client.predict("picky", row(number)) for number in range(32)))

    requests, rows = (after - old for after, old in zip(requests_and_rows(server, "picky"), before, strict=True))
    assert (requests, rows) == (8, 32)


async def test_one_bad_call_fails_alone_and_names_its_field(url: str) -> None:
    async with AsyncClient(url) as client:
        await client.predict("picky", row(0))
        numbers = [float("nan") if place == 13 else place for place in range(32)]
        answers = await asyncio.gather(
            *(client.predict("picky", row(number)) for number in numbers), return_exceptions=True
        )

    bad = answers.pop(13)
    assert isinstance(bad, InputError)
    assert (bad.field, bad.is_retryable) == ("INPUT", False)
    assert "row 0 has no value" in str(bad)
    assert [answer["OUTPUT"][0] for answer in answers] == [2 * place for place in range(32) if place != 13]


async def test_inputs_that_do_not_fit_are_refused_before_they_are_sent(server: EmbeddedServer, url: str) -> None:
    async with AsyncClient(url) as client:
        await client.predict("picky", row(0))
        before = requests_and_rows(server, "picky")
        with pytest.raises(InputError, match=r'"INPUT": shape \[3\]'):
            await client.predict("picky", {"INPUT": np.zeros(3, np.float32)})
        with pytest.raises(InputError, match="no such output"):
            await client.predict("picky", row(0), outputs=["OTHER"])
        with pytest.raises(UnknownModelError):
            await client.predict("absent", row(0))

    assert requests_and_rows(server, "picky") == before


async def test_a_call_ends_at_its_deadline_and_later_ones_are_answered(url: str) -> None:
    async with AsyncClient(url) as client:
        began = time.monotonic()
        with pytest.raises(DeadlineError, match="within 150 ms"):
            await client.predict("identity", sleeping(0.6), deadline_ms=150)
        took = time.monotonic() - began
        answer = await client.predict("identity", sleeping(0))

    assert 0.1 < took < 0.5
    assert answer["OUTPUT"].tolist() == [0]


async def test_a_call_of_a_joined_request_ends_at_its_own_deadline(url: str) -> None:
    async with AsyncClient(url) as client:
        calls = [client.predict("identity", sleeping(0.3), deadline_ms=ms) for ms in (140, 200, 5000)]
        answers = await asyncio.gather(*calls, return_exceptions=True)

    assert errors_of(answers) == [DeadlineError, DeadlineError]
    assert answers[2]["OUTPUT"].tolist() == [np.float32(0.3)]


async def test_a_full_queue_is_asked_again(url: str) -> None:
    async with AsyncClient(url, retries=Policy(attempts=100, first_wait_ms=20, budget_most=1000)) as patient:
        answers = await asyncio.gather(*(patient.predict("narrow", sleeping(0.02)) for _ in range(12)))
    async with AsyncClient(url, retries=Policy(attempts=1)) as impatient:
        refused = await asyncio.gather(
            *(impatient.predict("narrow", sleeping(0.02)) for _ in range(12)), return_exceptions=True
        )

    assert len(answers) == 12
    assert set(errors_of(refused)) == {RejectedError}
    assert "maximum queue size" in str(next(each for each in refused if isinstance(each, RejectedError)))


async def test_classes_of_callers_are_those_of_the_models_config(url: str) -> None:
    async with AsyncClient(url) as client:
        await client.predict("narrow", sleeping(0), caller_class="batch")
        with pytest.raises(InputError, match="realtime, batch"):
            await client.predict("narrow", sleeping(0), caller_class="vip")


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_no_call_hangs_when_its_only_server_is_killed(mortal: EmbeddedServer, scheme: str) -> None:
    with Client(url_of(mortal, scheme), deadline_ms=20_000) as client, ThreadPoolExecutor(16) as threads:
        client.predict("identity", sleeping(0))
        pending = [threads.submit(client.predict, "identity", sleeping(5)) for _ in range(16)]
        wait_until(lambda: mortal.log_tail().count("identity takes") > 0)
        began = time.monotonic()
        os.kill(mortal.pid, signal.SIGKILL)
        errors = [each.exception(timeout=15) for each in pending]
        took = time.monotonic() - began

    assert {type(error) for error in errors} == {DisconnectedError}
    assert took < 10


async def test_calls_go_to_the_other_server_when_one_is_killed(server: EmbeddedServer, mortal: EmbeddedServer) -> None:
    async with AsyncClient([url_of(mortal, "http"), url_of(server, "grpc")]) as client:
        await asyncio.gather(*(client.predict("picky", row(number)) for number in range(8)))
        counts = []

        async def caller(number: int) -> None:
            for turn in range(50):
                answer = await client.predict("picky", row(number * 100 + turn))
                counts.append(answer["OUTPUT"][0] == 2 * (number * 100 + turn))

        callers = asyncio.gather(*(caller(number) for number in range(16)))
        while len(counts) < 100:
            await asyncio.sleep(0.001)
        os.kill(mortal.pid, signal.SIGKILL)
        await asyncio.wait_for(callers, 20)

    assert len(counts) == 16 * 50
    assert all(counts)


async def test_whatever_happens_every_call_ends_rightly_and_nothing_is_left(
    server: EmbeddedServer, mortal: EmbeddedServer
) -> None:
    random = np.random.default_rng(11)
    plans = [
        (float("nan") if draw < 0.05 else round(draw, 3), deadline, draw > 0.95)
        for draw, deadline in zip(random.random(800), random.choice([3, 20, 300, 5000], 800), strict=True)
    ]
    wrong: list[str] = []
    ended = 0

    async def call(client: AsyncClient, number: float, deadline_ms: float, is_cancelled: bool) -> None:
        nonlocal ended
        task = asyncio.create_task(client.predict("picky", row(number), deadline_ms=float(deadline_ms)))
        if is_cancelled:
            await asyncio.sleep(0.001)
            task.cancel()
        began = time.monotonic()
        answer = (await asyncio.gather(task, return_exceptions=True))[0]
        ended += 1
        if time.monotonic() - began > deadline_ms / 1e3 + 1:
            wrong.append(f"{deadline_ms} ms took {time.monotonic() - began} s")
        if isinstance(answer, dict):
            if answer["OUTPUT"][0] != np.float32(number) * 2:
                wrong.append(f"{number} got {answer}")
        elif not isinstance(answer, (DeadlineError, asyncio.CancelledError)) and not (
            isinstance(answer, InputError) and np.isnan(number)
        ):
            wrong.append(repr(answer))

    async def caller(client: AsyncClient, mine: list[Any]) -> None:
        for plan in mine:
            await call(client, *plan)

    async with AsyncClient([url_of(mortal, "grpc"), url_of(server, "http"), url_of(server, "grpc")]) as client:
        await client.predict("picky", row(0))
        callers = [asyncio.create_task(caller(client, plans[start::32])) for start in range(32)]
        while ended < 200:
            await asyncio.sleep(0.005)
        os.kill(mortal.pid, signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*callers), 60)
        while client._tasks:
            await asyncio.wait(client._tasks, timeout=5)
        await asyncio.sleep(0)
        left = (client._lanes, client._calls, sum(each.in_flight for each in client.endpoints))

    assert wrong == []
    assert left == ({}, set(), 0)


async def test_a_dead_endpoint_is_left_out(server: EmbeddedServer, free_port: int) -> None:
    async with AsyncClient([f"127.0.0.1:{free_port}", url_of(server, "http")]) as client:
        answers = [await client.predict("picky", row(number)) for number in range(20)]
    dead, alive = client.endpoints

    assert [answer["OUTPUT"][0] for answer in answers] == [2 * number for number in range(20)]
    assert dead.failures > 0
    assert alive.failures == 0


async def test_without_any_server_the_error_says_so_before_the_deadline(free_port: int) -> None:
    async with AsyncClient(f"127.0.0.1:{free_port}") as client:
        with pytest.raises(DisconnectedError, match="cannot be reached"):
            await asyncio.wait_for(client.predict("picky", row(1)), 5)


async def test_close_waits_for_answers_within_its_grace(url: str) -> None:
    client = AsyncClient(url)
    await client.predict("identity", sleeping(0))
    pending = [asyncio.create_task(client.predict("identity", sleeping(0.2))) for _ in range(5)]
    await asyncio.sleep(0)
    await client.close(grace_s=10)
    answers = await asyncio.gather(*pending)

    assert len(answers) == 5
    with pytest.raises(ClosedError):
        await client.predict("identity", sleeping(0))
    await client.close()


async def test_close_fails_what_is_not_answered_within_its_grace(url: str) -> None:
    client = AsyncClient(url)
    await client.predict("identity", sleeping(0))
    pending = [asyncio.create_task(client.predict("identity", sleeping(0.8))) for _ in range(5)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await client.close(grace_s=0.1)
    answers = await asyncio.gather(*pending, return_exceptions=True)

    assert errors_of(answers) == [ClosedError] * 5
    assert time.monotonic() - began < 0.7


def test_threads_that_wait_when_the_client_is_closed_are_not_left_waiting(url: str) -> None:
    client = Client(url)
    client.predict("identity", sleeping(0))
    with ThreadPoolExecutor(8) as threads:
        pending = [threads.submit(client.predict, "identity", sleeping(0.6)) for _ in range(8)]
        wait_until(lambda: len(client._client._calls) == 8)
        client.close(grace_s=0.05)
        errors = [each.exception(timeout=5) for each in pending]

    assert {type(error) for error in errors} == {ClosedError}


async def test_a_cancelled_call_leaves_its_mates_alone(url: str) -> None:
    async with AsyncClient(url) as client:
        await client.predict("identity", sleeping(0))
        tasks = [asyncio.create_task(client.predict("identity", sleeping(0.1))) for _ in range(4)]
        await asyncio.sleep(0.02)
        tasks[1].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)

    assert errors_of(answers) == [asyncio.CancelledError]


async def test_big_tensors_through_shared_memory_equal_those_in_the_body(server: EmbeddedServer, url: str) -> None:
    random = np.random.default_rng(5)
    batches = [random.standard_normal((1 + number % 4, 300_000), np.float32) for number in range(8)]
    async with AsyncClient(url) as client:
        through = await asyncio.gather(*(client.predict("big", {"INPUT": batch}) for batch in batches))
        registered = regions(server)
        files = list(Path("/dev/shm").glob(f"{PREFIX}*"))  # noqa: S108
        again = await client.predict("big", {"INPUT": batches[0]})
        reused = regions(server)
    async with AsyncClient(url, shared_memory="off") as plain:
        direct = [await plain.predict("big", {"INPUT": batch}) for batch in batches]

    assert 0 < len(registered) <= 8
    assert set(reused) == set(registered)
    assert files == [], "a region has a name only until the server has mapped it"
    assert regions(server) == []
    for batch, one, other in zip(batches, through, direct, strict=True):
        np.testing.assert_array_equal(one["OUTPUT"], batch)
        np.testing.assert_array_equal(other["OUTPUT"], batch)
    np.testing.assert_array_equal(again["OUTPUT"], batches[0])


async def test_long_strings_go_through_shared_memory_too(server: EmbeddedServer, url: str) -> None:
    texts = [[b"a" * 700_000], ["é".encode() * 300_000], [b"\xff\0" * 400_000]]
    async with AsyncClient(url) as client:
        answer = await client.predict("strings", {"INPUT": texts})
        assert len(regions(server)) == 1

    assert answer["OUTPUT"].tolist() == texts


async def test_without_the_key_big_tensors_go_in_the_body(server: EmbeddedServer, url: str) -> None:
    batch = np.ones((2, 300_000), np.float32)
    for key in ("", "not-the-key-of-this-server"):
        async with AsyncClient(url, control_key=key) as client:
            answer = await client.predict("big", {"INPUT": batch})
            assert regions(server) == []
        np.testing.assert_array_equal(answer["OUTPUT"], batch)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
async def test_without_a_gpu_tensors_for_its_memory_go_in_the_body(server: EmbeddedServer, url: str) -> None:
    batch = np.ones((2, 300_000), np.float32)
    async with AsyncClient(url, shared_memory=0) as client:
        answer = await client.predict("big", {"INPUT": batch})
        assert regions(server) == []

    np.testing.assert_array_equal(answer["OUTPUT"], batch)


async def test_a_server_that_was_started_again_is_used_again(repository: Path, free_port: int) -> None:
    batch = {"INPUT": np.ones((2, 300_000), np.float32)}
    options: dict[str, Any] = {"models": ["big"], "http_port": free_port}
    async with AsyncClient(f"127.0.0.1:{free_port}") as client:
        for _ in range(2):
            with EmbeddedServer(repository, **options) as server:
                np.testing.assert_array_equal((await client.predict("big", batch))["OUTPUT"], batch["INPUT"])
                await client.predict("big", batch)
                assert len(regions(server)) == 1


def test_regions_of_a_killed_process_are_given_back_by_the_next_one(server: EmbeddedServer) -> None:
    code = f"""
        import os, signal
        import numpy as np
        from tritonpilot.client import Client
        client = Client({url_of(server, "grpc")!r})
        client.predict("big", {{"INPUT": np.ones(300000, np.float32)}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    left = regions(server)
    with Client(url_of(server, "grpc")) as client:
        client.predict("big", {"INPUT": np.ones(300_000, np.float32)})
        now = regions(server)

    assert len(left) == 1
    assert left[0] not in now
    assert not list(Path("/dev/shm").glob(f"{PREFIX}*"))  # noqa: S108


def test_a_program_that_forgets_to_close_gives_its_regions_back(server: EmbeddedServer) -> None:
    code = f"""
        import numpy as np
        from tritonpilot.client import Client
        client = Client({url_of(server, "http")!r})
        print(client.predict("big", {{"INPUT": np.ones(300000, np.float32)}})["OUTPUT"].sum())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout.strip() == "300000.0"
    assert regions(server) == []


async def test_a_request_that_is_given_up_does_not_lend_its_memory_to_the_next(url: str) -> None:
    wide = np.zeros((1, 300_000), np.float32)
    wide[0, 0] = 0.4  # seconds that the identity model sleeps
    async with AsyncClient(url) as client:
        with pytest.raises(DeadlineError):
            await client.predict("identity", {"INPUT": wide}, deadline_ms=100)
        answers = [await client.predict("identity", {"INPUT": np.full((1, 300_000), -n, np.float32)}) for n in range(3)]

    assert [float(answer["OUTPUT"].mean()) for answer in answers] == [0, -1, -2]


def test_a_forked_child_is_told_to_make_its_own_client(url: str) -> None:
    with Client(url) as client:
        client.predict("identity", sleeping(0))
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_call_and_tell, args=(client, sender))
        child.start()
        said = receiver.recv() if receiver.poll(10) else "nothing"
        child.join(10)
        answer = client.predict("identity", sleeping(0))

    assert said == "ClosedError"
    assert answer["OUTPUT"].tolist() == [0]


def _call_and_tell(client: Client, sender: Any) -> None:
    try:
        client.predict("identity", sleeping(0))
    except CallError as error:
        sender.send(type(error).__name__)


def wait_until(holds: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
