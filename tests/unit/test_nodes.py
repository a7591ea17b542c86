"""Nodes are changed one after the other, and all or none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tritonpilot.errors import ModelError, ServerError, SpecError
from tritonpilot.swap.nodes import check, node, one_by_one
from tritonpilot.swap.terms import Node, ServedAlreadyError


def three() -> list[Node]:
    return [Node(f"10.0.0.{number}:8001", f"10.0.0.{number}:8000", Path(f"/srv/{number}")) for number in (1, 2, 3)]


class Changes:
    """What was done to which node; `fails` raise."""

    def __init__(self, fails: dict[str, BaseException] | None = None, stuck: set[str] | None = None) -> None:
        self.done: list[str] = []
        self.said: list[str] = []
        self.fails = fails or {}
        self.stuck = stuck or set()

    def change(self, each: Node) -> str:
        if each.grpc in self.fails:
            raise self.fails[each.grpc]
        self.done.append(f"change {each.grpc}")
        return each.grpc

    def undo(self, each: Node) -> None:
        if each.grpc in self.stuck:
            raise ServerError("it is gone.")
        self.done.append(f"undo {each.grpc}")

    def run(self) -> list[str | None]:
        return one_by_one(three(), self.change, self.undo, self.said.append)


def test_nodes_are_changed_in_their_order() -> None:
    changes = Changes()

    assert changes.run() == ["10.0.0.1:8001", "10.0.0.2:8001", "10.0.0.3:8001"]
    assert changes.done == [f"change 10.0.0.{number}:8001" for number in (1, 2, 3)]


def test_the_first_failure_stops_it_and_those_before_go_back_the_last_one_first() -> None:
    changes = Changes({"10.0.0.3:8001": ModelError("its answers are NaN.")})

    with pytest.raises(
        ModelError,
        match=r"Node 10\.0\.0\.3:8001: its answers are NaN\. Gone back: 10\.0\.0\.2:8001, 10\.0\.0\.1:8001\.",
    ):
        changes.run()

    assert changes.done[2:] == ["undo 10.0.0.2:8001", "undo 10.0.0.1:8001"]


def test_a_node_that_cannot_go_back_is_named_and_the_others_go_back_nevertheless() -> None:
    changes = Changes({"10.0.0.3:8001": ModelError("no.")}, stuck={"10.0.0.2:8001"})

    with pytest.raises(
        ModelError, match=r"Node 10\.0\.0\.2:8001 could not go back and serves the new version: it is gone\."
    ):
        changes.run()

    assert changes.done[-1] == "undo 10.0.0.1:8001"


def test_what_was_not_reached_is_said() -> None:
    changes = Changes({"10.0.0.1:8001": ServerError("it does not listen.")})

    with pytest.raises(ServerError, match=r"Not touched: 10\.0\.0\.2:8001, 10\.0\.0\.3:8001\."):
        changes.run()

    assert changes.done == []


def test_a_node_that_serves_the_files_already_is_passed_over_and_left_as_it_is() -> None:
    served = {"10.0.0.1:8001": ServedAlreadyError("it does already.")}
    changes = Changes(dict(served))

    assert changes.run() == [None, "10.0.0.2:8001", "10.0.0.3:8001"]

    changes = Changes({**served, "10.0.0.3:8001": ServerError("it is gone.")})
    with pytest.raises(
        ServerError,
        match=r"Gone back: 10\.0\.0\.2:8001\. Served the new version before, and do so still: 10\.0\.0\.1:8001\.",
    ):
        changes.run()
    assert changes.done == ["change 10.0.0.2:8001", "undo 10.0.0.2:8001"]


def test_ctrl_c_takes_back_too() -> None:
    changes = Changes({"10.0.0.2:8001": KeyboardInterrupt()})

    with pytest.raises(KeyboardInterrupt):
        changes.run()

    assert changes.done == ["change 10.0.0.1:8001", "undo 10.0.0.1:8001"]


def test_a_node_is_written_as_three_words(tmp_path: Path) -> None:
    assert node(f"[::1]:8001, localhost:8000,{tmp_path}/a,b") == Node("[::1]:8001", "localhost:8000", tmp_path / "a,b")


@pytest.mark.parametrize(
    "text",
    ["", "a:1,b:2", "a:1,b:2,", "a,b:2,/r", "a:1,b:0,/r", "a:1,b:70000,/r", "http://a:1,b:2,/r", ",,", "a:1,b:x,/r"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is no node"):
        node(text)


def test_nodes_that_share_something_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    (tmp_path / "link").symlink_to(one)

    check([Node("a:1", "a:2", one), Node("b:1", "b:2", two)])
    for other, what in (
        (Node("b:1", "b:2", tmp_path / "link"), "repository"),
        (Node("a:1", "b:2", two), "gRPC address"),
        (Node("b:1", "a:2", two), "HTTP address"),
    ):
        with pytest.raises(SpecError, match=f"the same {what}"):
            check([Node("a:1", "a:2", one), other])


def test_a_repository_that_is_not_mounted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=f"no model repository at {tmp_path}/none"):
        check([Node("a:1", "a:2", tmp_path), Node("b:1", "b:2", tmp_path / "none")])
