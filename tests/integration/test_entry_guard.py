"""The guard in the entry before a real Triton: what it finds of a model that goes wrong in one way after another, and what not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from tritonpilot import metrics
from tritonpilot.control import Control
from tritonpilot.guard.findings import Guarded, read
from tritonpilot.guard.reference import Reference
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

COMMAND = str(Path(sys.executable).with_name("tritonpilot"))
PATIENCE_S = 20.0
# Answers the mean of each row, wrong in the way that the file `fault` says.
MODEL = """
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.fault = Path("FAULT")
        self.count, self.version = 0, int(args["model_version"])

    def execute(self, requests):
        fault = self.fault.read_text()
        responses = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy().mean(axis=1, keepdims=True)
            self.count += 1
            if fault == "sometimes" and self.count % 40 == 0:
                value = value + 0.01
            if fault == "in_batch" and len(value) > 1:
                value = value * 1.001
            if fault == "drift":
                value = value / 2
            if fault == "nan":
                value = value * np.nan
            if self.version > 1:
                value = value + 1
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value.astype(np.float32))]))
        return responses
"""
CONFIG = """
name: "%s"
max_batch_size: 8
input [{name: "INPUT" data_type: TYPE_FP32 dims: [4]}]
output [{name: "OUTPUT" data_type: TYPE_FP32 dims: [1]}]
"""
PYTHON = 'backend: "python"\ninstance_group [{kind: KIND_CPU}]\n'
ENSEMBLE = """
platform: "ensemble"
ensemble_scheduling { step [{
  model_name: "inner" model_version: -1 input_map { key: "INPUT" value: "INPUT" } output_map { key: "OUTPUT" value: "OUTPUT" }
}] }
"""


def guard(**said: object) -> str:
    text = json.dumps({"rows_per_s": 1000, "reference_rows": 100, "window_rows": 50, **said}).replace('"', '\\"')
    return f'parameters {{ key: "pilot_guard" value {{ string_value: "{text}" }} }}\n'


class Rig:
    """A Triton, an entry, and callers."""

    def __init__(self, server: EmbeddedServer, endpoints: dict[str, str], fault: Path) -> None:
        self.server, self.endpoints = server, endpoints
        self._fault = fault
        self._random = np.random.default_rng(3)
        self._http = tritonclient.http.InferenceServerClient(endpoints["http"])
        self._grpc = tritonclient.grpc.InferenceServerClient(endpoints["grpc"])

    def fails(self, how: str) -> None:
        self._fault.with_suffix(".new").write_text(how)
        self._fault.with_suffix(".new").replace(self._fault)

    def ask(
        self, model: str, value: float | None = None, *, rows: int = 1, grpc: bool = False, binary: bool = True
    ) -> Any:
        """One request, of one value or of random ones."""
        values = self._random.random((rows, 4)) if value is None else np.full((rows, 4), value)
        kind = tritonclient.grpc if grpc else tritonclient.http
        tensor = kind.InferInput("INPUT", [rows, 4], "FP32")
        array = values.astype(np.float32)
        if grpc:
            tensor.set_data_from_numpy(array)
            return self._grpc.infer(model, [tensor])
        tensor.set_data_from_numpy(array, binary_data=binary)
        outputs = [tritonclient.http.InferRequestedOutput("OUTPUT", binary_data=binary)]
        return self._http.infer(model, [tensor], outputs=outputs)

    def samples(self) -> tuple[metrics.Sample, ...]:
        return metrics.scrape(self.endpoints["metrics"])

    def guarded(self, model: str) -> Guarded:
        """Nothing is told of a model before its first request was noticed."""
        none = Guarded(model, 0, 0, 0, 0, 0, 0, is_learning=True)
        return next((each for each in read(self.samples()) if each.model == model), none)

    def compared(self, model: str, kind: str, result: str) -> float:
        return metrics.value(self.samples(), "pilot_guard_comparisons_total", model=model, kind=kind, result=result)

    def until(self, is_so: Callable[[], object], ask: Callable[[], object] = lambda: time.sleep(0.1)) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for _ in range(20):
                ask()
            if is_so():
                return
            assert time.monotonic() < deadline, [each for each in self.samples() if each.name.startswith("pilot_guard")]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    root = tmp_path_factory.mktemp("guard") / "model_repository"
    fault = root.parent / "fault"
    fault.write_text("")
    models = {
        "again": CONFIG % "again" + PYTHON + guard(share=1.0, repeats=False, distribution=False),
        "repeats": CONFIG % "repeats" + PYTHON + guard(share=0, distribution=False),
        "watched": CONFIG % "watched" + PYTHON + guard(share=0, repeats=False),
        "versions": CONFIG % "versions" + PYTHON + guard(share=0, new_version_s=600),
        "inner": CONFIG % "inner" + PYTHON,
        "outer": CONFIG % "outer" + ENSEMBLE + guard(share=0, distribution=False),
        "batches": CONFIG % "batches" + PYTHON + guard(share=1.0, repeats=False, distribution=False),
    }
    for name, config in models.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
        if "ensemble" not in config:
            (root / name / "1" / "model.py").write_text(MODEL.replace("FAULT", str(fault)))
    with EmbeddedServer(root) as server, entry(server) as endpoints:
        yield Rig(server, endpoints, fault)


@contextmanager
def entry(server: EmbeddedServer) -> Iterator[dict[str, str]]:
    argv = [COMMAND, "entry", "--json", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    before = ["--triton-http", server.endpoints.http, "--triton-grpc", server.endpoints.grpc]
    process = subprocess.Popen([*argv, *before], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        endpoints = json.loads(process.stdout.readline())["endpoints"]
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield endpoints
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(autouse=True)
def _works(rig: Rig) -> Iterator[None]:
    yield
    rig.fails("")


@pytest.mark.parametrize(("grpc", "binary"), [(True, True), (False, True), (False, False)])
def test_requests_are_sent_again_alone_and_in_a_batch_and_agree(rig: Rig, grpc: bool, binary: bool) -> None:
    before = {kind: rig.compared("again", kind, "same") for kind in ("again", "batch")}
    rig.until(
        lambda: all(rig.compared("again", kind, "same") > seen for kind, seen in before.items()),
        lambda: rig.ask("again", rows=3, grpc=grpc, binary=binary),
    )
    for result in ("different", "changed", "failed"):
        assert rig.compared("again", "again", result) == rig.compared("again", "batch", result) == 0


def test_what_is_wrong_now_and_then_is_found(rig: Rig) -> None:
    rig.fails("sometimes")
    rig.until(lambda: rig.guarded("again").different, lambda: rig.ask("again"))
    assert [finding.kind for finding in rig.guarded("again").findings] == ["different"]
    largest = [each.value for each in rig.samples() if each.name == "pilot_guard_largest_difference"]
    assert max(largest) == pytest.approx(0.01, abs=1e-3)


def test_what_is_wrong_in_batches_alone_is_found_as_that(rig: Rig) -> None:
    rig.fails("in_batch")
    rig.until(lambda: rig.compared("batches", "batch", "different"), lambda: rig.ask("batches", 0.7))
    assert rig.compared("batches", "again", "same")
    assert not rig.compared("batches", "again", "different")


def test_equal_requests_that_come_by_themselves_are_compared_for_free(rig: Rig) -> None:
    rig.until(
        lambda: rig.compared("repeats", "repeat", "same") >= 100,
        lambda: [rig.ask("repeats", value, grpc=grpc) for value in (0.1, 0.2) for grpc in (False, True)],
    )
    executed = metrics.value(metrics.scrape(rig.server.endpoints.metrics), "nv_inference_count", model="repeats")
    assert rig.compared("repeats", "repeat", "different") == rig.compared("repeats", "again", "same") == 0
    asked = metrics.value(rig.samples(), "processed_requests_total", model="repeats", status="ok")
    assert executed <= asked + 1, "none but the server's own probe"
    rig.fails("sometimes")
    rig.until(lambda: rig.compared("repeats", "repeat", "different"), lambda: rig.ask("repeats", 0.1))


def test_another_distribution_and_nan_are_found_and_over_when_they_are(rig: Rig) -> None:
    rig.until(lambda: not rig.guarded("watched").is_learning, lambda: rig.ask("watched"))
    began = time.monotonic()
    while time.monotonic() < began + 2:
        rig.ask("watched")
    assert rig.guarded("watched").findings == ()
    rig.fails("drift")
    rig.until(lambda: rig.guarded("watched").findings, lambda: rig.ask("watched"))
    (finding,) = rig.guarded("watched").findings
    assert (finding.kind, "OUTPUT (value)" in finding.what) == ("drift", True)
    rig.fails("")
    rig.until(lambda: not rig.guarded("watched").findings, lambda: rig.ask("watched"))
    rig.until(
        lambda: "constant" in [each.kind for each in rig.guarded("watched").findings], lambda: rig.ask("watched", 0.4)
    )
    rig.until(lambda: not rig.guarded("watched").findings, lambda: rig.ask("watched"))
    rig.fails("nan")
    rig.until(lambda: rig.guarded("watched").findings, lambda: rig.ask("watched"))
    assert [each.kind for each in rig.guarded("watched").findings] == ["not_finite"]


def wrong_second_version(rig: Rig) -> None:
    """Of the model `versions`, served and found to answer otherwise than the first."""
    folder = rig.server.repository / "versions"
    if not (folder / "2").is_dir():
        rig.until(
            lambda: not rig.guarded("versions").is_learning, lambda: [rig.ask("versions"), rig.ask("versions", 0.5)]
        )
        shutil.copytree(folder / "1", folder / "2")
        with Control(rig.server.endpoints.grpc, rig.server.control_key) as control:
            control.load("versions")
    rig.until(
        lambda: rig.compared("versions", "version", "different") and rig.guarded("versions").findings,
        lambda: [rig.ask("versions"), rig.ask("versions", 0.5)],
    )


def test_a_new_version_is_no_fault_but_is_held_against_the_old_one(rig: Rig) -> None:
    wrong_second_version(rig)
    found = rig.guarded("versions")
    assert (found.version, found.previous, found.different) == ("2", "1", 0)
    assert [finding.kind for finding in found.findings] == ["drift"]
    assert 0 < found.version_age_s < PATIENCE_S + 5


@pytest.mark.proof
def test_the_command_goes_back_to_the_version_before(rig: Rig) -> None:
    wrong_second_version(rig)
    go_back = ["--entry", rig.endpoints["metrics"], "--triton-grpc", rig.server.endpoints.grpc, "--trip"]
    go_back += ["--repository", str(rig.server.repository)]
    said = command(*go_back, "--dry-run").stderr
    assert "versions: version 2 goes, version 1 comes back: versions: OUTPUT (value) is distributed" in said
    assert rig.ask("versions").get_response()["model_version"] == "2"
    said = command(*go_back).stderr
    assert rig.ask("versions").get_response()["model_version"] == "1", said
    rig.until(lambda: rig.guarded("versions").version == "1", lambda: rig.ask("versions"))
    rig.until(lambda: not rig.guarded("versions").findings, lambda: [rig.ask("versions"), rig.ask("versions", 0.5)])
    assert "comes back" not in command(*go_back).stderr, "what came by a rollback is not left again"


def test_another_member_of_an_ensemble_is_no_fault(rig: Rig) -> None:
    folder = rig.server.repository / "inner"
    rig.until(lambda: rig.compared("outer", "repeat", "same") > 20, lambda: rig.ask("outer", 0.5))
    shutil.copytree(folder / "1", folder / "2")
    with Control(rig.server.endpoints.grpc, rig.server.control_key) as control:
        control.load("inner")
    rig.until(lambda: rig.compared("outer", "repeat", "changed"), lambda: rig.ask("outer", 0.5))
    rig.until(lambda: rig.compared("outer", "repeat", "same") > 60, lambda: rig.ask("outer", 0.5))
    assert rig.guarded("outer").different == 0


def test_a_model_without_a_guard_is_left_alone(rig: Rig) -> None:
    rig.ask("inner")
    assert not [each for each in read(rig.samples()) if each.model == "inner"]


def test_the_entry_goes_on_serving_metrics_in_words_of_prometheus(rig: Rig) -> None:
    with urllib.request.urlopen(f"http://{rig.endpoints['metrics']}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert "# TYPE pilot_guard_comparisons_total counter" in text
    assert 'pilot_guard_comparisons_total{kind="again",model="again",result="dropped",version="1"}' in text


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, "guard", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_command_shows_what_was_found(rig: Rig) -> None:
    done = command("--entry", rig.endpoints["metrics"])
    assert done.returncode == 1, done.stderr
    assert "answered the same input differently" in done.stdout
    told = json.loads(command("--entry", rig.endpoints["metrics"], "--json").stdout)
    (again,) = [each for each in told if each["model"] == "again"]
    assert again["different"] > 0
    assert again["findings"][0]["kind"] == "different"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--entry", "127.0.0.1:9"], 10, "The metrics at http://127.0.0.1:9/metrics cannot be read"),
        (["--trip", "--repository", "/nonexistent"], 5, "There is no model repository at /nonexistent"),
        (["--output", "x.json"], 2, "--learn"),
        (["--learn", "ctr"], 2, "--output"),
        (["--every", "inf"], 2, "no finite number"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], code: int, message: str) -> None:
    done = command(*arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_a_reference_is_learned_from_the_samples(rig: Rig, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "watched"
    folder.mkdir(parents=True)
    (folder / "service.yaml").write_text(
        "service: watched\nmodel: {backend: python, file: model.py, samples: rows.npz,\n"
        "  inputs: [{name: INPUT, data_type: FP32, dims: [4]}], outputs: [{name: OUTPUT, data_type: FP32, dims: [1]}]}\n"
        "batching: {max_batch_size: 8}\n"
    )
    np.savez(folder / "rows.npz", INPUT=np.random.default_rng(1).random((300, 4)).astype(np.float32))
    output = folder / "usual.json"
    asked = ["--models", str(tmp_path / "models"), "--triton-grpc", rig.server.endpoints.grpc, "--output", str(output)]
    done = command("--learn", "watched", *asked)
    assert done.returncode == 0, done.stderr
    assert "guard: {reference: usual.json}" in done.stdout
    series = Reference.parse(output.read_text(), "test").series
    assert [(key.output, key.what, each.rows) for key, each in series.items()] == [("OUTPUT", "value", 300)]
    unknown = command("--learn", "watcher", *asked)
    assert (unknown.returncode, "did you mean watched" in unknown.stderr) == (3, True)
