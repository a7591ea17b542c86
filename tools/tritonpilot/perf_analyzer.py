"""What does the ecosystem's own tool, perf_analyzer, measure at one load?

    rows = write_input_data(Path("input.json"), samples.read(Path("models/ctr/build/samples.npz")))
    reading = run(Load(model="ctr", url="127.0.0.1:8001", concurrency=16, input_data=Path("input.json")))
    reading.throughput_infer_s, reading.p99_us

One process measures one load: given a range, perf_analyzer 2.51 drops a load that it found unstable from its export
and still exits 0.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import os
import re
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tritonpilot import perf_analyzer_binary, samples
from tritonpilot.errors import MeasurementError

# A prime number of rows: each worker steps through the data by the concurrency, so with 256 rows and 64 workers one
# worker would send the same four rows for ever.
INPUT_ROWS = 251
INPUT_BYTES = 12 << 20
ANY_SPREAD_PCT = 1e9  # makes perf_analyzer report whatever it measured
WINDOWS = 3  # perf_analyzer compares its last three windows and reports over them


@dataclass(frozen=True)
class Load:
    """One run: what is sent to which server, and how long it is watched.

    Give `concurrency` (closed loop) or `request_rate_per_s` (open loop). With `accepts_unstable` three windows are
    measured and reported in any case and `Reading.is_stable` says how they compare; otherwise perf_analyzer goes on up
    to `max_windows` and run() raises.
    """

    model: str
    url: str
    protocol: Literal["grpc", "http"] = "grpc"
    batch: int = 1
    concurrency: int | None = None
    request_rate_per_s: float | None = None
    distribution: Literal["constant", "poisson"] = "poisson"
    window_ms: int = 2000
    count_window: int | None = None  # requests per window instead of milliseconds
    stability_pct: float = 10.0
    max_windows: int = 10
    accepts_unstable: bool = False
    percentile: int | None = None  # judge stability by this latency; None: by the average
    input_data: Path | None = None  # None sends random values, which models with index inputs refuse
    parameters: Mapping[str, int | str | bool] | None = None  # request parameters, e.g. {"priority": 2}; gRPC only
    shared_memory: Literal["none", "system"] = "none"
    profile_export: Path | None = None  # per-request times; holds every input too, so mind large tensors
    extra: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate_per_s is None):
            raise MeasurementError(
                f"A load for model '{self.model}' needs a concurrency or a request rate, and not both; it has "
                f"concurrency={self.concurrency} and request_rate_per_s={self.request_rate_per_s}. Nothing was "
                "measured. Give one of them."
            )
        if self.parameters and self.protocol != "grpc":
            raise MeasurementError(
                f"perf_analyzer sends request parameters over gRPC only, and this load for model '{self.model}' uses "
                f"{self.protocol}. Nothing was measured. Use protocol grpc, or leave the parameters out."
            )

    def argv(self, binary: Path, csv_file: Path) -> list[str]:
        """The command line of perf_analyzer."""
        argv = [str(binary), "-v", "--async", "-m", self.model, "-u", self.url, "-i", self.protocol]
        argv += ["-b", str(self.batch), "-f", str(csv_file), "--verbose-csv"]
        if self.concurrency is not None:
            argv += ["--concurrency-range", str(self.concurrency)]
        else:
            argv += ["--request-rate-range", str(self.request_rate_per_s)]
            argv += ["--request-distribution", self.distribution]
        # Never --request-count: perf_analyzer 2.51 then waits for ever after the last answer in a third of the runs
        # (7 of 20 at concurrency 64, synchronous or not, with every request answered).
        if self.count_window is not None:
            argv += ["--measurement-mode", "count_windows", "--measurement-request-count", str(self.count_window)]
        argv += ["--measurement-interval", str(self.window_ms)]
        argv += ["--stability-percentage", f"{ANY_SPREAD_PCT if self.accepts_unstable else self.stability_pct:g}"]
        argv += ["--max-trials", str(max(WINDOWS, self.max_windows))]
        if self.percentile is not None:
            argv += ["--percentile", str(self.percentile)]
        if self.input_data is not None:
            argv += ["--input-data", str(self.input_data)]
        for name, value in (self.parameters or {}).items():
            argv += ["--request-parameter", f"{name}:{_parameter(value)}"]
        if self.shared_memory != "none":
            argv += ["--shared-memory", self.shared_memory]
        if self.profile_export is not None:
            argv += ["--profile-export-file", str(self.profile_export)]
        return argv + list(self.extra)


@dataclass(frozen=True)
class Window:
    """One measurement window ("Pass" in perf_analyzer's words)."""

    throughput_infer_s: float
    latency_us: float


@dataclass(frozen=True)
class Reading:
    """What perf_analyzer reported: times in us per request; an inference is one row, a request carries `batch`."""

    throughput_infer_s: float
    avg_us: float
    p50_us: float
    p90_us: float
    p95_us: float
    p99_us: float
    client_us: float  # sending and receiving in the client
    network_us: float  # network and Triton's front end: what neither client nor model accounts for
    queue_us: float
    compute_us: float  # input, infer and output
    request_count: int
    inference_count: int
    execution_count: int
    windows: tuple[Window, ...]
    spread_pct: float  # (max / min - 1) * 100 over the last three windows, the larger of throughput and latency
    is_stable: bool  # False also when there were fewer than three windows to compare
    client_cpu_s: float  # CPU time of the perf_analyzer process
    wall_s: float


def write_input_data(
    path: Path,
    arrays: Mapping[str, npt.NDArray[Any]],
    *,
    rows: int = INPUT_ROWS,
    max_bytes: int = INPUT_BYTES,
) -> int:
    """Write perf_analyzer's --input-data JSON with the first rows of `arrays`; returns how many there are.

    Each is [n, ...] of numbers or strings; fewer rows are taken when the file would pass `max_bytes` (one photo of
    224x224 is 0.8 MB).
    """
    available = min(len(array) for array in arrays.values())
    row_bytes = sum(max(1, array[:1].nbytes * 4 // 3) for array in arrays.values())
    count = max(1, min(rows, available, max_bytes // row_bytes))
    data = [{name: _tensor(array[i]) for name, array in arrays.items()} for i in range(count)]
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    return count


def run(
    load: Load,
    *,
    cpus: Sequence[int] | None = None,
    timeout_s: float = 300,
    on_progress: Callable[[str], None] | None = None,
) -> Reading:
    """Measure one load. `cpus` pins perf_analyzer; `on_progress` receives its lines as they come.

    Raises HostError when no binary runs, MeasurementError when the server or the model is not there, requests fail,
    or the measurement does not settle. Ctrl-C and the timeout end the child process.
    """
    binary = perf_analyzer_binary.find()
    with tempfile.TemporaryDirectory(prefix="tritonpilot-perf-") as folder:
        csv_file = Path(folder, "report.csv")
        started = time.monotonic()
        code, output, cpu_s = _spawn(
            load.argv(binary.path, csv_file), binary.environment(), cpus, timeout_s, on_progress
        )
        wall_s = time.monotonic() - started
        if code != 0 or not csv_file.exists():
            raise MeasurementError(_explain(load, code, output))
        return parse(csv_file.read_text(encoding="utf-8"), output, load.stability_pct, cpu_s, wall_s)


def parse(report: str, output: str, stability_pct: float, client_cpu_s: float = 0, wall_s: float = 0) -> Reading:
    """The Reading of one run from the text of its CSV report and its standard output."""
    rows = list(csv.DictReader(report.splitlines()))
    if len(rows) != 1:
        raise MeasurementError(
            f"perf_analyzer reported {len(rows)} measurements where one was expected: {report!r}. "
            "There is no figure for this load. Look at its output, and at whether its version is 2.51 or later."
        )
    row = {name: value for name, value in rows[0].items() if name is not None and value}
    try:
        client = float(row["Client Send"]) + float(row["Client Recv"])
        network = float(row["Network+Server Send/Recv"])
        queue = float(row.get("Server Queue", 0))
        compute = sum(float(row.get(f"Server Compute {part}", 0)) for part in ("Input", "Infer", "Output"))
        # With --percentile there is no average; the parts add up to it, for the network is defined as the remainder.
        average = float(row.get("Avg latency", client + network + queue + compute))
        throughput = float(row["Inferences/Second"])
        p50, p90, p95, p99 = (float(row[f"p{p} latency"]) for p in (50, 90, 95, 99))
    except (KeyError, ValueError) as error:
        raise MeasurementError(
            f"perf_analyzer's report lacks a figure or holds one that is no number ({error}): {report!r}. There is no "
            "figure for this load. Use a perf_analyzer of version 2.51 or later."
        ) from error
    windows = _windows(output)
    spread = _spread_pct(windows[-WINDOWS:])
    return Reading(
        throughput_infer_s=throughput,
        avg_us=average,
        p50_us=p50,
        p90_us=p90,
        p95_us=p95,
        p99_us=p99,
        client_us=client,
        network_us=network,
        queue_us=queue,
        compute_us=compute,
        request_count=_count(output, "Request count"),
        inference_count=_count(output, "Inference count"),
        execution_count=_count(output, "Execution count"),
        windows=windows,
        spread_pct=spread,
        is_stable=len(windows) >= WINDOWS and spread <= stability_pct,
        client_cpu_s=client_cpu_s,
        wall_s=wall_s,
    )


def read_profile(path: Path) -> npt.NDArray[np.int64]:
    """Times of every request of a --profile-export-file, INT64[n,2]: sent and last answered, ns since 1970."""
    experiments = json.loads(path.read_text(encoding="utf-8"))["experiments"]
    times = [
        (request["timestamp"], request["response_timestamps"][-1])
        for experiment in experiments
        for request in experiment["requests"]
        if request["response_timestamps"]
    ]
    return np.array(sorted(times), dtype=np.int64).reshape(-1, 2)


def _parameter(value: int | str | bool) -> str:
    if isinstance(value, bool):  # before int: True is an int too
        return f"{str(value).lower()}:bool"
    return f"{value}:{'int' if isinstance(value, int) else 'string'}"


def _tensor(row: npt.NDArray[Any]) -> dict[str, object]:
    shape = list(row.shape) or [1]
    if row.dtype.kind in "iufb":
        raw = np.ascontiguousarray(row.astype(row.dtype.newbyteorder("<"), copy=False)).tobytes()
        return {"b64": base64.b64encode(raw).decode("ascii"), "shape": shape}
    try:
        texts = [text.decode("utf-8") if isinstance(text, bytes) else str(text) for text in row.ravel().tolist()]
    except (
        UnicodeDecodeError
    ):  # a photo: perf_analyzer takes what is decoded from b64 as Triton's binary form of the strings
        return {"b64": base64.b64encode(samples.raw(row)).decode("ascii"), "shape": shape}
    return {"content": texts, "shape": shape}


def _spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    cpus: Sequence[int] | None,
    timeout_s: float,
    on_progress: Callable[[str], None] | None,
) -> tuple[int, str, float]:
    """(exit code, output, CPU seconds) of the command; it never outlives this call."""
    deadline = time.monotonic() + timeout_s
    with _pinned(cpus):
        # Own session: a terminal's Ctrl-C reaches us alone, and we end the child. Left to itself it would wait for
        # its requests in flight and print a report of half a measurement.
        process = subprocess.Popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    cpu_before = _children_cpu_s()
    lines: list[str] = []
    try:
        for line in _lines_until(process, deadline):
            lines.append(line)
            if on_progress is not None and line.strip():
                on_progress(line.strip())
        code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired) as error:
        raise MeasurementError(
            f"perf_analyzer did not finish within {timeout_s:g} s and was ended. There is no figure for this load; its "
            f"last words: {_tail(lines)}. Look at whether the server still answers, or allow more time."
        ) from error
    finally:
        _end(process)
    return code, "\n".join(lines), _children_cpu_s() - cpu_before


@contextlib.contextmanager
def _pinned(cpus: Sequence[int] | None) -> Iterator[None]:
    """Children started inside inherit the affinity; a preexec_fn would be unsafe next to gRPC's threads."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        raise MeasurementError(
            f"perf_analyzer cannot be pinned to the cores {list(cpus)} ({error}); this process may use "
            f"{sorted(before)}. Nothing was measured. Choose among those."
        ) from error
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _lines_until(process: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """Lines of the process as they come. Raises TimeoutError at the deadline."""
    assert process.stdout is not None
    buffer = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        chunk = os.read(process.stdout.fileno(), 65536)
        if not chunk:
            break
        *whole, buffer = (buffer + chunk).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in whole)
    if buffer:
        yield buffer.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave no child behind, whatever happened."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def _windows(output: str) -> tuple[Window, ...]:
    found = re.findall(r"Pass \[\d+\] throughput: ([\d.e+]+) infer/sec\. \S+ latency: ([\d.e+]+) usec", output)
    return tuple(Window(float(throughput), float(latency)) for throughput, latency in found)


def _spread_pct(windows: Sequence[Window]) -> float:
    """perf_analyzer's own rule: the ratio of largest to smallest of the last windows, in throughput and in latency."""
    if not windows:
        return float("inf")
    spreads = []
    for values in ([w.throughput_infer_s for w in windows], [w.latency_us for w in windows]):
        spreads.append((max(values) / min(values) - 1) * 100 if min(values) > 0 else float("inf"))
    return max(spreads)


def _count(output: str, name: str) -> int:
    found = re.search(rf"^\s*{name}: (\d+)", output, re.MULTILINE)
    return int(found.group(1)) if found else 0


def _explain(load: Load, code: int, output: str) -> str:
    """One paragraph for a run without a report: what happened, what is true now, what to do."""
    at = (
        f"concurrency {load.concurrency}" if load.concurrency is not None else f"{load.request_rate_per_s:g} requests/s"
    )
    unknown = ("", "perf_analyzer gave up", "Its last words should tell the cause.")
    _, happened, todo = next((row for row in EXPLANATIONS if row[0] in output), unknown)
    return (
        f"{happened} (model '{load.model}' at {load.url} over {load.protocol}, {at}, exit code {code}). There is no "
        f"figure for this load. perf_analyzer said: {_tail(output.splitlines())}. {todo}"
    )


EXPLANATIONS = (
    (
        "Request for unknown model",
        "The server does not serve this model",
        "Name a model that is loaded (`tritonpilot serve` lists them), or load it.",
    ),
    (
        "failed to connect",
        "No server answered",
        "Start it (`tritonpilot serve`) or correct the address; mind that HTTP and gRPC have ports of their own.",
    ),
    (
        "Couldn't connect",
        "No server answered",
        "Start it (`tritonpilot serve`) or correct the address; mind that HTTP and gRPC have ports of their own.",
    ),
    (
        "had error:",
        "Requests failed during the measurement",
        "Give real input data if it had none; a full queue or a queue time-out means a load beyond the service's limits.",
    ),
    (
        "Failed to obtain stable measurement",
        "The measurement did not settle",
        "Quieten the machine, lengthen the windows, or raise the allowed spread.",
    ),
)


def _tail(lines: Sequence[str], count: int = 4) -> str:
    said = [line.strip() for line in lines if line.strip()]
    return " / ".join(said[-count:]) or "nothing"
