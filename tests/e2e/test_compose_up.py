"""`docker compose up` for real: needs an engine, Compose v2, and the images (official ones, or those of stand_in_images.sh).

`make test-compose` brings all three where it can. Everything is asked from outside, through the published ports.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException
from unit.onnx_files import identity

from perf import compose as composing
from perf.compose import KEY, Deployment
from tritonpilot import build, repository, spec
from tritonpilot.ports import choose_ports
from tritonpilot.tritonserver import CONTROL_HEADER

OFFICIAL = (
    "nvcr.io/nvidia/tritonserver:24.10-py3",
    "python:3.11-slim",
    "prom/prometheus:v3.5.0",
    "prom/alertmanager:v0.28.1",
)
SERVICE = """
service: echo
model: {file: model.onnx}
slo: {p99_ms: 2000, rate_per_s: 100}
batching: {max_batch_size: 4}
classes:
  - {name: realtime, priority: 1, max_queue_size: 100, timeout_ms: 1000}
  - {name: batch, priority: 2, max_queue_size: 100, timeout_ms: 1000}
default_class: realtime
"""
KILL_TRITON = """
import os, pathlib
for name in pathlib.Path("/proc").glob("[0-9]*/comm"):
    if name.read_text().startswith("tritonserver"):
        os.kill(int(name.parent.name), 9)
"""
KILL_A_STUB = """
import os, pathlib
stubs = [each for each in pathlib.Path("/proc").glob("[0-9]*/cmdline") if b"triton_python_backend_stub" in each.read_bytes()[:200]]
os.kill(int(sorted(stubs)[0].parent.name), 9)
"""
POLICY = """
interval_s: 1
models: [{model: echo, policy: queue_depth, instances: {min: 2, max: 2}, cooldown_s: 1}]
"""
HEALTHY_S = 30.0
PATIENCE_S = 90.0  # for a condition that comes; how long an alert may take is measured by the proof `alerts`

pytestmark = [pytest.mark.slow, pytest.mark.server]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The project as people start it, healthy."""
    if composing.find() is None:
        pytest.skip("no Compose v2 here: make test-compose")
    for image in OFFICIAL:
        if not composing.has_image(image):
            pytest.skip(f"no Docker engine with the image {image} here: make test-compose")
    folder = tmp_path_factory.mktemp("compose")
    with composing.deployed(folder, f"tritonpilot-test-{os.getpid()}", build_echo(folder / "models")) as running:
        seconds = running.up()
        assert seconds < HEALTHY_S, "healthy in less than 30 s after images exist"
        yield running
        down = running.compose("--profile", "*", "down", "--volumes", "--timeout", "45")
        assert down.returncode == 0, down.stderr
        assert composing.leftovers(running.project) == [], "`down` leaves nothing"


@pytest.fixture
def other(deployment: Deployment) -> Iterator[Deployment]:
    """Another project of the same files and images, not started."""
    project = f"tritonpilot-test-{os.getpid()}-other"
    ports = dict(zip(deployment.ports, choose_ports([0] * len(deployment.ports)), strict=True))
    environment = {**deployment.environment, **{variable: str(port) for variable, port in ports.items()}}
    running = replace(deployment, command=(*deployment.command[:-1], project), environment=environment, ports=ports)
    yield running
    running.compose("--profile", "*", "down", "--volumes", "--timeout", "45")


def test_models_answer_over_http_and_grpc_directly_and_through_the_entry(deployment: Deployment) -> None:
    for module, variable in (
        (tritonclient.http, "TRITON_HTTP_PORT"),
        (tritonclient.grpc, "TRITON_GRPC_PORT"),
        (tritonclient.http, "ENTRY_HTTP_PORT"),
        (tritonclient.grpc, "ENTRY_GRPC_PORT"),
    ):
        infer(module, deployment.ports[variable])


def test_model_control_needs_the_key_which_docker_does_not_tell(deployment: Deployment) -> None:
    # Closed at once: Triton 2.51 waits out its exit timeout for every HTTP connection that is open, idle ones too.
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{deployment.ports['TRITON_HTTP_PORT']}") as client:
        with pytest.raises(InferenceServerException, match="This API is restricted"):
            client.get_model_repository_index()
        assert client.get_model_repository_index(headers={CONTROL_HEADER: KEY})[0]["state"] == "READY"

    for service in ("triton", "watch"):
        assert KEY not in json.dumps(inspect(deployment, service))
    assert KEY not in deployment.compose("config").stdout


def test_no_service_is_root_and_none_can_write_its_root_or_the_repository(deployment: Deployment) -> None:
    for service in deployment.services:
        found = inspect(deployment, service)
        assert found["HostConfig"]["ReadonlyRootfs"] is True
        assert found["HostConfig"]["Memory"] > 0
        assert deployment.compose("exec", "-T", service, "id", "-u").stdout.strip() not in ("", "0"), service
        assert "Read-only file system" in deployment.compose("exec", "-T", service, "touch", "/x").stderr, service
    assert "Read-only file system" in deployment.compose("exec", "-T", "triton", "touch", "/models/x").stderr


def test_prometheus_scrapes_triton_entry_and_watch(deployment: Deployment) -> None:
    infer(tritonclient.http, deployment.ports["ENTRY_HTTP_PORT"])

    def scraped() -> bool:
        return {job for job, up in ups(deployment).items() if up == 1} >= {"triton", "entry", "watch"}

    wait_for(scraped, lambda: ups(deployment))
    for query in (
        'nv_inference_request_success{model="echo"}',
        'processed_requests_total{model="echo",class="realtime",status="ok"}',
        'model_probe_success{model="echo"} == 1',
        "triton_up == 1",
    ):
        wait_for(lambda query=query: ask(deployment, query), lambda query=query: query)


def test_grafana_has_its_data_source_and_dashboards(deployment: Deployment) -> None:
    if "grafana" not in deployment.services:
        pytest.skip(f"no image {composing.GRAFANA} here, and Debian has no package to make a stand-in of")
    password = (deployment.folder / "secrets" / "grafana_admin_password").read_text()
    port = deployment.ports["GRAFANA_PORT"]
    passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
    passwords.add_password(None, f"http://127.0.0.1:{port}/", "admin", password, is_authenticated=True)
    opener = urllib.request.build_opener(urllib.request.HTTPBasicAuthHandler(passwords))

    sources = json.load(opener.open(f"http://127.0.0.1:{port}/api/datasources", timeout=5))
    boards = json.load(opener.open(f"http://127.0.0.1:{port}/api/search?type=dash-db", timeout=5))

    assert {source["type"] for source in sources} == {"prometheus", "alertmanager"}
    assert len(boards) == 4


def test_a_killed_triton_is_started_again_and_an_alert_of_one_that_stays_away_fires_and_resolves(
    deployment: Deployment,
) -> None:
    before = inspect(deployment, "triton")["RestartCount"]

    deployment.compose("exec", "-T", "triton", "python3", "-c", KILL_TRITON)

    wait_for(lambda: inspect(deployment, "triton")["RestartCount"] > before, lambda: "no restart")
    wait_for(lambda: health(deployment, "triton") == "healthy", lambda: health(deployment, "triton"))
    infer(tritonclient.grpc, deployment.ports["ENTRY_GRPC_PORT"])

    deployment.compose("kill", "triton")  # which the engine takes for a stop that was wanted: it stays away
    wait_for(lambda: "TritonDown" in firing(deployment), lambda: firing(deployment))
    with pytest.raises(InferenceServerException):
        infer(tritonclient.http, deployment.ports["ENTRY_HTTP_PORT"])
    deployment.up("triton")
    wait_for(lambda: "TritonDown" not in firing(deployment), lambda: firing(deployment))
    infer(tritonclient.http, deployment.ports["ENTRY_HTTP_PORT"])
    assert inspect(deployment, "entry")["RestartCount"] == 0
    assert inspect(deployment, "watch")["RestartCount"] == 0


def test_without_prometheus_all_others_go_on(deployment: Deployment) -> None:
    wait_for(lambda: ask(deployment, "triton_up == 1"), lambda: ups(deployment))
    at_s = ask(deployment, "triton_up")[0]["value"][0]
    deployment.compose("stop", "prometheus")
    try:
        infer(tritonclient.http, deployment.ports["ENTRY_HTTP_PORT"])
        metrics = text(f"http://127.0.0.1:{deployment.ports['WATCH_PORT']}/metrics")
        assert 'model_probe_success{model="echo",version="1"} 1.0' in metrics
        assert health(deployment, "watch") == "healthy"
    finally:
        deployment.up("prometheus")
    assert ask(deployment, "triton_up", f"&time={at_s}"), "its data outlived it"


def test_locust_sends_rows_through_the_entry(deployment: Deployment) -> None:
    if not composing.has_image("locustio/locust:2.18.4"):
        pytest.skip("no image locustio/locust:2.18.4 here: make test-compose")
    rows = deployment.folder / "models" / "echo" / "build" / "samples.npz"
    rows.parent.mkdir()
    np.savez(rows, x=np.ones((8, 4), dtype=np.float32))
    built = deployment.compose("--profile", "load", "build", "locust")
    assert built.returncode == 0, built.stderr
    before = answered(deployment)

    options = ("--scenario", "constant", "--service", "echo", "--rate-per-s", "20", "--seconds", "3")
    said = deployment.compose("--profile", "load", "run", "--rm", "-T", "--no-deps", "locust", *options)

    assert said.returncode in (0, 1), (
        said.stdout + said.stderr
    )  # 1: slower than the scenario allows, which is not judged here
    assert answered(deployment) - before >= 40, said.stdout + said.stderr


def test_two_tritons_behind_the_balancer_answer_when_one_is_killed(deployment: Deployment) -> None:
    if not composing.has_image("haproxy:3.0.11-alpine"):
        pytest.skip("no image haproxy:3.0.11-alpine here: make test-compose")
    deployment.up("haproxy", "triton-b")
    try:
        for module, variable in ((tritonclient.http, "BALANCER_HTTP_PORT"), (tritonclient.grpc, "BALANCER_GRPC_PORT")):
            infer(module, deployment.ports[variable])
        deployment.compose("kill", "--signal", "KILL", "triton-b")
        wait_for(lambda: answers(deployment, "BALANCER_HTTP_PORT"), lambda: "no answer")
        for module, variable in ((tritonclient.http, "BALANCER_HTTP_PORT"), (tritonclient.grpc, "BALANCER_GRPC_PORT")):
            infer(module, deployment.ports[variable])
    finally:
        deployment.compose("rm", "--stop", "--force", "haproxy", "triton-b")


def test_wrong_tls_files_are_named_and_nothing_listens(other: Deployment) -> None:
    if not composing.has_image("haproxy:3.0.11-alpine"):
        pytest.skip("no image haproxy:3.0.11-alpine here: make test-compose")
    wrong = other.folder / "secrets" / "server.pem"
    wrong.write_text("no certificate\n")
    environment = {**other.environment, "BALANCER_TLS_CERT": str(wrong)}

    said = replace(other, environment=environment).compose("run", "--rm", "--no-deps", "haproxy")

    assert said.returncode != 0
    assert "balancer_tls_cert holds no certificate. The balancer was not started." in said.stderr + said.stdout


def test_a_taken_port_is_named(other: Deployment) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {**other.environment, "ALERTMANAGER_PORT": str(port)}

        said = replace(other, environment=environment).compose("up", "--no-build", "--detach", "alertmanager")

    assert said.returncode != 0
    assert f"127.0.0.1:{port}" in said.stderr
    assert "address already in use" in said.stderr or "port is already allocated" in said.stderr


def test_a_missing_image_is_named(other: Deployment) -> None:
    environment = {**other.environment, "PROMETHEUS_TAG": "v0.0.0"}

    said = replace(other, environment=environment).compose("up", "--no-deps", "--pull", "never", "prometheus")

    assert said.returncode != 0
    assert "prom/prometheus:v0.0.0" in said.stderr


def test_a_missing_secret_or_repository_is_named(other: Deployment, tmp_path: Path) -> None:
    moved = other.folder / "secrets"
    moved.rename(tmp_path / "secrets")
    try:
        said = other.compose("up", "--no-build", "--detach", "--no-deps", "alertmanager")
    finally:
        (tmp_path / "secrets").rename(moved)

    assert said.returncode != 0
    assert "secrets/alert_webhook_url" in said.stderr


def test_gpus_are_refused_where_there_are_none(other: Deployment) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("this machine has an NVIDIA GPU")

    files = ("-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml")
    said = other.compose(*files, "up", "--no-build", "--detach", "triton")

    assert said.returncode != 0
    assert "nvidia" in said.stderr.lower() or "ulimit" in said.stderr.lower() or "rlimit" in said.stderr.lower(), (
        said.stderr
    )


def test_a_volume_with_foreign_files_is_not_taken_and_not_changed(other: Deployment) -> None:
    volume = f"{other.project}_prometheus_data"
    image = OFFICIAL[1]
    docker("volume", "create", volume)
    try:
        docker(
            "run",
            "--rm",
            "--volume",
            f"{volume}:/data",
            image,
            "sh",
            "-c",
            "echo mine > /data/notes && chmod 700 /data",
        )

        said = other.compose("up", "--no-build", "--wait", "--wait-timeout", "20", "--no-deps", "prometheus")

        assert said.returncode != 0
        assert "permission denied" in logs(other)
        other.compose("down")
        kept = docker("run", "--rm", "--volume", f"{volume}:/data", image, "sh", "-c", "cd /data && ls && cat notes")
        assert kept == "notes\nmine\n"
    finally:
        other.compose("down")
        docker("volume", "rm", volume)


def test_prometheus_names_a_full_disk_and_goes_on_when_there_is_space(other: Deployment) -> None:
    volume, holder = f"{other.project}_prometheus_data", f"{other.project}-holder"
    options = ("type=tmpfs", "device=tmpfs", "o=size=16m,uid=65534,gid=65534")  # Prometheus is nobody
    docker("volume", "create", "--driver", "local", *(word for option in options for word in ("--opt", option)), volume)
    try:
        other.compose("up", "--no-build", "--wait", "--no-deps", "prometheus")
        wait_for(lambda: ask(other, "up"), lambda: logs(other))
        before_s = ask(other, "up")[0]["value"][0]
        fill = "dd if=/dev/zero of=/data/full bs=4k 2>/dev/null; exec sleep 300"
        docker(
            "run", "--detach", "--init", "--name", holder, "--volume", f"{volume}:/data", OFFICIAL[1], "sh", "-c", fill
        )

        wait_for(lambda: "no space left on device" in logs(other), lambda: logs(other))
        docker("exec", holder, "rm", "/data/full")
        now_s = time.time()
        wait_for(lambda: ask(other, f"timestamp(up) > {now_s}"), lambda: logs(other))
        assert ask(other, "up", f"&time={before_s}"), "what was written before is there"
    finally:
        other.compose("down")
        docker("rm", "--force", holder)
        docker("volume", "rm", volume)


def test_the_autopilot_sets_what_its_policy_wants_and_the_supervisor_replaces_a_dead_stub(
    deployment: Deployment,
) -> None:
    (deployment.folder / "deploy" / "autopilot" / "autopilot.yaml").write_text(POLICY)
    try:
        deployment.up("autopilot", "supervise")

        def told() -> str:
            return deployment.compose("logs", "--no-color", "autopilot", "supervise").stdout

        def instances() -> int:
            config = get(deployment, "TRITON_HTTP_PORT", "/v2/models/echo/config")
            return sum(group["count"] for group in config["instance_group"])

        wait_for(lambda: instances() == 2, told)
        healed = "supervisor_heals_total"
        assert sum_of(deployment, "SUPERVISE_PORT", healed) == 0
        deployment.compose("exec", "-T", "triton", "python3", "-c", KILL_A_STUB)
        wait_for(lambda: sum_of(deployment, "SUPERVISE_PORT", healed) > 0, told)
        wait_for(lambda: all(answers(deployment, "TRITON_HTTP_PORT") for _ in range(8)), told)
        assert health(deployment, "autopilot") == health(deployment, "supervise") == "healthy"
    finally:
        deployment.compose("rm", "--force", "--stop", "autopilot", "supervise")


def sum_of(deployment: Deployment, variable: str, name: str) -> float:
    """All values of a metric."""
    lines = text(f"http://127.0.0.1:{deployment.ports[variable]}/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def build_echo(models: Path) -> Callable[[Path], None]:
    """Builds a model that answers what it is asked."""

    def into(target: Path) -> None:
        identity(models / "echo" / "model.onnx")
        (models / "echo" / "service.yaml").write_text(SERVICE)
        plans = build.plan(spec.load_services(models))
        repository.publish(target, [plan.folder for plan in plans])

    return into


def infer(module: Any, port: int) -> None:
    """One inference with tritonclient's `module`; raises InferenceServerException."""
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    tensor = module.InferInput("x", rows.shape, "FP32")
    tensor.set_data_from_numpy(rows)
    with module.InferenceServerClient(f"127.0.0.1:{port}") as connection:
        answer = connection.infer("echo", [tensor])
    np.testing.assert_array_equal(answer.as_numpy("y"), rows)


def answers(deployment: Deployment, variable: str) -> bool:
    try:
        infer(tritonclient.http, deployment.ports[variable])
    except (InferenceServerException, OSError):
        return False
    return True


def answered(deployment: Deployment) -> float:
    """Requests that the entry has had answered."""
    metrics = text(f"http://127.0.0.1:{deployment.ports['ENTRY_METRICS_PORT']}/metrics").splitlines()
    counts = [line for line in metrics if line.startswith("processed_requests_total{") and 'status="ok"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


def inspect(deployment: Deployment, service: str) -> dict[str, Any]:
    container = deployment.compose("ps", "--all", "--quiet", service).stdout.strip()
    (found,) = json.loads(docker("inspect", container))
    return dict(found)


def health(deployment: Deployment, service: str) -> str:
    return str(inspect(deployment, service)["State"]["Health"]["Status"])


def ask(deployment: Deployment, query: str, more: str = "") -> list[Any]:
    """The samples of a query."""
    found = get(deployment, "PROMETHEUS_PORT", f"/api/v1/query?query={urllib.request.quote(query)}{more}")
    return list(found["data"]["result"])


def ups(deployment: Deployment) -> dict[str, float]:
    """`up` by job."""
    return {sample["metric"]["job"]: float(sample["value"][1]) for sample in ask(deployment, "up")}


def firing(deployment: Deployment) -> set[str]:
    """Names of the alerts that Alertmanager has."""
    return {
        alert["labels"]["alertname"] for alert in get(deployment, "ALERTMANAGER_PORT", "/api/v2/alerts?active=true")
    }


def logs(deployment: Deployment) -> str:
    return deployment.compose("logs", "--no-color", "prometheus").stdout


def get(deployment: Deployment, variable: str, path: str) -> Any:
    return json.loads(text(f"http://127.0.0.1:{deployment.ports[variable]}{path}"))


def text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def wait_for(holds: Callable[[], Any], seen: Callable[[], Any]) -> None:
    """Returns when `holds` does; fails with what was `seen` when it does not come to that."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if holds():
                return
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < deadline, seen()
        time.sleep(0.5)


def docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout
