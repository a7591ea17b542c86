from __future__ import annotations

import io
import json
import math

from rich.console import Console

from tritonpilot.columns import Column, finite, html, table, with_values

COLUMNS = (
    Column("model", "model", is_word=True),
    Column("p99_ms", "P99", "ms", "{:,.1f}"),
    Column("pending", "pending", "", "{:,}"),
    Column("gpu", "GPU"),
)
ROWS = [
    {"model": "[red]ctr", "p99_ms": 1234.56, "pending": 0, "gpu": None},
    {"model": "<b>", "p99_ms": math.nan, "pending": 3},
]


def test_a_table_leaves_out_empty_columns_and_keeps_zeros() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(table(COLUMNS, ROWS, title="Models"))
    lines = [line.split() for line in out.getvalue().splitlines() if line.strip()]

    assert lines[0] == ["Models"]
    assert lines[1:3] == [["model", "P99", "pending"], ["ms"]]
    assert lines[-2:] == [["[red]ctr", "1,234.6", "0"], ["<b>", "-", "3"]]


def test_what_does_not_fit_is_left_out_by_rank_and_named() -> None:
    columns = (
        Column("model", "model"),
        Column("a", "first", rank=1),
        Column("b", "second", rank=2),
        Column("c", "third"),
    )
    rows = [{"model": "ctr", "a": 1, "b": 2, "c": 3}]
    out = io.StringIO()
    Console(file=out, width=80).print(table(columns, rows, width=22))

    assert out.getvalue().splitlines()[0].split() == ["model", "first", "third"]
    assert "no room for second; --json has all" in " ".join(out.getvalue().split())
    assert [column.header for column in table(columns, rows, width=3).columns] != []


def test_html_is_escaped() -> None:
    text = html(COLUMNS, ROWS)

    assert "<td class=word>&lt;b&gt;</td><td>-</td><td>3</td>" in text
    assert "GPU" not in text


def test_nothing_is_shown_of_nothing() -> None:
    assert with_values(COLUMNS, []) == []


def test_json_has_null_where_there_is_no_number() -> None:
    assert json.dumps(finite({"a": math.nan, "b": math.inf, "c": 0.0, "d": "x"}), allow_nan=False) == (
        '{"a": null, "b": null, "c": 0.0, "d": "x"}'
    )
