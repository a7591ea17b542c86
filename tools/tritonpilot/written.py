"""A YAML file that a person writes, as a pydantic model; what is wrong with it is said with file and line.

    service = read(path, Service, "`service: NAME`")

Unknown keys are refused with the nearest known key named, keys given twice too.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from tritonpilot.errors import SpecError


class Written(BaseModel):
    """Part of a file that a person writes: immutable, no unknown keys, no strings for numbers, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _says_something(cls, value: Any) -> Any:
        # `models:` with nothing behind it is a slip, or a file that is cut off; it must not mean "all".
        if value is None:
            raise ValueError("nothing is given here; give a value, or leave the line out for the default")
        return value


W = TypeVar("W", bound=Written)


def read(path: Path, kind: type[W], begins_with: str) -> W:
    """The file as a `kind`; `begins_with` says how such a file starts.

    Raises SpecError when it cannot be read, is no YAML mapping, has unknown keys or values that contradict each other.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}. Nothing was changed.") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        content = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"{path} is not valid YAML: {error}. Nothing was changed.") from error
    if not isinstance(content, dict):
        raise SpecError(f"{path} must be a mapping that starts with {begins_with}. Nothing was changed.")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise SpecError("\n".join([*_say_all(path, node, kind, error), "Nothing was changed."])) from error


def problems(error: ValidationError) -> list[tuple[tuple[str, ...], str]]:
    """What is wrong with values that stand in no file: the keys that lead to each, and the words about it."""
    return [(tuple(str(part) for part in loc), _message(problem)) for loc, problem in _problems(error)]


def nearest(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?`, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice (plain YAML lets the last one win silently)."""


def _mapping_without_twins(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        try:
            twin = key in seen
            seen.add(key)
        except TypeError as error:
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark) from error
        if twin:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_twins)


def _say_all(path: Path, node: yaml.Node | None, kind: type[BaseModel], error: ValidationError) -> list[str]:
    """Each problem as one line with file, line, what is wrong and what to do, without repetitions."""
    lines = [f"{path}:{_line_of(node, loc)}: {_say(loc, kind, e)}" for loc, e in _problems(error)]
    return list(dict.fromkeys(lines))


def _problems(error: ValidationError) -> list[tuple[tuple[object, ...], Any]]:
    """Where each is, and pydantic's words about it."""
    every = [(tuple(p for p in e["loc"] if not _is_union_branch(p)), e) for e in error.errors()]
    # A wrong key in a field of several forms fails each form in its own way: only the key is worth telling.
    told = {loc[:-1] for loc, e in every if e["type"] == "extra_forbidden" and loc[:-1]}
    return [
        (loc, e)
        for loc, e in every
        if e["type"] == "extra_forbidden" or not (loc in told or (loc[:-1] in told and e["type"] == "missing"))
    ]


def _say(loc: Sequence[object], kind: type[BaseModel], problem: Any) -> str:
    where = ".".join(str(part) for part in loc)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(kind, loc[:-1])
        close = nearest(str(loc[-1]), known) or f" (known here: {', '.join(known)})"
        return f"unknown key {where}{close}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    return f"{where}: {_message(problem)}" if where else _message(problem)


def _message(problem: Any) -> str:
    message = re.sub(r"^Value error, ", "", str(problem["msg"]))
    given = problem.get("input")
    return message if isinstance(given, (dict, list, BaseModel)) else f"{message} (given: {given!r})"


def _is_union_branch(part: object) -> bool:
    return isinstance(part, str) and (part[:1].isupper() or part.startswith(("literal[", "function-", "constrained-")))


def _known_keys(model: type[BaseModel], loc: Sequence[object]) -> list[str]:
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(str(part))
        inner = _models_in(field.annotation) if field else []
        if not inner:
            return []
        if len(inner) > 1:
            return sorted({key for m in inner for key in m.model_fields})
        model = inner[0]
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, list, dict, Annotated) or get_args(annotation):
        return [model for arg in get_args(annotation) for model in _models_in(arg)]
    return []


def _line_of(node: yaml.Node | None, loc: Sequence[object]) -> int:
    """Line (from 1) of the deepest part of `loc` that exists in the file."""
    line = 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            pair = next((p for p in node.value if p[0].value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
