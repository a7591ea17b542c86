from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pilotlib.parameters import parse, table
from pilotlib.torch_parameters import TorchParameters
from pilotlib.torch_switches import DeviceError, choose_device, decide, execution, throw

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")


def test_the_names_are_those_of_tritons_backend_and_the_rest_is_marked() -> None:
    names = {row.name for row in table(TorchParameters)}
    assert {name for name in names if not name.startswith("pilot_")} == {
        "INTRA_OP_THREAD_COUNT",
        "INTER_OP_THREAD_COUNT",
        "DISABLE_OPTIMIZED_EXECUTION",
        "INFERENCE_MODE",
        "DISABLE_CUDNN",
        "ENABLE_CACHE_CLEANING",
        "ENABLE_WEIGHT_SHARING",
        "ENABLE_JIT_EXECUTOR",
        "ENABLE_JIT_PROFILING",
        "ENABLE_TENSOR_FUSER",
    }
    parameters, remarks = parse({"INFERENCE_MODE": {"string_value": "false"}}, TorchParameters)
    assert (parameters, remarks) == (TorchParameters(INFERENCE_MODE=False), ())


def test_each_instance_gets_the_gpu_that_triton_chose() -> None:
    assert choose_device("cuda:1", ["KIND_GPU"], "12.8", 2) == GPU
    assert choose_device("cpu", ["KIND_CPU"], None, 0) == CPU
    assert choose_device("cpu", ["KIND_MODEL"], "12.8", 0) == CPU


@pytest.mark.parametrize(
    ("asked", "kind", "cuda", "gpus", "says"),
    [
        ("cuda:0", "KIND_GPU", None, 0, "built without CUDA.*KIND_CPU"),
        ("cuda:0", "KIND_GPU", "12.8", 0, "GPU 0, but PyTorch sees 0"),
        ("cuda:2", "KIND_GPU", "12.8", 2, "GPU 2, but PyTorch sees 2"),
        ("cpu", "KIND_MODEL", "12.8", 2, "KIND_MODEL"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(asked: str, kind: str, cuda: str | None, gpus: int, says: str) -> None:
    with pytest.raises(DeviceError, match=says):
        choose_device(asked, [kind], cuda, gpus)


def test_threads_are_the_instances_cores_unless_stated() -> None:
    assert decide(TorchParameters(), CPU, cores=3).intra_op_threads == 3
    switches = decide(TorchParameters(INTRA_OP_THREAD_COUNT=8, INTER_OP_THREAD_COUNT=2), CPU, cores=3)
    assert (switches.intra_op_threads, switches.inter_op_threads) == (8, 2)
    assert "more than the 3 cores" in switches.remarks[0]


def test_gpu_switches_act_on_gpus_only_and_say_so() -> None:
    parameters = TorchParameters(pilot_cudnn_benchmark=True, pilot_tf32=True, pilot_empty_cache_every=50)
    on_gpu, on_cpu = decide(parameters, GPU, cores=1), decide(parameters, CPU, cores=1)
    assert (on_gpu.cudnn_benchmark, on_gpu.tf32, on_gpu.remarks) == (True, True, ())
    assert (on_cpu.cudnn_benchmark, on_cpu.tf32) == (False, None)
    assert [remark.split()[0] for remark in on_cpu.remarks] == [
        "pilot_cudnn_benchmark",
        "pilot_tf32",
        "pilot_empty_cache_every",
    ]


def test_copies_are_pinned_and_the_cache_is_cleaned_on_gpus_only() -> None:
    parameters = TorchParameters(pilot_empty_cache_every=50)
    assert (execution(parameters, GPU).is_pinned, execution(parameters, GPU).empty_cache_every) == (True, 50)
    assert (execution(parameters, CPU).is_pinned, execution(parameters, CPU).empty_cache_every) == (False, 0)
    assert not execution(replace(parameters, pilot_pinned_memory=False), GPU).is_pinned
    assert execution(replace(parameters, ENABLE_CACHE_CLEANING=True), GPU).empty_cache_every == 1


def test_weights_cannot_be_shared_between_processes() -> None:
    assert "ENABLE_WEIGHT_SHARING is ignored" in decide(TorchParameters(ENABLE_WEIGHT_SHARING=True), CPU, 1).remarks[0]


def test_switches_are_thrown_in_this_process() -> None:
    before = (torch.get_num_threads(), torch._C._get_graph_executor_optimize(), torch.backends.cudnn.enabled)
    try:
        throw(
            decide(
                TorchParameters(INTRA_OP_THREAD_COUNT=1, DISABLE_OPTIMIZED_EXECUTION=True, DISABLE_CUDNN=True), CPU, 2
            )
        )
        assert torch.get_num_threads() == 1
        assert not torch._C._get_graph_executor_optimize()
        assert not torch.backends.cudnn.enabled
    finally:
        torch.set_num_threads(before[0])
        torch._C._set_graph_executor_optimize(before[1])
        torch.backends.cudnn.enabled = before[2]


OWN = "PyTorch's"


def test_the_documentation_lists_every_parameter_as_it_is() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pytorch.md").read_text()
    for row in table(TorchParameters):
        assert f"| `{row.name}` | {row.default or OWN} | {row.meaning} |" in text
