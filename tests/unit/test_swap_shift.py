"""What a swap would change, what its journal remembers, and what a build makes of it afterwards."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tritonpilot import build, pins, repository
from tritonpilot.errors import ModelError, RepositoryError, SpecError
from tritonpilot.model_config import parse
from tritonpilot.repository import CONFIG_FILE, SWAPPED_FILE, Held, held, held_text, put, rewrite, versions
from tritonpilot.spec import load_services
from tritonpilot.swap.journal import FINISHED, TAKEN_BACK, Journal, told
from tritonpilot.swap.shift import Shift, of_rollback, of_swap

ONE = """\
service: one
model: {file: one.onnx}
batching: {max_batch_size: 4}
"""
TWO = """\
service: two
pipeline:
  inputs: [{name: x, data_type: FP32, dims: [3]}]
  outputs: [{name: y, data_type: FP32, dims: [3]}]
  steps:
    - {name: first, model: {file: first.onnx}, outputs: {y: half}}
    - {name: second, model: {file: second.onnx}, inputs: {x: half}}
batching: {max_batch_size: 4}
"""


def network(file: Path, factor: float, output: str = "y", width: int = 3) -> Path:
    shape: list[str | int] = ["b", width]
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "f"], [output])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.array(factor, np.float32), "f")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(file))
    return file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of both services, published from tmp_path/models."""
    for name, text, files in (("one", ONE, ("one",)), ("two", TWO, ("first", "second"))):
        place = tmp_path / "models" / name
        place.mkdir(parents=True)
        (place / "service.yaml").write_text(text)
        for number, file in enumerate(files, 1):
            network(place / f"{file}.onnx", number)
    publish(tmp_path / "model_repository")
    return tmp_path / "model_repository"


def publish(root: Path) -> dict[str, repository.Change]:
    plans = build.plan(load_services(root.parent / "models"))
    root.mkdir(exist_ok=True)
    return {change.name: change for change in repository.publish(root, build.folders(plans, root))}


def put_in_place(root: Path, model: str, version: int, file: Path, steps: dict[str, int] | None = None) -> None:
    """What a swap leaves: the version, the config that serves it, and the note."""
    before = repository.manifest(root, model, 1)

    def edit(folder: Path) -> None:
        repository.write_version(folder / str(version), {"model.onnx": file})
        text = (folder / CONFIG_FILE).read_text()
        put(folder / CONFIG_FILE, pins.pinned(text, [version], steps or {}).encode())
        put(folder / SWAPPED_FILE, held_text(Held(version, before)))

    rewrite(root, {model: edit})


def config(root: Path, model: str):
    return parse((root / model / CONFIG_FILE).read_text(), model)


# -- of a swap ---------------------------------------------------------------------------------------------------------


def test_a_new_file_becomes_the_next_version(root: Path, tmp_path: Path) -> None:
    new = network(tmp_path / "new.onnx", 5)

    shift, files = of_swap(root, "one", [str(new)])

    assert (shift.old, shift.new) == ({"one": 1}, {"one": 2})
    assert files == {"one": {"model.onnx": new}}
    assert not shift.is_pipeline
    assert shift.names == {"one": "one__next"}
    assert shift.instead_of["one"] == repository.manifest(root, "one", 1)


@pytest.mark.parametrize("name", ["first", "two_first"])
def test_a_member_may_be_named_as_step_and_as_model(root: Path, tmp_path: Path, name: str) -> None:
    new = network(tmp_path / "new.onnx", 5)

    shift, _ = of_swap(root, "two", [f"{name}={new}"])

    assert shift.new == {"two_first": 2}
    assert shift.names == {"two_first": "two_first__next", "two": "two__next"}


def test_members_get_one_version_together(root: Path, tmp_path: Path) -> None:
    network(tmp_path / "models" / "two" / "first.onnx", 7)
    publish(root)  # version 2 of two_first
    new = network(tmp_path / "new.onnx", 5)

    shift, _ = of_swap(root, "two", [f"first={new}", f"second={new}"])

    assert shift.old == {"two_first": 2, "two_second": 1}
    assert shift.new == {"two_first": 3, "two_second": 3}


def test_the_checksum_may_be_given(root: Path, tmp_path: Path) -> None:
    new = network(tmp_path / "new.onnx", 5)

    of_swap(root, "one", [str(new)], [repository.sha256(new).upper()])
    with pytest.raises(ModelError, match="has the SHA-256"):
        of_swap(root, "one", [str(new)], ["0" * 64])
    with pytest.raises(SpecError, match="which gets no file"):
        of_swap(root, "two", [f"first={new}"], [f"second={'0' * 64}"])


@pytest.mark.parametrize(
    ("service", "given", "error", "said"),
    [
        ("one", ["{none}"], ModelError, "There is no file"),
        ("one", ["{shape}"], ModelError, r"serves the input x \(FP32 \[3\]\), and .* has it as FP32 \[-1, 4\]"),
        ("one", ["{output}"], ModelError, "serves the output y .* has no such"),
        ("one", ["{same}"], ModelError, "serves these files already, one version 1"),
        ("one", ["{garbage}"], ModelError, "garbage.onnx"),
        ("one", ["{good}", "{good}"], SpecError, "was given two files"),
        ("one", [], SpecError, "No file was given"),
        ("two", ["{good}"], SpecError, "two is a pipeline of two_first, two_second"),
        ("two", ["third={good}"], SpecError, "two has no model third"),
        ("onne", ["{good}"], RepositoryError, "There is no model onne in .*one"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(
    root: Path, tmp_path: Path, service: str, given: list[str], error: type[Exception], said: str
) -> None:
    (tmp_path / "garbage.onnx").write_bytes(b"no model")
    files = {
        "none": tmp_path / "none.onnx",
        "good": network(tmp_path / "good.onnx", 5),
        "shape": network(tmp_path / "shape.onnx", 5, width=4),
        "output": network(tmp_path / "output.onnx", 5, output="z"),
        "same": tmp_path / "models" / "one" / "one.onnx",
        "garbage": tmp_path / "garbage.onnx",
    }

    with pytest.raises(error, match=said):
        of_swap(root, service, [each.format(**files) for each in given])


def test_a_model_that_serves_several_versions_is_not_swapped(root: Path, tmp_path: Path) -> None:
    new = network(tmp_path / "new.onnx", 5)
    text = (root / "one" / CONFIG_FILE).read_text()
    put(root / "one" / CONFIG_FILE, text.replace("latest", "all").replace("num_versions: 1", "").encode())
    shutil.copytree(root / "one" / "1", root / "one" / "2")

    with pytest.raises(SpecError, match="serves several versions at once"):
        of_swap(root, "one", [str(new)])


def test_the_journal_gives_a_shift_back(root: Path, tmp_path: Path) -> None:
    shift, _ = of_swap(root, "two", [f"first={network(tmp_path / 'new.onnx', 5)}"])

    assert Shift.of(json.loads(json.dumps(shift.as_dict()))) == shift


# -- of a rollback -----------------------------------------------------------------------------------------------------


def test_a_rollback_goes_to_the_version_before(root: Path, tmp_path: Path) -> None:
    for version in (2, 3):
        put_in_place(root, "one", version, network(tmp_path / f"{version}.onnx", version))
    journal = Journal(root, "one")

    assert of_rollback(root, "one", journal).new == {"one": 2}
    assert of_rollback(root, "one", journal, to=1).new == {"one": 1}
    with pytest.raises(RepositoryError, match="has no version 7 to go back to"):
        of_rollback(root, "one", journal, to=7)


def test_a_version_that_was_damaged_is_not_gone_back_to(root: Path, tmp_path: Path) -> None:
    put_in_place(root, "one", 2, network(tmp_path / "2.onnx", 2))
    (root / "one" / "1" / "model.onnx").write_bytes(b"")

    with pytest.raises(RepositoryError, match=r"model\.onnx of one version 1 is not what its manifest says"):
        of_rollback(root, "one", Journal(root, "one"))


def test_members_go_back_to_what_they_served_together(root: Path, tmp_path: Path) -> None:
    shift, _ = of_swap(root, "two", [f"second={network(tmp_path / 'new.onnx', 5)}"])
    put_in_place(root, "two_second", 2, tmp_path / "new.onnx")
    journal = Journal(root, "two")
    with pytest.raises(RepositoryError, match="there is: none"):
        of_rollback(root, "two", journal)
    with journal.locked():
        journal.end(journal.begin(shift.as_dict()), FINISHED)

    back = of_rollback(root, "two", journal)

    assert (back.old, back.new) == ({"two_second": 2}, {"two_second": 1})
    assert back.names == {}


# -- what a build makes of it ------------------------------------------------------------------------------------------


def test_a_build_leaves_a_swapped_model_until_its_own_file_changes(root: Path, tmp_path: Path) -> None:
    put_in_place(root, "one", 2, network(tmp_path / "new.onnx", 5))

    change = publish(root)["one"]
    assert not change
    assert change.describe() == "one: up to date (version 2, which a swap put in place of the service's file)"
    assert list(config(root, "one").version_policy.specific.versions) == [2]

    network(tmp_path / "models" / "one" / "one.onnx", 9)
    assert publish(root)["one"].version == 3
    assert held(root, "one") is None
    assert config(root, "one").version_policy.latest.num_versions == 1


def test_a_build_changes_the_config_of_a_swapped_model_and_keeps_its_version(root: Path, tmp_path: Path) -> None:
    put_in_place(root, "one", 2, network(tmp_path / "new.onnx", 5))
    file = tmp_path / "models" / "one" / "service.yaml"
    file.write_text(file.read_text().replace("max_batch_size: 4", "max_batch_size: 8"))

    change = publish(root)["one"]

    assert (change.writes_config, change.publishes_version) == (True, False)
    assert config(root, "one").max_batch_size == 8
    assert list(config(root, "one").version_policy.specific.versions) == [2]


def test_a_swapped_file_that_is_damaged_is_replaced_by_the_services_own(root: Path, tmp_path: Path) -> None:
    put_in_place(root, "one", 2, network(tmp_path / "new.onnx", 5))
    (root / "one" / "2" / "model.onnx").write_bytes(b"")

    assert publish(root)["one"].version == 3
    assert versions(root, "one") == [1, 2, 3]


def test_a_pipeline_loses_its_pins_with_a_member(root: Path, tmp_path: Path) -> None:
    new = network(tmp_path / "new.onnx", 5)
    for member in ("two_first", "two_second"):
        put_in_place(root, member, 2, new)
    steps = {"two_first": 2, "two_second": 2}

    def pin(folder: Path) -> None:
        put(folder / CONFIG_FILE, pins.pinned((folder / CONFIG_FILE).read_text(), [1], steps).encode())
        put(folder / SWAPPED_FILE, held_text(Held(1, {}, steps)))

    rewrite(root, {"two": pin})
    assert not any(publish(root).values())
    assert [step.model_version for step in config(root, "two").ensemble_scheduling.step] == [2, 2]

    network(tmp_path / "models" / "two" / "first.onnx", 9)
    changes = publish(root)

    assert changes["two_first"].version == 3
    assert not changes["two_second"]  # its own file is as it was
    assert [step.model_version for step in config(root, "two").ensemble_scheduling.step] == [-1, -1]


def test_candidates_are_no_models(root: Path) -> None:
    shutil.copytree(root / "one", root / "one__next")

    assert repository.models(root) == ["one", "two", "two_first", "two_second"]


# -- pins --------------------------------------------------------------------------------------------------------------

DRIVER = """\
name: "d"
parameters { key: "det" value { string_value: "d_det" } }
parameters { key: "rec" value { string_value: "d_rec" } }
parameters { key: "pilot_steps" value { string_value: "d_det,d_rec" } }
parameters { key: "pilot_cache" value { string_value: "max_mb:1" } }
"""


def test_a_driver_is_told_versions_by_a_parameter() -> None:
    found = parse(pins.pinned(DRIVER, [1], {"d_det": 4}), "d")

    assert pins.step_versions(found) == {"d_det": 4}
    assert pins.step_versions(parse(pins.pinned(pins.pinned(DRIVER, [1], {"d_det": 4}), [1], {"d_rec": 5}), "d")) == {
        "d_det": 4,
        "d_rec": 5,
    }
    assert pins.called(found) == ["d_det", "d_rec"]


def test_a_candidate_calls_candidates_and_otherwise_what_is_served() -> None:
    driver = parse(pins.pinned(DRIVER, [1], {"d_det": 4, "d_rec": 5}), "d")

    found = pins.candidate(driver, [1], {"d_det": "d_det__next", "d": "d__next"})

    assert found.name == "d__next"
    assert {key: value.string_value for key, value in found.parameters.items()} == {
        "det": "d_det__next",
        "rec": "d_rec",
        "pilot_steps": "d_det__next,d_rec",
        "pilot_step_versions": "d_rec:5",
    }


# -- the journal -------------------------------------------------------------------------------------------------------

FACTS = {"kind": "swap", "old": {"one": 1}, "new": {"one": 2}}


def test_what_was_not_ended_is_found(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one")
    assert journal.unfinished() is None
    with journal.locked():
        swap = journal.begin(FACTS)
        journal.note(swap, "publish", "begins")
        journal.note(swap, "publish", "done")
        journal.note(swap, "load", "begins")
    left = journal.unfinished()
    assert left is not None
    assert left.steps == {"publish": "done", "load": "begins"}
    assert left.began["new"] == {"one": 2}
    with journal.locked():
        journal.end(swap, TAKEN_BACK, "it was killed")
    assert journal.unfinished() is None
    assert journal.finished() == []


def test_a_line_that_its_writer_did_not_end_does_no_harm(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one")
    with journal.locked():
        swap = journal.begin(FACTS)
    with journal.file.open("a") as file:
        file.write('{"at": 17')
    with journal.locked():
        journal.end(swap, FINISHED)
    assert [line["step"] for line in journal.lines()] == ["begin", "end"]
    assert journal.finished()[0]["new"] == {"one": 2}
    assert "swap  one 1 -> 2  finished after" in told(journal.lines())[0]


def test_one_swap_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path, "one").locked() as journal:
        journal.begin(FACTS)
        with (
            pytest.raises(RepositoryError, match=r"A swap of one is under way, begun by .* \(process \d+\)"),
            Journal(tmp_path, "one").locked(),
        ):
            pytest.fail("it was locked")
        with Journal(tmp_path, "two").locked():
            pass


def test_a_journal_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / ".pilot").write_text("in the way")

    with pytest.raises(RepositoryError, match="cannot be written"), Journal(tmp_path, "one").locked():
        pytest.fail("it was locked")
