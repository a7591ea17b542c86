"""`tritonpilot replay`: what the autopilot would have made of recorded traffic, beside the best settings that never change.

app.command("replay", epilog=EPILOG)(command)
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Optional, get_args

import typer

from tritonpilot import build, columns, model_config, spec
from tritonpilot import setting as settings
from tritonpilot.arrivals import Stream, check_sizes, read_recording, traffic
from tritonpilot.autopilot import policy as policies
from tritonpilot.autopilot import replay
from tritonpilot.autopilot.controller import Model
from tritonpilot.autopilot.model import SimulatedModel
from tritonpilot.autopilot.picture import lines, png
from tritonpilot.autopilot.policy import ModelPolicy, Policy
from tritonpilot.autopilot.replay import Case, Comparison, Played
from tritonpilot.columns import Column
from tritonpilot.commands.options import MODELS, Json, Models, finite, narrate, show
from tritonpilot.commands.simulate import MOST_REQUESTS, costs_of, streams_of
from tritonpilot.emulated import is_emulated, labelled, noted
from tritonpilot.errors import SpecError
from tritonpilot.load import files, scenario
from tritonpilot.simulate import Batcher
from tritonpilot.spec import Service

EPILOG = "Example: tritonpilot replay ctr --policy autopilot.yaml --trace day.csv --rate 900 --picture day.png"
POLICY = Path("autopilot.yaml")
MOST_INTERVALS = 1_000_000  # two months of 5 s
COLUMNS = (
    Column("name", "", is_word=True),
    Column("attainment", "in SLO", "%", "{:.3%}"),
    Column("violations", "missed", "requests", "{:,}"),
    Column("p99_ms", "P99", "ms", "{:,.1f}"),
    Column("instances", "instances", "mean", "{:.2f}"),
    Column("saved", "saved", "instance time", "{:+.0%}"),
    Column("changes", "changes", "", "{:,}"),
)


def command(
    what: Annotated[
        str,
        typer.Argument(help="Service, one model of a pipeline (image_net), or a scenario file.", metavar="SERVICE"),
    ],
    policy: Annotated[Path, typer.Option(help="Policy file of the autopilot (docs/autopilot.md).")] = POLICY,
    trace: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="CSV of recorded arrivals.", metavar="FILE"),
    ] = None,
    rate: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="Speeds the recording up or slows it down to so many requests a second.", min=0.001, callback=finite
        ),
    ] = None,
    rows: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Rows of a request. Default: what --trace says, else 1.", min=1),
    ] = None,
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="How long requests come. Default: the recording, once.", min=0.001, max=86400 * 366, callback=finite
        ),
    ] = None,
    costs: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            help="JSON of measured costs; default: those of the policy, else build/costs-SERVICE.json, else measured now.",
            metavar="FILE",
        ),
    ] = None,
    start_s: Annotated[
        float, typer.Option(help="How long a new instance takes until it serves.", min=0, callback=finite)
    ] = 0.5,
    reload_s: Annotated[
        float, typer.Option(help="How long the model takes to load again.", min=0, callback=finite)
    ] = 1.5,
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Where to draw it, as PNG.", metavar="FILE"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and simulation.", min=0)] = 0,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Replay recorded traffic to the autopilot's policies in simulation, and compare them with settings that never change."""
    if picture is not None:
        files.check_writable(picture)
    read = policies.read(policy)
    service, entry, streams, length_s = _asked(what, models, read, policy, trace, rate, rows, seconds)
    if (intervals := length_s / read.interval_s) > MOST_INTERVALS:
        raise SpecError(
            f"{length_s:g} s are {intervals:,.0f} intervals of {read.interval_s:g} s, and at most {MOST_INTERVALS:,} are replayed. "
            "Nothing was replayed. Look for a wrong time in the recording, say --seconds or --rate, or a longer interval_s."
        )
    (plan,) = [each for each in build.plan([service], "auto") if each.service.service == service.service]
    config = model_config.parse(plan.folder.config_text, service.service)
    batcher = Batcher.of(config)
    check_sizes(streams, batcher.max_batch_size)
    load = traffic(streams, length_s, seed, most=MOST_REQUESTS)
    own = costs if costs is not None or entry.costs is None else read.folder / entry.costs
    known = costs_of(service, models, own)
    slo_ms = entry.slo_ms or min(stream.slo_ms for stream in streams)
    if math.isinf(slo_ms):
        raise SpecError(
            f"No SLO is known of {service.service}: neither {policy} nor its service file says one. Nothing was replayed. "
            "Say slo_ms."
        )
    case = Case(
        batcher,
        known,
        load,
        streams,
        entry.with_defaults(slo_ms=slo_ms),
        interval_s=read.interval_s,
        start_s=start_s,
        reload_s=reload_s,
        seed=seed,
    )
    narrate(f"replaying {len(load):,} requests to {labelled(service)} within {length_s:g} s")
    models_of: dict[str, Model | None] = {
        name: SimulatedModel.of(case.policy, known, config) if name == "model" else None
        for name in get_args(replay.Policies)
    }
    found = replay.compare(case, models_of, on_progress=narrate)
    title = f"{labelled(service)}: {len(load):,} requests within {length_s:g} s, SLO {slo_ms:g} ms"
    if picture is not None:
        picture.write_bytes(png(title, case.traffic, case.interval_s, lines(found)))
        narrate(f"drawn into {picture}")
    if as_json:
        about = {"service": service.service, "is_emulated": is_emulated(service), "seconds": length_s, "slo_ms": slo_ms}
        print(json.dumps({**about, "seed": seed, **_as_dict(found)}, indent=2))
        return
    show(lambda width: [columns.table(COLUMNS, found.rows(), title=title, width=width)])
    print(f"\n{noted(service, _in_words(found))}")


def _asked(
    what: str,
    models: Path,
    read: Policy,
    policy: Path,
    trace: Path | None,
    rate: float | None,
    rows: int | None,
    seconds: float | None,
) -> tuple[Service, ModelPolicy, list[Stream], float]:
    """The service and its entry of the policy, who calls, and how long."""
    services = spec.load_services(models)
    if what.endswith((".yaml", ".yml")):
        options = {"--trace": trace, "--rate": rate, "--rows": rows, "--seconds": seconds}
        if beside := [name for name, value in options.items() if value is not None]:
            raise typer.BadParameter("a scenario file says that itself", param_hint=", ".join(beside))
        asked = scenario.read(Path(what))
        if asked.service is None:
            raise SpecError(
                f"{what} names no service, whose batcher would be simulated. Nothing was replayed. Add `service`."
            )
        service = settings.find(services, asked.service)
        entry = _entry_of(read, service, policy)
        streams = [
            replace(each, slo_ms=each.slo_ms if math.isfinite(each.slo_ms) else entry.slo_ms or math.inf)
            for each in scenario.streams(asked, service)
        ]
        return service, entry, streams, asked.seconds
    service = settings.find(services, what)
    entry = _entry_of(read, service, policy)
    if trace is None:
        raise typer.BadParameter("say which recording is replayed, or name a scenario file", param_hint="--trace")
    recorded = read_recording(trace)
    length_s = recorded.length_s if rate is None else len(recorded.at_s) / rate
    streams = streams_of(service, [] if rate is None else [str(rate)], "poisson", trace, rows or 1, entry.slo_ms)
    return service, entry, streams, seconds or length_s


def _entry_of(policy: Policy, service: Service, path: Path) -> ModelPolicy:
    """The service's entry of the policy file."""
    found = next((each for each in policy.models if each.model == service.service), None)
    if found is None:
        names = ", ".join(each.model for each in policy.models)
        raise SpecError(
            f"{path} says nothing about {service.service} (but about {names}). Nothing was replayed. Add an entry."
        )
    return found


def _in_words(found: Comparison) -> str:
    ours = min(found.policies, key=lambda each: (each.outcome.attainment < replay.PROMISE, each.found.instance_s))
    saved = 1 - ours.found.instance_s / found.best.found.instance_s
    kept = "keeps" if ours.outcome.attainment >= replay.PROMISE else "does not keep"
    return (
        f"{ours.name} {kept} the SLO for {replay.PROMISE:.1%} of the requests ({ours.outcome.attainment:.3%}) with {saved:+.0%} of "
        f"instance time saved, against the best of {found.settings} static settings with hindsight ({found.best.first.describe()}, "
        f"{found.best.outcome.attainment:.3%})."
    )


def _as_dict(found: Comparison) -> dict[str, Any]:
    ways = zip(found.rows(), found.all, strict=True)
    return {
        "static_settings": found.settings,
        "ways": [
            {**columns.finite(row), "first": each.first.as_dict(), "decisions": _decisions(each)} for row, each in ways
        ],
    }


def _decisions(played: Played) -> list[dict[str, Any]]:
    """What was changed, when and why."""
    return [
        {
            "at_s": step.seen.at_s,
            "action": step.decision.action,
            "target": step.decision.target.as_dict(),
            "way": step.decision.way,
            "reason": step.decision.reason,
        }
        for step in played.steps
        if step.decision.target is not None
    ]
