"""Does every panel of every dashboard show something, when a real Prometheus scrapes Triton, the entry and the watch under load?"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from perf import busy, callers
from perf.callers import Due
from perf.dashboards import Finding, Query, Shown, find, queries
from perf.frame import Bench, Outcome
from perf.open_loop import Request, Sender
from perf.prometheus import Prometheus, scraping
from perf.subjects import Served, entered, watched
from tritonpilot.entry.messages import KEY_HEADER
from tritonpilot.entry.tenants import hash_key, new_key
from tritonpilot.server import EmbeddedServer

MODEL, CACHED = "shown", "cached"
# It can do less than half of the calls below, also where the callers are late and the model is shorter than asked for:
# so refusals are spread over several scrapes, without which they have no rate.
MODEL_MS = 50.0
ROUGHLY = 0.5
SERVICES = {
    MODEL: """\
batching: {max_batch_size: 4}
slo: {p99_ms: 500}
classes:
  - {name: realtime, priority: 1, max_queue_size: 8}
  - {name: batch, priority: 2, max_queue_size: 8, share: 0.2, p99_ms: 5000}
warmup: {batch_sizes: [1, 4], data: zero}
""",
    CACHED: "batching: {max_batch_size: 4}\ncache: {kind: triton}\n",
}
SHOP_PER_S, SCANS_PER_S, STRANGER_PER_S = 90.0, 25.0, 2.0
SCANS_QUOTA_PER_S = 2.0
WRONG = 3  # requests that the model cannot take, while there is room for them
SCRAPE_S, LOAD_S = 5.0, 60.0
QUICK_SCRAPE_S, QUICK_LOAD_S = 1.0, 6.0
LATE_S = 30.0  # until the watch has looked, and until a rule has seen the last scrape


@dataclass(frozen=True)
class Seen:
    """What became of each query."""

    findings: dict[Query, Finding]

    @property
    def share(self) -> float:
        """Of the queries that can have data on this machine."""
        wanted = self.wanted()
        return sum(finding.has_data for finding in wanted.values()) / len(wanted)

    @property
    def empty(self) -> list[str]:
        """Queries that should have had data and had none."""
        return [str(query) for query, finding in self.wanted().items() if not finding.has_data]

    @property
    def nameless(self) -> list[str]:
        """Queries with lines that lack a label by which they are named."""
        return [f"{query} ({', '.join(found.nameless)})" for query, found in self.findings.items() if found.nameless]

    @property
    def without_gpu(self) -> list[str]:
        """Queries that only a GPU answers, and that had no data here."""
        return [str(query) for query, found in self.findings.items() if query.is_of_gpu and not found.has_data]

    def wanted(self) -> dict[Query, Finding]:
        """All, but those that ask for a GPU where there is none."""
        return {query: found for query, found in self.findings.items() if found.has_data or not query.is_of_gpu}


def dashboards(bench: Bench) -> Outcome:
    """The share of the dashboards' queries that have data."""
    scrape_s, load_s = (QUICK_SCRAPE_S, QUICK_LOAD_S) if bench.quick else (SCRAPE_S, LOAD_S)
    seen = look(bench, scrape_s, load_s)
    return Outcome(
        seen.share,
        ok=not seen.nameless,
        details={
            "queries": len(seen.wanted()),
            "without_data": seen.empty,
            "lines_without_name": seen.nameless,
            "not_counted_no_gpu": seen.without_gpu,
            "scrape_every_s": scrape_s,
            "load_s": load_s,
        },
    )


def look(bench: Bench, scrape_s: float, load_s: float) -> Seen:
    """Serve two small models, call them in all the ways that the dashboards tell apart, and ask every query."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name:
        folder = Path(name)
        keys = {tenant: new_key() for tenant in ("shop", "scans")}
        root, _ = busy.repository_of(folder, bench.cores.server, MODEL_MS, SERVICES, bench.say, ROUGHLY)
        tenants = _tenants(folder / "tenants.yaml", keys)
        with (
            EmbeddedServer(root, cache_size_bytes=1 << 20, cpus=[bench.cores.server]) as server,
            Sender(server.endpoints.grpc) as sender,
        ):
            again = [Request(CACHED, busy.row())] * 8
            sender.send(again, in_flight=1)
            with (
                entered(Served(server, sender), tenants=tenants) as entry,
                watched(server, root) as watch,
                scraping(
                    folder, {"triton": server.endpoints.metrics, "entry": entry.metrics, "watch": watch}, scrape_s
                ) as prometheus,
            ):
                prometheus.wait_for("triton_up == 1", LATE_S)
                start_s = time.time()
                for seed in range(2):
                    callers.on_schedule(entry.http, _calls(keys, load_s / 2, seed))
                    sender.send(again, in_flight=1)
                server.check_alive()
                return _asked(prometheus, start_s, scrape_s)


def _calls(keys: dict[str, str], seconds: float, seed: int) -> list[Due]:
    """More than the model can do in the better class, more than its quota in the other, some that fail, some without a key."""
    random = np.random.default_rng(seed)
    good = callers.body(MODEL, busy.row())
    wrong = callers.body(MODEL, {"x": np.zeros((1, 7), np.float32)})
    streams = (
        ("shop", SHOP_PER_S, good, keys["shop"]),
        ("scans", SCANS_PER_S, good, keys["scans"]),
        ("stranger", STRANGER_PER_S, good, "nobody's"),
    )
    return [Due(0.0, "wrong", wrong, {KEY_HEADER: keys["shop"]})] * WRONG + [
        Due(at_s, group, body, {KEY_HEADER: key})
        for group, per_s, body, key in streams
        for at_s in callers.poisson(per_s, seconds, random).tolist()
    ]


def _tenants(path: Path, keys: dict[str, str]) -> Path:
    """The shop is of the better class, the scans have a quota."""
    written = [
        {"name": "shop", "keys": [hash_key(keys["shop"])], "class": "realtime"},
        {"name": "scans", "keys": [hash_key(keys["scans"])], "class": "batch", "rate_per_s": SCANS_QUOTA_PER_S},
    ]
    path.write_text(yaml.safe_dump({"tenants": written}), encoding="utf-8")
    path.chmod(0o600)
    return path


def _asked(prometheus: Prometheus, start_s: float, scrape_s: float) -> Seen:
    """Every query, again and again until all have data or `LATE_S` is over."""
    findings: dict[Query, Finding] = {}
    give_up_s = time.monotonic() + LATE_S
    while True:
        shown = Shown(start_s, time.time(), scrape_s)
        for query in queries():
            if query not in findings or not findings[query].has_data:
                findings[query] = find(prometheus, query, shown)
        seen = Seen(findings)
        if not seen.empty or time.monotonic() > give_up_s:
            return seen
        time.sleep(scrape_s)
