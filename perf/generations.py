"""Which generation of a model answered? Models whose answers tell, and an open-loop load over HTTP and gRPC that notes it.

    subject = ctr(folder)                                # folder/models/ctr with generation 0 of the model
    file = subject.files(3, folder)                      # {"ctr": .../model.onnx} of generation 3
    with Load(server.endpoints, [Rate(subject, "http", 100.0)]) as load:
        ...
    load.take()                                          # [Call(generations={3}, version="4", latency_ms=2.1), ...]

Generation g of a model answers (1 - g/1000) times what generation 0 answers: near enough for any tolerance, and far enough
apart that every single row tells who computed it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from perf import callers
from perf.frame import PROJECT
from tritonpilot import build, repository, samples
from tritonpilot.errors import MeasurementError
from tritonpilot.server import Endpoints
from tritonpilot.spec import load_services

STEP = 1e-3  # from one generation's answers to the next one's, of generation 0's
CERTAIN = 0.2  # of a step: an answer farther from every generation than this is nobody's
WIDTH = 8
JSON_BYTES = "Inference-Header-Content-Length"
METHOD = "/inference.GRPCInferenceService/ModelInfer"
TIMEOUT_S = 30.0
SIZES = (1, 1, 1, 4)  # rows of the requests, in turn
QUESTIONS = 64
Arrays = Mapping[str, npt.NDArray[Any]]

PAIR = """\
service: pair
pipeline:
  samples: samples.npz
  inputs: [{name: x, data_type: FP32, dims: [8]}]
  outputs: [{name: y, data_type: FP32, dims: [8]}, {name: of_first, data_type: FP32, dims: [1]}, {name: of_second, data_type: FP32, dims: [1]}]
  steps:
    - {name: first, model: {file: first.onnx, samples: samples.npz}, outputs: {y: half, mark: of_first}}
    - {name: second, model: {file: second.onnx}, inputs: {x: half}, outputs: {y: y, mark: of_second}}
batching: {max_batch_size: 16}
"""  # noqa: E501


@dataclass(frozen=True)
class Question:
    """A request, and what generation 0 answers to it: of the outputs that tell the generation."""

    inputs: Arrays
    base: Arrays


@dataclass(frozen=True)
class Subject:
    """A service whose generations can be told apart. `members` are the models whose files a generation consists of."""

    service: str
    members: tuple[str, ...]
    sources: Mapping[str, Path]
    questions: tuple[Question, ...]

    def files(self, generation: int, folder: Path) -> dict[str, Path]:
        """The model files of a generation, in `folder`, where they are made once: member -> file."""
        found = {member: folder / f"{member}_{generation}.onnx" for member in self.members}
        for member, file in found.items():
            if not file.exists():
                write_generation(self.sources[member], file, generation)
        return found

    def generations(self, question: int, outputs: Arrays) -> frozenset[int]:
        """Those that took part in an answer; -1 stands for values that no generation gives."""
        found: set[int] = set()
        for name, base in self.questions[question].base.items():
            if name not in outputs or outputs[name].shape != base.shape:
                return frozenset({-1})
            steps = (1 - outputs[name].astype(float) / base) / STEP
            nearest = np.rint(steps)
            is_known = np.isfinite(steps) & (np.abs(steps - nearest) < CERTAIN) & (nearest >= 0)
            found.update(int(each) for each in np.where(is_known, nearest, -1).ravel())
        return frozenset(found)


@dataclass(frozen=True)
class Rate:
    """So many requests a second to a subject, at random times, over one protocol."""

    subject: Subject
    over: str
    per_s: float


@dataclass(frozen=True)
class Call:
    """A request that was due at `due_s` of time.perf_counter, and what came; `error` is "" when it was answered."""

    service: str
    over: str
    due_s: float
    sent_s: float
    done_s: float
    error: str
    version: str
    generations: frozenset[int]

    @property
    def latency_ms(self) -> float:
        """From the time that it was due at."""
        return (self.done_s - self.due_s) * 1e3


# -- subjects ----------------------------------------------------------------------------------------------------------


def ctr(folder: Path) -> Subject:
    """The example service ctr, as generation 0, in folder/models."""
    source, place = PROJECT / "models" / "ctr", folder / "models" / "ctr"
    (place / "build").mkdir(parents=True)
    for name in ("service.yaml", "build/model.onnx", "build/samples.npz"):
        shutil.copyfile(source / name, place / name)
    rows = samples.read(place / "build" / "samples.npz")
    return Subject(
        "ctr",
        ("ctr",),
        {"ctr": place / "build" / "model.onnx"},
        _questions(place / "build/model.onnx", rows, ("prob",)),
    )


def pair(folder: Path) -> Subject:
    """A pipeline of two small networks, each of which puts a mark into the answer."""
    place = folder / "models" / "pair"
    place.mkdir(parents=True)
    (place / "service.yaml").write_text(PAIR, encoding="utf-8")
    random = np.random.default_rng(5)
    rows = {"x": random.uniform(0.5, 1.5, (256, WIDTH)).astype(np.float32)}
    np.savez(place / "samples.npz", **rows)
    sources = {}
    for member in ("first", "second"):
        sources[f"pair_{member}"] = place / f"{member}.onnx"
        _write_small(place / f"{member}.onnx", random)
    ones = [np.ones((size, 1), np.float32) for size in SIZES]
    questions = tuple(Question({"x": rows["x"][: len(mark)]}, {"of_first": mark, "of_second": mark}) for mark in ones)
    return Subject("pair", tuple(sources), sources, questions)


def published(folder: Path) -> Path:
    """A repository in `folder` with the services of folder/models."""
    root = folder / "model_repository"
    root.mkdir(exist_ok=True)
    repository.publish(root, build.folders(build.plan(load_services(folder / "models"))))
    return root


def write_generation(source: Path, target: Path, generation: int) -> None:
    """Generation `generation` of a network: its outputs that tell (see `_tells`) times (1 - generation/1000)."""
    model = onnx.load(str(source))
    names = _tells(model)
    for node in model.graph.node:
        for place, output in enumerate(node.output):
            if output in names:
                node.output[place] = f"{output}_0"
    factor = numpy_helper.from_array(np.array(1 - STEP * generation, np.float32), "generation")
    model.graph.initializer.append(factor)
    model.graph.node.extend(helper.make_node("Mul", [f"{name}_0", "generation"], [name]) for name in names)
    onnx.save(model, str(target))


def _tells(model: onnx.ModelProto) -> set[str]:
    """The outputs by which a generation is told: a mark where there is one."""
    outputs = {output.name for output in model.graph.output}
    return {"mark"} if "mark" in outputs else outputs


def _questions(file: Path, rows: Arrays, outputs: Sequence[str]) -> tuple[Question, ...]:
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = {entry.name for entry in session.get_inputs()}
    found = []
    for number in range(QUESTIONS):
        size = SIZES[number % len(SIZES)]
        cut = {
            name: array.take(range(number * size, (number + 1) * size), axis=0, mode="wrap")
            for name, array in rows.items()
            if name in names
        }
        answers = session.run(list(outputs), cut)
        found.append(Question(cut, dict(zip(outputs, answers, strict=True))))
    return tuple(found)


def _write_small(file: Path, random: np.random.Generator) -> None:
    """x FP32[b,8] -> y FP32[b,8]: a layer; mark FP32[b,1]: 1."""
    width: list[str | int] = ["b", WIDTH]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["z"]),
            helper.make_node("Sigmoid", ["z"], ["y"]),
            helper.make_node("ReduceMean", ["y"], ["m"], axes=[1], keepdims=1),
            helper.make_node("Div", ["m", "m"], ["mark"]),
        ],
        file.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, width)],
        [
            helper.make_tensor_value_info("y", TensorProto.FLOAT, width),
            helper.make_tensor_value_info("mark", TensorProto.FLOAT, ["b", 1]),
        ],
        [numpy_helper.from_array(random.standard_normal((WIDTH, WIDTH)).astype(np.float32), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(file))


# -- load --------------------------------------------------------------------------------------------------------------


@dataclass
class _Noted:
    """A call whose answer is not read yet."""

    rate: Rate
    question: int
    due_s: float
    sent_s: float
    done_s: float = 0.0
    error: str = ""
    content: bytes = b""


@dataclass
class Load:
    """Requests at random times from a thread of its own, on `core` where one is named, until the block ends."""

    endpoints: Endpoints
    rates: Sequence[Rate]
    core: int | None = None
    seed: int = 0
    under_way: int = 0
    _noted: deque[_Noted] = field(default_factory=deque)

    def __enter__(self) -> Load:
        self._ends = threading.Event()
        self._failed: list[BaseException] = []
        gc.collect()
        gc.disable()  # a collection takes longer than an answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        gc.enable()
        if self._failed:
            raise MeasurementError(f"The load broke off: {self._failed[0]!r}. Nothing is reported. Repeat.")

    def wait_for_answers(self, patience_s: float = TIMEOUT_S) -> None:
        """Return when every rate has had an answer. Raises MeasurementError when one has none."""
        deadline = time.monotonic() + patience_s
        while True:
            answered = {id(noted.rate) for noted in list(self._noted) if not noted.error}
            if answered == {id(rate) for rate in self.rates}:
                return
            if time.monotonic() > deadline:
                raise MeasurementError(f"Waited {patience_s:g} s for answers to all callers. Nothing is reported.")
            time.sleep(0.02)

    def take(self) -> list[Call]:
        """The calls that ended since the last time, in the order of their ends."""
        return [_read(self._noted.popleft()) for _ in range(len(self._noted))]

    def _run(self) -> None:
        try:
            if self.core is not None:
                os.sched_setaffinity(0, {self.core})  # of this thread
            asyncio.run(self._offer())
        except BaseException as error:  # noqa: BLE001 -- told when the block ends
            self._failed.append(error)

    async def _offer(self) -> None:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(
                f"http://{self.endpoints.http}", connector=aiohttp.TCPConnector(limit=0), timeout=timeout
            ) as session,
            grpc.aio.insecure_channel(self.endpoints.grpc, options=options) as channel,
        ):
            infer = channel.unary_unary(METHOD)

            async def post(body: callers.Body) -> bytes:
                async with session.post(body.path, data=body.content, headers=body.headers) as answer:
                    content: bytes = await answer.read()
                    if answer.status != 200:
                        raise MeasurementError(f"{answer.status} {content[:200].decode(errors='replace')}")
                    return int(answer.headers.get(JSON_BYTES, len(content))).to_bytes(8, "little") + content

            async def call(body: bytes) -> bytes:
                answer: bytes = await infer(body, timeout=TIMEOUT_S)
                return answer

            await asyncio.gather(
                *(self._rate(rate, number, _asks(rate, post, call)) for number, rate in enumerate(self.rates))
            )

    async def _rate(self, rate: Rate, number: int, asks: Sequence[Callable[[], Awaitable[bytes]]]) -> None:
        random = np.random.default_rng([self.seed, number])
        due_s = time.perf_counter()
        pending: set[asyncio.Task[None]] = set()
        turn = 0
        while not self._ends.is_set():
            due_s += float(random.exponential(1 / rate.per_s))
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            question = turn % len(asks)
            task = asyncio.create_task(self._call(_Noted(rate, question, due_s, time.perf_counter()), asks[question]))
            pending.add(task)
            task.add_done_callback(pending.discard)
            turn += 1
        await asyncio.gather(*pending)

    async def _call(self, noted: _Noted, ask: Callable[[], Awaitable[bytes]]) -> None:
        self.under_way += 1
        noted.sent_s = time.perf_counter()
        try:
            noted.content = await ask()
        except Exception as failed:  # noqa: BLE001 -- whatever it is: the call has failed
            noted.error = f"{type(failed).__name__}: {failed}"[:300]
        noted.done_s = time.perf_counter()
        self.under_way -= 1
        self._noted.append(noted)


def _asks(
    rate: Rate, post: Callable[[callers.Body], Awaitable[bytes]], call: Callable[[bytes], Awaitable[bytes]]
) -> list[Callable[[], Awaitable[bytes]]]:
    """How each question is asked."""
    questions = rate.subject.questions
    if rate.over == "http":
        bodies = [callers.body(rate.subject.service, question.inputs) for question in questions]
        return [lambda body=body: post(body) for body in bodies]  # type: ignore[misc]
    messages = [_message(rate.subject.service, question.inputs) for question in questions]
    return [lambda message=message: call(message) for message in messages]  # type: ignore[misc]


def _message(model: str, inputs: Arrays) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        request.raw_input_contents.append(samples.raw(array))
    encoded: bytes = request.SerializeToString()
    return encoded


def _read(noted: _Noted) -> Call:
    version, generations = "", frozenset[int]()
    if not noted.error:
        version, outputs = _answer_of(noted)
        generations = noted.rate.subject.generations(noted.question, outputs)
    return Call(
        noted.rate.subject.service, noted.rate.over, noted.due_s, noted.sent_s, noted.done_s, noted.error, version, generations
    )  # fmt: skip


def _answer_of(noted: _Noted) -> tuple[str, dict[str, npt.NDArray[Any]]]:
    """Its model version and its outputs."""
    if noted.rate.over == "http":
        length = int.from_bytes(noted.content[:8], "little")
        result = tritonclient.http.InferenceServerClient.parse_response_body(noted.content[8:], header_length=length)
        told = result.get_response()
        return told["model_version"], {each["name"]: result.as_numpy(each["name"]) for each in told["outputs"]}
    answer = service_pb2.ModelInferResponse.FromString(noted.content)
    return answer.model_version, {
        each.name: np.frombuffer(raw, triton_to_np_dtype(each.datatype)).reshape(list(each.shape))
        for each, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }
