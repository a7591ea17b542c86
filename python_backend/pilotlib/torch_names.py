"""Which argument or result of a PyTorch model does each name of the config mean? As Triton's pytorch backend decides.

    input_places(["INPUT__1", "INPUT__0"], arguments=["x", "mask"])  -> Places((1, 0))
    input_places(["mask", "x"], arguments=["x", "mask"])             -> Places((1, 0))
    output_places(["OUTPUT__0"])                                     -> Places((0,))

The rules (GetNamingConvention in src/libtorch.cc, release 24.10): inputs are all named as arguments of forward(); else all
as NAME__INDEX; else they are taken in the config's order. Outputs likewise, without the first rule. For exported programs
Triton's newer backend (26.05) also has paths, such as ARGS[0], KWARGS[mask] or RESULT[score]: `paths`, if all names are such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DELIMITER = "__"


class NamesError(ValueError):
    """Names in config.pbtxt mean no argument or result of the model, or one of them twice; the model is not loaded."""


@dataclass(frozen=True)
class Places:
    """For each name, in the config's order, its place among the arguments or results; a remark when that was a guess."""

    indices: tuple[int, ...]
    remark: str = ""


def input_places(names: Sequence[str], arguments: Sequence[str], paths: Sequence[str] = ()) -> Places:
    """Where each input goes. Raises NamesError when an argument has no input, or two, or there are too many."""
    if len(names) != len(arguments):
        raise NamesError(
            f"the config has {len(names)} inputs ({', '.join(names) or 'none'}), the model's forward() takes "
            f"{len(arguments)} ({', '.join(arguments) or 'none'}); the model is not loaded: name each argument once"
        )
    places = _places("input", names, (arguments, paths))
    missing = [argument for index, argument in enumerate(arguments) if index not in places.indices]
    if missing:
        twice = next(name for place, name in enumerate(names) if places.indices[place] in places.indices[:place])
        raise NamesError(
            f'inputs: "{twice}" and another input mean the same argument of forward(), and none means {missing[0]} '
            f"(its arguments are {', '.join(arguments)}); the model is not loaded: correct their names"
        )
    return places


def output_places(names: Sequence[str], paths: Sequence[str] = ()) -> Places:
    """Where each output comes from. A place beyond the model's results is found out when they are there: `check_results`."""
    return _places("output", names, (paths,))


def check_results(names: Sequence[str], places: Places, results: int) -> None:
    """Raise NamesError when a name means a result that the model does not have."""
    for name, place in zip(names, places.indices, strict=True):
        if place >= results:
            raise NamesError(
                f'output "{name}" means result {place}, but the model has {results}, counted from 0; '
                "correct its name (OUTPUT__0 is the first), or take it out of the config"
            )


def paths(nested: Any, root: str) -> list[str]:
    """Names of the leaves of nested tuples, lists and dicts, in PyTorch's order: RESULT, RESULT[0], RESULT[box][1]."""
    if isinstance(nested, Mapping):
        return [path for key, value in nested.items() for path in paths(value, f"{root}[{key}]")]
    if isinstance(nested, (tuple, list)):
        return [path for index, value in enumerate(nested) for path in paths(value, f"{root}[{index}]")]
    return [root]


def _places(kind: str, names: Sequence[str], known: Sequence[Sequence[str]]) -> Places:
    for each in known:
        if names and set(names) <= set(each):
            return Places(tuple(each.index(name) for name in names))
    indices = [_index(name) for name in names]
    if None not in indices:
        limit = len(known[0]) if kind == "input" else max([index or 0 for index in indices], default=0) + 1
        beyond = [name for name, index in zip(names, indices, strict=True) if index is not None and index >= limit]
        if beyond:
            raise NamesError(
                f'input "{beyond[0]}": the model\'s forward() has {limit} arguments, counted from 0; the model is not '
                "loaded: correct the name"
            )
        return Places(tuple(index for index in indices if index is not None))
    remark = (
        ""
        if len(names) == 1
        else (
            f"{kind}s {', '.join(names)} are not all named as NAME__INDEX"
            + (" or as arguments of forward()" if kind == "input" else "")
            + f": they are taken for the model's {kind}s in the order of the config"
        )
    )
    return Places(tuple(range(len(names))), remark)


def _index(name: str) -> int | None:
    """The INDEX of NAME__INDEX; None for other names. As in Triton the first delimiter counts."""
    _, delimiter, index = name.partition(DELIMITER)
    if not delimiter or (index and not (index.isascii() and index.isdigit())):
        return None
    return int(index or 0)
