"""Which tritonserver is used, why, and how it is started: the installation, its backend directory, its command line.

installation = find_installation()            # says what was chosen and for which reason
check_host(installation)                      # HostError: one sentence for each thing that is missing
backends = assemble(installation, folder)     # a backend directory in a private folder
argv = arguments(installation, backends, options)
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tritonpilot import host
from tritonpilot.errors import HostError

CONTROL_HEADER = "tritonpilot-control-key"
RESTRICTED_APIS = ("model-repository", "shared-memory", "trace", "logging")
LOOPBACK = "127.0.0.1"
STUB = "triton_python_backend_stub"
#: How glibc keeps memory, where the caller's environment does not say: blocks of up to 32 MiB come from arenas, which grow by
#: 4 MiB and are given back above 64 MiB. With its defaults the buffers of a 600 KB image are mapped and returned anew: 13 page
#: faults a request against 1, and a fifth more CPU time in tritonserver. Small requests are the same with both.
#: hugetlb=1 asks for transparent huge pages, so weights and buffers need fewer TLB entries: 64-row ctr requests cost 1.3 %
#: less (served at .829 of in-process against .818, medians of 36 interleaved rounds).
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "67108864",
    "MALLOC_TOP_PAD_": "4194304",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


@dataclass(frozen=True)
class Installation:
    """One tritonserver on this machine."""

    binary: Path
    reason: str  # which one it is and why it was chosen, for people
    backends: Path
    stubs: Mapping[host.Version, Path] = field(default_factory=dict)  # Python version -> Python backend stub
    libraries: tuple[Path, ...] = ()
    caches: Path | None = None


@dataclass(frozen=True)
class Backends:
    """A backend directory as tritonserver takes it."""

    directory: Path
    python_based: tuple[str, ...]  # backends that are a model.py: each has its own shared-memory settings
    stand_ins: tuple[str, ...]  # ours among them


@dataclass(frozen=True)
class Options:
    """What one server is started with; see EmbeddedServer for the meaning."""

    repository: Path
    models: Sequence[str]
    http_port: int
    grpc_port: int
    metrics_port: int
    control_key: str
    shm_prefix: str
    exit_timeout_s: int = 30
    strict_config: bool = False
    rate_limit: bool = False
    rate_limit_resources: Mapping[str, int] = field(default_factory=dict)
    cache_size_bytes: int = 0  # 0: no response cache
    http_threads: int = 0  # 0: Triton's default
    trace_url: str = ""  # OTLP over HTTP; "": no tracing
    extra_args: Sequence[str] = ()


def find_installation(
    environ: Mapping[str, str] = os.environ, container: Path = Path("/opt/tritonserver"), wheel: str = "nvidia-pytriton"
) -> Installation:
    """The one place that decides which tritonserver is used.

    In this order: the path in TRITONPILOT_TRITONSERVER (an installation's root or its binary), NVIDIA's container layout at
    `container`, `tritonserver` on PATH, the `wheel`. Raises HostError when the named one is none, or when there is none.
    """
    chosen = environ.get("TRITONPILOT_TRITONSERVER")
    if chosen:
        path = Path(chosen).expanduser()
        if (found := _at(path, f"{path}, because TRITONPILOT_TRITONSERVER names it")) is None:
            raise HostError(
                f"TRITONPILOT_TRITONSERVER names {path}, which is neither a tritonserver nor the root of an installation "
                "with bin/tritonserver and backends/. Nothing was started. Correct the path, or unset the variable to "
                "use the tritonserver of the nvidia-pytriton wheel."
            )
        return found
    if (found := _at(container, f"{container}, the installation of this container or machine")) is not None:
        return found
    on_path = shutil.which("tritonserver", path=environ.get("PATH", os.defpath))
    if on_path and (found := _at(Path(on_path).resolve(), f"{on_path}, the tritonserver on PATH")) is not None:
        return found
    try:
        distribution = metadata.distribution(wheel)
    except metadata.PackageNotFoundError:
        raise HostError(
            f"There is no tritonserver on this machine: TRITONPILOT_TRITONSERVER is not set, {container} does not exist, "
            f"none is on PATH, and the package {wheel} is not installed. Nothing was started. Run: {sys.executable} -m pip "
            f"install {wheel}==0.7.0"
        ) from None
    # Located through the package's metadata: importing pytriton takes a second and starts threads.
    root = Path(str(distribution.locate_file("pytriton/tritonserver")))
    reason = f"the {wheel} wheel {distribution.version}, because {container} does not exist and none is on PATH"
    if (found := _at(root, reason)) is None:
        raise HostError(
            f"The package {wheel} {distribution.version} is installed, but {root} holds no tritonserver. Nothing was "
            f"started. Run: {sys.executable} -m pip install --force-reinstall --no-deps {wheel}==0.7.0"
        )
    return found


def check_host(installation: Installation) -> host.Host:
    """Return what was seen of this machine; raises HostError when it cannot run `installation`."""
    seen = host.observe()
    wrong = host.findings(seen, installation.stubs)
    if wrong:
        raise HostError(
            f"Nothing was started, because this machine cannot run {installation.binary}. " + " ".join(wrong)
        )
    return seen


def stand_in_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where our Python stand-ins for C++ backends are: TRITONPILOT_BACKENDS, else the checkout, else the installed ones."""
    if chosen := environ.get("TRITONPILOT_BACKENDS"):
        if not Path(chosen).is_dir():
            raise HostError(
                f"TRITONPILOT_BACKENDS names {chosen}, which is no folder. Nothing was started. Name a folder that holds one "
                "folder with a model.py for each backend, or unset the variable."
            )
        return Path(chosen).resolve()
    checkout = Path(__file__).resolve().parents[2] / "python_backend"
    return checkout if checkout.is_dir() else Path(sys.prefix) / "share" / "tritonpilot" / "python_backend"


def waking_backends(installation: Installation) -> frozenset[str]:
    """The backends whose models need no companion on this server: ours, as far as it has none of that name, and `python`."""
    folder = stand_in_directory()
    ours = {path.parent.name for path in folder.glob("*/model.py")}
    return frozenset({"python", "ensemble", *(name for name in ours if not (installation.backends / name).is_dir())})


def assemble(installation: Installation, folder: Path, python: host.Version, stand_ins: Path | None = None) -> Backends:
    """Make a backend directory in `folder`: the installation's backends, a stub for `python`, and our stand-ins.

    A stand-in is a folder with a model.py; it is left out where the installation has a backend of that name. Everything
    is a link or a copy in a folder of our own, so that neither Triton nor Python writes into the installation.
    """
    directory = folder / "backends"
    directory.mkdir()
    for backend in sorted(installation.backends.iterdir()):
        if backend.is_dir():
            # Triton refuses a link here: for a Python-based backend it checks that libtriton_python.so lies in this folder.
            _link_files(backend, directory / backend.name, copy=backend.name == "python")
    stub = directory / "python" / STUB
    if stub.parent.is_dir() and not stub.exists():
        # Triton sets the execute bit when it is missing, and may not be allowed to.
        _place(installation.stubs[python], stub, copy=not os.access(installation.stubs[python], os.X_OK))
    added = []
    stand_ins = stand_in_directory() if stand_ins is None else stand_ins
    for backend in sorted(stand_ins.iterdir()) if stand_ins.is_dir() else ():
        if (backend / "model.py").is_file() and not (directory / backend.name).exists():
            _link_files(backend, directory / backend.name)
            added.append(backend.name)
    python_based = [entry.name for entry in sorted(directory.iterdir()) if (entry / "model.py").exists()]
    return Backends(directory, tuple(python_based), tuple(added))


def environment(installation: Installation, seen: host.Host, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of tritonserver and its stubs: our interpreter first on PATH, the libraries that they load, `MALLOC`.

    The control key is taken out: models have no use for it.
    """
    libraries = [str(folder) for folder in installation.libraries]
    if seen.libpython is not None:
        libraries.append(str(seen.libpython.parent))
    libraries += [base["LD_LIBRARY_PATH"]] if base.get("LD_LIBRARY_PATH") else []
    environ = MALLOC | {name: value for name, value in base.items() if name != "TRITONPILOT_CONTROL_KEY"}
    environ["PATH"] = os.pathsep.join([str(seen.executable.parent), base.get("PATH", os.defpath)])
    environ["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    return environ


def arguments(installation: Installation, backends: Backends, options: Options) -> list[str]:
    """The command line of tritonserver.

    NOTE: the control key is part of it, and tritonserver 2.51 has no other way to take it, so every user of this machine
    who may see this process in `ps` sees the key; a container or a PID namespace hides it.
    """
    restriction = f"{','.join(RESTRICTED_APIS)}:{CONTROL_HEADER}={options.control_key}"
    argv = [
        str(installation.binary),
        f"--model-repository={options.repository}",
        "--model-control-mode=explicit",
        *(f"--load-model={name}" for name in options.models),
        # A model that does not load is then found in the index, with its reason, instead of in the log only.
        "--exit-on-error=false",
        f"--exit-timeout-secs={options.exit_timeout_s}",
        f"--backend-directory={backends.directory}",
        *([f"--cache-directory={installation.caches}"] if installation.caches else []),
        f"--http-address={LOOPBACK}",
        f"--http-port={options.http_port}",
        f"--http-restricted-api={restriction}",
        f"--grpc-address={LOOPBACK}",
        f"--grpc-port={options.grpc_port}",
        f"--grpc-restricted-protocol={restriction}",
        f"--metrics-address={LOOPBACK}",
        f"--metrics-port={options.metrics_port}",
        "--metrics-config=summary_latencies=true",
    ]
    # Each server's shared memory has a name of its own, so that what a crash leaves behind can be told from others'.
    for name in dict.fromkeys(("python", *backends.python_based)):
        argv.append(f"--backend-config={name},shm-region-prefix-name={options.shm_prefix}")
    if options.strict_config:
        argv.append("--disable-auto-complete-config")
    if options.rate_limit or options.rate_limit_resources:
        argv.append("--rate-limit=execution_count")
    argv += [f"--rate-limit-resource={name}:{count}" for name, count in options.rate_limit_resources.items()]
    if options.cache_size_bytes:
        argv.append(f"--cache-config=local,size={options.cache_size_bytes}")
    if options.http_threads:
        argv.append(f"--http-thread-count={options.http_threads}")
    if options.trace_url:
        argv += [f"--trace-config={setting}" for setting in trace_settings(options.trace_url)]
    return [*argv, *options.extra_args]


def trace_settings(url: str) -> tuple[str, ...]:
    """Values of --trace-config: spans go to the OTLP/HTTP receiver at `url`, of requests that bring a trace context.

    A rate of 0 says so; the rates of models come on top (Control.set_trace_rate).
    """
    return "mode=opentelemetry", f"opentelemetry,url={url}", "level=TIMESTAMPS", "rate=0"


def _at(path: Path, reason: str) -> Installation | None:
    """The installation whose root or whose binary is `path`, in the layout of NVIDIA's container or of the wheel."""
    root = path.parent.parent if path.is_file() else path
    binary = path if path.is_file() else root / "bin" / "tritonserver"
    backends = root / "backends"
    if not (binary.is_file() and os.access(binary, os.X_OK) and backends.is_dir()):
        return None
    beside_wheel = root.parent.parent / "nvidia_pytriton.libs"
    caches = root / "caches"
    return Installation(
        binary=binary,
        reason=reason,
        backends=backends,
        stubs=_stubs(root),
        libraries=tuple(folder for folder in (root / "lib", beside_wheel) if folder.is_dir()),
        caches=caches if caches.is_dir() else None,
    )


def _stubs(root: Path) -> dict[host.Version, Path]:
    in_place = root / "backends" / "python" / STUB
    found = {}
    for stub in (*root.glob(f"python_backend_stubs/*/{STUB}"), *([in_place] if in_place.is_file() else [])):
        # The version of a stub is that of the libpython that it is linked to, whatever its folder is called.
        linked = re.search(rb"libpython(\d)\.(\d+)\.so", stub.read_bytes())
        if linked is not None:
            found[int(linked[1]), int(linked[2])] = stub
    return found


def _link_files(source: Path, target: Path, copy: bool = False) -> None:
    target.mkdir()
    for entry in sorted(source.iterdir()):
        if entry.name != "__pycache__":
            _place(entry.resolve(), target / entry.name, copy and entry.is_file())


def _place(source: Path, target: Path, copy: bool = False) -> None:
    if copy:
        shutil.copyfile(source, target)
        target.chmod(0o700)
    else:
        target.symlink_to(source)
