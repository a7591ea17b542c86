"""Small PyTorch files for tests, in both formats. All classes compute what their docstring says, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

torch.manual_seed(7)


class Scale(torch.nn.Module):
    """x -> 2 x"""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Same(torch.nn.Module):
    """x -> x itself"""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Difference(torch.nn.Module):
    """x, y -> (x - y, x + y)"""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x - y, x + y


class Pick(torch.nn.Module):
    """x INT64 [b, 1] -> [b, 1], the x-th of four weights: an x outside 0..3 makes the run fail."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor([0.5, 1.5, 2.5, 3.5]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.embedding(x, self.weights.unsqueeze(1)).squeeze(2)


class Dense(torch.nn.Module):
    """x [b, 28] -> tanh of a linear layer [b, 3]"""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(28, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class KeyedSum(torch.nn.Module):
    """{"a": a, "b": b} -> a + 10 b"""

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return inputs["a"] + 10 * inputs["b"]


class Keyed(torch.nn.Module):
    """x -> {"twice": 2 x, "parts": (x + 1, x + 2)}"""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"twice": 2 * x, "parts": (x + 1, x + 2)}


class Unbatchable(torch.nn.Module):
    """x -> the mean over all rows, a scalar"""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class Words(torch.nn.Module):
    """A list of strings -> itself"""

    def forward(self, words: list[str]) -> list[str]:
        return words


def script(module: torch.nn.Module, path: Path) -> Path:
    """Save as TorchScript."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.jit.script(module.eval()).save(str(path))
    return path


def export(module: torch.nn.Module, path: Path, samples: Sequence[Tensor], *, is_batched: bool = True) -> Path:
    """Save as an exported program; all first dimensions are the same dynamic one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = torch.export.Dim("rows")
    shapes = tuple({0: rows} if is_batched else {} for _ in samples)
    torch.export.save(torch.export.export(module.eval(), tuple(samples), dynamic_shapes=shapes), path)
    return path
