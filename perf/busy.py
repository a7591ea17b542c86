"""A real model that takes a chosen time: products of matrices on one core, calibrated here and now.

    root, model_ms = repository_of(folder, core, 20.0, {"plain": "batching: {max_batch_size: 8}"}, say)

Each name becomes a service over the same model file; the text is its service file without the name. `WIDTH` numbers in, one out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from perf.inprocess import InProcess
from tritonpilot import build, repository
from tritonpilot.errors import MeasurementError
from tritonpilot.spec import load_services

WIDTH = 384
TOLERANCE = 0.06
CALIBRATIONS = 10
ALONE_S = 0.7


def row() -> dict[str, npt.NDArray[np.float32]]:
    """Inputs of one row."""
    return {"x": np.full((1, WIDTH), 0.5, np.float32)}


def repository_of(
    folder: Path,
    core: int,
    wanted_ms: float,
    services: Mapping[str, str],
    say: Callable[[str], None],
    tolerance: float = TOLERANCE,
) -> tuple[Path, float]:
    """A repository in `folder` with one model under several configs, and how long a row takes alone on the core, ms.

    Raises MeasurementError when no model comes within the relative `tolerance` of `wanted_ms`.
    """
    steps, model_ms = _calibrate(folder / "probe.onnx", core, wanted_ms, tolerance)
    say(f"the model multiplies {steps} matrices and takes {model_ms:.1f} ms")
    for name, text in services.items():
        service = folder / "models" / name
        service.mkdir(parents=True)
        model = "" if "model:" in text else "model: {file: model.onnx}\n"
        (service / "service.yaml").write_text(f"service: {name}\n{model}{text}\n", encoding="utf-8")
        _write_model(service / "model.onnx", steps)
    root = folder / "model_repository"
    root.mkdir()
    repository.publish(root, [plan.folder for plan in build.plan(load_services(folder / "models"), "auto")])
    return root, model_ms


def _calibrate(probe: Path, core: int, wanted_ms: float, tolerance: float) -> tuple[int, float]:
    """(steps, ms): how many steps make a model of that time."""
    steps = max(1, round(wanted_ms))
    for _ in range(CALIBRATIONS):
        _write_model(probe, steps)
        took = _alone_ms(probe, core)
        if abs(took / wanted_ms - 1) <= tolerance:
            return steps, took
        steps = max(1, round(steps * wanted_ms / took))
    raise MeasurementError(
        f"A model of {wanted_ms:g} ms could not be made: the last one took {took:.1f} ms alone on core {core}. Nothing was "
        "measured. Repeat on a quiet machine."
    )


def _alone_ms(model: Path, core: int) -> float:
    with InProcess(model, core) as alone:
        alone.prepare([{"x": np.ones((1, WIDTH), np.float32)}])
        rows, cpu_s = alone.run(seconds=ALONE_S)
    return 1e3 * cpu_s / rows


def _write_model(path: Path, steps: int) -> None:
    """x FP32[b,W] -> y FP32[b,1]: `steps` products of WxW matrices per row, orthogonal so that values stay in range."""
    random = np.random.default_rng(7)
    mix = np.linalg.qr(random.normal(size=(WIDTH, WIDTH)))[0].astype(np.float32)
    start = random.normal(size=(WIDTH, 1)).astype(np.float32)
    nodes = [
        helper.make_node("Unsqueeze", ["x", "axis"], ["row"]),
        helper.make_node("Mul", ["row", "start"], ["h0"]),
        *(helper.make_node("MatMul", [f"h{i}", "mix"], [f"h{i + 1}"]) for i in range(steps)),
        helper.make_node("ReduceMean", [f"h{steps}", "axis"], ["mean"], keepdims=0),
        helper.make_node("ReduceMean", ["mean", "axis"], ["y"], keepdims=1),
    ]
    graph = helper.make_graph(
        nodes,
        "busy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 1])],
        [
            numpy_helper.from_array(mix, "mix"),
            numpy_helper.from_array(start, "start"),
            numpy_helper.from_array(np.array([1], np.int64), "axis"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
