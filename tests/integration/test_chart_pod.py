"""A pod of the helm chart on this machine: its containers' commands, probes and end as a kubelet runs them, with the real parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from conftest import MakeModel
from programs import program

from perf import kubernetes, memory
from tritonpilot import tritonserver
from tritonpilot.ports import choose_ports

DEPLOY = Path(__file__).parents[2] / "deploy"
DRAIN_S = 2
VALUES = """
models: {pvc: {claim: models}}
drain: {seconds: 2}
watch: {everySeconds: 1}
autopilot:
  enabled: true
  policy:
    interval_s: 1
    models: [{model: identity, policy: queue_depth, instances: {min: 1, max: 1}}]
"""
PORTS = ("8000", "8001", "8002", "8100", "8101", "8102", "8103", "8104")
#: What a container's command says that listens at one of PORTS, beyond what the chart passes.
PORT_FLAGS = {
    "triton": {"--http-port": "8000", "--grpc-port": "8001", "--metrics-port": "8002"},
    "entry": {"--http-port": "8100", "--grpc-port": "8101", "--metrics-port": "8102"},
    "watch": {"--port": "8103"},
    "autopilot": {"--port": "8104"},
}


@dataclass
class Pod:
    """The containers of a rendered pod as processes. What the chart says of paths, ports and programs is put in place."""

    spec: dict[str, Any]
    folder: Path
    places: dict[str, str]
    environ: dict[str, str]
    ports: dict[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def container(self, name: str) -> dict[str, Any]:
        (found,) = [each for each in [*self.spec["initContainers"], *self.spec["containers"]] if each["name"] == name]
        return found

    def here(self, words: list[str]) -> list[str]:
        for there, here in self.places.items():
            words = [word.replace(there, here) for word in words]
        return words

    def environment(self, name: str) -> dict[str, str]:
        said = {each["name"]: self.here([each["value"]])[0] for each in self.container(name).get("env", [])}
        return self.environ | said

    def command(self, name: str) -> list[str]:
        container = self.container(name)
        flags = [f"{flag}={self.ports[port]}" for flag, port in PORT_FLAGS.get(name, {}).items()]
        return [*self.here(container.get("command", []) + container.get("args", [])), *flags]

    def run(self, name: str) -> None:
        """An init container."""
        subprocess.run(self.command(name), env=self.environment(name), check=True, timeout=30)

    def start(self, name: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                self.command(name), env=self.environment(name), stdout=log, stderr=log
            )

    def probe(self, name: str, kind: str) -> str | None:
        """One look of the probe: why it fails, None: it passes."""
        probe = self.container(name)[kind]
        if "exec" in probe:
            command = probe["exec"]["command"]
            if command[1].endswith("podprobe.py"):
                command = [*command, "http://127.0.0.1:8103/metrics", "http://127.0.0.1:8000"]
            said = subprocess.run(
                self.here(command),
                env=self.environment(name),
                capture_output=True,
                text=True,
                timeout=probe["timeoutSeconds"],
                check=False,
            )
            return (said.stderr.strip() or "?") if said.returncode else None
        asked = probe["httpGet"]
        (port,) = [each["containerPort"] for each in self.container(name)["ports"] if each["name"] == asked["port"]]
        try:
            url = f"http://127.0.0.1:{self.ports[str(port)]}{asked['path']}"
            urllib.request.urlopen(url, timeout=probe["timeoutSeconds"]).close()
        except OSError as error:
            return str(error)
        return None

    def ready(self) -> str | None:
        """Why the pod is not ready; None: it is."""
        probed = [each["name"] for each in self.spec["containers"] if "readinessProbe" in each]
        return next((f"{name}: {why}" for name in probed if (why := self.probe(name, "readinessProbe"))), None)

    def end(self) -> dict[str, float]:
        """As a kubelet does: each container's preStop hook and then SIGTERM, all at once; seconds until each had ended.

        A container that is still there after terminationGracePeriodSeconds is killed, and is not in the answer.
        """
        began_s = time.monotonic()

        def stop(name: str) -> float | None:
            hook = self.container(name).get("lifecycle", {}).get("preStop")
            if hook is not None:
                subprocess.run(hook["exec"]["command"], check=True)
            self.processes[name].send_signal(signal.SIGTERM)
            try:
                self.processes[name].wait(began_s + self.spec["terminationGracePeriodSeconds"] - time.monotonic())
            except subprocess.TimeoutExpired:
                return None
            return time.monotonic() - began_s

        with ThreadPoolExecutor(len(self.processes)) as pool:
            ends = zip(self.processes, pool.map(stop, list(self.processes)), strict=True)
        return {name: end_s for name, end_s in ends if end_s is not None}

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]


def until_passes(look: Any, within_s: float = 60) -> None:
    deadline_s = time.monotonic() + within_s
    while (why := look()) is not None:
        assert time.monotonic() < deadline_s, why
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Iterator[Pod]:
    """A started pod, ready, of the model `identity`, which takes as many seconds as its input says."""
    program("helm")
    folder = tmp_path_factory.mktemp("pod")
    for name in ("bin", "secrets", "backends", "policy", "state"):
        (folder / name).mkdir()
    make_model(folder / "models", "identity")
    (folder / "values.yaml").write_text(VALUES)
    documents = kubernetes.render(kubernetes.CHART, [folder / "values.yaml"])
    (deployment,) = [each for each in documents if each["kind"] == "Deployment"]
    (policy,) = [each for each in documents if each["kind"] == "ConfigMap"]
    for name, text in policy["data"].items():
        (folder / "policy" / name).write_text(text)
    installation = tritonserver.find_installation()
    seen = tritonserver.check_host(installation)
    backends = tritonserver.assemble(installation, folder / "backends", sys.version_info[:2])
    prefix = f"tritonpilot_pod_{os.getpid()}_"
    executable(
        folder / "bin" / "tritonserver",
        f'exec "{installation.binary}" --backend-directory="{backends.directory}" '
        f'--backend-config=python,shm-region-prefix-name={prefix} "$@"',
    )
    ports = dict(zip(PORTS, map(str, choose_ports([0] * len(PORTS))), strict=True))
    environ = tritonserver.environment(installation, seen, os.environ)
    environ |= {
        "PATH": f"{folder / 'bin'}{os.pathsep}{environ['PATH']}",
        "TRITONPILOT_REPOSITORY": str(folder / "models"),
    }
    made = Pod(
        deployment["spec"]["template"]["spec"],
        folder,
        {
            "/opt/tritonpilot": str(DEPLOY / "triton"),
            "/run/secrets/tritonpilot": str(folder / "secrets"),
            "/models": str(folder / "models"),
            "/etc/tritonpilot": str(folder / "policy"),
            "/var/lib/tritonpilot": str(folder / "state"),
            "0.0.0.0": "127.0.0.1",  # noqa: S104
            **{f"127.0.0.1:{port}": f"127.0.0.1:{chosen}" for port, chosen in ports.items()},
        },
        environ,
        ports,
    )
    try:
        for container in made.spec["initContainers"]:
            made.run(container["name"])
        for container in made.spec["containers"]:
            made.start(container["name"])
        until_passes(lambda: made.probe("triton", "startupProbe"))
        until_passes(made.ready)
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()
        for left in Path("/dev/shm").glob(f"{prefix}*"):  # noqa: S108
            left.unlink()


def executable(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def ask(pod: Pod, seconds: float) -> float:
    """One request to the entry that takes so long; the answer. Raises OSError."""
    tensor = {"name": "INPUT", "datatype": "FP32", "shape": [1, 1], "data": [seconds]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{pod.ports['8100']}/v2/models/identity/infer",
        json.dumps({"inputs": [tensor]}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return float(json.load(answer)["outputs"][0]["data"][0])


def test_the_pods_own_key_opens_triton_and_is_hard_to_guess(pod: Pod) -> None:
    key = (pod.folder / "secrets" / "triton_control_key").read_text()

    assert len(key) >= 43
    url = f"http://127.0.0.1:{pod.ports['8000']}/v2/repository/index"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(url, b"{}"))
    with urllib.request.urlopen(urllib.request.Request(url, b"{}", {"tritonpilot-control-key": key})) as answer:
        assert answer.status == 200
    pod.run("control-key")
    assert (pod.folder / "secrets" / "triton_control_key").read_text() == key, "a restarted init container keeps it"


def test_every_probe_passes_and_a_request_comes_through_the_entry(pod: Pod) -> None:
    assert ask(pod, 0.0) == 0.0
    for container in pod.spec["containers"]:
        for kind in ("readinessProbe", "livenessProbe"):
            if kind in container:
                assert pod.probe(container["name"], kind) is None


def test_a_dead_stub_is_a_reason_to_restart_triton_and_a_restart_cures_it(pod: Pod) -> None:
    os.kill(memory.stubs(pod.processes["triton"].pid)["identity_0_0"], signal.SIGKILL)

    until_passes(lambda: None if pod.probe("triton", "livenessProbe") else "still alive")
    assert "identity version 1 is READY, but does not answer" in (pod.probe("triton", "livenessProbe") or "")
    assert "triton: model identity" in (pod.ready() or "")

    pod.processes["triton"].kill()
    pod.processes["triton"].wait()
    pod.start("triton")
    until_passes(lambda: pod.probe("triton", "startupProbe"))
    until_passes(pod.ready)
    assert ask(pod, 0.0) == 0.0


def test_a_busy_model_is_no_reason_to_restart_or_to_leave_the_balancer(pod: Pod) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, pod, 3.0)
        seen = []
        while not asked.done():
            seen += [pod.probe("triton", "livenessProbe"), pod.probe("triton", "readinessProbe")]

    assert asked.result() == 3.0
    assert len(seen) >= 2
    assert set(seen) == {None}


# NOTE: last, the pod has ended then.
def test_a_pod_that_ends_answers_everything_that_it_was_asked(pod: Pod) -> None:
    answers: list[float] = []
    failures: list[str] = []
    gone = threading.Event()
    client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{pod.ports['8101']}")

    def call_grpc(seconds: float) -> float:
        tensor = tritonclient.grpc.InferInput("INPUT", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.full((1, 1), seconds, np.float32))
        return float(client.infer("identity", [tensor]).as_numpy("OUTPUT")[0, 0])

    def send(call: Any) -> None:
        while not gone.is_set():
            try:
                answers.append(call(0.01))
            except Exception as error:  # noqa: BLE001 -- whatever it is, it is a failure
                failures.append(repr(error))

    with ThreadPoolExecutor(6) as pool:
        callers = [pool.submit(send, call) for call in (lambda s: ask(pod, s), call_grpc)]
        ending = pool.submit(pod.end)
        time.sleep(DRAIN_S - 0.5)  # until no balancer sends it any: the hook's seconds, and a margin
        last = [pool.submit(call, 2.0) for call in (lambda s: ask(pod, s), call_grpc)]  # in it when SIGTERM comes
        gone.set()
        for caller in callers:
            caller.result()
        answered = [each.result() for each in last]
        ends_s = ending.result()

    assert failures == []
    assert len(answers) > 20
    assert answered == [2.0, 2.0]
    assert set(ends_s) == {"triton", "entry", "watch", "autopilot"}, "nobody was killed"
    assert ends_s["watch"] < ends_s["entry"] < ends_s["triton"]
    assert ends_s["entry"] > DRAIN_S + 1, "it waited for the two"
    client.close()
