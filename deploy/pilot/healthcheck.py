"""Does this service answer? Exits with 0 when every URL answers with 2xx, or with 1 and a line that says which does not.

    python3 healthcheck.py http://127.0.0.1:8100/v2/health/live

The health check of the containers entry and watch: standard library only.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

TIMEOUT_S = 5

# Without a proxy: http_proxy is for the way out, not for loopback.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(*urls: str) -> str | None:
    """What is wrong, in one line; None when all is well."""
    for url in urls:
        try:
            with OPENER.open(url, timeout=TIMEOUT_S):
                pass
        except (OSError, ValueError) as failed:
            words = failed.read(500).decode(errors="replace") if isinstance(failed, urllib.error.HTTPError) else ""
            return " ".join(f"{url} does not answer: {failed} {words}".split())
    return None


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
