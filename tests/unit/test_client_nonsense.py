"""The client against endpoints that are no Triton: what they answer is nonsense, or nothing at all."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tritonpilot.client import AsyncClient, CallError, Client, DeadlineError, DisconnectedError, InputError, Policy

ONCE = Policy(attempts=1)
INPUTS = {"x": np.ones((1, 2), np.float32)}
TENSOR = {"name": "x", "data_type": "TYPE_FP32", "dims": [2]}
CONFIG = {"name": "echo", "max_batch_size": 4, "input": [TENSOR], "output": [{**TENSOR, "name": "y"}]}
META_TENSOR = {"name": "x", "datatype": "FP32", "shape": [-1, 2]}
METADATA = {"name": "echo", "inputs": [META_TENSOR], "outputs": [{**META_TENSOR, "name": "y"}]}
LONG_S = 2.5  # less than the grace that close() gives to pending calls

Answer = Callable[[str], tuple[int, bytes]]
"""path -> (status, body)"""


@contextmanager
def endpoint(answer: Answer | None) -> Iterator[str]:
    """An HTTP server of such answers; without any it takes connections and says nothing."""
    ready = threading.Event()
    address = []
    loop = asyncio.new_event_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while answer is not None and (head := await reader.readuntil(b"\r\n\r\n")):
            length = next((line for line in head.lower().splitlines() if line.startswith(b"content-length:")), b":0")
            await reader.readexactly(int(length.partition(b":")[2]))
            status, body = answer(head.split()[1].decode())
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        await reader.read()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        address.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()

    def work() -> None:
        loop.set_exception_handler(lambda *_: None)  # callers may leave before their answer
        loop.run_until_complete(run())
        loop.run_forever()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield address[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def predict(address: str, is_asyncio: bool) -> Any:
    if not is_asyncio:
        with Client(address, retries=ONCE) as client:
            return client.predict("echo", INPUTS, outputs=["y"], deadline_ms=20_000)

    async def run() -> Any:
        async with AsyncClient(address, retries=ONCE) as client:
            return await client.predict("echo", INPUTS, outputs=["y"], deadline_ms=20_000)

    return asyncio.run(run())


def changed(**changes: Any) -> bytes:
    return json.dumps({**CONFIG, **changes}).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"",
        b"[]",
        b"null",
        b"5",
        b'{"a',
        b"<html>",
        b"\xff\xfe",
        b'{"name": "echo", "input": 5}',
        b'{"name": "echo", "input": [5]}',
        b'{"name": "echo", "input": [{}]}',
        b"[" * 100_000,
        changed(name="another"),
        changed(max_batch_size="many"),
        changed(max_batch_size=-1),
        changed(max_batch_size=[1]),
        changed(input=[{**TENSOR, "dims": ["two"]}]),
        changed(input=[{**TENSOR, "dims": [-7]}]),
        changed(input=[{**TENSOR, "dims": [1e999]}]).replace(b"Infinity", b"1e400"),
        changed(input=[{**TENSOR, "data_type": "TYPE_INVALID"}]),
        changed(output=[{**TENSOR, "data_type": 7}]),
        changed(parameters=[]),
        changed(parameters={"pilot_classes": {"string_value": "fast:x"}}),
        changed(model_transaction_policy=1),
    ],
    ids=lambda body: body[-60:].decode("latin1"),
)
@pytest.mark.parametrize("is_asyncio", [False, True])
def test_a_config_that_is_none_is_the_endpoints_fault(body: bytes, is_asyncio: bool) -> None:
    with endpoint(lambda _: (200, body)) as address, pytest.raises(DisconnectedError) as caught:
        predict(address, is_asyncio)
    assert f"http://{address}" in str(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        [],
        {**METADATA, "name": "another"},
        {**METADATA, "inputs": [{"name": "x"}]},
        {**METADATA, "inputs": [{**META_TENSOR, "datatype": "TEXT"}]},
        {**METADATA, "inputs": [{**META_TENSOR, "shape": "two"}]},
        {**METADATA, "inputs": 5},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("is_asyncio", [False, True])
def test_metadata_that_are_none_are_the_endpoints_fault(metadata: Any, is_asyncio: bool) -> None:
    def answer(path: str) -> tuple[int, bytes]:
        return (404, b"") if path.endswith("/config") else (200, json.dumps(metadata).encode())

    with endpoint(answer) as address, pytest.raises(DisconnectedError, match=address):
        predict(address, is_asyncio)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"",
        b"[]",
        b'{"a',
        b"\xff",
        b'{"outputs": []}',
        b'{"outputs": [{}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [1]}]}',
        b'{"outputs": [{"name": "y", "datatype": "TEXT", "shape": [1, 2], "data": [1, 2]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": "two", "data": [1, 2]}]}',
        b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [5, 2], "data": [1,2,3,4,5,6,7,8,9,10]}]}',
    ],
    ids=lambda body: body.decode("latin1"),
)
@pytest.mark.parametrize("is_asyncio", [False, True])
def test_an_answer_that_is_none_is_the_endpoints_fault(body: bytes, is_asyncio: bool) -> None:
    def answer(path: str) -> tuple[int, bytes]:
        return 200, changed() if path.endswith("/config") else body

    with endpoint(answer) as address, pytest.raises(CallError, match=address):
        predict(address, is_asyncio)


def test_another_endpoint_answers_instead() -> None:
    good = b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [3, 4]}]}'
    with (
        endpoint(lambda _: (200, b"{}")) as bad,
        endpoint(lambda path: (200, changed() if path.endswith("/config") else good)) as other,
        Client([bad, other]) as client,
    ):
        for _ in range(3):
            assert client.predict("echo", INPUTS)["y"].tolist() == [[3, 4]]


def test_a_name_that_cannot_be_sent_is_refused() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InputError, match="No server has a model"):
        client.predict("caf\udcff", INPUTS)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("is_described", [False, True])
async def test_closing_waits_for_callers_only(scheme: str, is_described: bool) -> None:
    """What was asked of a hanging endpoint may never be answered, and after its deadline nobody waits for it."""
    hang = threading.Event()

    def answer(path: str) -> tuple[int, bytes]:
        if not path.endswith("/config"):
            hang.wait(20)
        return 200, changed()

    with endpoint(answer if is_described and scheme == "http" else None) as address:
        client = AsyncClient(f"{scheme}://{address}")
        with pytest.raises(DeadlineError):
            await client.predict("echo", INPUTS, deadline_ms=300)
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < LONG_S

        thread_client = Client(f"{scheme}://{address}")
        if not is_described:
            with pytest.raises(DeadlineError):
                thread_client.predict("echo", INPUTS, deadline_ms=300)
        began = time.monotonic()
        thread_client.close()
        assert time.monotonic() - began < LONG_S
        hang.set()


async def test_closing_waits_for_a_pending_call_until_its_deadline_and_no_longer() -> None:
    with endpoint(None) as address:
        client = AsyncClient(address)
        call = asyncio.create_task(client.predict("echo", INPUTS, deadline_ms=500))
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await client.close()
        assert time.monotonic() - began < LONG_S
        with pytest.raises(DeadlineError):
            await call


async def test_closing_ends_a_call_that_outlasts_the_grace() -> None:
    with endpoint(None) as address:
        client = AsyncClient(address)
        call = asyncio.create_task(client.predict("echo", INPUTS, deadline_ms=60_000))
        await asyncio.sleep(0.1)
        await client.close(grace_s=0.2)
        with pytest.raises(CallError, match="closed"):
            await call
