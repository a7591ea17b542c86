"""`tritonpilot plan`: replicas, utilisation, headroom and cost for loads up to any size, from measured costs and simulation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from tritonpilot import columns, spec
from tritonpilot import setting as settings
from tritonpilot.commands.costs import measure
from tritonpilot.commands.options import MODELS, Json, Models, cpu_list, narrate, numbers, show, weights
from tritonpilot.costs import Costs
from tritonpilot.emulated import is_emulated, labelled, noted
from tritonpilot.plan import COLUMNS, PEAK_S, Fleet, burst_of, check, plan
from tritonpilot.setting import Setting
from tritonpilot.tune.run import batcher_of
from tritonpilot.tune.wish import Wish

EPILOG = "Example: tritonpilot plan ctr --rates 1000,10000,1e6 --burst 1.5 --cost-per-hour 0.4"


def command(
    service: Annotated[str, typer.Argument(help="Service, or one model of a pipeline (image_net).", metavar="NAME")],
    rates: Annotated[
        str, typer.Option(help="Requests per second, a list. Default: slo.rate_per_s, 10, 100 and 1000 times that.")
    ] = "",
    costs: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="JSON of measured costs. Default: they are measured now, on a server of its own."),
    ] = None,
    save_costs: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where to write the costs that are measured now, for --costs."),
    ] = None,
    slo_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="P99 that is promised, ms. Default: slo.p99_ms.", min=0.001),
    ] = None,
    mix: Annotated[
        str, typer.Option(help="Parts of the classes, as realtime:9,batch:1. Default: the default class alone.")
    ] = "",
    rows: Annotated[int, typer.Option(help="Rows per request.", min=1)] = 1,
    burst: Annotated[float, typer.Option(help="Highest rate in times the mean, with all promises kept.")] = 1.0,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Recorded arrivals (CSV), whose busiest --peak-seconds say the burst."),
    ] = None,
    peak_seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help=f"Length of the peak that counts in --trace. Default: {PEAK_S:g}."),
    ] = None,
    imbalance: Annotated[float, typer.Option(help="The busiest replica's share, in times the mean.")] = 1.0,
    rate_per_connection: Annotated[
        float,
        typer.Option(help="Requests/s of a connection that stays on one replica (gRPC); 0: each request is balanced."),
    ] = 0.0,
    spare: Annotated[int, typer.Option(help="Replicas that may be down at the burst.", min=0)] = 0,
    cost_per_hour: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="What one replica costs per hour, in any currency."),
    ] = None,
    server_cpus: Annotated[
        str, typer.Option(help="CPUs of the measured replica; it plans for as many each.", metavar="LIST")
    ] = "",
    seed: Annotated[int, typer.Option(help="Of arrivals and simulation.", min=0)] = 0,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Plan replicas of a service for loads that no test machine can make, from measured costs and simulated shares."""
    chosen = settings.find(spec.load_services(models), service)
    wish = Wish.of(chosen, slo_ms=slo_ms, mix=weights(mix, "--mix") if mix else None, rows=rows, is_rate_open=True)
    wanted = numbers(rates, "--rates", float) if rates else [wish.rate_per_s * factor for factor in (1, 10, 100, 1000)]
    if trace is not None and burst != 1:
        raise typer.BadParameter("give --burst or --trace, which says the burst, and not both", param_hint="--burst")
    if trace is None and peak_seconds is not None:
        raise typer.BadParameter("it is the length of the peak of a --trace", param_hint="--peak-seconds")
    if costs is not None and (save_costs is not None or server_cpus):
        raise typer.BadParameter("nothing is measured when --costs are given", param_hint="--save-costs, --server-cpus")
    fleet = Fleet(
        burst=burst_of(trace, PEAK_S if peak_seconds is None else peak_seconds) if trace is not None else burst,
        imbalance=imbalance,
        rate_per_connection=rate_per_connection,
        spare=spare,
    )
    batcher = batcher_of(chosen)
    check(batcher, wish, wanted, cost_per_hour)
    cpus = cpu_list(server_cpus, "--server-cpus")
    known = Costs.read(costs) if costs is not None else measure(chosen, models, cpus, save_costs)
    found = plan(
        batcher,
        known,
        wish,
        wanted,
        fleet=fleet,
        cost_per_hour=cost_per_hour,
        seed=seed,
        on_progress=narrate,
    )
    said = {**found.as_dict(), "reason": noted(chosen, found.reason)}
    if as_json:
        what = {"service": chosen.service, "is_emulated": is_emulated(chosen), "setting": Setting.of(chosen).as_dict()}
        print(json.dumps({**what, **said}, indent=2))
        return
    title = f"{labelled(chosen)}, {Setting.of(chosen).describe()}, P99 within {found.slo_ms:g} ms"
    show(lambda width: [columns.table(COLUMNS, said["rows"], title=title, width=width)])
    print(f"\n{said['reason']}")
