"""`tritonpilot tune`: which setting serves a service best within its SLO, and, when asked, written into its file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Optional, cast

import typer

from tritonpilot import setting as settings
from tritonpilot import spec
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
    weights,
)
from tritonpilot.errors import HostError, MeasurementError, SpecError
from tritonpilot.load import scenario as scenarios
from tritonpilot.setting import PRECISIONS, Precision
from tritonpilot.spec import Service
from tritonpilot.tune import Space, Tuned, Wish, rewrite, tune
from tritonpilot.tune.wish import passed_on

EPILOG = "Example: tritonpilot tune ctr --rate 2000 --slo-ms 20; tritonpilot tune ctr --rate max --write"


def command(
    service: Annotated[str, typer.Argument(help="Service, or one model of a pipeline (image_net).", metavar="NAME")],
    rate: Annotated[
        str, typer.Option(help="Requests per second; max: the most within the SLO. Default: slo.rate_per_s.")
    ] = "",
    slo_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="P99 that is promised, ms. Default: slo.p99_ms.", min=0.001, callback=finite),
    ] = None,
    mix: Annotated[
        str, typer.Option(help="Parts of the classes, as realtime:9,batch:1. Default: the default class alone.")
    ] = "",
    rows: Annotated[
        str, typer.Option(help="Rows of a request, or sizes with weights, as 1:8,64:2. Default: 1.", show_default=False)
    ] = "",
    scenario: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Scenario file with the streams (docs/load.md), instead of rate, mix and rows."),
    ] = None,
    max_batch: Annotated[
        str,
        typer.Option(
            help="Choose max_batch_size from this list only. Default: not below the present one, which is the largest request.",
            metavar="LIST",
        ),
    ] = "",
    delay_us: Annotated[str, typer.Option(help="Choose queue_delay_us from this list only.", metavar="LIST")] = "",
    instances: Annotated[str, typer.Option(help="Choose the instances from this list only.", metavar="LIST")] = "",
    threads: Annotated[str, typer.Option(help="Choose threads per instance from this list only.", metavar="LIST")] = "",
    precision: Annotated[
        str, typer.Option(help="Choose from these only: fp32, fp16, bf16, int8.", metavar="LIST")
    ] = "",
    memory_mb: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Memory of tritonserver and its stubs together, at most.", min=1, callback=finite),
    ] = None,
    verify: Annotated[int, typer.Option(help="Best settings to try on the real server.", min=0, max=20)] = 3,
    seconds: Annotated[
        float, typer.Option(help="How long each of them serves.", min=1, max=600, callback=finite)
    ] = 6.0,
    server_cpus: Annotated[str, typer.Option(help="Pin the server to these CPUs.", metavar="LIST")] = "",
    cpus: Cpus = "",
    target: TargetOption = "auto",
    seed: Annotated[int, typer.Option(help="Of arrivals and simulation.", min=0)] = 0,
    write: Annotated[bool, typer.Option("--write", help="Write the choice into the service file.")] = False,
    evidence: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="JSON of what was measured and simulated. Default: build/tune-NAME.json of the service."),
    ] = None,
    models: Models = MODELS,
    as_json: Json = False,
) -> None:
    """Choose queue delay, batch, instances, threads, precision and queue limits for the SLO; verified on a real server."""
    rate_per_s, highest = _rate(rate), rate == "max"
    own_cpus, client_cpus = cpu_list(server_cpus, "--server-cpus"), cpu_list(cpus)
    services = spec.load_services(models)
    chosen = settings.find(services, service)
    space = Space(
        max_batch_sizes=_batches(_whole(max_batch, "--max-batch"), chosen, services),
        queue_delays_us=_delays(delay_us),
        instances=_whole(instances, "--instances"),
        threads=_whole(threads, "--threads"),
        precisions=_precisions(precision),
    )
    if scenario is not None:
        if rate_per_s is not None or mix or rows:
            raise typer.BadParameter("the scenario says rate, mix and rows itself", param_hint="--scenario")
        wish = Wish(scenarios.streams(_scenario(scenario, chosen), chosen), highest, space, memory_mb)
        wish = wish if slo_ms is None else wish.with_slo(slo_ms)
    else:
        wish = Wish.of(
            chosen,
            rate_per_s=rate_per_s,
            slo_ms=slo_ms,
            mix=weights(mix, "--mix") if mix else None,
            rows=_rows(rows),
            is_rate_open=highest,
            space=space,
            memory_mb=memory_mb,
        )
    path = evidence or chosen.folder / "build" / f"tune-{chosen.service}.json"
    _check_writable(path)
    if write and not os.access(chosen.path.parent, os.W_OK):
        raise HostError(f"{chosen.path.parent} cannot be written to, so --write has no use. Nothing was measured.")
    found = tune(
        chosen,
        wish,
        models=models,
        cpus=own_cpus,
        client_cpus=client_cpus,
        verified=verify,
        verify_s=seconds,
        target=target,
        seed=seed,
        on_progress=narrate,
    )
    text = chosen.path.read_text(encoding="utf-8")
    if found.is_reached:
        text = rewrite.rewritten(text, chosen, found.setting.applied(chosen))
    diff = rewrite.difference(chosen.path, text)
    if as_json:
        print(json.dumps({**found.as_dict(), "diff": diff, "evidence": str(path)}, indent=2))
    else:
        print(found.reason)
        if found.is_reached:
            print(f"\n{diff}" if diff else f"\n{chosen.path} says so already.")
    _write_evidence(path, found)
    narrate(f"measured and simulated for {found.seconds_in_all:.0f} s; the evidence is {path}")
    if not found.is_reached:
        raise MeasurementError(
            f"The SLO of {chosen.service} is out of reach here: see above for what is reachable. {chosen.path} is as it was. "
            "Promise less, allow more (--instances, --threads, --precision), or use more servers (`tritonpilot plan`)."
        )
    if diff:
        rewrite.check_all(rewrite.checked(chosen.path, text, chosen.service, found.setting), services, target)
    if write and diff:
        rewrite.write(chosen.path, text)
        narrate(f"{chosen.path} is written; `tritonpilot build` puts it into the repository")
    elif diff:
        narrate("nothing was written; --write does")


def _check_writable(path: Path) -> None:
    """Raise HostError now rather than after the measurements."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.exists() and not path.is_file():
            raise OSError("it is a directory" if path.is_dir() else "it is no regular file")
        if path.exists() and not os.access(path, os.W_OK):
            raise OSError("it is write-protected")
    except OSError as error:
        raise HostError(
            f"The evidence cannot be written to {path} ({error}). Nothing was measured. Say --evidence FILE."
        ) from error


def _write_evidence(path: Path, found: Tuned) -> None:
    """Write it so that a reader sees the old file or the new one. Raises HostError; the result has been shown then."""
    path = path.resolve()
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        aside.write_text(json.dumps(found.as_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise HostError(
            f"The evidence could not be written to {path} ({error}). The result is shown above, and the service file is as it was. "
            "Say --evidence FILE."
        ) from error


def _rate(text: str) -> float | None:
    """Requests per second; None where the service file says them, or the highest is sought."""
    if text in ("", "max"):
        return None
    found = numbers(text, "--rate", float)
    if len(found) > 1:
        raise typer.BadParameter(f"{text!r} is not one rate, or max", param_hint="--rate")
    return float(found[0])


def _batches(sizes: tuple[int, ...], service: Service, services: Sequence[Service]) -> tuple[int, ...]:
    """The sizes that are asked for and take what pipelines pass on. Raises SpecError when none does."""
    least = passed_on(services, service.service)
    kept = tuple(size for size in sizes if size >= max(least.values(), default=0))
    if len(kept) < len(sizes):
        name = max(least, key=lambda each: least[each])
        why = f"pipeline {name} passes batches of up to {least[name]} rows on to {service.service}"
        if not kept:
            raise SpecError(
                f"{service.path}: {service.service} cannot have the max_batch_size {', '.join(map(str, sizes))}: {why}. "
                f"Nothing was measured. Allow {least[name]}, or lower that of {name} first."
            )
        narrate(f"--max-batch: below {least[name]} is left out, for {why}")
    return kept


def _scenario(path: Path, service: Service) -> scenarios.Scenario:
    """The scenario, when it is one of this service or of its whole pipeline. Raises SpecError."""
    found = scenarios.read(path)
    if (found.service or found.model) not in (service.service, service.written_as):
        raise SpecError(
            f"{path} is a load of {found.service or found.model}, not of {service.service}. Nothing was measured. Name that "
            "service, or another scenario."
        )
    return found


def _whole(text: str, option: str) -> tuple[int, ...]:
    return tuple(numbers(text, option, int)) if text else ()


def _delays(text: str) -> tuple[int, ...]:
    """As other lists, but 0 is a delay."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is no list of microseconds such as 0,500,2000", param_hint="--delay-us")
    return tuple(int(part) for part in parts)


def _precisions(text: str) -> tuple[Precision, ...]:
    parts = tuple(part.strip() for part in text.split(",")) if text else ()
    wrong = [part for part in parts if part not in PRECISIONS]
    if wrong:
        raise typer.BadParameter(f"{wrong[0]!r} is none of {', '.join(PRECISIONS)}", param_hint="--precision")
    return cast(tuple[Precision, ...], parts)


def _rows(text: str) -> int | dict[int, float]:
    if ":" not in text:
        found = numbers(text or "1", "--rows", int)
        if len(found) > 1:
            raise typer.BadParameter(
                f"{text!r} is not one size; several have weights, as 1:8,64:2", param_hint="--rows"
            )
        return int(found[0])
    sizes = weights(text, "--rows")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise typer.BadParameter(f"{text!r} is not ROWS:WEIGHT,...", param_hint="--rows")
    return {int(size): weight for size, weight in sizes.items()}
