"""A person's own services of every kind, from service file to a real answer: what builds also serves, and measures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from onnx import TensorProto
from unit.onnx_files import identity

from tritonpilot import build, repository, samples, spec, sweep
from tritonpilot.server import EmbeddedServer

SERVICES = {
    # name: (dims, ONNX type, samples, max_batch_size)
    "text_unicode": (("batch", 1), TensorProto.STRING, np.array([["hallo"], ["größe"]]), 8),
    "text_bytes": (("batch", 1), TensorProto.STRING, np.array([[b"hello"], [b"x"]]), 8),
    "unbatched": ((2, 3), TensorProto.FLOAT, np.ones((4, 2, 3), np.float32), 0),
    "unbatched_vector": (("n",), TensorProto.FLOAT, np.ones((3, 4), np.float32), 0),
    "vector_per_batch": (("batch",), TensorProto.FLOAT, np.ones(3, np.float32), 8),
    "no_samples": (("batch", 2), TensorProto.INT64, None, 8),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own") / "models"
    for name, (dims, element, rows, size) in SERVICES.items():
        identity(root / name / "model.onnx", dims, element)
        lines = [f"service: {name}", "model:", "  file: model.onnx", f"batching: {{max_batch_size: {size}}}"]
        if rows is not None:
            np.savez(root / name / "samples.npz", x=rows)
            lines.insert(3, "  samples: samples.npz")
            lines.append("warmup: {batch_sizes: [1]}")
        (root / name / "service.yaml").write_text("\n".join(lines) + "\n")
    (root / "twice").mkdir()
    (root / "twice" / "service.yaml").write_text(
        "service: twice\nbatching: {max_batch_size: 8}\npipeline:\n"
        "  inputs: [{name: in, data_type: BYTES, dims: [1]}]\n  outputs: [{name: out, data_type: BYTES, dims: [1]}]\n"
        "  steps:\n    - {service: text_unicode, inputs: {x: in}, outputs: {y: mid}}\n"
        "    - {service: text_bytes, inputs: {x: mid}, outputs: {y: out}}\n"
    )
    return root


@pytest.fixture(scope="module")
def served(models: Path) -> Iterator[EmbeddedServer]:
    root = models.parent / "model_repository"
    repository.publish(root, [plan.folder for plan in build.plan(spec.load_services(models))])
    with EmbeddedServer(root, probe_inputs=build.probe_inputs(models, root)) as server:
        yield server


@pytest.mark.parametrize("name", [name for name, (_, _, rows, _) in SERVICES.items() if rows is not None])
def test_each_kind_answers_its_own_sample(served: EmbeddedServer, models: Path, name: str) -> None:
    inputs = build.probe_inputs(models, served.repository)[name]["x"]
    kind = "BYTES" if name.startswith("text") else "FP32"
    tensor = tritonclient.grpc.InferInput("x", inputs.shape, kind)
    tensor.set_data_from_numpy(inputs)

    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
        answer = client.infer(name, [tensor]).as_numpy("y")

    assert (answer == inputs).all()


def test_an_ensemble_passes_strings_through_its_members(served: EmbeddedServer) -> None:
    tensor = tritonclient.grpc.InferInput("in", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([["größe".encode()]], np.object_))

    with tritonclient.grpc.InferenceServerClient(served.endpoints.grpc) as client:
        answer = client.infer("twice", [tensor]).as_numpy("out")

    assert answer.tolist() == [["größe".encode()]]


def test_configs_of_the_build_are_not_completed_at_the_start(served: EmbeddedServer) -> None:
    assert " strict_model_config              | 1 " in served.log_file.read_text()


def test_an_ensemble_is_built_by_its_name_alone(models: Path) -> None:
    everything = spec.load_services(models)

    plans = build.plan(spec.load_services(models, ["twice"]), "auto", everything)

    assert [plan.service.service for plan in plans] == ["twice"]


@pytest.mark.parametrize("name", ["text_unicode", "unbatched"])
def test_each_kind_is_measured(served: EmbeddedServer, models: Path, name: str) -> None:
    rows = samples.read(models / name / "samples.npz")

    (point,) = sweep.measure(served.endpoints.grpc, name, rows, concurrencies=[2], window_ms=300, attempts=1)

    assert point.throughput_infer_s > 0
