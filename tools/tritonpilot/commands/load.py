"""`tritonpilot load`: an open-loop load from a scenario file or from a few options, beside perf_analyzer.

app.command("load", epilog=EPILOG)(command)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, cast

import typer
from pydantic import ValidationError
from rich.table import Table

from tritonpilot import build as building
from tritonpilot import perf_analyzer_binary, samples, spec, sweep, written
from tritonpilot.arrivals import ALL, Stream, traffic
from tritonpilot.commands.options import (
    MODELS,
    REPOSITORY,
    Cpus,
    Json,
    Models,
    Repository,
    cpu_list,
    narrate,
    numbers,
    show,
)
from tritonpilot.errors import HostError, MeasurementError, PilotError, ServerError, SpecError
from tritonpilot.histogram import Histogram
from tritonpilot.load import SenderFacts, Target, files, run, scenario
from tritonpilot.load.http_sender import MOST_NEW
from tritonpilot.load.scenario import Scenario
from tritonpilot.load.target import header, is_reachable
from tritonpilot.measurement import table, to_json
from tritonpilot.outcome import CONNECTION, SHARES, Outcome
from tritonpilot.server import EmbeddedServer

EPILOG = "Example: tritonpilot load ctr --rate 500 --class realtime; tritonpilot load evening.yaml --series evening.csv"
SUFFIXES = (".yaml", ".yml")
MOST_REQUESTS = 20_000_000  # a sender takes some hundred bytes for each
STREAM_OPTIONS = {"--rate", "--concurrency", "--class", "--rows", "--slo-ms", "--seconds", "--arrivals"}
OWN_OPTIONS = {"--seconds", "--slo-ms", "--seed", "--processes", "--histogram", "--series", "--header"}
# What options are called where they are checked.
OPTIONS = {
    "rate_per_s": "--rate",
    "rows": "--rows",
    "caller_class": "--class",
    "name": "--class",
    "slo_ms": "--slo-ms",
    "seconds": "--seconds",
    "service": "SCENARIO",
}


def command(
    context: typer.Context,
    what: Annotated[
        list[str],
        typer.Argument(
            help="Scenario file (docs/load.md), or a service with --rate; with --merge, histogram files.",
            metavar="SCENARIO",
        ),
    ],
    rate: Annotated[str, typer.Option(help="Requests per second (open loop); perf_analyzer takes a list.")] = "",
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, a list (closed loop); --tool perf_analyzer.")
    ] = "",
    seconds: Annotated[float, typer.Option(help="How long requests are sent.", min=0.1, max=86400)] = 10.0,
    arrivals: Annotated[Literal["poisson", "constant"], typer.Option(help="Gaps between requests.")] = "poisson",
    caller_class: Annotated[str, typer.Option("--class", help="Class of the callers; default: none.")] = "",
    rows: Annotated[str, typer.Option(help="Rows of a request, or sizes with weights, as 1:8,64:2.")] = "1",
    slo_ms: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="An answer within it is goodput; default: the promise of the class or service.", min=0.001),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Of the arrivals; default: the scenario's, or 0.", min=0),
    ] = None,
    http: Annotated[str, typer.Option(help="HTTP service of a running Triton or entry.", metavar="HOST:PORT")] = "",
    grpc: Annotated[
        str, typer.Option(help="gRPC service of it; default of both: start one.", metavar="HOST:PORT")
    ] = "",
    protocol: Annotated[
        Optional[Literal["http", "grpc"]],  # noqa: UP045
        typer.Option(help="Default: the scenario's; else that of the address given; else http."),
    ] = None,
    headers: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--header", help="Sent with every request (repeatable).", metavar="NAME:VALUE"),
    ] = None,
    processes: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Sending processes; default: the scenario's, or 1.", min=1, max=64),
    ] = None,
    tool: Annotated[
        Literal["tritonpilot", "perf_analyzer"], typer.Option(help="Who sends: our own open loop, or perf_analyzer.")
    ] = "tritonpilot",
    histogram: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write the latencies as histograms that merge.", metavar="FILE"),
    ] = None,
    series: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Write a line per second as CSV.", metavar="FILE"),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Send nothing; add up histogram files.")] = False,
    server_cpus: Annotated[str, typer.Option(help="Pin the started server.", metavar="LIST")] = "",
    cpus: Cpus = "",
    models: Models = MODELS,
    repository: Repository = REPOSITORY,
    as_json: Json = False,
) -> None:
    """Send requests at their times, whatever becomes of the others: latency, goodput at the SLO, errors by kind."""
    given = _given(context)
    if merge:
        _refuse(given - {"--merge", "--histogram", "--json"}, "--merge adds up files and sends nothing")
        _merge([Path(each) for each in what], histogram, as_json)
        return
    if len(what) != 1:
        raise typer.BadParameter("one scenario or service; several files need --merge", param_hint="SCENARIO")
    for path in (histogram, series):
        if path is not None:
            files.check_writable(path)
    named = [path.resolve() for path in (Path(what[0]), histogram, series) if path is not None]
    if len(set(named)) < len(named):
        raise typer.BadParameter(
            "the same file is named twice: one would overwrite the other", param_hint="--histogram, --series"
        )
    is_file = Path(what[0]).suffix in SUFFIXES
    if is_file:
        _refuse(given & STREAM_OPTIONS, "a scenario file says rate, class, rows, SLO, seconds and arrivals itself")
    if http or grpc:
        _refuse(given & {"--server-cpus", "--repository"}, "a server that runs already is taken as it is")
    if not (is_file or rate or concurrency):
        raise typer.BadParameter(
            f"{what[0]!r} is no scenario file (.yaml); a service needs --rate, or --concurrency", param_hint="SCENARIO"
        )
    if concurrency and (rate or tool != "perf_analyzer"):
        raise typer.BadParameter("a closed loop is --tool perf_analyzer, without --rate", param_hint="--concurrency")
    if is_file and tool == "perf_analyzer":
        raise typer.BadParameter(
            "perf_analyzer sends one stream: name a service, with --rate or --concurrency", param_hint="--tool"
        )
    if tool == "perf_analyzer":
        without = OWN_OPTIONS | ({"--arrivals"} if concurrency else set())
        _refuse(given & without, "perf_analyzer is called without it: it measures until its figures are stable")
    rates = numbers(rate, "--rate", float) if rate else []
    if len(rates) > 1 and tool != "perf_analyzer":
        raise typer.BadParameter("one rate at a time; perf_analyzer takes a list", param_hint="--rate")
    if tool == "perf_analyzer" and not _has_perf_analyzer(len(rates) == 1):
        tool = "tritonpilot"
    asked = (
        scenario.read(Path(what[0]))
        if is_file
        else _simple(what[0], rates, seconds, arrivals, caller_class, _sizes(rows), slo_ms)
    )
    service = spec.load_services(models, [asked.service])[0] if asked.service is not None else None
    streams = scenario.streams(asked, service)
    sample_rows = samples.read(_samples(asked, service))
    model = asked.model or str(asked.service)
    extra = _headers(headers or [])
    sender_cpus, pinned = cpu_list(cpus), cpu_list(server_cpus, "--server-cpus")
    requests = traffic(streams, asked.seconds, asked.seed if seed is None else seed, most=MOST_REQUESTS)
    chosen = protocol or ("grpc" if grpc and not http else "http" if http and not grpc else asked.protocol)
    with _served(service, http, grpc, models, repository, pinned) as (http_url, grpc_url, server):
        url = grpc_url if chosen == "grpc" else http_url
        if not url:
            raise typer.BadParameter(f"the address for {chosen} is missing", param_hint=f"--{chosen}")
        if tool == "perf_analyzer":
            loads = _Loads(rates, numbers(concurrency, "--concurrency", int) if concurrency else [], sender_cpus)
            _perf_analyzer(model, streams[0], sample_rows, loads, chosen, http_url, grpc_url, as_json)
            return
        narrate(f"{len(requests)} requests to {model} within {asked.seconds:g} s over {chosen} to {url}")
        target = Target(url, chosen, {**asked.headers, **extra})
        outcome, facts = run(
            target,
            model,
            sample_rows,
            requests,
            streams,
            processes=processes or asked.processes,
            cpus=sender_cpus,
            on_progress=narrate,
        )
        failure = _failure(outcome, target, server)
    # First: a disk that is full by now must not take the figures along.
    _tell(asked, model, chosen, outcome, facts, as_json)
    if histogram is not None:
        files.write_histograms(histogram, files.histograms(outcome))
        narrate(f"wrote {histogram}")
    if series is not None:
        files.write_series(series, outcome.series)
        narrate(f"wrote {series}")
    if failure is not None:
        raise failure


def _given(context: typer.Context) -> set[str]:
    """The options that the caller wrote, as --seed."""
    every = {param.name: param.opts[0] for param in context.command.params if param.opts[0].startswith("--")}
    sources = {option: context.get_parameter_source(name) for name, option in every.items() if name is not None}
    return {option for option, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _refuse(options: set[str], because: str) -> None:
    """Raise typer.BadParameter for options that would mean nothing here."""
    if options:
        raise typer.BadParameter(because, param_hint=", ".join(sorted(options)))


def _failure(outcome: Outcome, target: Target, server: EmbeddedServer | None) -> PilotError | None:
    """What the command fails with although the load has its figures: the server is gone, or it answered nothing."""
    if server is not None:
        try:
            server.check_alive()
        except ServerError as error:
            return error
    elif CONNECTION in outcome.errors and not is_reachable(target):
        return ServerError(
            f"The server at {target.url} accepts no connections any more: {outcome.errors[CONNECTION]} of {outcome.requests} "
            "requests failed so. The figures hold for what was answered before. Look at the server's log."
        )
    if not outcome.answered:
        return MeasurementError(
            f"None of the {outcome.requests} requests was answered. The figures are of errors alone. Look at the server's log."
        )
    return None


def _has_perf_analyzer(can_do_without: bool) -> bool:
    """Whether it runs here. Raises HostError when it does not and nothing else makes this load."""
    try:
        perf_analyzer_binary.find()
    except HostError as error:
        if not can_do_without:
            raise
        narrate(f"{error} The load is sent by tritonpilot's own sender instead.")
        return False
    return True


def _simple(
    service: str,
    rates: Sequence[float],
    seconds: float,
    arrivals: Literal["poisson", "constant"],
    caller_class: str,
    rows: int | dict[int, float],
    slo_ms: float | None,
) -> Scenario:
    """The scenario of one stream that the options describe."""
    stream: dict[str, Any] = {"name": caller_class or ALL, "arrivals": arrivals, "rows": rows}
    stream["rate_per_s"] = rates[0] if rates else 1.0
    if caller_class:
        stream["caller_class"] = caller_class
    if slo_ms is not None:
        stream["slo_ms"] = slo_ms
    try:
        return Scenario.model_validate(
            {"scenario": "options", "service": service, "seconds": seconds, "streams": [stream]}
        )
    except ValidationError as error:
        keys, words = written.problems(error)[0]
        option = next((OPTIONS[key] for key in keys if key in OPTIONS), "SCENARIO")
        raise typer.BadParameter(words, param_hint=option) from error


def _sizes(text: str) -> int | dict[int, float]:
    """Rows of a request: a number, or sizes with weights."""
    try:
        if ":" not in text:
            sizes: int | dict[int, float] = int(text)
            is_right = int(text) >= 1
        else:
            pairs = [part.split(":") for part in text.split(",")]
            sizes = {int(size): float(weight) for size, weight in pairs}
            is_right = min(sizes) >= 1 and min(sizes.values()) >= 0 and 0 < sum(sizes.values()) < math.inf
    except ValueError:
        is_right = False
    if not is_right:
        raise typer.BadParameter(f"{text!r} is no number of rows, nor sizes as 1:8,64:2", param_hint="--rows")
    return sizes


def _headers(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        if not colon:
            raise typer.BadParameter(f"{text!r} is no NAME:VALUE", param_hint="--header")
        try:
            name, value = header(name, value)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--header") from error
        if name in found:
            raise typer.BadParameter(f"{name} is given twice", param_hint="--header")
        found[name] = value
    return found


def _samples(asked: Scenario, service: spec.Service | None) -> Path:
    if service is None:
        return asked.folder / str(asked.samples)
    if service.samples is None:
        raise SpecError(f"{service.path} names no samples, which a load sends. Set `samples` of the model or pipeline.")
    return service.samples


@contextmanager
def _served(
    service: spec.Service | None, http: str, grpc: str, models: Path, repository: Path, cpus: Sequence[int] | None
) -> Iterator[tuple[str, str, EmbeddedServer | None]]:
    """The addresses for HTTP and gRPC, and the server when it is our own."""
    if http or grpc:
        yield http, grpc, None
        return
    if service is None:
        raise typer.BadParameter("a scenario with `model` needs the address of its server", param_hint="--http")
    with EmbeddedServer(
        repository,
        models=[service.service],
        cpus=cpus,
        probe_inputs=building.probe_inputs(models, repository),
        on_progress=narrate,
    ) as server:
        yield server.endpoints.http, server.endpoints.grpc, server


@dataclass(frozen=True)
class _Loads:
    """What perf_analyzer makes: rates or concurrencies, on these CPUs."""

    rates_per_s: Sequence[float]
    concurrencies: Sequence[int]
    cpus: Sequence[int] | None


def _perf_analyzer(
    model: str,
    stream: Stream,
    sample_rows: Mapping[str, Any],
    loads: _Loads,
    protocol: Literal["http", "grpc"],
    http_url: str,
    grpc_url: str,
    as_json: bool,
) -> None:
    """The same by perf_analyzer: one row of results per load."""
    if not isinstance(stream.rows, int):
        raise typer.BadParameter("perf_analyzer sends requests of one size", param_hint="--rows")
    if not grpc_url:
        raise typer.BadParameter("perf_analyzer's figures are joined with Triton's, over gRPC", param_hint="--grpc")
    points = list(
        sweep.measure(
            grpc_url,
            model,
            sample_rows,
            concurrencies=loads.concurrencies,
            rates_per_s=loads.rates_per_s,
            batch=stream.rows,
            http_url=http_url if protocol == "http" else None,
            parameters={"priority": stream.priority} if stream.priority else None,
            distribution=cast(Literal["constant", "poisson"], stream.arrivals),
            cpus=loads.cpus,
            on_progress=narrate,
        )
    )
    if as_json:
        print(to_json(points))
    else:
        title = f"{model}, {stream.rows} row{'s' * (stream.rows > 1)} per request, perf_analyzer over {protocol}"
        show(lambda _: [table(points, title=title)])


def _tell(asked: Scenario, model: str, protocol: str, outcome: Outcome, facts: SenderFacts, as_json: bool) -> None:
    if as_json:
        found = {"scenario": asked.scenario, "model": model, "protocol": protocol, **outcome.as_dict()}
        print(json.dumps({**found, "sender": facts.as_dict()}, indent=2))
        return
    show(
        lambda _: [
            outcome.table(title=f"{model} over {protocol}, {outcome.seconds:g} s; latency from the scheduled time")
        ]
    )
    for kind, words in facts.errors.items():
        print(f"{kind}: {words.strip()[:200]}")
    print(
        f"sender: late by {facts.schedule_p50_ms:.2f} ms (P50), {facts.schedule_p99_ms:.2f} ms (P99); {facts.cores:.2f} cores in "
        f"{facts.processes} process{'es' * (facts.processes > 1)}; at most {facts.most_in_flight} in flight"
    )
    if facts.held:
        print(
            f"{facts.held} requests waited in the sender for a server that stood still: {MOST_NEW} connections had no first answer "
            "yet. That is in their latency, and not in how late the sender was."
        )
    if facts.is_limit:
        print(f"The sender itself was a limit: {facts.reason}.")


def _merge(paths: Sequence[Path], into: Path | None, as_json: bool) -> None:
    """Add up the histograms of several loads."""
    if into is not None:
        files.check_writable(into)
    found = files.merged([files.read_histograms(path) for path in paths])
    if into is not None:
        files.write_histograms(into, found)
        narrate(f"wrote {into}")
    figures = {name: {"answered": each.count, **_quantiles(each)} for name, each in found.items()}
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    drawn = Table("stream", "answered", *(f"{name.removesuffix('_ms')}\nms" for name in SHARES))
    for name, each in figures.items():
        cells = ["-" if value is None else f"{value:.2f}" for key, value in each.items() if key != "answered"]
        drawn.add_row(name, f"{each['answered']:,}", *cells)
    show(lambda _: [drawn])


def _quantiles(histogram: Histogram) -> dict[str, float | None]:
    return {name: histogram.quantile_us(share) / 1e3 if histogram.count else None for name, share in SHARES.items()}
