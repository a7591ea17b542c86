"""What does one ask a model, to see that it answers? Real data where there is some, as the lowest class of callers.

    probe = probe_of(("ctr", "1"), config, Path("model_repository/ctr"))
    stub.ModelInfer(probe.request)      # tritonclient's service_pb2_grpc

`config` is Triton's ModelConfig protobuf. The request is of one row.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import np_to_triton_dtype

from tritonpilot import samples
from tritonpilot.control import ELEMENT_BYTES, Inputs
from tritonpilot.model_config import FILE_BACKENDS, ModelConfig, warmup_file

Model = tuple[str, str]
"""Name and version."""
#: Of sequence models; nobody else's, it is to be hoped: the probe starts and ends the sequence.
SEQUENCE_ID = 0x7472_6974


class Probe(NamedTuple):
    """One inference."""

    request: service_pb2.ModelInferRequest
    is_real: bool
    """Whether a model that works answers it: of given inputs or its own warmup. Others may be refused."""
    remark: str
    """Why it is of zeros although the model has warmup data."""


class _Tensor(NamedTuple):
    shape: list[int]
    data: bytes
    is_real: bool
    remark: str = ""


def probe_of(model: Model, config: ModelConfig, folder: Path | None = None, inputs: Inputs | None = None) -> Probe:
    """The inference: of `inputs` (arrays as the model's metadata has them), else of the model's first warmup request, else of what
    is in the warmup folder of `folder`, its part of the repository, else of zeros.

    A response cache would answer for a dead model: where there is one, floats differ from probe to probe by less than 0.1 %.
    """
    request = service_pb2.ModelInferRequest(model_name=model[0], model_version=model[1], id="tritonpilot-watch")
    is_real, remark = True, ""
    for tensor in config.input:
        given = (inputs or {}).get(tensor.name)
        if tensor.optional and given is None:
            continue
        found = _zeros_or_warmup(tensor, config, folder) if given is None else _given(given)
        is_real, remark = is_real and found.is_real, remark or found.remark
        datatype = datatype_of(tensor.data_type)
        request.inputs.add(name=tensor.name, datatype=datatype, shape=found.shape)
        request.raw_input_contents.append(varied(found.data, datatype) if config.response_cache.enable else found.data)
    if level := lowest_level(config):
        request.parameters["priority"].uint64_param = level
    if config.HasField("sequence_batching"):
        request.parameters["sequence_id"].int64_param = SEQUENCE_ID
        request.parameters["sequence_start"].bool_param = True
        request.parameters["sequence_end"].bool_param = True
    return Probe(request, is_real, remark)


def lowest_level(config: ModelConfig) -> int:
    """Priority level of the lowest class of callers; 0: the model has no levels. The one below all classes may be that of wakes."""
    stated = _parameter(config, "pilot_classes")
    levels = [int(level) for level in (part.rpartition(":")[2] for part in stated.split(",")) if level.isdecimal()]
    if levels:
        return max(levels)
    lowest = int(config.dynamic_batching.priority_levels)
    return lowest - 1 if lowest and _parameter(config, "pilot_wake_priority") == str(lowest) else lowest


def takes_warmup(config: ModelConfig) -> bool:
    """Whether its first inferences are slow without warmup: models from a file; Python backends run one while they are set up."""
    return config.backend in FILE_BACKENDS


def _given(array: NDArray[np.generic]) -> _Tensor:
    if np_to_triton_dtype(array.dtype) == "BYTES":
        array = np.array([each if isinstance(each, bytes) else str(each).encode() for each in array.ravel()]).reshape(
            array.shape
        )
    return _Tensor(list(array.shape), samples.raw(array), True)


def _zeros_or_warmup(tensor: Any, config: ModelConfig, folder: Path | None) -> _Tensor:
    warmup: Mapping[str, Any] = config.model_warmup[0].inputs if config.model_warmup else {}
    stated = warmup.get(tensor.name)
    dims = list(stated.dims if stated is not None and stated.dims else tensor.dims)
    is_known = min(dims, default=1) > 0
    dims = [max(1, size) for size in dims]
    shape = [1, *dims] if config.max_batch_size else dims
    zeros = bytes(math.prod(dims) * ELEMENT_BYTES[datatype_of(tensor.data_type)])
    if stated is not None and not stated.input_data_file:
        return _Tensor(shape, zeros, True)  # with which Triton warms it up, or with random numbers
    file = stated.input_data_file if stated is not None else warmup_file(tensor.name)
    try:
        if folder is None:
            raise FileNotFoundError("no model repository was named")
        data = (folder / "warmup" / file).read_bytes()
    except OSError as error:
        remark = f"asked with zeros, for its warmup data cannot be read: {error}" if stated is not None else ""
        return _Tensor(shape, zeros, False, remark)
    if stated is not None:
        return _Tensor(shape, data, True)
    fits = is_known and (datatype_of(tensor.data_type) == "BYTES" or len(data) == len(zeros))
    return _Tensor(shape, data if fits else zeros, False)


def datatype_of(number: int) -> str:
    """The KServe protocol's name of a type of ModelConfig: FP32, BYTES."""
    name: str = model_config_pb2.DataType.Name(number)[len("TYPE_") :]
    return "BYTES" if name == "STRING" else name


def _parameter(config: ModelConfig, name: str) -> str:
    return str(config.parameters[name].string_value) if name in config.parameters else ""


def varied(data: bytes, datatype: str) -> bytes:
    """The same floats but for the last of their bits: another key in a response cache. Other types stay as they are."""
    stated = {"FP32": ("<u4", 0x7F80_0000, 0x3580_0000), "FP64": ("<u8", 0x7FF0_0000_0000_0000, 0x3EB0_0000_0000_0000)}
    if datatype not in stated:
        return data
    unsigned, exponent, millionth = stated[datatype]
    bits = np.frombuffer(data, unsigned).copy()
    bits[:4] = np.where(
        bits[:4] & exponent, bits[:4], millionth
    )  # zeros would become denormals, with which CPUs are slow
    for place in range(min(4, len(bits))):
        bits[place] ^= random.getrandbits(12)
    return bits.tobytes()
