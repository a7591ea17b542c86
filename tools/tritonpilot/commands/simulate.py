"""`tritonpilot simulate`: what a service's batcher would do with a load, from its configuration and measured costs; no server.

app.command("simulate", epilog=EPILOG)(command)
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer
from rich.table import Table

from tritonpilot import columns, spec
from tritonpilot import setting as settings
from tritonpilot.arrivals import ALL, Stream, check_sizes, traffic
from tritonpilot.columns import Column
from tritonpilot.commands.costs import measure
from tritonpilot.commands.options import MODELS, Json, Models, narrate, show
from tritonpilot.costs import Costs
from tritonpilot.emulated import is_emulated, labelled, noted
from tritonpilot.errors import SpecError
from tritonpilot.load import scenario
from tritonpilot.simulate import Simulated, simulate
from tritonpilot.spec import Service
from tritonpilot.tune.run import batcher_of

EPILOG = "Example: tritonpilot simulate ctr --rate 900 --rate batch=100 --costs costs.json"
MOST_REQUESTS = 20_000_000  # of a replica: their tables take about 200 bytes each
SECONDS = 60.0
BARS, LINES = 40, 12
COLUMNS = (
    Column("rows", "rows of a batch", is_word=True),
    Column("executions", "executions", format="{:,}"),
    Column("bar", "", is_word=True, rank=1),
)


def command(
    what: Annotated[
        str,
        typer.Argument(help="Service, one model of a pipeline (image_net), or a scenario file.", metavar="SERVICE"),
    ],
    rate: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Requests per second, of the default class or as CLASS=RATE (repeatable).", metavar="RATE"),
    ] = None,
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help=f"How long requests come. Default: {SECONDS:g}.", min=0.001, max=86400 * 366),
    ] = None,
    arrivals: Annotated[
        Optional[Literal["poisson", "constant"]],  # noqa: UP045
        typer.Option(help="Gaps between requests. Default: poisson."),
    ] = None,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="CSV of recorded arrivals; with one --rate stretched to it.", metavar="FILE"),
    ] = None,
    rows: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Rows of a request. Default: 1, or what --trace says.", min=1),
    ] = None,
    slo_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="An answer within it is goodput; default: the promise of the class.", min=0.001),
    ] = None,
    costs: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="JSON of measured costs; default: build/costs-SERVICE.json, else measured now.",
            metavar="FILE",
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Servers that share the load, each request going to any.", min=1, max=10**9)
    ] = 1,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Of arrivals and simulation. Default: the scenario's, or 0.", min=0),
    ] = None,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Simulate Triton's dynamic batcher under a load: P99, goodput, batches and utilisation, without a server."""
    services = spec.load_services(models)
    if what.endswith((".yaml", ".yml")):
        options = {"--rate": rate, "--seconds": seconds, "--arrivals": arrivals, "--trace": trace, "--rows": rows}
        beside = [name for name, value in {**options, "--slo-ms": slo_ms}.items() if value is not None]
        if beside:
            raise typer.BadParameter("a scenario file says that itself", param_hint=", ".join(beside))
        asked = scenario.read(Path(what))
        if asked.service is None:
            raise SpecError(
                f"{what} names no service, whose batcher would be simulated. Nothing was simulated. Add `service`."
            )
        service = settings.find(services, asked.service)
        streams, length_s = list(scenario.streams(asked, service)), asked.seconds
        seed = asked.seed if seed is None else seed
    else:
        service = settings.find(services, what)
        if trace is not None and arrivals is not None:
            raise typer.BadParameter("a recording says the gaps itself", param_hint="--arrivals")
        streams, length_s = (
            streams_of(service, rate or [], arrivals or "poisson", trace, rows or 1, slo_ms),
            seconds or SECONDS,
        )
    seed = seed or 0
    batcher = batcher_of(service)
    check_sizes(streams, batcher.max_batch_size)
    load = traffic(streams, length_s, seed, replicas=replicas, most=MOST_REQUESTS)
    if not len(load):
        raise SpecError(
            "No request came within that time. Nothing was simulated. Say a higher --rate or more --seconds."
        )
    known = costs_of(service, models, costs)
    narrate(f"simulating {len(load):,} requests to {labelled(service)} within {length_s:g} s")
    found = simulate(batcher, known, load, streams, seed)
    if as_json:
        said = {
            "service": service.service,
            "is_emulated": is_emulated(service),
            "replicas": replicas,
            "seconds": length_s,
        }
        print(json.dumps({**said, "seed": seed, **found.as_dict()}, indent=2))
        return
    of = f", one of {replicas:,} replicas" if replicas > 1 else ""
    show(lambda width: [found.outcome.table(f"{labelled(service)}{of}"), _sizes(found, width)])
    print(f"\n{noted(service, _in_words(found, known.cores))}")


def _in_words(found: Simulated, cores: int) -> str:
    used = f"{found.cpu_cores:.2f} of {cores} cores"
    if not found.executions:
        return f"Nothing was executed; {used}."
    return (
        f"{found.executions:,} executions of {found.mean_rows:.1f} rows and {found.execution_us / 1e3:.2f} ms; instances "
        f"{found.utilisation:.0%} busy, {used}; {found.queue_us / 1e3:.2f} ms in the queue."
    )


def costs_of(service: Service, models: Path, given: Path | None) -> Costs:
    """Those of a file, else those that are kept, else measured now."""
    kept = Path("build") / f"costs-{service.service}.json"
    if given is not None or kept.exists():
        return Costs.read(given or kept)
    return measure(service, models, None, kept)


def streams_of(
    service: Service,
    rates: list[str],
    arrivals: Literal["poisson", "constant"],
    trace: Path | None,
    rows: int,
    slo_ms: float | None,
) -> list[Stream]:
    """A stream for each rate, with the promise of its class."""
    if not rates and trace is None:
        raise typer.BadParameter("say how many requests come, or --trace", param_hint="--rate")
    if trace is not None and len(rates) > 1:
        raise typer.BadParameter("a recording has one rate", param_hint="--trace")
    default = service.default_class or (service.classes[0].name if service.classes else "")
    found = []
    for text in rates or ["0"]:
        name, _, number = text.rpartition("=")
        try:
            wanted = float(number)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is no rate, nor CLASS=RATE", param_hint="--rate") from None
        if called := name or default:
            caller = scenario.class_of(service, called, "--rate: ")
            priority, promised = caller.priority, service.promise_ms(caller)
        else:
            priority, promised = 0, service.slo.p99_ms if service.slo else None
        found.append(
            Stream(
                name=called or ALL,
                rate_per_s=wanted,
                arrivals="recorded" if trace is not None else arrivals,
                rows=rows,
                caller_class=called,
                priority=priority,
                slo_ms=slo_ms or promised or math.inf,
                recording=trace,
            )
        )
    twins = [stream.name for stream in found if [other.name for other in found].count(stream.name) > 1]
    if twins:
        raise typer.BadParameter(f"two rates for {twins[0]}", param_hint="--rate")
    return found


def _sizes(found: Simulated, width: int | None) -> Table:
    """Executions by rows: each size, or where there are many, the powers of two between which they lie."""
    counts: dict[str, int] = {}
    for size, times in sorted(found.batch_sizes.items()):
        low = 1 << (size.bit_length() - 1)
        name = str(size) if len(found.batch_sizes) <= LINES or low == 1 else f"{low} to {2 * low - 1}"
        counts[name] = counts.get(name, 0) + times
    most = max(counts.values(), default=1)
    drawn = [
        {"rows": name, "executions": times, "bar": "#" * math.ceil(BARS * times / most)}
        for name, times in counts.items()
    ]
    return columns.table(COLUMNS, drawn, width=width)
