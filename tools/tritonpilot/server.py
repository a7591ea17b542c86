"""A real tritonserver on loopback, started for the time of a `with` block or of a command.

    with EmbeddedServer(Path("model_repository")) as server:
        client = tritonclient.grpc.InferenceServerClient(server.endpoints.grpc)
        ...

When the block is entered every model is READY in the index and has answered a real inference. When it is left, or when this
process dies in whatever way, tritonserver, its stubs, its shared memory and its temporary folder are gone.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from tritonpilot import keeper
from tritonpilot.control_key import ControlKey, control_key
from tritonpilot.errors import HostError, PilotError, PortError, RepositoryError, ServerError
from tritonpilot.ports import choose_ports, port_taken
from tritonpilot.repository import backend, called, is_complete, models, versions
from tritonpilot.server_log import ServerLog
from tritonpilot.tritonserver import (
    CONTROL_HEADER,
    LOOPBACK,
    Installation,
    Options,
    arguments,
    assemble,
    check_host,
    environment,
    find_installation,
    waking_backends,
)

if TYPE_CHECKING:  # imported while Triton loads its models: gRPC and protobuf take as long as a small model
    from tritonpilot.control import Control, Inputs, ModelState, ModelStatistics

PORT_ATTEMPTS = 3  # a free port can be taken between our look and tritonserver's bind
# From the last answer to SIGKILL. Stubs take 1 to 2 s to unload; for one that died, and for a model whose reload failed once,
# tritonserver 2.51 waits until its exit timeout.
UNLOAD_GRACE_S = 5
TRITONS_HTTP_THREADS = 8  # without http_threads
FIRST_CALLS_S = 0.05  # for each model
COMPANION_BACKEND = "companion"
_POLL_S = 0.03
_STOP_POLL_S = 0.2
_URL = re.compile(r"https?://[A-Za-z0-9_.:\[\]-]+(/[^\s,]*)?")


@dataclass(frozen=True)
class Endpoints:
    """Where one server listens, each as "host:port"."""

    http: str
    grpc: str
    metrics: str

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


class EmbeddedServer:
    """One tritonserver on loopback with explicit model control.

    `models` are loaded at the start (None: all in `repository`, but the companion only where a model needs it). A port of 0
    is a free one. `cpus` pins tritonserver and its stubs, `stays_awake` keeps these cores from resting (measurements on virtual
    machines, where a core that was at rest is slow for a while). `env` is added to their environment. `log_file` is
    appended to; without it the log is in the temporary folder and goes with it.
    `strict_config` forbids Triton to complete a config.pbtxt; None: where all in `repository` are complete (the build's are), for
    completing takes a second and a half at the start. `rate_limit` switches the rate limiter on, `rate_limit_resources`
    too and says how many of each resource there are; `cache_size_bytes` > 0 gives the response cache that much.
    `http_threads` (0: Triton's default, 8): one costs the least CPU time on a single core, but a load call over HTTP holds it.
    `trace_url` is an OTLP/HTTP receiver, as "http://127.0.0.1:4318/v1/traces", that gets the spans of requests which bring a trace
    context, and of one of so many others as `tracing` in a model's service file says.
    `probe_inputs` maps model names to the inputs (name -> array) of the inference that proves readiness; other models get zeros. A
    function that makes them is called while Triton loads its models.
    `warms_http` asks the models a few times over HTTP before the server is called ready: a first request is then as fast as
    later ones. On stop, requests in flight have `exit_timeout_s` to be answered. `on_progress` gets lines for people.

    Errors of `start` (and of entering the block): HostError, PortError, RepositoryError, ServerError; nothing is left running.
    """

    def __init__(
        self,
        repository: Path,
        *,
        models: Sequence[str] | None = None,
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        cpus: Sequence[int] | None = None,
        stays_awake: bool = False,
        log_file: Path | None = None,
        extra_args: Sequence[str] = (),
        strict_config: bool | None = None,
        env: Mapping[str, str] | None = None,
        rate_limit: bool = False,
        rate_limit_resources: Mapping[str, int] | None = None,
        cache_size_bytes: int = 0,
        http_threads: int = 0,
        trace_url: str = "",
        probe_inputs: Mapping[str, Inputs] | Callable[[], Mapping[str, Inputs]] | None = None,
        warms_http: bool = False,
        on_progress: Callable[[str], None] | None = None,
        startup_timeout_s: float = 120,
        exit_timeout_s: int = 30,
    ) -> None:
        self.repository = Path(repository).resolve()
        self.models: tuple[str, ...] = tuple(dict.fromkeys(models or ()))
        self._all_models = models is None
        self._wanted_ports = (http_port, grpc_port, metrics_port)
        self._cpus = tuple(cpus or ())
        self._stays_awake = stays_awake
        self._given_log_file = log_file
        self._extra_args = tuple(extra_args)
        self._strict_config = strict_config
        self._env = dict(env or {})
        self._rate_limit = rate_limit
        self._rate_limit_resources = dict(rate_limit_resources or {})
        self._cache_size_bytes = cache_size_bytes
        self._http_threads = http_threads
        self._trace_url = trace_url
        self._make_probe_inputs = probe_inputs if callable(probe_inputs) else None
        self._probe_inputs: Mapping[str, Inputs] = {} if callable(probe_inputs) else probe_inputs or {}
        self._warms_http = warms_http
        self.progress = on_progress or _ignore
        self._startup_timeout_s = startup_timeout_s
        self.exit_timeout_s = exit_timeout_s

        self._key: ControlKey | None = None
        self._installation: Installation | None = None
        self._endpoints: Endpoints | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._exit_status: int | None = None
        self._folder = Path()
        self._log = ServerLog(Path(os.devnull), io.BytesIO())
        self._shm_prefix = ""
        self._stop_asked = threading.Event()  # by the caller, of the whole server
        self._stop_sent = False  # to the keeper that runs now: a second time means kill

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start tritonserver and return when every model has answered an inference."""
        if self._keeper is not None:
            raise ServerError(
                "This EmbeddedServer is running already. It was left as it is. Stop it before starting it again."
            )
        self._stop_asked.clear()
        self.models = self._models_to_load()
        self._check_cpus()
        if self._trace_url and not _URL.fullmatch(self._trace_url):
            raise ServerError(
                f"The receiver of traces is {self._trace_url!r}, but must be a URL such as http://127.0.0.1:4318/v1/traces. "
                "Nothing was started. Correct --trace-url, or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT."
            )
        self._installation = find_installation()
        self.models = self._with_companion_if_needed(self._installation)
        seen = check_host(self._installation)
        self._key = control_key()
        for attempt in range(PORT_ATTEMPTS):
            ports = choose_ports(self._wanted_ports)
            try:
                self._launch(
                    self._installation,
                    seen.python,
                    environment(self._installation, seen, {**os.environ, **self._env}),
                    ports,
                )
                self._wait_ready()
                return
            except PortError:
                self._kill()
                if attempt + 1 == PORT_ATTEMPTS or 0 not in self._wanted_ports:
                    raise
            except BaseException:
                self._kill()  # nothing was promised an answer yet
                raise

    def stop(self) -> None:
        """Stop tritonserver: requests in flight are answered first, for at most the exit timeout."""
        if self._keeper is None:
            return
        if not self._stop_sent:
            self._terminate()
        try:
            self._wait_stopped()
        except BaseException:  # a second Ctrl-C
            self._terminate()
            self._keeper.wait()
            raise
        finally:
            self._finish()

    def request_stop(self) -> None:
        """Ask tritonserver to stop and return at once; asked again, kill it. May be called in a signal handler."""
        self._stop_asked.set()
        self._terminate()

    def is_alive(self) -> bool:
        """Whether tritonserver runs (a server with a dead stub does; see `check_alive` and `Control.probe`)."""
        return self._keeper is not None and self._keeper.poll() is None

    def check_alive(self) -> None:
        """Raise DiedError, with the signal and the last lines of the log, unless tritonserver runs.

        Call it after a measurement: a stub that stalls for two seconds can abort the whole server.
        """
        if not self.is_alive():
            raise self._died()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until tritonserver has ended or `timeout_s` is over; True when it has ended."""
        if self._keeper is None:
            return True
        try:
            self._keeper.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def endpoints(self) -> Endpoints:
        """Where it listens; ServerError before it was started."""
        if self._endpoints is None:
            raise ServerError("This EmbeddedServer has no endpoints yet: it was not started. Start it first.")
        return self._endpoints

    @property
    def pid(self) -> int:
        """The process id of tritonserver itself (its children are the stubs); 0 when it does not run."""
        return self._pid

    @property
    def installation(self) -> Installation:
        """Which tritonserver it is, and why; chosen at the start."""
        if self._installation is None:
            raise ServerError("No tritonserver was chosen yet: this EmbeddedServer was not started. Start it first.")
        return self._installation

    @property
    def control_key(self) -> str:
        """The value of the header `control_header`, which the restricted APIs ask for."""
        if self._key is None:
            raise ServerError("This EmbeddedServer has no control key yet: it was not started. Start it first.")
        return self._key.value

    @property
    def control_header(self) -> str:
        """The name of that header over HTTP; over gRPC "triton-grpc-protocol-" comes before it."""
        return CONTROL_HEADER

    @property
    def log_file(self) -> Path:
        """The file that tritonserver and its stubs write to."""
        return self._log.path

    def log_tail(self, n: int = 40) -> str:
        """The last `n` lines of this server's log; also after it has stopped."""
        return "\n".join(self._log.lines()[-n:])

    def describe(self) -> dict[str, Any]:
        """Everything a caller needs to use this server, ready for JSON. The key is not among it, the file that holds it is."""
        return {
            "endpoints": self.endpoints.as_dict(),
            "pid": self.pid,
            "models": list(self.models),
            "repository": str(self.repository),
            "tritonserver": {"binary": str(self.installation.binary), "reason": self.installation.reason},
            "control_header": {"http": CONTROL_HEADER, "grpc": f"triton-grpc-protocol-{CONTROL_HEADER}"},
            "control_key_file": str(self._key.file) if self._key is not None and self._key.file is not None else None,
            "log_file": str(self.log_file),
        }

    # -- control -------------------------------------------------------------------------------------------------------

    def control(self) -> Control:
        """A gRPC connection with the key, to be closed by the caller: `with server.control() as control: ...`"""
        from tritonpilot.control import Control

        return Control(self.endpoints.grpc, self.control_key)

    def load(self, name: str) -> list[ModelState]:
        """Load a model, or load it again after its files changed; see Control.load."""
        with self.control() as control:
            states = control.load(name, probe_inputs=self._probe_inputs.get(name), timeout_s=self._startup_timeout_s)
            if self._trace_url:
                control.set_trace_rate(name)
            return states

    def unload(self, name: str) -> None:
        """Unload a model; see Control.unload."""
        with self.control() as control:
            control.unload(name)

    def statistics(self, name: str = "") -> list[ModelStatistics]:
        """Triton's counters; see Control.statistics."""
        with self.control() as control:
            return control.statistics(name)

    # -- steps of the start --------------------------------------------------------------------------------------------

    def _models_to_load(self) -> tuple[str, ...]:
        if not self.repository.is_dir():
            raise RepositoryError(
                f"There is no model repository at {self.repository}. Nothing was started. Name another, or "
                "make it: tritonpilot build"
            )
        present = models(self.repository)
        if not present:
            raise RepositoryError(
                f"The model repository {self.repository} holds no model (a folder with a config.pbtxt or a version folder). "
                "Nothing was started. Make one: tritonpilot build"
            )
        if self._all_models:
            self._check_built(present)
            return tuple(present)
        if absent := [name for name in self.models if name not in present]:
            raise RepositoryError(
                f"The model repository {self.repository} has no {', '.join(absent)}. Nothing was started. "
                f"It has: {', '.join(present)}."
            )
        chosen = tuple(
            dict.fromkeys(name for model in self.models for name in (*called(self.repository, model), model))
        )
        self._check_built([name for name in chosen if name in present])
        return chosen

    def _check_built(self, names: Sequence[str]) -> None:
        """A fresh clone holds configs alone; Triton would say so in a page of words about version policies."""
        if unbuilt := [name for name in names if not versions(self.repository, name)]:
            raise RepositoryError(
                f"The model repository {self.repository} holds a config.pbtxt but no version folder for {', '.join(unbuilt)}. "
                "Nothing was started. Build them: tritonpilot build --prepare"
            )

    def _with_companion_if_needed(self, installation: Installation) -> tuple[str, ...]:
        """The models to load, without the companion when it was not asked for and every model here wakes its own queue."""
        used = {name: backend(self.repository, name) for name in self.models}
        others = [name for name in self.models if used[name] != COMPANION_BACKEND]
        if not self._all_models or len(others) == len(self.models):
            return self.models
        return self.models if {used[name] for name in others} - {""} - waking_backends(installation) else tuple(others)

    def _check_cpus(self) -> None:
        allowed = os.sched_getaffinity(0)
        if not allowed.issuperset(self._cpus):
            raise HostError(
                f"The server was to be pinned to the CPUs {_listed(self._cpus)}, and this process may use {_listed(allowed)}. "
                "Nothing was started. Choose among these."
            )

    def _launch(
        self, installation: Installation, python: tuple[int, int], environ: dict[str, str], ports: Sequence[int]
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tritonpilot-"))
        self._shm_prefix = f"tritonpilot_{os.getpid()}_{secrets.token_hex(4)}_"
        try:
            log_file = self._given_log_file or self._folder / "tritonserver.log"
            self._log = ServerLog.open(log_file)
            backends = assemble(installation, self._folder, python)
            own = os.environ.get("TRITONPILOT_BACKENDS")  # ours complete only what is incomplete
            is_strict = is_complete(self.repository, Path(own) if own else None)
            assert self._key is not None
            options = Options(
                repository=self.repository,
                models=self.models,
                http_port=ports[0],
                grpc_port=ports[1],
                metrics_port=ports[2],
                control_key=self._key.value,
                shm_prefix=self._shm_prefix,
                exit_timeout_s=self.exit_timeout_s,
                strict_config=is_strict if self._strict_config is None else self._strict_config,
                rate_limit=self._rate_limit,
                rate_limit_resources=self._rate_limit_resources,
                cache_size_bytes=self._cache_size_bytes,
                http_threads=self._http_threads,
                trace_url=self._trace_url,
                extra_args=self._extra_args,
            )
            job = keeper.Job(
                argv=arguments(installation, backends, options),
                env=environ,
                cpus=list(self._cpus),
                stays_awake=self._stays_awake,
                log_file=str(self._log.path),
                parent=os.getpid(),
                http_ports=[ports[0], ports[2]],
                stop_timeout_s=self.exit_timeout_s + UNLOAD_GRACE_S,
                shm_prefix=self._shm_prefix,
                folder=str(self._folder),
            )
            self.progress(f"starting {installation.reason}")
            self._start_keeper(job)
        except BaseException:
            keeper.remove_traces(self._shm_prefix, self._folder)
            raise
        self._endpoints = Endpoints(*(f"{LOOPBACK}:{port}" for port in ports))

    def _start_keeper(self, job: keeper.Job) -> None:
        self._exit_status, self._pid, self._stop_sent = None, 0, False
        # A session of its own: Ctrl-C in the terminal reaches us, and we stop the server. The job goes through a pipe, as it
        # holds the key; -S and -I because the keeper needs the standard library only and nobody's PYTHONPATH.
        with self._log.path.open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", keeper.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        try:
            self._keeper.stdin.write(json.dumps(job).encode())
            self._keeper.stdin.close()
        except BrokenPipeError:
            pass  # it died at once: the line below says so
        word, _, number = self._keeper.stdout.readline().decode().partition(" ")
        if word != "pid":
            died = self._died()
            self._keeper.wait()
            self._finish()
            raise died
        self._pid = int(number)

    def _wait_ready(self) -> None:
        began = time.monotonic()
        deadline = began + self._startup_timeout_s
        # NOTE: both take time, in which Triton loads its models.
        from tritonpilot.control import NotLoadedError

        if self._make_probe_inputs is not None:
            self._probe_inputs = self._make_probe_inputs()
        self._wait_live(deadline)
        with self.control() as control:
            failed = []
            for name in self.models:
                try:
                    for state in control.wait_ready(name, deadline):
                        left = max(1.0, deadline - time.monotonic())
                        control.probe(name, self._probe_inputs.get(name), version=state.version, timeout_s=left)
                except ServerError as error:
                    self._raise_if_ended()
                    unexplained = isinstance(error, NotLoadedError) and not error.reason
                    failed.append(str(NotLoadedError(name, self._log.about(name)) if unexplained else error))
                    continue
                # NOTE: after the probe, which is nobody's request.
                rate = control.set_trace_rate(name) if self._trace_url else 0
                self.progress(f"model {name} is ready" + (f", one of {rate} requests is traced" if rate else ""))
        self._raise_if_ended()
        if failed:
            raise ServerError(self._not_ready(failed))
        if self._warms_http:
            self._warm_http()
        self.progress(f"ready in {time.monotonic() - began:.1f} s")

    def _warm_http(self) -> None:
        from tritonpilot import first_calls

        threads = self._http_threads or TRITONS_HTTP_THREADS
        for name in self.models:
            if (inputs := self._probe_inputs.get(name)) is not None:
                first_calls.call(self.endpoints.http, name, inputs, connections=threads, seconds=FIRST_CALLS_S)

    def _wait_live(self, deadline: float) -> None:
        """Wait until the front ends answer, which they do when the models of the start have loaded or failed."""
        loading: list[str] = []
        while True:
            for line in self._log.new_lines():
                if found := re.search(r'"loading: (\S+):(\d+)"', line):
                    loading.append(found[1])
                    self.progress(f"loading model {found[1]} version {found[2]}")
                elif found := re.search(r"\"successfully loaded '([^']+)'\"", line):
                    loading = [name for name in loading if name != found[1]]
            self._raise_if_ended()
            if self._log.says(
                "failed to start HTTP service|failed to start GRPC service|failed to start Metrics service"
            ):
                raise self._port_lost()
            if _is_live(self.endpoints.http):
                return
            if time.monotonic() > deadline:
                busy = f"; it is still loading {', '.join(loading)}" if loading else ""
                raise ServerError(
                    f"tritonserver was not ready within {self._startup_timeout_s:.0f} s{busy}. It was stopped. "
                    f"Allow it more time, or look at the model. {self._quoted()}"
                )
            self._stop_asked.wait(_POLL_S)

    def _raise_if_ended(self) -> None:
        if self._stop_asked.is_set():
            raise _StopAskedError("The server was asked to stop before it was ready. Nothing is left running.")
        if not self.is_alive():
            if self._log.says("Socket '.*' already in use|failed to start|Address already in use"):
                raise self._port_lost()
            raise self._died()

    # -- after the end -------------------------------------------------------------------------------------------------

    def _wait_stopped(self) -> None:
        """Wait for the end; kill a tritonserver that has answered everything and does not end."""
        answered_at: float | None = None
        last = time.monotonic() + self.exit_timeout_s + UNLOAD_GRACE_S
        while not self.wait(_STOP_POLL_S):
            now = time.monotonic()
            if answered_at is None and any(
                "All models are stopped, unloading" in line for line in self._log.new_lines()
            ):
                answered_at = now
            if now > last or (answered_at is not None and now > answered_at + UNLOAD_GRACE_S):
                self._terminate()

    def _kill(self) -> None:
        if self._keeper is not None:
            if self._keeper.poll() is None:
                self._keeper.send_signal(signal.SIGQUIT)
            self._keeper.wait()
            self._finish()

    def _terminate(self) -> None:
        self._stop_sent = True
        if self._keeper is not None and self._keeper.poll() is None:
            self._keeper.terminate()

    def _finish(self) -> None:
        """Note how the keeper ended and do what it could not do if it was killed."""
        assert self._keeper is not None
        assert self._keeper.stdout is not None
        self._exit_status = self._read_exit_status()
        self._log.close()
        if self._keeper.returncode != 0 and self._pid:
            keeper.end_group(self._pid)
        keeper.remove_traces(self._shm_prefix, self._folder)
        self._keeper.stdout.close()
        self._keeper, self._pid = None, 0

    def _read_exit_status(self) -> int | None:
        if self._exit_status is None and self._keeper is not None and self._keeper.stdout is not None:
            word, _, number = self._keeper.stdout.readline().decode().partition(" ")
            if word == "exit":
                self._exit_status = int(number)
        return self._exit_status

    def _died(self) -> DiedError:
        status = self._read_exit_status()
        if status is None:
            how = "was ended, because its keeper process was killed" if self._pid else "could not be run"
        elif status < 0:
            how = f"died by {signal.Signals(-status).name}"
        else:
            how = f"ended by itself with status {status}"
        return DiedError(f"tritonserver {how}. Nothing of it is left running. {self._quoted()}")

    def _port_lost(self) -> PilotError:
        for endpoint in (self.endpoints.http, self.endpoints.grpc, self.endpoints.metrics):
            port = int(endpoint.rpartition(":")[2])
            if self._log.says(rf":{port}\b.*(already in use|[Ff]ailed|Unavailable)"):
                return port_taken(port)
        return PortError(f"tritonserver could not open its ports. It was stopped. Try again. {self._quoted()}")

    def _not_ready(self, reasons: Sequence[str]) -> str:
        return (
            f"{' '.join(reasons)} The server was stopped and nothing is left running. Correct the model and start again. "
            f"{self._quoted()}"
        )

    def _quoted(self) -> str:
        lines = self._log.telling()
        return "Its log ends with:\n" + "\n".join(f"    {line}" for line in lines) if lines else "Its log is empty."


class DiedError(ServerError):
    """tritonserver is not there any more, though nobody asked it to stop: it was killed, crashed, or ended by itself."""


class _StopAskedError(ServerError):
    """The caller, not Triton, ended the start."""


def serve(server: EmbeddedServer, on_ready: Callable[[EmbeddedServer], None]) -> int:
    """Run `server` in the foreground until SIGINT or SIGTERM; returns the number of that signal.

    `on_ready` is called once, when all models are ready. Requests in flight are answered before it returns; a second signal
    kills. Raises what EmbeddedServer.start raises, and ServerError when tritonserver dies. Call it in the main thread.

        serve(EmbeddedServer(Path("model_repository")), on_ready=lambda server: print(server.endpoints.http))
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 -- the signature of a handler
        received.append(number)
        server.request_stop()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            server.start()
        except _StopAskedError:
            return received[0]
        try:
            on_ready(server)
            while not received:
                if server.wait(_STOP_POLL_S) and not received:
                    server.check_alive()
            server.progress(f"stopping: requests in flight have {server.exit_timeout_s} s to be answered")
        finally:
            server.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return received[0]


def _ignore(line: str) -> None:  # noqa: ARG001
    return


def _is_live(endpoint: str) -> bool:
    connection = http.client.HTTPConnection(endpoint, timeout=1)
    try:
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _listed(cpus: Sequence[int] | set[int]) -> str:
    return ", ".join(str(cpu) for cpu in sorted(cpus))
