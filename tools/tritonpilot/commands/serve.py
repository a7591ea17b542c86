"""`tritonpilot serve`: the repository on a real tritonserver, on loopback, until a signal.

app.command("serve", epilog=EPILOG)(command)
main()                                          # this command alone

Whoever starts a server waits for it, and half a second of that were imports: so this module imports what launches tritonserver,
and the rest (protobuf, gRPC, service files) while Triton loads its models.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer

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
from tritonpilot.commands.run import run
from tritonpilot.server import EmbeddedServer, serve

if TYPE_CHECKING:
    from tritonpilot.control import Inputs

EPILOG = "Example: tritonpilot serve --model ctr --http-port 9000 --json"


def command(
    repository: Repository = REPOSITORY,
    model: LoadedModels = None,
    http_port: HttpPort = 8000,
    grpc_port: GrpcPort = 8001,
    metrics_port: Annotated[int, typer.Option(help="Metrics port; 0 picks a free one.", min=0, max=65535)] = 8002,
    cpus: Cpus = "",
    log_file: LogFile = None,
    strict_config: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            help="Forbid Triton to complete a config.pbtxt, which takes a second and a half. [default: where all are the build's]"
        ),
    ] = None,
    rate_limit: RateLimit = False,
    cache_mb: CacheMb = 0,
    http_threads: Annotated[
        int,
        typer.Option(
            help="Triton's HTTP threads; 0: its default. On one core 1 costs least; load over gRPC then.", min=0
        ),
    ] = 0,
    trace_url: Annotated[
        str,
        typer.Option(
            envvar="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            metavar="URL",
            help="OTLP/HTTP receiver of OpenTelemetry spans, as http://127.0.0.1:4318/v1/traces.",
        ),
    ] = "",
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Serve the repository with a real tritonserver on loopback until Ctrl-C or SIGTERM."""
    server = EmbeddedServer(
        repository,
        models=model or None,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        cpus=cpu_list(cpus),
        log_file=log_file,
        strict_config=strict_config,
        rate_limit=rate_limit,
        cache_size_bytes=cache_mb << 20,
        http_threads=http_threads,
        trace_url=trace_url,
        probe_inputs=lambda: _probe_inputs(models, repository),
        warms_http=True,
        on_progress=narrate,
    )

    def ready(started: EmbeddedServer) -> None:
        facts = started.describe()
        if as_json:
            print(json.dumps(facts), flush=True)
        else:
            for name, endpoint in facts["endpoints"].items():
                print(f"{name:8} {endpoint}", flush=True)
            narrate("serving; Ctrl-C stops")

    received = serve(server, ready)
    narrate("stopped; requests in flight were answered")
    raise typer.Exit(130 if received == signal.SIGINT else 0)


def main() -> NoReturn:
    """The `tritonpilot` command when it was asked to serve."""
    app = typer.Typer(name="tritonpilot", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback()(lambda: None)  # without one, typer takes an only command's name for an argument
    app.command("serve", epilog=EPILOG)(command)
    run(app)


def _probe_inputs(models: Path, repository: Path) -> Mapping[str, Inputs]:
    from tritonpilot.build import probe_inputs

    return probe_inputs(models, repository)
