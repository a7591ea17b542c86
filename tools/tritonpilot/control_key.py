"""The key of Triton's restricted APIs: from TRITONPILOT_CONTROL_KEY, else from a file that only its owner reads."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tritonpilot.errors import HostError

VARIABLE = "TRITONPILOT_CONTROL_KEY"
# A comma, a colon or a space would end the value on tritonserver's command line or in a header.
ACCEPTED = re.compile(r"[A-Za-z0-9._~+/-]{16,256}")


@dataclass(frozen=True)
class ControlKey:
    """The key, and the file that holds it (None: it came from the environment). Its repr hides the value."""

    value: str
    file: Path | None

    def __repr__(self) -> str:
        return f"ControlKey(file={str(self.file)!r})"


def key_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the generated key is: $XDG_STATE_HOME/tritonpilot/control.key, by default under ~/.local/state."""
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "tritonpilot" / "control.key"


def control_key(environ: Mapping[str, str] = os.environ) -> ControlKey:
    """The key to use; generates and keeps one (32 random bytes, file mode 0600) when there is none.

    Raises HostError for a key that Triton cannot take, for a file that others can read, and when the file cannot be written.
    """
    if (given := environ.get(VARIABLE)) is not None:
        if not ACCEPTED.fullmatch(given):
            raise HostError(
                f"{VARIABLE} is set, but is no usable key: 16 to 256 letters, digits or . _ ~ + / - are needed. Nothing was "
                'started. Make one with: python3 -c "import secrets; print(secrets.token_urlsafe(32))"'
            )
        return ControlKey(given, None)
    path = key_file(environ)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _create(path)
        mode, owner = path.stat().st_mode, path.stat().st_uid
        value = path.read_text().strip()
    except OSError as failed:
        raise HostError(
            f"The key of the server's restricted APIs could not be kept in {path}: {failed.strerror}. Nothing was started. Make "
            f"that folder writable, set XDG_STATE_HOME to one that is, or give the key in {VARIABLE}."
        ) from None
    if mode & 0o077 or owner != os.geteuid():
        raise HostError(
            f"{path} can be read or written by others than its owner (mode {mode & 0o777:o}), so the key in it may be known. "
            "Nothing was started. Delete the file, and a new key is made."
        )
    if not ACCEPTED.fullmatch(value):
        raise HostError(f"{path} holds no usable key. Nothing was started. Delete the file, and a new key is made.")
    return ControlKey(value, path)


def _create(path: Path) -> None:
    """Make the file with a new key unless it is there; whole at once, so that two servers that start together agree."""
    if path.exists():
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, f"{secrets.token_urlsafe(32)}\n".encode())
        os.fsync(descriptor)
        os.link(aside, path)  # fails when another was faster
    except FileExistsError:
        return
    finally:
        os.close(descriptor)
        aside.unlink()
