"""Where does an instance run, and with which of PyTorch's process-wide switches? Decided purely, then thrown.

    device = choose_device("cuda:1", ["KIND_GPU"], torch.version.cuda, torch.cuda.device_count())
    switches = decide(parameters, device, cores=2)
    remarks = throw(switches)

An instance is a process of its own (Triton's Python stub), so that one model may have other switches than its neighbour.

NOTE: what concerns GPUs is tested as a decision only. It has not been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pilotlib.torch_parameters import TorchParameters

AUTOCAST = {"off": None, "fp16": torch.float16, "bf16": torch.bfloat16}


class DeviceError(ValueError):
    """The instance is to run where PyTorch cannot; the model is not loaded."""


@dataclass(frozen=True)
class Switches:
    """What an instance sets once; None leaves PyTorch's default."""

    device: torch.device
    intra_op_threads: int
    inter_op_threads: int
    is_optimized: bool
    jit_executor: bool | None
    jit_profiling: bool | None
    tensor_fuser: bool | None
    uses_cudnn: bool
    cudnn_benchmark: bool
    tf32: bool | None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Execution:
    """What every run of the model is done with."""

    device: torch.device
    is_inference_mode: bool
    autocast: torch.dtype | None
    is_pinned: bool
    """Inputs and outputs go over page-locked memory, so that copies to and from the GPU need not wait for each other."""
    empty_cache_every: int
    """Executions after which cached GPU memory is given back; 0 = never."""


def choose_device(asked: str, kinds: Sequence[str], cuda_version: str | None, gpus: int) -> torch.device:
    """The device of an instance that Triton placed on `asked` ("cpu", "cuda:1"), `kinds` being those of its config.

    Raises DeviceError when this process cannot use it.
    """
    device = torch.device(asked)
    if device.type == "cpu":
        if "KIND_MODEL" in kinds and gpus:
            raise DeviceError(
                "KIND_MODEL leaves the choice of GPUs to the model, which needs Triton's C++ pytorch backend; the model is "
                "not loaded: say `instance_group [{ kind: KIND_GPU }]` or KIND_CPU"
            )
        return device
    if cuda_version is None:
        raise DeviceError(
            f"config.pbtxt asks for a GPU instance, but PyTorch {torch.__version__} in this environment is built without "
            "CUDA; the model is not loaded: install a CUDA build of torch, or say `instance_group [{ kind: KIND_CPU }]`"
        )
    if (device.index or 0) >= gpus:
        raise DeviceError(
            f"config.pbtxt places an instance on GPU {device.index or 0}, but PyTorch sees {gpus} (counted from 0; "
            "CUDA_VISIBLE_DEVICES and the driver decide); the model is not loaded: correct `gpus` in instance_group"
        )
    return device


def decide(parameters: TorchParameters, device: torch.device, cores: int) -> Switches:
    """The switches for one instance, which has `cores` for itself, and remarks on what will not be honoured."""
    is_gpu = device.type == "cuda"
    remarks = []
    if parameters.ENABLE_WEIGHT_SHARING:
        remarks.append("ENABLE_WEIGHT_SHARING is ignored here: every instance is a process with weights of its own")
    threads = parameters.INTRA_OP_THREAD_COUNT
    if threads > cores:
        remarks.append(f"INTRA_OP_THREAD_COUNT {threads} is more than the {cores} cores of an instance")
    if not is_gpu:
        remarks += [
            f"{name} acts on GPU instances only"
            for name, is_set in (
                ("pilot_cudnn_benchmark", parameters.pilot_cudnn_benchmark),
                ("pilot_tf32", parameters.pilot_tf32 is not None),
                ("pilot_empty_cache_every", parameters.pilot_empty_cache_every > 0),
            )
            if is_set
        ]
    return Switches(
        device=device,
        intra_op_threads=threads or cores,
        inter_op_threads=parameters.INTER_OP_THREAD_COUNT or cores,
        is_optimized=not parameters.DISABLE_OPTIMIZED_EXECUTION,
        jit_executor=parameters.ENABLE_JIT_EXECUTOR,
        jit_profiling=parameters.ENABLE_JIT_PROFILING,
        tensor_fuser=parameters.ENABLE_TENSOR_FUSER,
        uses_cudnn=not parameters.DISABLE_CUDNN,
        cudnn_benchmark=is_gpu and parameters.pilot_cudnn_benchmark,
        tf32=parameters.pilot_tf32 if is_gpu else None,
        remarks=tuple(remarks),
    )


def execution(parameters: TorchParameters, device: torch.device) -> Execution:
    """How the runs of one instance are done."""
    is_gpu = device.type == "cuda"
    every = 1 if parameters.ENABLE_CACHE_CLEANING else parameters.pilot_empty_cache_every
    return Execution(
        device=device,
        is_inference_mode=parameters.INFERENCE_MODE,
        autocast=AUTOCAST[parameters.pilot_autocast],
        is_pinned=is_gpu and parameters.pilot_pinned_memory,
        empty_cache_every=every if is_gpu else 0,
    )


def throw(switches: Switches) -> tuple[str, ...]:
    """Set them in this process; remarks, also on what PyTorch no longer lets itself be told."""
    remarks = list(switches.remarks)
    torch.set_num_threads(switches.intra_op_threads)
    if torch.get_num_interop_threads() != switches.inter_op_threads:
        try:
            torch.set_num_interop_threads(switches.inter_op_threads)
        except RuntimeError:  # only once in a process, and before its first parallel work
            remarks.append(f"this process keeps its {torch.get_num_interop_threads()} inter-op threads")
    torch._C._set_graph_executor_optimize(switches.is_optimized)
    for value, setter in (
        (switches.jit_executor, torch._C._jit_set_profiling_executor),
        (switches.jit_profiling, torch._C._jit_set_profiling_mode),
        (switches.tensor_fuser, torch._C._jit_set_texpr_fuser_enabled),
    ):
        if value is not None:
            setter(value)
    torch.backends.cudnn.enabled = switches.uses_cudnn
    torch.backends.cudnn.benchmark = switches.cudnn_benchmark
    if switches.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = switches.tf32
        torch.backends.cudnn.allow_tf32 = switches.tf32
    if switches.device.type == "cuda":
        torch.cuda.set_device(switches.device)  # what the model itself allocates goes there too
    return tuple(remarks)
