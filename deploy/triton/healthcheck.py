"""Is this Triton ready? Every loaded model is READY in the index and answers a real inference, which a dead stub does not.

    python3 healthcheck.py [URL [REPOSITORY [KEY_FILE]]]

The container's health check: standard library only, Python 3.8 or newer. Exits with 0, or with 1 and a line that says why. The
inference is the model's first warmup request where it has one, else a row that the build has left in the model's folder, else
zeros.
"""

from __future__ import annotations

import json
import math
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HEADER = "tritonpilot-control-key"
TIMEOUT_S = 10
ATTEMPTS = 3  # a full queue rejects the inference of a busy model now and then
ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
    "BYTES": 4,  # an empty string is its length, 0, in four bytes
}

# Without a proxy: http_proxy is for the way out, not for loopback.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(
    url: str = "http://127.0.0.1:8000", repository: str = "/models", key_file: str = "/run/secrets/triton_control_key"
) -> str | None:
    """What is wrong with the server at `url`, in one line; None when it is ready."""
    try:
        key = Path(key_file).read_text().strip()
        index = json.loads(call(f"{url}/v2/repository/index", b"{}", {HEADER: key}))
    except (OSError, ValueError) as failed:
        return f"the server does not list its models: {reason(failed)}"
    # Versions that were unloaded or never loaded are in the index too.
    wanted = [entry for entry in index if entry.get("state") and entry.get("reason") != "unloaded"]
    for entry in wanted:
        if entry["state"] != "READY":
            return f"model {entry['name']} is {entry['state']}: {entry.get('reason') or 'no reason given'}"
    for entry in wanted:
        try:
            infer(f"{url}/v2/models/{entry['name']}/versions/{entry['version']}", Path(repository) / entry["name"])
        except (OSError, ValueError, KeyError) as failed:
            return f"model {entry['name']} is READY, but does not answer an inference: {reason(failed)}"
    return None if wanted else "no model is loaded"


def infer(model_url: str, folder: Path) -> None:
    """Ask the model for one answer; raises OSError when there is none."""
    config = json.loads(call(f"{model_url}/config"))
    if config.get("model_transaction_policy", {}).get("decoupled"):
        return  # not over HTTP
    header, body = request(config, folder)
    text = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
    for attempt in range(1, ATTEMPTS + 1):
        try:
            call(f"{model_url}/infer", text + body, headers)
            return
        except urllib.error.HTTPError as refused:
            if refused.code != 503 or attempt == ATTEMPTS:
                raise


def request(config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], bytes]:
    """Header and binary tensors of an inference of batch 1, as of KServe's protocol with Triton's binary extension."""
    warmup = (config.get("model_warmup") or [{}])[0].get("inputs", {})
    inputs, tensors = [], []
    for tensor in config["input"]:
        if tensor.get("optional"):
            continue
        given = warmup.get(tensor["name"], {})
        stated = [int(size) for size in given.get("dims") or tensor["dims"]]
        dims = [max(1, size) for size in stated]
        datatype = {"STRING": "BYTES"}.get(tensor["data_type"][len("TYPE_") :], tensor["data_type"][len("TYPE_") :])
        data = bytes(math.prod(dims) * ELEMENT_BYTES[datatype])
        if given.get("input_data_file"):
            data = (folder / "warmup" / given["input_data_file"]).read_bytes()
        elif not given and dims == stated:  # a row that `tritonpilot build` has left there
            row = folder / "warmup" / row_file(tensor["name"])
            fits = row.is_file() and (datatype == "BYTES" or row.stat().st_size == len(data))
            data = row.read_bytes() if fits else data
        shape = [1, *dims] if int(config.get("max_batch_size", 0)) > 0 else dims
        inputs.append(
            {
                "name": tensor["name"],
                "datatype": datatype,
                "shape": shape,
                "parameters": {"binary_data_size": len(data)},
            }
        )
        tensors.append(data)
    header: dict[str, Any] = {"id": "healthcheck", "inputs": inputs, "parameters": {"binary_data_output": True}}
    if "sequence_batching" in config:
        header["parameters"].update(sequence_id=1, sequence_start=True, sequence_end=True)
    return header, b"".join(tensors)


def row_file(tensor: str) -> str:
    """As tritonpilot.model_config.warmup_file."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in tensor) + ".bin"


def call(url: str, data: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    """Body of the answer. Raises OSError (urllib's errors are ones)."""
    with OPENER.open(urllib.request.Request(url, data, headers or {}), timeout=TIMEOUT_S) as answer:
        body: bytes = answer.read()
        return body


def reason(failed: Exception) -> str:
    """Triton's own words where the error carries them."""
    words = failed.read().decode(errors="replace") if isinstance(failed, urllib.error.HTTPError) else ""
    return " ".join(f"{failed} {words}".split())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
