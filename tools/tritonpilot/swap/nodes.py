"""A change on several Tritons, one after the other: all have it in the end, or none.

    nodes = [node(text) for text in ("10.0.0.1:8001,10.0.0.1:8000,/srv/one/model_repository", ...)]
    check(nodes)
    done = one_by_one(nodes, lambda node: swap(node, ...), lambda node: rollback(node, ...), say)

Callers behind a balancer get answers of the old version from some nodes and of the new one from others meanwhile; each answer is of
one version, for nodes share nothing. No node is taken out of the balancer: it serves throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from tritonpilot.errors import PilotError, SpecError
from tritonpilot.swap.terms import Node, ServedAlreadyError

T = TypeVar("T")


def node(text: str) -> Node:
    """A node as it is written: gRPC address, HTTP address, folder of its repository, with commas between. Raises SpecError."""
    parts = [part.strip() for part in text.split(",", 2)]
    if len(parts) != 3 or not all(parts) or not all(_is_address(part) for part in parts[:2]):
        raise SpecError(
            f"{text!r} is no node. Nothing was changed. Write it as GRPC,HTTP,REPOSITORY: "
            "10.0.0.1:8001,10.0.0.1:8000,/srv/one/model_repository."
        )
    return Node(grpc=parts[0], http=parts[1], repository=Path(parts[2]))


def check(nodes: Sequence[Node]) -> None:
    """Raise SpecError when two nodes share an address or a repository, or a repository is not there."""
    for what, values in (
        ("gRPC address", [each.grpc for each in nodes]),
        ("HTTP address", [each.http for each in nodes]),
        ("repository", [str(each.repository.resolve()) for each in nodes]),
    ):
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise SpecError(
                f"Two nodes have the same {what}, {twice}. Nothing was changed. Name each node once, and give each a repository of "
                "its own: what is on its disk must be what it serves, also while the others serve something else."
            )
    for each in nodes:
        if not each.repository.is_dir():
            raise SpecError(
                f"Node {each.grpc} has no model repository at {each.repository}. Nothing was changed. Mount it here, or run the "
                "command on that machine."
            )


def one_by_one(
    nodes: Sequence[Node], change: Callable[[Node], T], undo: Callable[[Node], None], say: Callable[[str], None]
) -> list[T | None]:
    """Change every node in turn. The first failure stops it: that node has undone its own part, and those before are undone here,
    the last one first. One that serves the new files already, from a run that was killed, is passed over: None.

    Raises an error of the same kind as the failed node's, which says what every node serves now. Ctrl-C is a failure too.
    """
    done: list[Node] = []
    results: list[T | None] = []
    for number, each in enumerate(nodes, 1):
        say(f"node {number} of {len(nodes)}: {each.grpc}")
        try:
            results.append(change(each))
            done.append(each)
        except ServedAlreadyError as served:
            say(f"node {each.grpc}: {served}")
            results.append(None)
        except PilotError as failed:
            passed = [one for one, found in zip(nodes, results, strict=False) if found is None]
            truth = _undone(done, undo, say, passed, nodes[number:])
            raise type(failed)(f"Node {each.grpc}: {failed} {truth}") from failed
        except BaseException:
            _undone(done, undo, say, [], nodes[number:])
            raise
    return results


def _undone(
    done: Sequence[Node],
    undo: Callable[[Node], None],
    say: Callable[[str], None],
    passed: Sequence[Node],
    untouched: Sequence[Node],
) -> str:
    """Undo the nodes that are done; says what is true now."""
    back, stuck = [], []
    for each in reversed(done):
        say(f"node {each.grpc}: going back")
        try:
            undo(each)
        except PilotError as failed:
            say(f"node {each.grpc}: {failed}")
            stuck.append((each, failed))
        else:
            back.append(each)
    parts = [
        f"Gone back: {_names(back)}." if back else "",
        f"Not touched: {_names(untouched)}." if untouched else "",
        f"Served the new version before, and do so still: {_names(passed)}." if passed else "",
        *(f"Node {each.grpc} could not go back and serves the new version: {failed}" for each, failed in stuck),
    ]
    return " ".join(part for part in parts if part)


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(each.grpc for each in nodes)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and "/" not in host and port.isdecimal() and 0 < int(port) < 65536
