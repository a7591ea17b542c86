"""A receiver of OpenTelemetry traces: OTLP over HTTP in its JSON form, as tritonserver sends it.

with Receiver() as receiver:
    ...                                      # a server that exports to receiver.url
    traceparent, spans = receiver.first([traceparent], 3)     # when there are three spans or more of its trace
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PATIENCE_S = 20.0


@dataclass(frozen=True)
class Span:
    """One span, IDs in hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    model: str
    state: str  # the trace state, that of the caller


class Receiver:
    """Listens on loopback within a `with` block; `url` stays when it has ended."""

    def __init__(self) -> None:
        spans = self._spans = list[Span]()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                spans.extend(_spans(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def spans(self) -> list[Span]:
        return list(self._spans)

    def first(self, traceparents: Sequence[str], count: int) -> tuple[str, list[Span]]:
        """The first of these contexts whose trace has `count` spans, and them; when patience ends, the first one and its spans."""
        found: dict[str, list[Span]] = {}

        def look() -> bool:
            for each in traceparents:
                found[each] = [span for span in self._spans if span.trace_id == each.split("-")[1]]
            return any(len(spans) >= count for spans in found.values())

        self.until(look)
        return max(found.items(), key=lambda each: len(each[1]) >= count)

    def until(self, claim: Callable[[], bool]) -> bool:
        """Whether `claim` comes true before patience ends."""
        deadline = time.monotonic() + PATIENCE_S
        while not claim() and time.monotonic() < deadline:
            time.sleep(0.02)
        return claim()


def _spans(body: bytes) -> list[Span]:
    found = []
    for resource in json.loads(body)["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                attributes = {each["key"]: each["value"] for each in span.get("attributes", ())}
                model = attributes.get("triton.model_name", {}).get("stringValue", "")
                found.append(
                    Span(
                        span["traceId"],
                        span["spanId"],
                        span.get("parentSpanId", ""),
                        span["name"],
                        model,
                        span.get("traceState", ""),
                    )
                )
    return found
