"""What does NVIDIA's Model Analyzer choose for a model? Its quick search in local mode, on the tritonserver that we use too.

    found = search(root, "ctr", samples, slo_ms=200, cores=machine.cores(), say=print)
    found.best.max_batch_size, found.best.instances, found.seconds

It is installed once into a virtual environment of its own, for it needs other versions of tritonclient and numpy than we do.
"""

from __future__ import annotations

import contextlib
import csv
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import yaml

from perf.machine import Cores
from tritonpilot import keeper, perf_analyzer, perf_analyzer_binary
from tritonpilot.errors import MeasurementError
from tritonpilot.ports import choose_ports
from tritonpilot.tritonserver import LOOPBACK, Installation, assemble, check_host, environment, find_installation

VERSION = "1.58.0"
FOLDER = Path(sys.prefix) / "model_analyzer"
INSTALL_TIMEOUT_S = 900
TIMEOUT_S = 3600
ENDED_GRACE_S = 30.0
SERVER_EXIT_TIMEOUT_S = 5  # as our own measurements give it; Model Analyzer kills it after 5 s anyway
INFERENCE_CSV = "metrics-model-inference.csv"
FIELDS = (
    "model_config_path",
    "instance_group",
    "max_batch_size",
    "concurrency",
    "satisfies_constraints",
    "perf_throughput",
    "perf_latency_p99",
)

#: An executable that becomes another one on given cores. Its pid is noted first: tritonserver is the leader of its group.
LAUNCHER = """\
#!{python} -ISB
import os, sys
with open({pids!r}, "a") as file:
    file.write(f"{{os.getpid()}}\\n")
os.sched_setaffinity(0, {cores!r})
os.execve({binary!r}, [{binary!r}, *{first!r}, *sys.argv[1:]], {{**os.environ, **{variables!r}}})
"""


@dataclass(frozen=True)
class Measured:
    """One row of Model Analyzer's report: a configuration at a concurrency (closed loop)."""

    variant: str  # "ctr_config_3"; "ctr_config_default" is the model as it is
    max_batch_size: int
    instances: int
    concurrency: int
    is_within_slo: bool
    throughput_infer_s: float
    p99_ms: float


@dataclass(frozen=True)
class Search:
    """What a run found. `best` has the highest throughput within the SLO; None when nothing keeps it."""

    best: Measured | None
    measured: tuple[Measured, ...]
    seconds: float  # the whole run
    search_s: float  # up to the end of the hill climbing; then it sweeps the concurrency of the best for its report


def install(say: Callable[[str], None], folder: Path = FOLDER) -> Path:
    """The command model-analyzer, installed into `folder` when it is not there. Raises MeasurementError when it cannot be."""
    command = folder / "bin" / "model-analyzer"
    done = folder / f".{VERSION}"
    if done.is_file() and command.is_file():
        return command
    say(f"installing Model Analyzer {VERSION} into {folder} (once; 600 MB)")
    try:
        subprocess.run(
            [sys.executable, "-m", "venv", "--clear", str(folder)], check=True, capture_output=True, text=True
        )
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, f"triton-model-analyzer=={VERSION}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
        raise MeasurementError(
            f"Model Analyzer {VERSION} could not be installed into {folder}: {(said or str(error)).strip()[-300:]}. Nothing was "
            "measured. Look at the network and at pip's index, and repeat."
        ) from error
    done.touch()
    return command


def search(
    root: Path,
    model: str,
    samples: Mapping[str, npt.NDArray[Any]],
    *,
    slo_ms: float,
    cores: Cores,
    say: Callable[[str], None],
    settings: Mapping[str, object] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Search:
    """Run the quick search on `model` of the repository `root`: tritonserver on one core, perf_analyzer on the other.

    It maximises throughput with a P99 of at most `slo_ms` and sends real rows, one a request: the quick search has no other size (a
    batch-size in its configuration ends version 1.58 with a TypeError). `settings` are added to its configuration file,
    whose defaults it otherwise keeps. Raises MeasurementError when it fails or takes longer than `timeout_s`.
    """
    command = install(say)
    installation = find_installation()
    ports = choose_ports([0, 0, 0])
    shm_prefix = f"tritonpilot_{os.getpid()}_{secrets.token_hex(4)}_"
    with tempfile.TemporaryDirectory(prefix="tritonpilot-model-analyzer-") as name:
        folder = Path(name)
        pids = folder / "pids"
        pids.touch()
        perf_analyzer.write_input_data(folder / "input.json", samples)
        server = _server_launcher(installation, folder, shm_prefix, cores.server, pids)
        client = _client_launcher(folder, cores.client, pids)
        said = _configuration(root, model, slo_ms, folder, ports, server, client)
        (folder / "config.yaml").write_text(yaml.safe_dump({**said, **(settings or {})}), encoding="utf-8")
        began = time.monotonic()
        try:
            search_s = _run([str(command), "profile", "-f", str(folder / "config.yaml")], folder, cores, say, timeout_s)
        finally:
            for pid in pids.read_text().split():
                keeper.end_group(int(pid))  # it is the leader of a group only while it lives, or stubs of it do
            for region in Path("/dev/shm").glob(f"{shm_prefix}*"):  # noqa: S108 -- where Linux keeps POSIX shared memory
                region.unlink(missing_ok=True)
        seconds = time.monotonic() - began
        measured = read(folder / "results" / INFERENCE_CSV)
    return Search(best(measured), measured, seconds, search_s or seconds)


def read(path: Path) -> tuple[Measured, ...]:
    """The rows of its report on inference. Raises MeasurementError when there is none, or when it has other columns."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        return tuple(_measured(row) for row in rows)
    except (OSError, KeyError, ValueError) as error:
        raise MeasurementError(
            f"Model Analyzer's report {path.name} could not be read: {error!r}. There is no result of it. Look at what it said."
        ) from error


def best(measured: Sequence[Measured]) -> Measured | None:
    """The highest throughput within the SLO."""
    fitting = [each for each in measured if each.is_within_slo]
    return max(fitting, key=lambda each: each.throughput_infer_s, default=None)


def _measured(row: Mapping[str, str]) -> Measured:
    """Columns are titled as `Instance Group`, `Max Batch Size`, `Throughput (infer/sec)`, `p99 Latency (ms)`."""
    group = re.search(r"(\d+):CPU", row["Instance Group"])
    if group is None:
        raise ValueError(f"instance group {row['Instance Group']!r}")
    return Measured(
        variant=row["Model Config Path"],
        max_batch_size=int(row["Max Batch Size"]),
        instances=int(group[1]),
        concurrency=int(row["Concurrency"]),
        is_within_slo=row["Satisfies Constraints"].strip().lower() in ("yes", "true"),
        throughput_infer_s=float(row["Throughput (infer/sec)"]),
        p99_ms=float(row["p99 Latency (ms)"]),
    )


def _configuration(
    root: Path, model: str, slo_ms: float, folder: Path, ports: Sequence[int], server: Path, client: Path
) -> dict[str, object]:
    http, grpc, metrics = ports
    return {
        "model_repository": str(root),
        "output_model_repository_path": str(folder / "variants"),
        "export_path": str(folder),
        "checkpoint_directory": str(folder / "checkpoints"),
        "run_config_search_mode": "quick",
        "triton_launch_mode": "local",
        "triton_server_path": str(server),
        "triton_output_path": str(folder / "tritonserver.log"),
        "triton_http_endpoint": f"{LOOPBACK}:{http}",
        "triton_grpc_endpoint": f"{LOOPBACK}:{grpc}",
        "triton_metrics_url": f"http://{LOOPBACK}:{metrics}/metrics",
        "perf_analyzer_path": str(client),
        "skip_detailed_reports": True,
        "inference_output_fields": list(FIELDS),
        "profile_models": {
            model: {
                "cpu_only": True,
                "objectives": ["perf_throughput"],
                "constraints": {"perf_latency_p99": {"max": slo_ms}},
                "perf_analyzer_flags": {"input-data": str(folder / "input.json")},
            }
        },
    }


def _server_launcher(installation: Installation, folder: Path, shm_prefix: str, core: int, pids: Path) -> Path:
    """tritonserver as we start it ourselves, for the arguments that Model Analyzer adds."""
    seen = check_host(installation)
    backends = assemble(installation, folder, seen.python)
    arguments = [
        f"--backend-directory={backends.directory}",
        *([f"--cache-directory={installation.caches}"] if installation.caches else []),
        *(f"--{kind}-address={LOOPBACK}" for kind in ("http", "grpc", "metrics")),
        f"--exit-timeout-secs={SERVER_EXIT_TIMEOUT_S}",
        *(
            f"--backend-config={name},shm-region-prefix-name={shm_prefix}"
            for name in dict.fromkeys(("python", *backends.python_based))
        ),
    ]
    variables = _changes(environment(installation, seen, os.environ))
    return _launcher(folder / "tritonserver", installation.binary, variables, core, pids, first=arguments)


def _client_launcher(folder: Path, core: int, pids: Path) -> Path:
    binary = perf_analyzer_binary.find()
    return _launcher(folder / "perf_analyzer", binary.path, _changes(binary.environment()), core, pids)


def _launcher(
    path: Path,
    binary: Path,
    variables: Mapping[str, str],
    core: int,
    pids: Path,
    *,
    first: Sequence[str] = (),
) -> Path:
    text = LAUNCHER.format(
        python=sys.executable,
        pids=str(pids),
        cores={core},
        binary=str(binary),
        first=list(first),
        variables=dict(variables),
    )
    path.write_text(text, encoding="utf-8")
    path.chmod(0o700)
    return path


def _changes(variables: Mapping[str, str]) -> dict[str, str]:
    """What differs from our own environment: Model Analyzer's own Python is to see nothing of it."""
    return {name: value for name, value in variables.items() if os.environ.get(name) != value}


def _run(argv: Sequence[str], folder: Path, cores: Cores, say: Callable[[str], None], timeout_s: float) -> float | None:
    """Run it to its end; returns after how many seconds the search proper was done. It never outlives this call."""
    began = time.monotonic()
    with (folder / "said.log").open("wb") as log:
        process = subprocess.Popen(
            argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        os.sched_setaffinity(process.pid, {cores.client})
        search_s = _follow(process, folder / "said.log", say, began + timeout_s, began)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5)
            keeper.end_group(process.pid)
            process.wait()
    if process.returncode != 0:
        raise MeasurementError(
            f"Model Analyzer ended with exit code {process.returncode}. There is no result of it. It said last: "
            f"{' / '.join(_lines(folder / 'said.log')[-6:])}"
        )
    return search_s


def _follow(
    process: subprocess.Popen[bytes], log: Path, say: Callable[[str], None], deadline: float, began: float
) -> float | None:
    heard = 0
    search_s = None
    while True:
        is_over = process.poll() is not None
        for line in (lines := _lines(log))[heard:]:
            say(f"Model Analyzer: {line}")
            if search_s is None and "Done with quick mode search" in line:
                search_s = time.monotonic() - began
        heard = len(lines)
        if is_over:
            return search_s
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"Model Analyzer was not done after {deadline - began:.0f} s and was ended. There is no result of it. Allow it "
                "more time, or give its search narrower limits."
            )
        time.sleep(0.5)


def _lines(log: Path) -> list[str]:
    """What it said so far, line by line, without its own prefix and empty lines."""
    text = log.read_text(encoding="utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    found = (re.sub(r"^(\S+ )?\[Model Analyzer\]\s*", "", line).strip() for line in whole.splitlines())
    return [line for line in found if line]
