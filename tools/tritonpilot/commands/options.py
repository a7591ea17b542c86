"""What all commands share: options, a voice, and how results are shown.

def command(models: Models = MODELS, as_json: Json = False) -> None: ...
narrate("measuring")          # to stderr; results go to stdout
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from tritonpilot.errors import HostError

if TYPE_CHECKING:
    from rich.console import RenderableType

# One declaration per option: flag, default, help and type.
Models = Annotated[Path, typer.Option("--models", help="Folder with one folder per service.", show_default=True)]
Repository = Annotated[Path, typer.Option("--repository", help="Triton model repository.", show_default=True)]
TargetOption = Annotated[
    Literal[
        "auto", "cpu", "gpu"
    ],  # model_config.Target; its module would be imported by a command that needs none of it
    typer.Option("--target", help="Where instances run: cpu, gpu, or auto (Triton uses GPUs where there are some)."),
]
Names = Annotated[Optional[list[str]], typer.Argument(help="Services; default: all.", metavar="SERVICE")]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
KeyFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="File with Triton's control key; default: the variable, or the key that `serve` keeps."),
]
LoadedModels = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--model", help="Load only this model (repeatable); default: all."),
]
HttpPort = Annotated[int, typer.Option(help="HTTP port; 0 picks a free one.", min=0, max=65535)]
GrpcPort = Annotated[int, typer.Option(help="gRPC port; 0 picks a free one.", min=0, max=65535)]
LogFile = Annotated[Optional[Path], typer.Option(help="Append Triton's log to this file.")]  # noqa: UP045
CacheMb = Annotated[int, typer.Option(help="Size of Triton's response cache; 0: none.", min=0)]
RateLimit = Annotated[bool, typer.Option(help="Switch Triton's rate limiter on.")]
Cpus = Annotated[str, typer.Option("--cpus", help="Pin to these CPUs, e.g. 0 or 0,2 or 0-3.", metavar="LIST")]

MODELS = Path("models")
REPOSITORY = Path("model_repository")
UNLIMITED = 1000


def narrate(line: str) -> None:
    """Tell a person, on stderr, what happens."""
    print(line, file=sys.stderr, flush=True)


def show(render: Callable[[int | None], Iterable[RenderableType]]) -> None:
    """Print as wide as the terminal is; into files and pipes without a limit."""
    import rich
    from rich.console import Console

    console = rich.get_console()
    width = console.width if console.is_terminal else None
    if width is None:
        console = Console(width=UNLIMITED)  # print() takes no width above the console's own, which is 80 here
    for part in render(width):
        console.print(part, crop=False)


def numbers(text: str, option: str, kind: type) -> list[Any]:
    """A list of positive numbers, as 1,4,16. Raises typer.BadParameter."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf for each in found):
        raise typer.BadParameter(f"{text!r} is no list of positive numbers such as 1,4,16", param_hint=option)
    return found


def finite(value: float | None) -> float | None:
    """The callback of an option of type float: refuses NaN and infinity, which `min` and `max` let through."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def cpu_list(text: str, option: str = "--cpus") -> list[int] | None:
    """A list of CPUs, as 0,2-3; None for no text. Raises typer.BadParameter, and HostError where this process may not use one."""
    if not text:
        return None
    allowed = os.sched_getaffinity(0)
    chosen: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            asked = range(int(first), int(last or first) + 1)
        except ValueError:
            asked = range(0)
        if not asked:
            raise typer.BadParameter(f"{text!r} is no list of CPUs such as 0 or 0,2 or 0-3", param_hint=option)
        missing = next((cpu for cpu in asked if cpu not in allowed), None)
        if missing is not None:
            raise HostError(
                f"This process cannot run on {missing}, and {option} {text} asks for that CPU. Nothing was started. Choose among "
                f"{', '.join(map(str, sorted(allowed)))}."
            )
        chosen.update(asked)
    return sorted(chosen)


def weights(text: str, option: str) -> dict[str, float]:
    """Parts, as realtime:9,batch:1. Raises typer.BadParameter."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.partition(":")
        try:
            found[name.strip()] = float(weight)
        except ValueError:
            raise typer.BadParameter(f"{part!r} is not NAME:WEIGHT", param_hint=option) from None
        if not 0 < found[name.strip()] < math.inf:
            raise typer.BadParameter(f"the weight of {name} is not above 0", param_hint=option)
    if not sum(found.values()) < math.inf:
        raise typer.BadParameter("the sum of the weights is no finite number", param_hint=option)
    return found
