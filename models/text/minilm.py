"""The network behind the sentence embeddings: BERT with six layers of 384 (MiniLM), pooled and normalised, in plain torch.

    network = SentenceEncoder.load(path)                     # the published model.safetensors
    network(input_ids, attention_mask)                       # INT64[b,s] twice -> sentence_embedding FP32[b,384]

Sizes and weights: sentence-transformers/all-MiniLM-L6-v2 (config.json, 1_Pooling, 2_Normalize). The graph has standard operators
only and is written for ONNX Runtime on the CPU (models/text/README.md has the times):
- padding costs next to nothing: linear layers see the tokens that the mask leaves, of all texts below each other; only the
  attention itself is computed in the padded shape. So a short text in a batch with a long one costs what it costs alone.
- tokens as one matrix make a linear layer one Gemm with its bias, and keep ONNX Runtime from fusing residual and normalisation
  into its SkipLayerNormalization, whose CPU kernel takes three times as long as the two.
- GELU in the form that ONNX Runtime fuses; torch's own export of it is computed in five passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

WORDS, POSITIONS, WIDTH, LAYERS, HEADS, INNER = 30522, 512, 384, 6, 12, 1536
HEAD_WIDTH = WIDTH // HEADS
LAYER_NORM_EPSILON = 1e-12
# What a masked token's score gets added. Its score before is that of a token that is not masked, so its share is below
# exp(-40) of the largest, which is nothing in FP32 beside 1. Not more: the exp() of -88 and less is denormal, ten times slower.
MASKED = -40.0
POOLING_EPSILON = 1e-9  # as sentence-transformers divides by the number of tokens
NORM_EPSILON = 1e-12  # as torch.nn.functional.normalize


class SentenceEncoder(nn.Module):
    """INT64[b,s] token ids and mask -> FP32[b,384] of length 1; rows that are masked throughout become zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.zeros(POSITIONS, WIDTH))  # with the one token type that a single text has
        self.norm = nn.LayerNorm(WIDTH, LAYER_NORM_EPSILON)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        rows, tokens = input_ids.shape
        is_token = (attention_mask != 0).to(torch.int64)  # a mask of other numbers must not move its batch-mates
        mask = is_token.to(torch.float32)
        added = functional.pad(((1.0 - mask) * MASKED)[:, :, None, None], (HEAD_WIDTH, 0))
        # Every text keeps its first token, so that there is one to compute in a batch that is masked throughout.
        kept = torch.cat([torch.ones_like(is_token[:, :1]), is_token[:, 1:]], 1).reshape(-1)
        unpadded = kept.nonzero().reshape(-1)  # places of the tokens to compute among all b*s
        padded = kept.cumsum(0) - 1  # for each place the token to take; for padding some other, which the mask hides
        words = self.words(input_ids.reshape(-1).index_select(0, unpadded))
        places = torch.arange(tokens).expand(rows, tokens).reshape(-1).index_select(0, unpadded)
        states = self.norm(words + self.positions.index_select(0, places))
        for layer in self.layers:
            states = layer(states, added, unpadded, padded)
        weights = mask[:, :, None]
        total = (states.index_select(0, padded).reshape(rows, tokens, WIDTH) * weights).sum(1)
        mean = total / weights.sum(1).clamp(min=POOLING_EPSILON)
        length = (mean * mean).sum(1, keepdim=True).sqrt()
        embedding: Tensor = mean / length.clamp(min=NORM_EPSILON)
        return embedding

    @classmethod
    def load(cls, weights: Path) -> SentenceEncoder:
        """The network with the weights of a BERT in safetensors form."""
        network = cls()
        network.load_state_dict(_renamed(load_file(weights)))
        return network.eval()


class Layer(nn.Module):
    """Attention and feed-forward, each followed by its residual and layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        # One column more in each head: 1 in the query, the mask in the key. So their product comes out masked, without a pass
        # over all b*12*s*s scores. The scale 1/sqrt(HEAD_WIDTH) is in the query's weights.
        self.query = nn.Linear(WIDTH, HEADS * (HEAD_WIDTH + 1))
        self.key = nn.Linear(WIDTH, HEADS * (HEAD_WIDTH + 1))
        self.value = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, LAYER_NORM_EPSILON)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.last_norm = nn.LayerNorm(WIDTH, LAYER_NORM_EPSILON)

    def forward(self, states: Tensor, added: Tensor, unpadded: Tensor, padded: Tensor) -> Tensor:
        """FP32[n,384] of the n tokens -> the same. Keys get FP32[b,s,1,33] added. INT64[n] and INT64[b*s]: see the caller."""
        shape = (added.shape[0], added.shape[1], HEADS, -1)
        query = self.query(states).index_select(0, padded).reshape(shape).transpose(1, 2)
        key = (self.key(states).index_select(0, padded).reshape(shape) + added).permute(0, 2, 3, 1)
        value = self.value(states).index_select(0, padded).reshape(shape).transpose(1, 2)
        shares = torch.softmax(query @ key, -1)
        attended = (shares @ value).transpose(1, 2).reshape(-1, WIDTH).index_select(0, unpadded)
        states = self.norm(states + self.mix(attended))
        inner = self.up(states)
        # NOTE: the exact GELU in the one order of operations that ONNX Runtime fuses
        inner = inner * (torch.erf(inner / 2**0.5) + 1.0) * 0.5
        last: Tensor = self.last_norm(states + self.down(inner))
        return last


def _renamed(bert: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The published weights under our names."""
    found = {
        "words.weight": bert["embeddings.word_embeddings.weight"],
        "positions": bert["embeddings.position_embeddings.weight"] + bert["embeddings.token_type_embeddings.weight"][0],
    }
    modules = {"norm": "embeddings.LayerNorm"}
    for layer in range(LAYERS):
        for ours, theirs in LAYER_NAMES.items():
            modules[f"layers.{layer}.{ours}"] = f"encoder.layer.{layer}.{theirs}"
    for our, their in modules.items():
        for kind in ("weight", "bias"):
            value = bert[f"{their}.{kind}"]
            if our.endswith("query"):
                value = _with_column(value * HEAD_WIDTH**-0.5, 1.0 if kind == "bias" else 0.0)
            elif our.endswith("key"):
                value = _with_column(value, 0.0)
            found[f"{our}.{kind}"] = value
    return found


def _with_column(value: Tensor, filled: float) -> Tensor:
    """A weight [384,...] or bias [384] whose heads have one output more, made of `filled`."""
    heads = value.reshape(HEADS, HEAD_WIDTH, -1)
    more = torch.full_like(heads[:, :1], filled)
    return torch.cat([heads, more], 1).reshape(HEADS * (HEAD_WIDTH + 1), *value.shape[1:])


LAYER_NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mix": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "last_norm": "output.LayerNorm",
}
