"""The command line: parse, call, print. Results go to stdout (with --json as JSON), the narration to stderr.

Exit codes are those of tritonpilot.errors; 2 is a usage error, 130 is Ctrl-C.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Optional, cast, get_args

import rich
import typer

import tritonpilot
from tritonpilot import build as building
from tritonpilot import demo as demonstration
from tritonpilot import engine as engines
from tritonpilot import optimized, samples, spec, sweep, trtexec
from tritonpilot import repository as repositories
from tritonpilot import top as tops
from tritonpilot.commands import autopilot, costs, guard, load, plan, replay, serve, simulate, supervise, tune
from tritonpilot.commands import swap as swapping
from tritonpilot.commands import sweep as sweeping
from tritonpilot.commands.options import (
    MODELS,
    REPOSITORY,
    Cpus,
    Json,
    KeyFile,
    Models,
    Names,
    Repository,
    TargetOption,
    cpu_list,
    narrate,
    numbers,
    show,
)
from tritonpilot.commands.run import run
from tritonpilot.entry import tenants as tenant_keys
from tritonpilot.errors import PilotError, RepositoryError, ServerError, SpecError
from tritonpilot.measurement import table, to_json
from tritonpilot.pipeline import parts
from tritonpilot.server import EmbeddedServer
from tritonpilot.written import nearest

app = typer.Typer(
    name="tritonpilot",
    help="From one small file per service to a served, batched, measured Triton model.",
    epilog="Example: tritonpilot build --prepare && tritonpilot serve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

tenants = typer.Typer(help="API keys and the tenants file of the entry.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(tenants, name="tenants")


def main() -> NoReturn:
    """Entry point of the `tritonpilot` command."""
    run(app)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Handle the options that come before a command."""
    if show:
        print(tritonpilot.__version__)
        raise typer.Exit


@app.command(epilog="Example: tritonpilot build ctr --prepare --target cpu")
def build(
    names: Names = None,
    models: Models = MODELS,
    repository: Repository = REPOSITORY,
    target: TargetOption = "auto",
    prepare: Annotated[bool, typer.Option("--prepare", help="Train or export model files that are missing.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 6 when the repository differs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; print what would be done.")] = False,
    optimize: Annotated[
        bool, typer.Option(help="Keep copies of ONNX models that are optimized for this CPU: a server starts sooner.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Write the model repository from the service files (only what changed, each model in one step)."""
    services = spec.load_services(models, names or [])
    everything = spec.load_services(models)  # a pipeline is checked against the services that it names
    if prepare and not (check or dry_run):
        building.prepare(services, target, narrate, everything)
    elif prepare and dry_run:
        pending = building.missing_files(services, target, everything)
        for script, files in pending.items():
            narrate(
                f"{script} would make {', '.join(file.name for file in files)}; what is built of them is known then"
            )
        folders = {script.parent for script in pending}
        services = [
            s
            for s in services
            if not {m.folder for m in building.with_members([s], building.by_name(everything))} & folders
        ]
    plans = building.plan(services, target, everything)
    if check:
        changes = building.check(repository, plans)
    elif dry_run:
        changes = [repositories.compare(repository, folder) for folder in building.folders(plans, repository)]
    else:
        building.check_versions(repository, plans)
        swapping.check_none_under_way(repository, [service.service for service in services])
        changes = repositories.publish(repository, building.folders(plans, repository))
        for note in optimized.write(repository, [change.name for change in changes]) if optimize else ():
            narrate(note)
    if as_json:
        print(json.dumps([change.as_dict() for change in changes], indent=2))
    else:
        for change in changes:
            print(change.describe())


@app.command(epilog="Example: tritonpilot entry --tenants tenants.yaml --json")
def entry(
    tenants_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--tenants", help="Who may call, and how much (docs/tenants.md); default: everybody."),
    ] = None,
    triton_http: Annotated[str, typer.Option(help="Triton's HTTP service.")] = "127.0.0.1:8000",
    triton_grpc: Annotated[str, typer.Option(help="Triton's gRPC service.")] = "127.0.0.1:8001",
    host: Annotated[
        str, typer.Option(help="Address to listen on; everything but loopback needs TLS in front.")
    ] = "127.0.0.1",
    http_port: Annotated[int, typer.Option(help="HTTP port; 0 picks a free one.", min=0, max=65535)] = 8100,
    grpc_port: Annotated[int, typer.Option(help="gRPC port; 0 picks a free one.", min=0, max=65535)] = 8101,
    metrics_port: Annotated[int, typer.Option(help="Metrics port; 0 picks a free one.", min=0, max=65535)] = 8102,
    max_request_mb: Annotated[int, typer.Option(help="Largest request in MiB.", min=1, max=2047)] = 64,
    cpus: Cpus = "",
    as_json: Json = False,
) -> None:
    """Stand between callers and a Triton: classes with floors, tenants, deadlines, and quick refusals under overload."""
    from tritonpilot.entry import app as entries  # the event loop and its friends, which no other command needs

    chosen = cpu_list(cpus)
    if chosen:
        try:
            os.sched_setaffinity(0, chosen)
        except OSError as error:
            raise typer.BadParameter(f"this process cannot run on {cpus}: {error}", param_hint="--cpus") from None
    settings = entries.Settings(
        triton_http, triton_grpc, host, http_port, grpc_port, metrics_port, tenants_file, max_request_mb << 20
    )

    def ready(endpoints: entries.Endpoints) -> None:
        found: dict[str, str] = dataclasses.asdict(endpoints)
        if as_json:
            print(json.dumps({"endpoints": found, "pid": os.getpid()}), flush=True)
        else:
            for name, endpoint in found.items():
                print(f"{name:8} {endpoint}", flush=True)
            narrate("the entry is open; Ctrl-C closes it")

    received = entries.run(settings, ready, narrate)
    raise typer.Exit(130 if received == signal.SIGINT else 0)


@app.command(epilog="Example: tritonpilot watch --once; tritonpilot watch --json")
def watch(
    triton_grpc: Annotated[str, typer.Option(help="Triton's gRPC service.")] = "127.0.0.1:8001",
    repository: Repository = REPOSITORY,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Metrics port; 0 picks a free one.", min=0, max=65535)] = 8103,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds from look to look.", min=0.5, max=3600, metavar="SECONDS")
    ] = 5.0,
    control_key_file: KeyFile = None,
    models: Models = MODELS,
    is_once: Annotated[bool, typer.Option("--once", help="Look once; exit 9 when something is wrong.")] = False,
    as_json: Json = False,
) -> None:
    """Ask every loaded model for a real inference every few seconds, and tell Prometheus (docs/metrics.md)."""
    from tritonpilot import watch as watching

    if repository != REPOSITORY and not repository.is_dir():  # a typo: models would get zeros
        raise RepositoryError(
            f"There is no model repository at {repository}. Nothing was started. Name the one that Triton serves, or leave "
            "--repository out: models are asked with zeros then."
        )
    settings = watching.Settings(
        triton_grpc,
        repository if repository.is_dir() else None,
        probe_inputs=building.probe_inputs(models, repository),
        key=watching.control_key(control_key_file),
        host=host,
        port=port,
        every_s=every_s,
    )
    if is_once:
        report = watching.once(settings)
        if as_json:
            print(json.dumps({"is_well": report.is_well, **dataclasses.asdict(report)}))
        else:
            print("\n".join(watching.lines(report)))
        raise typer.Exit(0 if report.is_well else ServerError.exit_code)

    def ready(endpoints: watching.Endpoints) -> None:
        if as_json:
            print(json.dumps({"endpoints": dataclasses.asdict(endpoints), "pid": os.getpid()}), flush=True)
        else:
            print(f"metrics  {endpoints.metrics}", flush=True)
            narrate("watching; Ctrl-C ends it")

    received = watching.run(settings, ready, narrate)
    raise typer.Exit(130 if received == signal.SIGINT else 0)


@tenants.command("new-key", epilog="Example: tritonpilot tenants new-key")
def new_key(as_json: Json = False) -> None:
    """Make an API key: give the key to the tenant, put its hash into the tenants file."""
    key = tenant_keys.new_key()
    facts = {"key": key, "hash": tenant_keys.hash_key(key)}
    print(json.dumps(facts) if as_json else "\n".join(f"{name:5} {value}" for name, value in facts.items()))


@tenants.command("hash-key", epilog="Example: tritonpilot tenants hash-key < key.txt")
def hash_key() -> None:
    """Print the hash of a key that is read from standard input, so that it stays out of the shell's history."""
    try:
        print(tenant_keys.hash_key(sys.stdin.read().strip()))
    except ValueError as error:
        raise SpecError(f"{error}. Nothing was hashed.") from None


@tenants.command("check", epilog="Example: tritonpilot tenants check tenants.yaml")
def check_tenants(file: Annotated[Path, typer.Argument(help="Tenants file.")]) -> None:
    """Read a tenants file and say what is in it, or what is wrong with it (exit 3)."""
    for tenant in tenant_keys.KeyFile(file, time.monotonic, narrate).current:
        rate = f"{tenant.bucket.rate_per_s:g} rows/s" if tenant.bucket is not None else "any rate"
        most = f"{tenant.concurrency} at once" if tenant.concurrency is not None else "any number at once"
        print(f"{tenant.name}: {rate}, {most}")


@app.command(epilog="Example: tritonpilot quantize ctr && tritonpilot quantize text")
def quantize(
    name: Annotated[str, typer.Argument(help="Service, or one model of a pipeline (text_net).", metavar="NAME")],
    only: Annotated[
        str, typer.Option(help="Choose calibration rows from one slice alone, e.g. grade=B.", metavar="SLICE=VALUE")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Go on with rows that do not cover production.")] = False,
    seed: Annotated[int, typer.Option(help="Of the choice of rows.", min=0)] = 0,
    seconds: Annotated[
        float, typer.Option(help="How long each candidate is measured at each batch size.", min=0.1)
    ] = 2.0,
    runtime: Annotated[
        Literal["cpu", "tensorrt"],
        typer.Option(help="Where it is to run: this kind of CPU, or TensorRT (then see `tritonpilot engine`)."),
    ] = "cpu",
    precision: Annotated[
        Literal["int8", "fp16", "bf16"], typer.Option(help="INT8, or half precision for GPUs (model.fp16.onnx).")
    ] = "int8",
    keep: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--keep", help="With --precision fp16: a node that stays FP32 (repeatable).", metavar="NODE"),
    ] = None,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Make an INT8 model that is proved accurate and faster (ONNX, `quantize` in the service file), or say why FP32 stays."""
    from tritonpilot.quantize import run as quantizing  # imports ONNX Runtime's tools and the plotting library

    slice_name, _, value = only.partition("=")
    if only and not (slice_name and value):
        raise typer.BadParameter(f"{only!r} is not SLICE=VALUE", param_hint="--only")
    found = []
    failed: PilotError | None = None
    parts_of_it = _quantised_parts(spec.load_services(models), name)
    for part in parts_of_it:
        try:
            wanted = part.model.quantize if part.model is not None else None
            if wanted is not None and wanted.prepare is not None:
                files = [part.folder / wanted.calibration, part.folder / wanted.evaluation]
                building.run_script(part.folder / wanted.prepare, files, narrate)
            if precision != "int8":
                found.append(quantizing.halve(part, narrate, precision, keep=frozenset(keep or []), seconds=seconds))
                continue
            found.append(
                quantizing.quantize(
                    part,
                    narrate,
                    only=(slice_name, value) if only else None,
                    is_forced=force,
                    seed=seed,
                    seconds=seconds,
                    runtime=runtime,
                )
            )
        except PilotError as error:  # the other models of a pipeline are not to blame
            failed = error
            if len(parts_of_it) > 1:
                narrate(f"{part.service}: {error}")
    if as_json:
        shown = [{"model": each.model, "file": str(each.path) if each.path else None, **each.figures} for each in found]
        print(json.dumps(shown, indent=2))
    for each in found if not as_json else []:
        print(f"{each.model}: {each.reason}")
        if each.path is not None:
            picture = f" and {each.path.with_suffix('.html').name}" if precision == "int8" else ""
            print(f"  {each.path}, its manifest {each.path.with_suffix('.json').name}{picture}")
    if failed is not None:
        raise failed


@app.command(epilog="Example: tritonpilot engine ctr --precision fp16")
def engine(
    name: Annotated[str, typer.Argument(help="Service, or one model of a pipeline (text_net).", metavar="NAME")],
    precision: Annotated[str, typer.Option(help="auto (as the ONNX file is), fp32, fp16 or int8.")] = "auto",
    onnx: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Another ONNX file of the same signature, e.g. the quantised one."),
    ] = None,
    ranges: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--range", help="Variable dimensions of an input: NAME=MIN:OPT:MAX[,MIN:OPT:MAX]."),
    ] = None,
    opt_batch: Annotated[
        int, typer.Option(help="Batch that kernels are chosen for; 0: as the service says.", min=0)
    ] = 0,
    calibration: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help=".npz of rows for TensorRT's own INT8 calibrator (before 11)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build although the plan that is there is still right.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, build nothing.")] = False,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Build a TensorRT plan on a machine with a GPU, with trtexec from PATH or the container (docs/tensorrt.md)."""
    if precision not in get_args(trtexec.Precision):
        raise typer.BadParameter(
            f"{precision!r} is none of {', '.join(get_args(trtexec.Precision))}", param_hint="--precision"
        )
    chosen = trtexec.find_service(spec.load_services(models), name)
    options = trtexec.EngineOptions(
        precision=cast(trtexec.Precision, precision),
        onnx=onnx,
        ranges=dict(trtexec.parse_range(each) for each in ranges or []),
        opt_batch=opt_batch or None,
        calibration=calibration,
        force=force,
    )
    if dry_run:
        print("\n".join(engines.preview(chosen, options)))
        return
    result = engines.build_engine(chosen, options, narrate)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
        return
    print(result.describe())
    if result.service_lines:
        print(f"{chosen.path} has to say:\n{result.service_lines}")


@app.command(epilog="Example: tritonpilot measure ctr --concurrency 1,4,16,64")
def measure(
    service: Annotated[str, typer.Argument(help="Service to measure.")],
    concurrency: Annotated[str, typer.Option(help="Requests in flight, a list (closed loop).")] = "1,4,16,64",
    rate: Annotated[str, typer.Option(help="Requests per second, a list (open loop), instead of --concurrency.")] = "",
    batch: Annotated[int, typer.Option(help="Rows per request.", min=1)] = 1,
    grpc: Annotated[str, typer.Option(help="gRPC endpoint of a running Triton; default: start one.")] = "",
    priority: Annotated[int, typer.Option(help="Priority level of the requests; 0: the default class.", min=0)] = 0,
    server_cpus: Annotated[str, typer.Option(help="Pin the started server.", metavar="LIST")] = "",
    cpus: Cpus = "",
    models: Models = MODELS,
    repository: Repository = REPOSITORY,
    as_json: Json = False,
) -> None:
    """Measure a service with perf_analyzer and real sample rows: one row of results per load."""
    (chosen,) = spec.load_services(models, [service])
    if chosen.samples is None:
        raise SpecError(
            f"{chosen.path} names no samples, which a measurement sends. Set `samples` of the model or pipeline."
        )
    rows = samples.read(chosen.samples)
    wanted: dict[str, Any] = {
        "concurrencies": [] if rate else numbers(concurrency, "--concurrency", int),
        "rates_per_s": numbers(rate, "--rate", float) if rate else [],
        "batch": batch,
        "parameters": {"priority": priority} if priority else None,
        "cpus": cpu_list(cpus),
        "on_progress": narrate,
    }
    if grpc:
        points = list(sweep.measure(grpc, service, rows, **wanted))
    else:
        probes = building.probe_inputs(models, repository)
        with EmbeddedServer(
            repository, models=[service], cpus=cpu_list(server_cpus), probe_inputs=probes, on_progress=narrate
        ) as server:
            points = list(sweep.measure(server.endpoints.grpc, service, rows, **wanted))
            server.check_alive()
    if as_json:
        print(to_json(points))
    else:
        show(lambda _: [table(points, title=f"{service}, {batch} row{'s' * (batch > 1)} per request")])


app.command("serve", epilog=serve.EPILOG)(serve.command)
app.command("autopilot", epilog=autopilot.EPILOG)(autopilot.command)
app.command("swap", epilog=swapping.SWAP_EPILOG)(swapping.swap)
app.command("rollback", epilog=swapping.ROLLBACK_EPILOG)(swapping.rollback)
app.command("supervise", epilog=supervise.EPILOG)(supervise.command)
app.command("costs", epilog=costs.EPILOG)(costs.command)
app.command("guard", epilog=guard.EPILOG)(guard.command)
app.command("load", epilog=load.EPILOG)(load.command)
app.command("sweep", epilog=sweeping.EPILOG)(sweeping.command)
app.command("simulate", epilog=simulate.EPILOG)(simulate.command)
app.command("tune", epilog=tune.EPILOG)(tune.command)
app.command("plan", epilog=plan.EPILOG)(plan.command)
app.command("replay", epilog=replay.EPILOG)(replay.command)


@app.command(epilog="Example: tritonpilot top --entry 127.0.0.1:8102; tritonpilot top --once --json")
def top(
    metrics: Annotated[str, typer.Option(help="Triton's metrics.", metavar="HOST:PORT")] = "127.0.0.1:8002",
    http: Annotated[
        str, typer.Option(help="Triton's HTTP service, for instances; '' does without.", metavar="HOST:PORT")
    ] = "127.0.0.1:8000",
    entry: Annotated[
        str, typer.Option(help="Metrics of an entry in front of it, for classes.", metavar="HOST:PORT")
    ] = "",
    interval: Annotated[float, typer.Option(help="Seconds from view to view.", min=0.1, max=3600)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view and end.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a running Triton does: requests, latency, queues, batches and rejections, model by model. Needs no Prometheus."""
    views = tops.views(tops.Endpoints(metrics, http, entry), interval)
    console = rich.get_console()
    try:
        if console.is_terminal and not (console.is_dumb_terminal or once or as_json):
            tops.show(views, console)
        for view in views:
            if as_json:
                print(json.dumps(view.as_dict(), indent=2 if once else None), flush=True)
            else:
                show(lambda width, view=view: [tops.render(view, width)])  # type: ignore[misc]
            if once:
                break
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command(epilog="Example: tritonpilot report --last 1h --html report.html")
def report(
    prometheus: Annotated[str, typer.Option(help="Prometheus that scrapes Triton.")] = "http://127.0.0.1:9090",
    last: Annotated[str, typer.Option(help="Length of the range: 90s, 30m, 1h, 7d. Default: 1h.")] = "",
    start: Annotated[str, typer.Option("--from", help="Its begin instead, e.g. 2026-05-04T13:30.")] = "",
    end: Annotated[str, typer.Option("--to", help="Its end; default: now.")] = "",
    model: Annotated[str, typer.Option(help="This model alone.")] = "",
    page: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", help="Write a page with curves as well."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Report a time range from Prometheus: requests, latency, goodput, queues, batches, memory, GPUs, alerts."""
    from tritonpilot import report as reports  # imports an HTTP library

    source = reports.Source(prometheus)
    found = source.report(*source.range(last=last if last or start else "1h", start=start, end=end), model=model)
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        show(lambda width: reports.render(found, width))
    if page is not None:
        reports.html(found, source.series(found), page)
        narrate(f"wrote {page}")


@app.command(epilog="Example: tritonpilot demo --json")
def demo(models: Models = MODELS, repository: Repository = REPOSITORY, as_json: Json = False) -> None:
    """Train what is missing, build, serve, infer and measure the example services."""
    result = demonstration.run(models, repository, narrate)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        title = f"{demonstration.MEASURED}, 1 row per request, perf_analyzer over gRPC"
        show(lambda _: [table(result.points, title=title)])
        print(f"Done in {result.seconds:.0f} s. Next, leave a server running and call it with any Triton client:")
        print(f"  {sys.argv[0]} serve")


@app.command(epilog="Example: tritonpilot schema > docs/service.schema.json")
def schema() -> None:
    """Print the JSON Schema of service.yaml, for editors."""
    print(json.dumps(spec.json_schema(), indent=2))


def _quantised_parts(services: list[spec.Service], name: str) -> list[spec.Service]:
    """The models with a `quantize` that a service, or one of its models, is called by that name."""
    everything = [(service.service, part) for service in services for part in parts(service)]
    named = [part for service, part in everything if name in (service, part.service)]
    if not named:
        known = sorted({service.service for service in services})
        raise SpecError(f"There is no service or model {name}{nearest(name, known)}. Nothing was changed.")
    chosen = [part for part in named if part.model is not None and part.model.quantize is not None]
    if not chosen:
        raise SpecError(
            f"{named[0].path}: no model of {name} says `quantize`. Nothing was changed. Give it calibration and evaluation "
            "rows (docs/quantization.md)."
        )
    return chosen
