"""A stub is killed under load, again and again, and then stopped until tritonserver aborts. How soon is Triton serving again?

`tritonpilot supervise` runs the server, the entry stands in front of it, and a real Prometheus evaluates the deployed rules. The
callers are those of the balancer's proof: clients that ask again themselves, plain ones that leave that to the entry by a header,
and plain ones without it, who may lose the requests that were in the stub and no others.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from perf import emulated
from perf.frame import Bench, NoisyRoundError, Outcome
from perf.memory import stubs
from perf.prometheus import scraping
from perf.proofs.balancer import LOST, MODEL, ON_THE_WAY_S, RETRYABLE, Call, Load
from perf.subjects import Entry, command
from tritonpilot import metrics
from tritonpilot.errors import MeasurementError
from tritonpilot.ports import holder_pid

PER_S = {**dict.fromkeys(RETRYABLE, 30.0), LOST: 150.0}  # an execution follows the other: a kill hits one
KILLS, EVERY_S = 24, 25.0
QUICK_KILLS, QUICK_EVERY_S = 3, 8.0
STEADY_S = 3.0
STOPPED_S = 3.0
STOP_BAR_S = 5.0
DEADLINE_S = 10.0
PATIENCE_S = 30.0
ALERTS = {"StubDied": f'model="{MODEL}",', "TritonRestarted": ""}


@dataclass(frozen=True)
class Fault:
    """What came of one."""

    again_s: float
    """From the fault to the first answer to a request that came after it."""
    lost: int
    """Requests without the header that failed."""
    late: int
    """Of these, such that came after the fault."""
    lost_retryable: int
    errors: tuple[str, ...]


def heal_stub(bench: Bench) -> Outcome:
    """The longest time from a kill -9 to the next answer."""
    kills, every_s = (QUICK_KILLS, QUICK_EVERY_S) if bench.quick else (KILLS, EVERY_S)
    with tempfile.TemporaryDirectory(prefix="tritonpilot-proof-") as name, ExitStack() as stack:
        folder = Path(name)
        root = emulated.repository_of(folder, {MODEL: "batching: {max_batch_size: 16}"})
        supervised = stack.enter_context(_supervised(root, bench.cores.server))
        entry = stack.enter_context(_entered(supervised, bench.cores.server))
        prometheus = stack.enter_context(scraping(folder, {"supervise": supervised["supervisor"]}, 1.0))
        prometheus.wait_for("supervisor_stub_deaths_total", PATIENCE_S)
        began = time.monotonic()
        load = Load(entry, bench.cores.client, PER_S, DEADLINE_S)
        with load:
            load.wait_for_answers()
            time.sleep(STEADY_S)
            begun: list[float] = []
            for number in range(kills):
                begun.append(_kill(load, _server(supervised)))
                time.sleep(every_s)
                bench.say(f"kill {number + 1} of {kills}: answers again after {_again_s(load.calls, begun[-1]):.2f} s")
            minutes = (time.monotonic() - began) / 60
            _wait(lambda: _figure(supervised, "supervisor_model_unwell") == 0, "the model to be well")
            server = _server(supervised)
            stopped_s = _stop(server)
            _wait(lambda: not Path(f"/proc/{server}").exists(), "the abort that a stopped stub causes")
            _wait(lambda: _figure(supervised, "supervisor_restarts_total") >= 1, "the restart")
            _wait(lambda: _again_s(load.calls, stopped_s) < PATIENCE_S, "answers after the restart")
            time.sleep(STEADY_S)
        fired = {
            each.labels["alertname"]
            for alert, labels in ALERTS.items()
            for each in prometheus.wait_for(f'ALERTS{{alertname="{alert}",{labels}alertstate="firing"}}', PATIENCE_S)
        }
        freed = _figure(supervised, "supervisor_shm_freed_bytes_total")
        reloads = _figure(supervised, "supervisor_heals_total")
    faults = [_fault(load.calls, at_s, end_s) for at_s, end_s in zip(begun, [*begun[1:], stopped_s], strict=True)]
    stop = _fault(load.calls, stopped_s, float("inf"))
    if not any(fault.lost for fault in faults):
        raise NoisyRoundError("no kill hit a request that would show it")
    retryable = sum(fault.lost_retryable for fault in faults)
    again = [fault.again_s for fault in faults]
    return Outcome(
        max(again),
        max(again) - min(again),
        len(again),
        ok=retryable == 0 and not any(fault.late for fault in faults) and stop.again_s < STOP_BAR_S and len(fired) == 2,
        details={
            "kills": kills,
            "minutes": round(minutes, 1),
            "again_s": [round(each, 2) for each in again],
            "lost_without_header": [fault.lost for fault in faults],
            "of_these_not_in_the_stub": sum(fault.late for fault in faults),
            "retryable_calls": sum(call.group in RETRYABLE for call in load.calls),
            "retryable_calls_failed": retryable,
            "errors": sorted({error for fault in faults for error in fault.errors}),
            "heals": reloads,
            "stopped_stub_again_s": round(stop.again_s, 2),
            "stopped_stub_lost_without_header": stop.lost,
            "stopped_stub_retryable_calls_failed": stop.lost_retryable,
            "stopped_stub_errors": stop.errors,
            "alerts": sorted(fired),
            "shared_memory_freed_mb": round(freed / 1e6, 1),
            "calls_per_s": sum(PER_S.values()),
            "model": f"emulated: {emulated.V100}",
        },
    )


@contextmanager
def _supervised(root: Path, core: int) -> Iterator[dict[str, str]]:
    """The endpoints of a supervised Triton on that core."""
    ports = ("--http-port", "--grpc-port", "--metrics-port", "--port")
    options = ["--repository", str(root), "--cpus", str(core), *(part for port in ports for part in (port, "0"))]
    with command("supervise", options) as (endpoints, _):
        yield endpoints


@contextmanager
def _entered(supervised: dict[str, str], core: int) -> Iterator[Entry]:
    ports = ("--http-port", "--grpc-port", "--metrics-port")
    options = ["--triton-http", supervised["http"], "--triton-grpc", supervised["grpc"], "--cpus", str(core)]
    with command("entry", [*options, *(part for port in ports for part in (port, "0"))]) as (endpoints, process):
        yield Entry(endpoints["http"], endpoints["grpc"], endpoints["metrics"], process.pid)


def _server(supervised: dict[str, str]) -> int:
    """The tritonserver that listens now."""
    pid = holder_pid(int(supervised["grpc"].rpartition(":")[2]))
    if pid is None:
        raise MeasurementError("Nobody listens at the supervised Triton's port. Nothing is reported.")
    return pid


def _kill(load: Load, server: int) -> float:
    """Kill the stub while it computes; when that was."""
    _wait(lambda: bool(_live(server)), "a stub to kill")
    stub = _live(server)[-1]
    _wait(lambda: load.under_way >= 2, "calls under way", look_s=0.001)
    time.sleep(ON_THE_WAY_S)
    killed_s = time.perf_counter()
    os.kill(stub, signal.SIGKILL)
    return killed_s


def _stop(server: int) -> float:
    """Stop the stub for a while; when that began."""
    stub = _live(server)[-1]
    stopped_s = time.perf_counter()
    os.kill(stub, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    with suppress(ProcessLookupError):  # it went with its server
        os.kill(stub, signal.SIGCONT)
    return stopped_s


def _live(server: int) -> list[int]:
    return list(stubs(server).values())


def _again_s(calls: Sequence[Call], fault_s: float) -> float:
    """Seconds until a call that was due after the fault was answered; infinite while none was."""
    found = [
        call.at_s + call.latency_ms / 1e3 - fault_s for call in list(calls) if call.at_s > fault_s and not call.error
    ]
    return min(found, default=float("inf"))


def _fault(calls: Sequence[Call], fault_s: float, end_s: float) -> Fault:
    """What came of the calls that were under way, or came, between two faults."""
    ended = [call for call in calls if fault_s <= call.at_s + call.latency_ms / 1e3 < end_s]
    failed = [call for call in ended if call.error]
    lost = [call for call in failed if call.group == LOST]
    return Fault(
        _again_s(calls, fault_s),
        len(lost),
        sum(call.at_s > fault_s for call in lost),
        sum(call.group in RETRYABLE for call in failed),
        tuple(sorted({call.error for call in failed})),
    )


def _figure(supervised: dict[str, str], name: str) -> float:
    """The sum of a metric of the supervisor."""
    return sum(each.value for each in metrics.scrape(supervised["supervisor"]) if each.name == name)


def _wait(condition: Callable[[], bool], what: str, look_s: float = 0.05) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise MeasurementError(f"Waited {PATIENCE_S:g} s for {what}. Nothing is reported.")
        time.sleep(look_s)
