"""What is asked of trtexec to make an engine for a service? Decided from files alone, the same on every machine.

    engine = decide(service, EngineOptions(precision="fp16"))
    arguments = plan_command(engine, parse_trtexec(help_text), model=Path("/model"), work=Path("/work"))

The flags follow NVIDIA's sources of trtexec 8.5 to 11.1 (samples/common/sampleOptions.cpp in github.com/NVIDIA/TensorRT).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tritonpilot import samples
from tritonpilot.errors import HostError, ModelError, SpecError
from tritonpilot.model_config import check_signature
from tritonpilot.onnx_model import Signature, read_signature
from tritonpilot.onnx_traits import Traits, read_traits
from tritonpilot.pipeline import parts
from tritonpilot.quantize import manifest
from tritonpilot.spec import FORMAT_OF_SUFFIX, Service

Precision = Literal["auto", "fp32", "fp16", "bf16", "int8"]
Where = Literal["auto", "host", "container"]
Version = tuple[int, int, int]
Shape = tuple[int, ...]
Range = tuple[int, int, int]
"""Smallest, best and largest size of a variable dimension."""

#: From this version on a network may be strongly typed: every tensor has the type that the ONNX file gives it.
STRONG_TYPES = (10, 0, 0)
#: From this version on it always is: `--fp16`, `--int8` and calibrators are gone.
STRONG_TYPES_ONLY = (11, 0, 0)
#: From this version on INT64 inputs and outputs stay INT64; earlier ones make them INT32.
INT64_TENSORS = (10, 0, 0)
#: The types of inputs and outputs that a plan can have.
PLAN_TYPES = frozenset({"FP32", "FP16", "BF16", "INT8", "INT32", "INT64", "UINT8", "BOOL"})
CALIBRATION_BATCH_MOST = 32
#: Every flag that a command line of ours may have.
ASKED_FLAGS = frozenset(
    {"--onnx", "--saveEngine", "--minShapes", "--optShapes", "--maxShapes", "--fp16", "--bf16", "--int8", "--stronglyTyped",
     "--calib", "--timingCacheFile", "--device", "--memPoolSize", "--skipInference"}
)  # fmt: skip

_BANNER = re.compile(r"\[TensorRT v(\d+(?:\.\d+)*)\]")
_VERSION_LINE = re.compile(r"TensorRT version: (\d+)\.(\d+)(?:\.(\d+))?")
_FLAG = re.compile(r"^\s+(--[A-Za-z][A-Za-z0-9]*)", re.MULTILINE)


@dataclass(frozen=True)
class EngineOptions:
    """What a person may say about an engine; everything has a default from the service file."""

    precision: Precision = "auto"
    """auto: as the ONNX file is, INT8 when it has QuantizeLinear, FP16 when it has FP16 tensors, else FP32."""
    onnx: Path | None = None
    """Another ONNX file of the same signature, e.g. the quantised one; default: the service's own."""
    output: Path | None = None
    """Default: model.gpu.file when it is a plan, else model.plan beside the ONNX file."""
    calibration: Path | None = None
    """.npz of real rows for TensorRT's own calibrator (below 11); not needed for an ONNX file with QuantizeLinear."""
    calibration_rows: tuple[int, ...] | None = None
    """Which rows of it; default: those that `tritonpilot quantize` has chosen, else all."""
    ranges: Mapping[str, Sequence[Range]] = field(default_factory=dict)
    """Input -> (min, opt, max) of each of its variable dimensions but the batch, in order."""
    opt_batch: int | None = None
    """Batch size that kernels are chosen for; default: the largest preferred one, or max_batch_size."""
    workspace_mb: int | None = None
    device: int = 0
    where: Where = "auto"
    project: Path = Path()
    """Folder with docker-compose.engines.yml and deploy/."""
    force: bool = False
    """Build although the plan that is there was made from the same files on such a GPU."""


@dataclass(frozen=True)
class Profile:
    """An optimisation profile: what shapes a plan takes, by input; empty when nothing is variable."""

    min: Mapping[str, Shape]
    opt: Mapping[str, Shape]
    max: Mapping[str, Shape]
    notes: tuple[str, ...] = ()
    """What was taken from the samples, for the person to judge."""


@dataclass(frozen=True)
class Trtexec:
    """A trtexec as it presents itself."""

    version: Version
    flags: frozenset[str]


@dataclass(frozen=True)
class Calibration:
    """Rows for TensorRT's calibrator, by input: [rows, ...]."""

    path: Path
    rows: Mapping[str, NDArray[Any]]

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(next(iter(self.rows.values())))

    @property
    def batch(self) -> int:
        """The largest batch that takes every row exactly once: the calibrator knows no smaller last one."""
        return max(size for size in range(1, CALIBRATION_BATCH_MOST + 1) if self.count % size == 0)


@dataclass(frozen=True)
class Engine:
    """What is to be built: decided from files alone, the same on every machine."""

    service: Service
    onnx: Path
    output: Path
    precision: Precision
    traits: Traits
    signature: Signature
    profile: Profile
    calibration: Calibration | None


def find_service(services: Sequence[Service], name: str) -> Service:
    """The service, or part of a pipeline, of this Triton name that runs an ONNX file; a pipeline's only one by its own name.

    Raises SpecError when there is none, or several.
    """
    runs_onnx = [part for service in services for part in parts(service) if _is_onnx(part)]
    exact = [part for part in runs_onnx if part.service == name]
    found = exact or [part for part in runs_onnx if part.written_as == name]
    if len(found) != 1:
        known = ", ".join(part.service for part in (found or runs_onnx)) or "none"
        why = f"{name} has several" if found else f"{name} has no"
        raise SpecError(
            f"{why} ONNX model{'s' if found else ''} to build an engine from. Nothing was changed. Name one of: {known}."
        )
    return found[0]


def decide(service: Service, options: EngineOptions) -> Engine:
    """What is to be built for a service with an ONNX model. Reads its files, asks nothing of the machine.

    Raises SpecError or ModelError for what no TensorRT could do; what depends on its version is `plan_command`'s.
    """
    if not _is_onnx(service) and options.onnx is None:
        raise SpecError(
            f"{service.path}: {service.service} runs no ONNX file, and an engine is built from one. Nothing was changed. "
            "Name the step that does, or give an ONNX file."
        )
    assert service.model is not None
    assert service.model.file is not None
    path = options.onnx or service.folder / service.model.file
    if not path.is_file():
        raise ModelError(
            f"The ONNX file {path} does not exist. Nothing was changed. Make it (for the examples: "
            f"`tritonpilot build {service.written_as} --prepare`), or name another."
        )
    signature = read_signature(path)
    check_signature(service, signature)
    _check_tensors(path, signature)
    traits = read_traits(path)
    precision = options.precision
    if precision == "auto":
        precision = "int8" if traits.is_quantized or options.calibration else _float_precision(traits)
    return Engine(
        service=service,
        onnx=path,
        output=_output(service, path, options),
        precision=precision,
        traits=traits,
        signature=signature,
        profile=profile(service, signature, options),
        calibration=_calibration(signature, options, traits, precision),
    )


def profile(service: Service, signature: Signature, options: EngineOptions) -> Profile:
    """The optimisation profile: batches from 1 to max_batch_size, other variable dimensions as stated or as in the samples.

    Samples are padded to one size, so they show the largest one: without a stated range the profile reaches from 1 to it.
    Raises SpecError for ranges that do not fit, or are missing where there are no samples.
    """
    most = service.batching.max_batch_size
    batched = most > 0
    best = options.opt_batch or max(service.batching.preferred_batch_sizes, default=most)
    if batched and not 1 <= best <= most:
        raise SpecError(
            f"{service.path}: the engine cannot be tuned for batches of {best}, max_batch_size is {most}. Nothing was changed. "
            f"Choose between 1 and {most}."
        )
    if not batched and options.opt_batch is not None:
        raise SpecError(
            f"{service.path}: max_batch_size is 0, so there is no batch to tune the engine for. Nothing was changed. "
            "Leave the batch size out, or set max_batch_size."
        )
    unknown = [name for name in options.ranges if name not in {tensor.name for tensor in signature.inputs}]
    if unknown:
        known = ", ".join(tensor.name for tensor in signature.inputs)
        raise SpecError(
            f"{service.path}: there is no input {unknown[0]} to give a range for ({known}). Nothing was changed."
        )
    rows: Mapping[str, NDArray[Any]] | None = None
    shapes: dict[str, list[list[int]]] = {}
    notes = []
    for tensor in signature.inputs:
        dims = tensor.shape[1:] if batched else tensor.shape
        variable = [axis for axis, dim in enumerate(dims) if dim == -1]
        stated = list(options.ranges.get(tensor.name, ()))
        if stated and len(stated) != len(variable):
            raise SpecError(
                f"{service.path}: input {tensor.name} has {len(variable)} variable dimensions besides the batch "
                f"({list(dims)}), but ranges for {len(stated)} were given. Nothing was changed. Give one for each."
            )
        for low, middle, high in stated:
            if not 1 <= low <= middle <= high:
                raise SpecError(
                    f"{service.path}: the range {low}:{middle}:{high} of input {tensor.name} is not min:opt:max with "
                    "1 <= min <= opt <= max. Nothing was changed."
                )
        if variable and not stated:
            rows = _sample_rows(service, tensor.name) if rows is None else rows
            sizes = _sample_sizes(service, tensor.name, rows, dims)
            stated = [(1, sizes[axis], sizes[axis]) for axis in variable]
            notes.append(
                f"{tensor.name}: variable dimensions up to {' x '.join(str(sizes[axis]) for axis in variable)}, as in the "
                "samples; larger requests will be refused (a range says otherwise)"
            )
        ranges = dict(zip(variable, stated, strict=True))
        three = [[ranges[axis][which] if dim == -1 else dim for axis, dim in enumerate(dims)] for which in range(3)]
        if batched:
            three = [[batch, *rest] for batch, rest in zip((1, best, most), three, strict=True)]
        if batched or variable:
            shapes[tensor.name] = three
    smallest, best_shapes, largest = (
        {name: tuple(three[which]) for name, three in shapes.items()} for which in range(3)
    )
    return Profile(smallest, best_shapes, largest, tuple(notes))


def precision_flags(engine: Engine, version: Version) -> list[str]:
    """trtexec's flags for a precision, which differ by TensorRT's version.

    Below 10 flags permit a precision; from 10 on a file that has the precision in its own tensors is built strongly typed,
    so that the plan computes what the file says; from 11 on there is nothing else. Raises ModelError where file,
    precision and version do not go together.
    """
    traits, wanted = engine.traits, engine.precision
    spoken = ".".join(map(str, version))

    def refuse(why: str, do: str) -> ModelError:
        return ModelError(f"{engine.onnx}: {why} (TensorRT {spoken}, precision {wanted}). Nothing was changed. {do}")

    if traits.obstacles:
        raise refuse(
            f"TensorRT cannot take this file, which has {'; '.join(traits.obstacles)}",
            "Quantise it for TensorRT: QuantizeLinear/DequantizeLinear with INT8 activations and weights, symmetric "
            "(zero point 0), biases left in floating point.",
        )
    typed = [] if version >= STRONG_TYPES_ONLY else ["--stronglyTyped"]
    if wanted == "int8":
        if traits.is_quantized and version >= STRONG_TYPES:
            return typed
        if not traits.is_quantized and version >= STRONG_TYPES_ONLY:
            raise refuse(
                "this file is not quantised, and calibrators are gone",
                "Give the INT8 file, from `tritonpilot quantize`.",
            )
        if not traits.is_quantized and engine.calibration is None:
            raise refuse(
                "this file is not quantised and there are no calibration rows; trtexec would invent the ranges",
                "Give the INT8 file, from `tritonpilot quantize`, or calibration rows.",
            )
        return ["--int8", *(["--fp16"] if traits.half == "FP16" else [])]
    if traits.is_quantized:
        raise refuse("this file is quantised", "Choose int8, or give the file that it was made from.")
    if wanted != _float_precision(traits) and traits.half is not None:
        raise refuse(f"this file has {traits.half} tensors", f"Choose {traits.half.lower()}, or give the FP32 file.")
    if traits.half is not None:
        if version >= STRONG_TYPES:
            return typed
        if traits.half == "BF16":
            raise refuse("BF16 files need TensorRT 10", "Use a newer TensorRT, or an FP16 file.")
        return ["--fp16"]
    if wanted == "fp32":
        return []
    if version >= STRONG_TYPES_ONLY:
        raise refuse(
            "this file is FP32, and TensorRT no longer chooses lower precisions itself",
            f"Give the {wanted.upper()} file, from `tritonpilot quantize`.",
        )
    if wanted == "bf16" and version < STRONG_TYPES:
        raise refuse("BF16 needs TensorRT 10", "Use a newer TensorRT, or fp16.")
    return [f"--{wanted}"]


def plan_command(
    engine: Engine,
    trtexec: Trtexec,
    *,
    model: Path,
    work: Path,
    device: int = 0,
    workspace_mb: int | None = None,
) -> list[str]:
    """trtexec's arguments, without the program: the model in folder `model`, what is read and made in folder `work`.

    Raises ModelError as `precision_flags`, HostError when this trtexec lacks one of the flags.
    """
    _check_version(engine, trtexec.version)
    arguments = [f"--onnx={model / engine.onnx.name}", f"--saveEngine={work / 'model.plan'}"]
    for flag, shapes in (("min", engine.profile.min), ("opt", engine.profile.opt), ("max", engine.profile.max)):
        if shapes:
            arguments.append(f"--{flag}Shapes=" + ",".join(f"{name}:{_by(shape)}" for name, shape in shapes.items()))
    arguments += precision_flags(engine, trtexec.version)
    if engine.calibration is not None and "--int8" in arguments:
        arguments.append(f"--calib={work / 'calibration.cache'}")
    arguments += [f"--timingCacheFile={work / 'timing.cache'}", f"--device={device}"]
    if workspace_mb is not None:
        arguments.append(f"--memPoolSize=workspace:{workspace_mb}")
    # --buildOnly is the name before 8.6
    arguments.append("--skipInference" if "--skipInference" in trtexec.flags else "--buildOnly")
    absent = [a.partition("=")[0] for a in arguments if a.partition("=")[0] not in trtexec.flags]
    if absent:
        raise HostError(
            f"This trtexec (TensorRT {'.'.join(map(str, trtexec.version))}) does not know {absent[0]}. Nothing was written. "
            "Use TensorRT 8.5 or newer."
        )
    return arguments


def calibrates(arguments: Sequence[str]) -> bool:
    """Whether a command line reads a calibration cache, which must be made first."""
    return any(argument.startswith("--calib=") for argument in arguments)


def parse_trtexec(text: str) -> Trtexec | None:
    """Version and flags from the output of `trtexec --help`; None when it is no such output.

    The banner has the version as one number: v8601 is 8.6.1, v100500 is 10.5.0.
    """
    flags = frozenset(_FLAG.findall(text))
    version = _VERSION_LINE.search(text)
    if version:
        major, minor, patch = (int(part or 0) for part in version.groups())
        return Trtexec((major, minor, patch), flags)
    banner = _BANNER.search(text)
    if banner is None:
        return None
    digits = banner[1]
    if "." in digits:
        numbers = [*map(int, digits.split(".")), 0, 0]
        return Trtexec((numbers[0], numbers[1], numbers[2]), flags)
    number = int(digits)
    thousand = 10_000 if number >= 100_000 else 1_000
    return Trtexec((number // thousand, number % thousand // 100, number % 100), flags)


def parse_range(text: str) -> tuple[str, list[Range]]:
    """`input_ids=16:64:256` or, for two dimensions, `page=32:640:960,32:640:960`: input name and ranges.

    Raises SpecError when it is not of this form.
    """
    name, _, ranges = text.rpartition("=")
    try:
        found = [tuple(int(size) for size in part.split(":")) for part in ranges.split(",")]
    except ValueError:
        found = []
    if not name or not found or any(len(sizes) != 3 for sizes in found):
        raise SpecError(
            f"{text!r} is no range of an input's variable dimensions. Nothing was changed. Write INPUT=MIN:OPT:MAX, with one "
            "MIN:OPT:MAX for each dimension, separated by commas."
        )
    return name, [(low, middle, high) for low, middle, high in found]


def service_lines(engine: Engine) -> str:
    """The lines that the service file lacks so that `tritonpilot build --target gpu` serves the plan; empty if none."""
    service = engine.service
    assert service.model is not None
    lines = []
    stated = service.model.gpu.file
    if stated is None or (service.folder / stated).resolve() != engine.output.resolve():
        lines.append(f"  gpu: {{file: {os.path.relpath(engine.output, service.folder)}}}")
    batched = service.batching.max_batch_size > 0
    for key, there, tensors in (
        ("inputs", service.model.inputs, engine.signature.inputs),
        ("outputs", service.model.outputs, engine.signature.outputs),
    ):
        if there is None:
            lines.append(f"  {key}:")
            lines += [
                f"    - {{name: {json.dumps(t.name)}, data_type: {t.data_type}, dims: {list(t.shape[1:] if batched else t.shape)}}}"
                for t in tensors
            ]
    return "\n".join(["model:", *lines]) if lines else ""


def _by(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _is_onnx(service: Service) -> bool:
    model = service.model
    if model is None or model.file is None or model.backend is not None:
        return False
    return (model.format or FORMAT_OF_SUFFIX.get(Path(model.file).suffix)) == "onnx"


def _float_precision(traits: Traits) -> Precision:
    return "fp16" if traits.half == "FP16" else "bf16" if traits.half == "BF16" else "fp32"


def _output(service: Service, path: Path, options: EngineOptions) -> Path:
    assert service.model is not None
    stated = service.model.gpu.file
    is_plan = stated is not None and (
        (service.model.gpu.format or FORMAT_OF_SUFFIX.get(Path(stated).suffix)) == "tensorrt"
    )
    output = options.output or (service.folder / stated if stated and is_plan else path.with_name("model.plan"))
    if FORMAT_OF_SUFFIX.get(output.suffix) != "tensorrt":
        raise SpecError(f"{output} does not end in .plan or .engine. Nothing was changed. Name the engine so.")
    return output


def _check_tensors(path: Path, signature: Signature) -> None:
    for tensor in (*signature.inputs, *signature.outputs):
        if tensor.data_type not in PLAN_TYPES:
            raise ModelError(
                f"{path}: {tensor.name} is {tensor.data_type}, which no TensorRT engine takes or makes. Nothing was changed. "
                f"Cast it inside the model to one of {', '.join(sorted(PLAN_TYPES))}, or serve it with "
                "model.gpu.accelerator (ONNX Runtime)."
            )
        if re.search(r"[,'=*]", tensor.name):
            raise ModelError(
                f"{path}: the tensor name {tensor.name!r} cannot be written on trtexec's command line. Nothing was changed. "
                "Export the model with names of letters, digits, and . _ : / -"
            )


def _check_version(engine: Engine, version: Version) -> None:
    wide = [t.name for t in (*engine.signature.inputs, *engine.signature.outputs) if t.data_type == "INT64"]
    if wide and version < INT64_TENSORS:
        raise ModelError(
            f"{engine.onnx}: {wide[0]} is INT64, which TensorRT {'.'.join(map(str, version))} makes INT32, and callers of "
            f"{engine.service.service} send INT64. Nothing was changed. Use TensorRT 10 (container 24.05) or newer."
        )


def _calibration(
    signature: Signature, options: EngineOptions, traits: Traits, precision: Precision
) -> Calibration | None:
    """The rows for TensorRT's calibrator, which only an unquantised file needs."""
    if options.calibration is None:
        return None
    if precision != "int8" or traits.is_quantized:
        why = "the file is quantised already" if traits.is_quantized else f"{precision} needs none"
        raise SpecError(f"Calibration rows were given, but {why}. Nothing was changed. Leave them out.")
    path = options.calibration
    arrays = samples.read(path, {tensor.name for tensor in signature.inputs})  # slices and labels lie beside them
    rows = {}
    for tensor in signature.inputs:
        array = arrays.get(tensor.name)
        shape = tensor.shape[1:] if len(tensor.shape) > 1 else ()
        if array is None or not samples.fits(array, tensor.data_type, shape):
            seen = "is missing" if array is None else f"is {array.dtype}{list(array.shape[1:])} a row"
            raise ModelError(
                f"{path}: input {tensor.name} {seen}, but the model takes {tensor.data_type}{list(shape)}. Nothing was changed. "
                "Make the calibration rows again."
            )
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            row = int(np.argwhere(~np.isfinite(array))[0][0])
            raise ModelError(
                f"{path}: row {row} of input {tensor.name} has NaN or Inf, which would set the range of a whole tensor. "
                "Nothing was changed. Make the calibration rows again."
            )
        rows[tensor.name] = array
    count = len(next(iter(rows.values())))
    chosen = chosen_rows(path) if options.calibration_rows is None else options.calibration_rows
    if chosen is not None:
        if not chosen or min(chosen) < 0 or max(chosen) >= count:
            raise ModelError(f"{path} has the rows 0 to {count - 1}, not all that were chosen. Nothing was changed.")
        rows = {name: array[list(chosen)] for name, array in rows.items()}
    return Calibration(path, rows)


def chosen_rows(path: Path) -> tuple[int, ...] | None:
    """Which rows of a calibration archive `tritonpilot quantize` has chosen, by a manifest beside it; None: it has chosen none."""
    if not path.is_file():
        return None
    rows_sha256 = manifest.hash_file(path)
    for file in sorted(path.parent.glob("*.int8*.onnx")):
        try:
            history = manifest.read(file)
        except ModelError:
            continue
        if history.data_sha256.get("calibration") == rows_sha256:
            return history.sample_indices
    return None


def _sample_rows(service: Service, tensor: str) -> Mapping[str, NDArray[Any]]:
    if service.samples is None:
        raise SpecError(
            f"{service.path}: input {tensor} has variable dimensions and the service names no samples to see their sizes in. "
            "Nothing was changed. Give a range (INPUT=MIN:OPT:MAX), or set model.samples."
        )
    return samples.read(service.samples)


def _sample_sizes(
    service: Service, tensor: str, rows: Mapping[str, NDArray[Any]], dims: Sequence[int]
) -> tuple[int, ...]:
    array = rows.get(tensor)
    if array is None or array.ndim != len(dims) + 1:
        raise ModelError(
            f"{service.samples}: there are no rows of input {tensor} with the dimensions {list(dims)}. Nothing was changed. Make "
            "the samples again, or give a range (INPUT=MIN:OPT:MAX)."
        )
    return tuple(array.shape[1:])
