"""What do the parts of a swap say to each other? A candidate, what a check found, who serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tritonpilot.control import Control
from tritonpilot.errors import ModelError

Say = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A service's next version: `members` are the models whose files change, `names` their candidates' and the public one's."""

    service: str
    public: str
    members: Mapping[str, Path]
    version: int
    old_version: int
    names: Mapping[str, str]


@dataclass(frozen=True)
class Finding:
    """What a check says."""

    step: str
    ok: bool
    what: str
    figures: Mapping[str, float] = field(default_factory=dict)


class Check(Protocol):
    """Looks at a loaded candidate; raises nothing for a bad model."""

    @property
    def name(self) -> str: ...

    def run(self, control: Control, candidate: Candidate, say: Say) -> Finding: ...


class ServedAlreadyError(ModelError):
    """A service serves the files already that it was to be given."""


@dataclass(frozen=True)
class Node:
    """One Triton, and the folder that it serves from."""

    grpc: str
    http: str
    repository: Path
