from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tritonpilot import host
from tritonpilot.errors import HostError
from tritonpilot.tritonserver import (
    CONTROL_HEADER,
    MALLOC,
    STUB,
    Backends,
    Installation,
    Options,
    arguments,
    assemble,
    check_host,
    environment,
    find_installation,
    stand_in_directory,
)

KEY = "0123456789abcdef"


def installation_at(root: Path, backends: tuple[str, ...] = (), stub: bytes = b"libpython3.10.so.1.0") -> Path:
    """An installation in the layout of NVIDIA's container."""
    (root / "bin").mkdir(parents=True)
    binary = root / "bin" / "tritonserver"
    binary.write_text("")
    binary.chmod(0o755)
    (root / "lib").mkdir()
    for name in ("python", *backends):
        (root / "backends" / name).mkdir(parents=True)
        (root / "backends" / name / f"libtriton_{name}.so").write_text("")
    (root / "backends" / "python" / STUB).write_bytes(b"\x7fELF..." + stub)
    return binary


@pytest.fixture
def absent(tmp_path: Path) -> Path:
    return tmp_path / "absent"


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    for name, file in (("onnxruntime", "model.py"), ("pilotlib", "__init__.py")):
        (tmp_path / "ours" / name).mkdir(parents=True)
        (tmp_path / "ours" / name / file).write_text("")
    return tmp_path / "ours"


def test_the_wheel_is_used_when_there_is_nothing_else(absent: Path) -> None:
    found = find_installation({"PATH": ""}, absent)
    assert found.reason.startswith("the nvidia-pytriton wheel 0.7.0, because")
    assert {(3, 10), (3, 11), (3, 12)} <= set(found.stubs)
    assert [folder.name for folder in found.libraries] == ["nvidia_pytriton.libs"]
    assert "pytriton" not in sys.modules


def test_the_containers_installation_goes_before_the_wheel(tmp_path: Path) -> None:
    binary = installation_at(tmp_path / "opt")
    found = find_installation({"PATH": ""}, tmp_path / "opt")
    assert found.binary == binary
    assert "of this container or machine" in found.reason
    assert found.stubs == {(3, 10): tmp_path / "opt" / "backends" / "python" / STUB}
    assert found.libraries == (tmp_path / "opt" / "lib",)


def test_a_tritonserver_on_path_goes_before_the_wheel(tmp_path: Path, absent: Path) -> None:
    binary = installation_at(tmp_path / "else")
    found = find_installation({"PATH": str(binary.parent)}, absent)
    assert found.binary == binary
    assert "on PATH" in found.reason


@pytest.mark.parametrize("named", ["", "bin/tritonserver"])
def test_the_variable_goes_before_all(tmp_path: Path, named: str) -> None:
    installation_at(tmp_path / "opt")
    binary = installation_at(tmp_path / "mine")
    found = find_installation({"TRITONPILOT_TRITONSERVER": str(tmp_path / "mine" / named)}, tmp_path / "opt")
    assert found.binary == binary
    assert "TRITONPILOT_TRITONSERVER names it" in found.reason


def test_a_variable_that_names_nothing_is_an_error_and_not_ignored(absent: Path) -> None:
    with pytest.raises(HostError, match="which is neither a tritonserver nor the root of an installation"):
        find_installation({"TRITONPILOT_TRITONSERVER": str(absent)})


def test_no_tritonserver_at_all_says_what_to_install(absent: Path) -> None:
    with pytest.raises(HostError, match="pip install no-such-wheel"):
        find_installation({"PATH": ""}, absent, wheel="no-such-wheel")


def test_a_host_that_cannot_run_it_gets_one_error(tmp_path: Path) -> None:
    installation_at(tmp_path / "opt", stub=b"libpython3.4.so.1.0")
    with pytest.raises(HostError, match=r"Nothing was started, because .* stubs for: 3.4"):
        check_host(find_installation({}, tmp_path / "opt"))


def test_stand_ins_are_used_only_where_the_installation_has_no_such_backend(tmp_path: Path, stand_ins: Path) -> None:
    installation_at(tmp_path / "without")
    installation_at(tmp_path / "with", backends=("onnxruntime",))
    for name, expected in (("without", ("onnxruntime",)), ("with", ())):
        folder = tmp_path / f"{name}-assembled"
        folder.mkdir()
        backends = assemble(find_installation({}, tmp_path / name), folder, (3, 10), stand_ins)
        assert backends.stand_ins == expected
        assert backends.python_based == expected
        assert (backends.directory / "python" / STUB).is_file()
        assert sorted(entry.name for entry in backends.directory.iterdir()) == ["onnxruntime", "python"]


def test_the_wheel_gets_the_stub_of_the_python_in_use(tmp_path: Path, absent: Path, stand_ins: Path) -> None:
    found = find_installation({"PATH": ""}, absent)
    backends = assemble(found, tmp_path, (3, 12), stand_ins)
    assert (backends.directory / "python" / STUB).resolve() == found.stubs[3, 12].resolve()


def test_stand_ins_come_from_the_variable_else_from_the_checkout(stand_ins: Path, absent: Path) -> None:
    assert stand_in_directory({"TRITONPILOT_BACKENDS": str(stand_ins)}) == stand_ins
    assert stand_in_directory({}) == Path(__file__).parents[2] / "python_backend"
    with pytest.raises(HostError, match="TRITONPILOT_BACKENDS names"):
        stand_in_directory({"TRITONPILOT_BACKENDS": str(absent)})


def test_models_get_our_interpreter_and_not_the_key(tmp_path: Path) -> None:
    found = Installation(tmp_path, "", tmp_path, libraries=(Path("/wheel/libs"),))
    base = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/mine", "TRITONPILOT_CONTROL_KEY": KEY, "HOME": "/home/me"}
    seen = replace(host.observe(), executable=Path("/venv/bin/python"), libpython=Path("/python/lib/libpython.so"))
    base["MALLOC_TOP_PAD_"] = "0"  # what the caller says stays
    assert environment(found, seen, base) == MALLOC | {
        "MALLOC_TOP_PAD_": "0",
        "PATH": "/venv/bin:/usr/bin",
        "LD_LIBRARY_PATH": "/wheel/libs:/python/lib:/mine",
        "HOME": "/home/me",
    }


def test_the_command_line_is_closed_by_default(tmp_path: Path) -> None:
    argv = arguments(Installation(tmp_path / "ts", "", tmp_path), Backends(tmp_path, ("onnxruntime",), ()), options())
    restriction = f"model-repository,shared-memory,trace,logging:{CONTROL_HEADER}={KEY}"
    assert argv[0] == str(tmp_path / "ts")
    assert {
        "--model-control-mode=explicit",
        "--load-model=ctr",
        "--load-model=image",
        "--http-address=127.0.0.1",
        "--grpc-address=127.0.0.1",
        "--metrics-address=127.0.0.1",
        f"--http-restricted-api={restriction}",
        f"--grpc-restricted-protocol={restriction}",
        "--metrics-config=summary_latencies=true",
        "--backend-config=python,shm-region-prefix-name=mine_",
        "--backend-config=onnxruntime,shm-region-prefix-name=mine_",
    } <= set(argv)
    assert not [flag for flag in argv if "auto-complete" in flag or "rate-limit" in flag or "cache-config" in flag]


def test_with_a_receiver_spans_of_requests_with_a_context_go_there(tmp_path: Path) -> None:
    asked = replace(options(), trace_url="http://127.0.0.1:4318/v1/traces")
    argv = arguments(Installation(tmp_path, "", tmp_path), Backends(tmp_path, (), ()), asked)
    assert argv[-4:] == [
        "--trace-config=mode=opentelemetry",
        "--trace-config=opentelemetry,url=http://127.0.0.1:4318/v1/traces",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=0",
    ]
    assert "--trace-config" not in " ".join(
        arguments(Installation(tmp_path, "", tmp_path), Backends(tmp_path, (), ()), options())
    )


def test_options_become_flags(tmp_path: Path) -> None:
    asked = replace(
        options(),
        strict_config=True,
        rate_limit_resources={"gpu": 2},
        cache_size_bytes=1024,
        extra_args=["--log-verbose=1"],
    )
    argv = arguments(
        Installation(tmp_path, "", tmp_path, caches=tmp_path / "caches"), Backends(tmp_path, (), ()), asked
    )
    assert argv[-1] == "--log-verbose=1"
    assert {
        "--disable-auto-complete-config",
        "--rate-limit=execution_count",
        "--rate-limit-resource=gpu:2",
        "--cache-config=local,size=1024",
        f"--cache-directory={tmp_path / 'caches'}",
    } <= set(argv)


def options() -> Options:
    return Options(
        repository=Path("/repository"),
        models=["ctr", "image"],
        http_port=1,
        grpc_port=2,
        metrics_port=3,
        control_key=KEY,
        shm_prefix="mine_",
    )
