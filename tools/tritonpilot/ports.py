"""Ports on loopback: find free ones, check given ones, name the process that holds one."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tritonpilot.errors import PortError

LOOPBACK = "127.0.0.1"
_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp
_WILDCARD_OR_LOOPBACK = {
    "00000000",  # 0.0.0.0
    "0100007F",  # 127.0.0.1, in the byte order of this CPU
    "0" * 32,  # ::, which takes the port of IPv4 as well
    "0000000000000000FFFF00000100007F",  # ::ffff:127.0.0.1
    "0000000000000000FFFF000000000000",  # ::ffff:0.0.0.0
}


def choose_ports(wanted: Sequence[int]) -> list[int]:
    """Ports to listen on at 127.0.0.1: a 0 becomes a free one, others are checked. All are distinct.

    Raises PortError when a given one is taken, out of range, not allowed, or given twice. Nothing is reserved: another process
    can take a free port before it is used.

        http, grpc, metrics = choose_ports([8000, 0, 0])
    """
    given = [port for port in wanted if port]
    for port in given:
        if not 0 < port < 65536 or given.count(port) > 1:
            why = "is given twice" if given.count(port) > 1 else "is no port (1 to 65535, or 0 for a free one)"
            raise PortError(f"Port {port} {why}. Nothing was started. Give other ports, or 0 for any free one.")
    with ExitStack() as held:  # held until all are chosen, so that no two are the same
        chosen = {port: held.enter_context(_bind(port)) for port in given}
        free = [held.enter_context(_bind(0)).getsockname()[1] for port in wanted if not port]
    assert len(chosen) + len(free) == len(wanted)
    return [port or free.pop(0) for port in wanted]


def holder(port: int) -> str | None:
    """Who listens on `port` at loopback or at all addresses, IPv4 or IPv6: "process 123 (python3 app.py)"; None: not visible."""
    if (pid := holder_pid(port)) is None:
        return None
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:  # just gone
        return None
    return f"process {pid} ({command[:120]})"


def holder_pid(port: int) -> int | None:
    """The same as a process id."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listeners(Path("/proc/net") / table, port)}
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(descriptor.readlink()) in inodes for descriptor in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:  # of another user, or just gone
            continue
    return None


def port_taken(port: int) -> PortError:
    """The error for a port that is taken, with its holder when this user may see it."""
    who = holder(port)
    by = f"by {who}" if who else "by a process that this user may not see (try `ss -ltnp` as root)"
    return PortError(f"Port {port} is taken {by}. Nothing was started. Stop that process, or give another port or 0.")


def _bind(port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    # As Triton's front ends do: connections in TIME_WAIT of an earlier server do not matter.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((LOOPBACK, port))
        # A bound socket that does not listen lets others bind with SO_REUSEADDR: listening is the real test.
        bound.listen(1)
    except OSError as failed:
        bound.close()
        if failed.errno == errno.EADDRINUSE:
            raise port_taken(port) from None
        if failed.errno == errno.EACCES:
            raise PortError(
                f"Port {port} may not be opened by this user. Nothing was started. Give a port above 1023, or 0."
            ) from None
        raise
    return bound


def _listeners(table: Path, port: int) -> list[str]:
    """The inodes of the sockets that listen on `port`; the lines are documented in proc(5)."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except FileNotFoundError:  # IPv6 is off
        return []
    wanted = f":{port:04X}"
    return [
        row[9] for row in rows if row[3] == _LISTEN and row[1].endswith(wanted) and row[1][:-5] in _WILDCARD_OR_LOOPBACK
    ]
