from __future__ import annotations

import asyncio
import inspect
import os
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tritonpilot import build, repository, spec

ROOT = Path(__file__).parents[1]

# What runs in the background of a shell is started with SIGINT ignored, and so would be the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

CONFIG = """
backend: "python"
max_batch_size: 8
input [{name: "INPUT" data_type: TYPE_FP32 dims: [-1]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [-1]}]
instance_group [{kind: KIND_CPU}]
"""

# Answers its input, after as many seconds as the input's largest value above 0 says.
IDENTITY = """
import os
import time

import triton_python_backend_utils as pb_utils

import pilotlib

print("identity runs in", os.environ.get("IDENTITY_MARK"), pilotlib.__file__, flush=True)


class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy() for request in requests]
        seconds = max(float(array.max()) for array in inputs)
        if seconds > 0:
            print("identity takes", seconds, "s", flush=True)
            time.sleep(seconds)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", array)]) for array in inputs]
"""

MakeModel = Callable[..., Path]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The control key of the tests is a generated one, and not in the user's home."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        patch.delenv("TRITONPILOT_CONTROL_KEY", raising=False)
        yield folder


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """`make_model(repository, name, code=IDENTITY, config=CONFIG)` writes a model of the Python backend; returns its folder."""

    def make(repository: Path, name: str, code: str = IDENTITY, config: str = CONFIG) -> Path:
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(textwrap.dedent(code))
        (version.parent / "config.pbtxt").write_text(config)
        return version.parent

    return make


@pytest.fixture
def identity_repository(tmp_path: Path, make_model: MakeModel) -> Path:
    """A repository with the model "identity": FP32 [batch up to 8, any] in and out; sleeps as many seconds as its largest value."""
    repository = tmp_path / "model_repository"
    make_model(repository, "identity")
    return repository


@pytest.fixture
def free_port() -> int:
    """A port at 127.0.0.1 that was free a moment ago."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def last_cpu() -> int:
    """The highest of the CPUs that this process may use."""
    return max(os.sched_getaffinity(0))


@pytest.fixture(scope="session")
def example_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example services, trained or exported when they are missing, built into a repository of their own."""
    services = spec.load_services(ROOT / "models", ["ctr", "image"])
    build.prepare(services, "auto", lambda line: print(line, file=sys.stderr))
    root = tmp_path_factory.mktemp("examples") / "model_repository"
    repository.publish(root, [plan.folder for plan in build.plan(services)])
    return root
