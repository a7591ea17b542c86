"""What checks say of candidates beside the served model in a real Triton: good ones pass, each bad one is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from perf import bad_models, subjects
from tritonpilot import build, metrics, repository, samples
from tritonpilot.client import Client
from tritonpilot.client.retry import Policy
from tritonpilot.control import Control
from tritonpilot.quantize.data import Rows
from tritonpilot.server import EmbeddedServer
from tritonpilot.spec import load_services
from tritonpilot.swap.canary import Canary, Shadow, set_shares
from tritonpilot.swap.compare import Tolerance
from tritonpilot.swap.golden import Golden, Labelled, read_stored
from tritonpilot.swap.latency import Latency
from tritonpilot.swap.terms import Candidate, Finding

pytestmark = pytest.mark.server

WIDTH, CLASSES, ROWS = 64, 6, 200
SERVICE = """\
service: {name}
model: {{file: {name}.onnx, samples: samples.npz}}
batching: {{max_batch_size: 16}}
"""
#: Which file is behind each model; `net` is served, the others are candidates.
FILES: Mapping[str, Callable[..., None] | None] = {
    "net": None,
    "net__next": bad_models.good,
    "net_nan": bad_models.nan,
    "net_swapped": bad_models.swapped_classes,
    "net_slow": bad_models.slow,
    "net_wide": bad_models.wrong_shape,
}


def write_network(file: Path, random: np.random.Generator) -> None:
    """x FP32[b,64] -> y FP32[b,6]: class probabilities after layers that take a while."""
    sizes = (WIDTH, 1536, 1536, CLASSES)
    nodes, weights, last = [], [], "x"
    for place in range(len(sizes) - 1):
        weight = random.normal(0, sizes[place] ** -0.5, (sizes[place], sizes[place + 1]))
        weights.append(numpy_helper.from_array(weight.astype(np.float32), f"w{place}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{place}"], [f"z{place}"]))
        is_last = place == len(sizes) - 2
        last = "logits" if is_last else f"a{place}"
        nodes.append(
            helper.make_node("Mul" if is_last else "Tanh", [f"z{place}", "sharp"] if is_last else [f"z{place}"], [last])
        )
    weights.append(numpy_helper.from_array(np.array(4, np.float32), "sharp"))
    nodes.append(helper.make_node("Softmax", ["logits"], ["y"], axis=-1))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", WIDTH])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["b", CLASSES])
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Services `net` and its candidates, as models of one repository."""
    folder = tmp_path_factory.mktemp("checks")
    random = np.random.default_rng(2)
    rows = {"x": random.normal(0, 1, (ROWS, WIDTH)).astype(np.float32)}
    for name, write in FILES.items():
        place = folder / "models" / name
        place.mkdir(parents=True)
        (place / "service.yaml").write_text(SERVICE.format(name=name))
        np.savez(place / "samples.npz", **rows)
        if write is None:
            write_network(place / f"{name}.onnx", random)
        else:
            write(folder / "models" / "net" / "net.onnx", place / f"{name}.onnx", rows)
    root = folder / "model_repository"
    repository.publish(root, build.folders(build.plan(load_services(folder / "models"))))
    return folder


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, Any]:
    return samples.read(folder / "models" / "net" / "samples.npz")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(folder / "model_repository") as running:
        with running.control() as connection:
            connection.load("net__next")  # which no start loads: it is what a killed swap leaves
        yield running
        running.check_alive()


@pytest.fixture
def control(server: EmbeddedServer) -> Iterator[Control]:
    with server.control() as connection:
        yield connection


def candidate(name: str = "net__next") -> Candidate:
    return Candidate("net", "net", {"net": Path("new.onnx")}, 2, 1, {"net": name})


@pytest.fixture(scope="module")
def entry(server: EmbeddedServer) -> Iterator[dict[str, str]]:
    argv = ["--triton-http", server.endpoints.http, "--triton-grpc", server.endpoints.grpc]
    free = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    with subjects.command("entry", [*argv, *free]) as (endpoints, _):
        yield endpoints


@contextmanager
def asked(entry: dict[str, str], rows: Mapping[str, Any]) -> Iterator[list[str]]:
    """Requests through the entry, by turns over HTTP and gRPC, within the block; yields the errors."""
    errors: list[str] = []
    is_over = threading.Event()

    def ask(url: str) -> None:
        with Client(url, retries=Policy(attempts=1)) as client:
            while not is_over.is_set():
                try:
                    client.predict("net", {"x": rows["x"][:2]})
                except Exception as error:  # noqa: BLE001 -- whatever it is: the caller has no answer
                    errors.append(repr(error))
                time.sleep(0.004)

    urls = (entry["http"], f"grpc://{entry['grpc']}")
    threads = [threading.Thread(target=ask, args=(url,)) for url in urls]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.2)
        yield errors
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def quiet(_: str) -> None:
    """Nobody to tell."""


def test_a_good_candidate_passes(control: Control, rows: dict[str, Any]) -> None:
    golden = Golden(rows).run(control, candidate(), quiet)
    assert golden.ok, golden.what
    assert golden.figures["y_difference"] == pytest.approx(0.01, rel=1)
    latency = Latency(rows).run(control, candidate(), quiet)
    assert latency.ok, latency.what
    assert 0.6 < latency.figures["net_slower"] < 1.5


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("net_nan", "NaN or infinity in"),
        ("net_swapped", "are classes swapped?"),
        ("net_wide", "[1, 12] where the old one [1, 6]"),
    ],
)
def test_wrong_answers_are_refused_in_words(control: Control, rows: dict[str, Any], name: str, words: str) -> None:
    found = Golden(rows).run(control, candidate(name), quiet)
    assert not found.ok
    assert words in found.what


def test_a_candidate_of_three_times_the_work_is_refused(control: Control, rows: dict[str, Any]) -> None:
    assert Golden(rows).run(control, candidate("net_slow"), quiet).ok
    found = Latency(rows).run(control, candidate("net_slow"), quiet)
    assert not found.ok, found.what
    assert 1.5 < found.figures["net_slower"] < 4


def test_a_tolerance_decides(control: Control, rows: dict[str, Any]) -> None:
    assert not Golden(rows, tolerances={"y": Tolerance(1e-4)}).run(control, candidate(), quiet).ok
    assert Golden(rows, tolerances={"y": Tolerance(0.02)}).run(control, candidate(), quiet).ok


def test_stored_answers_are_held_against_the_candidate_alone(
    control: Control, rows: dict[str, Any], tmp_path: Path
) -> None:
    with Client(control.endpoint if "://" in control.endpoint else f"grpc://{control.endpoint}") as client:
        answers = np.concatenate(
            [client.predict("net", {"x": rows["x"][at : at + 10]})["y"] for at in range(0, 50, 10)]
        )
    file = tmp_path / "golden.npz"
    np.savez(file, x=rows["x"][:50], **{"answer.y": answers})
    stored_rows, stored = read_stored(file, ["x"])
    assert Golden(stored_rows, stored).run(control, candidate(), quiet).ok
    np.savez(file, x=rows["x"][:50], **{"answer.y": np.roll(answers, 1, axis=0)})
    stored_rows, stored = read_stored(file, ["x"])
    assert not Golden(stored_rows, stored).run(control, candidate(), quiet).ok


def test_labels_find_what_a_wide_tolerance_lets_through(control: Control, rows: dict[str, Any]) -> None:
    wide = {"y": Tolerance(100.0)}
    with Client(f"grpc://{control.endpoint}") as client:
        label = np.concatenate(
            [client.predict("net", {"x": rows["x"][at : at + 10]})["y"] for at in range(0, ROWS, 10)]
        ).argmax(1)
    labelled = [Labelled("net", Rows({"x": rows["x"]}, label=label), "top1", 0.02)]
    good = Golden(rows, None, wide, labelled).run(control, candidate(), quiet)
    assert good.ok, good.what
    assert "top1 1.0000 -> 1.0000" in good.what
    # Four rows are too few to tell columns apart, so that labels alone are left.
    few = {"x": rows["x"][:4]}
    bad = Golden(few, None, wide, labelled).run(control, candidate("net_swapped"), quiet)
    assert not bad.ok
    assert "a loss of" in bad.what


def test_a_candidate_that_is_not_loaded_is_a_finding(control: Control, rows: dict[str, Any]) -> None:
    for check in (Golden(rows), Latency(rows)):
        found = check.run(control, candidate("net_absent"), quiet)
        assert not found.ok
        assert "net_absent" in found.what


def test_without_samples_the_warmup_row_is_asked(control: Control, folder: Path) -> None:
    found = Golden(repository=folder / "model_repository").run(control, candidate(), quiet)
    assert found.ok, found.what
    assert "there are no samples" in found.what
    assert Latency().run(control, candidate(), quiet).figures["net_slower"] > 0


def test_promoted_says_whether_the_public_model_is_the_candidate(control: Control, rows: dict[str, Any]) -> None:
    assert not Golden(rows).promoted(control, candidate(), quiet).ok
    assert Golden(rows).promoted(control, candidate("net"), quiet).ok


def test_a_canary_answers_its_share_of_live_requests(
    control: Control, rows: dict[str, Any], entry: dict[str, str]
) -> None:
    with asked(entry, rows) as errors:
        found = Canary([entry["metrics"]], share=0.3, requests=60, patience_s=20, max_slower=20).run(
            control, candidate(), quiet
        )
        assert found.ok, found.what
        assert found.figures["failed"] == 0
        assert shares(entry) == []
    assert errors == []


def test_a_canary_that_is_gone_costs_nobody_his_answer(
    control: Control, rows: dict[str, Any], entry: dict[str, str], server: EmbeddedServer
) -> None:
    with asked(entry, rows) as errors:
        set_shares(control, candidate(), 0.5, 0.0)
        wait_for(lambda: shares(entry) == [0.5, 0.0])
        control.unload("net__next")  # as a tool that is killed, and run again, does
        wait_for(lambda: shares(entry) == [])
        control.load("net__next")
    assert errors == []
    failed = [each.value for each in seen(entry, "canary_requests_total") if each.labels["result"] == "failed"]
    assert failed != [0.0]
    server.check_alive()


def test_a_shadow_compares_copies_of_live_requests(
    control: Control, rows: dict[str, Any], entry: dict[str, str]
) -> None:
    with asked(entry, rows) as errors:
        good = shadowed(control, entry)
        assert good.ok, good.what
        assert good.figures["copies"] >= 40
        assert 0 < good.figures["y_difference"] < 0.05
        strict = shadowed(control, entry, y=Tolerance(1e-5))
        assert not strict.ok
        assert "more than 1e-05" in strict.what
    assert errors == []


def test_without_live_requests_a_shadow_says_so(control: Control, rows: dict[str, Any], entry: dict[str, str]) -> None:
    with asked(entry, rows):  # the entry looks for candidates of models that it has been asked for
        pass
    found = Shadow([entry["metrics"]], share=0.5, requests=5, patience_s=0.5).run(control, candidate(), quiet)
    assert not found.ok
    assert "only 0 of 5 live requests came in 0.5 s" in found.what


def test_an_entry_that_is_not_there_is_a_finding(control: Control, free_port: int) -> None:
    found = Canary([f"127.0.0.1:{free_port}"]).run(control, candidate(), quiet)
    assert not found.ok
    assert "cannot be read" in found.what


def shadowed(control: Control, entry: dict[str, str], **tolerances: Tolerance) -> Finding:
    check = Shadow([entry["metrics"]], share=0.5, requests=40, patience_s=20, tolerances=tolerances)
    return check.run(control, candidate(), quiet)


def seen(entry: dict[str, str], name: str) -> list[metrics.Sample]:
    return [each for each in metrics.scrape(entry["metrics"]) if each.name == name]


def shares(entry: dict[str, str]) -> list[float]:
    """Of canary and shadow."""
    return [each.value for each in seen(entry, "candidate_share")]


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
