"""`tritonpilot supervise`: keep a Triton serving.

app.command("supervise", epilog=EPILOG)(command)
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from tritonpilot import build as building
from tritonpilot.commands.options import (
    MODELS,
    REPOSITORY,
    CacheMb,
    Cpus,
    GrpcPort,
    HttpPort,
    Json,
    LoadedModels,
    LogFile,
    Models,
    RateLimit,
    Repository,
    cpu_list,
    narrate,
)
from tritonpilot.errors import RepositoryError, SpecError
from tritonpilot.ports import choose_ports
from tritonpilot.server import EmbeddedServer

if TYPE_CHECKING:
    from tritonpilot.supervise.run import Event
    from tritonpilot.watch import Endpoints

EPILOG = "Example: tritonpilot supervise; tritonpilot supervise --attach 127.0.0.1:8001 --json"


def command(
    repository: Repository = REPOSITORY,
    attach: Annotated[
        str,
        typer.Option(
            help="gRPC service of a Triton that runs already; without it one is started.", metavar="HOST:PORT"
        ),
    ] = "",
    restart_command: Annotated[
        str, typer.Option(help="With --attach: what restarts that Triton, when reloading a model does not help.")
    ] = "",
    model: LoadedModels = None,
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    metrics_port: Annotated[int, typer.Option(help="Triton's metrics port; 0: a free one.", min=0, max=65535)] = 8002,
    cpus: Cpus = "",
    log_file: LogFile = None,
    cache_mb: CacheMb = 0,
    rate_limit: RateLimit = False,
    host: Annotated[str, typer.Option(help="Address of the supervisor's own metrics.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Their port; 0 picks a free one.", min=0, max=65535)] = 8105,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds from look to look.", min=0.2, max=3600, metavar="SECONDS")
    ] = 1.0,
    hang_s: Annotated[
        float,
        typer.Option(
            "--hang", help="A model that answers nobody for so long hangs.", min=0.5, max=600, metavar="SECONDS"
        ),
    ] = 5.0,
    away_s: Annotated[
        float,
        typer.Option("--away", help="Restart a Triton that is silent for so long.", min=1, max=3600, metavar="SECONDS"),
    ] = 10.0,
    stub_mb: Annotated[int, typer.Option(help="Replace a stub that takes more memory; 0: never.", min=0)] = 0,
    control_key_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="With --attach: file with its control key; default: the variable, or the key that `serve` keeps."
        ),
    ] = None,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Keep a Triton serving: replace dead and hung stubs of a model, then the server (docs/healing.md)."""
    from tritonpilot.supervise.run import Settings, run
    from tritonpilot.supervise.servers import Attached, Own
    from tritonpilot.watch import control_key, is_address

    if restart_command and not attach:
        raise typer.BadParameter("a Triton that is started here needs none", param_hint="--restart-command")
    if attach and not is_address(attach):
        raise SpecError(f"--attach is {attach!r}, but must be HOST:PORT, as 127.0.0.1:8001. Nothing was started.")
    if attach and repository != REPOSITORY and not repository.is_dir():  # a typo: models would get zeros
        raise RepositoryError(
            f"There is no model repository at {repository}. Nothing was started. Name the one that Triton serves, or leave "
            "--repository out: models are asked with zeros then."
        )
    inputs = building.probe_inputs(models, repository)
    settings = Settings(
        repository if repository.is_dir() else None,
        inputs,
        host,
        port,
        every_s,
        hang_s,
        away_s,
        stub_mb << 20,
    )
    server: Own | Attached
    if attach:
        server = Attached(attach, control_key(control_key_file), restart_command=restart_command, say=narrate)
    else:
        # NOTE: chosen once, so that it comes back at the same ones.
        http_port, grpc_port, metrics_port = choose_ports([http_port, grpc_port, metrics_port])
        server = Own(
            EmbeddedServer(
                repository,
                models=model or None,
                http_port=http_port,
                grpc_port=grpc_port,
                metrics_port=metrics_port,
                cpus=cpu_list(cpus),
                log_file=log_file,
                rate_limit=rate_limit,
                cache_size_bytes=cache_mb << 20,
                probe_inputs=inputs,
                on_progress=narrate,
            )
        )

    def ready(endpoints: Endpoints) -> None:
        found = server.server.endpoints.as_dict() if isinstance(server, Own) else {"grpc": server.grpc}
        # Triton's own metrics keep their name, as `serve` prints it.
        found["supervisor" if isinstance(server, Own) else "metrics"] = endpoints.metrics
        if as_json:
            facts = {"endpoints": found, "pid": os.getpid(), "tritonserver": server.pid()}
            print(json.dumps(facts), flush=True)
        else:
            for name, endpoint in found.items():
                print(f"{name:10} {endpoint}", flush=True)

    def tell(event: Event) -> None:
        narrate(event.said)
        if as_json:
            print(json.dumps(event.as_dict()), flush=True)

    received = run(settings, server, ready, tell)
    raise typer.Exit(130 if received == signal.SIGINT else 0)
