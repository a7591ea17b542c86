"""The services risk and ctr_raw in the real server: raw rows get the answers of the same code in one process, bad ones an error."""

from __future__ import annotations

import json
import queue
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from models.ctr.features import Snapshot
from models.onnx_export import run, session
from models.risk import data
from pilotlib import table_file
from pilotlib.table_fit import arrays
from tritonpilot import build, repository, spec
from tritonpilot.errors import ServerError
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "models" / "risk" / "build"
MOST = 256
NUMBERS = [column.name for column in data.COLUMNS][:17]
TEXTS = [column.name for column in data.COLUMNS][17:]
TYPES = {"f": "FP32", "i": "INT64", "O": "BYTES"}

Inputs = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def repository_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables") / "model_repository"
    services = spec.load_services(ROOT / "models", ["risk", "ctr_raw", "ctr"])
    build.prepare(services, "auto", print)
    repository.publish(root, [plan.folder for plan in build.plan(services)])
    return root


@pytest.fixture(scope="module")
def served(repository_root: Path) -> Iterator[EmbeddedServer]:
    probes = build.probe_inputs(ROOT / "models", repository_root)
    with EmbeddedServer(repository_root, probe_inputs=probes) as server:
        yield server


@pytest.fixture
def client(served: EmbeddedServer) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
        yield client
    served.check_alive()


@pytest.fixture(scope="module")
def loans() -> Inputs:
    """The raw rows of the test split."""
    numbers, texts = arrays(data.COLUMNS, data.split(data.load())[1].raw)
    return {"numbers": numbers, "texts": texts}


def expected(inputs: Inputs) -> np.ndarray:
    """FP32[n,1]: the table and the network in this process."""
    dense, categorical = table_file.read(BUILD / "features.json").transform(inputs["numbers"], inputs["texts"])
    return run(session(BUILD / "model.onnx"), {"dense": dense, "categorical": categorical})


def tensors(module: Any, inputs: Inputs) -> list[Any]:
    made = []
    for name, array in inputs.items():
        made.append(module.InferInput(name, list(array.shape), TYPES[array.dtype.kind]))
        made[-1].set_data_from_numpy(array)
    return made


def ask(client: Any, inputs: Inputs, model: str = "risk", output: str = "prob") -> np.ndarray:
    module = tritonclient.http if isinstance(client, tritonclient.http.InferenceServerClient) else tritonclient.grpc
    found: np.ndarray = client.infer(model, tensors(module, inputs)).as_numpy(output)
    return found


def part(inputs: Inputs, start: int, stop: int) -> Inputs:
    return {name: array[start:stop] for name, array in inputs.items()}


def changed(inputs: Inputs, row: int = 0, rows: int = 1, **cells: Any) -> Inputs:
    """The first rows, with cells of one of them changed by column name."""
    copies = {name: array[:rows].copy() for name, array in inputs.items()}
    for name, value in cells.items():
        columns = NUMBERS if name in NUMBERS else TEXTS
        copies["numbers" if name in NUMBERS else "texts"][row, columns.index(name)] = value
    return copies


def test_every_row_of_the_test_split_gets_the_answer_of_one_process(
    served: EmbeddedServer, client: Any, loans: Inputs
) -> None:
    found = [ask(client, part(loans, start, start + MOST)) for start in range(0, len(loans["numbers"]), MOST)]
    np.testing.assert_allclose(np.concatenate(found), expected(loans), atol=1e-6)
    few = part(loans, 0, 20)
    alone = [ask(client, part(few, row, row + 1)) for row in range(20)]
    np.testing.assert_allclose(np.concatenate(alone), expected(few), atol=1e-6)
    with tritonclient.http.InferenceServerClient(served.endpoints.http) as over_http:
        np.testing.assert_array_equal(ask(over_http, few), ask(client, few))


def test_the_table_step_gives_the_very_bits_that_training_saw(client: Any, loans: Inputs) -> None:
    rows = part(loans, 0, MOST)
    dense, categorical = table_file.read(BUILD / "features.json").transform(rows["numbers"], rows["texts"])
    np.testing.assert_array_equal(ask(client, rows, "risk_table", "dense"), dense)
    np.testing.assert_array_equal(ask(client, rows, "risk_table", "categorical"), categorical)


def test_a_missing_number_is_the_word_nan_in_json(served: EmbeddedServer, client: Any, loans: Inputs) -> None:
    inputs = changed(loans, int_rate=np.nan, annual_inc=np.nan)
    body = {
        "inputs": [
            {"name": "numbers", "shape": [1, 17], "datatype": "FP32", "data": inputs["numbers"].tolist()},
            {"name": "texts", "shape": [1, 5], "datatype": "BYTES", "data": [t.decode() for t in inputs["texts"][0]]},
        ]
    }
    request = urllib.request.Request(f"http://{served.endpoints.http}/v2/models/risk/infer", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as response:
        (prob,) = json.load(response)["outputs"][0]["data"]
    assert prob == pytest.approx(float(ask(client, inputs).item()), abs=1e-6)


@pytest.mark.parametrize(
    "cells",
    [
        {"int_rate": np.nan, "annual_inc": np.nan},
        {"annual_inc": 3e38, "delinq_amnt": -3e38},
        {"addr_state": b"", "emp_length": b"", "sub_grade": b""},
        {"addr_state": b"ZZ", "sub_grade": b"H9", "emp_length": "größer".encode()},
        {"addr_state": b"x" * 1_000_000},
    ],
    ids=["missing numbers", "huge numbers", "missing texts", "unknown words", "a megabyte"],
)
def test_what_training_did_not_see_is_answered_as_in_one_process(
    client: Any, loans: Inputs, cells: dict[str, Any]
) -> None:
    inputs = changed(loans, row=1, rows=3, **cells)
    found = ask(client, inputs)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected(inputs), atol=1e-6)


@pytest.mark.parametrize(
    ("cells", "error"),
    [
        ({"annual_inc": np.inf}, '"numbers": row 2: annual_inc is inf'),
        ({"open_il_6m": -np.inf}, '"numbers": row 2: open_il_6m is -inf'),
        ({"funded_amnt": np.nan}, '"numbers": row 2: funded_amnt is missing'),
        ({"term": b"term_48"}, '"texts": row 2: term has no value "term_48"'),
        ({"term": b""}, '"texts": row 2: term is missing'),
        ({"addr_state": b"\xff\xfe"}, '"texts": row 2: addr_state is not UTF-8'),
    ],
    ids=["Inf", "-Inf", "NaN where a number must be", "an unknown word", "an empty word", "not UTF-8"],
)
def test_a_bad_cell_is_refused_with_its_row_and_column(
    client: Any, loans: Inputs, cells: dict[str, Any], error: str
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        ask(client, changed(loans, row=2, rows=5, **cells))
    assert error in str(refused.value)


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((1, 16), (1, 5)),
        ((1, 17), (1, 6)),
        ((17,), (5,)),
        ((1, 1, 17), (1, 5)),
        ((257, 17), (257, 5)),
        ((2, 17), (3, 5)),
    ],
    ids=[
        "too few numbers",
        "too many texts",
        "no batch dimension",
        "rank 3",
        "more rows than the maximum",
        "unequal rows",
    ],
)
def test_wrong_shapes_are_refused(client: Any, loans: Inputs, numbers: Sequence[int], texts: Sequence[int]) -> None:
    with pytest.raises(InferenceServerException):
        ask(client, {"numbers": np.ones(numbers, np.float32), "texts": np.full(texts, b"term_36", object)})
    ask(client, part(loans, 0, 1))


def test_no_rows_harm_nobody(client: Any, loans: Inputs) -> None:
    try:
        assert ask(client, part(loans, 0, 0)).shape == (0, 1)
    except InferenceServerException as refused:
        assert "risk" in str(refused)  # noqa: PT017  either answer will do
    ask(client, part(loans, 0, 1))


def test_one_bad_request_among_32_fails_alone(client: Any, loans: Inputs) -> None:
    spoiled = (
        ({"annual_inc": np.inf}, "row 0: annual_inc is inf"),
        ({"addr_state": b"\xc3"}, "row 0: addr_state is not UTF-8"),
        ({"term": b"never"}, "row 0: term has no value"),
    )
    for cells, error in spoiled:
        requests = [part(loans, place, place + 1) for place in range(32)]
        requests[13] = changed(loans, **cells)
        found = together(client, requests)
        assert error in str(found[13])
        for place in (place for place in range(32) if place != 13):
            np.testing.assert_allclose(found[place], expected(requests[place]), atol=1e-6)
    statistics = client.get_inference_statistics("risk_table", as_json=True)["model_stats"][0]
    assert int(statistics["execution_count"]) < int(statistics["inference_count"]), "they never shared an execution"


def together(client: Any, requests: Sequence[Inputs]) -> list[Any]:
    """All at once over gRPC: the answer or the error of each."""
    done: queue.Queue[tuple[int, Any]] = queue.Queue()
    for place, inputs in enumerate(requests):

        def put(result: Any, error: Any, place: int = place) -> None:
            done.put((place, error or result.as_numpy("prob")))

        client.async_infer("risk", tensors(tritonclient.grpc, inputs), put)
    found = dict(done.get(timeout=30) for _ in requests)
    return [found[place] for place in range(len(requests))]


def test_a_damaged_features_file_refuses_the_model_and_names_the_key(tmp_path: Path, repository_root: Path) -> None:
    root = tmp_path / "model_repository"
    version = root / "risk_table" / "1"
    version.mkdir(parents=True)
    (root / "risk_table" / "config.pbtxt").write_bytes((repository_root / "risk_table" / "config.pbtxt").read_bytes())
    content = json.loads((repository_root / "risk_table" / "1" / "features.json").read_text())
    content["numbers"][2]["deviation"] = 0
    (version / "features.json").write_text(json.dumps(content))
    with pytest.raises(ServerError) as refused, EmbeddedServer(root):
        pass
    assert "features.json: numbers[2].deviation is 0.0, but must be above 0" in str(refused.value)


def clicks(rows: int) -> Inputs:
    with np.load(ROOT / "models" / "ctr_raw" / "build" / "requests.npz") as stored:
        arrays = {name: stored[name][:rows] for name in stored.files}
    return {name: array.astype(object) if array.dtype.kind == "S" else array for name, array in arrays.items()}


def snapshot_answers(inputs: Inputs) -> np.ndarray:
    snapshot = Snapshot.from_json((ROOT / "models" / "ctr_raw" / "build" / "history.json").read_text())
    rows = zip(*(inputs[name][:, 0].tolist() for name in ("user", "item", "timestamp")), strict=True)
    encoded = snapshot.encode([(user.decode(), item.decode(), time or snapshot.end) for user, item, time in rows])
    return run(session(ROOT / "models" / "ctr" / "build" / "model.onnx"), encoded)


def test_raw_ids_get_the_answers_of_one_process(client: Any) -> None:
    inputs = clicks(1024)
    found = [ask(client, part(inputs, start, start + MOST), "ctr_raw") for start in range(0, 1024, MOST)]
    np.testing.assert_allclose(np.concatenate(found), snapshot_answers(inputs), atol=1e-6)


def test_unknown_ids_are_answered_and_bad_ones_refused(client: Any) -> None:
    inputs = clicks(4)
    inputs["user"][0], inputs["item"][1], inputs["timestamp"][2] = b"nobody", b"", 0
    np.testing.assert_allclose(ask(client, inputs, "ctr_raw"), snapshot_answers(inputs), atol=1e-6)
    for name, value, error in (
        ("user", b"\xff", '"user": row 3 is not UTF-8'),
        ("item", b"\xff", '"item": row 3 is not UTF-8'),
        ("timestamp", 1, '"timestamp": row 3: 1 is not between'),
    ):
        spoiled = {key: array.copy() for key, array in inputs.items()}
        spoiled[name][3] = value
        with pytest.raises(InferenceServerException) as refused:
            ask(client, spoiled, "ctr_raw")
        assert error in str(refused.value)
