"""The backend pytorch without a server; in Triton: tests/integration/test_pytorch_backend.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from unit import torch_files

from pilotlib import instance, testkit
from pilotlib.testkit import Case, check, check_mates, in_process
from pilotlib.torch_switches import DeviceError

MODEL = Path(__file__).parents[2] / "python_backend" / "pytorch" / "model.py"


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """An instance sets them for its process, which is this one here."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def config(inside: str = "FP32", dims: tuple[int, ...] = (2,), **more: Any) -> dict[str, Any]:
    return testkit.config(
        inputs=[{"name": "x", "data_type": inside, "dims": list(dims)}],
        outputs=[{"name": "OUTPUT__0", "data_type": "FP32", "dims": list(dims)}],
        **more,
    )


def floats(*rows: list[float]) -> dict[str, Any]:
    return {"x": np.array(rows, np.float32)}


def test_mates_of_other_widths_run_beside_each_other(tmp_path: Path) -> None:
    torch_files.script(torch_files.Scale(), tmp_path / "model.pt")
    cases = [
        Case("narrow", floats([1, 2]), {"OUTPUT__0": np.array([[2, 4]], np.float32)}),
        Case("wide", floats([1, 2, 3], [4, 5, 6]), {"OUTPUT__0": np.array([[2, 4, 6], [8, 10, 12]], np.float32)}),
        Case("narrow too", floats([5, 6]), {"OUTPUT__0": np.array([[10, 12]], np.float32)}),
        Case("no rows", {"x": np.zeros((0, 2), np.float32)}, {"OUTPUT__0": np.zeros((0, 2), np.float32)}),
    ]
    with in_process(MODEL, config(dims=(-1,)), tmp_path) as ask:
        for case in cases:
            check(ask, case)
        check_mates(ask, cases)


def test_answers_that_are_the_inputs_survive_the_buffers_they_lie_in(tmp_path: Path) -> None:
    torch_files.script(torch_files.Same(), tmp_path / "model.pt")
    cases = [
        Case(f"{width} columns", floats([width] * width), {"OUTPUT__0": np.full((1, width), width, np.float32)})
        for width in (2, 3, 2, 3, 1)
    ]
    with in_process(MODEL, config(dims=(-1,)), tmp_path) as ask:
        check_mates(ask, cases)


def test_bad_requests_among_good_ones_fail_alone(tmp_path: Path) -> None:
    torch_files.script(torch_files.Pick(), tmp_path / "model.pt")
    cases = [
        Case(f"request {place}", {"x": np.array([[99]])}, error="index out of range")
        if place in (3, 4, 17)
        else Case(
            f"request {place}", {"x": np.array([[place % 4]])}, {"OUTPUT__0": np.array([[place % 4 + 0.5]], np.float32)}
        )
        for place in range(32)
    ]
    with in_process(MODEL, config("INT64", (1,)), tmp_path) as ask:
        check_mates(ask, cases)


def test_infinities_and_nans_are_the_models_affair(tmp_path: Path) -> None:
    torch_files.export(torch_files.Scale(), tmp_path / "model.pt2", [torch.ones(2, 2)])
    given = floats([np.nan, np.inf])
    with in_process(MODEL, config(), tmp_path) as ask:
        check(ask, Case("not finite", given, {"OUTPUT__0": given["x"] * 2}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_instance_without_a_gpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    torch_files.script(torch_files.Scale(), tmp_path / "model.pt")
    backend = testkit.load(MODEL, tmp_path)
    assert backend.runs_on_gpu
    with pytest.raises(DeviceError, match="built without CUDA|PyTorch sees 0"):
        instance.set_up(
            backend, config(), model="m", version=1, version_folder=tmp_path, infer=lambda *_: {}, device="cuda:0"
        )
