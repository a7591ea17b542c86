from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from unit import torch_files

from pilotlib import torch_runner
from pilotlib.split import SplitError
from pilotlib.torch_names import NamesError, output_places
from pilotlib.torch_parameters import TorchParameters
from pilotlib.torch_runner import Outputs, OutputTypeError, ScalarError, Staging, TorchRunner
from pilotlib.torch_switches import execution

CPU = torch.device("cpu")


def runner(
    module: torch.nn.Module,
    names: Sequence[str] = ("OUTPUT__0",),
    wanted: torch.dtype = torch.float32,
    **parameters: str | bool,
) -> TorchRunner:
    def call(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        result = module(*tensors)
        return list(result) if isinstance(result, tuple) else [result]

    how = execution(TorchParameters(**parameters), CPU)  # type: ignore[arg-type]
    return TorchRunner(call, how, Outputs(tuple(names), output_places(names), (wanted,) * len(names)))


@pytest.mark.parametrize("is_fresh", [False, True])
@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [0, 2], [7] * 5])
def test_every_request_gets_its_own_rows(is_fresh: bool, counts: list[int]) -> None:
    run = runner(torch_files.Difference(), ["OUTPUT__1", "OUTPUT__0"])
    for round_ in range(3):
        requests = [
            [np.full((count, 3), index + round_, np.float32), np.full((count, 3), 100, np.float32)]
            for index, count in enumerate(counts)
        ]
        for index, (more, less) in enumerate(run.run(requests, is_fresh)):
            assert more.tolist() == [[index + round_ + 100.0] * 3] * counts[index]
            assert less.tolist() == [[index + round_ - 100.0] * 3] * counts[index]


def test_fresh_answers_stay_when_the_next_run_comes() -> None:
    run = runner(torch_files.Same())
    first = run.run([[np.full((1, 2), 1, np.float32)]] * 2, is_fresh=True)
    run.run([[np.full((1, 2), 5, np.float32)]] * 2, is_fresh=True)
    assert first[0][0].tolist() == [[1, 1]]


def test_memory_is_made_once() -> None:
    run = runner(torch_files.Scale())
    requests = [[np.ones((3, 64), np.float32)]] * 4
    run.run(requests)
    memory = run._gathered[0]._flat
    for _ in range(3):
        run.run(requests)
    assert run._gathered[0]._flat is memory


def test_staging_grows_by_doubling_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_runner, "MAX_BUFFER_BYTES", 4096)
    staging = Staging(is_pinned=False)
    assert staging.place((3, 100), np.dtype(np.float32)).shape == (3, 100)
    assert staging._flat.size == 2048
    assert staging.place((2, 2, 8), np.dtype(np.int64)).shape == (2, 2, 8)
    assert staging._flat.size == 2048
    assert staging.place((1025,), np.dtype(np.float32)).shape == (1025,)  # above the bound: its own memory
    assert staging._flat.size == 2048
    assert staging.place((0, 5), np.dtype(np.float32)).shape == (0, 5)


@pytest.mark.parametrize(("precision", "inside"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_autocast_computes_in_half_precision_and_answers_in_the_configs_type(
    precision: str, inside: torch.dtype
) -> None:
    dense = torch_files.Dense()
    seen = []
    dense.layer.register_forward_hook(lambda *passed: seen.append(passed[-1].dtype))
    x = np.linspace(-1, 1, 56, dtype=np.float32).reshape(2, 28)
    ((answer,),) = runner(dense, pilot_autocast=precision).run([[x]])
    assert seen == [inside]
    assert answer.dtype == np.float32
    ((exact,),) = runner(dense).run([[x]])
    assert 0 < np.abs(answer - exact).max() < 0.02


def test_without_autocast_another_type_than_the_configs_is_refused() -> None:
    with pytest.raises(
        OutputTypeError, match=r'"OUTPUT__0": the config says torch.int64, the model gives torch.float32'
    ):
        runner(torch_files.Scale(), wanted=torch.int64).run([[np.ones((1, 2), np.float32)]])


def test_an_output_beyond_the_results_is_refused() -> None:
    with pytest.raises(NamesError, match='"OUTPUT__4" means result 4'):
        runner(torch_files.Scale(), ["OUTPUT__4"]).run([[np.ones((1, 2), np.float32)]])


def test_what_has_no_rows_cannot_be_split_or_carried() -> None:
    with pytest.raises(SplitError, match="max_batch_size: 0"):
        runner(torch_files.Unbatchable()).run([[np.ones((2, 2), np.float32)]])
    with pytest.raises(ScalarError, match="is a scalar"):
        runner(torch_files.Unbatchable()).run_alone([np.ones((2, 2), np.float32)])


@pytest.mark.parametrize("is_on", [True, False])
def test_inference_mode_is_a_choice_and_gradients_are_never_kept(is_on: bool) -> None:
    seen = []

    class Look(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
            return x

    runner(Look(), INFERENCE_MODE=is_on).run([[np.ones((1, 2), np.float32)]])
    assert seen == [(is_on, False)]


class Stream:
    """Stands for a CUDA stream: counts how often it was waited for."""

    def __init__(self) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The order of the GPU's steps, on the CPU: no GPU is needed, and none is tested."""
    found = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found)  # noqa: ARG005
    monkeypatch.setattr(torch_runner, "_memory", lambda size, is_pinned: torch.empty(size, dtype=torch.uint8))  # noqa: ARG005
    return found


def as_on_gpu(run: TorchRunner, every: int = 0) -> TorchRunner:
    run._is_gpu = True
    run._how = replace(run._how, is_pinned=True, empty_cache_every=every)
    run._until_cleaning = every
    return run


def test_on_a_gpu_a_run_waits_once_and_its_answers_lie_in_reused_memory(stream: Stream) -> None:
    run = as_on_gpu(runner(torch_files.Difference(), ["OUTPUT__1", "OUTPUT__0"]))
    requests = [[np.full((2, 3), index, np.float32), np.full((2, 3), 10, np.float32)] for index in range(3)]
    for round_ in range(1, 3):
        for index, (more, less) in enumerate(run.run(requests)):
            assert more.tolist() == [[index + 10.0] * 3] * 2
            assert less.tolist() == [[index - 10.0] * 3] * 2
        assert stream.waits == round_
    places = [np.shares_memory(run.run(requests)[0][0], run._fetched_into[0]._flat) for _ in range(2)]
    assert places == [True, True]


def test_after_a_failed_run_on_a_gpu_the_stream_is_waited_for(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(None))
    run = as_on_gpu(runner(torch_files.Pick()))
    with pytest.raises(IndexError):
        run.run([[np.array([[99]])]])
    assert (stream.waits, len(freed)) == (1, 1)


def test_the_cache_is_emptied_every_so_many_runs(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(stream.waits))
    run = as_on_gpu(runner(torch_files.Scale()), every=3)
    for _ in range(7):
        run.run([[np.ones((1, 2), np.float32)]])
    assert freed == [3, 6]
