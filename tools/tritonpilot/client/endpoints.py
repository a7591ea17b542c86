"""Which server is asked next? Pure decisions over what is known of each endpoint.

    endpoint = choose(endpoints, now=time.monotonic(), avoid=())

The fewest requests in flight win, the turn decides between equals. An endpoint that failed is left out for a while, longer
each time; then one request tries it, and its answer brings it back.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tritonpilot.client.errors import InputError

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
DEFAULT_SCHEME = "http"  # cheaper for the server and for the client, measured: docs/client.md
PORTS = {"http": 8000, "https": 443, "grpc": 8001, "grpcs": 443}


@dataclass
class Endpoint:
    """One server, as "http://host:port", and how it did so far."""

    scheme: str
    host: str
    port: int
    in_flight: int = 0
    turn: int = 0  # when it was last chosen
    failures: int = 0  # since its last answer
    out_until: float = 0.0
    is_proven: bool = False  # it has answered since the last failure

    @property
    def address(self) -> str:
        """ "host:port", an IPv6 host in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(url: str) -> Endpoint:
    """An endpoint from "host:port", "http://host:port", "https://", "grpc://" or "grpcs://"; InputError otherwise."""
    split = urlsplit(url if "://" in url else f"{DEFAULT_SCHEME}://{url}")
    try:
        port = split.port
    except ValueError:
        port = -1
    if split.scheme not in PORTS or not split.hostname or port == -1 or split.path.strip("/") or split.query:
        raise InputError(
            f"{url!r} is no endpoint. Nothing was sent. Give one as host:port, or as a URL of a scheme among "
            f"{', '.join(PORTS)} without a path.",
            "endpoints",
        )
    return Endpoint(split.scheme, split.hostname, port or PORTS[split.scheme])


def choose(endpoints: Sequence[Endpoint], *, now: float, avoid: Collection[int] = ()) -> Endpoint:
    """The endpoint for the next request. `avoid` has the ids of those that refused this one already."""
    usable = [each for each in endpoints if each.out_until <= now and not (each.failures and each.in_flight)]
    fresh = [each for each in usable if id(each) not in avoid]
    candidates = fresh or usable
    if not candidates:  # all are out: the one that comes back first, since waiting helps nobody
        chosen = min(endpoints, key=lambda each: (id(each) in avoid, each.out_until, each.turn))
    else:
        chosen = min(candidates, key=lambda each: (each.in_flight, each.turn))
    chosen.turn = max(each.turn for each in endpoints) + 1
    return chosen


def has_other(endpoints: Sequence[Endpoint], *, now: float, avoid: Collection[int]) -> bool:
    """Whether an endpoint that did not refuse this request yet can be asked."""
    return any(each.out_until <= now and id(each) not in avoid for each in endpoints)


def answered(endpoint: Endpoint) -> None:
    """It lives: whatever it failed before is forgotten."""
    endpoint.failures, endpoint.out_until, endpoint.is_proven = 0, 0.0, True


def failed(endpoint: Endpoint, *, now: float) -> None:
    """It could not be reached, or broke the connection: leave it out for a while, twice as long each time in a row."""
    if endpoint.out_until > now:
        return  # requests that were on the way together fail together, and count once
    endpoint.failures += 1
    endpoint.is_proven = False
    endpoint.out_until = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (endpoint.failures - 1))
