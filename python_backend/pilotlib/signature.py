"""Does a model config fit its model? Completes what is missing, names what contradicts.

    complete(config, signature)   fills max_batch_size, dynamic_batching, input, output (as Triton's C++ onnxruntime does)
    check(config, signature)      raises ContradictionError

`config` is Triton's ModelConfig in JSON form (a dict), dims exclude the batch dimension when max_batch_size > 0; a
signature's dims are the model's own, with -1 for a dynamic one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pilotlib.tensors import DTYPES_BY_CONFIG, Dtype

DEFAULT_MAX_BATCH_SIZE = 4  # Triton's default-max-batch-size; a Python-based backend cannot see --backend-config


class ContradictionError(ValueError):
    """The config says one thing and the model another; the model is not loaded."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type and dims (-1 = dynamic) of one input or output of a model."""

    name: str
    dtype: Dtype
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """What a model takes and gives. `optional` are inputs with a value of their own (overridable initializers)."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    optional: tuple[TensorSpec, ...] = ()

    @property
    def is_batchable(self) -> bool:
        """Whether the first dimension of every input and output is dynamic, as dynamic batching needs."""
        return all(spec.dims[:1] == (-1,) for spec in self.inputs + self.outputs)


def is_complete(config: Mapping[str, Any]) -> bool:
    """Whether the config names inputs and outputs: Triton's C++ backend then completes nothing, neither do we."""
    return bool((config.get("input") or config.get("batch_input")) and config.get("output"))


def complete(config: dict[str, Any], signature: Signature) -> None:
    """Fill `config` in place from the model.

    Raises ContradictionError when max_batch_size > 0 on a model without a batch dimension.
    """
    if is_complete(config):
        return
    if signature.is_batchable:
        config["max_batch_size"] = config.get("max_batch_size") or DEFAULT_MAX_BATCH_SIZE
        if config["max_batch_size"] > 1 and not ("sequence_batching" in config or "dynamic_batching" in config):
            config["dynamic_batching"] = {}
    elif config.get("max_batch_size", 0) > 0:
        raise ContradictionError(_refusal(config, _no_batch_dimension(config, signature)))
    has_batch_dimension = config.get("max_batch_size", 0) > 0
    for key, specs in (("input", signature.inputs), ("output", signature.outputs)):
        if not config.get(key):
            config[key] = [_entry(spec, has_batch_dimension) for spec in specs]


def check(config: Mapping[str, Any], signature: Signature) -> None:
    """Raise ContradictionError with every field in which `config` contradicts the model, or asks what we cannot do."""
    faults = _unsupported(config)
    if config.get("max_batch_size", 0) > 0 and not signature.is_batchable:
        faults += _no_batch_dimension(config, signature)
    controls = _control_names(config)
    known_inputs = signature.inputs + signature.optional
    faults += _tensor_faults("input", config, known_inputs, exact=False)
    faults += _tensor_faults("output", config, signature.outputs, exact=True)
    named = {entry["name"] for entry in config.get("input", ())} | controls
    for spec in signature.inputs:
        if spec.name not in named:
            faults.append(f'input: the model needs "{spec.name}" ({_shown(spec)}), the config does not name it')
    for entry in config.get("input", ()):
        if entry.get("optional") and config.get("max_batch_size", 0) > 0:
            faults.append(f'input "{entry["name"]}": optional inputs are not supported with max_batch_size > 0')
    if faults:
        raise ContradictionError(_refusal(config, faults))


def _entry(spec: TensorSpec, has_batch_dimension: bool) -> dict[str, Any]:
    # Triton's config has no dim of 0: what a model says is always empty is told as dynamic.
    dims = [dim or -1 for dim in (spec.dims[1:] if has_batch_dimension else spec.dims)]
    entry: dict[str, Any] = {"name": spec.name, "data_type": spec.dtype.config, "dims": dims or [1]}
    if not dims and has_batch_dimension:
        entry["reshape"] = {"shape": []}  # Triton knows no empty dims: one value per row is [1] outside, [] inside
    return entry


def _tensor_faults(kind: str, config: Mapping[str, Any], specs: Sequence[TensorSpec], exact: bool) -> list[str]:
    by_name = {spec.name: spec for spec in specs}
    faults = []
    for entry in config.get(kind, ()):
        name = entry["name"]
        spec = by_name.get(name)
        if spec is None:
            have = ", ".join(f'"{known}"' for known in by_name) or "none"
            faults.append(f'{kind}: the config names "{name}", the model has {have}')
            continue
        if entry["data_type"] not in DTYPES_BY_CONFIG or DTYPES_BY_CONFIG[entry["data_type"]] != spec.dtype:
            faults.append(
                f'{kind} "{name}" data_type: the config says {entry["data_type"]}, the model says {spec.dtype.config}'
            )
        faults += _dims_faults(kind, entry, spec, config.get("max_batch_size", 0) > 0, exact)
    return faults


def _dims_faults(kind: str, entry: Mapping[str, Any], spec: TensorSpec, has_batch: bool, exact: bool) -> list[str]:
    reshape = entry.get("reshape")
    said = [int(dim) for dim in (reshape.get("shape", ()) if reshape is not None else entry["dims"])]
    if not spec.dims:
        fits = all(dim == 1 for dim in said)  # a scalar: Triton wants [1] for it
        have: list[int] = []
    else:
        have = list(spec.dims[1:] if has_batch else spec.dims)
        # As Triton's C++ backend: a dynamic dim of the model takes any config for inputs, only -1 for outputs.
        # It knows no dim of 0, which is -1 there.
        fits = len(said) == len(have) and all(
            s == h or (h == -1 and not exact) or (h == 0 and s == -1) for s, h in zip(said, have, strict=True)
        )
    if fits:
        return []
    where = "dims" if reshape is None else "reshape"
    without = " (without the batch dimension)" if has_batch else ""
    return [f'{kind} "{spec.name}" {where}: the config says {said}, the model says {have}{without}']


def _no_batch_dimension(config: Mapping[str, Any], signature: Signature) -> list[str]:
    fixed = [spec for spec in signature.inputs + signature.outputs if spec.dims[:1] != (-1,)]
    shown = ", ".join(f'"{spec.name}" {list(spec.dims)}' for spec in fixed)
    return [
        f"max_batch_size: the config says {config['max_batch_size']}, but the model's first dimension is not dynamic "
        f"in {shown}; export it with a dynamic batch dimension or say max_batch_size: 0"
    ]


def _unsupported(config: Mapping[str, Any]) -> list[str]:
    faults = [
        f"{key}: this stand-in for Triton's onnxruntime backend does not support it"
        for key in ("batch_input", "batch_output")
        if config.get(key)
    ]
    if config.get("sequence_batching", {}).get("state"):
        faults.append("sequence_batching.state: implicit state needs Triton's C++ onnxruntime backend")
    faults += [
        f'input "{entry["name"]}" allow_ragged_batch: needs Triton\'s C++ onnxruntime backend'
        for entry in config.get("input", ())
        if entry.get("allow_ragged_batch")
    ]
    return faults


def _control_names(config: Mapping[str, Any]) -> set[str]:
    return {entry["name"] for entry in config.get("sequence_batching", {}).get("control_input", ())}


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype.config} {list(spec.dims)}"


def _refusal(config: Mapping[str, Any], faults: Sequence[str]) -> str:
    return (
        f'config.pbtxt of model "{config.get("name", "")}" contradicts its model file: {"; ".join(faults)}. '
        "The model is not loaded: correct the config, or leave input and output out to have them filled in."
    )
