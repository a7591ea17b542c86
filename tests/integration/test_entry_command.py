"""The command `tritonpilot entry` as an operator uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tritonpilot.client import Client
from tritonpilot.client.errors import DeniedError
from tritonpilot.entry.tenants import hash_key, new_key
from tritonpilot.server import EmbeddedServer

COMMAND = str(Path(sys.executable).with_name("tritonpilot"))
FREE = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")
ROW = {"dense": np.zeros((1, 28), np.float32), "categorical": np.zeros((1, 8), np.int64)}


@pytest.fixture(scope="module")
def ctr_server(example_repository: Path) -> Iterator[EmbeddedServer]:
    """A Triton with ctr."""
    with EmbeddedServer(example_repository, models=["ctr"]) as server:
        yield server


@contextmanager
def entry(*options: str) -> Iterator[tuple[dict[str, str], subprocess.Popen[str]]]:
    """A running entry: its endpoints and its process."""
    process = subprocess.Popen(
        [COMMAND, "entry", "--json", *FREE, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["endpoints"], process
    finally:
        process.kill()
        process.communicate()


def before(server: EmbeddedServer) -> tuple[str, ...]:
    return ("--triton-http", server.endpoints.http, "--triton-grpc", server.endpoints.grpc)


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=60)


def scraped(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=5) as answer:
        text: str = answer.read().decode()
    return text


def test_calls_go_through_and_are_counted(ctr_server: EmbeddedServer) -> None:
    with entry(*before(ctr_server)) as (endpoints, process):
        for url in (endpoints["http"], f"grpc://{endpoints['grpc']}"):
            with Client(url) as client, Client(ctr_server.endpoints.http) as direct:
                through = client.predict("ctr", ROW, deadline_ms=5000, caller_class="batch")
                np.testing.assert_array_equal(through["prob"], direct.predict("ctr", ROW)["prob"])
        found = scraped(endpoints["metrics"])
        assert 'processed_requests_total{class="batch",model="ctr",status="ok",tenant=""} 2.0' in found
        assert 'inference_latency_seconds_bucket{class="batch",le="0.05",model="ctr"}' in found
        assert 'request_queue_size{class="realtime",model="ctr"} 0.0' in found
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0


def test_a_revoked_key_is_refused_soon_and_at_once_after_sighup(ctr_server: EmbeddedServer, tmp_path: Path) -> None:
    ours, theirs = new_key(), new_key()

    def write(*keys: str) -> None:
        said: Any = {"tenants": [{"name": f"t{i}", "keys": [hash_key(key)]} for i, key in enumerate(keys)]}
        (tmp_path / "new").write_text(yaml.safe_dump(said))
        (tmp_path / "new").replace(tmp_path / "tenants.yaml")

    write(ours, theirs)
    with (
        entry(*before(ctr_server), "--tenants", str(tmp_path / "tenants.yaml")) as (endpoints, process),
        Client(endpoints["http"], key=ours) as client,
        Client(endpoints["http"], key=theirs) as other,
    ):
        client.predict("ctr", ROW)
        other.predict("ctr", ROW)
        write(ours)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        with pytest.raises(DeniedError):
            other.predict("ctr", ROW)
        client.predict("ctr", ROW)
        (tmp_path / "tenants.yaml").write_text("tenants: [")
        deadline = time.monotonic() + 10
        while "tenants_file_trouble 1.0" not in scraped(endpoints["metrics"]) and time.monotonic() < deadline:
            client.predict("ctr", ROW)
        assert "tenants_file_trouble 1.0" in scraped(endpoints["metrics"]), "and the old keys stay in force"
        client.predict("ctr", ROW)


def test_without_triton_it_opens_and_says_what_is_missing() -> None:
    with (
        entry("--triton-http", "127.0.0.1:9", "--triton-grpc", "127.0.0.1:9") as (endpoints, _),
        pytest.raises(urllib.error.HTTPError) as refused,
    ):
        urllib.request.urlopen(f"http://{endpoints['http']}/v2/models/ctr/infer", data=b"{}", timeout=10)
    assert refused.value.code == 503
    assert "Triton cannot be reached" in refused.value.read().decode()


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--triton-http", "nohost"), 3, "--triton-http is 'nohost', but must be HOST:PORT"),
        (("--triton-http", "http://127.0.0.1:8000"), 3, "must be HOST:PORT"),
        (("--triton-grpc", "127.0.0.1:99999"), 3, "--triton-grpc is '127.0.0.1:99999'"),
        (("--host", "203.0.113.9"), 8, "cannot listen at 203.0.113.9"),
        (("--cpus", "999"), 7, "cannot run on 999"),
        (("--tenants", "/nowhere/tenants.yaml"), 3, "/nowhere/tenants.yaml"),
        (("--http-port", str(2**16)), 2, "65535"),
    ],
)
def test_what_cannot_work_is_refused(options: tuple[str, ...], code: int, said: str) -> None:
    done = run("entry", *FREE, *options)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert said in done.stderr


def test_a_taken_port_is_named_with_its_holder() -> None:
    with entry() as (endpoints, process):
        done = run("entry", *FREE, "--http-port", endpoints["http"].rpartition(":")[2])
        assert done.returncode == 8
        assert str(process.pid) in done.stderr


def test_keys_are_made_hashed_and_checked(tmp_path: Path) -> None:
    made = json.loads(run("tenants", "new-key", "--json").stdout)
    assert run("tenants", "hash-key", stdin=made["key"] + "\n").stdout.strip() == made["hash"]
    assert run("tenants", "hash-key", stdin="two\nlines\n").returncode == 3
    file = tmp_path / "tenants.yaml"
    file.write_text(f"tenants:\n  - name: shop\n    keys: [{made['hash']}]\n    rate_per_s: 5\n    concurrency: 2\n")
    assert run("tenants", "check", str(file)).stdout == "shop: 5 rows/s, 2 at once\n"
    file.write_text(f"tenants:\n  - name: shop\n    keys: [{made['hash']}]\n    models:\n")
    done = run("tenants", "check", str(file))
    assert (done.returncode, f"{file}:4: " in done.stderr, "nothing is given here" in done.stderr) == (3, True, True)


def test_ctrl_c_ends_it() -> None:
    with entry() as (_, process):
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=15) == 130
