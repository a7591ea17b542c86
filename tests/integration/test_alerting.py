"""A real Alertmanager sends what Prometheus tells it to the address in the secret file, in words that help."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import program

from perf import programs
from perf.prometheus import scraping
from tritonpilot.ports import choose_ports

ALERTMANAGER = Path(__file__).parents[2] / "deploy" / "alertmanager" / "alertmanager.yml"
PATIENCE_S = 60.0


class _Chat(BaseHTTPRequestHandler):
    """Takes messages as an incoming webhook of a chat does."""

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.messages.put(message)  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def chat() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), _Chat) as server:
        server.messages = queue.Queue()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_team_gets_summary_action_and_runbook_of_an_alert(tmp_path: Path, chat: HTTPServer) -> None:
    (tmp_path / "url").write_text(f"http://127.0.0.1:{chat.server_port}/hook\n")
    config = ALERTMANAGER.read_text().replace("/run/secrets/alert_webhook_url", str(tmp_path / "url"))
    (tmp_path / "alertmanager.yml").write_text(config.replace("group_wait: 5s", "group_wait: 1s"))
    (port,) = choose_ports([0])
    process = subprocess.Popen(
        [
            *_alertmanager(),
            f"--config.file={tmp_path / 'alertmanager.yml'}",
            f"--storage.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    alerts = [
        {
            "labels": {"alertname": name, "model": "ctr", "severity": "critical"},
            "annotations": {
                "summary": f"{name} of ctr",
                "action": "tritonpilot top",
                "runbook": "docs/operations.md#x",
            },
        }
        for name in ("SloBurnFast", "DeadStub")
    ]
    try:
        _post_when_up(f"http://127.0.0.1:{port}/api/v2/alerts", alerts)
        message = chat.messages.get(timeout=PATIENCE_S)  # type: ignore[attr-defined]
    finally:
        process.terminate()
        process.wait(timeout=30)

    (attachment,) = message["attachments"]
    assert attachment["title"] == "FIRING DeadStub ctr", "the consequence of a dead stub is not told"
    assert attachment["text"].splitlines() == ["DeadStub of ctr", "Try: tritonpilot top", "Read: docs/operations.md#x"]


def test_prometheus_evaluates_every_deployed_rule_and_notices_a_server_that_is_not_there(tmp_path: Path) -> None:
    program("prometheus")
    (dead,) = choose_ports([0])
    with scraping(tmp_path, {"triton": f"127.0.0.1:{dead}", "watch": f"127.0.0.1:{dead}"}, every_s=1) as prometheus:
        pending = prometheus.wait_for('ALERTS{alertname="TritonDown",alertstate="pending"}', PATIENCE_S)
        with urllib.request.urlopen(f"{prometheus.url}/api/v1/rules", timeout=10) as answer:
            groups = json.load(answer)["data"]["groups"]

    assert pending[0].labels["severity"] == "critical"
    found = {
        group["name"]: {rule["name"]: rule["lastError"] for rule in group["rules"] if "lastError" in rule}
        for group in groups
    }
    written = [
        group["name"]
        for path in (ALERTMANAGER.parents[1] / "prometheus" / "rules").glob("*.yml")
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    assert sorted(group["name"] for group in groups) == sorted(written)
    assert {name: errors for name, errors in found.items() if errors} == {}


def _alertmanager() -> list[str]:
    """Its command; skips where it cannot run. Debian's reads templates below /usr/share: the unpacked one is shown its own."""
    found = program("alertmanager")
    if not found.is_relative_to(programs.FOLDER):
        return [str(found)]
    root = str(found.parents[2])
    shown = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")), "sh", "-c"]
    shown += ['mount --bind "$0/usr/share" /usr/share && exec "$@"', root, str(found)]
    said = subprocess.run([*shown, "--version"], capture_output=True, text=True, check=False)
    if said.returncode != 0:
        pytest.skip(
            f"no alertmanager here: Debian's has to be installed to run (apt-get install prometheus-alertmanager): {said.stderr}"
        )
    return shown


def _post_when_up(url: str, content: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    while True:
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
