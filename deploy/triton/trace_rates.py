"""Which requests does this Triton trace? One of so many per model, as `tracing` in its service file says.

    python3 trace_rates.py URL KEY_FILE

Waits until the server answers and sets each loaded model's trace rate, which Triton takes neither from its command line nor from
config.pbtxt. start.sh runs it where there is a receiver. Standard library only, Python 3.8 or newer.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

HEADER = "tritonpilot-control-key"
PARAMETER = "pilot_trace_rate"
PATIENCE_S = 900.0  # large models load for minutes, and Triton answers when all have
POLL_S = 1.0
TIMEOUT_S = 10

# Without a proxy: http_proxy is for the way out, not for loopback.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(url: str, key_file: str) -> str | None:
    """Set the rates; what went wrong in one line, None when nothing did."""
    headers = {HEADER: Path(key_file).read_text().strip()}
    deadline = time.monotonic() + PATIENCE_S
    while not is_live(url):
        if time.monotonic() > deadline:
            return f"the server at {url} does not answer; the trace rates of its models were not set"
        time.sleep(POLL_S)
    try:
        for entry in call(f"{url}/v2/repository/index", {"ready": True}, headers):
            model = f"{url}/v2/models/{entry['name']}"
            rate = call(f"{model}/config").get("parameters", {}).get(PARAMETER, {}).get("string_value")
            if rate:
                call(f"{model}/trace/setting", {"trace_rate": rate}, headers)
    except (OSError, ValueError) as failed:
        return f"trace_rates.py: not all trace rates were set: {failed}. Requests with a trace context are traced."
    return None


def is_live(url: str) -> bool:
    """Whether the server answers."""
    try:
        with OPENER.open(f"{url}/v2/health/live", timeout=TIMEOUT_S):
            return True
    except OSError:
        return False


def call(url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> Any:
    """The JSON of the answer. Raises OSError (urllib's errors are ones)."""
    data = None if body is None else json.dumps(body).encode()
    with OPENER.open(urllib.request.Request(url, data, headers or {}), timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
