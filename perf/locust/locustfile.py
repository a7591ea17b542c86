"""Load tests with Locust, over HTTP and gRPC, with real rows of a service. From the project's folder, against a running entry:

    locust -f perf/locust/locustfile.py --headless --scenario constant --html report.html
    locust -f perf/locust/locustfile.py --headless --scenario burst --host http://127.0.0.1:8000 --triton-grpc 127.0.0.1:8001

The second one asks Triton itself. Locust's own -u, -r and -t are not used: a scenario says how many call, and how often.
Exit code 0: every limit was kept; 1: one was broken, the log says which; 2: the test could not be made.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import gevent  # type: ignore[import-untyped]
import gevent.event  # type: ignore[import-untyped]
import grpc.experimental.gevent  # type: ignore[import-untyped]
import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from locust import LoadTestShape, User, events, task
from locust.exception import StopUser
from tritonclient.utils import np_to_triton_dtype

from perf.locust import figures, scenarios
from perf.locust.figures import Call

grpc.experimental.gevent.init_gevent()

REQUESTS = 64  # of different rows, sent in turn
BROKEN, IMPOSSIBLE = 1, 2
KEY_HEADER = "tritonpilot-key"
CLIENTS = {"http": httpclient, "grpc": grpcclient}

log = logging.getLogger("load")


class Run:
    """One load test: its callers, when the load began, and what became of every request."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.scenario = scenarios.of(options.scenario, rate_per_s=options.rate_per_s, seconds=options.seconds)
        transports = scenarios.TRANSPORTS if options.transport == "both" else (options.transport,)
        self.callers = self.scenario.callers(transports)
        rows = sample_rows(options.samples or default_samples(options.service))
        kinds = {(caller.transport, caller.stream.rows) for caller in self.callers}
        self.requests = {(transport, count): requests(CLIENTS[transport], rows, count) for transport, count in kinds}
        self.calls: list[Call] = []
        self.placed = self.finished = 0
        self.is_open = gevent.event.Event()
        self.start = self.cpu_s = 0.0

    @property
    def now_s(self) -> float:
        """Seconds since the load began."""
        return time.perf_counter() - self.start

    def place(self) -> int:
        """The number of the next caller that comes."""
        self.placed += 1
        return self.placed - 1

    def open(self) -> None:
        """All callers are there: the load begins after the quiet time."""
        if not self.is_open.is_set():
            self.start = time.perf_counter() + self.scenario.quiet_s
            self.cpu_s = time.process_time()
            self.is_open.set()


class Caller(User):
    """Sends its requests when they are due."""

    host = "http://127.0.0.1:8100"
    run_of_all: ClassVar[Run]

    def on_start(self) -> None:
        run = self.run_of_all
        options, number = run.options, run.place()
        self.part = run.callers[number]
        self.requests = run.requests[self.part.transport, self.part.stream.rows]
        self.turn, self.offset = 0, number
        self.send = sender(self.part.transport, self.host, options, self.part.stream.level)
        run.is_open.wait()

    @task
    def call(self) -> None:
        run, part = self.run_of_all, self.part
        due_s = part.due_s(self.turn)
        if due_s is None:
            due_s = max(run.now_s, 0.0)
        if due_s >= run.scenario.seconds:
            run.finished += 1
            raise StopUser
        gevent.sleep(max(0.0, due_s - run.now_s))
        inputs = self.requests[(self.offset + self.turn) % len(self.requests)]
        self.turn += 1
        failure: Exception | None = None
        sent_s = run.now_s
        try:
            self.send(inputs)
        except Exception as error:  # noqa: BLE001 -- whatever a client raises, the request has failed and the test goes on
            failure = error
        done = Call(
            part.stream.caller_class, part.transport, due_s, sent_s, run.now_s, "" if failure is None else str(failure)
        )
        run.calls.append(done)
        self.environment.events.request.fire(
            request_type=part.transport,
            name=f"{run.options.service} {part.stream.caller_class}",
            response_time=(done.answered_s - due_s) * 1e3,
            response_length=0,
            exception=None if failure is None else RuntimeError(str(failure)),  # tritonclient's own shows no reason
            context={},
        )


class Shape(LoadTestShape):
    """All callers at once, until the last one has left."""

    def tick(self) -> tuple[int, float] | None:
        run = Caller.run_of_all
        count = len(run.callers)
        has_left = self.runner is not None and self.runner.user_count == 0
        return None if run.placed == count and has_left else (count, float(count))


def add_options(parser: Any) -> None:
    """What Locust's own options do not say."""
    parser.add_argument("--scenario", choices=tuple(scenarios.SCENARIOS), default="constant", env_var="LOAD_SCENARIO")
    parser.add_argument("--service", default="ctr", env_var="LOAD_SERVICE", help="the Triton model that is asked")
    parser.add_argument(
        "--triton-grpc", default="127.0.0.1:8101", env_var="LOAD_TRITON_GRPC", help="HOST:PORT; HTTP is at --host"
    )
    parser.add_argument(
        "--transport", choices=("both", *scenarios.TRANSPORTS), default="both", env_var="LOAD_TRANSPORT"
    )
    parser.add_argument("--rate-per-s", type=positive, help="of all requests that have a rate; default: the scenario's")
    parser.add_argument("--seconds", type=positive, help="default: the scenario's")
    parser.add_argument("--samples", type=Path, help=".npz of rows; default: those of models/SERVICE")
    parser.add_argument("--figures", type=Path, help="a JSON file for what came of it")
    parser.add_argument(
        "--api-key", default="", env_var="TRITONPILOT_KEY", is_secret=True, help="of an entry with tenants"
    )


def prepare(environment: Any, **_: Any) -> None:
    """Read the rows before anybody comes, so that what is wrong is said at once."""
    if type(environment.runner).__name__ in ("MasterRunner", "WorkerRunner"):
        refuse(
            "This load test runs in one Locust process, which is enough for 500 requests a second. Leave the workers out."
        )
    if (environment.host or "").startswith("https:"):
        refuse(
            "--host has https, and this load test speaks plain HTTP. Nothing was sent. Ask the entry or Triton itself."
        )
    options = environment.parsed_options
    for option, file in (("--figures", options.figures), ("--html", options.html_file)):
        if file and (why := unwritable(Path(file))):
            refuse(f"{option}: {why}. Nothing was sent. Make the folder first, or name another file.")
    Caller.run_of_all = Run(environment.parsed_options)


def begin(environment: Any, **_: Any) -> None:
    """A new test, also when Locust's web page starts it again."""
    Caller.run_of_all = Run(environment.parsed_options)
    scenario = Caller.run_of_all.scenario
    log.info("%s, for %g s: %s", scenario.name, scenario.seconds, scenario.line)


def open_doors(**_: Any) -> None:
    """The step is exact: nobody calls before everybody is there, and no collection of garbage (60 ms here) halts the senders."""
    gc.collect()
    gc.freeze()
    gc.disable()
    Caller.run_of_all.open()


def judge(environment: Any, **_: Any) -> None:
    """Compare with the limits, and write the figures."""
    gc.enable()
    environment.process_exit_code = IMPOSSIBLE  # what a listener raises, Locust only logs
    run = Caller.run_of_all
    found = figures.of(run.scenario, run.calls)
    elapsed_s = run.now_s + run.scenario.quiet_s
    found["sender_cores"] = round((time.process_time() - run.cpu_s) / elapsed_s, 3)
    found["broken"] = figures.broken(run.scenario, found)
    if run.finished < len(run.callers):
        found["broken"].append(
            f"{len(run.callers) - run.finished} of {len(run.callers)} callers left before the {run.scenario.seconds:g} s were over"
        )
    if run.options.figures is not None:
        run.options.figures.write_text(json.dumps(found, indent=2, allow_nan=False) + "\n")
    for line in found["broken"]:
        log.error("%s: %s", run.scenario.name, line)
    if not found["broken"]:
        p99_ms = found["by_class"][run.scenario.judged]["p99_ms"]
        log.info("%s: within its limits; P99 of %s %s ms", run.scenario.name, run.scenario.judged, p99_ms)
    environment.process_exit_code = BROKEN if found["broken"] else 0


def leave(exit_code: int, **_: Any) -> None:
    """gRPC's threads under gevent do not end by themselves."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def positive(text: str) -> float:
    """A number above 0, of the command line."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def unwritable(file: Path) -> str:
    """Why the file cannot be written once the test is over; empty when it can."""
    if not file.parent.is_dir():
        return f"the folder {file.parent} does not exist"
    if file.is_dir():
        return f"{file} is a folder"
    return (
        "" if os.access(file if file.exists() else file.parent, os.W_OK) else f"{file} cannot be written by this user"
    )


def default_samples(service: str) -> Path:
    """The file of rows that the service's model folder has: of the whole pipeline, else of its only model."""
    folder = Path("models", service, "build")
    requests_of_pipeline = folder / "requests.npz"
    return requests_of_pipeline if requests_of_pipeline.exists() else folder / "samples.npz"


def sample_rows(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Input name -> array of rows, strings as objects, as tritonclient takes them."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        for name, array in arrays.items():
            if (
                array.ndim == 0
                or len(array) == 0
                or (np_to_triton_dtype(array.dtype) is None and array.dtype.kind not in "US")
            ):
                raise ValueError(f"{name} holds no rows of numbers or strings")
        if not arrays:
            raise ValueError(f"{path} is empty")
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        refuse(
            f"The rows to send cannot be read: {error}. Nothing was sent. Run `tritonpilot build --prepare` and this command in "
            "the project's folder, or name an .npz file with --samples."
        )
    for name, array in arrays.items():
        if array.dtype.kind == "U":
            arrays[name] = np.char.encode(array, "utf-8").astype(object)
        elif array.dtype.kind == "S":
            arrays[name] = array.astype(object)
    return arrays


def requests(client: Any, rows: dict[str, np.ndarray[Any, Any]], count: int) -> list[list[Any]]:
    """Inputs of several requests with `count` rows each, beginning again at the first row after the last."""
    found = []
    for start in range(0, REQUESTS * count, count):
        tensors = []
        for name, array in rows.items():
            part = array.take(range(start, start + count), axis=0, mode="wrap")
            part = part.reshape(count, 1) if part.ndim == 1 else part
            tensor = client.InferInput(name, list(part.shape), np_to_triton_dtype(part.dtype))
            tensor.set_data_from_numpy(part)
            tensors.append(tensor)
        found.append(tensors)
    return found


def sender(transport: str, host: str, options: Any, level: int) -> Callable[[Sequence[Any]], object]:
    """What sends a request over a connection of its own, and returns its answer or raises."""
    headers = {KEY_HEADER: options.api_key} if options.api_key else None
    if transport == "grpc":
        over_grpc = grpcclient.InferenceServerClient(options.triton_grpc)
        return lambda inputs: over_grpc.infer(
            options.service, inputs, priority=level, headers=headers, client_timeout=scenarios.TIMEOUT_S
        )
    over_http = httpclient.InferenceServerClient(
        host.removeprefix("http://").rstrip("/"),
        connection_timeout=scenarios.TIMEOUT_S,
        network_timeout=scenarios.TIMEOUT_S,
    )
    return lambda inputs: over_http.infer(options.service, inputs, priority=level, headers=headers)


def refuse(why: str) -> NoReturn:
    """End before anything is sent."""
    log.error(why)
    sys.exit(IMPOSSIBLE)


def listen(hooks: Any) -> None:
    """Be told by Locust."""
    hooks.init_command_line_parser.add_listener(add_options)
    hooks.init.add_listener(prepare)
    hooks.test_start.add_listener(begin)
    hooks.spawning_complete.add_listener(open_doors)
    hooks.quitting.add_listener(judge)
    hooks.quit.add_listener(leave)


listen(events)
