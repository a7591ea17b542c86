"""Has ONNX Runtime laid this model out for this CPU before? Then it opens that copy: optimized, its weights packed and mapped.

    session, remarks = open_session(path, config, parameters, options)

A copy lies in the folder `.optimized` beside the model's file (`python -m pilotlib.optimize FILE` writes it) and answers the same
bits. It is taken only where version of ONNX Runtime, CPU and files are those that it was made with, and only for options that it
was made for; else the file itself is opened, as ever. Mapped weights are shared by all instances on a machine.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onnxruntime.capi import onnxruntime_pybind11_state as ort

from pilotlib.onnx_session import ModelFileError, OnnxSession
from pilotlib.parameters import Parameters

FOLDER = ".optimized"
MODEL, WEIGHTS, FACTS = "model.onnx", "weights.bin", "facts.json"
CPUINFO = Path("/proc/cpuinfo")
OF_A_CPU = ("vendor_id", "cpu family", "model", "model name", "flags", "CPU implementer", "CPU part", "Features")


def open_session(
    path: Path, config: Mapping[str, Any], parameters: Parameters, options: ort.SessionOptions
) -> tuple[OnnxSession, tuple[str, ...]]:
    """The session of the copy where there is one that fits, else of `path`, and a remark when the copy did not open.

    Raises ModelFileError as OnnxSession does.
    """
    copy = find(path) if is_made_for(config, parameters) else None
    remarks: tuple[str, ...] = ()
    if copy is not None:
        asked = options.graph_optimization_level
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimized
        try:
            return OnnxSession(copy, options, parameters.memory_arena_shrinkage), ()
        except ModelFileError as error:
            options.graph_optimization_level = asked
            remarks = (f"its optimized copy is left out, the model file itself is opened: {error}",)
    return OnnxSession(path, options, parameters.memory_arena_shrinkage), remarks


def find(path: Path) -> Path | None:
    """The copy of a model file that was made here and of these very files; None without one."""
    place = runs_on()
    copy = path.parent / FOLDER / folder_name(place)
    try:
        facts = json.loads((copy / FACTS).read_bytes())
        is_of_these = facts["runs_on"] == place and facts["made_of"] == made_of(path)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return copy / MODEL if is_of_these else None


def is_made_for(config: Mapping[str, Any], parameters: Parameters) -> bool:
    """Whether a config leaves to ONNX Runtime what a copy has decided: optimizations and how weights are packed."""
    level = int(((config.get("optimization") or {}).get("graph") or {}).get("level", 0))
    libraries = (config.get("model_operations") or {}).get("op_library_filename", ())
    return level == 0 and not libraries and not parameters.session


def made_of(path: Path) -> dict[str, list[int]]:
    """Size and time of change (ns) of the model file and of all beside it, such as external weights, by name."""
    files = {each.relative_to(path.parent): each for each in path.parent.rglob("*") if each.is_file()}
    found = {name.as_posix(): each.stat() for name, each in sorted(files.items()) if name.parts[0] != FOLDER}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def runs_on() -> str:
    """What a copy depends on: the version of ONNX Runtime, and the CPU with what it can do."""
    with CPUINFO.open(encoding="utf-8", errors="replace") as lines:
        facts = []
        for line in lines:
            if not line.strip():  # one core says it all, and a machine may have hundreds
                break
            if line.partition(":")[0].strip() in OF_A_CPU:
                facts.append(" ".join(line.split()))
    return "; ".join((f"onnxruntime {ort.get_version_string()}", *facts))


def folder_name(place: str) -> str:
    """Where the copy for such a machine lies."""
    return f"{zlib.crc32(place.encode()):08x}"
