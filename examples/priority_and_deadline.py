"""A class of callers is a priority level; a deadline is a time on the clock of the server's host.

python examples/priority_and_deadline.py --url 127.0.0.1:8001

In models/ctr/service.yaml the class `realtime` has priority 1 and `batch` has 2. A request whose deadline has passed when its turn
comes is rejected without being computed. From another host leave deadlines to the entry (docs/entry.md), which has its own clock.
"""

from __future__ import annotations

import argparse
import queue
import time
from typing import Any

import tritonclient.grpc as triton
from rows import first_rows

REALTIME, BATCH = 1, 2
REQUESTS = 300

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="127.0.0.1:8001")
url = parser.parse_args().url

dense, categorical = first_rows(64)
inputs = [triton.InferInput("dense", [64, 28], "FP32"), triton.InferInput("categorical", [64, 8], "INT64")]
inputs[0].set_data_from_numpy(dense)
inputs[1].set_data_from_numpy(categorical)

answers: queue.Queue[tuple[str, Any]] = queue.Queue()


def send(client: triton.InferenceServerClient, name: str, priority: int, deadline_s: float) -> None:
    def answered(result: triton.InferResult, error: Exception | None) -> None:
        answers.put((name, error or result.as_numpy("prob")))

    client.async_infer(
        "ctr",
        inputs,
        callback=answered,
        priority=priority,
        parameters={"pilot_deadline_ns": time.monotonic_ns() + int(deadline_s * 1e9)},
    )


with triton.InferenceServerClient(url) as client:
    for _ in range(REQUESTS):
        send(client, "batch", BATCH, deadline_s=20)
    send(client, "realtime", REALTIME, deadline_s=20)
    send(client, "impatient", BATCH, deadline_s=0.001)
    order = [answers.get(timeout=30) for _ in range(REQUESTS + 2)]

place = [name for name, _ in order].index("realtime") + 1
print(f"the realtime request was answered as number {place} of {len(order)}, sent after {REQUESTS} others")
for name, answer in order:
    if isinstance(answer, triton.InferenceServerException):
        print(f"{name} was rejected: {answer.status()} {answer.message()}")
