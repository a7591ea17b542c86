"""Does the stand-in for Triton's onnxruntime backend answer as ONNX says? ONNX's own cases, in the real Triton.

Every case is first run by ONNX Runtime in a process of its own: what it cannot run, or answers otherwise than the case
expects, no server of it can. Of the others a spread is served, one model at a time per thread, and every answer compared
with what the case expects, at the case's own tolerances.
"""

from __future__ import annotations

import collections
import ctypes
import importlib
import math
import multiprocessing
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from perf import conformance_cases
from perf.conformance_cases import TRITON_TYPES, Arrays, Case, config, fault, obstacle
from perf.frame import Bench, Outcome
from tritonpilot.control import Control
from tritonpilot.errors import ServerError
from tritonpilot.server import EmbeddedServer
from tritonpilot.testkit import Served

LEAST = 300
SERVED = 360
QUICK_SERVED = 20
AT_ONCE = 4  # models; each is a process of about 80 MB
BFLOAT16 = 16
KEPT = "kept"  # a server is not started without a model


@dataclass(frozen=True)
class Verdict:
    """What ONNX Runtime in process made of a case: "" is right, else why the case is not served."""

    case: Case
    reason: str


def onnx_conformance(bench: Bench) -> Outcome:
    """Share of the served cases that pass; ok only with at least LEAST of them served."""
    found = conformance_cases.cases()
    bench.say(f"running {len(found)} cases by ONNX Runtime in process")
    verdicts = in_process(found)
    right = [verdict.case for verdict in verdicts if not verdict.reason]
    wanted = spread(right, QUICK_SERVED if bench.quick else SERVED)
    bench.say(f"serving {len(wanted)} of the {len(right)} cases that it answers as expected")
    with tempfile.TemporaryDirectory(prefix="tritonpilot-conformance-") as folder:
        faults = serve(wanted, Path(folder, "model_repository"), bench)
    for name, why in faults.items():
        bench.say(f"{name}: {why}")
    reasons = collections.Counter(verdict.reason for verdict in verdicts if verdict.reason)
    return Outcome(
        1 - len(faults) / len(wanted),
        rounds=len(wanted),
        ok=len(wanted) >= LEAST or bench.quick,
        details={
            "cases": len(found),
            "right_in_process": len(right),
            "served": len(wanted),
            "passed": len(wanted) - len(faults),
            "faults": faults,
            "not_served": dict(reasons.most_common()),
            "not_served_cases": {
                reason: [verdict.case.name for verdict in verdicts if verdict.reason == reason] for reason in reasons
            },
        },
    )


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """All "simple" models, and node cases at even steps through their names: the same ones every time."""
    simple = [case for case in cases if case.folder.parent.name == "simple"]
    nodes = [case for case in cases if case.folder.parent.name != "simple"]
    left = min(len(nodes), max(0, count - len(simple)))
    return simple[:count] + [nodes[place * len(nodes) // left] for place in range(left)]


def in_process(cases: Sequence[Case]) -> list[Verdict]:
    """ONNX Runtime's own verdict on each, from a process that may crash without ours."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return list(process.map(judged, cases, chunksize=50))


def judged(case: Case) -> Verdict:
    """Load and run a case by ONNX Runtime, with its own Python package alone."""
    if why := obstacle(case):
        return Verdict(case, why)
    onnxruntime: Any = importlib.import_module("onnxruntime")
    onnxruntime.set_default_logger_severity(4)
    try:
        session = onnxruntime.InferenceSession(str(case.model_file), providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001  whatever it raises is its verdict
        return Verdict(case, f"ONNX Runtime cannot load it: {_kind(error)}")
    for inputs, expected in case.data_sets():
        try:
            answer = _run(onnxruntime, session, case, inputs)
        except Exception as error:  # noqa: BLE001
            return Verdict(case, f"ONNX Runtime cannot run it: {_kind(error)}")
        if why := fault(case, expected, answer):
            return Verdict(case, "ONNX Runtime's answer is not the expected one")
    return Verdict(case, "")


def serve(cases: Sequence[Case], root: Path, bench: Bench | None = None) -> dict[str, str]:
    """The cases that do not pass in the real Triton, and why."""
    _write(next(case for case in conformance_cases.cases(["node"]) if case.name == "test_abs"), root, KEPT)
    faults = {}
    with EmbeddedServer(root, models=[KEPT]) as server, ThreadPoolExecutor(AT_ONCE) as threads:
        for number, (case, why) in enumerate(
            zip(cases, threads.map(lambda c: _asked(server, root, c), cases), strict=True)
        ):
            if why:
                faults[case.name] = why
            if bench is not None and number % 50 == 49:
                bench.say(f"{number + 1} served, {len(faults)} faults")
        server.check_alive()
    return faults


def _asked(server: EmbeddedServer, root: Path, case: Case) -> str:
    _write(case, root, case.name)
    types = {each.name: _wire(each.element) for each in case.signature()[0]}
    with Control(server.endpoints.grpc, server.control_key) as control:
        try:
            control.load(case.name, probe=False)
        except ServerError as error:
            return f"not loaded: {error}"
        ask = Served(server, case.name, types)
        try:
            for inputs, expected in case.data_sets():
                answer = ask({name: _ask_as(array) for name, array in inputs.items()})
                if why := fault(case, expected, answer, scalars_as_one=True):
                    return why
        except InferenceServerException as error:
            return f"not answered: {error}"
        finally:
            ask.close()
            control.unload(case.name)
    return ""


def _write(case: Case, root: Path, model: str) -> None:
    folder = root / model
    version = folder / "1"
    version.mkdir(parents=True)
    for path in case.folder.iterdir():
        if path.is_file():
            (version / path.name).symlink_to(path)
    (folder / "config.pbtxt").write_text(config(case, model), encoding="utf-8")


def _run(onnxruntime: Any, session: Any, case: Case, inputs: Arrays) -> Arrays:
    signature = {each.name: each.element for side in case.signature() for each in side}
    names = [each.name for each in session.get_outputs()]
    if BFLOAT16 not in signature.values():
        return dict(zip(names, session.run(names, inputs), strict=True))
    value = onnxruntime.OrtValue
    feeds = {
        name: value.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)
        if signature[name] == BFLOAT16
        else value.ortvalue_from_numpy(array)
        for name, array in inputs.items()
    }
    outputs = dict(zip(names, session.run_with_ort_values(names, feeds), strict=True))
    return {name: _bits(each) if signature[name] == BFLOAT16 else each.numpy() for name, each in outputs.items()}


def _bits(value: Any) -> np.ndarray[Any, Any]:
    shape = tuple(value.shape())
    buffer = (ctypes.c_uint16 * math.prod(shape)).from_address(value.data_ptr())
    return np.ctypeslib.as_array(buffer).reshape(shape).copy()


def _ask_as(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shown = array.reshape(array.shape or (1,))
    if shown.dtype == np.object_:
        return np.array([text.encode() for text in shown.ravel()], np.object_).reshape(shown.shape)
    return shown


def _wire(element: int) -> str:
    name = TRITON_TYPES[element].removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _kind(error: Exception) -> str:
    """ONNX Runtime's own word, such as NOT_IMPLEMENTED."""
    words = str(error).split(" : ")
    return words[2] if str(error).startswith("[ONNXRuntimeError]") and len(words) > 2 else type(error).__name__
