"""The network: a deep learning recommendation model (Naumov et al., 2019, https://arxiv.org/abs/1906.00091).

model = Dlrm(vocabulary_sizes, mean, scale)
prob = model(dense, categorical)        # FP32[b,28], INT64[b,8] -> FP32[b,1]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

EMBEDDING = 64
BOTTOM = (512, EMBEDDING)
TOP = (1024, 704)


class Dlrm(nn.Module):
    """Click probability from standardised dense features, embeddings and the dot products of all pairs of them.

    `vocabulary_sizes` are the rows of the embedding tables; `mean` and `scale` (FP32[28]) standardise `dense` inside
    the graph, so that a caller sends features as they come. An index outside its table counts as 0, "unknown": one bad
    row must not fail the batch that it shares with others.
    """

    mean: Tensor
    scale: Tensor
    sizes: Tensor
    starts: Tensor
    pairs: Tensor

    def __init__(self, vocabulary_sizes: Sequence[int], mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        sizes = torch.tensor(vocabulary_sizes)
        self.register_buffer("sizes", sizes)
        self.register_buffer("starts", sizes.cumsum(0) - sizes)
        # One table after the other in one array: one Gather instead of eight, 25 graph nodes instead of 43
        self.tables = nn.Embedding(int(sizes.sum()), EMBEDDING)
        nn.init.normal_(self.tables.weight, std=0.02)
        self.bottom = _mlp((len(mean), *BOTTOM))
        vectors = len(vocabulary_sizes) + 1
        above = torch.triu_indices(vectors, vectors, offset=1)
        self.register_buffer("pairs", above[0] * vectors + above[1])
        self.top = _mlp((EMBEDDING + above.shape[1], *TOP))
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(TOP[-1], 1)

    def forward(self, dense: Tensor, categorical: Tensor) -> Tensor:
        return torch.sigmoid(self.logit(dense, categorical))

    def logit(self, dense: Tensor, categorical: Tensor) -> Tensor:
        """FP32[b,1] before the sigmoid: what the loss is computed from."""
        features: Tensor = self.bottom((dense - self.mean) * self.scale)
        is_known = (categorical >= 0) & (categorical < self.sizes)
        looked_up = self.tables(torch.where(is_known, categorical, 0) + self.starts)
        vectors = torch.cat([features.unsqueeze(1), looked_up], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        interactions = products.index_select(1, self.pairs)
        hidden: Tensor = self.top(torch.cat([features, interactions], dim=1))
        logit: Tensor = self.last(self.dropout(hidden))
        return logit


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers)
