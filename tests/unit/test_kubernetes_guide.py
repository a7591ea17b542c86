"""docs/kubernetes.md: its table is what the command prints; the adapter's query is PromQL and says what the metric is."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from programs import program

from perf import kubernetes, scaling

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "kubernetes.md").read_text()
ADAPTER = yaml.safe_load((ROOT / "deploy" / "helm" / "prometheus-adapter.yaml").read_text())


@pytest.fixture(scope="module")
def rows() -> dict[str, scaling.Row]:
    return {row.name: row for row in scaling.table()}


def test_the_table_is_what_the_command_prints(rows: dict[str, scaling.Row]) -> None:
    assert f"<!-- scaling -->\n{scaling.markdown(list(rows.values()))}\n<!-- /scaling -->" in GUIDE


def test_what_the_table_teaches(rows: dict[str, scaling.Row]) -> None:
    peak, half, busy, *_ = rows.values()
    hpa, keda = rows["HPA, wait 20 ms (`kind: hpa`)"], rows["KEDA, requests and wait (`kind: keda`)"]

    assert busy.replica_hours > peak.replica_hours, "utilisation asks for all"
    for ours in (hpa, keda):
        assert ours.replica_hours < 0.6 * peak.replica_hours
        assert ours.kept > half.kept
        assert ours.kept < peak.kept, "no scaler catches the bursts"


def test_the_hpa_asks_for_the_adapters_metric() -> None:
    (rule,) = ADAPTER["rules"]["custom"]
    values = yaml.safe_load((kubernetes.CHART / "values.yaml").read_text())

    assert rule["name"]["as"] == values["autoscaling"]["hpa"]["metric"]


def queries() -> dict[str, str]:
    """The adapter's query as the adapter asks it, and those of the ScaledObject, each with and without an entry."""
    program("helm")
    (rule,) = ADAPTER["rules"]["custom"]
    asked = (
        rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="shop"').replace("<<.GroupBy>>", "namespace, pod")
    )
    file = kubernetes.CHART / "ci" / "keda-values.yaml"
    found = {"adapter": asked}
    for has_entry in ("true", "false"):
        documents = kubernetes.render(kubernetes.CHART, [file], {"entry.enabled": has_entry})
        (scaled,) = [each for each in documents if each["kind"] == "ScaledObject"]
        for trigger in scaled["spec"]["triggers"][:2]:
            found[f"{trigger['name']}, entry {has_entry}"] = trigger["metadata"]["query"]
    return found


def test_queries_say_the_wait_and_the_load_of_the_pods(tmp_path: Path) -> None:
    promtool = program("promtool")
    pod = 'namespace="shop",pod="ctr-triton-pilot-7d9-x"'
    other = 'namespace="shop",pod="other-1"'
    counters = {  # a second: 100 requests that wait 30 ms in the entry and 10 ms in Triton each
        f"request_queue_seconds_sum{{{pod}}}": "0+15x40",
        f"request_queue_seconds_count{{{pod}}}": "0+500x40",
        f"nv_inference_queue_duration_us{{{pod}}}": "0+5000000x40",
        f"nv_inference_request_success{{{pod}}}": "0+500x40",
        f"nv_inference_request_failure{{{pod}}}": "0+50x40",
        f'processed_requests_total{{{pod},status="ok"}}': "0+500x40",
        f'processed_requests_total{{{pod},status="cancelled"}}': "0+500x40",
        f"request_queue_seconds_sum{{{other}}}": "0+0x40",
        f"request_queue_seconds_count{{{other}}}": "0+0x40",
    }
    expected = {
        "adapter": [('{namespace="shop",pod="ctr-triton-pilot-7d9-x"}', 0.04), ('{namespace="shop",pod="other-1"}', 0)],
        "requests, entry true": [("{}", 100)],
        "queue, entry true": [("{}", 0.04)],
        "requests, entry false": [("{}", 110)],
        "queue, entry false": [("{}", 0.01)],
    }
    asked = queries()
    assert asked.keys() == expected.keys()
    cases = [
        {
            "expr": asked[name],
            "eval_time": "3m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for name, samples in expected.items()
    ]
    series = [{"series": name, "values": values} for name, values in counters.items()]
    tests = {
        "evaluation_interval": "5s",
        "tests": [{"interval": "5s", "input_series": series, "promql_expr_test": cases}],
    }
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests))

    said = subprocess.run(
        [promtool, "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert said.returncode == 0, said.stdout + said.stderr


def test_links_and_values_of_the_guide_exist() -> None:
    values = yaml.safe_load((kubernetes.CHART / "values.yaml").read_text())

    named = set(
        re.findall(
            r"`((?:models|startup|drain|triton|networkPolicy|controlKey|gpu|autoscaling|monitoring)\.[a-zA-Z.]+)`",
            GUIDE,
        )
    )
    assert len(named) > 8
    for name in named:
        at = values
        for part in name.split("."):
            assert part in at, name
            at = at[part]
