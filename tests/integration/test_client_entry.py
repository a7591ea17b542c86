"""The client through the entry: keys, classes by name, refusals and deadlines, over both protocols."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tritonpilot.client import AsyncClient, DeadlineError, DeniedError, InputError, RejectedError
from tritonpilot.entry.tenants import hash_key
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

RUN = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tritonpilot.entry.app import Settings, run
tenants = Path(sys.argv[3]) if sys.argv[3:] else None
settings = Settings(sys.argv[1], sys.argv[2], http_port=0, grpc_port=0, metrics_port=0, tenants=tenants)
run(settings, lambda endpoints: print(json.dumps(asdict(endpoints)), flush=True))
"""
CONFIG = """
backend: "python"
max_batch_size: 8
input [{name: "INPUT" data_type: TYPE_FP32 dims: [1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [1]}]
instance_group [{kind: KIND_CPU}]
dynamic_batching { priority_levels: 2 default_priority_level: 1 }
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
TENANTS = f"""
tenants:
  - name: shop
    keys: ["{hash_key("key-of-shop")}"]
  - name: guest
    keys: ["{hash_key("key-of-guest")}"]
    models: [other]
  - name: slow
    keys: ["{hash_key("key-of-slow")}"]
    rate_per_s: 0.01
    burst: 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, make_model: Callable[..., Path]) -> Iterator[EmbeddedServer]:
    root = tmp_path_factory.mktemp("behind") / "model_repository"
    make_model(root, "identity", config=CONFIG)
    with EmbeddedServer(root) as running:
        yield running
        running.check_alive()


@contextmanager
def entry(server: EmbeddedServer, tenants: Path | None = None) -> Iterator[dict[str, str]]:
    """Where a running entry listens, by protocol."""
    arguments = [server.endpoints.http, server.endpoints.grpc, *([str(tenants)] if tenants else [])]
    with subprocess.Popen([sys.executable, "-c", RUN, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            yield {scheme: f"{scheme}://{found[scheme]}" for scheme in ("http", "grpc")}
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def open_entry(server: EmbeddedServer) -> Iterator[dict[str, str]]:
    with entry(server) as found:
        yield found


@pytest.fixture(scope="module")
def keyed_entry(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    file.write_text(TENANTS)
    file.chmod(0o600)
    with entry(server, file) as found:
        yield found


def row(number: float) -> dict[str, np.ndarray]:
    return {"INPUT": np.array([number], np.float32)}


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_calls_are_answered_with_a_key_and_without_any_config(keyed_entry: dict[str, str], scheme: str) -> None:
    async with AsyncClient(keyed_entry[scheme], key="key-of-shop", caller_class="batch", coalesce_rows=8) as client:
        answers = await asyncio.gather(*(client.predict("identity", row(-number)) for number in range(40)))

    assert [answer["OUTPUT"].tolist() for answer in answers] == [[-number] for number in range(40)]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("key", ["", "key-of-nobody", "key-of-guest"])
async def test_without_a_key_for_the_model_the_call_is_denied(
    keyed_entry: dict[str, str], scheme: str, key: str
) -> None:
    async with AsyncClient(keyed_entry[scheme], key=key) as client:
        with pytest.raises(DeniedError):
            await client.predict("identity", row(-1))


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_a_rate_that_is_used_up_ends_the_call_at_once_with_the_wait(
    keyed_entry: dict[str, str], scheme: str
) -> None:
    async with AsyncClient(keyed_entry[scheme], key="key-of-slow", coalesce=False) as client:
        began = time.monotonic()
        with pytest.raises(RejectedError) as raised:
            await asyncio.gather(*(client.predict("identity", row(-1), deadline_ms=20_000) for _ in range(2)))

    assert 20 < raised.value.retry_after_s <= 100
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_classes_are_known_where_everybody_may_come(open_entry: dict[str, str], scheme: str) -> None:
    async with AsyncClient(open_entry[scheme]) as client:
        answer = await client.predict("identity", row(-1), caller_class="batch")
        with pytest.raises(InputError, match="realtime, batch"):
            await client.predict("identity", row(-1), caller_class="vip")

    assert answer["OUTPUT"].tolist() == [-1]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
async def test_a_call_ends_at_its_deadline_and_later_ones_are_answered(open_entry: dict[str, str], scheme: str) -> None:
    async with AsyncClient(open_entry[scheme]) as client:
        with pytest.raises(DeadlineError):
            await client.predict("identity", row(0.6), deadline_ms=200)
        answer = await client.predict("identity", row(-2))

    assert answer["OUTPUT"].tolist() == [-2]
