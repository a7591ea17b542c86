"""From a service's ONNX file to a TensorRT plan for the GPU of this machine.

    result = build_engine(service, EngineOptions(precision="fp16"), narrate)     # models/ctr/build/model.plan
    lines = preview(service, EngineOptions(precision="fp16"))                    # the commands, on any machine

`trtexec` does the work: one on PATH, or the one in NVIDIA's TensorRT container through docker-compose.engines.yml
(docs/tensorrt.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

import tritonpilot
from tritonpilot.errors import HostError, ModelError
from tritonpilot.onnx_model import external_files
from tritonpilot.repository import sha256
from tritonpilot.spec import Service
from tritonpilot.trtexec import (
    ASKED_FLAGS,
    Engine,
    EngineOptions,
    Shape,
    Trtexec,
    Version,
    calibrates,
    decide,
    parse_trtexec,
    plan_command,
    service_lines,
)

Say = Callable[[str], None]

COMPOSE_FILE = "docker-compose.engines.yml"
COMPOSE_SERVICE = "engine"
CALIBRATE = Path("deploy/tensorrt/calibrate.py")
#: Where NVIDIA's packages put trtexec, which is on PATH in the container only.
TRTEXEC_ELSEWHERE = Path("/usr/src/tensorrt/bin/trtexec")
#: How the container sees the model's folder (read-only) and the folder that the result is made in.
INSIDE_MODEL, INSIDE_WORK, INSIDE_SCRIPTS = Path("/model"), Path("/work"), Path("/opt/tritonpilot")
#: TensorRT in the container of the release that docker-compose.yml serves with, 24.10.
SERVED_WITH: Version = (10, 5, 0)
MANIFEST_FORMAT = 1

_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\] )?\[(?:E|F)\] (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi names it."""

    index: int
    name: str
    compute_capability: str
    driver: str


@dataclass(frozen=True)
class EngineResult:
    """A plan and its manifest; `built` is False when the one that was there is still right."""

    plan: Path
    manifest: Path
    built: bool
    facts: Mapping[str, Any]
    """The manifest's content."""
    service_lines: str
    """What the service file must say for `tritonpilot build --target gpu`; empty when it does."""

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "plan": str(self.plan),
            "manifest": str(self.manifest),
            "built": self.built,
            "facts": dict(self.facts),
            "service_lines": self.service_lines,
        }

    def describe(self) -> str:
        """One line for people."""
        made = f"built in {self.facts['seconds']:.0f} s" if self.built else "up to date"
        return (
            f"{self.plan} {made}: {self.facts['precision']}, {self.facts['plan']['bytes'] / 1e6:.1f} MB, for "
            f"{self.facts['gpu']['name']} and TensorRT {self.facts['tensorrt']}"
        )


def preview(service: Service, options: EngineOptions, version: Version = SERVED_WITH) -> list[str]:
    """The command lines, one string each, as the container would run them. For people; runs nothing, needs no GPU."""
    engine = decide(service, options)
    trtexec = Trtexec(version, ASKED_FLAGS)
    script = [["python3", str(INSIDE_SCRIPTS / CALIBRATE.name), str(INSIDE_WORK / "calibration.json")]]
    arguments = plan_command(
        engine,
        trtexec,
        model=INSIDE_MODEL,
        work=INSIDE_WORK,
        device=options.device,
        workspace_mb=options.workspace_mb,
    )
    commands = [*(script if calibrates(arguments) else []), ["trtexec", *arguments]]
    folders = (engine.onnx.parent, engine.output.parent)
    return [shlex.join(_in_container(["docker", "compose"], options, *folders, command)) for command in commands]


def build_engine(service: Service, options: EngineOptions, say: Say) -> EngineResult:
    """Build the plan on this machine's GPU, with its manifest beside it; both appear whole or not at all.

    Raises HostError without a GPU, or without trtexec and Docker; ModelError or SpecError as `decide` and
    `plan_command`, and when trtexec refuses the model. Nothing is written then.
    """
    gpu = _gpu(options.device)
    started = time.monotonic()
    runner = _find_runner(options)
    engine = decide(service, options)
    trtexec = runner.ask()
    say(f"{service.service}: TensorRT {'.'.join(map(str, trtexec.version))} {runner.place}, {gpu.name}")
    for note in engine.profile.notes:
        say(f"{service.service}: {note}")
    inputs = _inputs(engine, options, trtexec, gpu)
    manifest = engine.output.with_name(engine.output.name + ".json")
    there = _current(engine.output, manifest, inputs)
    if there is not None and not options.force:
        return EngineResult(engine.output, manifest, False, there, service_lines(engine))
    timing_cache = engine.output.parent / (
        f"timing-{'.'.join(map(str, trtexec.version))}-sm{gpu.compute_capability.replace('.', '')}.cache"
    )
    with _workplace(engine.output.parent) as work:
        model_seen, work_seen = runner.seen(engine.onnx.parent, work)
        arguments = plan_command(
            engine,
            trtexec,
            model=model_seen,
            work=work_seen,
            device=options.device,
            workspace_mb=options.workspace_mb,
        )
        if timing_cache.is_file():
            shutil.copyfile(timing_cache, work / "timing.cache")
        commands = []
        if calibrates(arguments):
            assert engine.calibration is not None
            commands.append(_write_job(engine, options, runner, model_seen, work, work_seen))
            say(f"{service.service}: calibrating with {engine.calibration.count} rows of {engine.calibration.path}")
            runner.run(commands[0], engine.onnx.parent, work)
            # trtexec would calibrate with random numbers if the file were not there or empty.
            _check_made(work / "calibration.cache", commands[0])
        commands.append([runner.trtexec, *arguments])
        say(
            f"{service.service}: building {engine.precision} from {engine.onnx}; this takes minutes, large models longer"
        )
        log = runner.run(commands[-1], engine.onnx.parent, work)
        _check_made(work / "model.plan", commands[-1])
        facts = {
            "format": MANIFEST_FORMAT,
            "service": service.service,
            "plan": {
                "file": engine.output.name,
                "bytes": (work / "model.plan").stat().st_size,
                "sha256": sha256(work / "model.plan"),
            },
            "precision": engine.precision,
            "tensorrt": ".".join(map(str, trtexec.version)),
            "gpu": {**asdict(gpu), **_device_of(log)},
            "profile": {"min": engine.profile.min, "opt": engine.profile.opt, "max": engine.profile.max},
            "inputs": inputs,
            "commands": [shlex.join(command) for command in commands],
            "where": runner.place,
            "seconds": round(time.monotonic() - started, 1),
            "tritonpilot": tritonpilot.__version__,
        }
        (work / "manifest.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        # NOTE: the plan goes last. A manifest of another plan is noticed by its hash, a plan without one is not.
        (work / "manifest.json").replace(manifest)
        (work / "model.plan").replace(engine.output)
        if (work / "timing.cache").is_file():
            (work / "timing.cache").replace(timing_cache)
    return EngineResult(engine.output, manifest, True, json.loads(manifest.read_text("utf-8")), service_lines(engine))


def parse_gpus(text: str) -> list[Gpu]:
    """GPUs from `nvidia-smi --query-gpu=index,name,compute_cap,driver_version --format=csv,noheader`."""
    found = []
    for line in text.splitlines():
        fields = [part.strip() for part in line.split(",")]
        if len(fields) == 4 and fields[0].isdigit():
            found.append(Gpu(int(fields[0]), *fields[1:]))
    return found


@dataclass(frozen=True)
class _Runner:
    """Where the commands run: on this machine, or in a container of docker-compose.engines.yml."""

    options: EngineOptions
    trtexec: str
    compose: tuple[str, ...] = ()
    """Empty on this machine."""

    @property
    def place(self) -> str:
        return f"in the container of {self.options.project / COMPOSE_FILE}" if self.compose else f"of {self.trtexec}"

    def seen(self, model: Path, work: Path) -> tuple[Path, Path]:
        """How the commands see the model's folder and the work folder."""
        return (INSIDE_MODEL, INSIDE_WORK) if self.compose else (model.resolve(), work.resolve())

    @property
    def calibrate(self) -> Path:
        """How the commands see the calibration script."""
        return INSIDE_SCRIPTS / CALIBRATE.name if self.compose else (self.options.project / CALIBRATE).resolve()

    def ask(self) -> Trtexec:
        """Version and flags of trtexec. Raises HostError when it does not run."""
        with tempfile.TemporaryDirectory() as empty:
            command = self._command([self.trtexec, "--help"], Path(empty), Path(empty))
            code, said = _run(command)
        found = parse_trtexec(said)
        if found is None or not found.flags:
            raise HostError(
                f"`{shlex.join(command)}` (exit code {code}) did not answer as trtexec does: {_last_line(said)}. Nothing was "
                "written. Install TensorRT, or Docker with NVIDIA's container toolkit (docs/tensorrt.md)."
            )
        return found

    def run(self, command: Sequence[str], model: Path, work: Path) -> str:
        """Run a command; its output. Raises ModelError with its own error lines when it fails."""
        code, said = _run(self._command(command, model, work))
        if code != 0 or "&&&& FAILED" in said:
            errors = _ERROR_LINE.findall(said)[:3] or [_last_line(said)]
            raise ModelError(
                f"`{shlex.join(command)}` failed with exit code {code}: {' | '.join(errors)}. No plan was written. Change the "
                "model, its ranges or the precision as the message says."
            )
        return said

    def _command(self, command: Sequence[str], model: Path, work: Path) -> list[str]:
        return _in_container(self.compose, self.options, model, work, command) if self.compose else list(command)


def _find_runner(options: EngineOptions) -> _Runner:
    """Raises HostError when neither trtexec nor Docker Compose is there, or the one that was asked for."""
    here = shutil.which("trtexec") or (str(TRTEXEC_ELSEWHERE) if TRTEXEC_ELSEWHERE.is_file() else None)
    if here is not None and options.where != "container":
        return _Runner(options, here)
    compose = _find_compose() if options.where != "host" else None
    if compose is None:
        lacks = {
            "host": "trtexec",
            "container": "Docker Compose 2",
            "auto": "trtexec and Docker Compose 2",
        }[options.where]
        raise HostError(
            f"This machine has no {lacks}, and an engine is built with trtexec. Nothing was written. Install TensorRT's "
            "trtexec on PATH, or Docker with Compose and NVIDIA's container toolkit (docs/tensorrt.md)."
        )
    if not (options.project / COMPOSE_FILE).is_file():
        raise HostError(
            f"There is no {options.project / COMPOSE_FILE}, which says what container to build the engine in. Nothing was "
            "written. Run this in the project's root, or install trtexec on PATH."
        )
    return _Runner(options, "trtexec", tuple(compose))


def _find_compose() -> list[str] | None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        said = subprocess.run([*command, "version", "--short"], capture_output=True, text=True, check=False)
        major = said.stdout.strip().lstrip("v").partition(".")[0]
        if said.returncode == 0 and major.isdigit() and int(major) >= 2:
            return command
    return None


def _in_container(
    compose: Sequence[str], options: EngineOptions, model: Path, work: Path, command: Sequence[str]
) -> list[str]:
    return [
        *compose,
        "-f",
        str(options.project / COMPOSE_FILE),
        "run",
        "--rm",
        "-T",
        f"--user={os.getuid()}:{os.getgid()}",
        f"--volume={model.resolve()}:{INSIDE_MODEL}:ro",
        f"--volume={work.resolve()}:{INSIDE_WORK}",
        COMPOSE_SERVICE,
        *command,
    ]


def _gpu(device: int) -> Gpu:
    """Raises HostError when this machine has no such GPU."""
    program = shutil.which("nvidia-smi")
    query = "--query-gpu=index,name,compute_cap,driver_version"
    said = (
        subprocess.run([program, query, "--format=csv,noheader"], capture_output=True, text=True, check=False)
        if program
        else None
    )
    gpus = parse_gpus(said.stdout) if said is not None and said.returncode == 0 else []
    chosen = next((gpu for gpu in gpus if gpu.index == device), None)
    if chosen is not None:
        return chosen
    if gpus:
        seen = f"only {', '.join(f'{gpu.index} ({gpu.name})' for gpu in gpus)}"
    elif said is None:
        seen = "no nvidia-smi, so no NVIDIA driver"
    else:
        seen = f"an nvidia-smi that says: {_last_line(said.stdout + said.stderr)}"
    raise HostError(
        f"An engine is built on the GPU that will serve it, and this machine has no GPU {device}: there is {seen}. Nothing was "
        "written. Run this on the GPU machine; `--dry-run` prints the commands here."
    )


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Exit code and output of a command, which is ended with us."""
    # As nvidia-smi counts GPUs, and not from the fastest on.
    environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with tempfile.TemporaryFile() as output, _started(command, environment, output) as process:
        code = process.wait()
        output.seek(0)
        return code, output.read().decode(errors="replace")


@contextmanager
def _started(
    command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    try:
        process = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=dict(environment)
        )
    except OSError as error:
        raise HostError(f"`{shlex.join(command)}` did not start: {error}. Nothing was written.") from error
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # Compose stops its container then
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def _workplace(folder: Path) -> Iterator[Path]:
    """A folder on the disk of the result, so that a rename moves it there; gone afterwards, whatever happened."""
    there = folder.is_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".engine-", dir=folder) as work:
            yield Path(work)
    except OSError as error:
        raise HostError(f"The engine's folder {folder} cannot be written: {error}. No plan was written.") from error
    finally:
        if not there and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _write_job(
    engine: Engine, options: EngineOptions, runner: _Runner, model: Path, work: Path, work_seen: Path
) -> list[str]:
    """Write what the calibration script reads; its command."""
    assert engine.calibration is not None
    if not runner.compose and not (options.project / CALIBRATE).is_file():
        raise HostError(
            f"There is no {options.project / CALIBRATE}, which calibrates. No plan was written. Run this in the project's root, "
            "or give an INT8 file, from `tritonpilot quantize`."
        )
    np.savez(work / "calibration.npz", **engine.calibration.rows)
    job = {
        "onnx": str(model / engine.onnx.name),
        "rows": str(work_seen / "calibration.npz"),
        "batch": engine.calibration.batch,
        "cache": str(work_seen / "calibration.cache"),
        "device": options.device,
        "profile": {"min": engine.profile.min, "opt": engine.profile.opt, "max": engine.profile.max},
    }
    (work / "calibration.json").write_text(json.dumps(job), encoding="utf-8")
    return ["python3", str(runner.calibrate), str(work_seen / "calibration.json")]


def _check_made(path: Path, command: Sequence[str]) -> None:
    if not path.is_file() or path.stat().st_size == 0:
        raise ModelError(
            f"`{shlex.join(command)}` ended well but made no {path.name}. No plan was written. Run it by hand and read what it "
            "says."
        )


def _inputs(engine: Engine, options: EngineOptions, trtexec: Trtexec, gpu: Gpu) -> dict[str, Any]:
    """What the plan depends on: it is built again when one of these differs."""
    files = [engine.onnx, *(engine.onnx.parent / name for name in external_files(engine.onnx))]
    calibration = engine.calibration
    return {
        "files": {file.name: sha256(file) for file in files},
        "precision": engine.precision,
        "shapes": [_shapes(engine.profile.min), _shapes(engine.profile.opt), _shapes(engine.profile.max)],
        "calibration": None if calibration is None else {"rows": calibration.count, "sha256": _hash(calibration.rows)},
        "workspace_mb": options.workspace_mb,
        "tensorrt": list(trtexec.version),
        "gpu": [gpu.name, gpu.compute_capability],
    }


def _current(plan: Path, manifest: Path, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The manifest, when it and the plan are what the same inputs made."""
    try:
        facts: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8"))
        right = (
            facts["format"] == MANIFEST_FORMAT and facts["inputs"] == inputs and facts["plan"]["sha256"] == sha256(plan)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return facts if right else None


def _shapes(shapes: Mapping[str, Shape]) -> dict[str, list[int]]:
    return {name: list(shape) for name, shape in shapes.items()}


def _hash(rows: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(rows.items()):
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _device_of(log: str) -> dict[str, str]:
    """What trtexec's log says of the GPU that it used."""
    found = {}
    for key, label in (("name", "Selected Device"), ("compute_capability", "Compute Capability")):
        line = re.search(rf"\b{label}: (.+)$", log, re.MULTILINE)
        if line:
            found[key] = line[1].strip()
    return found


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "nothing"
