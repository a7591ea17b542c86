"""The network: embeddings of the categorical columns beside the dense ones, and two hidden layers.

model = RiskNet(dense_width, category_sizes)
prob = model(dense, categorical)        # FP32[b,N], INT64[b,M] -> FP32[b,1]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

EMBEDDING = 2
HIDDEN = 32
DROPOUT = 0.3


class RiskNet(nn.Module):
    """Probability that a loan is not paid back.

    An index outside its table counts as 0, "unknown": one bad row must not fail the batch that it shares with others.
    """

    sizes: Tensor

    def __init__(self, dense_width: int, category_sizes: Sequence[int], bad_share: float) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.tensor(category_sizes))
        self.embeddings = nn.ModuleList(nn.Embedding(size, EMBEDDING) for size in category_sizes)
        for embedding in self.embeddings:
            nn.init.normal_(embedding.weight, std=0.05)  # type: ignore[arg-type]
        width = dense_width + EMBEDDING * len(category_sizes)
        last = nn.Linear(HIDDEN // 2, 1)
        nn.init.constant_(last.bias, float(torch.logit(torch.tensor(bad_share))))
        self.layers = nn.Sequential(
            nn.Dropout(DROPOUT / 3),
            nn.Linear(width, HIDDEN),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            nn.Linear(HIDDEN, HIDDEN // 2),
            nn.ReLU(),
            nn.Dropout(DROPOUT),
            last,
        )

    def logit(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """FP32[b,1]."""
        known = torch.where((categorical >= 0) & (categorical < self.sizes), categorical, 0)
        looked_up = [embedding(known[:, place]) for place, embedding in enumerate(self.embeddings)]
        answer: Tensor = self.layers(torch.cat([dense, *looked_up], dim=1))
        return answer

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        return torch.sigmoid(self.logit(dense, categorical))
