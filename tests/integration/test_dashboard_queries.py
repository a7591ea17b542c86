"""Every query of every dashboard finds data in a real Prometheus that has scraped a real Triton, the entry and the watch."""

from __future__ import annotations

import pytest
from programs import program

from perf.frame import Bench
from perf.machine import Limits
from perf.proofs.dashboards import QUICK_LOAD_S, QUICK_SCRAPE_S, Seen, look

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def seen() -> Seen:
    program("prometheus")
    bench = Bench(quick=True, needs_quiet=False, say=lambda _: None, limits=Limits())
    return look(bench, QUICK_SCRAPE_S, QUICK_LOAD_S)


def values(seen: Seen, dashboard: str, panel: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The largest value of each line of a panel's first query."""
    finding = next(f for query, f in seen.findings.items() if (query.dashboard, query.panel) == (dashboard, panel))
    return {tuple(each.labels[name] for name in labels): max(each.values) for each in finding.series}


def test_no_panel_is_empty(seen: Seen) -> None:
    assert seen.empty == []
    assert seen.share == 1


def test_every_line_has_its_name(seen: Seen) -> None:
    assert seen.nameless == []


def test_the_panels_tell_what_happened(seen: Seen) -> None:
    assert values(seen, "overview", "Triton") == {(): 1}
    assert values(seen, "overview", "Models that answer") == {(): 2}
    assert values(seen, "instances", "Answers", "model") == {("shown",): 1, ("cached",): 1}
    assert values(seen, "instances", "Warm-up", "model") == {("shown",): 1, ("cached",): 0}
    assert values(seen, "batching", "Rows per execution", "model")["shown",] > 1
    assert 0 < values(seen, "batching", "Cache hits", "model")["cached",] <= 1
    refused = values(seen, "tenants", "Refused", "tenant", "status")
    assert refused["scans", "refused_rate"] > 0
    assert sum(refused.get(("shop", f"refused_{why}"), 0) for why in ("queue_full", "wait")) > 0
    assert values(seen, "tenants", "Accepted, but not answered", "tenant", "status")["shop", "error"] > 0
    assert values(seen, "overview", "Denied", "http_status")["401",] > 0
    assert set(values(seen, "overview", "P99 by class", "model", "class")) == {
        ("shown", "realtime"),
        ("shown", "batch"),
    }


def test_only_panels_of_gpus_may_lack_data(seen: Seen) -> None:
    assert all("gpu" in query for query in seen.without_gpu)
