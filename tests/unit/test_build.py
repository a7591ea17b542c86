from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tritonclient.grpc import model_config_pb2
from unit.onnx_files import identity, save

from tritonpilot import build, model_config
from tritonpilot.errors import DriftError, ModelError, RepositoryError, SpecError
from tritonpilot.repository import backend, called, publish
from tritonpilot.spec import load_services

GOOD = """\
service: iris
model:
  file: model.onnx
  samples: samples.npz
batching:
  max_batch_size: 8
  queue_delay_us: 100
classes:
  - {name: realtime, priority: 1, timeout_ms: 40, max_queue_size: 50}
  - {name: batch, priority: 2, timeout_action: delay}
default_class: batch
warmup: {batch_sizes: [1, 8], count: 2}
"""


@pytest.fixture
def services(tmp_path: Path) -> Callable[..., list[Any]]:
    """Write models/iris with a replaced service file and load it."""
    folder = tmp_path / "models" / "iris"
    identity(folder / "model.onnx")
    np.savez(folder / "samples.npz", x=np.arange(8, dtype=np.float32).reshape(2, 4))

    def load(old: str = "", new: str = "") -> list[Any]:
        assert old in GOOD
        (folder / "service.yaml").write_text(GOOD.replace(old, new) if old else GOOD)
        return load_services(tmp_path / "models")

    return load


def config_of(services: list[Any], target: Any = "auto") -> Any:
    (plan,) = build.plan(services, target)
    return model_config.parse(plan.folder.config_text, "test")


def test_config_says_what_the_service_file_and_the_model_say(services: Callable[..., list[Any]]) -> None:
    config = config_of(services(), "cpu")

    assert (config.name, config.backend, config.max_batch_size) == ("iris", "onnxruntime", 8)
    assert [(t.name, t.data_type, list(t.dims)) for t in config.input] == [("x", model_config_pb2.TYPE_FP32, [4])]
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    assert config.dynamic_batching.max_queue_delay_microseconds == 100
    assert config.parameters["intra_op_thread_count"].string_value == "1"
    assert config.parameters["pilot_classes"].string_value == "realtime:1,batch:2"
    assert [(w.batch_size, w.count, w.inputs["x"].input_data_file) for w in config.model_warmup] == [
        (1, 2, "x.bin"),
        (8, 2, "x.bin"),
    ]


def test_each_class_is_a_level_and_one_more_rejects_wake_requests(services: Callable[..., list[Any]]) -> None:
    batcher = config_of(services()).dynamic_batching
    policies = batcher.priority_queue_policy
    action = model_config_pb2.ModelQueuePolicy

    assert (batcher.priority_levels, batcher.default_priority_level) == (3, 2)
    assert (policies[1].default_timeout_microseconds, policies[1].max_queue_size) == (40_000, 50)
    assert policies[2].timeout_action == action.DELAY
    assert policies[2].default_timeout_microseconds == 3_600_000_000
    assert not policies[1].allow_timeout_override, (
        "with a queue delay a request that expires in it would leave the batcher asleep"
    )
    assert (policies[3].timeout_action, policies[3].default_timeout_microseconds) == (action.REJECT, 1)


def test_an_int8_model_that_was_not_made_names_the_command(services: Callable[..., list[Any]]) -> None:
    quantize = "  samples: samples.npz\n  quantize: {calibration: c.npz, evaluation: e.npz, publish: beside}\n"
    with pytest.raises(ModelError, match=r"model\.int8\.onnx does not exist\..*`tritonpilot quantize iris`"):
        build.plan(services("  samples: samples.npz\n", quantize))


def test_without_a_queue_delay_a_request_may_shorten_its_timeout(services: Callable[..., list[Any]]) -> None:
    policies = config_of(services("queue_delay_us: 100", "queue_delay_us: 0")).dynamic_batching.priority_queue_policy
    assert policies[1].allow_timeout_override


def test_without_classes_there_are_no_priorities_and_no_policies(services: Callable[..., list[Any]]) -> None:
    start = GOOD.index("classes:")
    config = config_of(services(GOOD[start : GOOD.index("warmup:")], ""))

    assert config.dynamic_batching.priority_levels == 0
    assert "pilot_wake_priority" not in config.parameters


def test_the_gpu_target_comes_from_the_same_file(services: Callable[..., list[Any]]) -> None:
    new = "instances: [{gpus: [0, 1], count: 2}]\nwarmup"
    config = config_of(services("warmup", new), "gpu")

    group = config.instance_group[0]
    assert (group.kind, list(group.gpus), group.count) == (model_config_pb2.ModelInstanceGroup.KIND_GPU, [0, 1], 2)
    with pytest.raises(SpecError, match="--target cpu` cannot use"):
        config_of(services("warmup", new), "cpu")


def test_the_gpu_target_may_use_tensorrt_inside_onnxruntime(services: Callable[..., list[Any]]) -> None:
    gpu = "samples: samples.npz\n  gpu: {accelerator: tensorrt, precision: fp16}"
    accelerators = config_of(services("samples: samples.npz", gpu), "gpu").optimization.execution_accelerators

    assert accelerators.gpu_execution_accelerator[0].name == "tensorrt"
    assert accelerators.gpu_execution_accelerator[0].parameters["precision_mode"] == "FP16"


@pytest.mark.parametrize(("suffix", "backend"), [("plan", "tensorrt"), ("pt", "pytorch"), ("pt2", "pytorch")])
def test_formats_that_cannot_be_read_here_need_a_stated_signature(
    services: Callable[..., list[Any]], tmp_path: Path, suffix: str, backend: str
) -> None:
    (tmp_path / "models/iris" / f"gpu.{suffix}").write_bytes(b"engine")
    gpu = f"samples: samples.npz\n  gpu: {{file: gpu.{suffix}}}"
    with pytest.raises(SpecError, match="State model.inputs and model.outputs"):
        config_of(services("samples: samples.npz", gpu), "gpu")

    stated = "[{name: x, data_type: FP32, dims: [4]}]"
    config = config_of(services("samples: samples.npz", f"{gpu}\n  inputs: {stated}\n  outputs: {stated}"), "gpu")

    assert (config.backend, config.default_model_filename) == (backend, f"model.{suffix}")


def test_extra_triton_fields_are_merged_and_checked(services: Callable[..., list[Any]]) -> None:
    config = config_of(services("warmup", "triton: {optimization: {graph: {level: 1}}}\nwarmup"))
    assert config.optimization.graph.level == 1

    with pytest.raises(SpecError, match="something that Triton's ModelConfig does not take"):
        config_of(services("warmup", "triton: {optimisation: {}}\nwarmup"))


def test_rate_limiter_versions_and_cache_are_written(services: Callable[..., list[Any]]) -> None:
    extra = (
        "rate_limiter: {resources: [{name: R, count: 2, is_global: true}], priority: 3}\n"
        "version_policy: {specific: [1]}\ncache: {kind: triton}\nwarmup"
    )
    config = config_of(services("warmup", extra))

    limiter = config.instance_group[0].rate_limiter
    assert (limiter.priority, limiter.resources[0].name, limiter.resources[0].count) == (3, "R", 2)
    assert getattr(limiter.resources[0], "global")
    assert list(config.version_policy.specific.versions) == [1]
    assert config.response_cache.enable


@pytest.mark.parametrize(
    ("cache", "written"),
    [
        ("{kind: lfu}", "max_mb:64"),
        ("{kind: lfu, max_mb: 0.5, ttl_s: 600}", "max_mb:0.5,ttl_s:600"),
    ],
)
def test_what_the_entry_may_keep_is_in_the_config(services: Callable[..., list[Any]], cache: str, written: str) -> None:
    assert "pilot_cache" not in config_of(services()).parameters
    config = config_of(services("batching:", f"cache: {cache}\nbatching:"))
    assert config.parameters["pilot_cache"].string_value == written
    assert not config.response_cache.enable


def test_a_services_trace_rate_is_in_its_config(services: Callable[..., list[Any]]) -> None:
    assert "pilot_trace_rate" not in config_of(services()).parameters
    assert (
        config_of(services("batching:", "tracing: {}\nbatching:")).parameters["pilot_trace_rate"].string_value == "1000"
    )


def test_a_missing_model_file_names_the_cure(services: Callable[..., list[Any]]) -> None:
    with pytest.raises(ModelError, match="none.onnx does not exist. Nothing was changed. Put it there"):
        build.plan(services("file: model.onnx", "file: none.onnx"))
    with pytest.raises(ModelError, match="Run `tritonpilot build iris --prepare`"):
        build.plan(services("file: model.onnx", "file: none.onnx\n  prepare: train.py"))


@pytest.mark.parametrize("keep", [0, 10, 60])
def test_a_corrupt_model_file_is_refused(services: Callable[..., list[Any]], tmp_path: Path, keep: int) -> None:
    path = tmp_path / "models/iris/model.onnx"
    path.write_bytes(path.read_bytes()[:keep] + b"\xff" * 20)

    with pytest.raises(ModelError, match="is not a valid ONNX model"):
        build.plan(services())


def test_a_model_without_batch_dimension_is_refused(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    identity(tmp_path / "models/iris/model.onnx", dims=(1, 4))

    with pytest.raises(ModelError, match=r"input x of model.onnx has the shape \[1, 4\] without a variable first"):
        build.plan(services())


def test_a_scalar_without_batch_dimension_is_refused(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    identity(tmp_path / "models/iris/model.onnx", dims=())
    start = GOOD.index("  samples:")

    with pytest.raises(ModelError, match="input x of model.onnx is a scalar"):
        build.plan(services(GOOD[start:], "batching: {max_batch_size: 0}\n"))


def test_a_vector_per_batch_gets_a_reshape(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    identity(tmp_path / "models/iris/model.onnx", dims=("batch",))
    np.savez(tmp_path / "models/iris/samples.npz", x=np.zeros(3, np.float32))

    config = config_of(services())

    assert list(config.input[0].dims) == [1]
    assert config.input[0].HasField("reshape")
    assert list(config.input[0].reshape.shape) == []


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ("[{name: y, data_type: FP32, dims: [4]}]", "input y is not in model.onnx, whose inputs are x"),
        ("[{name: x, data_type: FP16, dims: [4]}]", "input x is stated as FP16, but the model has FP32"),
        ("[{name: x, data_type: FP32, dims: [5]}]", "input x is stated with dims [5], but the model has [4]"),
        ("[{name: x, data_type: FP32, dims: [4, 4]}]", "but the model has [4]"),
    ],
)
def test_what_contradicts_the_model_is_refused(services: Callable[..., list[Any]], stated: str, said: str) -> None:
    with pytest.raises(ModelError) as refused:
        build.plan(services("file: model.onnx", f"file: model.onnx\n  inputs: {stated}"))

    assert said in str(refused.value)
    assert "Nothing was changed." in str(refused.value)


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.zeros((2, 5), np.float32)}, "rows of [5], but the model takes FP32 [4]"),
        ({"x": np.zeros((2, 4), np.float64)}, "are float64 rows"),
        ({"z": np.zeros((2, 4), np.float32)}, "have no array for the input x (they have z)"),
        ({"x": np.zeros((0, 4), np.float32)}, "holds no rows"),
        ({"x": np.zeros((2, 4), np.float32), "z": np.zeros(3)}, "differ in their rows (x 2, z 3)"),
    ],
)
def test_samples_that_do_not_fit_are_refused(
    services: Callable[..., list[Any]], tmp_path: Path, arrays: dict[str, Any], said: str
) -> None:
    np.savez(tmp_path / "models/iris/samples.npz", **arrays)

    with pytest.raises(ModelError) as refused:
        build.plan(services())
    assert said in str(refused.value)


def test_damaged_samples_are_refused(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    path = tmp_path / "models/iris/samples.npz"
    whole = path.read_bytes()
    for damaged in (b"", b"not an archive", whole[: len(whole) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match="is not an .npz archive of plain arrays"):
            build.plan(services())


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"a\nb\n\xb8\n", "is no UTF-8 text: invalid start byte at byte 4")],
)
def test_a_damaged_file_of_a_backend_is_refused(
    scores: Callable[..., list[Any]], tmp_path: Path, content: bytes, says: str
) -> None:
    services = scores()
    (tmp_path / "models/scores/build/labels.txt").write_bytes(content)
    with pytest.raises(ModelError, match=f"build/labels.txt {says}"):
        build.plan(services)


def test_a_file_of_a_backend_of_ones_own_that_was_cut_off_is_refused(
    scores: Callable[..., list[Any]], tmp_path: Path
) -> None:
    services = scores(
        "{backend: labels, files: [build/labels.txt]", "{backend: labels, files: [build/labels.txt, h.json]"
    )
    (tmp_path / "models/scores/h.json").write_text('{"a": [1, 2')
    with pytest.raises(ModelError, match="h.json is no JSON"):
        build.plan(services)


def test_strings_are_written_as_triton_reads_them(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    identity(tmp_path / "models/iris/model.onnx", dims=("batch", 2), element=TensorProto.STRING)
    np.savez(tmp_path / "models/iris/samples.npz", x=np.array([["ä", "bc"]]))

    (plan,) = build.plan(services())

    assert plan.folder.warmup["x.bin"] == b"\x02\x00\x00\x00\xc3\xa4\x02\x00\x00\x00bc"


def test_two_builds_give_the_same_bytes(services: Callable[..., list[Any]]) -> None:
    assert build.plan(services())[0].folder == build.plan(services())[0].folder


def test_check_reports_drift_and_changes_nothing(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    root = tmp_path / "repository"
    plans = build.plan(services())
    with pytest.raises(DriftError, match="iris: publish version 1"):
        build.check(root, plans)
    assert not root.exists()

    publish(root, build.folders(plans))
    build.check(root, plans)
    (root / "iris/config.pbtxt").write_text("name: 'edited'")
    with pytest.raises(DriftError, match="iris: write config.pbtxt"):
        build.check(root, plans)
    assert (root / "iris/config.pbtxt").read_text() == "name: 'edited'"


def test_pinned_versions_must_exist(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    plans = build.plan(services("warmup", "version_policy: {specific: [1, 7]}\nwarmup"))

    with pytest.raises(SpecError, match="pins version 7"):
        build.check_versions(tmp_path / "repository", plans)


def test_prepare_makes_missing_files_and_reports_a_failing_script(
    services: Callable[..., list[Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "models/iris"
    loaded = services("file: model.onnx", "file: build/model.onnx\n  prepare: train.py")
    with pytest.raises(ModelError, match="The prepare script .*train.py does not exist"):
        build.prepare(loaded, "auto", print)

    (folder / "train.py").write_text("import sys; sys.exit(3)")
    with pytest.raises(ModelError, match="failed with exit code 3"):
        build.prepare(loaded, "auto", print)

    (folder / "train.py").write_text("pass")
    with pytest.raises(ModelError, match="did not make model.onnx"):
        build.prepare(loaded, "auto", print)

    said: list[str] = []
    (folder / "train.py").write_text(
        "import pathlib, shutil, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--output') + 1]); out.mkdir()\n"
        f"shutil.copy({str(folder / 'model.onnx')!r}, out)\n"
    )
    build.prepare(loaded, "auto", said.append)
    build.prepare(loaded, "auto", said.append)

    assert (folder / "build/model.onnx").is_file()
    assert len(said) == 2, "the second call has nothing to do"


def test_external_weights_are_published_beside_the_model(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    path = tmp_path / "models/iris/model.onnx"
    weights = helper.make_tensor("w", TensorProto.FLOAT, [4], np.arange(4, dtype=np.float32).tobytes(), raw=True)
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="weights.bin")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "add",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [weights],
    )
    (path.parent / "weights.bin").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    save(path, graph)

    (plan,) = build.plan(services())
    assert sorted(plan.folder.version_files) == ["model.onnx", "weights.bin"]

    (path.parent / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weights.bin"):
        build.plan(services())


@pytest.mark.parametrize(
    ("element", "said"), [(TensorProto.COMPLEX64, "ONNX type COMPLEX64, which Triton does not know")]
)
def test_types_that_triton_does_not_know_are_refused(
    services: Callable[..., list[Any]], tmp_path: Path, element: int, said: str
) -> None:
    identity(tmp_path / "models/iris/model.onnx", element=element)

    with pytest.raises(ModelError, match=said):
        build.plan(services())


ENSEMBLE = """\
service: twice
pipeline:
  inputs: [{name: in, data_type: FP32, dims: [4]}]
  outputs: [{name: out, data_type: FP32, dims: [4]}]
  steps:
    - {service: iris, inputs: {x: in}, outputs: {y: mid}}
    - {service: iris, inputs: {x: mid}, outputs: {y: out}}
batching: {max_batch_size: 8}
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("x: mid", "x: mdi", "reads mdi, which no earlier step and no input makes"),
        ("{service: iris, inputs: {x: mid}", "{service: irsi, inputs: {x: mid}", "names no service"),
        ("y: out", "z: out", "has no output z"),
        ("y: mid", "y: in", "makes in, which is there already"),
        ("name: in, data_type: FP32, dims: [4]", "name: in, data_type: FP32, dims: [5]", "FP32[5] is not FP32[4]"),
        ("{x: mid}", "{v: mid}", "has no input v"),
        ("name: in, data_type: FP32", "name: in, data_type: FP16", "their types differ"),
        ("max_batch_size: 8", "max_batch_size: 16", "takes batches up to 8, below the pipeline's max_batch_size 16"),
        ("outputs: [{name: out", "outputs: [{name: res", "no step makes the pipeline's output res as FP32[4]"),
    ],
)
def test_an_ensemble_that_does_not_fit_its_members_is_refused(
    services: Callable[..., list[Any]], tmp_path: Path, old: str, new: str, said: str
) -> None:
    services()
    folder = tmp_path / "models/twice"
    folder.mkdir()
    assert old in ENSEMBLE
    (folder / "service.yaml").write_text(ENSEMBLE.replace(old, new))

    with pytest.raises(SpecError) as refused:
        build.plan(load_services(tmp_path / "models"))
    assert said in str(refused.value)


def test_an_ensemble_is_written_over_its_members(services: Callable[..., list[Any]], tmp_path: Path) -> None:
    services()
    folder = tmp_path / "models/twice"
    folder.mkdir()
    (folder / "service.yaml").write_text(ENSEMBLE)

    plans = build.plan(load_services(tmp_path / "models"))
    publish(tmp_path / "repository", [plan.folder for plan in plans])
    config = model_config.parse(plans[1].folder.config_text, "test")

    assert config.platform == "ensemble"
    assert [dict(step.input_map) for step in config.ensemble_scheduling.step] == [{"x": "in"}, {"x": "mid"}]
    assert (tmp_path / "repository/twice/1").is_dir(), "Triton wants a version folder, also an empty one"


SCORES = """\
service: scores
pipeline:
  prepare: make.py
  samples: build/requests.npz
  inputs: [{name: in, data_type: FP32, dims: [4]}]
  outputs: [{name: label, data_type: BYTES, dims: [2]}]
  steps:
    - {name: net, model: {file: ../iris/model.onnx}, inputs: {x: in}, outputs: {y: logits}}
    - {name: labels, model: {backend: labels, files: [build/labels.txt], parameters: {k: 2}}}
batching: {max_batch_size: 8, queue_delay_us: 1000}
classes: [{name: page, priority: 1, timeout_ms: 30}, {name: job, priority: 2, max_queue_size: 7}]
"""


@pytest.fixture
def scores(services: Callable[..., list[Any]], tmp_path: Path) -> Callable[..., list[Any]]:
    services()
    folder = tmp_path / "models/scores"

    def load(old: str = "", new: str = "") -> list[Any]:
        (folder / "build").mkdir(parents=True, exist_ok=True)
        assert old in SCORES
        (folder / "service.yaml").write_text(SCORES.replace(old, new, 1))
        (folder / "build/labels.txt").write_text("a\nb\nc\nd\n")
        np.savez(folder / "build/requests.npz", **{"in": np.eye(4, dtype=np.float32)})
        return load_services(tmp_path / "models")

    return load


def test_a_pipeline_becomes_an_ensemble_over_models_of_its_own(scores: Callable[..., list[Any]]) -> None:
    plans = {plan.service.service: plan for plan in build.plan(scores())}
    configs = {name: model_config.parse(plan.folder.config_text, name) for name, plan in plans.items()}

    assert list(plans) == ["iris", "scores", "scores_labels", "scores_net"]
    ensemble = configs["scores"].ensemble_scheduling.step
    assert [step.model_name for step in ensemble] == ["scores_net", "scores_labels"]
    assert dict(ensemble[1].output_map) == {"label": "label"}, "what nobody reads is not asked for"
    assert configs["scores"].parameters["pilot_classes"].string_value == "page:1,job:2"
    labels = configs["scores_labels"]
    assert labels.backend == "labels"
    assert labels.default_model_filename == ""
    assert labels.parameters["k"].string_value == "2"
    assert [(t.name, list(t.dims)) for t in labels.input] == [("logits", [4])]
    assert list(plans["scores_labels"].folder.version_files) == ["labels.txt"]


def test_every_step_of_a_pipeline_has_the_same_classes(scores: Callable[..., list[Any]]) -> None:
    plans = {plan.service.service: plan for plan in build.plan(scores())}
    batchers = [
        model_config.parse(plans[name].folder.config_text, name).dynamic_batching
        for name in ("scores_net", "scores_labels")
    ]

    assert batchers[0] == batchers[1]
    assert batchers[0].priority_levels == 3, "two classes and the level of wakes"
    assert batchers[0].priority_queue_policy[1].default_timeout_microseconds == 30_000
    assert batchers[0].priority_queue_policy[2].max_queue_size == 7
    assert batchers[0].max_queue_delay_microseconds == 500, "two steps share a millisecond"


def test_a_python_step_stays_on_the_cpu_when_the_model_goes_to_the_gpu(scores: Callable[..., list[Any]]) -> None:
    plans = {plan.service.service: plan.folder.config_text for plan in build.plan(scores(), "gpu")}

    assert "kind: KIND_GPU" in plans["scores_net"]
    assert "kind: KIND_CPU" in plans["scores_labels"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("outputs: {y: logits}", "outputs: {y: logitz}", "reads logits, which no earlier step and no input makes"),
        ("dims: [2]", "dims: [3]", "no step makes the pipeline's output label as BYTES[3]"),
        ("files: [build/labels.txt], ", "", "The backend labels reads labels.txt, which is not there"),
        ("{k: 2}", "{k: two}", 'k is "two", but must be a whole number'),
        ("{k: 2}", "{k: 0}", 'k is "0", but must be a whole number of at least 1'),
        (
            "outputs: [{name: label, data_type: BYTES, dims: [2]}]",
            "outputs: [{name: logits, data_type: FP32, dims: [4]}]",
            "step 2 .labels. makes .*, which no later step and no caller reads",
        ),
        ("samples: build/requests.npz", "samples: build/rows.npz", "rows.npz do not exist"),
        ("inputs: [{name: in,", "inputs: [{name: x,", "no array for the input x"),
        ("build/labels.txt", "build/names.txt", "the model file .*names.txt does not exist.*--prepare"),
        ("backend: labels, ", "backend: lables, ", "inputs and outputs of the backend lables cannot be read"),
        ("files: [build/labels.txt]", "files: [build/labels.txt, labels.txt]", "would be named labels.txt"),
        (
            "name: net, model: {file: ../iris/model.onnx}",
            "service: iris",
            "has the classes realtime:1,batch:2 and the pipeline page:1,job:2",
        ),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused(
    scores: Callable[..., list[Any]], old: str, new: str, said: str
) -> None:
    services = scores(old, new)

    with pytest.raises((SpecError, ModelError), match=re.compile(said.replace("[3]", r"\[3\]"), re.DOTALL)):
        build.plan(services)


def test_a_step_may_not_take_the_name_of_another_service(scores: Callable[..., list[Any]], tmp_path: Path) -> None:
    scores()
    twin = tmp_path / "models/twin"
    twin.mkdir()
    (twin / "service.yaml").write_text(
        "service: scores_net\nmodel: {file: ../iris/model.onnx}\nbatching: {max_batch_size: 8}\n"
    )

    with pytest.raises(SpecError, match="Two models would be named scores_net"):
        build.plan(load_services(tmp_path / "models"))


def test_a_step_that_reads_what_callers_send_is_probed_with_their_row(
    scores: Callable[..., list[Any]], tmp_path: Path
) -> None:
    publish(tmp_path / "repository", [plan.folder for plan in build.plan(scores())])

    probes = build.probe_inputs(tmp_path / "models", tmp_path / "repository")

    assert probes["scores"]["in"].tolist() == [[1, 0, 0, 0]]
    assert probes["scores_net"]["x"].tolist() == [[1, 0, 0, 0]]
    assert "scores_labels" not in probes, "what it reads only the server knows"


def test_a_pipelines_requests_are_sampled_where_they_come_in(scores: Callable[..., list[Any]]) -> None:
    plans = build.plan(scores("batching:", "tracing: {rate: 50}\nbatching:"))
    rates = {
        plan.folder.name: model_config.parse(plan.folder.config_text, "").parameters["pilot_trace_rate"].string_value
        for plan in plans
    }
    assert rates == {name: "50" if name == "scores" else "" for name in rates}
    assert len(rates) > 1


def test_a_missing_file_of_a_step_is_made_by_the_name_that_one_wrote(
    scores: Callable[..., list[Any]], tmp_path: Path
) -> None:
    services = scores()
    (tmp_path / "models/scores/build/labels.txt").unlink()

    with pytest.raises(ModelError, match="Run `tritonpilot build scores --prepare`"):
        build.plan(services)

    assert [path.name for path in build.missing_files(services, "auto")] == ["make.py"]


def test_one_script_makes_the_files_of_all_steps_of_a_pipeline(
    scores: Callable[..., list[Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "models/scores"
    services = scores()
    (folder / "build/labels.txt").unlink()
    (folder / "make.py").write_text(
        "import pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--output') + 1])\n"
        "(out / 'labels.txt').write_text('a\\nb\\nc\\nd\\n')\n"
        "print('made', file=(out.parent / 'log').open('a'))\n"
    )

    build.prepare(services, "auto", print)

    assert (folder / "log").read_text() == "made\n"


def test_the_steps_of_a_driver_are_loaded_with_it(scores: Callable[..., list[Any]], tmp_path: Path) -> None:
    services = scores(", inputs: {x: in}, outputs: {y: logits}", "")
    text = (tmp_path / "models/scores/service.yaml").read_text()
    (tmp_path / "models/scores/service.yaml").write_text(
        text.replace("  steps:", "  driver: {backend: reader}\n  steps:")
    )
    services = load_services(tmp_path / "models", ["scores"])

    publish(tmp_path / "repository", [plan.folder for plan in build.plan(services)])

    assert called(tmp_path / "repository", "scores") == ["scores_net", "scores_labels"]
    assert called(tmp_path / "repository", "scores_net") == []
    config = model_config.parse((tmp_path / "repository/scores/config.pbtxt").read_text(), "scores")
    assert config.backend == "reader"
    assert config.parameters["labels"].string_value == "scores_labels"
    assert [t.name for t in config.input] == ["in"]


def test_a_hand_edited_config_that_is_no_protobuf_text_is_named() -> None:
    with pytest.raises(RepositoryError, match="here/config.pbtxt is not a Triton model configuration"):
        model_config.parse("name: 3 {", "here/config.pbtxt")


def test_a_repository_gets_the_companion_when_a_queue_with_classes_may_be_in_tritons_own_backend(
    services: Callable[..., list[Any]], tmp_path: Path
) -> None:
    root = tmp_path / "repository"
    folders = build.folders(build.plan(services()))

    assert [folder.name for folder in folders] == ["iris", "pilot_companion"]
    config = model_config.parse(folders[1].config_text, "test")
    assert (config.backend, config.dynamic_batching.priority_levels) == ("companion", 2)
    changes = publish(root, folders)
    assert [change.version for change in changes] == [1, 1]
    assert (root / "pilot_companion" / "1").is_dir()
    assert not any(publish(root, folders))
    assert (backend(root, "iris"), backend(root, "pilot_companion"), backend(root, "absent")) == (
        "onnxruntime",
        "companion",
        "",
    )


def test_without_classes_nothing_stalls_and_there_is_no_companion(services: Callable[..., list[Any]]) -> None:
    without = GOOD[GOOD.index("classes:") : GOOD.index("warmup:")]

    assert [folder.name for folder in build.folders(build.plan(services(without, "")))] == ["iris"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('backend: "tensorrt"', "tensorrt"),
        ('platform: "onnxruntime_onnx"', "onnxruntime"),
        ('platform: "ensemble"', "ensemble"),
        ('# backend: "python"', ""),
    ],
)
def test_the_backend_of_a_model_is_read_from_its_config(tmp_path: Path, line: str, found: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text(f'name: "m"\n{line}\nmax_batch_size: 4\n')

    assert backend(tmp_path, "m") == found
