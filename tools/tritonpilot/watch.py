"""Does every model of this Triton really answer, now? A small exporter that asks each of them every few seconds.

    run(Settings(repository=Path("model_repository"), key=control_key()), on_ready=print)      # until a signal; /metrics at 8103
    report = once(settings);  report.is_well, report.models[0].said

Triton's own readiness stays at 200 when the process behind a Python backend has died, and its counters stand still as they do
without traffic. So each loaded model gets a real inference (tritonpilot.probes), in the lowest class of callers, so that it goes
before nobody.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import grpc  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tritonpilot import control_key as control_keys
from tritonpilot.control import Control, Inputs, ModelState, one_paragraph
from tritonpilot.errors import HostError, ServerError, SpecError
from tritonpilot.exporter import serving
from tritonpilot.probes import Model, probe_of, takes_warmup

CALL_TIMEOUT_S = 5.0  # of what is no inference
PATIENCE_S = 1.0  # the next model is asked when one takes longer: a model that hangs must not hide the others
PROBES_MOST = 64  # under way at once
BUSY_WAIT_S = 1.0
_POLL_S = 0.05
_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")

Result = Literal["ok", "busy", "refused", "failed"]
RESULTS: tuple[Result, ...] = ("ok", "busy", "refused", "failed")


@dataclass(frozen=True)
class Settings:
    """Which Triton, and who may ask. A port of 0 is a free one."""

    triton_grpc: str = "127.0.0.1:8001"
    repository: Path | None = None
    """The model repository, for the warmup data in it; without it models get zeros."""
    key: str | None = field(default=None, repr=False)
    """Of Triton's restricted APIs; without it models that do not load are not seen."""
    host: str = "127.0.0.1"
    port: int = 8103
    every_s: float = 5.0
    timeout_s: float = 10.0
    """Of an inference."""
    probe_inputs: Mapping[str, Inputs] = field(default_factory=dict)
    """Input name -> array, by model: what these are asked with instead."""


@dataclass(frozen=True)
class ModelReport:
    """One version of a model."""

    model: str
    version: str
    state: str
    """In Triton's repository index: READY, LOADING, UNLOADING or UNAVAILABLE."""
    result: Result | None = None
    """ok: it answered. busy: its queue refused the probe or let it wait too long, while others were answered. refused: it is no
    model for zeros, and nothing better is known to ask it. None: not asked."""
    seconds: float | None = None
    """How long the answer took."""
    has_warmup: bool | None = None
    """None: not known, or nothing to warm up (`takes_warmup`)."""
    said: str = ""
    """Why it is not ready or not asked with its warmup data, and what Triton answered instead of an inference."""

    @property
    def is_well(self) -> bool:
        """Whether it is loaded and answers somebody."""
        return self.state == "READY" and self.result not in ("failed", None)


@dataclass(frozen=True)
class Report:
    """What one look has found. `said` is why Triton could not be asked, or not for everything."""

    is_up: bool
    models: tuple[ModelReport, ...] = ()
    said: str = ""

    @property
    def is_well(self) -> bool:
        """Whether Triton serves models, and each of them answers."""
        return self.is_up and bool(self.models) and all(model.is_well for model in self.models)


@dataclass(frozen=True)
class Endpoints:
    """host:port of each service of a running watch."""

    metrics: str


def run(settings: Settings, on_ready: Callable[[Endpoints], None], say: Callable[[str], None] = lambda _: None) -> int:
    """Look every `every_s` until SIGINT or SIGTERM; returns the number of that signal. Call it in the main thread.

    Triton need not run: `triton_up` says so, and models are asked again as soon as it is there. `say` is told what changes.
    Raises SpecError for a wrong address, and PortError for a port that is taken or a host that is not here.
    """
    metrics = WatchMetrics()
    last: Report | None = None
    try:
        with (
            Watch(settings) as watch,
            serving(metrics.registry, settings.host, settings.port, "The watch") as address,
            _signals(),
        ):
            on_ready(Endpoints(address))
            while True:
                began_s = time.monotonic()
                report = watch.look()
                metrics.take(report)
                for line in changes(last, report):
                    say(line)
                last = report
                time.sleep(max(0.0, began_s + settings.every_s - time.monotonic()))
    except _Stopped as stopped:
        return stopped.signal


def once(settings: Settings) -> Report:
    """Look once. Raises SpecError for a wrong address; everything else is in the report."""
    with Watch(settings) as watch:
        return watch.look()


def control_key(file: Path | None = None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The key: from `file`, else from TRITONPILOT_CONTROL_KEY, else the one that `tritonpilot serve` keeps; None: there is none.

    Raises HostError for a file that cannot be read or holds no key.
    """
    if file is None:
        is_known = control_keys.VARIABLE in environ or control_keys.key_file(environ).exists()
        return control_keys.control_key(environ).value if is_known else None
    try:
        key = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise HostError(
            f"The control key in {file} cannot be read: {error}. Nothing was started. Make it readable to this user, or leave the "
            "file out: models that do not load are not seen then."
        ) from None
    if not control_keys.ACCEPTED.fullmatch(key):
        raise HostError(f"{file} holds no usable control key. Nothing was started. Give the file with Triton's key.")
    return key


def is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    return bool(_ADDRESS.fullmatch(text)) and 0 < int(text.rpartition(":")[2]) < 65536


def lines(report: Report) -> list[str]:
    """The report for a person."""
    if not report.is_up:
        return [report.said]
    models = [
        _line(each) + (f" ({each.seconds * 1e3:.1f} ms)" if each.seconds is not None else "") for each in report.models
    ]
    return [*filter(None, [report.said]), *(models or ["no model is loaded"])]


def changes(before: Report | None, now: Report) -> list[str]:
    """What to tell a person who has read the last look's lines."""
    lines = []
    if before is None or before.is_up != now.is_up or before.said != now.said:
        lines.append(now.said or f"Triton answers; models: {len(now.models)}")
    was = {} if before is None else {(each.model, each.version): each for each in before.models}
    for each in now.models:
        last = was.get((each.model, each.version))
        if last is None:
            if not each.is_well or each.said:
                lines.append(_line(each))
        elif (last.state, last.result, bool(last.said)) != (each.state, each.result, bool(each.said)):
            lines.append(_line(each))
    return lines


class Watch:
    """Looks at one Triton. Not for several threads; a look takes as long as its slowest inference."""

    def __init__(self, settings: Settings) -> None:
        """Raises SpecError for a wrong address."""
        address = settings.triton_grpc
        if not is_address(address):
            raise SpecError(
                f"--triton-grpc is {address!r}, but must be HOST:PORT, as 127.0.0.1:8001. Nothing was started."
            )
        self._settings = settings
        self._pool = ThreadPoolExecutor(PROBES_MOST, thread_name_prefix="pilot-watch")
        self._answered: Mapping[Model, int] = {}
        """Requests that were answered until the last look."""
        self._connect()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; inferences under way are cancelled."""
        self._disconnect()
        self._pool.shutdown(cancel_futures=True)

    def look(self, only: str = "") -> Report:
        """Ask Triton for its models, and each model that is loaded for an answer, or `only` one."""
        try:
            return self._look(only)
        except ServerError as error:
            self._answered = {}
            # A connection of its own to the next server: gRPC would wait ever longer before it tries again.
            self._disconnect()
            self._connect()
            return Report(False, said=str(error))

    def _look(self, only: str) -> Report:
        self._control.server_version(timeout_s=CALL_TIMEOUT_S)
        states, said = self._listed()
        states = [state for state in states if only in ("", state.name)]
        answered = self._answered or self._counts()
        probes = [(state, self._probe_soon(state)) for state in states]
        found = [_report(state) if probe is None else probe.result() for state, probe in probes]
        if any(each.result in ("busy", "failed") for each in found):
            found = self._judged(found, answered)
        self._answered = self._counts()
        return Report(True, tuple(found), said)

    def _connect(self) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        options += [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._control = Control(self._settings.triton_grpc, self._settings.key)
        self._channel = grpc.insecure_channel(self._settings.triton_grpc, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def _disconnect(self) -> None:
        self._channel.close()
        self._control.close()

    def _listed(self) -> tuple[list[ModelState], str]:
        """What is loaded or should be, and why that is not all. Raises ServerError when Triton cannot be reached."""
        try:
            index = self._control.index(timeout_s=CALL_TIMEOUT_S)
        except ServerError as refused:
            loaded = [ModelState(name, version, "READY", "") for name, version in self._counts()]
            return loaded, f"Models that do not load are not seen: {refused}"
        # Versions that were unloaded or never loaded are in the index too.
        return [state for state in index if state.state and state.reason != "unloaded"], ""

    def _counts(self) -> dict[Model, int]:
        statistics = self._control.statistics(timeout_s=CALL_TIMEOUT_S)
        return {(each.name, each.version): each.success.count for each in statistics}

    def _probe_soon(self, state: ModelState) -> Future[ModelReport] | None:
        """The probe's future, done or under way for PATIENCE_S: one after the other, they take no core from each other."""
        if state.state != "READY":
            return None
        probe = self._pool.submit(self._probe, state)
        wait([probe], PATIENCE_S)
        return probe

    def _probe(self, state: ModelState) -> ModelReport:
        """The report; whether it is really busy is for `_judged` to find out."""
        name, version = model = state.name, state.version
        report = _report(state)
        folder = None if self._settings.repository is None else self._settings.repository / name
        is_real = True
        try:
            asked = service_pb2.ModelConfigRequest(name=name, version=version)
            config = self._stub.ModelConfig(asked, timeout=CALL_TIMEOUT_S).config
            request, is_real, remark = probe_of(model, config, folder, self._settings.probe_inputs.get(name))
            has_warmup = bool(config.model_warmup) if takes_warmup(config) else None
            report = replace(report, has_warmup=has_warmup, said=remark)
            began_s = time.monotonic()
            self._infer(request, config.model_transaction_policy.decoupled)
            return replace(report, result="ok", seconds=time.monotonic() - began_s)
        except grpc.RpcError as error:
            said = one_paragraph(error.details() or error.code().name)
            return replace(report, result=_result(error.code(), said, is_real), said=said)
        except _NotAnsweredError as error:
            return replace(report, result="failed", said=str(error))

    def _infer(self, request: service_pb2.ModelInferRequest, is_decoupled: bool) -> None:
        if not is_decoupled:
            self._stub.ModelInfer(request, timeout=self._settings.timeout_s)
            return
        # The end of the stream is the final answer; this half closes after the one request.
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for answer in self._stub.ModelStreamInfer(iter([request]), timeout=self._settings.timeout_s):
            if answer.error_message:
                raise _NotAnsweredError(one_paragraph(answer.error_message))

    def _judged(self, found: Iterable[ModelReport], answered: Mapping[Model, int]) -> list[ModelReport]:
        """Who did not answer is looked at again: was it unloaded meanwhile, does it answer others? Raises ServerError."""
        states = {(state.name, state.version): state for state in self._listed()[0]}
        judged = []
        for each in found:
            model = each.model, each.version
            state = states.get(model)
            if each.result not in ("busy", "failed"):
                judged.append(each)
            elif state is not None and state.state != "READY":
                judged.append(_report(state))
            elif state is not None:
                is_busy = each.result == "busy" and self._answers_others(model, answered)
                judged.append(replace(each, result="busy" if is_busy else "failed"))
        return judged

    def _answers_others(self, model: Model, answered: Mapping[Model, int]) -> bool:
        """Whether requests have been answered since the last look; one that ends soon counts too."""
        before = answered.get(model, 0)
        until_s = time.monotonic() + BUSY_WAIT_S
        while True:
            if (now := self._counts().get(model, 0)) and now != before:  # a reload counts from 0 on
                return True
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)


class WatchMetrics:
    """The last look and the counts of all, for Prometheus."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._report: Report | None = None
        self._counts: dict[tuple[str, Result], int] = {}

    def take(self, report: Report) -> None:
        """What the next scrapes are told. Models that are gone have no gauges any more."""
        for each in report.models:
            for result in RESULTS:
                count = self._counts.get((each.model, result), 0)  # from 0 on: a counter that is born at 1 has no rate
                self._counts[each.model, result] = count + (each.result == result)
        self._report = report

    def collect(self) -> Iterator[Any]:
        """All families (prometheus_client's protocol of a collector)."""
        report = self._report
        if report is None:  # not known yet, which is no outage
            return
        up = GaugeMetricFamily("triton_up", "1: Triton answers", value=int(report.is_up))
        of_version, of_model = ("model", "version"), ("model",)
        ready = GaugeMetricFamily("model_ready", "1: READY in Triton's repository index", labels=of_version)
        success = GaugeMetricFamily(
            "model_probe_success", "1: it answers inferences, though its queue may be full", labels=of_version
        )
        seconds = GaugeMetricFamily(
            "model_probe_seconds", "How long the last probe's inference took", labels=of_version
        )
        warmup = GaugeMetricFamily("model_warmup", "1: it is warmed up when it is loaded", labels=of_model)
        probes = CounterMetricFamily(
            "probes", "Inferences that were asked for: ok, busy, refused, failed", labels=("model", "result")
        )
        warmed: dict[str, bool] = {}
        for each in report.models:
            key = each.model, each.version
            ready.add_metric(key, int(each.state == "READY"))
            if each.result is not None:
                success.add_metric(key, int(each.result != "failed"))
            if each.seconds is not None:
                seconds.add_metric(key, each.seconds)
            if each.has_warmup is not None:
                warmed[each.model] = warmed.get(each.model, True) and each.has_warmup
        for model, has_warmup in warmed.items():
            warmup.add_metric((model,), int(has_warmup))
        for of_result, count in tuple(self._counts.items()):
            probes.add_metric(of_result, count)
        yield from (up, ready, success, seconds, warmup, probes)


class _NotAnsweredError(Exception):
    """A stream ended with an error."""


class _Stopped(BaseException):
    """This signal came. Like KeyboardInterrupt not to be caught on the way."""

    def __init__(self, number: int) -> None:
        self.signal = number


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise _Stopped in the main thread, once."""

    def stop(number: int, _: object) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)
        raise _Stopped(number)

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in handlers:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _report(state: ModelState) -> ModelReport:
    return ModelReport(state.name, state.version, state.state, said=one_paragraph(state.reason))


def _result(code: grpc.StatusCode, said: str, is_real: bool) -> Result:
    """What to make of an error."""
    if code == grpc.StatusCode.INVALID_ARGUMENT and not is_real:
        return "refused"
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED) and "is not healthy" not in said:
        return "busy"
    return "failed"


def _line(each: ModelReport) -> str:
    what = f"model {each.model} version {each.version}" if each.version else f"model {each.model}"
    if each.state != "READY":
        return f"{what} is {each.state}: {each.said or 'no reason given'}"
    if each.result == "failed":
        return f"{what} is READY, but does not answer an inference: {each.said}"
    if each.result == "refused":
        return f"{what} answers, but refuses zeros; give it warmup data or `samples`: {each.said}"
    if each.result == "busy":
        return f"{what} answers others, but not the probe: {each.said}"
    return f"{what} answers" + (f"; {each.said}" if each.said else "")
