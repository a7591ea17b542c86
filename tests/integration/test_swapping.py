"""A new model takes the place of the served one under load: of a model, of an ensemble's members, of a driver's."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf import generations
from perf.generations import Call, Load, Rate, Subject
from perf.swapping import Ran, Site, switched
from tritonpilot import build
from tritonpilot.repository import held, sha256, versions
from tritonpilot.spec import load_services
from tritonpilot.swap.journal import Journal

pytestmark = [pytest.mark.server, pytest.mark.slow]

DRIVEN = """\
service: driven
pipeline:
  samples: samples.npz
  inputs: [{name: x, data_type: FP32, dims: [8]}]
  outputs: [{name: y, data_type: FP32, dims: [8]}, {name: of_first, data_type: FP32, dims: [1]}, {name: of_second, data_type: FP32, dims: [1]}]
  driver: {backend: python, file: driver.py}
  steps:
    - {name: first, model: {file: first.onnx, samples: samples.npz}}
    - {name: second, model: {file: second.onnx}}
batching: {max_batch_size: 16}
"""  # noqa: E501
DRIVER = """
from dataclasses import dataclass

from pilotlib.parameters import parameter
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend


@dataclass(frozen=True)
class Parameters:
    first: str = parameter("", "the model that is called first")
    second: str = parameter("", "the model that is called then")


class Driver(Backend):
    parameters = Parameters

    def set_up(self, context):
        self._infer = context.infer
        self._first, self._second = context.parameters.first, context.parameters.second

    def decode(self, inputs):
        return inputs["x"]

    def predict(self, items):
        return [self._one(x) for x in items]

    def encode(self, result):
        return result

    def _one(self, x):
        first = self._infer(self._first, {"x": x}, ["y", "mark"])
        second = self._infer(self._second, {"x": first["y"]}, ["y", "mark"])
        return {"y": second["y"], "of_first": first["mark"], "of_second": second["mark"]}


TritonPythonModel = triton_model(Driver)
"""


def driven(folder: Path) -> Subject:
    """The networks of `pair`, called by a driver."""
    pair = generations.pair(folder / "other")
    place = folder / "models" / "driven"
    (folder / "other" / "models" / "pair").rename(place)
    (place / "service.yaml").write_text(DRIVEN)
    (place / "driver.py").write_text(DRIVER)
    sources = {f"driven_{step}": place / f"{step}.onnx" for step in ("first", "second")}
    return Subject("driven", tuple(sources), sources, pair.questions)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with switched([generations.ctr, generations.pair, driven], lambda _: None, exit_timeout_s=3) as found:
        yield found
        found.server.check_alive()


def rates(site: Site, service: str) -> list[Rate]:
    return [Rate(site.subjects[service], over, 30.0) for over in ("http", "grpc")]


def swapped(site: Site, service: str, generation: int) -> tuple[Ran, list[Call], list[Call]]:
    """The command under load, the calls during it, and those after it."""
    site.files(service, generation)
    with Load(site.server.endpoints, rates(site, service)) as load:
        load.wait_for_answers()
        ran = site.swap(service, generation, ["--max-slower", "20"])
        during = load.take()
        time.sleep(0.2)  # what was under way
        load.take()
        time.sleep(0.5)
    return ran, during, load.take()


def ready(site: Site, model: str) -> list[str]:
    with site.server.control() as control:
        return [each.version for each in control.index() if each.name == model and each.state == "READY"]


def unchanged_by_build(site: Site) -> bool:
    plans = build.plan(load_services(site.folder / "models"))
    return not any(build.check(site.repository, plans))


PIPELINES = ["pair", "driven"]
SERVICES = ["ctr", *(pytest.param(each, marks=pytest.mark.proof) for each in PIPELINES)]


@pytest.mark.parametrize("service", SERVICES)
def test_nobody_notices_a_swap_but_by_the_new_answers(site: Site, service: str) -> None:
    ran, during, after = swapped(site, service, 1)

    assert [call.error for call in during + after if call.error] == []
    assert {call.generations for call in during} <= {frozenset({0}), frozenset({1})}
    assert {call.generations for call in after} == {frozenset({1})}
    assert ran.told["new"] == dict.fromkeys(site.subjects[service].members, 2)
    assert site.left() == []
    for model in site.subjects[service].members:
        assert ready(site, model) == ["2"]
        assert versions(site.repository, model) == [1, 2]
    assert unchanged_by_build(site)  # a build leaves the new model where it is


@pytest.mark.parametrize("service", SERVICES)
def test_a_rollback_serves_the_old_model_again(site: Site, service: str) -> None:
    with Load(site.server.endpoints, rates(site, service)) as load:
        load.wait_for_answers()
        ran = site.run("rollback", service)
        assert ran.code == 0, ran.said
        during = load.take()
        time.sleep(0.5)
    after = load.take()[10:]

    assert [call.error for call in during + after if call.error] == []
    assert {call.generations for call in during} <= {frozenset({0}), frozenset({1})}
    assert after[-1].generations == {0}
    for model in site.subjects[service].members:
        assert ready(site, model) == ["1"]
    assert unchanged_by_build(site)


@pytest.mark.proof
@pytest.mark.parametrize("service", PIPELINES)
def test_the_swap_after_a_rollback_takes_a_version_that_is_new(site: Site, service: str) -> None:
    ran, _, after = swapped(site, service, 2)

    assert ran.told["old"] == dict.fromkeys(site.subjects[service].members, 1)
    assert ran.told["new"] == dict.fromkeys(site.subjects[service].members, 3)
    assert {call.generations for call in after} == {frozenset({2})}


def test_the_journal_says_what_was_swapped(site: Site) -> None:
    ran = site.run("swap", "ctr", ["--history"])
    told = Journal(site.repository, "ctr").lines()

    assert ran.code == 0
    assert [line["kind"] for line in told if line["step"] == "begin"][:2] == ["swap", "rollback"]
    assert told[-1]["step"] == "end"
    assert Journal(site.repository, "ctr").unfinished() is None


def test_a_build_publishes_a_file_of_the_service_that_changed_since(site: Site) -> None:
    source = site.subjects["ctr"].sources["ctr"]
    before = source.read_bytes()
    try:
        source.write_bytes(site.subjects["ctr"].files(9, site.folder)["ctr"].read_bytes())
        (folder, *_) = build.folders(build.plan(load_services(site.folder / "models", ["ctr"])), site.repository)
        assert folder.held is None
        assert "specific" not in folder.config_text
    finally:
        source.write_bytes(before)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.onnx"], "no file nowhere.onnx"),
        (["other=x.onnx"], "no model other"),
        (["{file}", "--sha256", "0" * 64], "has the SHA-256"),
        (["{file}", "--tolerance", "five"], "neither a number"),
        ([], "No new model was named"),
    ],
)
def test_wrong_arguments_change_nothing(site: Site, arguments: list[str], said: str) -> None:
    file = site.subjects["ctr"].files(5, site.folder)["ctr"]
    before = held(site.repository, "ctr"), versions(site.repository, "ctr")

    ran = site.run("swap", "ctr", [each.format(file=file) for each in arguments])

    assert ran.code in (3, 4)
    assert said in ran.said
    assert (held(site.repository, "ctr"), versions(site.repository, "ctr")) == before
    assert site.left() == []


def test_a_pipeline_is_told_which_member_a_file_is_for(site: Site) -> None:
    ran = site.run("swap", "pair", [str(site.subjects["ctr"].sources["ctr"])])

    assert ran.code == 3
    assert "pair is a pipeline of pair_first, pair_second" in ran.said


def test_a_dry_run_names_the_steps_and_touches_nothing(site: Site) -> None:
    files = site.files("pair", 7)
    before = sorted(path for path in site.repository.rglob("*"))

    ran = site.run("swap", "pair", [*files, "--dry-run"])

    assert ran.code == 0, ran.said
    steps = [each.partition(":")[0] for each in ran.told["would"]]
    assert steps[2:] == [
        "publish",
        "load",
        "warm up",
        "golden",
        "latency",
        "widen",
        "promote",
        "verify",
        "settle",
        "drain",
        "retire",
    ]
    assert sorted(path for path in site.repository.rglob("*")) == before


def test_a_model_whose_answers_are_wrong_is_taken_back(site: Site, tmp_path: Path) -> None:
    bad = tmp_path / "bad.onnx"
    generations.write_generation(site.subjects["ctr"].sources["ctr"], bad, 3000)  # minus twice what is right
    before = {path: sha256(path) for path in (site.repository / "ctr").rglob("*") if path.is_file()}

    ran = site.run("swap", "ctr", [str(bad)])

    assert ran.code == 4
    assert "ctr was not changed: golden:" in ran.said
    assert "nothing is left of the new one" in ran.said
    assert site.left() == []
    assert {path: sha256(path) for path in (site.repository / "ctr").rglob("*") if path.is_file()} == before
    assert json.loads(Journal(site.repository, "ctr").file.read_text().splitlines()[-1])["result"] == "taken back"
