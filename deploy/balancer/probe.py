"""The body of the balancer's health checks: a request of zeros for one model, as JSON, from the model's config.

    curl -s 127.0.0.1:8000/v2/models/ctr/config | python3 deploy/balancer/probe.py

Prints what BALANCER_PROBE_BODY is to hold. Standard library only. A model that refuses zeros, as one that wants an image, is
probed with a body of your own.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

LARGEST_BYTES = 12_000  # haproxy's buffer of 16 KiB has to hold the whole check


def body(config: dict[str, Any]) -> str:
    """A request of one row of zeros; a dimension of any size is 1. Raises ValueError when it is too large for a check."""
    rows = [1] if config.get("max_batch_size") else []
    tensors = []
    for each in config["input"]:
        if each.get("optional"):
            continue
        shape = rows + [max(1, int(dim)) for dim in each["dims"]]
        datatype = each["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES")
        zero: Any = {"BYTES": "", "BOOL": False}.get(datatype, 0)
        if (elements := math.prod(shape)) > LARGEST_BYTES:
            raise ValueError(
                f"input {each['name']} has {elements} elements, too many for a health check: probe another model"
            )
        tensors.append({"name": each["name"], "shape": shape, "datatype": datatype, "data": [zero] * elements})
    text = json.dumps({"inputs": tensors}, separators=(",", ":"))
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"the request has {len(text)} bytes, too many for a health check: probe another model")
    return text


if __name__ == "__main__":
    try:
        sys.stdout.write(body(json.load(sys.stdin)) + "\n")
    except (ValueError, KeyError) as wrong:
        sys.exit(f"probe.py: no body: {wrong}")
