"""Which parameters does the stand-in for Triton's pytorch backend read? Triton's own names, and `pilot_*` beside them.

Names, defaults and meanings are those of the README and of src/libtorch.cc of triton-inference-server/pytorch_backend,
release 24.10; NVIDIA's backend ignores the `pilot_*` ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from pilotlib.parameters import parameter


@dataclass(frozen=True)
class TorchParameters:
    """The table. `None` leaves PyTorch's own default."""

    INTRA_OP_THREAD_COUNT: int = parameter(
        0,
        "threads within an operator; 0 = the cores that the instance may use, divided by the number of instances "
        "(Triton's C++ backend takes all cores)",
        minimum=0,
    )
    INTER_OP_THREAD_COUNT: int = parameter(
        0, "threads across the branches of a TorchScript model; 0 = as for INTRA_OP_THREAD_COUNT", minimum=0
    )
    DISABLE_OPTIMIZED_EXECUTION: bool = parameter(
        False, "run TorchScript without PyTorch's optimizations: no slow first calls, often slower later ones"
    )
    INFERENCE_MODE: bool = parameter(True, "torch.inference_mode; false = only torch.no_grad")
    DISABLE_CUDNN: bool = parameter(False, "convolutions on GPUs without cuDNN")
    ENABLE_CACHE_CLEANING: bool = parameter(
        False, "give cached GPU memory back after every execution, which makes it slower; nothing on a CPU"
    )
    ENABLE_WEIGHT_SHARING: bool = parameter(
        False, "honoured by Triton's C++ backend only: instances are processes here, each with weights of its own"
    )
    ENABLE_JIT_EXECUTOR: bool | None = parameter(None, "TorchScript's profiling executor")
    ENABLE_JIT_PROFILING: bool | None = parameter(None, "TorchScript's profiling of shapes and types")
    ENABLE_TENSOR_FUSER: bool | None = parameter(None, "TorchScript's fusing of element-wise operators")
    pilot_autocast: str = parameter(
        "off",
        "torch.autocast: matrix products and convolutions in half precision; outputs are given in the config's types",
        choices=("off", "fp16", "bf16"),
    )
    pilot_cudnn_benchmark: bool = parameter(
        False, "let cuDNN try its algorithms once for every new input shape: only worth it when shapes repeat"
    )
    pilot_tf32: bool | None = parameter(
        None, "FP32 matrix products and convolutions with TF32 precision (10 bits) on GPUs that have it"
    )
    pilot_pinned_memory: bool = parameter(
        True, "gather inputs and fetch outputs of GPU instances in page-locked memory, copied without waiting"
    )
    pilot_empty_cache_every: int = parameter(
        0, "give cached GPU memory back after every so many executions; 0 = never", minimum=0
    )
