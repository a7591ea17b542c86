"""Three Tritons behind the balancer get a new model one after the other: nobody fails, and all have it or none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import tritonclient.http
from programs import program

from perf import generations
from perf.balancer import balancing
from perf.generations import Call, Load, Rate, Subject
from tritonpilot import build
from tritonpilot.control_key import VARIABLE
from tritonpilot.errors import ServerError, SpecError
from tritonpilot.server import EmbeddedServer, Endpoints

pytestmark = [pytest.mark.server, pytest.mark.proof]  # three servers: minutes on two cores

NODES = 3
#: Triton says that it is not ready while any model loads; an inference tells whether it serves.
PROBE = {
    "BALANCER_PROBE_MODEL": "pair",
    "BALANCER_PROBE_BODY": json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1.0] * 8}]}
    ),
}


@dataclass
class Nodes:
    """Tritons with a repository each, and what they serve."""

    folder: Path
    subject: Subject
    servers: list[EmbeddedServer]
    generation: int = 0

    def swap(self, generation: int, *options: str) -> subprocess.CompletedProcess[str]:
        """`tritonpilot swap` on all of them, which may fail."""
        files = self.subject.files(generation, self.folder)
        return self.run("swap", *(f"{member}={file}" for member, file in files.items()), "--max-slower", "20", *options)

    def run(self, command: str, *options: str, count: int = NODES + 1) -> subprocess.CompletedProcess[str]:
        """A command on the first `count` of them."""
        argv = [str(Path(sys.executable).with_name("tritonpilot")), command, self.subject.service, *options]
        argv += ["--models", str(self.folder / "models")]
        for server in self.servers[:count]:
            argv += ["--node", f"{server.endpoints.grpc},{server.endpoints.http},{server.repository}"]
        environment = {**os.environ, VARIABLE: self.servers[0].control_key}
        return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=150, env=environment)

    def serve(self) -> list[set[int]]:
        """The generations that each living node answers with."""
        return [self._asked(server) for server in self.servers if server.is_alive()]

    def left(self) -> list[str]:
        """Folders of candidates."""
        return [f"{each}" for server in self.servers for each in server.repository.glob("*__*")]

    def _asked(self, server: EmbeddedServer) -> set[int]:
        question = self.subject.questions[0]
        tensor = tritonclient.http.InferInput("x", list(question.inputs["x"].shape), "FP32")
        tensor.set_data_from_numpy(question.inputs["x"])
        with closing(tritonclient.http.InferenceServerClient(server.endpoints.http)) as client:
            answer = client.infer(self.subject.service, [tensor])
        return set(self.subject.generations(0, {name: answer.as_numpy(name) for name in question.base}))


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    subject = generations.pair(folder)
    root = generations.published(folder)
    servers = []
    for number in range(NODES):
        own = folder / f"node_{number}" / "model_repository"
        shutil.copytree(root, own)
        servers.append(EmbeddedServer(own, probe_inputs=build.probe_inputs(folder / "models", own), exit_timeout_s=2))
    with ThreadPoolExecutor(NODES) as threads:
        try:
            list(threads.map(EmbeddedServer.start, servers))
            yield Nodes(folder, subject, servers)
        finally:
            list(threads.map(EmbeddedServer.stop, servers))


def unsound(calls: list[Call], allowed: set[int]) -> list[Call]:
    return [call for call in calls if call.error or len(call.generations) != 1 or not call.generations <= allowed]


def test_callers_of_the_balancer_get_whole_answers_while_all_nodes_change(nodes: Nodes, tmp_path: Path) -> None:
    program("haproxy")
    nodes.subject.files(1, nodes.folder)
    with balancing([(each.endpoints.http, each.endpoints.grpc) for each in nodes.servers], tmp_path, PROBE) as balancer:
        endpoints = Endpoints(balancer.http, balancer.grpc, "")
        with Load(endpoints, [Rate(nodes.subject, over, 30.0) for over in ("http", "grpc")]) as load:
            load.wait_for_answers()
            done = nodes.swap(1)
        calls = load.take()

    assert done.returncode == 0, done.stderr
    assert unsound(calls, {0, 1}) == []
    assert {generation for call in calls for generation in call.generations} == {0, 1}
    assert nodes.serve() == [{1}] * NODES
    assert nodes.left() == []


def test_all_nodes_go_back_together(nodes: Nodes) -> None:
    (before,) = {frozenset(each) for each in nodes.serve()}
    assert nodes.swap(2).returncode == 0
    assert nodes.serve() == [{2}] * NODES

    done = nodes.run("rollback")

    assert done.returncode == 0, done.stderr
    assert nodes.serve() == [set(before)] * NODES


def test_what_was_killed_between_two_nodes_goes_on_from_there(nodes: Nodes) -> None:
    (before,) = {frozenset(each) for each in nodes.serve()}
    files = [f"{member}={file}" for member, file in nodes.subject.files(5, nodes.folder).items()]
    assert nodes.run("swap", *files, "--max-slower", "20", count=1).returncode == 0
    assert nodes.serve() == [{5}, set(before), set(before)]

    done = nodes.swap(5)

    assert done.returncode == 0, done.stderr
    assert "serves these files already" in done.stdout
    assert nodes.serve() == [{5}] * NODES


def test_the_nodes_before_one_that_fails_go_back(nodes: Nodes) -> None:
    before = nodes.serve()
    nodes.servers[2].stop()
    try:
        done = nodes.swap(3)
        assert done.returncode == ServerError.exit_code, done.stderr
        assert f"Node {nodes.servers[2].endpoints.grpc}" in done.stderr
        assert nodes.serve() == before[:2]
        assert nodes.left() == []
    finally:
        nodes.servers[2].start()


def test_nodes_of_one_repository_are_refused(nodes: Nodes) -> None:
    before = nodes.serve()
    nodes.servers.append(nodes.servers[0])
    try:
        done = nodes.swap(4)
    finally:
        nodes.servers.pop()

    assert done.returncode == SpecError.exit_code
    assert "Two nodes have the same gRPC address" in done.stderr
    assert nodes.serve() == before


def test_a_model_that_answers_nonsense_changes_no_node(nodes: Nodes) -> None:
    before = nodes.serve()
    nodes.subject.files(600, nodes.folder)  # 0.4 times what is right

    done = nodes.swap(600)

    assert done.returncode != 0
    assert f"Node {nodes.servers[0].endpoints.grpc}" in done.stderr
    assert nodes.serve() == before
    assert nodes.left() == []
