"""A class of callers is a priority level; a deadline is a timeout in microseconds of queue time.

python examples/priority_and_timeout.py --url 127.0.0.1:8001

In models/ctr/service.yaml the class `realtime` has priority 1 and `batch` has 2. A timeout shorter than the class's own is
honoured; a request that waits longer in the queue is rejected without being computed.
"""

from __future__ import annotations

import argparse
import queue
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


def send(client: triton.InferenceServerClient, name: str, priority: int, timeout_us: int) -> None:
    def answered(result: triton.InferResult, error: Exception | None) -> None:
        answers.put((name, error or result.as_numpy("prob")))

    client.async_infer(
        "ctr",
        inputs,
        callback=answered,
        priority=priority,
        timeout=timeout_us,  # microseconds in the queue
    )


with triton.InferenceServerClient(url) as client:
    for _ in range(REQUESTS):
        send(client, "batch", BATCH, timeout_us=20_000_000)
    send(client, "realtime", REALTIME, timeout_us=20_000_000)
    send(client, "impatient", BATCH, timeout_us=1)
    order = [answers.get(timeout=30) for _ in range(REQUESTS + 2)]

place = [name for name, _ in order].index("realtime") + 1
print(f"the realtime request was answered as number {place} of {len(order)}, sent after {REQUESTS} others")
for name, answer in order:
    if isinstance(answer, triton.InferenceServerException):
        print(f"{name} was rejected: {answer.status()} {answer.message()}")
