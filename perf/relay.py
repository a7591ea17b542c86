"""A page of metrics, or a Prometheus, whose answers can be cut off or frozen: an HTTP relay on loopback.

with relayed("127.0.0.1:8002") as relay:
    relay.address                    # GET there what is asked for at the target
    relay.is_cut = True              # no answers
    relay.freeze("/metrics")         # always the same answer from now on; relay.thaw()
"""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ANSWER_S = 10.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Relay:
    """One between a client and `target`, which is host:port."""

    def __init__(self, target: str, address: str) -> None:
        self.address = address
        self.is_cut = False
        self._target = target
        self._frozen: bytes | None = None

    def freeze(self, path: str) -> None:
        """Answer everything by what the target says about `path` now."""
        self._frozen = self._ask(path)[1]

    def thaw(self) -> None:
        """Ask the target again."""
        self._frozen = None

    def answer(self, path: str) -> tuple[int, bytes]:
        """The status and the content."""
        return (200, self._frozen) if self._frozen is not None else self._ask(path)

    def _ask(self, path: str) -> tuple[int, bytes]:
        try:
            with DIRECT.open(f"http://{self._target}{path}", timeout=ANSWER_S) as answer:
                return 200, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError as error:
            return 502, str(error).encode()


@contextmanager
def relayed(target: str) -> Iterator[Relay]:
    """A relay that ends with the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if relay.is_cut:
                self.close_connection = True
                return
            status, content = relay.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        relay = Relay(target, f"127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield relay
        finally:
            server.shutdown()
            thread.join()
