"""What did this server write, and which of its lines tell a person what went wrong?

log = ServerLog.open(Path("tritonserver.log"))
log.about("ctr")        # Triton's last complaint that names the model
log.telling()           # the last lines that tell something
"""

from __future__ import annotations

import os
import re
from collections import deque
from itertools import takewhile
from pathlib import Path
from typing import BinaryIO

from tritonpilot.errors import HostError

_NOISE = re.compile(  # information, tables, what is normal without a GPU, and Python's import machinery
    r"^[|+]|^I\d{4} |pinned_memory_manager|CudaDriverHelper|CUDA driver version is insufficient|initialize NVML|DCGM|^\s*<frozen "
)


class ServerLog:
    """The log of one server, in a file that may hold earlier ones. Open, as the file goes with the server's folder."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self._file = file
        self._lines: deque[str] = deque(maxlen=5000)
        self._read = 0  # lines in all
        self._told = 0  # of these, by new_lines
        self._rest = b""

    @classmethod
    def open(cls, path: Path) -> ServerLog:
        """The log at `path`, created or continued; what earlier servers wrote stays and is not read.

        Raises HostError when the file cannot be written.
        """
        try:
            file = path.open("ab+")
        except OSError as failed:
            raise HostError(
                f"The log file {path} cannot be written: {failed.strerror}. Nothing was started. "
                "Name another, or none for a temporary one."
            ) from None
        file.seek(0, os.SEEK_END)
        return cls(path, file)

    def lines(self) -> list[str]:
        """The last lines, at most 5000; one that is not finished counts."""
        if not self._file.closed:
            *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
            self._lines.extend(line.decode(errors="replace") for line in whole)
            self._read += len(whole)
        return [*self._lines, *([self._rest.decode(errors="replace")] if self._rest else [])]

    def new_lines(self) -> list[str]:
        """The whole lines since the last call."""
        self.lines()
        new, self._told = self._read - self._told, self._read
        return list(self._lines)[-new:] if new else []

    def close(self) -> None:
        """Read what is there and close the file."""
        self.lines()
        self._file.close()

    def says(self, pattern: str) -> bool:
        """Whether a line matches the regular expression."""
        return any(re.search(pattern, line) for line in self.lines())

    def about(self, model: str) -> str:
        """What Triton last complained of, naming `model`."""
        lines = self.lines()
        complaints = [line for line in lines if line[:1] == "E" and re.search(rf"\b{re.escape(model)}\b", line)]
        if not complaints:
            return ""
        # Where a config.pbtxt cannot be read, protobuf has said where, in the line before.
        *_, parsing = ["", *(line for line in lines if "Error parsing text-format inference.ModelConfig: " in line)]
        at = parsing.partition("inference.ModelConfig: ")[2] if "failed to read text proto" in complaints[-1] else ""
        return f"{_message(complaints[-1])}{': ' if at else ''}{at}"

    def telling(self, most: int = 15) -> list[str]:
        """The last lines that tell something."""
        lines = takewhile(lambda line: not line.startswith("Usage: tritonserver"), self.lines())
        return [_short(line) for line in lines if line.strip() and not _NOISE.search(line)][-most:]


def _message(line: str) -> str:
    return re.sub(r"^E\d{4} \S+ \d+ \S+\] ", "", line).strip('" ')


def _short(line: str, most: int = 300) -> str:
    return line if len(line) <= most else f"{line[:most]} ..."
