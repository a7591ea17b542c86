"""`tritonpilot sweep`: measure a service over a grid of settings and loads, and say which of them its SLO wants."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, cast

import typer

from tritonpilot import columns, machine, perf_analyzer_binary, spec
from tritonpilot import setting as settings
from tritonpilot.commands.options import (
    MODELS,
    Cpus,
    Json,
    Models,
    TargetOption,
    cpu_list,
    finite,
    narrate,
    numbers,
    show,
)
from tritonpilot.emulated import labelled
from tritonpilot.errors import HostError, MeasurementError
from tritonpilot.grid import Effort, Grid, Row, Store, Trial, choose, keys, run
from tritonpilot.grid import report as reports
from tritonpilot.grid.measure import Tool
from tritonpilot.grid.plan import CONCURRENCIES
from tritonpilot.grid.row import COLUMNS
from tritonpilot.machine import Limits
from tritonpilot.setting import PRECISIONS, Precision, Setting
from tritonpilot.spec import Service
from tritonpilot.stage import Stage

EPILOG = "Example: tritonpilot sweep ctr --delay-us 0,500,2000 --max-batch 64,256 --concurrency 1,16,64"
VERSIONS_OF = ("tritonpilot", "nvidia-pytriton", "tritonclient", "onnxruntime", "numpy")


def command(
    service: Annotated[str, typer.Argument(help="Service, or one model of a pipeline (image_net).", metavar="NAME")],
    delay_us: Annotated[str, typer.Option(help="Queue delays, microseconds.", metavar="LIST")] = "",
    max_batch: Annotated[str, typer.Option(help="Maximum batch sizes.", metavar="LIST")] = "",
    instances: Annotated[str, typer.Option(help="Numbers of instances.", metavar="LIST")] = "",
    threads: Annotated[str, typer.Option(help="Threads of one run; 0: the runtime's choice.", metavar="LIST")] = "",
    precision: Annotated[
        str, typer.Option(help="Of fp32, fp16, bf16, int8, where they are made.", metavar="LIST")
    ] = "",
    concurrency: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Requests in flight (closed loop); default: 1,4,16,64.", metavar="LIST"),
    ] = None,
    rate: Annotated[
        str, typer.Option(help="Requests per second (open loop), instead of --concurrency.", metavar="LIST")
    ] = "",
    rows: Annotated[str, typer.Option(help="Rows per request.", metavar="LIST")] = "1",
    slo_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="P99 that is promised; default: that of the service's default class.", min=0.001, callback=finite
        ),
    ] = None,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="Folder of points and reports; default: build/sweep-NAME. A sweep that was ended goes on there."
        ),
    ] = None,
    again: Annotated[
        Literal["", "noisy", "all"],
        typer.Option(help="Measure known points again: those with a remark (noisy, unsettled, another tool), or all."),
    ] = "",
    window_ms: Annotated[
        int, typer.Option(help="Length of a measurement window; an attempt has three.", min=100)
    ] = 1500,
    attempts: Annotated[
        int, typer.Option(help="Attempts at most for a point that does not settle.", min=1, max=20)
    ] = 3,
    throughput_pct: Annotated[
        float,
        typer.Option(
            help="Settled: 95 % interval of throughput, at most this far from its mean.", min=0.1, callback=finite
        ),
    ] = 5.0,
    p99_pct: Annotated[float, typer.Option(help="The same of P99.", min=0.1, callback=finite)] = 15.0,
    protocol: Annotated[Literal["grpc", "http"], typer.Option(help="How requests are sent.")] = "grpc",
    tool: Annotated[
        Literal["perf_analyzer", "load"],
        typer.Option(help="What sends them; load takes over where perf_analyzer fails."),
    ] = "perf_analyzer",
    server_cpus: Annotated[str, typer.Option(help="Pin the server.", metavar="LIST")] = "",
    cpus: Cpus = "",
    target: TargetOption = "auto",
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Measure a service over a grid of settings and loads on a server of its own; resumes, reports, recommends."""
    chosen = settings.find(spec.load_services(models), service)
    trials = Grid(
        queue_delays_us=_counts(delay_us, "--delay-us", 0),
        max_batch_sizes=_counts(max_batch, "--max-batch", 0),
        instances=_counts(instances, "--instances", 1),
        threads=_counts(threads, "--threads", 0),
        precisions=_precisions(precision),
        rows=_counts(rows, "--rows", 1),
        **_loads(concurrency, rate),
    ).trials(chosen)
    client_cpus, pinned = cpu_list(cpus), cpu_list(server_cpus, "--server-cpus")
    effort = Effort(
        window_ms=window_ms,
        attempts=attempts,
        throughput_pct=throughput_pct,
        p99_pct=p99_pct,
        protocol=protocol,
        cpus=tuple(client_cpus or ()),
        limits=Limits(),
    )
    sender = _tool(tool)
    if sender == "load" and protocol != "grpc" and not rate:
        raise typer.BadParameter(
            "tritonpilot's own load keeps requests in flight over gRPC alone; give --rate, or --protocol grpc",
            param_hint="--protocol",
        )
    conditions = _conditions(effort, sender, server_cpus)
    store = Store(output or Path("build") / f"sweep-{chosen.service}")
    reports.check(store)
    names = keys(chosen, trials, conditions, target)
    known = {} if again == "all" else store.rows(names)
    if again == "noisy":
        known = {trial: row for trial, row in known.items() if not row.remark(sender)}
    if known:
        narrate(f"{len(known)} of {len(trials)} points are known from {store.file}; --again all would measure them too")
        others = sum(row.tool != sender for row in known.values())
        if others:
            narrate(
                f"{sender} failed at {others} of them, so `tritonpilot load` measured; --again noisy tries {sender} again"
            )
    _warn_of_cores(trials, pinned)
    with Stage(chosen, models, cpus=pinned, target=target, on_progress=narrate) as stage:
        stage.samples  # noqa: B018 -- a service without samples is refused before anything is started
        found: list[Row] = []
        try:
            found += run(
                stage,
                trials,
                known=known,
                keep=lambda row: store.add(names[row.trial], row),
                effort=effort,
                tool=sender,
                on_progress=narrate,
            )
        except KeyboardInterrupt:
            kept = len(store.rows(names))
            narrate(
                f"ended; {kept} of {len(trials)} points are kept in {store.file}, and the same command goes on there"
            )
            raise
    limit_ms = slo_ms if slo_ms is not None else _promise_ms(chosen)
    promised = chosen.slo.rate_per_s if chosen.slo is not None else None
    choice = choose(found, slo_ms=limit_ms, now=Setting.of(chosen), rate_per_s=promised)
    facts = {"command": f"tritonpilot sweep {service}", **conditions}
    result = reports.Result(labelled(chosen), found, choice, limit_ms, facts)
    written = reports.write(result, store)
    if as_json:
        print(json.dumps(result.as_dict(), indent=2, allow_nan=False))
    else:
        title = f"{labelled(chosen)}, {len(found)} point{'s' * (len(found) != 1)}"
        show(lambda width: [columns.table(COLUMNS, [row.cells() for row in found], title=title, width=width)])
        for row in found:
            if row.notes or row.failure:
                print(f"{row.trial.describe()}: {'; '.join([*row.notes, *([row.failure] if row.failure else [])])}")
        print(f"{'Recommended: ' if choice.row is not None else ''}{choice.reason}")
    narrate(f"wrote {', '.join(written)} in {store.folder}")
    if all(row.point is None for row in found):
        raise MeasurementError(f"No point of the sweep has a figure. The first one: {found[0].failure}")


def _conditions(effort: Effort, tool: Tool, server_cpus: str) -> dict[str, Any]:
    """What figures depend on besides the model and its setting."""
    versions = {}
    for name in VERSIONS_OF:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "machine": machine.describe(),
        "versions": versions,
        "tool": tool,
        "protocol": effort.protocol,
        "window_ms": effort.window_ms,
        "server_cpus": server_cpus or "all",
        "client_cpus": ",".join(map(str, effort.cpus)) or "all",
    }


def _tool(wanted: Tool) -> Tool:
    """The tool that runs here: without perf_analyzer our own load measures, and that is said once."""
    if wanted == "perf_analyzer":
        try:
            perf_analyzer_binary.find()
        except HostError as error:
            narrate(
                f"{str(error).partition('. ')[0]}. `tritonpilot load` measures instead, which costs a client in Python."
            )
            return "load"
    return wanted


def _loads(concurrency: str | None, rate: str) -> dict[str, Any]:
    """The axes of Grid for the load: one of the two."""
    if rate and concurrency is not None:
        raise typer.BadParameter("give requests in flight or --rate, not both", param_hint="--concurrency")
    if rate:
        return {"concurrencies": (), "rates_per_s": tuple(numbers(rate, "--rate", float))}
    found = CONCURRENCIES if concurrency is None else tuple(numbers(concurrency, "--concurrency", int))
    return {"concurrencies": found}


def _warn_of_cores(trials: Sequence[Trial], server_cpus: Sequence[int] | None) -> None:
    cores = len(server_cpus or os.sched_getaffinity(0))
    most = max((trial.setting for trial in trials), key=lambda setting: setting.instances * max(1, setting.threads))
    if most.instances * most.threads > cores:
        narrate(f"mind that {most.describe()} is more threads than the server's {cores} core{'s' * (cores > 1)}")


def _promise_ms(service: Service) -> float | None:
    """P99 that is promised to the default class, or to all."""
    for each in service.classes:
        if each.priority == service.default_priority:
            return service.promise_ms(each)
    return service.slo.p99_ms if service.slo is not None else None


def _counts(text: str, option: str, least: int) -> tuple[int, ...]:
    """A list of whole numbers, as 0,500,2000; nothing for no text. Raises typer.BadParameter."""
    if not text:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < least:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers from {least} on", param_hint=option)
    return found


def _precisions(text: str) -> tuple[Precision, ...]:
    if not text:
        return ()
    found = tuple(part.strip() for part in text.split(","))
    unknown = [each for each in found if each not in PRECISIONS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(PRECISIONS)}", param_hint="--precision")
    return cast("tuple[Precision, ...]", found)
