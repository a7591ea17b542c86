"""Who wakes the models whose backends cannot do it themselves? The companion: two threads in a stub of its own.

    companion = Companion(http_endpoint, metrics_endpoint, name="pilot_companion", server_pid=..., say=..., woke=..., needed=...)
    companion.start();  ...;  companion.stop()

One thread probes whether this server has the stall at all (pilotlib.stall_probe), again every hour, and the other looks and
wakes (pilotlib.companion) unless the probe has said that it does not.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pilotlib.companion import IDLE_AFTER_S, IDLE_TICK_S, TICK_S, Lookout
from pilotlib.loopback import CONTENT_LENGTH, answer, post, wake_request, zeros
from pilotlib.server_metrics import Model, Scraper, counts, names
from pilotlib.stall_probe import StallProbe
from pilotlib.waker import WAKE_ID, plan

# A train of twelve stalled in each of the runs that the decision record names. A server where the race is lost only once in
# 150 trials is still found out but for one time in a thousand.
TRIALS = 1100
PROBE_MS = 1.0  # how long an execution of the probe takes
PROBE_AGAIN_S = 3600.0
RETRY_S = 1.0  # after something did not answer
CONFIG_EVERY_S = 5.0  # one model's config is read again
TELL_EVERY_S = 1.0
FAILURES_TOLD = 5  # a server that starts or stops does not answer now and then
SELF_WAKING = b"pilot_wakes_total"
COST_OF_LOOK_S = 0.0005  # until one was measured
COSTS_KEPT = 9
CLEAN_COST = 1.5  # of the median: when a look costs the server more, it did something else at the same time
INPUT, OUTPUT = "milliseconds", "slept"


@dataclass(frozen=True)
class Target:
    """A model that may need us: its wake, or why it gets none."""

    wake: bytes | None
    remark: str = ""


def target(model: Model, config: Mapping[str, Any]) -> Target:
    """What to send a model with this config (Triton's JSON form)."""
    parameters = {name: holder.get("string_value", "") for name, holder in config.get("parameters", {}).items()}
    priority = parameters.get("pilot_wake_priority", "")
    level = int(priority) if priority.isdigit() else 0
    wanted = plan(config, level)
    if not wanted.is_needed or parameters.get("pilot_waker") == "off" or not config.get("output"):
        return Target(None)
    if not wanted.is_rejected:
        # A backend that is not ours would execute it: an answer of zeros among its users', at the price of an inference.
        return Target(None, f'model "{model[0]}" is not woken, so a request of it may wait 500 ms: {wanted.reason}')
    output = config["output"][0]["name"]
    return Target(wake_request(WAKE_ID, model[0], int(model[1]), zeros(config), output, level))


class Companion:
    """Threads of one process.

    `say` gets lines for the log, `woke` a model and how often it was woken, `needed` what the probe found.
    """

    def __init__(
        self,
        http: tuple[str, int],
        metrics: tuple[str, int],
        *,
        name: str,
        say: Callable[[str], None],
        woke: Callable[[str, int], None],
        needed: Callable[[bool], None],
        server_pid: int,
        trials: int = TRIALS,
    ) -> None:
        self._http = http
        self._scraper = Scraper(metrics)
        self._name = name
        self._say = say
        self._woke = woke
        self._report = needed
        self._server_clock = cpu_clock(server_pid)
        self._trials = trials
        self._is_needed = True
        self._stopping = threading.Event()
        self._may_rest = threading.Condition()
        self._targets: dict[Model, Target] = {}
        self._waiting: dict[socket.socket, Model] = {}
        self._costs = [COST_OF_LOOK_S]
        self._config_s = self._tell_s = 0.0
        self._untold: dict[str, int] = {}
        self._failures = 0
        self._threads = [
            threading.Thread(target=run, name=f"pilot-companion-{what}", daemon=True)
            for what, run in (("probe", self._probe), ("watch", self._watch))
        ]

    def start(self) -> None:
        """Begin; returns at once. The server need not answer yet."""
        self._report(True)
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the threads and close the connections."""
        self._stopping.set()
        with self._may_rest:
            self._may_rest.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        if not any(thread.is_alive() for thread in self._threads):
            self._scraper.close()
            for connection in self._waiting:
                connection.close()

    # -- the experiment ------------------------------------------------------------------------------------------------

    def _probe(self) -> None:
        probe = StallProbe(self._http, probe_request(self._name))
        said: bool | None = None
        while not self._stopping.is_set():
            try:
                is_ready = _get(self._http, f"/v2/models/{self._name}/ready") is not None
                found = probe.stalls(self._trials, self._stopping.is_set) if is_ready else None
            except OSError:
                found = None  # it starts, or stops
            if found is None:
                self._stopping.wait(RETRY_S)
                continue
            self._set_needed(found)
            if said is not found:
                said = found
                self._say(
                    "this server's batcher has the 500 ms stall: models that do not wake themselves are woken from outside"
                    if found
                    else f"no stall of the batcher in {self._trials} trials: models are not woken from outside"
                )
            self._stopping.wait(PROBE_AGAIN_S)

    def _set_needed(self, is_needed: bool) -> None:
        with self._may_rest:
            self._is_needed = is_needed
            self._may_rest.notify_all()
        self._report(is_needed)

    # -- the watch -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        lookout, rests = Lookout(), 0
        while not self._stopping.is_set():
            if not self._is_needed:
                with self._may_rest:
                    self._may_rest.wait_for(lambda: self._is_needed or self._stopping.is_set())
                lookout = Lookout()
                continue
            server_cpu_s = self._server_cpu_s()
            rests += 1
            if not lookout.is_at_rest(server_cpu_s):
                self._try_tick(lookout, server_cpu_s)
                rests = 0 if lookout.has_news else rests
            # NOTE: not Event.wait, which takes locks and twice the CPU time.
            time.sleep(IDLE_TICK_S if rests * TICK_S > IDLE_AFTER_S else TICK_S)

    def _try_tick(self, lookout: Lookout, server_cpu_s: float | None) -> None:
        try:
            self._tick(lookout, server_cpu_s)
            self._failures = 0
        except OSError as error:
            self._failures += 1
            if self._failures == FAILURES_TOLD:
                self._say(f"the server does not answer, so models are not woken from outside: {error}")
            self._stopping.wait(RETRY_S)

    def _tick(self, lookout: Lookout, server_cpu_s: float | None) -> None:
        step = lookout.tick(time.monotonic(), server_cpu_s, time.thread_time())
        wanted = list(step.wake)
        if step.look:
            self._take_answers()
            self._read_config_again()
            began_s, before_s = time.monotonic(), self._server_cpu_s()
            text = self._scraper.scrape()
            now_s, after_s = time.monotonic(), self._server_cpu_s()
            cost_s = now_s - began_s if before_s is None or after_s is None else after_s - before_s
            self._costs = [*self._costs[-COSTS_KEPT + 1 :], cost_s]
            waiting: dict[Model, int] = {}
            for model in self._waiting.values():
                waiting[model] = waiting.get(model, 0) + 1
            everything = counts(text)
            self._read_new_configs(set(everything))
            own = names(text, SELF_WAKING)
            mine = {m: c for m, c in everything.items() if m[0] not in own and self._wake_of(m) is not None}
            usual_s = sorted(self._costs)[len(self._costs) // 2]
            is_clean = cost_s < CLEAN_COST * usual_s
            wanted += lookout.looked(now_s, mine, waiting, usual_s, self._server_cpu_s() if is_clean else None)
        for model in wanted:
            self._send(model, lookout)

    def _send(self, model: Model, lookout: Lookout) -> None:
        wake = self._wake_of(model)
        if wake is None:
            return
        self._waiting[post(self._http, wake)] = model
        lookout.paid(len(wake))
        self._untold[model[0]] = self._untold.get(model[0], 0) + 1
        # A custom metric costs as much as a wake: the last second's wakes are told with the next one.
        now_s = time.monotonic()
        if now_s >= self._tell_s:
            self._tell_s = now_s + TELL_EVERY_S
            for name, wakes in self._untold.items():
                self._woke(name, wakes)
            self._untold = {}

    def _take_answers(self) -> None:
        """Forget the wakes that were answered: what Triton said does not matter, the next look tells whether it helped."""
        if not self._waiting:
            return
        for connection in select.select(list(self._waiting), [], [], 0)[0]:
            del self._waiting[connection]
            with contextlib.suppress(OSError):
                answer(connection)

    def _wake_of(self, model: Model) -> bytes | None:
        found = self._targets.get(model)
        return found.wake if found else None

    def _read_new_configs(self, present: set[Model]) -> None:
        for gone in set(self._targets) - present:
            del self._targets[gone]
        for model in present - set(self._targets):
            self._read_config(model)

    def _read_config_again(self) -> None:
        """The config of one model, now and then: it can change in place."""
        if self._targets and time.monotonic() >= self._config_s:
            self._read_config(next(iter(self._targets)))

    def _read_config(self, model: Model) -> None:
        self._config_s = time.monotonic() + CONFIG_EVERY_S
        text = _get(self._http, f"/v2/models/{model[0]}/versions/{model[1]}/config")
        before = self._targets.pop(model, None)  # and to the end of the row
        found = Target(None) if text is None else target(model, json.loads(text))
        if found.remark and found != before:
            self._say(found.remark)
        self._targets[model] = found

    def _server_cpu_s(self) -> float | None:
        try:
            return time.clock_gettime(self._server_clock)
        except OSError:
            return None


def cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, all its threads, as clock_getcpuclockid(3) makes it; reading it costs 1 us."""
    return (~pid << 3) | 2


def probe_request(model: str) -> bytes:
    """An inference of our own model that takes PROBE_MS, on a connection that stays open."""
    head = json.dumps(
        {
            "inputs": [
                {"name": INPUT, "datatype": "FP32", "shape": [1, 1], "parameters": {"binary_data_size": 4}},
            ],
            "outputs": [{"name": OUTPUT}],
        }
    ).encode()
    body = head + struct.pack("<f", PROBE_MS)
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1",
        "Host: localhost",
        f"Inference-Header-Content-Length: {len(head)}",
        f"Content-Length: {len(body)}",
        "",
        "",
    )
    return "\r\n".join(lines).encode() + body


def _get(endpoint: tuple[str, int], path: str) -> str | None:
    """The body of the answer to a GET, None when it is not 200. Raises OSError."""
    connection = post(endpoint, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    with contextlib.closing(connection):
        received = b""
        while part := connection.recv(1 << 16):
            received += part
            head, end, body = received.partition(b"\r\n\r\n")
            length = CONTENT_LENGTH.search(head + end) if end else None
            if length is not None and len(body) >= int(length[1]):
                break
    head, _, body = received.partition(b"\r\n\r\n")
    return body.decode(errors="replace") if b" 200 " in head.partition(b"\r\n")[0] else None
