"""`tritonpilot simulate`: what a service's batcher would do with a load, from its configuration and measured costs; no server.

app.command("simulate", epilog=EPILOG)(command)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Optional

import numpy as np
import typer
from rich.table import Table

from tritonpilot import build, columns, model_config, spec
from tritonpilot import setting as settings
from tritonpilot.arrivals import Stream, Traffic, traffic
from tritonpilot.columns import Column
from tritonpilot.commands.costs import measure
from tritonpilot.commands.options import MODELS, Json, Models, narrate, show
from tritonpilot.costs import Costs
from tritonpilot.errors import SpecError
from tritonpilot.load import scenario
from tritonpilot.simulate import Batcher, Simulated, simulate
from tritonpilot.spec import Service

EPILOG = "Example: tritonpilot simulate ctr --rate 900 --rate batch=100 --costs costs.json"
MOST_REQUESTS = 20_000_000  # tables of them take about 200 bytes each
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
    seconds: Annotated[float, typer.Option(help="How long requests come.", min=0.001, max=86400 * 366)] = 60.0,
    arrivals: Annotated[Literal["poisson", "constant"], typer.Option(help="Gaps between requests.")] = "poisson",
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="CSV of recorded arrivals; with one --rate stretched to it.", metavar="FILE"),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of a request.", min=1)] = 1,
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
    replicas: Annotated[int, typer.Option(help="Servers that share the load, each request going to any.", min=1)] = 1,
    seed: Annotated[int, typer.Option(help="Of arrivals and simulation.", min=0)] = 0,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Simulate Triton's dynamic batcher under a load: P99, goodput, batches and utilisation, without a server."""
    services = spec.load_services(models)
    if what.endswith((".yaml", ".yml")):
        if rate or trace is not None:
            raise typer.BadParameter("a scenario file says its rates and recordings itself", param_hint="--rate")
        asked = scenario.read(Path(what))
        if asked.service is None:
            raise SpecError(
                f"{what} names no service, whose batcher would be simulated. Nothing was simulated. Add `service`."
            )
        service = settings.find(services, asked.service)
        streams, seconds = list(scenario.streams(asked, service)), asked.seconds
    else:
        service = settings.find(services, what)
        streams = _streams(service, rate or [], arrivals, trace, rows, slo_ms)
    known = _costs(service, models, costs)
    (made,) = [item for item in build.plan([service]) if item.service.service == service.service]
    batcher = Batcher.of(model_config.parse(made.folder.config_text, service.service))
    expected = sum(stream.rate_per_s for stream in streams) * seconds
    if expected > MOST_REQUESTS * 5:
        raise SpecError(
            f"{expected:,.0f} requests are too many to simulate at once. Nothing was simulated. Say fewer --seconds, or more "
            "--replicas and the rate of one."
        )
    load = share(traffic(streams, seconds, seed), replicas, seed)
    if not len(load):
        raise SpecError(
            "No request came within that time. Nothing was simulated. Say a higher --rate or more --seconds."
        )
    narrate(f"simulating {len(load):,} requests to {service.service} within {seconds:g} s")
    found = simulate(batcher, known, load, streams, seed)
    if as_json:
        said = {"service": service.service, "replicas": replicas, "seconds": seconds, "seed": seed}
        print(json.dumps({**said, **found.as_dict()}, indent=2))
        return
    of = f", one of {replicas} replicas" if replicas > 1 else ""
    show(lambda width: [found.outcome.table(f"{service.service}{of}"), _sizes(found, width)])
    print(
        f"\n{found.executions:,} executions of {found.mean_rows:.1f} rows and {found.execution_us / 1e3:.2f} ms; instances "
        f"{found.utilisation:.0%} busy, {found.cpu_cores:.2f} of {known.cores} cores; {found.queue_us / 1e3:.2f} ms in the queue."
    )


def share(load: Traffic, replicas: int, seed: int) -> Traffic:
    """What one replica gets when a balancer sends every request to any of them."""
    if replicas == 1:
        return load
    mine = np.random.default_rng((seed, 2)).random(len(load)) < 1 / replicas
    return Traffic(load.at_s[mine], load.rows[mine], load.stream[mine], load.seconds)


def _costs(service: Service, models: Path, given: Path | None) -> Costs:
    kept = Path("build") / f"costs-{service.service}.json"
    if given is not None or kept.exists():
        return Costs.read(given or kept)
    kept.parent.mkdir(exist_ok=True)
    return measure(service, models, None, kept)


def _streams(
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
    promises: Mapping[str, float | None] = {each.name: service.promise_ms(each) for each in service.classes}
    default = service.default_class or (service.classes[0].name if service.classes else "")
    found = []
    for text in rates or ["0"]:
        name, _, number = text.rpartition("=")
        try:
            wanted = float(number)
        except ValueError:
            raise typer.BadParameter(f"{text!r} is no rate, nor CLASS=RATE", param_hint="--rate") from None
        promised = promises.get(name or default) if promises else service.slo.p99_ms if service.slo else None
        found.append(
            Stream(
                name=name or default or "all",
                rate_per_s=wanted,
                arrivals="recorded" if trace is not None else arrivals,
                rows=rows,
                caller_class=name or default,
                slo_ms=slo_ms or promised or math.inf,
                recording=trace,
            )
        )
    twins = [stream.name for stream in found if [other.name for other in found].count(stream.name) > 1]
    if twins:
        raise typer.BadParameter(f"two rates for {twins[0]}", param_hint="--rate")
    unknown = [stream.caller_class for stream in found if stream.caller_class and stream.caller_class not in promises]
    if unknown:
        raise SpecError(
            f"{service.service} has no class {unknown[0]} (it has {', '.join(promises) or 'none'}). Nothing was simulated."
        )
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
