"""What the helm chart makes of its values: the containers of docker-compose.yml, with Kubernetes' probes, limits and policies."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import program

from perf import kubernetes
from perf.kubernetes import CHART, NAMESPACE, ChartError, Document
from tritonpilot.entry.app import GRACE_S
from tritonpilot.errors import MeasurementError

ROOT = Path(__file__).parents[2]
FILES = {file.name.removesuffix("-values.yaml"): file for file in kubernetes.values_files()}
KEY = "/run/secrets/tritonpilot/triton_control_key"


@pytest.fixture(scope="module", autouse=True)
def helm() -> Path:
    return program("helm")


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Document]]:
    return {name: kubernetes.render(CHART, [file]) for name, file in FILES.items()}


def of_kind(documents: list[Document], kind: str) -> Document:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def pod(documents: list[Document]) -> dict[str, Any]:
    spec: dict[str, Any] = of_kind(documents, "Deployment")["spec"]["template"]["spec"]
    return spec


def containers(documents: list[Document]) -> dict[str, dict[str, Any]]:
    return {container["name"]: container for container in pod(documents)["containers"]}


def changed(**values: object) -> list[Document]:
    """What the chart makes with the values of `cpu` and these."""
    return kubernetes.render(
        CHART, [FILES["cpu"]], {name.replace("__", "."): str(value) for name, value in values.items()}
    )


@pytest.mark.parametrize("name", FILES)
def test_helm_lints_strictly(name: str) -> None:
    assert kubernetes.lint(CHART, [FILES[name]]) == []


def test_helm_lints_the_defaults_strictly() -> None:
    assert kubernetes.lint(CHART) == []


def test_every_default_is_a_value_that_the_schema_knows_and_the_reverse() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def check(known: Mapping[str, Any], given: Mapping[str, Any], path: str) -> None:
        assert known["additionalProperties"] is False, path
        assert set(known["properties"]) - {"global"} == set(given), path
        for name, value in given.items():
            if "properties" in known["properties"][name]:
                check(known["properties"][name], value, f"{path}.{name}")

    check(schema, values, "")


# -- the same containers as in compose ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return services


def test_triton_has_the_flags_of_compose(rendered: dict[str, list[Document]], compose: dict[str, Any]) -> None:
    arguments = containers(rendered["bare"])["triton"]["args"]

    assert arguments == compose["triton"]["command"]
    assert "command" not in containers(rendered["bare"])["triton"], "the image's entrypoint prepares the CUDA libraries"


def test_with_an_entry_tritons_own_ports_are_for_the_pod(
    rendered: dict[str, list[Document]], compose: dict[str, Any]
) -> None:
    triton = containers(rendered["cpu"])["triton"]

    more = ["--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=0.0.0.0"]
    assert triton["args"] == [*compose["triton"]["command"], *more]
    assert [port["containerPort"] for port in triton["ports"]] == [8002]


def test_entry_and_watch_have_the_options_of_compose(
    rendered: dict[str, list[Document]], compose: dict[str, Any]
) -> None:
    def options(command: str) -> set[str]:
        return set(re.findall(r"--[a-z-]+", command.partition("${")[0]))

    made = containers(rendered["cpu"])
    for name in ("entry", "watch"):
        assert made[name]["command"][:2] == compose[name]["command"].split()[:2]
        assert options(" ".join(made[name]["command"])) - {"--max-request-mb", "--every"} == options(
            compose[name]["command"]
        )
    assert "--tenants=/etc/tritonpilot/tenants.yaml" in containers(rendered["gpu"])["entry"]["command"]


@pytest.mark.parametrize("name", FILES)
def test_no_container_has_privileges_or_a_root_that_it_may_write(
    rendered: dict[str, list[Document]], name: str
) -> None:
    spec = pod(rendered[name])

    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("name", FILES)
def test_every_mount_is_of_a_volume_and_every_volume_is_mounted(rendered: dict[str, list[Document]], name: str) -> None:
    spec = pod(rendered[name])
    every = [*spec.get("initContainers", []), *spec["containers"]]

    mounted = {mount["name"] for container in every for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_shared_memory_is_in_memory_and_of_the_size_that_is_asked_for(rendered: dict[str, list[Document]]) -> None:
    volumes = {volume["name"]: volume for volume in pod(rendered["gpu"])["volumes"]}

    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in containers(rendered["gpu"])["triton"]["volumeMounts"]  # noqa: S108


def test_without_a_secret_the_pod_makes_a_key_in_memory(rendered: dict[str, list[Document]]) -> None:
    spec = pod(rendered["cpu"])
    volumes = {volume["name"]: volume for volume in spec["volumes"]}

    assert volumes["control-key"]["emptyDir"]["medium"] == "Memory"
    (making,) = spec["initContainers"]
    assert KEY in making["command"][-1]
    assert {"name": "TRITONPILOT_CONTROL_KEY_FILE", "value": KEY} in containers(rendered["cpu"])["triton"]["env"]


def test_a_control_key_of_ones_own_is_a_secret(rendered: dict[str, list[Document]]) -> None:
    volumes = {volume["name"]: volume for volume in pod(rendered["bare"])["volumes"]}

    assert volumes["control-key"]["secret"]["secretName"] == "control-key"
    assert "initContainers" not in pod(rendered["bare"])


def test_no_secret_is_in_what_the_chart_makes(rendered: dict[str, list[Document]]) -> None:
    assert not [each for documents in rendered.values() for each in documents if each["kind"] == "Secret"]


# -- models -------------------------------------------------------------------------------------------------------------


def models_volume(documents: list[Document]) -> dict[str, Any]:
    (volume,) = [volume for volume in pod(documents)["volumes"] if volume["name"] == "models"]
    return volume


def test_models_of_a_claim_are_mounted_for_reading(rendered: dict[str, list[Document]]) -> None:
    assert models_volume(rendered["bare"])["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mount = {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "repositories/ctr"}
    for name in ("triton", "watch"):
        assert mount in containers(rendered["bare"])[name]["volumeMounts"]


def test_models_of_an_s3_are_copied_before_triton_starts(rendered: dict[str, list[Document]]) -> None:
    (copying,) = pod(rendered["gpu"])["initContainers"]

    assert copying["command"][:3] == ["aws", "s3", "sync"]
    assert copying["command"][-3:] == ["--endpoint-url=http://minio.storage:9000", "s3://models/ctr", "/models"]
    assert copying["envFrom"] == [{"secretRef": {"name": "minio"}}]
    assert models_volume(rendered["gpu"])["emptyDir"] == {"sizeLimit": "20Gi"}


def test_models_of_an_image_are_copied_before_triton_starts(rendered: dict[str, list[Document]]) -> None:
    copying = pod(rendered["keda"])["initContainers"][-1]

    assert (copying["image"], copying["command"]) == (
        "registry.example/models/ctr:17",
        ["cp", "-R", "/model_repository/.", "/models"],
    )


# -- GPUs ---------------------------------------------------------------------------------------------------------------


def test_a_gpu_is_asked_for_by_its_resource_and_tolerated(rendered: dict[str, list[Document]]) -> None:
    spec = pod(rendered["gpu"])

    assert containers(rendered["gpu"])["triton"]["resources"]["limits"] == {"memory": "24Gi", "nvidia.com/gpu": 1}
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]
    assert (spec["runtimeClassName"], spec["nodeSelector"]) == ("nvidia", {"accelerator": "h200"})
    assert "tolerations" not in pod(rendered["cpu"])


# -- probes and the end -------------------------------------------------------------------------------------------------


def test_a_pod_starts_when_every_model_has_answered_and_lives_by_what_the_watch_sees(
    rendered: dict[str, list[Document]], compose: dict[str, Any]
) -> None:
    triton = containers(rendered["gpu"])["triton"]
    startup = triton["startupProbe"]

    assert startup["exec"]["command"][:2] == compose["triton"]["healthcheck"]["test"][1:]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 1200
    assert triton["readinessProbe"]["exec"]["command"][-1] == "ready"
    assert triton["livenessProbe"]["exec"]["command"][-1] == "alive"
    every = containers(rendered["gpu"]).values()
    assert all("livenessProbe" in container for container in every)


def test_the_images_have_the_programs_of_the_probes() -> None:
    dockerfile = (ROOT / "deploy" / "triton" / "Dockerfile").read_text()

    for name in ("start.sh", "healthcheck.py", "podprobe.py"):
        assert f"deploy/triton/{name} " in dockerfile
        assert (ROOT / "deploy" / "triton" / name).is_file()


@pytest.mark.parametrize("name", FILES)
def test_triton_outlives_the_entry_and_both_have_time_for_what_is_in_flight(
    rendered: dict[str, list[Document]], name: str
) -> None:
    made = containers(rendered[name])
    waits = {
        each: int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        for each, container in made.items()
        if "lifecycle" in container
    }
    (exit_s,) = [int(flag.partition("=")[2]) for flag in made["triton"]["args"] if flag.startswith("--exit-timeout")]

    if "entry" in waits:
        assert waits["entry"] == 10
        assert waits["triton"] > waits["entry"] + GRACE_S
    assert pod(rendered[name])["terminationGracePeriodSeconds"] >= waits["triton"] + exit_s + 5


# -- services and policies ----------------------------------------------------------------------------------------------


def test_services_have_one_address_and_all_addresses(rendered: dict[str, list[Document]]) -> None:
    one, all_of_them = [each for each in rendered["cpu"] if each["kind"] == "Service"]

    assert one["spec"]["type"] == "ClusterIP"
    assert all_of_them["spec"]["clusterIP"] == "None"
    named = {port["name"]: port["containerPort"] for port in containers(rendered["cpu"])["entry"]["ports"]}
    for port in all_of_them["spec"]["ports"]:
        assert port["port"] == named[port["targetPort"]], "a headless service maps no ports"
    assert {port["appProtocol"] for port in one["spec"]["ports"]} == {"http", "kubernetes.io/h2c"}


@pytest.mark.parametrize("name", FILES)
def test_every_selector_finds_the_pods(rendered: dict[str, list[Document]], name: str) -> None:
    labels = of_kind(rendered[name], "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = {
        "Deployment": lambda spec: spec["selector"]["matchLabels"],
        "Service": lambda spec: spec["selector"],
        "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
        "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
        "PodMonitor": lambda spec: spec["selector"]["matchLabels"],
    }

    found = [selectors[each["kind"]](each["spec"]) for each in rendered[name] if each["kind"] in selectors]
    assert len(found) >= 2
    assert all(selector.items() <= labels.items() for selector in found)


def test_the_network_lets_callers_to_the_entry_and_prometheus_to_the_metrics(
    rendered: dict[str, list[Document]],
) -> None:
    spec = of_kind(rendered["gpu"], "NetworkPolicy")["spec"]
    ports = {port["name"] for container in containers(rendered["gpu"]).values() for port in container["ports"]}

    callers, monitoring = spec["ingress"]
    assert callers["from"] == [{"namespaceSelector": {"matchLabels": {"team": "shop"}}}]
    assert {port["port"] for port in callers["ports"]} == {"http", "grpc"}
    assert {port["port"] for port in [*callers["ports"], *monitoring["ports"]]} == ports
    assert [[port["port"] for port in rule["ports"]] for rule in spec["egress"]] == [[53, 53], [9000], [4318]]


def test_without_callers_nobody_is_let_in() -> None:
    spec = of_kind(kubernetes.render(CHART, [FILES["cpu"]], {"networkPolicy.callers": "null"}), "NetworkPolicy")["spec"]

    assert [{port["port"] for port in rule["ports"]} for rule in spec["ingress"]] == [
        {"triton-metrics", "entry-metrics", "watch-metrics"}
    ]


# -- scaling ------------------------------------------------------------------------------------------------------------


def test_hpa_aims_at_the_wait_and_owns_the_number_of_replicas(rendered: dict[str, list[Document]]) -> None:
    spec = of_kind(rendered["gpu"], "HorizontalPodAutoscaler")["spec"]
    deployment = of_kind(rendered["gpu"], "Deployment")

    assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"]
    wait, cpu = spec["metrics"]
    assert wait["pods"] == {
        "metric": {"name": "queue_seconds"},
        "target": {"type": "AverageValue", "averageValue": "12m"},
    }
    assert cpu["containerResource"]["container"] in containers(rendered["gpu"])


def test_keda_asks_prometheus_for_the_load_and_the_wait(rendered: dict[str, list[Document]]) -> None:
    spec = of_kind(rendered["keda"], "ScaledObject")["spec"]
    requests, wait, cron = spec["triggers"]

    assert spec["scaleTargetRef"]["name"] == of_kind(rendered["keda"], "Deployment")["metadata"]["name"]
    assert (requests["metadata"]["threshold"], requests["metricType"]) == ("2500", "AverageValue")
    assert (wait["metadata"]["threshold"], wait["metricType"]) == ("0.02", "Value")
    assert f'namespace="{NAMESPACE}"' in wait["metadata"]["query"]
    assert cron["type"] == "cron"


# -- the Prometheus operator --------------------------------------------------------------------------------------------


def test_the_pod_monitor_gives_the_jobs_that_rules_name(rendered: dict[str, list[Document]]) -> None:
    endpoints = of_kind(rendered["gpu"], "PodMonitor")["spec"]["podMetricsEndpoints"]
    ports = {port["name"] for container in containers(rendered["gpu"]).values() for port in container["ports"]}

    jobs = {each["relabelings"][0]["replacement"] for each in endpoints}
    assert {each["port"] for each in endpoints} <= ports
    rules = (ROOT / "deploy" / "prometheus" / "rules" / "alerts.yml").read_text()
    assert jobs >= {"triton", "entry", "watch"}
    assert {job for job in re.findall(r'job="(\w+)"', rules) if job in ("triton", "entry", "watch")} <= jobs


def test_rules_are_those_of_prometheus(rendered: dict[str, list[Document]]) -> None:
    files = sorted((ROOT / "deploy" / "prometheus" / "rules").glob("*.yml"))
    deployed = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]

    assert of_kind(rendered["gpu"], "PrometheusRule")["spec"]["groups"] == deployed


# -- the autopilot ------------------------------------------------------------------------------------------------------


def test_the_autopilots_policy_and_costs_are_files_beside_each_other(rendered: dict[str, list[Document]]) -> None:
    data = of_kind(rendered["keda"], "ConfigMap")["data"]
    policy = yaml.safe_load(data["autopilot.yaml"])

    assert policy["models"][0]["costs"] in data
    assert json.loads(data["ctr.costs.json"])["rows"] == [1, 64]
    assert "autopilot" not in containers(rendered["cpu"])


def test_the_autopilot_has_the_options_of_compose(rendered: dict[str, list[Document]], compose: dict[str, Any]) -> None:
    made = containers(rendered["keda"])["autopilot"]

    assert made["command"][:3] == compose["autopilot"]["command"].split()[:3]
    options = set(re.findall(r"--[a-z-]+", compose["autopilot"]["command"]))
    # In a pod its end would take Triton out of service.
    assert {option.partition("=")[0] for option in made["command"][3:]} == options | {"--wait-for-policy"}
    assert made["env"] == [
        {"name": name, "value": value} for name, value in compose["autopilot"]["environment"].items()
    ]


def test_the_supervisor_has_the_options_of_compose(
    rendered: dict[str, list[Document]], compose: dict[str, Any]
) -> None:
    made = containers(rendered["keda"])["supervise"]

    assert made["command"][:2] == compose["supervise"]["command"].split()[:2]
    options = set(re.findall(r"--[a-z-]+", compose["supervise"]["command"]))
    assert {option.partition("=")[0] for option in made["command"][2:]} == options
    assert "supervise" not in containers(rendered["cpu"])


# -- bad values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replica": 2}, "replica"),
        ({"models.source": "nfs"}, "models.source"),
        ({"models.pvc.claim": ""}, "models.pvc.claim is empty"),
        ({"models.source": "s3"}, "models.s3.uri is empty"),
        ({"models.source": "image"}, "models.image.repository is empty"),
        ({"models.source": "s3", "models.s3.uri": "https://x"}, "models.s3.uri"),
        ({"models.pvc.path": "/root"}, "models.pvc.path"),
        ({"models.pvc.path": "a/../../b"}, "models.pvc.path"),
        ({"models.pvc.path": "../b"}, "models.pvc.path"),
        ({"images.pilot.repository": ""}, "images.pilot.repository"),
        ({"images.triton.repository": "a b"}, "images.triton.repository"),
        ({"triton.sharedMemory": "much"}, "triton.sharedMemory"),
        ({"triton.args[0]": "model-control-mode=none"}, "triton.args.0"),
        ({"gpu.count": -1}, "gpu.count"),
        ({"entry.maxRequestMb": 4096}, "entry.maxRequestMb"),
        ({"entry.enabled": "false", "entry.tenantsSecret": "tenants"}, "nobody would ask for the keys"),
        ({"autoscaling.kind": "vpa"}, "autoscaling.kind"),
        ({"autoscaling.minReplicas": 5}, "autoscaling.minReplicas (5) is above autoscaling.maxReplicas (4)"),
        ({"autoscaling.kind": "keda"}, "autoscaling.keda.prometheus is empty"),
        ({"autoscaling.queueMs": 0}, "autoscaling.queueMs"),
        ({"autopilot.enabled": "true"}, "autopilot.policy names no model"),
        ({"autopilot.enabled": "true", "autopilot.policy.models": "ctr"}, "autopilot.policy.models is no list"),
        (
            {
                "autopilot.enabled": "true",
                "autopilot.policy.models[0].model": "ctr",
                "autopilot.policy.models[0].costs": "x.json",
            },
            "names the costs x.json of model ctr",
        ),
        ({"autopilot.costs.a/b": "x"}, "names a file"),
        ({"drain.seconds": "soon"}, "drain.seconds"),
        ({"fullnameOverride": "Ctr_1"}, "fullnameOverride"),
        ({"podDisruptionBudget.maxUnavailable": 0}, "podDisruptionBudget.maxUnavailable"),
    ],
    ids=str,
)
def test_bad_values_are_refused_by_name(values: dict[str, object], said: str) -> None:
    with pytest.raises(ChartError) as refused:
        kubernetes.render(CHART, [FILES["cpu"]], {name: str(value) for name, value in values.items()})

    assert said in str(refused.value)


def test_an_old_kubernetes_is_refused() -> None:
    with pytest.raises(ChartError, match=r"incompatible with Kubernetes v1\.24"):
        kubernetes.render(CHART, [FILES["cpu"]], version="1.24.0")


def test_long_names_still_fit() -> None:
    made = changed(fullnameOverride="a" * 53)

    assert all(len(document["metadata"]["name"]) <= 63 for document in made)


# -- Kubernetes' own schemas --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schemas(rendered: dict[str, list[Document]]) -> list[str]:
    """What they say about everything; skips where they cannot be had."""
    try:
        return kubernetes.problems([each for documents in rendered.values() for each in documents])
    except MeasurementError as error:
        pytest.skip(f"no schemas here: {error}")


def test_every_version_of_kubernetes_takes_what_the_chart_makes(schemas: list[str]) -> None:
    assert schemas == []


@pytest.mark.usefixtures("schemas")
def test_the_schemas_find_what_is_wrong(rendered: dict[str, list[Document]]) -> None:
    deployment = copy.deepcopy(of_kind(rendered["cpu"], "Deployment"))
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbes"] = {}
    scaled = copy.deepcopy(of_kind(rendered["keda"], "ScaledObject"))
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 2500
    hpa = copy.deepcopy(of_kind(rendered["gpu"], "HorizontalPodAutoscaler")) | {"apiVersion": "autoscaling/v2beta2"}

    wrong = kubernetes.problems([deployment, scaled, hpa], ["1.32"])

    assert [line.split()[0] for line in wrong] == ["Deployment", "ScaledObject", "HorizontalPodAutoscaler"]
    assert "livenessProbes" in wrong[0]


def test_the_chart_can_be_packaged_with_its_rules(tmp_path: Path) -> None:
    copied = shutil.copytree(CHART, tmp_path / "triton-pilot")  # as `helm package` does, with what links point at

    made = kubernetes.render(copied, [FILES["gpu"]])

    assert of_kind(made, "PrometheusRule")["spec"]["groups"]
