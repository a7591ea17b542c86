"""The dashboards' files: written from their tables, complete, readable by people, and about metrics that exist."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from perf import dashboards
from perf.prometheus import Series

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
PROMETHEUS = ROOT / "deploy" / "prometheus"
COLUMNS = 24
ALL = dashboards.dashboards()

each_dashboard = pytest.mark.parametrize("dashboard", ALL.values(), ids=list(ALL))


def provisioned(file: str) -> Any:
    return yaml.safe_load((GRAFANA / "provisioning" / file).read_text())


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("grafana_write", GRAFANA / "write.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    texts: Callable[[], dict[str, str]] = module.texts
    return texts()


def test_the_files_are_those_of_the_tables(written: dict[str, str]) -> None:
    found = {path.name: path.read_text() for path in (GRAFANA / "dashboards").iterdir()}

    assert found == written, "run: python deploy/grafana/write.py"


def test_grafana_finds_source_and_files() -> None:
    sources = provisioned("datasources/prometheus.yml")["datasources"]
    (provider,) = provisioned("dashboards/tritonpilot.yml")["providers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]
    mounts = {target: source for source, target, *_ in (volume.split(":") for volume in compose["volumes"])}

    assert [source["uid"] for source in sources] == ["prometheus", "alertmanager"]
    assert mounts[provider["options"]["path"]] == "./deploy/grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./deploy/grafana/provisioning"
    scraped = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert sources[0]["jsonData"]["timeInterval"] == scraped


def test_grafana_and_its_types_are_of_one_release() -> None:
    image = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["grafana"]["image"]
    (release,) = re.findall(r"-([\d.]+)\}", image)

    assert f'"@grafana/schema": "{release}"' in (ROOT / "tests" / "grafana" / "package.json").read_text()


def test_dashboards_have_names_of_their_own() -> None:
    assert {name: dashboard["uid"] for name, dashboard in ALL.items()} == {
        name: f"tritonpilot-{name}" for name in ("batching", "instances", "overview", "tenants")
    }
    assert len({dashboard["title"] for dashboard in ALL.values()}) == len(ALL)


@each_dashboard
def test_panels_lie_side_by_side(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        assert all(0 <= x < COLUMNS for x, _ in cells)
        taken |= cells

    assert len(set(ids)) == len(ids)


@each_dashboard
def test_every_variable_is_declared_and_used(dashboard: dict[str, Any]) -> None:
    declared = {each["name"] for each in dashboard["templating"]["list"]}
    texts = [target["expr"] for panel in dashboards.panels(dashboard) for target in panel["targets"]]
    used = set(re.findall(r"\$(\w+)", " ".join(texts)))

    assert used - {"__rate_interval", "__range"} == declared


@each_dashboard
def test_panels_explain_themselves(dashboard: dict[str, Any]) -> None:
    for panel in dashboards.panels(dashboard):
        assert re.fullmatch(r".{10,150}\.", panel["description"]), panel["title"]
        assert panel["fieldConfig"]["defaults"].get("unit") or panel["type"] == "state-timeline", panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "prometheus"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCD"[: len(panel["targets"])])


def test_what_descriptions_point_to_exists() -> None:
    pointed = set(re.findall(r"(docs/[\w/.-]+\.md)(?:#([\w-]+))?", json.dumps(ALL)))

    assert {page for page, _ in pointed} >= {"docs/operations.md", "docs/metrics.md"}
    for page, anchor in pointed:
        titles = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in {"", *(re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles)}, (
            page,
            anchor,
        )


def test_panels_ask_for_metrics_that_exist() -> None:
    guide = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text()))
    rules = yaml.safe_load((PROMETHEUS / "rules" / "recording.yml").read_text())["groups"]
    recorded = {rule["record"] for group in rules for rule in group["rules"]}
    known = guide | recorded | {f"{name}_{part}" for name in guide for part in ("bucket", "count")} | {"up", "ALERTS"}

    assert {name: query for query in dashboards.queries() for name in metrics_of(query.expr) - known} == {}


def metrics_of(expr: str) -> set[str]:
    """Names of metrics: what is left without labels, ranges, groupings, functions and operators."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|without|on|ignoring) \([^)]*\)", " ", expr)
    names = set(re.findall(r"[a-zA-Z_:][\w:]*(?!\w*\s*\()", re.sub(r"\b[a-z_]+(?=\s*\()", " ", bare)))
    return names - {"or", "and", "unless", "bool", "offset", "e6"}


def test_metrics_of_an_expression() -> None:
    expr = 'sum by (model) (rate(a_total{model=~"b|c"}[5m])) / 1e6 / (max by (le) (d:e:rate1m) > 0) or vector(0)'

    assert metrics_of(expr) == {"a_total", "d:e:rate1m"}


def test_variables_are_replaced() -> None:
    shown = dashboards.Shown(1000.0, 1060.0, 5.0)
    expr = dashboards.substituted(
        'increase(m{a=~"$model"}[$__range]) + rate(m[$__rate_interval]) + $other', {"model": ".*"}
    )

    assert dashboards.substituted(expr, shown.variables) == 'increase(m{a=~".*"}[60s]) + rate(m[20s]) + $other'


@pytest.mark.parametrize(
    ("values", "is_data"), [([[1.0]], True), ([[float("nan"), 0.0]], True), ([[float("nan")], []], False), ([], False)]
)
def test_nan_is_no_data(values: list[list[float]], is_data: bool) -> None:
    assert dashboards.has_data([Series({}, each) for each in values]) is is_data
