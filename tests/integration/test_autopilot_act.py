"""Settings of a model change while it serves: instances in place, the delay live, the rest beside, and what fails is undone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from perf import emulated
from pilotlib.live_delay import MEMORY
from tritonpilot import machine, metrics
from tritonpilot.autopilot import live
from tritonpilot.autopilot.act import Actor
from tritonpilot.autopilot.terms import Knobs
from tritonpilot.errors import ServerError
from tritonpilot.server import EmbeddedServer

pytestmark = pytest.mark.server

MODEL = "accelerated"
SERVICE = """\
batching: {max_batch_size: 64, queue_delay_us: 1000}
classes:
  - {name: realtime, priority: 1, max_queue_size: 100}
  - {name: batch, priority: 2, max_queue_size: 4}
"""
ONNX_CONFIG = """
backend: "onnxruntime"
max_batch_size: 64
input [{ name: "row" data_type: TYPE_FP32 dims: [1] }]
output [{ name: "y" data_type: TYPE_FP32 dims: [1] }]
instance_group [{ count: 1 kind: KIND_CPU }]
dynamic_batching { }
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    root = emulated.repository_of(tmp_path_factory.mktemp("act"), {MODEL: SERVICE})
    (root / "onnx" / "1").mkdir(parents=True)
    (root / "onnx" / "config.pbtxt").write_text(ONNX_CONFIG)
    row, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 1]) for name in ("row", "y"))
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["row", "row"], ["y"])], "double", [row], [y])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8),
        root / "onnx" / "1" / "model.onnx",
    )
    with EmbeddedServer(root) as running:
        yield running
        running.check_alive()


@pytest.fixture
def actor(server: EmbeddedServer) -> Iterator[Actor]:
    with Actor(
        server.endpoints.grpc, server.control_key, metrics=server.endpoints.metrics, repository=server.repository
    ) as one:
        yield one
        one.apply(MODEL, Knobs(0, 1, {"batch": 4}))
        one.apply("onnx", Knobs(0, 1))


@pytest.fixture
def client(server: EmbeddedServer) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(server.endpoints.grpc) as one:
        yield one


def ask(
    client: tritonclient.grpc.InferenceServerClient,
    model: str,
    parameters: dict[str, str] | None = None,
    priority: int = 0,
) -> None:
    row = tritonclient.grpc.InferInput("row", [1, 1], "FP32")
    row.set_data_from_numpy(np.ones((1, 1), np.float32))
    client.infer(model, [row], parameters=parameters, priority=priority)


def stubs(server: EmbeddedServer, model: str = MODEL) -> set[int]:
    return set(machine.stub_pids(server.pid)[model])


def eventually(what: str, holds: object, *, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.parametrize("knows_the_repository", [True, False])
def test_instances_come_and_go_in_place(server: EmbeddedServer, actor: Actor, knows_the_repository: bool) -> None:
    one = actor
    if not knows_the_repository:
        one = Actor(server.endpoints.grpc, server.control_key, metrics=server.endpoints.metrics)
    eventually("copies of before have ended", lambda: len(stubs(server)) == 1)
    first = stubs(server)
    before = server.statistics(MODEL)[0].inference_count
    now = one.knobs(MODEL)
    assert one.apply(MODEL, Knobs(now.queue_delay_us, 3)).instances == 3
    assert first < stubs(server)
    assert len(stubs(server)) == 3
    assert one.apply(MODEL, Knobs(now.queue_delay_us, 2)) == Knobs(now.queue_delay_us, 2, now.max_queue_sizes)
    eventually("the stub of an instance that went has ended", lambda: len(stubs(server)) == 2)
    assert server.statistics(MODEL)[0].inference_count > before, "the counters went on"
    if not knows_the_repository:
        one.close()


@pytest.mark.parametrize("model", [MODEL, "onnx"])
def test_the_delay_changes_live_for_all_instances(
    server: EmbeddedServer, actor: Actor, client: tritonclient.grpc.InferenceServerClient, model: str
) -> None:
    actor.apply(model, Knobs(0, 2))  # Triton's own delay is gone
    eventually("copies of before have ended", lambda: len(stubs(server, model)) == 2)
    instances = stubs(server, model)
    assert actor.is_live(model)
    assert actor.apply(model, Knobs(30_000, 2)).queue_delay_us == 30_000
    assert stubs(server, model) == instances

    def executions(seconds: float) -> tuple[int, int]:
        def call(until: float) -> int:
            count = 0
            while time.monotonic() < until:
                ask(client, model)
                count += 1
            return count

        before = server.statistics(model)[0].execution_count
        with ThreadPoolExecutor(8) as pool:
            asked = sum(pool.map(call, [time.monotonic() + seconds] * 8))
        return asked, server.statistics(model)[0].execution_count - before

    def held_us() -> float:
        return metrics.value(metrics.scrape(server.endpoints.metrics), "pilot_held_us_total", model=model)

    asked, executed = executions(1.5)
    assert executed <= 2 * 2 * 1.5 / 0.03 + 8, "at most two within the delay, of each instance"
    assert asked > executed
    assert held_us() > 100_000
    assert actor.apply(model, Knobs(0, 2)).queue_delay_us == 0
    before_us = held_us()
    executions(1.2)
    assert held_us() == before_us
    assert stubs(server, model) == instances


def test_only_who_has_the_key_sets_it_and_each_word_counts_once(
    server: EmbeddedServer, actor: Actor, client: tritonclient.grpc.InferenceServerClient
) -> None:
    actor.apply(MODEL, Knobs(0, 1))

    def set_by(value: str) -> None:
        ask(client, MODEL, {live.PARAMETER: value})

    def now_us() -> int | None:
        return live.delay_us(metrics.scrape(server.endpoints.metrics), MODEL)

    said = live.signed(server.control_key, MODEL, 700)
    for wrong in (
        "700",
        "",
        live.signed("", MODEL, 700),
        live.signed("another key of 16", MODEL, 700),
        live.signed(server.control_key, "onnx", 700),
        said.replace("700:", "7000:"),
        said[:-1],
    ):
        with pytest.raises(InferenceServerException, match="not signed"):
            set_by(wrong)
    for delay_us in (2_000_000, -1):
        with pytest.raises(InferenceServerException, match="takes 0 to"):
            set_by(live.signed(server.control_key, MODEL, delay_us))
    assert now_us() == 0
    set_by(said)
    assert now_us() == 700
    set_by(live.signed(server.control_key, MODEL, 0))
    with pytest.raises(InferenceServerException, match="said before"):
        set_by(said)
    assert now_us() == 0


def test_without_the_key_nothing_changes_and_it_says_so(server: EmbeddedServer, actor: Actor) -> None:
    before = actor.apply(MODEL, Knobs(0, 1))
    with Actor(server.endpoints.grpc, "wrong key, 16 letters", metrics=server.endpoints.metrics) as stranger:
        for target in (Knobs(5000, 1), Knobs(0, 2), Knobs(0, 1, {"batch": 9})):
            with pytest.raises(ServerError, match="could not be given"):
                stranger.apply(MODEL, target)
    assert actor.knobs(MODEL) == before


def test_a_reload_keeps_what_is_not_named_and_a_live_delay(server: EmbeddedServer, actor: Actor) -> None:
    actor.apply(MODEL, Knobs(0, 1))
    actor.apply(MODEL, Knobs(3000, 1))
    assert actor.apply(MODEL, Knobs(3000, 2, {"batch": 9})) == Knobs(3000, 2, {"realtime": 100, "batch": 9})
    assert live.delay_us(metrics.scrape(server.endpoints.metrics), MODEL) == 3000
    with pytest.raises(ServerError, match="by a reload only.*Nothing was changed"):
        actor.apply(MODEL, Knobs(3000, 2, {"batch": 5}), "instances")


def test_a_delay_may_be_changed_by_a_reload(server: EmbeddedServer, actor: Actor) -> None:
    actor.apply(MODEL, Knobs(0, 1))
    assert actor.apply(MODEL, Knobs(2500, 1), "reload").queue_delay_us == 2500
    assert live.delay_us(metrics.scrape(server.endpoints.metrics), MODEL) == 0


def test_what_cannot_be_loaded_is_undone(server: EmbeddedServer, actor: Actor) -> None:
    before = actor.apply(MODEL, Knobs(0, 1))
    curve = server.repository / MODEL / "1" / "curve.json"
    content = curve.read_bytes()
    curve.write_bytes(b"{}")
    try:
        with pytest.raises(ServerError, match="curve.*It serves with .* as before"):
            actor.apply(MODEL, Knobs(0, 1, {"batch": 9}))
        assert actor.knobs(MODEL) == before
    finally:
        curve.write_bytes(content)
    assert actor.apply(MODEL, Knobs(0, 1, {"batch": 9})).max_queue_sizes["batch"] == 9


def test_changes_are_made_and_verified_while_the_queue_is_full(
    actor: Actor, client: tritonclient.grpc.InferenceServerClient
) -> None:
    actor.apply(MODEL, Knobs(0, 1, {"batch": 4}))
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            try:
                ask(client, MODEL, priority=2)
            except InferenceServerException:
                time.sleep(0.001)

    with ThreadPoolExecutor(16) as pool:
        for _ in range(16):
            pool.submit(flood)
        try:
            assert actor.apply(MODEL, Knobs(0, 2)).instances == 2
            assert actor.apply(MODEL, Knobs(2000, 2)).queue_delay_us == 2000
            assert actor.apply(MODEL, Knobs(0, 1)).instances == 1
        finally:
            is_over.set()


def test_the_delay_goes_with_its_server(tmp_path: Path) -> None:
    root = emulated.repository_of(tmp_path, {"alone": SERVICE.replace("queue_delay_us: 1000", "queue_delay_us: 0")})
    for _ in range(2):
        with (
            EmbeddedServer(root) as running,
            Actor(running.endpoints.grpc, running.control_key, metrics=running.endpoints.metrics) as actor,
        ):
            assert actor.knobs("alone").queue_delay_us == 0
            actor.apply("alone", Knobs(4000, 1))
            (memory,) = MEMORY.glob(f"*_{os.getpid()}_*live_alone")
        assert not memory.exists()
