"""Is anything computed for callers who have given up, and are they told in time? Ten thousand requests with random deadlines."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np

from perf import callers
from perf.callers import Due
from perf.frame import PROJECT, Bench, Outcome
from perf.subjects import entered, serving_from
from tritonpilot import build, metrics, repository
from tritonpilot.entry.messages import CLASS_HEADER, DEADLINE_HEADER
from tritonpilot.errors import MeasurementError
from tritonpilot.spec import load_services

REQUESTS = 10_000
QUICK_REQUESTS = 1_500
RATE_PER_S = 500.0
BATCH = 8
EXECUTION_S = 0.02  # 8 rows in 20 ms: 400 a second, so the load is 1.25 times the capacity
DEADLINES_MS = (1.0, 150.0)
TOLD_WITHIN_MS = 20.0
LOOK_NS = 1_000_000  # from the look at the deadlines to the note of the beginning
MODEL = "recorder"
SERVICE = """\
service: recorder
model:
  backend: python
  file: serving.py
  parameters: {{record: "{record}", seconds: {seconds}}}
  inputs: [{{name: x, data_type: FP32, dims: [4]}}]
  outputs: [{{name: y, data_type: FP32, dims: [4]}}]
batching: {{max_batch_size: 8}}
classes:
  - {{name: first, priority: 1, timeout_ms: 1000}}
  - {{name: second, priority: 2, timeout_ms: 1000, share: 0.1}}
"""


def deadlines(bench: Bench) -> Outcome:
    """Ms by which the latest computed answer was ready after its deadline, less one execution; all requests accounted for."""
    count = QUICK_REQUESTS if bench.quick else REQUESTS
    random = np.random.default_rng(8)
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as folder:
        record = Path(folder, "record")
        root = _repository(Path(folder), record)
        with serving_from(root, bench, is_pinned=True) as served, entered(served, core=bench.cores.client) as entry:
            body = callers.body(MODEL, {"x": np.ones((1, 4), np.float32)})
            budgets = random.uniform(*DEADLINES_MS, count)
            times = np.cumsum(random.exponential(1 / RATE_PER_S, count))
            groups = np.where(random.uniform(size=count) < 0.5, "first", "second")
            asked = [
                Due(at, group, body, {CLASS_HEADER: group, DEADLINE_HEADER: f"{ms:.3f}"}, number)
                for number, (at, group, ms) in enumerate(
                    zip(times.tolist(), groups.tolist(), budgets.tolist(), strict=True)
                )
            ]
            calls = callers.on_schedule(entry.http, asked)
            counted = metrics.scrape(entry.metrics)
            served.server.check_alive()
        executions = [[int(word) for word in line.split()] for line in record.read_text().splitlines()]
    computed = [(ended, deadline) for _, ended, *each in executions for deadline in each if deadline]
    late_ms = np.array([(ended - deadline) / 1e6 for ended, deadline in computed])
    begun_late = sum(began > deadline + LOOK_NS for began, _, *each in executions for deadline in each if deadline)
    longest_ms = max((ended - began) / 1e6 for began, ended, *_ in executions)
    statuses = Counter(call.status for call in calls)
    strange = [call for call in calls if call.status not in (200, 503, 504)]
    if strange or len(calls) != count:
        raise MeasurementError(
            f"{len(calls)} of {count} calls ended, and {len(strange)} with neither 200, 503 nor 504 "
            f"({strange[0].text if strange else ''}). Nothing is reported."
        )
    told_ms = np.array([call.sent_latency_ms - budgets[call.number] for call in calls if call.status == 504])
    entry_count = metrics.value(counted, "processed_requests_total")
    return Outcome(
        float(late_ms.max() - longest_ms),
        spread=0.0,
        rounds=1,
        ok=begun_late == 0 and entry_count == count and float(np.quantile(told_ms, 0.99)) <= TOLD_WITHIN_MS,
        details={
            "sent": count,
            "answered": statuses[200],
            "rejected": statuses[503],
            "timed_out": statuses[504],
            "counted_by_the_entry": int(entry_count),
            "computed": len(computed),
            "begun_after_their_deadline": begun_late,
            "ready_after_their_deadline": int((late_ms > 0).sum()),
            "longest_execution_ms": round(longest_ms, 1),
            "told_after_deadline_ms": {
                name: round(float(np.quantile(told_ms, q)), 1)
                for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
            },
        },
    )


def _repository(folder: Path, record: Path) -> Path:
    service = folder / "models" / MODEL
    service.mkdir(parents=True)
    (service / "service.yaml").write_text(SERVICE.format(record=record, seconds=EXECUTION_S), encoding="utf-8")
    shutil.copy(PROJECT / "perf/recorder/serving.py", service)
    root = folder / "model_repository"
    root.mkdir()
    repository.publish(root, [plan.folder for plan in build.plan(load_services(folder / "models"), "auto")])
    return root
