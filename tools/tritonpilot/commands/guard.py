"""`tritonpilot guard`: what the guard in the entry has found, a reference to hold answers against, and the way back.

app.command("guard", epilog=EPILOG)(command)
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer
from rich.table import Table

from tritonpilot import metrics, samples, spec
from tritonpilot.commands.options import MODELS, REPOSITORY, Json, KeyFile, Models, finite, narrate, show
from tritonpilot.errors import MeasurementError, PilotError, RepositoryError, SpecError
from tritonpilot.guard.findings import Guarded, Trip, decide_trip, read

if TYPE_CHECKING:
    from tritonpilot.guard.reference import Reference

EPILOG = (
    "Example: tritonpilot guard; tritonpilot guard --every 5 --trip; tritonpilot guard --learn ctr --output usual.json"
)
FOUND = 1
MOST_ROWS = 100_000


def command(
    entry: Annotated[str, typer.Option(help="The entry's page of metrics.", metavar="HOST:PORT")] = "127.0.0.1:8102",
    every: Annotated[
        float, typer.Option(help="Look again after so many seconds, until Ctrl-C; 0: once.", min=0, callback=finite)
    ] = 0,
    trip: Annotated[
        bool, typer.Option("--trip", help="Go back to the version before when something is found of a new one.")
    ] = False,
    trip_within_s: Annotated[
        float, typer.Option(help="How long a version is new: an older one is not to blame.", min=1, callback=finite)
    ] = 3600,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --trip: say what would be done.")] = False,
    learn: Annotated[
        str,
        typer.Option(help="Ask this service for all rows of its samples, and write how it answers.", metavar="SERVICE"),
    ] = "",
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="With --learn: the file, for guard.reference of the service file; relative to this folder."),
    ] = None,
    triton_grpc: Annotated[str, typer.Option(help="Triton's gRPC service, for --learn and --trip.")] = "127.0.0.1:8001",
    control_key_file: KeyFile = None,
    repository: Annotated[Path, typer.Option(help="The model repository that Triton serves, for --trip.")] = REPOSITORY,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Say what the guard found of the models that are served: exit code 1 when something is wrong (docs/guard.md)."""
    if learn:
        _learn(learn, output, triton_grpc, models, as_json=as_json)
        return
    if output is not None:
        raise typer.BadParameter("is for --learn", param_hint="--output")
    if trip and not repository.is_dir():
        raise RepositoryError(
            f"There is no model repository at {repository}. Nothing was started. Name the one that Triton serves with --repository."
        )
    tripped: set[tuple[str, str]] = set()
    try:
        while True:
            found = _look(entry, is_lenient=bool(every))
            if found is not None:
                _print(found, as_json=as_json, is_once=not every)
            for each in decide_trip(found or [], trip_within_s) if trip else []:
                if (each.model, each.version) not in tripped:
                    tripped.add((each.model, each.version))
                    _go_back(each, repository, triton_grpc, control_key_file, is_dry_run=dry_run)
            if not every:
                break
            time.sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    raise typer.Exit(FOUND if any(each.findings for each in found or []) else 0)


def _look(entry: str, *, is_lenient: bool) -> list[Guarded] | None:
    """None, where that is allowed: the entry does not answer at the moment."""
    try:
        found = read(metrics.scrape(entry))
    except MeasurementError as error:
        if not is_lenient:
            raise
        narrate(str(error))
        return None
    if not found and not is_lenient:
        narrate("No model has a guard that has seen a request. Set guard in a service file: docs/guard.md.")
    return found


def _print(found: list[Guarded], *, as_json: bool, is_once: bool) -> None:
    if as_json:
        print(json.dumps([each.as_dict() for each in found], indent=2 if is_once else None), flush=True)
        return
    if is_once:
        show(lambda _: [_table(found)])
    for each in found:
        for finding in each.findings:
            print(finding.what, flush=True)


def _table(found: list[Guarded]) -> Table:
    table = Table("model", "version", "compared", "different", "rows watched", "reference", "found")
    for each in found:
        reference = f"{each.reference_rows} rows" + (" so far" if each.is_learning else "")
        kinds = ", ".join(sorted({finding.kind.replace("_", " ") for finding in each.findings}))
        figures = (each.compared, each.different, each.rows)
        table.add_row(each.model, each.version, *map(str, figures), reference if each.rows else "", kinds or "nothing")
    return table


# -- the way back ------------------------------------------------------------------------------------------------------


def _go_back(found: Trip, repository: Path, grpc: str, key_file: Path | None, *, is_dry_run: bool) -> None:
    """Serve the version before. What goes wrong is said, for others are to be looked at as well."""
    from tritonpilot.control import Control
    from tritonpilot.swap.rollback import rollback
    from tritonpilot.watch import control_key

    narrate(f"{found.model}: version {found.version} goes, version {found.previous} comes back: {found.why}")
    if is_dry_run:
        return
    try:
        with Control(grpc, control_key(key_file)) as control:
            rollback(control, repository, found.model, to=found.to, say=narrate)
    except PilotError as error:
        narrate(f"{found.model}: {error}")


# -- a reference -------------------------------------------------------------------------------------------------------


def _learn(name: str, output: Path | None, grpc: str, models: Path, *, as_json: bool) -> None:
    if output is None:
        raise typer.BadParameter("say where to write the reference", param_hint="--output")
    (service,) = spec.load_services(models, [name])
    if service.samples is None:
        raise SpecError(
            f"{service.path} names no samples, which the model is asked for. Nothing was written. Set `samples` of the model or "
            "pipeline, or let the guard learn from the first answers: leave guard.reference out."
        )
    reference, version, rows = _answers(service.service, samples.read(service.samples), grpc)
    text = reference.text()
    aside = output.with_name(f"{output.name}.new")
    try:
        aside.write_text(text + "\n", encoding="utf-8")
        aside.replace(output)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise RepositoryError(f"{output} cannot be written: {error}. What was there before is unchanged.") from None
    if as_json:
        print(json.dumps({"service": name, "version": version, "rows": rows, "file": str(output)}))
    else:
        print(f"{output}: how version {version} of {name} answers {rows} rows, {len(reference.series)} series")
        print(f"For {service.path}: guard: {{reference: {_beside(output, service.folder)}}}, then tritonpilot build")


def _answers(model: str, rows: Any, grpc: str) -> tuple[Reference, str, int]:
    from tritonpilot.control import Control
    from tritonpilot.guard.reference import Reference
    from tritonpilot.guard.series import series_of
    from tritonpilot.swap.asking import Asker

    values: dict[Any, list[Any]] = defaultdict(list)
    count, version = 0, ""
    with Control(grpc) as control:
        asker = Asker(control, model)
        asker.check(rows)
        for places, inputs in asker.requests(rows, MOST_ROWS):
            outputs, version = asker.ask(inputs)
            found = series_of(outputs, is_batched=asker.is_batched)
            for key, series in found.values.items():
                values[key].extend(series)
            before, count = count, count + len(places)
            if before // 1000 != count // 1000:
                narrate(f"{count} of {len(next(iter(rows.values())))} rows")
    return Reference.of(values), version, count


def _beside(path: Path, folder: Path) -> str:
    return os.path.relpath(path.resolve(), folder.resolve())
