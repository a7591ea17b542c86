from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype
from unit import torch_files

from perf.memory import stubs
from tritonpilot import build, repository, spec
from tritonpilot.errors import ServerError
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

INSTANCE = "instance_group [{ count: 1 kind: KIND_CPU }]\n"
GATHERED = "dynamic_batching { max_queue_delay_microseconds: 100000 }\n"  # long enough to catch requests sent together
BATCHED = f"max_batch_size: 64\n{GATHERED}"
ONE_THREAD = 'parameters { key: "INTRA_OP_THREAD_COUNT" value { string_value: "1" } }\n'
X, Y = np.array([[1, -2], [3, 4]], np.float32), np.array([[10, 20], [30, 40]], np.float32)
TYPES = {"bool": "BOOL", "float16": "FP16"}  # each is a process that imports PyTorch for 2 s

Client = tritonclient.grpc.InferenceServerClient


def tensors(kind: str, *entries: tuple[str, str, Sequence[int]]) -> str:
    """Entries of the config: name, type without TYPE_, dims."""
    rows = [f'{kind} [{{ name: "{n}" data_type: TYPE_{t} dims: {list(d)} }}]\n' for n, t, d in entries]
    return "".join(rows)


def configure(root: Path, name: str, config: str) -> Path:
    """Write the config; returns where the model file goes."""
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(f'backend: "pytorch"\n{INSTANCE}{config}')
    return root / name / "1" / "model.pt"


def one(inside: str, outside: str, dims: Sequence[int], names: tuple[str, str] = ("x", "OUTPUT__0")) -> str:
    return tensors("input", (names[0], inside, dims)) + tensors("output", (names[1], outside, dims))


def parameter(name: str, value: str) -> str:
    return f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}\n'


class Slow(torch.nn.Module):
    """x [b, 64] -> y, `rounds` small products in a loop: the time of a run hardly depends on b."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.mix = torch.nn.Parameter(torch.eye(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.rounds):
            x = torch.tanh(x @ self.mix)
        return x


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    root = tmp_path_factory.mktemp("pytorch") / "model_repository"
    for name, triton in TYPES.items():
        torch_files.script(torch_files.Same(), configure(root, f"same_{name}", BATCHED + one(triton, triton, [2])))
    two = tensors("input", ("y", "FP32", [2]), ("x", "FP32", [2]))
    named = BATCHED + two + tensors("output", ("OUTPUT__1", "FP32", [2]), ("OUTPUT__0", "FP32", [2]))
    torch_files.script(torch_files.Difference(), configure(root, "difference", named))
    numbered = tensors("input", ("B__1", "FP32", [-1]), ("A__0", "FP32", [-1])) + tensors(
        "output", ("less", "FP32", [-1])
    )
    torch_files.export(
        torch_files.Difference(),
        configure(root, "exported", BATCHED + numbered).with_suffix(".pt2"),
        [torch.from_numpy(X), torch.from_numpy(Y)],
    )
    paths = tensors("output", ("RESULT[parts][1]", "FP32", [2]), ("RESULT[twice]", "FP32", [2]))
    torch_files.export(
        torch_files.Keyed(),
        configure(root, "keyed", BATCHED + tensors("input", ("ARGS[0]", "FP32", [2])) + paths).with_suffix(".pt2"),
        [torch.from_numpy(X)],
    )
    dictionary = tensors("input", ("a", "FP32", [2]), ("b", "FP32", [2])) + tensors("output", ("sum", "FP32", [2]))
    torch_files.script(torch_files.KeyedSum(), configure(root, "dictionary", BATCHED + dictionary))
    torch_files.script(torch_files.Scale(), configure(root, "dynamic", BATCHED + one("FP32", "FP32", [-1])))
    torch_files.script(torch_files.Scale(), configure(root, "unbatched", one("FP32", "FP32", [-1, 2])))
    torch_files.script(torch_files.Pick(), configure(root, "pick", BATCHED + one("INT64", "FP32", [1])))
    torch_files.script(
        torch_files.Dense(),
        configure(
            root, "dense", BATCHED + tensors("input", ("x", "FP32", [28])) + tensors("output", ("y", "FP32", [3]))
        ),
    )
    io = tensors("input", ("x", "FP32", [28])) + tensors("output", ("y", "FP32", [3]))
    path = configure(root, "half", BATCHED + io + parameter("pilot_autocast", "bf16") + ONE_THREAD)
    path.write_bytes((root / "dense" / "1" / "model.pt").read_bytes())
    fitting = {"exported": {"A__0": X, "B__1": Y}}  # zeros of one column do not pass its guards
    with EmbeddedServer(root, startup_timeout_s=300, probe_inputs=fitting) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: EmbeddedServer) -> Iterator[Client]:
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as found:
        yield found


def tensor(array: np.ndarray[Any, Any], name: str) -> tritonclient.grpc.InferInput:
    found = tritonclient.grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    found.set_data_from_numpy(array)
    return found


def infer(client: Client, model: str, array: np.ndarray[Any, Any], output: str = "OUTPUT__0", name: str = "x") -> Any:
    return client.infer(model, [tensor(array, name)]).as_numpy(output)


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the calls return or raise, made at the same time."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except InferenceServerException as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(caught, calls))


def executions(client: Client, model: str) -> int:
    return int(client.get_inference_statistics(model).model_stats[0].execution_count)


@pytest.mark.parametrize("name", TYPES)
def test_every_element_type_survives_alone_and_in_a_batch(client: Client, name: str) -> None:
    array = np.array([[1, 0], [1, 2]]).astype(name)
    before = executions(client, f"same_{name}")
    calls = [lambda: infer(client, f"same_{name}", array)] * 3
    answers = [calls[0](), *together(calls)]
    assert executions(client, f"same_{name}") - before < 4
    for answer in answers:
        assert answer.dtype == array.dtype
        assert answer.tolist() == array.tolist()


def test_arguments_and_numbered_outputs_are_found_by_name(client: Client) -> None:
    answer = client.infer("difference", [tensor(X, "x"), tensor(Y, "y")])
    assert answer.as_numpy("OUTPUT__0").tolist() == (X - Y).tolist()
    assert answer.as_numpy("OUTPUT__1").tolist() == (X + Y).tolist()


def test_numbered_inputs_of_an_exported_program(client: Client) -> None:
    answer = client.infer("exported", [tensor(Y, "B__1"), tensor(X, "A__0")])
    assert answer.as_numpy("less").tolist() == (X - Y).tolist()


def test_results_in_a_dictionary_are_found_by_path(client: Client) -> None:
    answer = client.infer("keyed", [tensor(X, "ARGS[0]")])
    assert answer.as_numpy("RESULT[twice]").tolist() == (2 * X).tolist()
    assert answer.as_numpy("RESULT[parts][1]").tolist() == (X + 2).tolist()


def test_a_dictionary_of_inputs(client: Client) -> None:
    answer = client.infer("dictionary", [tensor(X, "a"), tensor(Y, "b")])
    assert answer.as_numpy("sum").tolist() == (X + 10 * Y).tolist()


def test_only_requested_outputs_are_answered(client: Client) -> None:
    inputs = [tensor(X, "x"), tensor(Y, "y")]

    def ask(*names: str) -> Any:
        return client.infer("difference", inputs, outputs=[tritonclient.grpc.InferRequestedOutput(n) for n in names])

    less, more = together([lambda: ask("OUTPUT__0"), lambda: ask("OUTPUT__1")])
    assert less.as_numpy("OUTPUT__0").tolist() == (X - Y).tolist()
    assert less.as_numpy("OUTPUT__1") is None
    assert more.as_numpy("OUTPUT__1").tolist() == (X + Y).tolist()


def test_requests_of_different_shapes_are_all_answered(client: Client) -> None:
    arrays = [np.full((rows, width), width, np.float32) for rows, width in [(1, 3), (2, 3), (1, 5), (1, 0), (2, 5)]]
    answers = together([lambda array=array: infer(client, "dynamic", array) for array in arrays])
    for array, answer in zip(arrays, answers, strict=True):
        assert answer.tolist() == (array * 2).tolist()


def test_a_model_without_a_batch_dimension(client: Client) -> None:
    assert infer(client, "unbatched", np.ones((5, 2), np.float32)).tolist() == [[2, 2]] * 5


def test_one_bad_request_gets_its_error_and_its_mates_their_answers(client: Client) -> None:
    picks = [np.array([[pick]], np.int64) for pick in (0, 1, 99, 2, 3)]
    before = executions(client, "pick")
    answers = together([lambda array=array: infer(client, "pick", array) for array in picks])
    assert executions(client, "pick") - before < len(picks)
    assert "index out of range" in str(answers.pop(2))
    assert [answer.item() for answer in answers] == [0.5, 1.5, 2.5, 3.5]


def test_an_exported_program_refuses_a_shape_and_answers_the_rest(client: Client) -> None:
    def ask(width: int) -> Any:
        wide = np.ones((1, width), np.float32)
        return client.infer("exported", [tensor(wide, "A__0"), tensor(wide, "B__1")]).as_numpy("less")

    first, refused, last = together([lambda: ask(2), lambda: ask(3), lambda: ask(2)])
    assert "Guard failed: x.size()[1] == 2" in str(refused)
    assert first.tolist() == last.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    "array", [np.ones(28, np.float32), np.ones((1, 2, 14), np.float32), np.ones((65, 28), np.float32)]
)
def test_a_wrong_rank_or_too_many_rows_never_reach_the_model(client: Client, array: np.ndarray[Any, Any]) -> None:
    before = executions(client, "dense")
    with pytest.raises(InferenceServerException, match=r"expected|batch-size must be <= 64"):
        infer(client, "dense", array, "y")
    assert executions(client, "dense") == before


def test_mixed_sizes_in_flight_equal_pytorch_in_process(server: EmbeddedServer, client: Client) -> None:
    module = torch.jit.load(str(server.repository / "dense" / "1" / "model.pt"))
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((rows, 28)).astype(np.float32) for rows in [1, 7, 64, 2, 3, 1, 1, 5, 33, 16] * 4]
    before = executions(client, "dense")
    answers = together([lambda array=array: infer(client, "dense", array, "y") for array in arrays])
    assert executions(client, "dense") - before < len(arrays)
    for array, answer in zip(arrays, answers, strict=True):
        np.testing.assert_allclose(answer, module(torch.from_numpy(array)).detach().numpy(), rtol=0, atol=1e-6)


def test_autocast_answers_in_the_configs_type_and_half_precision(client: Client) -> None:
    array = np.linspace(-1, 1, 56, dtype=np.float32).reshape(2, 28)
    exact, half = infer(client, "dense", array, "y"), infer(client, "half", array, "y")
    assert half.dtype == np.float32
    assert 0 < np.abs(half - exact).max() < 0.02


IO = one("FP32", "FP32", [2])
REFUSALS = {
    "file": (BATCHED + IO, None, ["there is no file", "model.pt"]),
    "corrupt": (BATCHED + IO, b"no model", ["is no TorchScript or torch.export file"]),
    "strings": (BATCHED + one("STRING", "FP32", [2]), torch_files.Scale(), ["no tensors of strings", '"x"']),
    "inputs": (
        BATCHED + IO + tensors("input", ("more", "FP32", [2])),
        torch_files.Scale(),
        ["the config has 2 inputs", "takes 1 (x)"],
    ),
    "value": (BATCHED + IO + parameter("pilot_autocast", "int8"), torch_files.Scale(), ['"int8"', '"fp16"']),
    "silent": ("max_batch_size: 4\n", torch_files.Scale(), ["input: a PyTorch file does not tell them"]),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_model_that_cannot_be_served_says_why(server: EmbeddedServer, what: str) -> None:
    config, content, says = REFUSALS[what]
    path = configure(server.repository, f"wrong_{what}", config)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch_files.script(content, path)
    with pytest.raises(ServerError) as caught:
        server.load(f"wrong_{what}")
    for word in says:
        assert word in str(caught.value)


def test_a_program_that_contradicts_its_config_says_where(server: EmbeddedServer) -> None:
    path = configure(server.repository, "wrong_dims", BATCHED + one("FP32", "FP32", [3])).with_suffix(".pt2")
    torch_files.export(torch_files.Scale(), path, [torch.from_numpy(X)])
    with pytest.raises(
        ServerError, match=r"the config says \[3\], the model says \[2\] \(without the batch dimension\)"
    ):
        server.load("wrong_dims")


def test_threads_are_those_of_the_config(server: EmbeddedServer, client: Client) -> None:
    found = {}
    for threads in (1, 3):
        name = f"threads_{threads}"
        config = one("FP32", "FP32", [-1]) + parameter("INTRA_OP_THREAD_COUNT", str(threads))
        torch_files.script(torch_files.Scale(), configure(server.repository, name, BATCHED + config))
        server.load(name)
        infer(client, name, np.ones((1, 1 << 18), np.float32))  # enough for PyTorch to share it among its threads
        status = Path(f"/proc/{stubs(server.pid)[name + '_0_0']}/status").read_text()
        found[threads] = int(status.partition("Threads:")[2].split()[0])
    assert found[3] >= found[1] + 2  # OpenMP's, and as many of PyTorch's other pool


SERVICE = """\
service: {name}
model:
  file: {file}
  inputs: [{{name: x, data_type: FP32, dims: [28]}}]
  outputs: [{{name: y, data_type: FP32, dims: [3]}}]
batching: {{max_batch_size: 16, queue_delay_us: 1000}}
instances: [{{count: 1, threads: 1}}]
warmup: {{batch_sizes: [1, 16], data: random}}
classes: [{{name: realtime, priority: 1}}, {{name: batch, priority: 2}}]
"""


@pytest.mark.parametrize("file", ["dense.pt", "dense.pt2"])
def test_a_service_file_is_built_and_served(tmp_path: Path, file: str) -> None:
    dense = torch_files.Dense()
    folder = tmp_path / "models" / "net"
    if file.endswith("pt"):
        torch_files.script(dense, folder / file)
    else:
        torch_files.export(dense, folder / file, [torch.ones(2, 28)])
    (folder / "service.yaml").write_text(SERVICE.format(name="net", file=file))
    plans = build.plan(spec.load_services(tmp_path / "models"))
    repository.publish(tmp_path / "model_repository", [plan.folder for plan in plans])
    array = np.linspace(-1, 1, 5 * 28, dtype=np.float32).reshape(5, 28)
    with (
        EmbeddedServer(tmp_path / "model_repository", strict_config=True) as server,
        tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as client,
    ):
        answer = client.infer("net", [tensor(array, "x")], priority=2).as_numpy("y")
    np.testing.assert_allclose(answer, dense(torch.from_numpy(array)).detach().numpy(), rtol=0, atol=1e-6)


def test_no_pair_stalls_with_priorities_on_one_core(tmp_path: Path, last_cpu: int) -> None:
    torch.set_num_threads(1)
    probe = torch.jit.script(Slow(1000).eval())
    array = torch.ones(2, 64)
    probe(array)
    start = time.thread_time()
    probe(array)
    rounds = max(1, round(1000 * 0.05 / (time.thread_time() - start)))
    priorities = (
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 default_queue_policy "
        "{ default_timeout_microseconds: 3600000000 allow_timeout_override: true } }\n"
    )
    io = "max_batch_size: 8\n" + one("FP32", "FP32", [64])
    torch_files.script(Slow(rounds), configure(tmp_path / "root", "slow", io + priorities + ONE_THREAD))
    latencies = []

    with (
        EmbeddedServer(tmp_path / "root", cpus=[last_cpu]) as server,
        tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as client,
    ):

        def timed(delay_s: float) -> None:
            time.sleep(delay_s)
            begun = time.perf_counter()
            infer(client, "slow", np.ones((1, 64), np.float32))
            latencies.append((time.perf_counter() - begun) * 1e3)

        for _ in range(10):
            both = [threading.Thread(target=timed, args=(delay_s,)) for delay_s in (0, 0.015)]
            for thread in both:
                thread.start()
            for thread in both:
                thread.join()
        assert server.is_alive()
    assert max(latencies) < 400  # a stall is 500 ms and more
