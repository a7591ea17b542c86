"""deploy/prometheus and deploy/alertmanager: promtool and amtool judge them, and what they name is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import program

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
HERE = Path(__file__).parent
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
WINDOWS = ("30s", "1m", "5m", "30m", "1h", "6h")


def rules(kind: str) -> list[dict[str, Any]]:
    """All rules of a kind, `alert` or `record`."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--lint=all", "--lint-fatal", str(DEPLOY / "prometheus" / "prometheus.yml")],
        ["test", "rules", str(HERE / "rules_test.yml"), str(HERE / "rules_hours_test.yml")],
    ],
    ids=["check", "test"],
)
def test_promtool_accepts_the_configuration_and_the_alerts_fire_and_resolve(arguments: list[str]) -> None:
    said = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, check=False)

    assert said.returncode == 0, said.stdout + said.stderr


def test_amtool_accepts_the_routes_and_every_alert_goes_to_the_team(tmp_path: Path) -> None:
    amtool = program("amtool")
    config = shutil.copy(DEPLOY / "alertmanager" / "alertmanager.yml", tmp_path)

    checked = subprocess.run([amtool, "check-config", config], capture_output=True, text=True, check=False)
    routed = subprocess.run(
        [amtool, "config", "routes", "test", f"--config.file={config}", "alertname=DeadStub", "severity=critical"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert routed.stdout.strip() == "team"


def test_every_alert_says_what_to_do_and_where_it_is_explained() -> None:
    anchors = {
        re.sub(r"[^\w -]", "", line).strip().replace(" ", "-").lower() for line in _headings("docs/operations.md")
    }
    anchors |= set(re.findall(r'<a (?:id|name)="([\w-]+)"', (ROOT / "docs/operations.md").read_text()))

    for rule in rules("alert"):
        assert set(rule["annotations"]) == {"summary", "action", "runbook"}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (file, anchor in anchors) == ("docs/operations.md", True), f"{rule['alert']}: #{anchor} is in {anchors}"


def test_every_alert_is_tested() -> None:
    tested = set()
    for name in ("rules_test.yml", "rules_hours_test.yml"):
        tested |= set(re.findall(r'alertname(?:: |=")(\w+)', (HERE / name).read_text()))

    assert tested == {rule["alert"] for rule in rules("alert")}


def test_the_guides_list_every_alert_with_its_severity_and_every_figure() -> None:
    guide = (ROOT / "docs" / "alerts.md").read_text()
    rows = [line.split(" | ") for line in guide.splitlines() if line.startswith("| `")]
    names = {name: row[1] for row in rows for name in re.findall(r"`([\w:]+)`", row[0])}
    figures = set(re.findall(r"`(\w+:[\w:]+)`", (ROOT / "docs" / "metrics.md").read_text()))

    assert {name: severity for name, severity in names.items() if severity in ("critical", "warning")} == {
        rule["alert"]: rule["labels"]["severity"] for rule in rules("alert")
    }
    assert figures == {rule["record"] for rule in rules("record")}


def test_the_rules_ask_for_metrics_that_are_documented() -> None:
    known = set(re.findall(r"`(\w+)(?:\{[^}]*\})?`", (ROOT / "docs/metrics.md").read_text())) | {"up"}
    recorded = {rule["record"] for rule in rules("record")}
    asked = set()
    for rule in [*rules("alert"), *rules("record")]:
        expr = re.sub(r'"[^"]*"', "", rule["expr"])
        expr = re.sub(r"\b(by|on|without) \([^)]*\)|\{[^}]*\}|\[[^]]*\]", "", expr)
        words = re.findall(r"(?<![\w.])[a-z]\w*(?::\w+)*\b(?!\()", expr)
        asked |= set(words) - {"and", "or", "unless", "offset", "sum", "avg", "max"}

    assert {name for name in asked if ":" in name} <= recorded
    plain = {
        re.sub(r"_(bucket|sum|count)$", "", name) if name.startswith(("request_", "inference_")) else name
        for name in asked
    }
    assert {name for name in plain if ":" not in name} <= known


def test_the_burn_of_every_window_is_made_in_the_same_way() -> None:
    found = {
        rule["record"].rpartition("ratio_rate")[2]: rule["expr"]
        for rule in rules("record")
        if rule["record"].startswith("slo:errors_per_request:")
    }

    assert tuple(found) == WINDOWS
    assert len({expr.replace(f"[{window}]", "[]") for window, expr in found.items()}) == 1


def test_prometheus_scrapes_and_tells_services_of_the_compose_file() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    services = set(yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"])
    static = {job["job_name"]: job.get("static_configs") for job in config["scrape_configs"]}
    looked_up = {
        job["job_name"]: [(each["names"], each["port"]) for each in job["dns_sd_configs"]]
        for job in config["scrape_configs"]
        if "dns_sd_configs" in job
    }

    assert static == {
        "triton": [{"targets": ["triton:8002"]}],
        "entry": [{"targets": ["entry:8102"]}],
        "watch": [{"targets": ["watch:8103"]}],
        "balancer": None,
        "autopilot": None,
        "supervise": None,
    }
    assert looked_up == {
        "triton": [(["triton-b"], 8002)],
        "balancer": [(["haproxy"], 8202)],
        "autopilot": [(["autopilot"], 8104)],
        "supervise": [(["supervise"], 8105)],
    }
    assert config["alerting"] == {"alertmanagers": [{"static_configs": [{"targets": ["alertmanager:9093"]}]}]}
    assert {"triton", "entry", "watch", "triton-b", "haproxy", "alertmanager", "autopilot", "supervise"} <= services


def _headings(file: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", (ROOT / file).read_text(), re.MULTILINE)
