"""docs/metrics.md names what is really exported, and nothing else of ours."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from prometheus_client import CollectorRegistry, generate_latest

from tritonpilot.autopilot.record import AutopilotMetrics
from tritonpilot.entry.cache import Cache
from tritonpilot.entry.canary import Canary
from tritonpilot.entry.gate import Gate
from tritonpilot.entry.generations import Generations
from tritonpilot.entry.guard import Guard
from tritonpilot.entry.metrics import LATENCY_BUCKETS_S, EntryMetrics
from tritonpilot.supervise.metrics import SupervisorMetrics
from tritonpilot.watch import Report, WatchMetrics

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def section(title: str) -> set[str]:
    """The metrics in the tables of one section."""
    text = GUIDE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z0-9_:]+)`", row)}


def exported(text: bytes) -> set[str]:
    """Names of families; prometheus_client's times of creation are nobody's figures."""
    found = re.findall(r"^# TYPE (\S+) \S+$", text.decode(), re.MULTILINE)
    return {name for name in found if not name.endswith("_created")}


def test_the_entrys() -> None:
    metrics = EntryMetrics()
    metrics.watch(Gate(lambda: 0.0, lambda _, __: None, metrics), None)  # type: ignore[arg-type, return-value]
    assert section("The entry") - {"tenants_file_trouble"} == exported(generate_latest(metrics.registry))


def test_those_of_candidates() -> None:
    registry = CollectorRegistry()
    registry.register(Canary("127.0.0.1:1", "127.0.0.1:1"))
    assert section("Candidates") == exported(generate_latest(registry))


def test_the_caches() -> None:
    registry = CollectorRegistry()
    registry.register(Cache(Generations("127.0.0.1:1")))
    assert {name.removesuffix("_total") for name in section("The cache")} == {
        name.removesuffix("_total") for name in exported(generate_latest(registry))
    }


def test_the_guards() -> None:
    registry = CollectorRegistry()
    registry.register(Guard("127.0.0.1:1", "127.0.0.1:1", Generations("127.0.0.1:1")))
    assert {name.removesuffix("_total") for name in section("The guard")} == {
        name.removesuffix("_total") for name in exported(generate_latest(registry))
    }


def test_the_watchs() -> None:
    metrics = WatchMetrics()
    metrics.take(Report(False))
    assert section("The watch") == exported(generate_latest(metrics.registry))


def test_the_autopilots() -> None:
    metrics = AutopilotMetrics(decided_s=0.0)
    assert {name.removesuffix("_total") for name in section("The autopilot")} == {
        name.removesuffix("_total") for name in exported(generate_latest(metrics.registry))
    }


def test_the_supervisors() -> None:
    metrics = SupervisorMetrics(restart_seconds=1.0)
    registry = CollectorRegistry()
    registry.register(metrics)
    assert {name.removesuffix("_total") for name in section("The supervisor")} == {
        name.removesuffix("_total") for name in exported(generate_latest(registry))
    }


def test_those_of_our_backends() -> None:
    sources = [*ROOT.glob("python_backend/pilotlib/*.py"), *ROOT.glob("python_backend/*/model.py")]
    named = {name for each in sources for name in re.findall(r'MetricFamily\(\s+name="(\w+)"', each.read_text())}
    assert section("Our Python backends") == named


def test_those_of_triton_are_real() -> None:
    captured = (ROOT / "tests" / "unit" / "captured" / "metrics.txt").read_text()
    elsewhere = re.compile("nv_gpu_.*|nv_cache_.*|.*_summary_us")  # with a GPU, a cache, --metrics-config
    assert {name for name in section("Triton's own that are used") if not elsewhere.fullmatch(name)} <= set(
        re.findall(r"^# HELP (\S+)", captured, re.MULTILINE)
    )


def test_those_that_rules_record() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules" / "recording.yml").read_text())
    assert section("Recording rules") == {rule["record"] for group in rules["groups"] for rule in group["rules"]}


def test_the_edges() -> None:
    said = re.search(r"\*\*Edges of the histograms\*\*: ([\d. ]+) s,", GUIDE)
    assert said is not None
    assert tuple(map(float, said[1].split())) == LATENCY_BUCKETS_S
