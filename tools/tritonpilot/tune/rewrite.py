"""How does a setting get into the service file without touching what a person wrote around it?

    new = rewritten(path.read_text(), service, setting.applied(service))     # comments, order and style stay
    print(difference(path, new))
    check_all(checked(path, new, name, setting), services)                  # pipelines over it can still be built
    write(path, new)

Only values that differ are replaced, where they stand; a key that is not there yet is added to the mapping that it belongs to.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tritonpilot import build
from tritonpilot.errors import ModelError, RepositoryError, SpecError
from tritonpilot.model_config import Target
from tritonpilot.setting import Setting, find
from tritonpilot.spec import Service, Step, load_service

Place = tuple[str | int, ...]  # where a value stands: ("classes", 0, "max_queue_size")

#: What a setting may change, of a service and of a step of a pipeline.
CHANGED = ("batching", "instances", "classes", "warmup", "model")
#: What of a pipeline's step stands with the pipeline.
OF_PIPELINE = ("classes",)


def rewritten(text: str, before: Service, after: Service) -> str:
    """The text of the service file of `before` with the values of `after`: a service, or the model of a pipeline.

    Raises SpecError where the result would not say what was meant: then the file has to be changed by hand.
    """
    for place, value in _changes(before, after):
        text = _with_value(text, place, value, before.path)
    return text


def checked(path: Path, text: str, name: str, setting: Setting) -> Service:
    """The service that the new text says. Raises SpecError when that is not the setting, or no service file at all."""
    with tempfile.TemporaryDirectory(prefix="tritonpilot-tune-") as folder:
        aside = Path(folder, path.name)
        aside.write_text(text, encoding="utf-8")
        said = load_service(aside)
    found = Setting.of(find([said], name))
    if found != replace(setting, max_queue_sizes={**found.max_queue_sizes, **setting.max_queue_sizes}):
        raise SpecError(
            f"{path} could not be changed so that it says {setting.describe()}; it would say {found.describe()}. "
            "It is as it was. Change it by hand."
        )
    said._path = path
    return said


def check_all(said: Service, services: Sequence[Service], target: Target = "auto") -> None:
    """Raises SpecError when the changed service, or a pipeline over it, can be built no more.

    Services that cannot be built now either, and those whose model files are not made yet, are left out.
    """
    changed = [said if each.service == said.service else each for each in services]
    for before, after in zip(services, changed, strict=True):
        if after is not said and said not in build.with_members([after], build.by_name(changed)):
            continue
        try:
            build.plan([after], target, changed)
        except ModelError:
            continue
        except SpecError as error:
            if _can_be_built(before, services, target):
                raise SpecError(
                    f"With the new setting {after.service} cannot be built any more: {error} {said.path} is as it was."
                ) from error


def _can_be_built(service: Service, services: Sequence[Service], target: Target) -> bool:
    try:
        build.plan([service], target, services)
    except SpecError:
        return False
    return True


def difference(path: Path, text: str) -> str:
    """The change as a unified diff; empty when there is none."""
    before = path.read_text(encoding="utf-8")
    return "".join(
        difflib.unified_diff(before.splitlines(True), text.splitlines(True), str(path), f"{path} (tuned)", n=2)
    )


def write(path: Path, text: str) -> None:
    """Write the file so that a reader sees the old one or the new one. Raises RepositoryError when its folder cannot be written."""
    try:
        mode = path.stat().st_mode & 0o777
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}-", delete=False, encoding="utf-8"
        ) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).chmod(mode)
                Path(file.name).replace(path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        raise RepositoryError(
            f"{path} cannot be written: {error}. It is as it was. Make its folder writable."
        ) from error


def _changes(before: Service, after: Service) -> Iterator[tuple[Place, Any]]:
    """(place, new value) of what differs; a list that changes its length, or holds plain values, is replaced as a whole."""
    base, step = _step_of(before)
    keys = set(CHANGED) - ({"model"} if Setting.of(before).precision == Setting.of(after).precision else set())
    old, new = (service.model_dump(mode="json", include=keys) for service in (before, after))
    for key in (key for key in CHANGED if key in keys):
        if key == "batching" and step is not None and step.batching is None and old[key] != new[key]:
            # What the step has from its pipeline; of its own it needs all of it.
            yield (*base, key), {name: value for name, value in new[key].items() if value or name == "queue_delay_us"}
            continue
        yield from _differences(old[key], new[key], (key,) if key in OF_PIPELINE else (*base, key))


def _step_of(service: Service) -> tuple[Place, Step | None]:
    """Where the values of the service stand in its file: at the top, or with the step that it comes from, and that step."""
    if service.written_as == service.service:
        return (), None
    pipeline = load_service(service.path).pipeline
    for number, step in enumerate(pipeline.steps if pipeline is not None else []):
        if step.model is not None and f"{service.written_as}_{step.name}" == service.service:
            return ("pipeline", "steps", number), step
    raise SpecError(
        f"{service.path} has no step that {service.service} comes from. Nothing was changed. Change it by hand."
    )


def _differences(old: Any, new: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in new:
            yield from _differences(old.get(key), new[key], (*place, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and _holds_mappings(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _differences(one, other, (*place, number))
    elif old != new:
        yield place, new


def _holds_mappings(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _with_value(text: str, place: Place, value: Any, path: Path) -> str:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        raise SpecError(f"{path} is no mapping any more. Nothing was changed.")
    parent: yaml.Node = root
    for depth, part in enumerate(place):
        found = _child(parent, part)
        if found is None:
            if value is None:
                return text
            if isinstance(part, int):  # a list that the file leaves out is added by its key
                raise SpecError(f"{path}: {_dotted(place)} is not there to be changed. Nothing was changed.")
            return _added(text, parent, part, _wrapped(place[depth + 1 :], value), path)
        if depth == len(place) - 1:
            return _replaced(text, parent, part, found, value)
        parent = found
    raise AssertionError("a place has one part at least")


def _child(node: yaml.Node, part: str | int) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        child: yaml.Node = node.value[part]
        return child
    return None


def _replaced(text: str, parent: yaml.Node, part: str | int, node: yaml.Node, value: Any) -> str:
    if value is None:  # back to the default: the key goes, with its line where it has one of its own
        assert isinstance(parent, yaml.MappingNode)
        key = next(key for key, _ in parent.value if key.value == part)
        return _without(text, parent, key, node)
    start = node.start_mark.index
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and isinstance(parent, yaml.MappingNode):
        key = next(key for key, _ in parent.value if key.value == part)
        return text[: key.end_mark.index] + f": {_flow(value)}" + text[_end(node) :]
    return text[:start] + _flow(value) + text[_end(node) :]


def _without(text: str, parent: yaml.MappingNode, key: yaml.Node, node: yaml.Node) -> str:
    start, end = key.start_mark.index, _end(node)
    if parent.flow_style:
        before = text[:start].rstrip(" \n")
        after = text[end:].lstrip(" \n")
        if before.endswith(","):
            return before[:-1] + text[end:]
        return text[:start] + (after[1:].lstrip(" ") if after.startswith(",") else text[end:])
    line = text.rfind("\n", 0, start) + 1
    rest = text.find("\n", end)
    return text[:line] + (text[rest + 1 :] if rest >= 0 else "")


def _added(text: str, parent: yaml.Node, key: str, value: Any, path: Path) -> str:
    assert isinstance(parent, yaml.MappingNode)
    said = f"{key}: {_flow(value)}"
    if parent.flow_style:
        end = parent.end_mark.index - 1  # before the closing brace
        body = text[:end].rstrip(" ")
        return body + ("" if body.endswith("{") else ", ") + said + text[len(body) : end] + text[end:]
    if not parent.value:
        raise SpecError(f"{path}: there is nothing to add {key} to. Nothing was changed. Add it by hand.")
    line_end = text.find("\n", _end(parent))  # a comment behind the last value stays with it
    line_end = len(text) if line_end < 0 else line_end
    indent = " " * parent.value[0][0].start_mark.column
    return f"{text[:line_end]}\n{indent}{said}{text[line_end:]}"


def _end(node: yaml.Node) -> int:
    """Where the last value inside ends; the end of a block collection itself lies behind the comments that follow it."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _wrapped(rest: Place, value: Any) -> Any:
    """The value inside the mappings that the file leaves out."""
    for part in reversed(rest):
        value = (
            [value] if isinstance(part, int) else {part: value}
        )  # of a list that is left out the first item is meant
    return value


def _flow(value: Any) -> str:
    """The value in one line of YAML."""
    return (
        str(yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False))
        .removesuffix("\n")
        .removesuffix("\n...")
    )


def _dotted(place: Place) -> str:
    return ".".join(str(part) for part in place)
