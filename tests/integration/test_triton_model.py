from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tritonpilot.errors import ServerError
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

# Two outputs, refusals, faults, and a parameter of every type.
WORDS = """
from dataclasses import dataclass

import numpy as np

from pilotlib.parameters import parameter
from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend, BadRequest


@dataclass(frozen=True)
class Table:
    file: str = parameter("words.txt", "name of the vocabulary")
    most: int = parameter(40, "bytes of the longest word", minimum=1)
    scale: float = parameter(1.0, "what a length is multiplied with")
    loud: bool = parameter(False, "whether words come back in capitals")


class Words(Backend):
    parameters = Table

    def set_up(self, context):
        self.words = (context.version_folder / context.parameters.file).read_bytes().split()
        self.parameters = context.parameters
        self.place = f"{context.model}/{context.version} {context.device} {context.cores >= 1}"

    def decode(self, inputs):
        words = inputs["word"]
        for row, word in enumerate(words[:, 0]):
            if len(word) > self.parameters.most:
                raise BadRequest("word", f"row {row}: longer than {self.parameters.most} bytes")
        if "shift" in inputs:
            words = words + inputs["shift"].astype("S").astype(object)
        return words

    def predict(self, items):
        if any(b"poison" in word for item in items for word in item[:, 0]):
            raise RuntimeError("poisoned")
        return [BadRequest("word", "not in the vocabulary") if item[0, 0] == b"unknown" else item for item in items]

    def encode(self, item):
        if item[0, 0] == b"unfinished":
            return {"known": np.zeros((len(item), 1), bool)}
        if item[0, 0] == b"mistyped":
            return {"known": np.zeros((len(item), 1), bool), "length": np.zeros((len(item), 1)), "place": item}
        lengths = np.char.str_len(item.astype("S")).astype(np.float32) * np.float32(self.parameters.scale)
        shown = np.char.upper(item.astype("S")) if self.parameters.loud else item
        place = np.array([[f"{self.place} é {word.decode()}"] for word in shown[:, 0]])
        return {"known": np.isin(item, self.words), "length": lengths, "place": place}


TritonPythonModel = triton_model(Words)
"""

WORDS_CONFIG = """
backend: "python"
max_batch_size: 8
dynamic_batching { max_queue_delay_microseconds: 100000 %s }
input [{ name: "word" data_type: TYPE_STRING dims: [1] }, { name: "shift" data_type: TYPE_INT64 dims: [1] optional: true }]
output [
  { name: "known" data_type: TYPE_BOOL dims: [1] },
  { name: "length" data_type: TYPE_FP32 dims: [1] },
  { name: "place" data_type: TYPE_STRING dims: [1] }
]
instance_group [{ count: 1 kind: KIND_CPU }]
"""

MIRROR = """
import numpy as np

from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend


class Mirror(Backend):
    def decode(self, inputs):
        return inputs["x"]

    def predict(self, items):
        return [item[:, ::-1] for item in items]

    def encode(self, result):
        return {"y": result}


TritonPythonModel = triton_model(Mirror)
"""

# Calls the model "words" once per row, from several threads.
CALLER = """
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pilotlib.triton_model import triton_model
from pilotlib.verbs import Backend


class Caller(Backend):
    def set_up(self, context):
        self.infer = context.infer
        self.threads = ThreadPoolExecutor(8)

    def decode(self, inputs):
        return inputs["word"]

    def predict(self, items):
        rows = [row for item in items for row in item]
        found = iter(list(self.threads.map(self.ask, rows)))
        return [np.stack([next(found) for _ in item]) for item in items]

    def ask(self, row):
        return self.infer("words", {"word": row[None]}, ["length"])["length"][0]

    def encode(self, result):
        return {"length": result}

    def tear_down(self):
        self.threads.shutdown()


TritonPythonModel = triton_model(Caller)
"""
CALLER_CONFIG = """
backend: "python"
max_batch_size: 64
dynamic_batching { }
input [{ name: "word" data_type: TYPE_STRING dims: [1] }]
output [{ name: "length" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
"""
EAGER = CALLER.replace(
    "self.infer = context.infer", 'context.infer("words", {"word": np.array([[b"a"]], object)}, ["length"])'
)

DTYPES = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 65535]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-32768, 32767]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "FP16": np.array([[0.1, -65504]], np.float16),
    "BF16": np.array([[1.5, -(2.0**100)]], np.float32),
    "FP32": np.array([[0.1, -3e38]], np.float32),
    "FP64": np.array([[0.1, -1e308]], np.float64),
    "STRING": np.array([["é 日本".encode(), b"\xff\0b"]], np.object_),
}
POLICY = "default_queue_policy { max_queue_size: 64 }"
Client = tritonclient.grpc.InferenceServerClient


def write(repository: Path, name: str, code: str, config: str, **parameters: str) -> None:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(code)
    (version / "words.txt").write_text("tree house\n")
    said = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    (version.parent / "config.pbtxt").write_text(config + said)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    repository = tmp_path_factory.mktemp("verbs") / "model_repository"
    write(repository, "words", WORDS, WORDS_CONFIG % "")
    write(repository, "woken", WORDS, WORDS_CONFIG % POLICY, scale="0.5", loud="true", pilot_wake_after_us="500")
    for name in DTYPES:
        config = CALLER_CONFIG.replace(
            '"word" data_type: TYPE_STRING dims: [1]', f'"x" data_type: TYPE_{name} dims: [-1]'
        )
        config = config.replace('"length" data_type: TYPE_FP32 dims: [1]', f'"y" data_type: TYPE_{name} dims: [-1]')
        if name in ("BF16", "STRING", "FP32"):  # a stub each: the odd ones here, the others in one model below
            write(repository, f"mirror_{name}", MIRROR, config)
    write(repository, "caller", CALLER, CALLER_CONFIG)
    with EmbeddedServer(repository, strict_config=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: EmbeddedServer) -> Iterator[Client]:
    with Client(server.endpoints.grpc) as one:
        yield one


def tensor(name: str, array: np.ndarray[Any, Any], datatype: str = "") -> tritonclient.grpc.InferInput:
    datatype = datatype or ("BYTES" if array.dtype == np.object_ else np_to_triton_dtype(array.dtype))
    one = tritonclient.grpc.InferInput(name, list(array.shape), datatype)
    one.set_data_from_numpy(array)
    return one


def ask(client: Client, model: str, *words: bytes, outputs: Sequence[str] = (), shift: int | None = None) -> Any:
    inputs = [tensor("word", np.array([[word] for word in words], np.object_))]
    if shift is not None:
        inputs.append(tensor("shift", np.full((len(words), 1), shift, np.int64)))
    wanted = [tritonclient.grpc.InferRequestedOutput(name) for name in outputs] or None
    return client.infer(model, inputs, outputs=wanted)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(caught, calls))


def test_parameters_files_and_optional_inputs_reach_the_backend(client: Client) -> None:
    plain = ask(client, "words", b"tree", b"boat", shift=7)
    assert plain.as_numpy("known").tolist() == [[False], [False]]
    assert plain.as_numpy("length").tolist() == [[5], [5]]
    loud = ask(client, "woken", b"tree", b"boat")
    assert loud.as_numpy("known").tolist() == [[True], [False]]
    assert loud.as_numpy("length").tolist() == [[2], [2]]
    assert loud.as_numpy("place").tolist() == [
        ["woken/1 cpu True é TREE".encode()],
        ["woken/1 cpu True é BOAT".encode()],
    ]


@pytest.mark.parametrize("model", ["words", "woken"])
def test_each_bad_request_of_a_batch_gets_its_own_error(client: Client, model: str) -> None:
    words = [b"tree", b"x" * 41, b"poison", b"unknown", b"unfinished", b"mistyped", b"house"]
    first, long, poisoned, unknown, unfinished, mistyped, last = together(
        [lambda word=word: ask(client, model, word) for word in words]
    )
    assert first.as_numpy("known").item() is last.as_numpy("known").item() is True
    assert '"word": row 0: longer than 40 bytes' in str(long)
    assert "RuntimeError: poisoned" in str(poisoned)
    assert '"word": not in the vocabulary' in str(unknown)
    assert 'no output "length", but: known' in str(unfinished)
    assert 'output "length" as float64, its config says TYPE_FP32' in str(mistyped)


def test_a_fault_is_logged_once_with_its_place(server: EmbeddedServer, client: Client) -> None:
    for _ in range(3):
        with pytest.raises(InferenceServerException):
            ask(client, "words", b"poison")
    log = server.log_file.read_text()
    assert log.count('raise RuntimeError("poisoned")') <= 2  # of words and of woken


def test_only_requested_outputs_are_answered(client: Client) -> None:
    answer = ask(client, "words", b"tree", outputs=["length"])
    assert [output.name for output in answer.get_response().outputs] == ["length"]


@pytest.mark.parametrize("name", ["BF16", "STRING", "FP32"])
def test_element_types_survive(client: Client, name: str) -> None:
    array = DTYPES[name]
    inputs = [tensor("x", array, "BF16" if name == "BF16" else "")]
    assert client.infer(f"mirror_{name}", inputs).as_numpy("y").tolist() == array[:, ::-1].tolist()
    empty = [tensor("x", array[:, :0], "BF16" if name == "BF16" else "")]
    assert client.infer(f"mirror_{name}", empty).as_numpy("y").shape == (1, 0)


def test_other_models_are_called_from_several_threads_of_one_execution(client: Client) -> None:
    words = [b"w" * count for count in range(1, 33)]
    for answer in together([lambda: ask(client, "caller", *words)] * 4):
        assert answer.as_numpy("length")[:, 0].tolist() == list(range(1, 33))


def test_the_error_of_a_called_model_is_the_callers(client: Client) -> None:
    good, bad = together([lambda: ask(client, "caller", b"fine"), lambda: ask(client, "caller", b"x" * 41)])
    assert good.as_numpy("length").item() == 4
    assert 'model "words": ' in str(bad)
    assert "longer than 40 bytes" in str(bad)


REFUSED = {
    "unknown": (WORDS, CALLER_CONFIG, {"sise": "1"}, ['"sise"', "not known", "file, most, scale, loud"]),
    "value": (WORDS, CALLER_CONFIG, {"most": "0"}, ['"most"', "at least 1"]),
    "file": (WORDS, CALLER_CONFIG, {"file": "gone.txt"}, ["gone.txt"]),
    "early": (EAGER, CALLER_CONFIG, {}, ['model "words" could not be called', "initialize"]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_model_that_cannot_be_set_up_says_why(server: EmbeddedServer, why: str) -> None:
    code, config, parameters, says = REFUSED[why]
    write(server.repository, f"refused_{why}", code, config, **parameters)
    with pytest.raises(ServerError) as caught:
        server.load(f"refused_{why}")
    for words in says:
        assert words in str(caught.value)
