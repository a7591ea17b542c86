"""The Triton that is kept serving: one that we start ourselves, or one that somebody else runs.

server = Own(EmbeddedServer(...)); server.start()          # brought back by a new start
server = Attached("127.0.0.1:8001", key, restart_command="docker compose restart triton")
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Protocol

from tritonpilot.errors import ServerError
from tritonpilot.ports import holder_pid
from tritonpilot.server import EmbeddedServer

COMMAND_TIMEOUT_S = 300.0
STOP_S = 5.0  # that requests in flight have when the server is restarted for the sake of a model


class Server(Protocol):
    """What the loop asks of it."""

    @property
    def grpc(self) -> str:
        """host:port."""
        ...

    @property
    def key(self) -> str | None:
        """Of its restricted APIs."""
        ...

    @property
    def can_restart(self) -> bool:
        """Whether restart() is there to be called."""
        ...

    def pid(self) -> int:
        """Of tritonserver; 0: it does not run, or its processes cannot be seen from here."""
        ...

    def death(self) -> str:
        """Why it is certain that it does not run, "" where it does or only its answers can tell."""
        ...

    def restart(self) -> None:
        """Bring it back. Raises ServerError or another PilotError."""
        ...


class Own:
    """A tritonserver of our own, at ports that stay."""

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server

    @property
    def grpc(self) -> str:
        """host:port."""
        return self.server.endpoints.grpc

    @property
    def key(self) -> str | None:
        """Of its restricted APIs."""
        return self.server.control_key

    @property
    def can_restart(self) -> bool:
        """Always."""
        return True

    def pid(self) -> int:
        """Of tritonserver; 0: it does not run."""
        return self.server.pid if self.server.is_alive() else 0

    def death(self) -> str:
        """How it died, "" while it runs."""
        try:
            self.server.check_alive()
        except ServerError as died:
            return str(died)
        return ""

    def restart(self) -> None:
        """Stop what is left, remove what it left in /dev/shm, start. Raises what EmbeddedServer.start raises."""
        if self.server.is_alive():
            self.server.request_stop()
            if not self.server.wait(STOP_S):
                self.server.request_stop()  # kills
        self.server.stop()
        self.server.start()


class Attached:
    """A Triton that somebody else starts. Without `restart_command` it is reloaded only: who runs it restarts it."""

    def __init__(
        self, grpc: str, key: str | None, *, restart_command: str = "", say: Callable[[str], None] = lambda _: None
    ) -> None:
        self.grpc = grpc
        self.key = key
        self.can_restart = bool(restart_command)
        self._command = restart_command
        self._say = say

    def pid(self) -> int:
        """Of who listens on its port, where that is on this machine and to be seen."""
        host, _, port = self.grpc.rpartition(":")
        return (holder_pid(int(port)) or 0) if host in ("127.0.0.1", "localhost", "[::1]") else 0

    def death(self) -> str:
        """Not known: it is asked."""
        return ""

    def restart(self) -> None:
        """Run the command. Raises ServerError when it fails."""
        if not self._command:
            raise ServerError(f"Triton at {self.grpc} needs a restart, and there is no --restart-command. Restart it.")
        self._say(f"running: {self._command}")
        try:
            done = subprocess.run(
                self._command,
                shell=True,  # the operator's own line
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"The restart command {self._command!r} did not end within {COMMAND_TIMEOUT_S:g} s and was ended. Triton is as it "
                "left it. Correct --restart-command."
            ) from None
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split())[-300:]
            raise ServerError(
                f"The restart command {self._command!r} ended with code {done.returncode}: {said}. Triton was not restarted. "
                "Correct --restart-command."
            )
