"""Does this pod's Triton serve, and must it be restarted? What the pod's watch has found by real inferences.

    python3 podprobe.py ready|alive [WATCH [TRITON]]

Kubernetes' probes of the container triton: standard library only, Python 3.8 or newer. Exits with 0, or with 1 and a line that says
why. Unlike healthcheck.py it asks no model itself: an overloaded pod whose full queue refuses a probe would be taken out of the
balancer, and its load would end the next one. The watch tells a full queue from a dead stub.

ready: every model that should be there is READY and answers. alive: Triton answers, and no model that is READY is dead; one that
does not load is left alone, for a restart would not cure it. Where the watch says nothing, Triton's own health decides.
"""

from __future__ import annotations

import re
import sys
import urllib.request
from typing import Any

TIMEOUT_S = 4  # each of two questions; Kubernetes' probes have 10 s

# Without a proxy: http_proxy is for the way out, not for loopback.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SAMPLE = re.compile(r'^(model_ready|model_probe_success)\{model="([^"]*)",version="([^"]*)"\} (\S+)$', re.MULTILINE)


def main(
    question: str = "", watch: str = "http://127.0.0.1:8103/metrics", triton: str = "http://127.0.0.1:8000"
) -> Any:
    """Why not, in one line; None: yes."""
    if question not in ("ready", "alive"):
        return "usage: podprobe.py ready|alive [WATCH [TRITON]]"
    said = asked(f"{triton}/v2/health/{'ready' if question == 'ready' else 'live'}")
    if said is None:
        return f"Triton at {triton} is not {question}"
    found = asked(watch)
    if found is None or "\ntriton_up 1" not in found:
        return None
    samples = [
        (name, f"model {model} version {version}", float(value))
        for name, model, version, value in SAMPLE.findall(found)
    ]
    for name, model, value in samples:
        if name == "model_probe_success" and value == 0:
            return f"{model} is READY, but does not answer an inference"
        if name == "model_ready" and value == 0 and question == "ready":
            return f"{model} is not READY"
    return "no model is loaded" if question == "ready" and not samples else None


def asked(url: str) -> str | None:
    """The body of the answer; None when there is none, or an error."""
    try:
        with OPENER.open(url, timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
