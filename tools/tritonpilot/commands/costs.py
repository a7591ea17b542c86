"""`tritonpilot costs`: what do requests and executions of a service cost here? Measured once, for what simulates.

app.command("costs", epilog=EPILOG)(command)
known = measure(service, models, cpus=[0], save=Path("build/costs-ctr.json"))
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Optional

import typer

from tritonpilot import setting as settings
from tritonpilot import spec
from tritonpilot.commands.options import MODELS, Cpus, Json, Models, cpu_list, narrate
from tritonpilot.costs import Costs
from tritonpilot.errors import HostError
from tritonpilot.profile import profile
from tritonpilot.setting import Setting
from tritonpilot.spec import Service
from tritonpilot.stage import Stage
from tritonpilot.tune.wish import runs_on_cpu

EPILOG = "Example: tritonpilot costs ctr --file ctr.costs.json --cpus 0"


def command(
    name: Annotated[str, typer.Argument(help="Service, or one model of a pipeline (image_net).", metavar="SERVICE")],
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where they go. Default: build/costs-SERVICE.json."),
    ] = None,
    cpus: Cpus = "",
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Measure, for a few seconds on a real server, what requests and executions cost: for `simulate`, `plan` and `autopilot`."""
    service = settings.find(spec.load_services(models), name)
    found = measure(service, models, cpu_list(cpus), file or Path("build") / f"costs-{service.service}.json")
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))


def measure(service: Service, models: Path, cpus: list[int] | None, save: Path | None) -> Costs:
    """The costs of the service as its file sets it, from a few seconds of a real server, written to `save`.

    Raises HostError before anything is measured when that cannot be written.
    """
    if save is not None:
        check_writable(save)
    setting = Setting.of(service)
    with Stage(service, models, cpus=cpus, on_progress=narrate) as stage:
        stage.apply(setting)
        found = profile(
            stage.server,
            stage.model,
            stage.samples,
            max_batch_size=max(1, setting.max_batch_size),
            cores=len(cpus) if cpus else len(os.sched_getaffinity(0)),
            is_on_cpu=runs_on_cpu(service),
            on_progress=narrate,
        ).costs
    if save is not None:
        found.write(save)
        narrate(f"the costs are in {save}")
    return found


def check_writable(path: Path) -> None:
    """Make the folder of a file where it is not there. Raises HostError when the file cannot be written."""
    folder = path.resolve().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = (
            "is a folder"
            if path.is_dir()
            else None
            if os.access(folder, os.W_OK)
            else "is in a folder without right to write"
        )
    except OSError as error:
        reason = f"has no folder, and none can be made ({error.strerror})"
    if reason is not None:
        raise HostError(f"{path} {reason}, so the costs would be lost. Nothing was measured. Name another file.")
