"""The text service in the real Triton: strings in, the embeddings that tokenizers and ONNX Runtime give without a server."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from models.text import data
from perf.inprocess import session
from perf.proofs.text import ODD_TEXTS, embed
from perf.subjects import model_file, part
from tritonpilot import build, repository, spec
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]
TEXTS = [*data.texts()[:40], *ODD_TEXTS]
TOLERANCE = 1e-5
BATCH = 2  # the class of callers that waits for a minute: these tests run on busy machines too

Embed = Callable[[Sequence[bytes]], Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    services = spec.load_services(ROOT / "models", ["text"])
    build.prepare(services, "auto", lambda line: sys.stderr.write(f"{line}\n"))
    root = tmp_path_factory.mktemp("text") / "model_repository"
    repository.publish(root, [plan.folder for plan in build.plan(services)])
    with EmbeddedServer(root, probe_inputs=build.probe_inputs(ROOT / "models", root)) as server:
        yield server
        server.check_alive()


@pytest.fixture(scope="module")
def alone(served: EmbeddedServer) -> Any:
    """Each of TEXTS embedded by itself, in this process: FP32[texts,384]."""
    served.check_alive()  # its set-up made the model file
    model = session(model_file(part("text_net")))
    return np.concatenate([embed(model, [text]) for text in TEXTS])


@pytest.fixture(scope="module")
def ways(served: EmbeddedServer) -> Iterator[dict[str, Embed]]:
    """How texts can be sent: name -> function of the rows of one request."""
    with (
        tritonclient.http.InferenceServerClient(served.endpoints.http, network_timeout=60) as http,
        tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as grpc,
    ):

        def over_http(rows: Sequence[bytes], *, is_binary: bool) -> Any:
            tensor = tritonclient.http.InferInput("text", [len(rows), 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[row] for row in rows], np.object_), binary_data=is_binary)
            output = tritonclient.http.InferRequestedOutput("sentence_embedding", binary_data=is_binary)
            return http.infer("text", [tensor], outputs=[output], priority=BATCH).as_numpy("sentence_embedding")

        def over_grpc(rows: Sequence[bytes]) -> Any:
            tensor = tritonclient.grpc.InferInput("text", [len(rows), 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[row] for row in rows], np.object_))
            return grpc.infer("text", [tensor], client_timeout=60, priority=BATCH).as_numpy("sentence_embedding")

        yield {
            "http json": lambda rows: over_http(rows, is_binary=False),
            "http binary": lambda rows: over_http(rows, is_binary=True),
            "grpc": over_grpc,
        }


@pytest.mark.parametrize("way", ["http json", "http binary", "grpc"])
def test_embeddings_equal_those_without_a_server(ways: dict[str, Embed], alone: Any, way: str) -> None:
    found = np.concatenate(
        [ways[way]([text.encode() for text in TEXTS[start : start + 8]]) for start in range(0, len(TEXTS), 8)]
    )
    assert found.dtype == np.float32
    assert np.abs(found - alone).max() <= TOLERANCE


def test_batch_mates_of_other_lengths_change_nothing(ways: dict[str, Embed], alone: Any) -> None:
    with ThreadPoolExecutor(32) as threads:
        found = list(threads.map(lambda text: ways["grpc"]([text.encode()]), TEXTS))
    assert np.abs(np.concatenate(found) - alone).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("bad", "words"), [(b"\xff\xfe", "is not UTF-8"), (b"word " * 200_000, "1000000 bytes, more than the 65536")]
)
def test_one_bad_text_among_32_requests_is_refused_alone(
    ways: dict[str, Embed], alone: Any, bad: bytes, words: str
) -> None:
    rows = [text.encode() for text in TEXTS[:32]]
    rows[20] = bad

    def answer(row: bytes) -> Any:
        try:
            return ways["grpc"]([row])
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(32) as threads:
        found = list(threads.map(answer, rows))

    refused = found.pop(20)
    assert isinstance(refused, InferenceServerException)
    assert '"text": row 0' in str(refused)
    assert words in str(refused)
    assert np.abs(np.concatenate(found) - np.delete(alone[:32], 20, axis=0)).max() <= TOLERANCE


def test_a_bad_row_names_itself_and_refuses_its_request(ways: dict[str, Embed]) -> None:
    for way in ("http binary", "grpc"):
        with pytest.raises(InferenceServerException, match='"text": row 2 is not UTF-8'):
            ways[way]([b"good", b"", b"caf\xe9"])


def test_wrong_shapes_are_refused(served: EmbeddedServer, ways: dict[str, Embed]) -> None:
    with pytest.raises(InferenceServerException, match="batch-size must be <= 16"):
        ways["grpc"]([b"x"] * 17)
    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
        for shape in ((1,), (1, 2), (1, 1, 1), (0, 1)):
            tensor = tritonclient.grpc.InferInput("text", list(shape), "BYTES")
            tensor.set_data_from_numpy(np.full(shape, b"x", np.object_))
            with pytest.raises(InferenceServerException):
                client.infer("text", [tensor], client_timeout=20)


def test_mates_of_the_net_are_safe_from_ids_and_masks_that_no_tokenizer_makes(served: EmbeddedServer) -> None:
    ids = np.array([[101, 7592, 102, 0]])
    good = {"input_ids": ids, "attention_mask": np.array([[1, 1, 1, 0]])}
    bad_ids = {"input_ids": ids + 100_000, "attention_mask": good["attention_mask"]}
    bad_mask = {"input_ids": ids, "attention_mask": np.array([[7, -3, 0, 0]])}

    def answer(inputs: dict[str, Any]) -> Any:
        tensors = []
        for name, array in inputs.items():
            tensor = tritonclient.grpc.InferInput(name, list(array.shape), "INT64")
            tensor.set_data_from_numpy(array)
            tensors.append(tensor)
        try:
            return client.infer("text_net", tensors, client_timeout=60, priority=BATCH).as_numpy("sentence_embedding")
        except InferenceServerException as error:
            return error

    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client, ThreadPoolExecutor(12) as threads:
        expected = answer(good)
        found = list(threads.map(answer, [good, bad_ids, good, bad_mask, good, good] * 2))

    assert all(isinstance(found[place], InferenceServerException) for place in (1, 7))
    for place in (0, 2, 4, 5, 6, 8, 10, 11):
        assert np.abs(found[place] - expected).max() <= TOLERANCE
    assert np.isfinite(found[3]).all()


def test_the_call_of_the_readme_answers(served: EmbeddedServer) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "Client(" in block)
    assert "127.0.0.1:8000" in code
    code = code.replace("127.0.0.1:8000", served.endpoints.http) + "print(answer['sentence_embedding'].shape)\n"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n(384,)\n")
