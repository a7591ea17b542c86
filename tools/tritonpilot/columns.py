"""How is a table of figures shown, where some rows or whole columns have none? To people, in HTML and as JSON.

columns = (Column("model", "model", is_word=True), Column("p99_ms", "P99", "ms", "{:,.1f}"))
rich.print(table(columns, rows))          # rows: mappings from Column.name to values; None where there is no figure
html(columns, rows); finite(row)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

Row = Mapping[str, object]

ABSENT = "-"
GAP = 2  # between columns


@dataclass(frozen=True)
class Column:
    """A figure: its key in a row, what stands above it, and how it is written."""

    name: str
    header: str
    unit: str = ""
    format: str = "{}"
    is_word: bool = False  # stands to the left, numbers to the right
    rank: int = 0  # where there is no room for all, the highest ranks go; 0 stays

    @property
    def title(self) -> str:
        """Header and unit in two lines."""
        return f"{self.header}\n{self.unit}"


def table(
    columns: Sequence[Column], rows: Sequence[Row], *, title: str | None = None, width: int | None = None
) -> Table:
    """A table for the terminal, of columns that have a value; without those that do not fit into `width`, which are named below."""
    found = with_values(columns, rows)
    shown = _fitting(found, rows, width)
    left_out = ", ".join(column.header for column in found if column not in shown)
    drawn = Table(
        title=title,
        title_justify="left",
        caption=f"no room for {left_out}; --json has all" if left_out else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for column in shown:
        side: Literal["left", "right"] = "left" if column.is_word else "right"
        drawn.add_column(Text(column.title), justify=side, no_wrap=True)  # Text: a model may be called [red]
    for row in rows:
        drawn.add_row(*(Text(cell(column, row.get(column.name))) for column in shown))
    return drawn


def html(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """The same as an HTML table."""
    shown = with_values(columns, rows)
    heads = "".join(f"<th>{escape(column.header)} <small>{escape(column.unit)}</small></th>" for column in shown)
    lines = [
        "<tr>"
        + "".join(
            f"<td{' class=word' if column.is_word else ''}>{escape(cell(column, row.get(column.name)))}</td>"
            for column in shown
        )
        + "</tr>"
        for row in rows
    ]
    return f"<table><tr>{heads}</tr>\n" + "\n".join(lines) + "</table>"


def with_values(columns: Iterable[Column], rows: Sequence[Row]) -> list[Column]:
    """The columns in which at least one row has a value."""
    return [column for column in columns if any(is_there(row.get(column.name)) for row in rows)]


def cell(column: Column, value: object) -> str:
    """The text of one value; "-" where there is none."""
    return column.format.format(value) if is_there(value) else ABSENT


def is_there(value: object) -> bool:
    """Whether it is a value: None, NaN and infinity are none."""
    return value is not None and (not isinstance(value, float) or math.isfinite(value))


def finite(row: Row) -> dict[str, object]:
    """The row for JSON, which has no NaN and no infinity: null instead."""
    return {name: value if is_there(value) else None for name, value in row.items()}


def _fitting(shown: Sequence[Column], rows: Sequence[Row], width: int | None) -> list[Column]:
    widths = {
        column: max(
            cell_len(text)
            for text in (column.header, column.unit, *(cell(column, row.get(column.name)) for row in rows))
        )
        for column in shown
    }
    kept = list(shown)
    while width is not None and sum(widths[column] + GAP for column in kept) > width and any(c.rank for c in kept):
        kept.remove(max(kept, key=lambda column: column.rank))
    return kept
