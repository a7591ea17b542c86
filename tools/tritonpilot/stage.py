"""How does a service behave with another setting? A real server for the time of a `with` block on which settings are tried.

    with Stage(service, Path("models"), cpus=[0]) as stage:
        stage.apply(Setting(queue_delay_us=2000, max_batch_size=64))
        ...                                            # load on stage.endpoints.grpc, model stage.model, rows stage.samples
        stage.server.check_alive()

It serves a repository of its own in a temporary folder: nothing of the project is changed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from numpy.typing import NDArray

from tritonpilot import build, machine, repository, samples
from tritonpilot.errors import ServerError, SpecError
from tritonpilot.model_config import Target
from tritonpilot.pipeline import parts
from tritonpilot.server import EmbeddedServer, Endpoints
from tritonpilot.setting import Setting
from tritonpilot.spec import LatestVersions, Service, load_services

EXIT_TIMEOUT_S = 2  # nobody but us waits for answers; after a refused reload tritonserver ends no earlier
STEADY_TIMEOUT_S = 15.0
IDLE_LOOK_S = 0.2
IDLE_CORES = 0.1  # wakers and keep-alives of an idle server take below 0.02
LOOKS = 2  # of an idle server, one after the other
DEATH_S = 1.0  # from the end of tritonserver, when calls to it fail, to that of its keeper, who knows how it ended
PREFIX, LOCK = "tritonpilot-stage-", "lock"


class RestlessError(ServerError):
    """The server answers, but it works or has instances that it should not have."""


class Stage:
    """A server with one service (a Triton model: see `setting.find`) under changing settings.

    `models` is the folder of service files, for the models that a pipeline's driver calls. `cpus` pins the server;
    `stays_awake` and `http_threads` as EmbeddedServer's. Errors: SpecError, ModelError, ServerError, HostError.
    """

    def __init__(
        self,
        service: Service,
        models: Path = Path("models"),
        *,
        cpus: Sequence[int] | None = None,
        stays_awake: bool = False,
        http_threads: int = 0,
        target: Target = "auto",
        log_file: Path | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self.service = service.model_copy(update={"version_policy": LatestVersions(latest=1)})
        self.model = service.service
        self.setting: Setting | None = None
        """What is served now; None before the first `apply`, and after one that failed."""
        self._models = models
        self._cpus = cpus
        self._stays_awake = stays_awake
        self._http_threads = http_threads
        self._target: Target = target
        self._log_file = log_file
        self._say = on_progress or (lambda _: None)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._server: EmbeddedServer | None = None
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Stage:
        _remove_left()
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._lock = _locked(Path(self._folder.name))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._stop()
        finally:
            assert self._folder is not None
            assert self._lock is not None
            self._folder.cleanup()
            self._lock.close()

    @property
    def server(self) -> EmbeddedServer:
        """The running server. Raises ServerError before the first setting was applied."""
        if self._server is None:
            raise ServerError("Nothing is served on this stage yet. Apply a setting first.")
        return self._server

    @property
    def has_died(self) -> bool:
        """Whether there was a server, and it ended by itself: `apply` and `restart` start it again."""
        return self._server is not None and not self._server.is_alive()

    def check_alive(self) -> None:
        """Raise DiedError when there was a server and it ended by itself. Call it after an error: one that just died is noticed."""
        if self._server is not None and self._server.wait(DEATH_S):
            self._server.check_alive()

    @property
    def endpoints(self) -> Endpoints:
        """Where it listens; another address after a restart."""
        return self.server.endpoints

    @cached_property
    def samples(self) -> dict[str, NDArray[Any]]:
        """The real rows of the service: input name -> [rows, ...]. Raises SpecError when it names none."""
        if self.service.samples is None:
            raise SpecError(
                f"{self.service.path} names no samples for {self.model}, and a measurement sends real rows. Nothing was "
                "measured. Set `samples` of the model or pipeline."
            )
        return samples.read(self.service.samples)

    def apply(self, setting: Setting) -> None:
        """Serve the service with this setting; returns when it has answered a real row, the old instances are gone and the
        server idles.

        After an error nothing is served and `setting` is None; the next call starts a new server. DiedError is one that did not
        come of the setting, or not surely so: somebody killed the server, or it crashed.
        """
        wanted = setting.applied(self.service)
        if self.has_died:
            self._stop()
        if setting == self.setting and self._server is not None:
            return
        self.setting = None
        publishes = repository.publish(self._root, build.folders(build.plan([wanted, *self._called()], self._target)))
        try:
            if self._server is None or not self._is_reloaded(setting):
                self._start()
                self._wait_steady(setting.instances)
        except ServerError:
            self.check_alive()
            self._stop()  # its index would go on naming the version that failed
            raise
        for change in publishes:
            self._forget_versions_below(change.version, change.name)
        self.setting = setting
        self._say(f"{self.model} is served with {setting.describe()}")

    def restart(self) -> None:
        """Start the server again with what it served last, at a new address; for one that died, or that is no longer trusted."""
        setting = self.setting
        self._stop()
        if setting is not None:
            self.apply(setting)

    def _is_reloaded(self, setting: Setting) -> bool:
        """Load the model again; False when an old instance would not end, which Triton does once in some hundred reloads."""
        self.server.load(self.model)
        try:
            self._wait_steady(setting.instances)
        except RestlessError as error:
            self._say(f"{error} Its server is started again.")
            self._stop()
            return False
        return True

    def _stop(self) -> None:
        self.setting = None
        if self._server is not None:
            server, self._server = self._server, None
            server.stop()

    @property
    def _root(self) -> Path:
        if self._folder is None:
            raise ServerError("This stage was not set up. Enter its `with` block first.")
        root = Path(self._folder.name, "model_repository")
        root.mkdir(exist_ok=True)
        return root

    def _called(self) -> list[Service]:
        """What a pipeline's driver calls, as its own service files say."""
        named = str(self.service.model.parameters.get("pilot_steps", "")) if self.service.model is not None else ""
        names = set(named.split(",")) if named else set()
        if not names:
            return []
        everything = (part for service in load_services(self._models) for part in parts(service))
        return [part for part in everything if part.service in names]

    def _start(self) -> None:
        server = EmbeddedServer(
            self._root,
            cpus=self._cpus,
            stays_awake=self._stays_awake,
            http_threads=self._http_threads,
            log_file=self._log_file,
            probe_inputs=self._probe_inputs(),
            on_progress=self._say,
            exit_timeout_s=EXIT_TIMEOUT_S,
        )
        server.start()
        self._server = server

    def _probe_inputs(self) -> Mapping[str, Mapping[str, NDArray[Any]]]:
        return {
            part.service: samples.first_request(samples.read(part.samples), is_batched=part.batching.max_batch_size > 0)
            for part in (self.service, *self._called())
            if part.samples is not None
        }

    def _forget_versions_below(self, newest: int, name: str) -> None:
        """Old precisions of a large model would fill the disk; Triton has loaded the newest alone."""
        for version in repository.versions(self._root, name):
            if version < newest:
                shutil.rmtree(self._root / name / str(version))

    def _wait_steady(self, instances: int) -> None:
        """Wait until the old copy's stubs have ended and the server does nothing. Raises RestlessError when that takes too long."""
        server = self.server
        deadline = time.monotonic() + STEADY_TIMEOUT_S
        idle = 0
        used = machine.tree_cpu_s(server.pid)
        seen = time.monotonic()
        while idle < LOOKS:
            time.sleep(IDLE_LOOK_S)
            server.check_alive()
            before, used = used, machine.tree_cpu_s(server.pid)
            looked, seen = seen, time.monotonic()
            stubs = len(machine.stub_pids(server.pid).get(self.model, []))
            is_idle = (used - before) / (seen - looked) < IDLE_CORES and stubs in (0, instances)
            idle = idle + 1 if is_idle else 0
            if time.monotonic() > deadline:
                raise RestlessError(
                    f"{self.model} answers, but its server did not come to rest in {STEADY_TIMEOUT_S:g} s: {stubs} stubs for "
                    f"{instances} instances, {(used - before) / (seen - looked):.2f} cores busy. Nothing was measured. "
                    f"Look at {os.fspath(server.log_file)}, and at who else sends it requests."
                )


def _locked(folder: Path) -> IO[bytes]:
    """A locked file in the folder of a stage: the lock ends with this process, however it ends."""
    aside = folder / f"{LOCK}.new"
    file = aside.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    aside.rename(folder / LOCK)  # under its name it is locked from the first moment on
    return file


def _remove_left() -> None:
    """Remove the folders of stages whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            with (folder / LOCK).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is in use, or another user's
            continue
