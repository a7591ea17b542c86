"""How is a TorchScript or torch.export file loaded so that both are called alike?

    forward = load(path, torch.device("cpu"), keys=("x", "mask"))
    forward.arguments             -> ("x", "mask")
    forward.call([x, mask])       -> [score, label]        tensors, flat, in the order of the model's results

What the file is, is seen from its content, not from its suffix.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass
from torch.utils import _pytree as pytree  # what torch.export itself describes nested arguments with

from pilotlib.signature import TensorSpec
from pilotlib.tensors import DTYPES_BY_CONFIG
from pilotlib.torch_names import paths

Tensors = Sequence[torch.Tensor]

#: PyTorch's element types -> Triton's; those that Triton's pytorch backend has.
TYPES: Mapping[torch.dtype, str] = {
    torch.bool: "TYPE_BOOL",
    torch.uint8: "TYPE_UINT8",
    torch.int8: "TYPE_INT8",
    torch.int16: "TYPE_INT16",
    torch.int32: "TYPE_INT32",
    torch.int64: "TYPE_INT64",
    torch.float16: "TYPE_FP16",
    torch.float32: "TYPE_FP32",
    torch.float64: "TYPE_FP64",
}


class ModelFileError(ValueError):
    """The model file is missing, or is none that this backend can run; the model is not loaded."""


class ResultError(TypeError):
    """The model's result is none that Triton can carry."""


@dataclass(frozen=True)
class Forward:
    """One loaded model, to be called with one tensor per argument, all in one flat list."""

    call: Callable[[Tensors], list[torch.Tensor]]
    arguments: tuple[str, ...]
    """Names of forward(); the keys, when it takes one dict; the paths, of an exported program with nested arguments."""
    argument_paths: tuple[str, ...] = ()
    result_paths: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    """What an exported program says of its arguments; empty for TorchScript, which does not."""
    outputs: tuple[TensorSpec, ...] = ()
    remarks: tuple[str, ...] = ()


def model_path(config: Mapping[str, Any], version_folder: Path) -> Path:
    """The file of a version: default_model_filename, or model.pt, or model.pt2. Raises ModelFileError when there is none."""
    stated = (
        config.get("default_model_filename") or "model.pt"
    )  # which Triton itself fills in when the config says nothing
    names = ["model.pt", "model.pt2"] if stated == "model.pt" else [stated]
    candidates = [version_folder / name for name in names]
    for path in candidates:
        if path.is_file():
            return path
    raise ModelFileError(
        f"there is no file {' or '.join(map(str, candidates))}; the model is not loaded: put the TorchScript or torch.export "
        "file there, or say default_model_filename in config.pbtxt"
    )


def load(path: Path, device: torch.device, keys: Sequence[str] = ()) -> Forward:
    """The model of a file, on `device`; `keys` are those of the dict, when a TorchScript model takes one and nothing else.

    Raises ModelFileError when it cannot be loaded.
    """
    try:
        return _read_exported(path, device) if _is_exported(path) else _read_torchscript(path, device, tuple(keys))
    except ModelFileError:
        raise
    except Exception as error:  # PyTorch raises whatever its readers meet: RuntimeError, KeyError, BadZipFile, ...
        raise ModelFileError(
            f"PyTorch {torch.__version__} cannot load {path}: {_first_line(error)}; the model is not loaded: export it "
            "again, with this version of PyTorch or an older one"
        ) from error


def _is_exported(path: Path) -> bool:
    """Whether it is an exported program and no TorchScript. Raises ModelFileError when it is neither."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.partition("/")[2] for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelFileError(
            f"{path} is no TorchScript or torch.export file, or it is damaged ({error}); the model is not loaded: copy it "
            "again, or save it with torch.jit.save or torch.export.save"
        ) from error
    if any(name.startswith("data/aotinductor/") for name in names):
        raise ModelFileError(
            f"{path} is an AOT Inductor package, compiled for one kind of machine; this stand-in runs what torch.export.save "
            "writes. The model is not loaded: save the exported program itself"
        )
    if "archive_format" in names:
        return True
    if "constants.pkl" in names:
        return False
    raise ModelFileError(
        f"{path} holds weights or a pickled module (torch.save), but no code to run; the model is not loaded: save "
        "torch.jit.script(model), torch.jit.trace(model, ...) or torch.export.export(model, ...)"
    )


def _read_torchscript(path: Path, device: torch.device, keys: tuple[str, ...]) -> Forward:
    module = torch.jit.load(str(path), map_location=device)  # type: ignore[no-untyped-call]
    method = module._c._get_method("forward")  # called directly: 3 us less than through the module
    arguments = [each for each in method.schema.arguments if each.type.kind() != "ClassType"]  # without self
    remarks = (f"{path.name} was saved in training mode: dropout and batch norm act so",) if module.training else ()
    if len(arguments) == 1 and arguments[0].type.kind() == "DictType":
        return Forward(lambda tensors: _flat(method(dict(zip(keys, tensors, strict=True)))), keys, remarks=remarks)
    for each in arguments:
        if each.type.kind() != "TensorType":
            raise ModelFileError(
                f'{path}: the argument "{each.name}" of forward() is a {each.type}; taken are tensors, or one Dict[str, Tensor]'
                + (". Lists of strings need Triton's C++ pytorch backend" if each.type.kind() == "ListType" else "")
                + ". The model is not loaded: change the arguments of forward()"
            )
    return Forward(lambda tensors: _flat(method(*tensors)), tuple(each.name for each in arguments), remarks=remarks)


def _read_exported(path: Path, device: torch.device) -> Forward:
    program = torch.export.load(path)
    if device.type != "cpu" or _devices(program) - {"cpu"}:
        program = move_to_device_pass(program, device)
    spec_in, spec_out = program.call_spec.in_spec, program.call_spec.out_spec
    assert spec_in is not None
    assert spec_out is not None
    positional, named = pytree.tree_unflatten(list(range(spec_in.num_leaves)), spec_in)
    argument_paths = [path for group, root in ((positional, "ARGS"), (named, "KWARGS")) for path in paths(group, root)]
    result_paths = paths(pytree.tree_unflatten(list(range(spec_out.num_leaves)), spec_out), "RESULT")
    is_flat = all(isinstance(each, int) for each in positional) and not named
    arguments = tuple(program.graph_signature.user_inputs) if is_flat else tuple(argument_paths)
    # NOTE: its forward() and not the module itself. The guards on shapes are within; a module call would flatten and check
    # a second time (100 us a call instead of 40).
    run: Callable[..., Any] = program.module().forward

    def call_nested(tensors: Tensors) -> list[torch.Tensor]:
        args, kwargs = pytree.tree_unflatten(list(tensors), spec_in)
        return _leaves(run(*args, **kwargs))

    return Forward(
        (lambda tensors: _leaves(run(*tensors))) if is_flat else call_nested,
        tuple(str(each) for each in arguments),
        argument_paths=tuple(argument_paths),
        result_paths=tuple(result_paths),
        inputs=_specs(program, program.graph_signature.user_inputs, argument_paths),
        outputs=_specs(program, program.graph_signature.user_outputs, result_paths),
    )


def _specs(program: Any, names: Sequence[Any], shown: Sequence[str]) -> tuple[TensorSpec, ...]:
    """What an exported program says of its arguments or results; ModelFileError for one that is no tensor."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    found = []
    for name, label in zip(names, shown, strict=True):
        value = values.get(name)
        if not isinstance(value, torch.Tensor) or value.dtype not in TYPES:
            what = f"a tensor of {value.dtype}" if isinstance(value, torch.Tensor) else "no tensor"
            raise ModelFileError(
                f"the exported program's {label} is {what}, which Triton's pytorch backend does not carry; the model is not "
                "loaded: change what forward() takes and gives"
            )
        dims = tuple(dim if isinstance(dim, int) else -1 for dim in value.shape)
        found.append(TensorSpec(label, DTYPES_BY_CONFIG[TYPES[value.dtype]], dims))
    return tuple(found)


def _devices(program: Any) -> set[str]:
    held = [*program.state_dict.values(), *program.constants.values()]
    return {each.device.type for each in held if isinstance(each, torch.Tensor)}


def _flat(result: Any) -> list[torch.Tensor]:
    """As Triton's backend: a tensor or a tuple of tensors, nothing else. Raises ResultError."""
    results = list(result) if isinstance(result, tuple) else [result]
    for each in results:
        if not isinstance(each, torch.Tensor):
            raise ResultError(
                f"forward() gave a {type(each).__name__}; as in Triton's pytorch backend it must give a tensor or a tuple of "
                "tensors, no list, dictionary or number"
            )
    return results


def _leaves(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    leaves: list[torch.Tensor] = pytree.tree_leaves(result)
    return leaves


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
