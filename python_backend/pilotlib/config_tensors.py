"""Does a model config name the inputs and outputs that a backend takes and makes? Each generic backend asks when it is set up.

    check(context.config, {"photo": ("TYPE_STRING", (1,))}, {"pixels": ("TYPE_FP32", (3, 224, 224))})

Dims are those of one row, without the batch dimension; -1 stands for any size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (data type as in config.pbtxt, dims of one row)"""


class ConfigTensorError(ValueError):
    """The config's inputs or outputs are not those of the backend; the model is not loaded."""


def check(config: Mapping[str, Any], inputs: Tensors, outputs: Tensors, may_lack: Collection[str] = ()) -> None:
    """Raise ConfigTensorError with everything that differs. Inputs and outputs in `may_lack` may be left out of the config."""
    faults = [
        fault for kind, tensors in (("input", inputs), ("output", outputs)) for fault in _faults(config, kind, tensors)
    ]
    named = {entry["name"] for kind in ("input", "output") for entry in config.get(kind, ())}
    for kind, tensors in (("input", inputs), ("output", outputs)):
        for name, (data_type, dims) in tensors.items():
            if name not in named and name not in may_lack:
                faults.append(f'{kind} "{name}" ({data_type} {list(dims)}) is missing')
    if faults:
        raise ConfigTensorError(
            f"config.pbtxt does not say what the backend {config.get('backend', '')} takes and makes: {'; '.join(faults)}. "
            "The model is not loaded: correct its inputs and outputs, or the parameters that they follow from"
        )


def dims(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """The dims of one row of an input or output. Raises ConfigTensorError when the config has none of that name."""
    for entry in (*config.get("input", ()), *config.get("output", ())):
        if entry["name"] == name:
            return tuple(int(dim) for dim in entry["dims"])
    raise ConfigTensorError(f'config.pbtxt names no input or output "{name}". The model is not loaded: add it')


def _faults(config: Mapping[str, Any], kind: str, tensors: Tensors) -> list[str]:
    found = []
    for entry in config.get(kind, ()):
        name, said = entry["name"], [int(dim) for dim in entry["dims"]]
        if name not in tensors:
            found.append(f'{kind} "{name}" is unknown (the backend has {", ".join(tensors)})')
            continue
        data_type, want = tensors[name]
        fits = len(said) == len(want) and all(have in (-1, got) for have, got in zip(want, said, strict=True))
        if entry["data_type"] != data_type or not fits:
            found.append(f'{kind} "{name}" is {entry["data_type"]} {said}, but must be {data_type} {list(want)}')
    return found
