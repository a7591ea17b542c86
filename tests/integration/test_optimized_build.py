"""`tritonpilot build` leaves copies that the server opens: the same answers, and a build that finds nothing to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from unit.onnx_files import save

from tritonpilot import optimized, repository
from tritonpilot.server import EmbeddedServer

WIDTH = 1024  # 4 MiB of weights
SERVICE = "service: {name}\nmodel: {{file: model.onnx, samples: samples.npz}}\nbatching: {{max_batch_size: 8}}\n"
SERVICE += "warmup: {{batch_sizes: [1]}}\n"
COMMAND = [str(Path(sys.executable).with_name("tritonpilot"))]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, width in (("wide", WIDTH), ("narrow", 16)):
        folder = tmp_path / "models" / name
        rng = np.random.default_rng(width)
        graph = helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "dense",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("batch", width))],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("batch", width))],
            [numpy_helper.from_array(rng.standard_normal((width, width)).astype(np.float32), "w")],
        )
        save(folder / "model.onnx", graph)
        np.savez(folder / "samples.npz", x=rng.standard_normal((4, width)).astype(np.float32))
        (folder / "service.yaml").write_text(SERVICE.format(name=name))
    return tmp_path


def run(project: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], cwd=project, capture_output=True, text=True, check=False)


def test_a_build_leaves_copies_that_the_server_opens(project: Path) -> None:
    built = run(project, "build")
    assert built.returncode == 0, built.stderr
    assert "wide: a copy is optimized for this CPU" in built.stderr
    assert "narrow: a copy" not in built.stderr, "too small to matter"
    root = project / "model_repository"
    (weights,) = (root / "wide" / "1").glob(f"{repository.OPTIMIZED_FOLDER}/*/weights.bin")

    again = run(project, "build", "--check")
    assert again.returncode == 0, again.stderr
    before = weights.stat().st_mtime_ns
    run(project, "build")
    assert weights.stat().st_mtime_ns == before

    with EmbeddedServer(root) as server:
        (stub,) = (
            pid
            for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            if " wide" in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        )
        assert str(weights) in Path(f"/proc/{stub}/maps").read_text()


def test_without_optimize_there_is_none(project: Path) -> None:
    built = run(project, "build", "--no-optimize")
    assert built.returncode == 0, built.stderr
    assert list((project / "model_repository").glob("*/1/.optimized")) == []


def test_a_repository_that_may_not_be_written_is_served_as_before(project: Path) -> None:
    assert run(project, "build", "--no-optimize").returncode == 0
    root = project / "model_repository"
    (root / "wide" / "1" / repository.OPTIMIZED_FOLDER).write_text("in the way")
    (note,) = optimized.write(root, ["wide", "narrow", "absent"])
    assert note.startswith("wide: no optimized copy, the server opens the model itself: ")
