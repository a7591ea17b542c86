"""How is an ONNX Runtime session made and run the cheapest way from a Triton config?

    options, remarks = session_options(config, parameters, cores=2)
    session = OnnxSession(path, options);  session.signature;  session.run(names, inputs) -> outputs

Arrays are numpy with the batch dimension inside; strings are object arrays of `str`, BF16 is uint16 bit patterns.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnxruntime.capi import onnxruntime_pybind11_state as ort
from onnxruntime.capi.onnxruntime_inference_collection import InferenceSession

from pilotlib.parameters import Parameters
from pilotlib.signature import Signature, TensorSpec
from pilotlib.tensors import BF16, DTYPES_BY_ONNX, STRING, Array

CPU = ort.OrtDevice(ort.OrtDevice.cpu(), ort.OrtDevice.default_memory(), 0)

# Values of optimization.graph.level in config.pbtxt, as Triton's C++ backend reads them.
GRAPH_LEVELS = {
    -1: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    0: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    1: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    2: ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
}


class ModelFileError(ValueError):
    """The model file is missing, is not a model that ONNX Runtime reads, or uses types that Triton does not know."""


def model_path(config: Mapping[str, Any], version_folder: Path) -> Path:
    """The ONNX file of a version: default_model_filename or model.onnx; a folder of that name holds model.onnx.

    Raises ModelFileError when there is none.
    """
    path = version_folder / (config.get("default_model_filename") or "model.onnx")
    if path.is_dir():
        path = path / "model.onnx"
    if not path.is_file():
        raise ModelFileError(
            f'model "{config.get("name", "")}" is not loaded: there is no file {path}. Put the model there or say '
            "default_model_filename in config.pbtxt."
        )
    return path


def thread_count(asked: int, instances: int, cores: int) -> int:
    """Threads of one instance's pool: what was asked for, else the cores divided by the instances, at least one.

    Triton's C++ backend leaves 0 to ONNX Runtime: one thread a core in every instance, so n instances fight with n times
    as many threads as cores.
    """
    return asked or max(1, cores // max(1, instances))


def session_options(
    config: Mapping[str, Any], parameters: Parameters, cores: int
) -> tuple[ort.SessionOptions, tuple[str, ...]]:
    """ONNX Runtime's options for one instance, and remarks on what cannot be honoured or is unwise."""
    options = ort.SessionOptions()
    remarks = []
    instances = sum(int(group.get("count", 1) or 1) for group in config.get("instance_group", ()))
    intra = thread_count(parameters.intra_op_thread_count, instances, cores)
    options.intra_op_num_threads = intra
    options.inter_op_num_threads = thread_count(parameters.inter_op_thread_count, instances, cores)
    if intra * instances > cores:
        remarks.append(
            f"intra_op_thread_count {intra} times {instances} instances is more threads than the {cores} cores"
        )
    if parameters.execution_mode == 1:
        options.execution_mode = ort.ExecutionMode.ORT_PARALLEL
    optimization = config.get("optimization") or {}
    level = int((optimization.get("graph") or {}).get("level", 0))
    options.graph_optimization_level = GRAPH_LEVELS.get(level, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    if level not in GRAPH_LEVELS:
        remarks.append(f"optimization.graph.level {level} is none of -1, 0, 1, 2: all optimizations are on")
    accelerators = optimization.get("execution_accelerators") or {}
    for key in ("cpu_execution_accelerator", "gpu_execution_accelerator"):
        for accelerator in accelerators.get(key, ()):
            remarks.append(f'optimization.execution_accelerators "{accelerator.get("name", "")}" is ignored here')
    if parameters.enable_mem_arena is not None:
        options.enable_cpu_mem_arena = parameters.enable_mem_arena
    if parameters.enable_mem_pattern is not None:
        options.enable_mem_pattern = parameters.enable_mem_pattern
    # Idle pool threads spin by default and take CPU time from tritonserver, which shares these cores.
    spinning = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    for name, value in {**spinning, **parameters.session}.items():
        options.add_session_config_entry(name, value)
    for library in (config.get("model_operations") or {}).get("op_library_filename", ()):
        options.register_custom_ops_library(library)
    return options, tuple(remarks)


class OnnxSession:
    """One loaded model: its signature, and `run` without the copies and checks that are not needed."""

    def __init__(self, path: Path, options: ort.SessionOptions, arena_shrinkage: str = "") -> None:
        """Raises ModelFileError when ONNX Runtime cannot load the file or a tensor has a type Triton does not know."""
        try:
            self._python_session = InferenceSession(str(path), sess_options=options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises bare exceptions of its own, RuntimeError and ValueError
            raise ModelFileError(f"ONNX Runtime cannot load {path}: {error}") from error
        self._session = self._python_session._sess  # the wrapper's checks cost 5 us a call
        self._run_options = ort.RunOptions() if arena_shrinkage else None
        if self._run_options is not None:
            self._run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arena_shrinkage)
        self.signature = Signature(
            inputs=tuple(_spec(each, path) for each in self._python_session.get_inputs()),
            outputs=tuple(_spec(each, path) for each in self._python_session.get_outputs()),
            optional=tuple(_spec(each, path) for each in self._python_session.get_overridable_initializers()),
        )
        self._bf16 = {
            spec.name
            for spec in self.signature.inputs + self.signature.outputs + self.signature.optional
            if spec.dtype is BF16
        }

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        """The outputs in the order of `output_names`. Raises what ONNX Runtime raises."""
        if self._bf16:
            return self._run_as_ort_values(output_names, feeds)
        outputs: list[Array] = self._session.run(output_names, feeds, self._run_options)
        return outputs

    def bind(self, feeds: Mapping[str, Array], outputs: Mapping[str, Array]) -> Binding:
        """A run from and into these very arrays (C-contiguous, no strings), which the caller keeps alive."""
        binding = ort.SessionIOBinding(self._session)
        codes = {s.name: s.dtype.onnx_code for s in self.signature.inputs + self.signature.outputs}
        for name, array in feeds.items():
            binding.bind_input(name, CPU, codes[name], list(array.shape), array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, CPU, codes[name], list(array.shape), array.ctypes.data)
        return Binding(self._session, binding, self._run_options)

    def _run_as_ort_values(self, output_names: Sequence[str], feeds: Mapping[str, Array]) -> list[Array]:
        values = {name: self._ort_value(name, array) for name, array in feeds.items()}
        outputs = self._session.run_with_ort_values(values, output_names, self._run_options)
        return [
            array_from_bf16(value) if name in self._bf16 else value.numpy()
            for name, value in zip(output_names, outputs, strict=True)
        ]

    def _ort_value(self, name: str, array: Array) -> Any:
        if name in self._bf16:
            return bf16_from_array(array)
        return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array), CPU)


class Binding:
    """A prepared run: inputs and outputs at fixed places in memory, so a run passes nothing."""

    def __init__(self, session: Any, binding: Any, run_options: Any) -> None:
        self._session, self._binding, self._run_options = session, binding, run_options

    def run(self) -> None:
        """Run once. Raises what ONNX Runtime raises."""
        self._session.run_with_iobinding(self._binding, self._run_options)


def bf16_from_array(bits: Array) -> Any:
    """An OrtValue of bfloat16 that owns a copy of the uint16 bit patterns."""
    value = ort.OrtValue.ortvalue_from_shape_and_onnx_type(list(bits.shape), BF16.onnx_code, CPU)
    if bits.size:
        contiguous = np.ascontiguousarray(bits)
        ctypes.memmove(value.data_ptr(), contiguous.ctypes.data, contiguous.nbytes)
    return value


def array_from_bf16(value: Any) -> Array:
    """The uint16 bit patterns of a bfloat16 OrtValue, copied."""
    shape = tuple(value.shape())
    count = int(np.prod(shape, dtype=np.int64))
    if count == 0:
        return np.empty(shape, np.uint16)
    bits = np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(value.data_ptr()))
    return bits.reshape(shape).copy()


def _spec(each: Any, path: Path) -> TensorSpec:
    dtype = DTYPES_BY_ONNX.get(each.type)
    if dtype is None:
        raise ModelFileError(f'{path}: "{each.name}" is a {each.type}, which no Triton type can carry')
    dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in each.shape)
    return TensorSpec(each.name, dtype, dims)


def is_bindable(specs: Sequence[TensorSpec]) -> bool:
    """Whether tensors of these specs have a size that only the number of rows decides, and plain memory."""
    return all(spec.dtype is not STRING and all(dim >= 0 for dim in spec.dims[1:]) for spec in specs)
