from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from models.text import data
from models.text.minilm import HEADS, INNER, LAYERS, POSITIONS, WIDTH, WORDS, SentenceEncoder


@pytest.fixture(scope="module")
def bert() -> dict[str, torch.Tensor]:
    """Weights under the published names, made up."""
    random = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) * 0.05

    found = {
        "embeddings.word_embeddings.weight": some(WORDS, WIDTH),
        "embeddings.position_embeddings.weight": some(POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": some(2, WIDTH),
        "embeddings.LayerNorm.weight": 1 + some(WIDTH),
        "embeddings.LayerNorm.bias": some(WIDTH),
    }
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        shapes = {
            **{f"attention.self.{part}": (WIDTH, WIDTH) for part in ("query", "key", "value")},
            "attention.output.dense": (WIDTH, WIDTH),
            "intermediate.dense": (INNER, WIDTH),
            "output.dense": (WIDTH, INNER),
        }
        for part, shape in shapes.items():
            found |= {f"{name}.{part}.weight": some(*shape), f"{name}.{part}.bias": some(shape[0])}
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            found |= {f"{name}.{part}.weight": 1 + some(WIDTH), f"{name}.{part}.bias": some(WIDTH)}
    return found


@pytest.fixture(scope="module")
def network(bert: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> SentenceEncoder:
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(bert, path)
    return SentenceEncoder.load(path)


@pytest.fixture(scope="module")
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of 20, 7, 1, no and some scattered tokens, and one padded on the left."""
    random = np.random.default_rng(4)
    mask = np.array([[1] * n + [0] * (20 - n) for n in (20, 7, 1, 0)] + [[1, 0, 0, 1] * 5, [0] * 8 + [1] * 12])
    return torch.from_numpy(random.integers(0, WORDS, mask.shape)), torch.from_numpy(mask)


def plain(bert: dict[str, torch.Tensor], ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """BERT as torch's own encoder layers make it, padding and all; mean pooling, length 1."""
    embeddings = {name.removeprefix("embeddings."): value for name, value in bert.items()}
    states = embeddings["word_embeddings.weight"][ids] + embeddings["position_embeddings.weight"][: ids.shape[1]]
    states = states + embeddings["token_type_embeddings.weight"][0]
    states = functional.layer_norm(
        states, (WIDTH,), embeddings["LayerNorm.weight"], embeddings["LayerNorm.bias"], 1e-12
    )
    for number in range(LAYERS):
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, INNER, 0, "gelu", 1e-12, batch_first=True).eval()
        weights = {
            ours: bert[f"encoder.layer.{number}.{theirs}.{kind}"]
            for kind in ("weight", "bias")
            for ours, theirs in (
                (f"self_attn.out_proj.{kind}", "attention.output.dense"),
                (f"linear1.{kind}", "intermediate.dense"),
                (f"linear2.{kind}", "output.dense"),
                (f"norm1.{kind}", "attention.output.LayerNorm"),
                (f"norm2.{kind}", "output.LayerNorm"),
            )
        }
        for kind in ("weight", "bias"):
            parts = [bert[f"encoder.layer.{number}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
            weights[f"self_attn.in_proj_{kind}"] = torch.cat(parts)
        layer.load_state_dict(weights)
        states = layer(states, src_key_padding_mask=mask == 0)
    shares = mask[:, :, None].float()
    mean = torch.nan_to_num(states * shares).sum(1) / shares.sum(1).clamp(min=1e-9)
    return functional.normalize(mean)


def test_answers_are_those_of_torchs_own_encoder(
    network: SentenceEncoder, bert: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    with torch.no_grad():
        assert torch.allclose(network(*batch), plain(bert, *batch), atol=1e-6)


def test_padding_and_mates_change_nothing(network: SentenceEncoder, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    ids, mask = batch
    with torch.inference_mode():
        together = network(ids, mask)
        for row, length in ((0, 20), (1, 7), (2, 1)):
            alone = network(ids[row : row + 1, :length], mask[row : row + 1, :length])
            assert torch.allclose(together[row], alone[0], atol=1e-6)
        assert torch.allclose(network(ids, mask * 5), together, atol=1e-6)  # any number but 0 is a token
        assert (together[3] == 0).all()
        assert torch.allclose(together.norm(dim=1)[[0, 1, 2, 4, 5]], torch.ones(5))


def test_texts_are_short_and_long_ones_in_one_fixed_order() -> None:
    texts = data.texts()
    lengths = [len(text) for text in texts]
    assert len(texts) == 250
    assert min(lengths) < 20
    assert max(lengths) > 700
    assert texts == data.texts()
    assert not any(text.startswith("__label__") or text != text.strip() for text in texts)


def test_ratings_are_of_all_pairs_of_the_news() -> None:
    documents, ratings = data.rated_documents()
    assert len(documents) == 50
    assert ratings.shape == (50, 50)
    assert (ratings.diagonal() == 1).all()
    upper: Any = np.triu_indices(50, 1)
    assert 0.2 < ratings[upper].mean() < 0.4


def test_agreement_is_the_correlation_over_pairs() -> None:
    vectors = np.array([[1, 0], [0.8, 0.6], [0, 1]], np.float32)
    assert data.agreement(vectors, vectors.astype(np.float64) @ vectors.T) == pytest.approx(1)
    assert data.agreement(vectors, -(vectors @ vectors.T).astype(np.float64)) == pytest.approx(-1)


def test_the_service_file_says_what_the_export_was_checked_with() -> None:
    text = (Path(data.__file__).parent / "service.yaml").read_text()
    assert f"{{max_tokens: {data.MAX_TOKENS}, pad_to_multiple: {data.PAD_TO_MULTIPLE}}}" in text
