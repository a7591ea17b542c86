"""Where are a table's fitted columns kept? In a JSON file (docs/tables.md) that a person can read and that is checked when read.

    table_file.write(table, Path("features.json"))
    table = table_file.read(Path("features.json"))             # the same answers, to the last bit

A damaged or edited file is refused with the key that is wrong, so that no answer comes from half a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pilotlib.table import HashColumn, NumberColumn, Table, TextColumn, WordColumn

FORMAT = "tritonpilot table"
VERSION = 1
KINDS: Mapping[str, type] = {"number": NumberColumn, "words": WordColumn, "hash": HashColumn}
LARGEST_INDEX = 2**31 - 1


class TableFileError(ValueError):
    """A features file cannot be used; the message names the file and the key."""


def write(table: Table, path: Path) -> None:
    path.write_text(to_json(table), encoding="utf-8")


def read(path: Path) -> Table:
    """Raises TableFileError, or OSError when it cannot be opened."""
    try:
        return from_json(path.read_bytes().decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise TableFileError(f"{path} is no features file: {error}. {REMEDY}") from None


def to_json(table: Table) -> str:
    """The text of a features file. Numbers are written so that they are read back exactly."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "widths": table.widths,
        "dense": list(table.dense_names),
        "categorical": table.categorical_sizes,
        "numbers": [asdict(column) for column in table.numbers],
        "texts": [{"kind": _kind(column), **asdict(column)} for column in table.texts],
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str, source: str = "features.json") -> Table:
    """The table of a features file's text. Raises TableFileError naming `source` and the key that is wrong."""
    try:
        top = _Node(json.loads(text), "")
        top.choice("format", FORMAT)
        if (version := top.whole("version")) != VERSION:
            raise _KeyError("version", f"is {version}; this code reads version {VERSION}")
        numbers = [_number_column(node) for node in top.nodes("numbers")]
        texts = [_text_column(node) for node in top.nodes("texts")]
        names = [column.name for column in (*numbers, *texts)]
        if twins := sorted({name for name in names if names.count(name) > 1}):
            raise _KeyError("the file", f'has two columns named "{twins[0]}"')
        table = Table(numbers, texts)
        for key, follows in (
            ("widths", table.widths),
            ("dense", list(table.dense_names)),
            ("categorical", table.categorical_sizes),
        ):
            if top.take(key) != follows:
                raise _KeyError(key, f"does not follow from the columns, which make it {json.dumps(follows)[:200]}")
        top.end()
    except _KeyError as error:
        raise TableFileError(f"{source}: {error}. {REMEDY}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise TableFileError(f"{source} is no JSON: {error}. {REMEDY}") from None
    return table


REMEDY = "The file is not used. Make it again with the script that trained the model"


class _KeyError(ValueError):
    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path or 'the file'} {what}")


class _Node:
    """One JSON object, and the way to it. Each method takes a key and checks what it holds."""

    def __init__(self, content: Any, path: str) -> None:
        if not isinstance(content, dict):
            raise _KeyError(path, f"is {_shown(content)}, but must be an object")
        self._content, self._path = dict(content), path

    def take(self, key: str) -> Any:
        if key not in self._content:
            raise _KeyError(self.path(key), "is missing")
        return self._content.pop(key)

    def path(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def choice(self, key: str, *allowed: str) -> str:
        return str(self._checked(key, lambda value: value in allowed, f"one of {', '.join(allowed)}"))

    def text(self, key: str) -> str:
        return str(self._checked(key, lambda value: isinstance(value, str), "a text"))

    def name(self, key: str) -> str:
        return str(self._checked(key, lambda value: isinstance(value, str) and value != "", "a name"))

    def flag(self, key: str) -> bool:
        return bool(self._checked(key, lambda value: isinstance(value, bool), "true or false"))

    def whole(self, key: str, minimum: int = 0) -> int:
        return int(
            self._checked(
                key,
                lambda value: type(value) is int and minimum <= value <= LARGEST_INDEX,
                f"a whole number of at least {minimum}",
            )
        )

    def number(self, key: str) -> float:
        return float(self._checked(key, _is_number, "a number"))

    def number_or_none(self, key: str) -> float | None:
        value = self._checked(key, lambda value: value is None or _is_number(value), "a number or null")
        return None if value is None else float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(float(value) for value in self._list(key, _is_number, "a number"))

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(self._list(key, lambda value: isinstance(value, str) and value != "", "a text that is not empty"))

    def nodes(self, key: str) -> list[_Node]:
        entries = self._list(key, lambda value: isinstance(value, dict), "an object")
        return [_Node(entry, f"{self.path(key)}[{place}]") for place, entry in enumerate(entries)]

    def end(self) -> None:
        if self._content:
            raise _KeyError(self.path(min(self._content)), "is not a key of this format")

    def _checked(self, key: str, is_right: Callable[[Any], bool], what: str) -> Any:
        value = self.take(key)
        if not is_right(value):
            raise _KeyError(self.path(key), f"is {_shown(value)}, but must be {what}")
        return value

    def _list(self, key: str, is_right: Callable[[Any], bool], what: str) -> list[Any]:
        values: list[Any] = self._checked(key, lambda value: isinstance(value, list), f"a list, each entry {what}")
        for place, value in enumerate(values):
            if not is_right(value):
                raise _KeyError(f"{self.path(key)}[{place}]", f"is {_shown(value)}, but must be {what}")
        return values


def _number_column(node: _Node) -> NumberColumn:
    column = NumberColumn(
        name=node.name("name"),
        missing=node.choice("missing", "indicator", "fill", "refuse"),
        fill=node.number("fill"),
        low=node.number_or_none("low"),
        high=node.number_or_none("high"),
        log1p=node.flag("log1p"),
        mean=node.number("mean"),
        deviation=node.number("deviation"),
        as_value=node.flag("as_value"),
        bounds=node.numbers("bounds"),
    )
    node.end()
    if column.low is not None and column.high is not None and column.low > column.high:
        raise _KeyError(node.path("low"), f"is {column.low}, above high, {column.high}")
    if column.log1p and (column.low is None or column.low <= -1):
        raise _KeyError(node.path("low"), "must be above -1, because log1p takes no less")
    if column.deviation <= 0:
        raise _KeyError(node.path("deviation"), f"is {column.deviation}, but must be above 0")
    if any(after <= before for before, after in zip(column.bounds, column.bounds[1:], strict=False)):
        raise _KeyError(node.path("bounds"), "must rise from each to the next")
    if not column.as_value and not column.bounds:
        raise _KeyError(node.path("as_value"), f'is false and there are no bounds: "{column.name}" would be left out')
    return column


def _text_column(node: _Node) -> TextColumn:
    column: TextColumn
    if node.choice("kind", "words", "hash") == "hash":
        column = HashColumn(node.name("name"), node.whole("buckets", 1), node.choice("missing", "own", "refuse"))
    else:
        column = WordColumn(
            name=node.name("name"),
            words=node.texts("words"),
            unknown=node.choice("unknown", "zero", "refuse"),
            missing=node.choice("missing", "own", "unknown", "fill", "refuse"),
            fill=node.text("fill"),
        )
        if len(set(column.words)) < len(column.words):
            raise _KeyError(node.path("words"), "holds a word twice")
        if column.missing == "fill" and column.fill not in column.words:
            raise _KeyError(node.path("fill"), f"is {_shown(column.fill)}, which is not among the words")
    node.end()
    return column


def _kind(column: TextColumn) -> str:
    return next(kind for kind, of in KINDS.items() if isinstance(column, of))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:60] + "..."
