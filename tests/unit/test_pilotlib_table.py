"""pilotlib.table*: what a column becomes, the same through the file, errors that are one row's own."""

from __future__ import annotations

import json
import math
import re
import zlib
from typing import Any

import numpy as np
import pytest

from pilotlib import table_file
from pilotlib.table import HashColumn, NumberColumn, Table, WordColumn, mixed
from pilotlib.table_file import TableFileError
from pilotlib.table_fit import Column, Hashed, Number, Words, arrays, fit
from pilotlib.verbs import BadRequest

NAN, INF = math.nan, math.inf
COLUMNS: list[Column] = [
    Number("income", log1p=True),
    Words("state"),
    Number("age", missing="fill", buckets=(18, 40, 65)),
    Number("score", missing="refuse", clip=None, standardise=False),
    Number("visits", missing="fill", as_value=False, buckets=4),
    Hashed("zip", buckets=100),
    Words("term", unknown="refuse", missing="refuse"),
]
TRAIN = {
    "income": [1000.0, NAN, 50_000, 80_000, 0],
    "state": ["CA", "NY", "CA", "", "TX"],
    "age": [20, 30, 40, 70, None],
    "score": [0.5, 1.5, -2, 3, 0],
    "visits": [1, 2, 3, 4, 5],
    "zip": ["94110", "10001", "90210", None, "7"],
    "term": ["36", "60", "36", "36", "60"],
}


@pytest.fixture(scope="module")
def table() -> Table:
    return fit(COLUMNS, TRAIN)


def row(**cells: Any) -> tuple[np.ndarray, np.ndarray]:
    """One good row, with some cells changed."""
    good = {"income": 50_000, "state": "CA", "age": 41, "score": 1, "visits": 2, "zip": "94110", "term": "36"}
    return arrays(COLUMNS, {name: [value] for name, value in {**good, **cells}.items()})


def rows(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Random rows: missing, unknown and extreme cells among them."""
    numbers = (random.normal(size=(count, 4)) * random.choice([1, 50, 1e6, 1e30], (count, 4))).astype(np.float32)
    numbers[random.random((count, 4)) < 0.1] = NAN
    numbers[:, 2] = np.nan_to_num(numbers[:, 2])
    words = np.array(["CA", "NY", "TX", "", "ZZ", "é", "x" * 300], object)
    texts = np.stack(
        [words[random.integers(0, 7, count)], words[random.integers(0, 7, count)], random.choice(["36", "60"], count)],
        1,
    )
    encoded = np.empty(texts.shape, object)
    encoded.ravel()[:] = [str(text).encode() for text in texts.ravel()]
    return numbers, encoded


def by_hand(table: Table, numbers: np.ndarray, texts: np.ndarray) -> tuple[list[list[float]], list[list[int]]]:
    """The definition of every column, cell by cell, in plain Python."""
    dense, categorical = [], []
    for number_row, text_row in zip(numbers.tolist(), texts.tolist(), strict=True):
        values, indicators, indices = [], [], []
        for column, cell in zip(table.numbers, number_row, strict=True):
            missing = math.isnan(cell)
            filled = column.fill if missing else cell
            if column.bounds:
                indices.append(0 if missing else 1 + sum(filled >= bound for bound in column.bounds))
            value = filled if column.low is None else max(filled, column.low)
            value = value if column.high is None else min(value, column.high)
            value = math.log1p(value) if column.log1p else value
            if column.as_value:
                values.append((value - column.mean) / column.deviation)
            if column.missing == "indicator":
                indicators.append(float(missing))
        for column, cell in zip(table.texts, text_row, strict=True):
            word = cell.decode()
            if isinstance(column, HashColumn):
                indices.append(1 + fmix32(zlib.crc32(cell)) % column.buckets if word else 0)
            elif not word:
                indices.append(len(column.words) + 1)
            else:
                indices.append(column.words.index(word) + 1 if word in column.words else 0)
        dense.append(values + indicators)
        categorical.append(indices)
    return dense, categorical


def fmix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B & 0xFFFFFFFF
    x ^= x >> 13
    x = x * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ x >> 16


@pytest.mark.parametrize("seed", range(20))
def test_transform_is_what_the_definition_says_cell_by_cell(table: Table, seed: int) -> None:
    random = np.random.default_rng(seed)
    numbers, texts = rows(int(random.integers(0, 40)), random)

    dense, categorical = table.transform(numbers, texts)

    expected_dense, expected_categorical = by_hand(table, numbers, texts)
    assert dense.dtype == np.float32
    assert categorical.dtype == np.int64
    np.testing.assert_allclose(dense, np.array(expected_dense, np.float32).reshape(len(numbers), 4), rtol=1e-6)
    assert categorical.tolist() == expected_categorical


@pytest.mark.parametrize("seed", range(5))
def test_a_table_read_from_its_file_gives_the_same_bits(seed: int) -> None:
    random = np.random.default_rng(seed)
    numbers, texts = rows(200, random)
    numbers[:, 0] = random.lognormal(10, 2, 200)
    data = {
        **{name: numbers[:, place] for place, name in enumerate(("income", "age", "score", "visits"))},
        **{name: texts[:, place].tolist() for place, name in enumerate(("state", "zip", "term"))},
    }
    table = fit(COLUMNS, data)

    again = table_file.from_json(table_file.to_json(table))

    assert (again.numbers, again.texts) == (table.numbers, table.texts)
    for before, after in zip(table.transform(numbers, texts), again.transform(numbers, texts), strict=True):
        np.testing.assert_array_equal(before, after)


def test_rows_do_not_depend_on_their_batch_mates(table: Table) -> None:
    numbers, texts = rows(64, np.random.default_rng(3))

    together = table.transform(numbers, texts)

    for place in range(64):
        alone = table.transform(numbers[place : place + 1], texts[place : place + 1])
        for one, many in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], many[place])


def test_training_values_are_standardised_and_missing_ones_indicated(table: Table) -> None:
    dense, _ = table.transform(*arrays(COLUMNS, TRAIN))

    assert table.dense_names == ("income", "age", "score", "income is missing")
    assert abs(dense[:, 0].mean()) < 1e-6
    assert abs(dense[:, 0].std() - 1) < 1e-6
    assert dense[:, 3].tolist() == [0, 1, 0, 0, 0]
    assert dense[:, 2].tolist() == [0.5, 1.5, -2, 3, 0]


def test_buckets_begin_at_their_bounds_and_zero_is_missing(table: Table) -> None:
    def bucket(age: float) -> int:
        return int(table.transform(*row(age=age))[1][0, 0])

    assert [bucket(age) for age in (17, 18, 39.9, 40, 65, 1e9, NAN)] == [1, 2, 2, 3, 4, 4, 0]
    assert table.categorical_sizes == {"age": 5, "visits": 5, "state": 5, "zip": 101, "term": 3}


def test_unknown_and_missing_words_have_their_own_indices(table: Table) -> None:
    found = [int(table.transform(*row(state=state))[1][0, 2]) for state in ("CA", "NY", "TX", "ZZ", "", "ca", "é")]
    assert found == [1, 2, 3, 0, 4, 0, 0]


@pytest.mark.parametrize(("missing", "index"), [("own", 3), ("unknown", 0), ("fill", 2)])
def test_a_missing_word_is_what_its_column_says(missing: Any, index: int) -> None:
    table = fit([Words("state", missing=missing)], {"state": ["a", "b", "b", ""]})
    assert table.transform(None, np.array([[b""]], object))[1].tolist() == [[index]]


def test_rare_words_are_left_out_of_the_vocabulary() -> None:
    table = fit([Words("state", least_count=2)], {"state": ["a", "b", "b", "b", "a", "c"]})
    assert table.texts == (WordColumn("state", ("a", "b"), "zero", "own", ""),)


def test_hashes_are_stable_and_even() -> None:
    """Pinned: another hash would make every served model of hashed columns wrong without a word."""
    table = Table([], [HashColumn("zip", 100, "own")])
    words = np.array([[f"{zip_code:05}".encode()] for zip_code in range(20_000)], object)

    indices = table.transform(None, words)[1][:, 0]

    assert indices[:3].tolist() == [1 + fmix32(zlib.crc32(text)) % 100 for text in (b"00000", b"00001", b"00002")]
    assert fmix32(zlib.crc32(b"00000")) % 100 == int(mixed(np.array([zlib.crc32(b"00000")], np.uint32))[0]) % 100
    counts = np.bincount(indices, minlength=101)
    assert counts[0] == 0
    assert counts[1:].min() > 130
    assert counts[1:].max() < 270


def test_a_missing_hashed_text_has_index_zero(table: Table) -> None:
    assert table.transform(*row(zip=""))[1][0, 3] == 0
    assert table.transform(*row(zip="0"))[1][0, 3] > 0


@pytest.mark.parametrize(
    ("cells", "field", "why"),
    [
        ({"income": INF}, "numbers", "row 0: income is inf"),
        ({"income": -INF}, "numbers", "row 0: income is -inf"),
        ({"visits": 1e39}, "numbers", "row 0: visits is inf"),  # beyond FP32
        ({"score": NAN}, "numbers", "row 0: score is missing"),
        ({"state": b"\xff\xfe"}, "texts", "row 0: state is not UTF-8: invalid start byte at byte 0"),
        ({"zip": b"94\x80"}, "texts", "row 0: zip is not UTF-8: invalid start byte at byte 2"),
        ({"zip": b"9411\xc3"}, "texts", "row 0: zip is not UTF-8: unexpected end of data at byte 4"),
        ({"term": "48"}, "texts", 'row 0: term has no value "48"'),
        ({"term": "48\0\n\x1b"}, "texts", r'row 0: term has no value "48\x00\n\x1b"'),
        ({"term": "x" * 1_000_000}, "texts", f'row 0: term has no value "{"x" * 40}..."'),
        ({"term": ""}, "texts", "row 0: term is missing"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_bad_cell_is_refused_with_input_row_and_column(
    table: Table, cells: dict[str, Any], field: str, why: str
) -> None:
    with pytest.raises(BadRequest, match=re.escape(f'"{field}": {why}')):
        table.transform(*row(**cells))


def test_a_text_that_is_no_bytes_is_refused(table: Table) -> None:
    numbers, texts = row()
    for place, name in enumerate(("state", "zip", "term")):
        spoiled = texts.copy()
        spoiled[0, place] = "text"
        with pytest.raises(BadRequest, match=f"{name} is of type str, not bytes"):
            table.transform(numbers, spoiled)


def test_a_megabyte_of_text_is_a_word_like_any_other(table: Table) -> None:
    categorical = table.transform(*row(state="é" * 500_000, zip="x" * 1_000_000))[1][0]
    assert categorical[2] == 0
    assert 1 <= categorical[3] <= 100


@pytest.mark.parametrize(
    ("numbers", "texts", "message"),
    [
        (
            np.zeros((1, 3), np.float32),
            np.full((1, 3), b"", object),
            r'"numbers": has shape \[1, 3\].*income, age, score',
        ),
        (np.zeros((1, 4), np.float32), np.full((1, 4), b"", object), r'"texts": has shape \[1, 4\].*state, zip, term'),
        (np.zeros(4, np.float32), np.full((1, 3), b"", object), r'"numbers": has shape \[4\]'),
        (np.zeros((2, 4), np.float32), np.full((1, 3), b"", object), '"texts": has 1 rows, numbers has 2'),
        (None, np.full((1, 3), b"", object), '"numbers": is missing'),
        (np.zeros((1, 4), np.float32), None, '"texts": is missing'),
    ],
)
def test_wrong_columns_or_rows_are_refused(table: Table, numbers: Any, texts: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        table.transform(numbers, texts)


def test_no_rows_make_no_rows(table: Table) -> None:
    dense, categorical = table.transform(np.empty((0, 4), np.float32), np.empty((0, 3), object))
    assert dense.shape == (0, 4)
    assert categorical.shape == (0, 5)


def test_one_bad_request_of_many_fails_alone_and_counts_its_own_rows(table: Table) -> None:
    random = np.random.default_rng(5)
    requests = [rows(int(random.integers(0, 4)), random) for _ in range(32)]
    requests[17] = rows(3, random)
    requests[17][1][2, 0] = b"\xff"
    requests[17][0][1, 1] = INF

    answers = table.transform_requests(requests)

    assert str(answers[17]) == '"numbers": row 1: age is inf; it must be a number, or NaN where it is missing'
    for place, answer in enumerate(answers):
        if place != 17:
            assert not isinstance(answer, BadRequest)
            for got, expected in zip(answer, table.transform(*requests[place]), strict=True):
                np.testing.assert_array_equal(got, expected)


def test_numbers_of_training_in_double_precision_are_those_that_callers_can_send(table: Table) -> None:
    """13.99 is no FP32: a bucket's bound between the two must not part training from serving."""
    table = fit([Number("rate", buckets=(13.99,), clip=None, standardise=False)], {"rate": [1.0, 13.99]})
    wire = np.array([[13.99]], np.float32)
    for before, after in zip(table.transform(wire), table.transform(np.array([[13.99]])), strict=True):
        np.testing.assert_array_equal(before, after)


def test_without_clipping_a_huge_value_stays_finite() -> None:
    table = fit([Number("x", clip=None)], {"x": [0, 1e-3, 2e-3]})
    dense, _ = table.transform(np.array([[3e38], [-3e38]], np.float32))
    assert np.isfinite(dense).all()


def test_a_constant_column_becomes_zeros() -> None:
    table = fit([Number("x", missing="fill")], {"x": [0.1, 0.1, 0.1]})
    np.testing.assert_allclose(table.transform(np.array([[0.1], [7]], np.float32))[0], [[0], [0]], atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "data", "message"),
    [
        ([Number("x"), Words("x")], {"x": [1]}, 'two columns are named "x"'),
        ([Number("x")], {"y": [1]}, 'no column "x"; there are: y'),
        ([Number("x"), Number("y")], {"x": [1], "y": [1, 2]}, "different numbers of rows"),
        ([Number("x")], {"x": ["a"]}, '"x" is no column of numbers'),
        ([Number("x")], {"x": [NAN]}, '"x" has no value'),
        ([Number("x")], {"x": [INF]}, '"x" holds infinity'),
        ([Number("x", buckets=(2, 1))], {"x": [1]}, "must rise"),
        ([Number("x", as_value=False)], {"x": [1]}, "neither a value nor"),
        ([Words("x")], {"x": [1]}, "holds 1, which is no text"),
        ([Words("x")], {"x": [b"\xff"]}, "not UTF-8"),
        ([Words("x", least_count=2)], {"x": ["a", "b"]}, "occurs 2 times"),
        ([Hashed("x", buckets=0)], {"x": ["a"]}, "0 buckets"),
    ],
)
def test_fitting_names_the_column_that_is_wrong(columns: list[Column], data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(columns, data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "other", "format is"),
        (("version",), 2, "version is 2; this code reads version 1"),
        (("widths", "dense"), 5, "widths does not follow from the columns"),
        (("dense", 0), "other", "dense does not follow"),
        (("categorical", "zip"), 7, "categorical does not follow"),
        (("extra",), 1, "extra is not a key"),
        (("numbers",), {}, "numbers is {}, but must be a list"),
        (("numbers", 0), 3, r"numbers\[0\] is 3, but must be an object"),
        (("numbers", 0, "fill"), "many", r'numbers\[0\].fill is "many", but must be a number'),
        (("numbers", 0, "fill"), True, r"numbers\[0\].fill is true"),
        (("numbers", 0, "fill"), NAN, r"numbers\[0\].fill is NaN"),
        (("numbers", 0, "deviation"), 0, r"numbers\[0\].deviation is 0.0, but must be above 0"),
        (("numbers", 0, "low"), -1, r"numbers\[0\].low must be above -1"),
        (("numbers", 1, "low"), 1e9, r"numbers\[1\].low is 1000000000.0, above high"),
        (("numbers", 1, "bounds"), [1, 1], r"numbers\[1\].bounds must rise"),
        (("numbers", 1, "bounds", 1), None, r"numbers\[1\].bounds\[1\] is null, but must be a number"),
        (("numbers", 3, "bounds"), [], r"numbers\[3\].as_value is false and there are no bounds"),
        (("numbers", 2, "missing"), "maybe", r'numbers\[2\].missing is "maybe", but must be one of'),
        (("numbers", 2, "name"), "age", 'the file has two columns named "age"'),
        (("numbers", 0, "other"), 1, r"numbers\[0\].other is not a key"),
        (("texts", 0, "kind"), "number", r'texts\[0\].kind is "number", but must be one of words, hash'),
        (("texts", 0, "words"), ["a", "a"], r"texts\[0\].words holds a word twice"),
        (("texts", 0, "words", 0), "", r'texts\[0\].words\[0\] is "", but must be a text'),
        (("texts", 0, "missing"), "fill", r'texts\[0\].fill is "", which is not among the words'),
        (("texts", 1, "buckets"), 0, r"texts\[1\].buckets is 0, but must be a whole number of at least 1"),
    ],
)
def test_an_edited_file_is_refused_with_its_name_and_the_key(
    table: Table, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    content = json.loads(table_file.to_json(table))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(TableFileError, match=f"features.json: {message}.*Make it again"):
        table_file.from_json(json.dumps(content))


@pytest.mark.parametrize("key", ["format", "version", "widths", "dense", "categorical", "numbers", "texts"])
def test_a_missing_key_is_named(table: Table, key: str) -> None:
    content = json.loads(table_file.to_json(table))
    del content[key]
    with pytest.raises(TableFileError, match=f"{key} is missing"):
        table_file.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000])
def test_what_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(TableFileError, match="x.json"):
        table_file.from_json(text, "x.json")


def test_any_cut_of_a_file_is_refused(table: Table) -> None:
    text = table_file.to_json(table)
    for length in range(0, len(text) - 2, 37):
        with pytest.raises(TableFileError):
            table_file.from_json(text[:length])


def test_write_and_read(table: Table, tmp_path: Any) -> None:
    path = tmp_path / "features.json"
    table_file.write(table, path)
    assert table_file.read(path).widths == table.widths == {"numbers": 4, "texts": 3, "dense": 4, "categorical": 5}
    path.write_bytes(b"\xff")
    with pytest.raises(TableFileError, match="no features file"):
        table_file.read(path)


def test_number_columns_are_values_only_where_they_say_so() -> None:
    column = NumberColumn("x", "fill", 1.0, None, None, False, 0.0, 1.0, False, (5.0,))
    dense, categorical = Table([column], []).transform(np.array([[4.0], [5.0]], np.float32))
    assert dense.shape == (2, 0)
    assert categorical.tolist() == [[1], [2]]
