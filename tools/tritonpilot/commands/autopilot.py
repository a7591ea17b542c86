"""`tritonpilot autopilot`: queue delay, instances and class limits of a running Triton follow its traffic.

app.command("autopilot", epilog=EPILOG)(command)
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tritonpilot.commands.options import REPOSITORY, Json, KeyFile, narrate
from tritonpilot.errors import RepositoryError

if TYPE_CHECKING:
    from tritonpilot.autopilot.record import Entry
    from tritonpilot.autopilot.run import Endpoints

EPILOG = "Example: tritonpilot autopilot autopilot.yaml --entry 127.0.0.1:8102 --dry-run"
STATE = Path(".autopilot")


def command(
    policy: Annotated[Path, typer.Argument(help="Policy file (docs/autopilot.md).", metavar="POLICY")],
    triton_grpc: Annotated[str, typer.Option(help="Triton's gRPC service.")] = "127.0.0.1:8001",
    metrics: Annotated[str, typer.Option(help="Triton's page of metrics.")] = "127.0.0.1:8002",
    entry: Annotated[
        str, typer.Option(help="The entry's page of metrics, as 127.0.0.1:8102: P99 and refusals by class.")
    ] = "",
    prometheus: Annotated[
        str, typer.Option(help="A Prometheus that scrapes both; the pages are not read then.", metavar="URL")
    ] = "",
    instance: Annotated[
        str, typer.Option(help="Triton's label `instance`, where that Prometheus scrapes several Tritons.")
    ] = "",
    repository: Annotated[
        Path, typer.Option(help="The model repository that Triton serves, where it can be read.")
    ] = REPOSITORY,
    state: Annotated[
        Path, typer.Option(help="Folder for what is remembered, and the decision log; of one Triton each.")
    ] = STATE,
    control_key_file: KeyFile = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Metrics port; 0 picks a free one.", min=0, max=65535)] = 8104,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide and tell, change nothing.")] = False,
    is_once: Annotated[bool, typer.Option("--once", help="One interval, one decision a model; then end.")] = False,
    wait_for_policy: Annotated[
        bool,
        typer.Option(
            "--wait-for-policy",
            help="Do not end when POLICY is wrong at the start, but wait until it is right: for a container whose end takes others "
            "out of service.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Let queue delay, instances and class limits of a running Triton follow its traffic, within the bounds of a policy file."""
    from tritonpilot.autopilot.act import Actor  # Prometheus' libraries, which no other command needs
    from tritonpilot.autopilot.loop import Settings
    from tritonpilot.autopilot.run import once, run
    from tritonpilot.watch import control_key

    if repository != REPOSITORY and not repository.is_dir():  # a typo
        raise RepositoryError(
            f"There is no model repository at {repository}. Nothing was started. Name the one that Triton serves, or leave "
            "--repository out."
        )
    key = control_key(control_key_file)
    settings = Settings(
        policy,
        state,
        triton_grpc,
        metrics=metrics,
        entry=entry,
        prometheus=prometheus,
        instance=instance,
        host=host,
        port=port,
        is_dry_run=dry_run,
        waits_for_policy=wait_for_policy and not is_once,
    )

    def tell(told: Entry) -> None:
        narrate(told.line())
        if as_json and not is_once:
            print(json.dumps(told.as_dict()), flush=True)

    def ready(endpoints: Endpoints) -> None:
        if as_json:
            print(json.dumps({"endpoints": dataclasses.asdict(endpoints), "pid": os.getpid()}), flush=True)
        else:
            print(f"metrics  {endpoints.metrics}", flush=True)

    folder = repository if repository.is_dir() else None
    with Actor(triton_grpc, key, metrics=metrics, repository=folder) as actor:
        if is_once:
            for decided in once(settings, actor, tell):
                print(json.dumps(decided.as_dict()) if as_json else decided.line())
            return
        received = run(settings, actor, ready, tell)
    raise typer.Exit(130 if received == signal.SIGINT else 0)
