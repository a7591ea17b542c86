"""Does the command of each symptom in docs/operations.md show it, and the cure end it? Provokes every fault with a real Triton.

    python -m perf.faults [SYMPTOM ...]      # as slo-burn, dead-stub; default: all, two minutes

Prints a line per symptom: what its command shows before, during and after the fault. Exit code 1: a fault was not seen, or not
cured. The commands are those of the guide, with the ports of a server of their own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.http
from tritonclient.utils import InferenceServerException

from perf.frame import PROJECT
from tritonpilot.server import EmbeddedServer

GUIDE = PROJECT / "docs" / "operations.md"
PATIENCE_S = 60.0
SMALL_SHM = "48m"  # of /dev/shm, in a namespace of our own
# Sleeps as many seconds as its largest value says. -1 is an error of its request, -2 one of the model, -3 has another answer each
# time, 1000 and more takes as many MB (less 1000) for good.
MODEL = """
import json
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.first_s = float(parameters.get("first_s", {}).get("string_value", 0))
        self.kept = []
        time.sleep(float(parameters.get("set_up_s", {}).get("string_value", 0)))

    def execute(self, requests):
        time.sleep(self.first_s)
        self.first_s = 0
        values = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        most = max(float(value.max()) for value in values)
        if most == -2:
            raise ValueError("a value of -2")
        if most == -3:
            values = [value + np.random.random(value.shape).astype(np.float32) for value in values]
        if most >= 1000:
            self.kept.append(np.ones(int(most - 1000) << 20, np.uint8))
        elif most > 0:
            time.sleep(most)
        return [
            pb_utils.InferenceResponse([], pb_utils.TritonError("a value of -1"))
            if value.min() == -1
            else pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value)])
            for value in values
        ]
"""
CONFIG = """
backend: "python"
max_batch_size: 16
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU}]
"""
PLAIN = CONFIG + "dynamic_batching { }\n"
LIMITED = PLAIN.replace("{ }", "{ default_queue_policy { max_queue_size: 1000 } }")
SHORT_QUEUE = LIMITED.replace("1000", "2")
HASTY = PLAIN.replace("{ }", "{ default_queue_policy { default_timeout_microseconds: 100000 } }")
PATIENT = HASTY.replace("100000", "30000000")
CLASSES = (
    CONFIG.replace("max_batch_size: 16", "max_batch_size: 1")
    + """
dynamic_batching { priority_levels: 2 default_priority_level: 1 }
parameters { key: "pilot_classes" value { string_value: "realtime:1,batch:2" } }
"""
)
GUARDED = PLAIN + 'parameters { key: "pilot_guard" value { string_value: "{}" } }\n'
SHARES = CLASSES + 'parameters { key: "pilot_shares" value { string_value: "batch:0.2" } }\n'
CACHED = PLAIN + "response_cache { enable: true }\n"
WARMUP = """
model_warmup [{
  name: "zeros" batch_size: 1
  inputs { key: "INPUT" value { data_type: TYPE_FP32 dims: [1] zero_data: true } }
}]
"""


@dataclass(frozen=True)
class Seen:
    """What a symptom's command showed, as one figure; `is_so`: the fault was seen, and gone with its cure."""

    what: str
    before: float
    during: float
    after: float
    is_so: bool


class Server(EmbeddedServer):
    """A Triton with one model, ctr, that does what a fault needs."""

    @property
    def stub(self) -> int:
        """Process of the model."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return next(int(child) for child in children if "stub" in Path(f"/proc/{child}/cmdline").read_text())

    def look(self, symptom: str, entry_metrics: str = "") -> str:
        """What the symptom's command in the guide prints."""
        command = command_of(symptom)
        for standard, here in (
            ("127.0.0.1:8000", self.endpoints.http),
            ("127.0.0.1:8001", self.endpoints.grpc),
            ("127.0.0.1:8002", self.endpoints.metrics),
            ("127.0.0.1:8102", entry_metrics),
        ):
            command = command.replace(standard, here)
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
        )
        return done.stdout + done.stderr

    def ask(self, value: float = 0.0, *, priority: int = 0, size: int = 1, url: str = "") -> bool:
        """Whether the model answers one request."""
        with tritonclient.http.InferenceServerClient(url or self.endpoints.http, network_timeout=PATIENCE_S) as client:
            tensor = tritonclient.http.InferInput("INPUT", [1, size], "FP32")
            tensor.set_data_from_numpy(np.full((1, size), value, np.float32))
            try:
                client.infer("ctr", [tensor], priority=priority)
            except InferenceServerException:
                return False
        return True

    def flood(self, values: Sequence[float]) -> list[bool]:
        """The same for many at once."""
        with ThreadPoolExecutor(len(values)) as callers:
            return list(callers.map(self.ask, values))


@contextmanager
def serving(config: str = PLAIN, **options: Any) -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        version = Path(folder) / "ctr" / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL)
        (version.parent / "config.pbtxt").write_text(config)
        server = Server(Path(folder), exit_timeout_s=5, **options)
        with server:
            yield server


@contextmanager
def entry_of(server: Server) -> Iterator[dict[str, str]]:
    command = ["entry", "--triton-http", server.endpoints.http, "--triton-grpc", server.endpoints.grpc, "--json"]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("tritonpilot")), *command, *ports], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["endpoints"]
    finally:
        process.terminate()
        process.wait()


def command_of(symptom: str) -> str:
    """The first bash block of a section of the guide, by its anchor."""
    for section in re.split(r"^###? ", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE):
        title, _, text = section.partition("\n")
        block = re.search(r"```bash\n(.*?)```", text, re.DOTALL)
        if block and title.strip().lower().replace(" ", "-") == symptom:
            return block[1]
    raise KeyError(symptom)


def number(text: str, pattern: str = "") -> float:
    """The last number of the first line that matches; 0 when there is none."""
    for line in text.splitlines():
        found = re.findall(r"\d[\d.]*(?:e[-+]?\d+)?(?=\D*$)", line)
        if re.search(pattern, line) and found:
            return float(found[-1])
    return 0.0


# -- the faults --------------------------------------------------------------------------------------------------------


def slo_burn() -> Seen:
    """A model becomes slow; it is the model and not its queue. The end of the fault: a server anew."""
    with serving() as server:
        for _ in range(20):
            server.ask()
        before = number(server.look("slo-burn"), "compute_infer")
        for _ in range(20):
            server.ask(0.2)
        shown = server.look("slo-burn")
    during = number(shown, "compute_infer")
    with serving() as server:
        server.ask()
        after = number(server.look("slo-burn"), "compute_infer")
    is_queue = number(shown, "queue_summary") > during / 2
    return Seen(
        "us of P99 compute", before, during, after, before < 1e5 < 1.9e5 < during and after < 1e5 and not is_queue
    )


def stall() -> Seen:
    """Pairs on a model of 50 ms with a queue limit and without a waker: now and then the queue time alone goes to half a second."""

    def longest_us(config: str) -> float:
        with serving(config) as server:
            for _ in range(4):
                for gap_s in (0.015, 0.03) * 5:
                    with ThreadPoolExecutor(2) as callers:
                        callers.submit(server.ask, 0.05)
                        time.sleep(gap_s)
                        callers.submit(server.ask, 0.05)
                shown = number(server.look("slo-burn"), "queue_summary")
                if shown > 4e5:
                    break
            return shown

    during, without_limit = longest_us(LIMITED), longest_us(PLAIN)
    return Seen("us of P99 queue", without_limit, during, without_limit, without_limit < 2e5 < 4e5 < during)


def queue_growth() -> Seen:
    """50 callers of a model that executes their requests one by one; batches end it."""

    def waiting(config: str) -> tuple[float, float]:
        with serving(config) as server:
            before = number(server.look("queue-growth"))
            flood = threading.Thread(target=server.flood, args=([0.1] * 50,))
            flood.start()
            time.sleep(2.0)
            during = number(server.look("queue-growth"))
            flood.join()
        return before, during

    before, during = waiting(CONFIG)
    _, after = waiting(PLAIN)
    return Seen("requests that wait", before, during, after, before == 0 and during > 10 and after < during / 3)


def rejections() -> Seen:
    """48 requests that may wait 0.1 s for a model that takes as long for 16; with more patience all are answered.

    What a full queue refuses is not counted, and that is part of what the guide says.
    """

    def rejected(config: str) -> tuple[int, float]:
        with serving(config) as server:
            refused = server.flood([0.1] * 48).count(False)
            return refused, number(server.look("rejections"), "REJECTED")

    (refused, during), (_, after), (refused_by_full, shown) = rejected(HASTY), rejected(PATIENT), rejected(SHORT_QUEUE)
    is_so = refused == during >= 5 and after == 0 and refused_by_full >= 5 and shown == 0
    return Seen("rejected of 48", 0, during, after, is_so)


def starvation() -> Seen:
    """6 callers of a better class leave nothing to one of a lower class; a share in the entry does."""

    def answers(config: str) -> float:
        with serving(config) as server, entry_of(server) as entry:
            end = time.monotonic() + 4

            def call(priority: int) -> None:
                while time.monotonic() < end:
                    server.ask(0.02, priority=priority, url=entry["http"])

            callers = [threading.Thread(target=call, args=(priority,)) for priority in (1, 1, 1, 1, 1, 1, 2)]
            for caller in callers:
                caller.start()
            time.sleep(3)
            shown = server.look("starvation", entry["metrics"])
            for caller in callers:
                caller.join()
            return number(shown, 'processed_requests_total.*class="batch".*status="ok"')

    during, after = answers(CLASSES), answers(SHARES)
    return Seen("answers to batch in 3 s", 0, during, after, during <= 3 and after >= 10)


def dead_stub() -> Seen:
    """The stub is killed: health stays at 200. A restart cures it."""

    def seen_dead(server: Server) -> float:
        shown = server.look("dead-stub")
        print(shown, file=sys.stderr)
        return float(re.search("failed|does not answer", shown) is not None)

    with serving() as server:
        before = seen_dead(server)
        os.kill(server.stub, signal.SIGKILL)
        during = seen_dead(server)
        with tritonclient.http.InferenceServerClient(server.endpoints.http) as client:
            is_ready = client.is_server_ready()
    with serving() as server:
        after = seen_dead(server)
    return Seen(
        "models seen dead, at health 200", before, during, after, is_ready and (before, during, after) == (0, 1, 0)
    )


def memory_growth() -> Seen:
    """A model keeps 20 MB of every request; unload and load give it back, a load of unchanged files does not."""
    with serving() as server:
        mine = re.escape(str(server.repository))

        def look() -> float:
            return number(server.look("memory-growth"), mine)

        server.ask()
        before = look()
        for _ in range(10):
            server.ask(1020.0)
        during = look()
        server.load("ctr")
        loaded = look()
        server.unload("ctr")
        server.load("ctr")
        after = look()
    is_so = during - before > 150 and loaded > during - 20 and after < before + 20
    return Seen("MB of the stub", before, during, after, is_so)


def reload_stalls() -> Seen:
    """A load over HTTP holds one of Triton's HTTP threads, here its only one; over gRPC it does not."""
    slow = PLAIN + 'parameters { key: "set_up_s" value { string_value: "3" } }\n'
    with serving(slow, http_threads=1) as server:
        config = server.repository / "ctr" / "config.pbtxt"

        def while_it_loads(load: Callable[[], object]) -> float:
            config.write_text(config.read_text() + "\n")
            loading = threading.Thread(target=load)
            loading.start()
            time.sleep(0.7)
            shown = number(server.look("reload-stalls"))
            loading.join()
            return shown

        def over_http() -> None:
            with tritonclient.http.InferenceServerClient(server.endpoints.http, network_timeout=PATIENCE_S) as client:
                client.load_model("ctr", headers={server.control_header: server.control_key})

        before = number(server.look("reload-stalls"))
        during = while_it_loads(over_http)
        after = while_it_loads(lambda: server.load("ctr"))
    return Seen("s of /v2/health/live", before, during, after, before < 0.5 < 1.0 < during and after < 0.5)


def shm_full() -> Seen:
    """Tensors that do not fit into /dev/shm, in a mount namespace of our own; a larger one takes them."""

    def within(size: str) -> dict[str, Any]:
        script = f"mount -t tmpfs -o size={size} tmpfs /dev/shm && exec {sys.executable} -m perf.faults --in-small-shm"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script], cwd=PROJECT, stdout=subprocess.PIPE, text=True, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    small, large = within(SMALL_SHM), within("1g")
    is_so = bool(small["first"] and not small["large"] and large["large"])
    return Seen("% of /dev/shm", small["before"], small["during"], large["during"], is_so and small["during"] > 60)


def in_small_shm() -> None:
    """For shm_full: what becomes of a small and of a large request here, as JSON."""
    with serving() as server:
        first, before = server.ask(), number(server.look("shm-full"), "%")
        server.ask(size=4 << 20)
        large = server.ask(size=6 << 20)
        during = number(server.look("shm-full"), "%")
        log = [line for line in server.log_tail(200).splitlines() if "shared memory" in line.lower()]
        again = server.ask()
        print("\n".join(log[-3:]), f"afterwards a small request is answered: {again}", sep="\n", file=sys.stderr)
    print(json.dumps({"first": first, "large": large, "before": before, "during": during}))


def cache_hits() -> Seen:
    """Requests that repeat, then ones that do not."""
    with serving(CACHED, cache_size_bytes=1 << 20) as server:

        def share(values: Sequence[float]) -> float:
            first = server.look("cache-hits")
            for value in values:
                server.ask(-value * 1e-3)
            last = server.look("cache-hits")
            hits, misses = (number(last, what) - number(first, what) for what in ("hits", "misses"))
            return hits / max(1.0, hits + misses)

        before = share([2.0] * 20)
        during = share(np.arange(100, 120).tolist())
        after = share([2.0] * 20)
    return Seen("hits per request", before, during, after, before > 0.9 and during == 0 and after == 1)


def gpu_utilisation() -> Seen:
    """Single rows keep an instance busy with little work in each execution; batches are larger."""

    def rows_per_execution(config: str) -> float:
        with serving(config) as server:
            server.flood([0.02] * 40)
            shown = server.look("gpu-utilisation")
            return number(shown, "^nv_inference_count") / number(shown, "^nv_inference_exec_count")

    during, after = rows_per_execution(CONFIG), rows_per_execution(PLAIN)
    return Seen("rows per execution", after, during, after, during < 1.1 and after > 3)


def warm_up() -> Seen:
    """The first request after a load pays what a model does once; warmup pays it before."""

    def first_request(config: str) -> tuple[float, float]:
        with serving(config) as server:
            warmups = number(server.look("warm-up"))
            server.unload("ctr")
            with server.control() as control:
                control.load("ctr", probe=False)
            began = time.monotonic()
            server.ask()
            return warmups, time.monotonic() - began

    slow = PLAIN + 'parameters { key: "first_s" value { string_value: "1" } }\n'
    without, during = first_request(slow)
    with_it, after = first_request(slow + WARMUP)
    return Seen("s of the first request", after, during, after, after < 0.9 <= during and (without, with_it) == (0, 1))


def wrong_answers() -> Seen:
    """Equal inputs get different answers, then others get equal ones; the counter stands still after that."""
    with serving(GUARDED) as server, entry_of(server) as entry:

        def different(value: float) -> float:
            first = server.look("wrong-answers", entry["metrics"])
            for _ in range(20):
                server.ask(value, url=entry["http"])
            time.sleep(4)  # whether the model was another one is known after two seconds
            last = server.look("wrong-answers", entry["metrics"])
            return number(last, 'kind="repeat"') - number(first, 'kind="repeat"')

        before, during, after = (different(value) for value in (-0.1, -3.0, -0.1))
    return Seen("different answers", before, during, after, before == 0 and during > 0 and after == 0)


def triton_down() -> Seen:
    """tritonserver is killed."""
    with serving() as server:
        before = number(server.look("triton-down"))
        os.kill(server.pid, signal.SIGKILL)
        server.wait(PATIENCE_S)
        during = number(server.look("triton-down"))
    with serving() as server:
        after = number(server.look("triton-down"))
    return Seen("status of /v2/health/live", before, during, after, (before, during, after) == (200, 0, 200))


def model_fails() -> Seen:
    """Executions that fail; errors of single requests are no failures to Triton."""
    with serving() as server:

        def failed() -> float:
            return sum(number(line) for line in server.look("model-fails").splitlines())

        before = failed()
        for _ in range(5):
            server.ask(-2)
        during = failed()
        assert not server.ask(-1)
        after = failed()
    return Seen("failed requests", before, during, after, before == 0 and during == after == 5)


FAULTS: dict[str, Callable[[], Seen]] = {
    "slo-burn": slo_burn,
    "stall": stall,
    "queue-growth": queue_growth,
    "rejections": rejections,
    "starvation": starvation,
    "dead-stub": dead_stub,
    "memory-growth": memory_growth,
    "reload-stalls": reload_stalls,
    "shm-full": shm_full,
    "cache-hits": cache_hits,
    "gpu-utilisation": gpu_utilisation,
    "warm-up": warm_up,
    "wrong-answers": wrong_answers,
    "triton-down": triton_down,
    "model-fails": model_fails,
}


def main(names: Sequence[str]) -> int:
    """Provoke the named faults; the exit code."""
    unknown = [name for name in names if name not in FAULTS]
    if unknown:
        print(f"There is no symptom named {', '.join(unknown)}. The names are: {', '.join(FAULTS)}.", file=sys.stderr)
        return 2
    code = 0
    for name in names or FAULTS:
        seen = FAULTS[name]()
        code |= not seen.is_so
        verdict = "ok" if seen.is_so else "NOT SEEN OR NOT CURED"
        figures = f"{seen.before:>10.4g} {seen.during:>10.4g} {seen.after:>10.4g}"
        print(f"{name:16} {figures}  {seen.what}  {verdict}", flush=True)
    return code


if __name__ == "__main__":
    if sys.argv[1:] == ["--in-small-shm"]:
        in_small_shm()
    else:
        sys.exit(main(sys.argv[1:]))
