"""Does a config ask what the pytorch backend can do, and does it fit an exported program? Without PyTorch.

inputs = inputs_of(config)                    the names of all inputs, sequence controls last
check(config)                                 raises ContradictionError
check_program(config, [(entry, spec), ...])   raises ContradictionError
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pilotlib.signature import ContradictionError, TensorSpec
from pilotlib.tensors import DTYPES_BY_CONFIG

#: What Triton's pytorch backend carries; PyTorch has more, but such a model would not run in NVIDIA's container.
CARRIED = tuple(f"TYPE_{name}" for name in ("BOOL", "UINT8", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64"))


def inputs_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the inputs in the config's order, and of the sequence controls that the model takes as inputs."""
    controls = config.get("sequence_batching", {}).get("control_input", ())
    return tuple(entry["name"] for entry in (*config.get("input", ()), *controls))


def check(config: Mapping[str, Any]) -> None:
    """Raise ContradictionError with everything in `config` that this backend does not do."""
    faults = []
    if config.get("platform") == "torch_aoti":
        faults.append("platform torch_aoti: AOT Inductor packages need Triton's C++ pytorch backend of 26.03 or later")
    faults += [
        f"{key}: a PyTorch file does not tell them, so they are not filled in: name them in config.pbtxt"
        for key in ("input", "output")
        if not config.get(key)
    ]
    faults += [
        f"{key}: needs Triton's C++ pytorch backend" for key in ("batch_input", "batch_output") if config.get(key)
    ]
    if config.get("sequence_batching", {}).get("state"):
        faults.append("sequence_batching.state: implicit state needs Triton's C++ pytorch backend")
    for kind in ("input", "output"):
        for entry in config.get(kind, ()):
            where = f'{kind} "{entry["name"]}"'
            if entry["data_type"] == "TYPE_STRING":
                faults.append(
                    f"{where}: PyTorch has no tensors of strings; models over lists of strings need Triton's C++ pytorch "
                    "backend. Turn the strings into numbers before, in a tokenizer for example"
                )
            elif entry["data_type"] not in CARRIED:
                faults.append(f"{where}: Triton's pytorch backend does not carry {entry['data_type']}")
            if entry.get("optional"):
                faults.append(f"{where}: forward() has no optional arguments in Triton's pytorch backend")
            if entry.get("allow_ragged_batch"):
                faults.append(f"{where} allow_ragged_batch: needs Triton's C++ pytorch backend")
    _raise(faults, "this backend does not do what it asks")


def check_program(config: Mapping[str, Any], pairs: Iterable[tuple[Mapping[str, Any], TensorSpec]]) -> None:
    """Raise ContradictionError where entries of the config differ from what the exported program says of them."""
    has_batch = config.get("max_batch_size", 0) > 0
    faults = []
    for entry, spec in pairs:
        where = f'"{entry["name"]}"'
        if DTYPES_BY_CONFIG[entry["data_type"]] != spec.dtype:
            faults.append(
                f"{where} data_type: the config says {entry['data_type']}, the model says {spec.dtype.config}"
            )
        if has_batch and spec.dims[:1] != (-1,):
            faults.append(
                f"{where}: max_batch_size is {config['max_batch_size']}, but the model's first dimension is not dynamic in "
                f"{list(spec.dims)}: export it with dynamic_shapes, or say max_batch_size: 0"
            )
            continue
        said = [int(dim) for dim in (entry["reshape"].get("shape", ()) if "reshape" in entry else entry["dims"])]
        have = list(spec.dims[1:] if has_batch else spec.dims)
        if len(said) != len(have) or any(s != h and -1 not in (s, h) for s, h in zip(said, have, strict=True)):
            without = " (without the batch dimension)" if has_batch else ""
            faults.append(f"{where} dims: the config says {said}, the model says {have}{without}")
    _raise(faults, "it contradicts its model file")


def _raise(faults: list[str], what: str) -> None:
    if faults:
        raise ContradictionError(
            f"config.pbtxt cannot be served, for {what}: {'; '.join(faults)}. The model is not loaded: correct the config, or "
            "export the model that was meant"
        )
