"""Where does Prometheus find a process's own metrics? At a port, for as long as a `with` block lasts.

with serving(registry, "127.0.0.1", 8103, "The watch") as address:     # GET http://{address}/metrics
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from tritonpilot.errors import PortError
from tritonpilot.ports import choose_ports


@contextmanager
def serving(registry: CollectorRegistry, host: str, port: int, who: str) -> Iterator[str]:
    """Serve /metrics from a thread; a port of 0 is a free one. Gives host:port. Raises PortError for a port that is taken or a
    host that is not here, in the name of `who`.
    """
    (chosen,) = choose_ports([port])
    try:
        server, thread = start_http_server(chosen, host, registry)
    except OSError as error:
        raise PortError(
            f"{who} cannot listen at {host}: {error.strerror or error}. Nothing was started. Give an address of this machine "
            "with --host."
        ) from None
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
