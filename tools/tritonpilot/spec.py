"""The file that a person writes for each service: `models/<service>/service.yaml`.

    service = load_service(Path("models/ctr/service.yaml"))
    services = load_services(Path("models"))

Unknown keys are refused with the nearest known key named; every message carries file and line.
`json_schema()` is the same model as JSON Schema, for editors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, field_validator, model_validator

from tritonpilot import written
from tritonpilot.errors import SpecError
from tritonpilot.guard.terms import Guard
from tritonpilot.written import Written

SERVICE_FILE = "service.yaml"

#: Triton's data types without their TYPE_ prefix, as its KServe protocol names them (BYTES is TYPE_STRING).
DataType = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
]  # fmt: skip
ModelFormat = Literal["onnx", "tensorrt", "torchscript", "torch_export"]
FORMAT_OF_SUFFIX: Mapping[str, ModelFormat] = {
    ".onnx": "onnx",
    ".plan": "tensorrt",
    ".engine": "tensorrt",
    ".pt": "torchscript",
    ".pt2": "torch_export",
}
#: Triton takes a timeout of 0 for "none", but then also ignores a request's own timeout. One hour stands for "none".
NO_TIMEOUT_MS = 3_600_000.0

#: Fields of ModelConfig that `triton` may not set: the service file or the model says them.
SAID_ELSEWHERE = (
    "name",
    "max_batch_size",
    "input",
    "output",
    "instance_group",
    "version_policy",
    "ensemble_scheduling",
)

#: Parameters of config.pbtxt that the build writes, and those that a swap gives to a candidate.
BUILD_PARAMETERS = (
    "pilot_wake_priority",
    "pilot_classes",
    "pilot_shares",
    "pilot_max_waits_ms",
    "pilot_slos_ms",
    "pilot_max_queue_sizes",
    "pilot_timeouts_ms",
    "pilot_default_class",
    "pilot_steps",
    "pilot_step_versions",
    "pilot_trace_rate",
    "pilot_cache",
    "pilot_guard",
    "pilot_guard_reference",
    "pilot_canary_of",
    "pilot_canary_share",
    "pilot_shadow_share",
)
#: A class that says no queue timeout waits at most this part of its SLO.
TIMEOUT_OF_SLO = 0.8
#: Floors of lower classes leave at least half of the capacity to the order of priorities.
SHARES_MOST = 0.5

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=128)]
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1  # the types of Triton's fields
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
Version = Annotated[int, Field(ge=1, le=INT64_MAX)]


class Tensor(Written):
    """A tensor, without the batch dimension when `max_batch_size` is above 0; -1 is a variable dimension."""

    name: str
    data_type: DataType
    dims: list[Annotated[int, Field(ge=-1, le=INT64_MAX)]]


class GpuModel(Written):
    """What changes when the repository is built with `--target gpu`."""

    file: str | None = Field(None, description="another file for the GPU, e.g. a TensorRT plan")
    format: ModelFormat | None = None
    accelerator: Literal["none", "tensorrt"] = Field(
        "none", description="TensorRT execution provider inside the onnxruntime backend"
    )
    precision: Literal["fp32", "fp16", "int8"] = Field("fp32", description="precision mode of the accelerator")


class Quantize(Written):
    """INT8 of an ONNX model with a proof of accuracy: what `tritonpilot quantize` works from (docs/quantization.md)."""

    calibration: str = Field(description=".npz of rows as production sends them; calibration rows are chosen from it")
    evaluation: str = Field(description=".npz of labelled rows that the loss is judged on")
    prepare: str | None = Field(None, description="Python script that makes both: run as `SCRIPT --output DIR`")
    metric: Literal["auc", "top1", "pearson", "exact", "agreement", "argmax"] = Field(
        "agreement", description="how answers are judged; agreement and argmax compare with FP32 and need no labels"
    )
    max_loss: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.01, description="relative; its 95 % interval must lie below"
    )
    lossless: dict[str, str] = Field(
        {}, description="slice and value, as view: whole; rows that may lose nothing at all"
    )
    least_cosine: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="mean cosine of answers to FP32's, where answers are vectors"
    )
    samples: Annotated[int, Field(ge=1, le=100_000)] = Field(200, description="calibration rows")
    publish: Literal["beside", "instead"] | None = Field(
        None, description="serve it as the model NAME_int8 too, or as a new version under the model's own name"
    )


#: What `tritonpilot quantize` makes, and no prepare script.
INT8_SUFFIX = ".int8.onnx"


def int8_file(name: str) -> str:
    """The INT8 file beside an ONNX model: build/model.onnx -> build/model.int8.onnx"""
    return str(Path(name).with_suffix(INT8_SUFFIX))


class Model(Written):
    """What runs: a model file, or a Python-based backend with its files and parameters."""

    file: str | None = Field(
        None, description="model file, relative to the service file; with backend python: model.py"
    )
    backend: Name | None = Field(
        None, description="a generic backend (docs/backends.md), `python`, or one of your own; default: by the format"
    )
    files: list[str] = Field([], description="further files that the model reads, put beside it under their own names")
    parameters: dict[str, str | int | float | bool] = Field(
        {}, description="parameters of the backend, passed on as they are"
    )
    format: ModelFormat | None = Field(None, description="default: by the file's suffix")
    prepare: str | None = Field(None, description="Python script that makes the files: run as `SCRIPT --output DIR`")
    samples: str | None = Field(None, description=".npz of real rows, one array per input: warmup and measurements")
    inputs: list[Tensor] | None = Field(None, description="checked against the model; required when it cannot be read")
    outputs: list[Tensor] | None = Field(None, description="as inputs")
    gpu: GpuModel = GpuModel()
    quantize: Quantize | None = None

    @field_validator("parameters")
    @classmethod
    def _no_parameters_of_the_build(cls, value: dict[str, Any]) -> dict[str, Any]:
        ours = [key for key in value if key in BUILD_PARAMETERS]
        if ours:
            raise ValueError(f"{ours[0]} is set by the build itself; remove it")
        return value

    @model_validator(mode="after")
    def _something_runs(self) -> Model:
        if self.backend is None and self.file is None:
            raise ValueError("give `file`, a model, or `backend`, what runs without one")
        if self.backend is not None and (self.format or self.quantize or self.gpu != GpuModel()):
            raise ValueError("`format`, `gpu` and `quantize` belong to model files, not to a `backend`")
        if self.quantize and (self.format or FORMAT_OF_SUFFIX.get(Path(str(self.file)).suffix)) != "onnx":
            raise ValueError("`quantize` is for ONNX models: give the FP32 model as an .onnx file")
        if self.backend == "python" and self.file is None:
            raise ValueError("backend python runs a file of your own: give `file`, e.g. serving.py")
        if self.backend not in (None, "python") and self.file is not None:
            raise ValueError(f"backend {self.backend} runs by itself: list what it reads under `files`, not as `file`")
        return self


class Slo(Written):
    """The promise: answers within `p99_ms` for 99 of 100 requests at `rate_per_s` requests per second."""

    p99_ms: Annotated[float, Field(gt=0)]
    rate_per_s: Annotated[float, Field(gt=0)] | None = None


class Batching(Written):
    """Triton's dynamic batcher."""

    max_batch_size: Annotated[int, Field(ge=0, le=INT32_MAX)] = Field(description="0: the model has no batch dimension")
    queue_delay_us: Annotated[int, Field(ge=0, le=60_000_000)] = Field(
        0, description="how long a request may wait for company"
    )
    preferred_batch_sizes: list[Positive] = Field(
        [], description="leave empty unless an engine has profiles for these sizes"
    )
    preserve_ordering: bool = False

    @model_validator(mode="after")
    def _sizes_fit(self) -> Batching:
        too_big = [size for size in self.preferred_batch_sizes if size > self.max_batch_size]
        if too_big:
            raise ValueError(
                f"preferred batch size {too_big[0]} is above max_batch_size {self.max_batch_size}; "
                "lower it or raise max_batch_size"
            )
        if self.max_batch_size == 0 and (self.queue_delay_us or self.preserve_ordering):
            raise ValueError("max_batch_size 0 switches batching off, so queue_delay_us and preserve_ordering must go")
        return self


class CallerClass(Written):
    """A class of callers: one priority level and its queue policy. Priority 1 is served first.

    `share` and `max_wait_ms` keep a class from starving below saturating better ones; the entry (docs/entry.md) keeps them.
    """

    name: Name
    priority: int
    p99_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the promise to this class; default: slo.p99_ms for the default class, none for others"
    )
    max_queue_size: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(1000, description="0: unlimited")
    timeout_ms: Annotated[float, Field(ge=0.001, le=NO_TIMEOUT_MS)] | None = Field(
        None,
        description="longest wait in the queue, longer than batching.queue_delay_us; default: 0.8 of the class's p99_ms",
    )
    timeout_action: Literal["reject", "delay"] = "reject"
    share: Annotated[float, Field(gt=0, le=SHARES_MOST)] | None = Field(
        None, description="floor: this part of the capacity is the class's whenever it has requests waiting"
    )
    max_wait_ms: Annotated[float, Field(gt=0)] | None = Field(
        None, description="a request that waited this long goes before better classes"
    )


class Instances(Written):
    """One instance group."""

    count: Annotated[int, Field(ge=1, le=256)] = 1
    kind: Literal["auto", "cpu", "gpu", "model"] = Field(
        "auto", description="auto: what the build target says (gpu, cpu, or Triton's own KIND_AUTO)"
    )
    gpus: list[Annotated[int, Field(ge=0, le=1023)]] = []
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        1, description="CPU threads inside one run; 0: runtime's choice"
    )


class LatestVersions(Written):
    """Serve the newest `latest` versions."""

    latest: Positive


class SpecificVersions(Written):
    """Serve exactly these versions."""

    specific: Annotated[list[Version], Field(min_length=1)]


class Warmup(Written):
    """Requests that each instance runs before it takes traffic; one row of the samples repeated to each batch size."""

    batch_sizes: Annotated[list[Positive], Field(min_length=1)] = [1]
    count: Positive = Field(1, description="repetitions of each")
    data: Literal["samples", "zero", "random"] = "samples"


class Resource(Written):
    """A resource of Triton's rate limiter."""

    name: Name
    count: Positive
    is_global: bool = Field(False, description="shared by all devices (Triton's `global`)")


class RateLimiter(Written):
    """Triton's rate limiter; takes effect when the server runs with `--rate-limit=execution_count`."""

    resources: list[Resource] = []
    priority: Annotated[int, Field(ge=0, le=INT32_MAX)] = Field(
        0, description="a weight: 2 gets half of the chances of 1"
    )


class Tracing(Written):
    """Which requests become OpenTelemetry traces, where the server has a receiver for them (docs/operations.md#tracing)."""

    rate: Positive = Field(
        1000,
        description="one of so many requests is traced (Triton's trace rate), beside those that bring a trace context of "
        "their caller",
    )


class Step(Written):
    """One step of a pipeline: a model of its own (Triton name: SERVICE_NAME), or another service.

    Maps go from the step's tensor name to the pipeline's; a tensor left out has the same name there.
    """

    name: Name | None = None
    model: Model | None = None
    service: Name | None = Field(None, description="another service, instead of a model of its own")
    version: Annotated[int, Field(ge=-1, le=INT64_MAX)] = -1
    inputs: dict[str, str] = {}
    outputs: dict[str, str] = {}
    batching: Batching | None = Field(None, description="default: the pipeline's, with its share of the queue delay")
    instances: Annotated[list[Instances], Field(min_length=1)] | None = Field(None, description="default: one")
    warmup: Warmup | None = None

    @property
    def label(self) -> str:
        """What the step is called inside its pipeline."""
        return self.name or str(self.service)

    @model_validator(mode="after")
    def _one_kind(self) -> Step:
        if (self.model is None) == (self.service is None):
            raise ValueError("a step has either a `model` of its own or names another `service`, and not both")
        if self.model is not None and self.name is None:
            raise ValueError("a step with a model of its own needs a `name`")
        if self.service is not None and (self.batching or self.instances or self.warmup):
            raise ValueError(f"batching, instances and warmup of {self.service} belong into its own service file")
        return self


class Pipeline(Written):
    """Several models behind one name: an ensemble, or a driver that calls the steps (BLS) where they fan out."""

    inputs: Annotated[list[Tensor], Field(min_length=1)]
    outputs: Annotated[list[Tensor], Field(min_length=1)]
    steps: Annotated[list[Step], Field(min_length=1)]
    driver: Model | None = Field(None, description="a backend that calls the steps; without it Triton runs an ensemble")
    prepare: str | None = Field(None, description="as model.prepare, for every step that names none")
    samples: str | None = Field(None, description=".npz of real rows of the pipeline's inputs")

    @model_validator(mode="after")
    def _steps_fit(self) -> Pipeline:
        for kind, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = [tensor.name for tensor in tensors]
            again = [name for name in names if names.count(name) > 1]
            if again:
                raise ValueError(f"two {kind} are named {again[0]}; give each its own name")
        labels = [step.label for step in self.steps]
        twins = [label for label in labels if labels.count(label) > 1]
        if twins and (self.driver or any(step.name for step in self.steps if step.label == twins[0])):
            raise ValueError(f"two steps are named {twins[0]}; give each its own name")
        if self.driver is None:
            return self
        if self.driver.backend is None:
            raise ValueError("a driver is a backend: give driver.backend")
        if self.driver.inputs or self.driver.outputs or self.driver.samples:
            raise ValueError("inputs, outputs and samples of a driver are those of the pipeline")
        mapped = [step.label for step in self.steps if step.inputs or step.outputs]
        if mapped:
            raise ValueError(f"the driver calls step {mapped[0]} itself: remove its inputs and outputs")
        return self


class Cache(Written):
    """Answers that are given again to who asks the same (docs/caching.md)."""

    kind: Literal["lfu", "triton"] = Field(
        description="lfu: in the entry, per tenant, keeps what is asked most; triton: Triton's own, what was asked last"
    )
    max_mb: Annotated[float, Field(gt=0, le=65536)] | None = Field(None, description="of lfu; default: 64")
    ttl_s: Annotated[float, Field(gt=0, le=31_536_000)] | None = Field(
        None, description="of lfu: no answer is given again later than this; default: as long as the model stays"
    )

    @model_validator(mode="after")
    def _has_what_its_kind_has(self) -> Cache:
        if self.kind == "triton" and (self.max_mb is not None or self.ttl_s is not None):
            raise ValueError("Triton's cache has no max_mb and ttl_s of a model: give `serve --cache-mb`, or kind lfu")
        return self


class Service(Written):
    """One service. Either `model` or `pipeline` is given."""

    service: Name = Field(description="name of the service and of its model in Triton")
    description: str = ""
    model: Model | None = None
    pipeline: Pipeline | None = None
    slo: Slo | None = None
    batching: Batching
    classes: list[CallerClass] = Field([], description="none: no priorities and no limits")
    default_class: Name | None = Field(None, description="class of callers that name none; default: the first")
    instances: Annotated[list[Instances], Field(min_length=1)] = [Instances()]
    version_policy: Literal["all"] | LatestVersions | SpecificVersions = LatestVersions(latest=1)
    warmup: Warmup | None = None
    cache: Cache | None = Field(None, description="none: every request is computed")
    guard: Guard | None = Field(None, description="none: nobody compares answers")
    rate_limiter: RateLimiter | None = None
    tracing: Tracing | None = Field(None, description="none: only requests that bring a trace context are traced")
    triton: dict[str, Any] = Field(
        {}, description="extra fields of Triton's ModelConfig in its JSON form, merged last; checked by Triton's schema"
    )

    _path: Path = PrivateAttr(default=Path(SERVICE_FILE))
    _written_as: str = PrivateAttr(default="")

    @property
    def path(self) -> Path:
        """The file that this service was read from."""
        return self._path

    @property
    def written_as(self) -> str:
        """The name in the service file: that of the whole pipeline, when this is a part of one."""
        return self._written_as

    @property
    def folder(self) -> Path:
        """The folder that relative file names start from."""
        return self._path.parent

    @property
    def samples(self) -> Path | None:
        """The .npz of real rows of the service's own inputs."""
        stated = self.model.samples if self.model else self.pipeline.samples if self.pipeline else None
        return self.folder / stated if stated else None

    @property
    def default_priority(self) -> int:
        """Priority level of callers that name no class; 0 when there are no classes."""
        if not self.classes:
            return 0
        return next(c.priority for c in self.classes if c.name == self._default_class)

    @property
    def _default_class(self) -> str:
        return self.default_class or self.classes[0].name

    def promise_ms(self, caller: CallerClass) -> float | None:
        """The SLO of a class: its own, or the service's for the default class; None: nothing is promised."""
        if caller.p99_ms is None and self.slo is not None and caller.name == self._default_class:
            return self.slo.p99_ms
        return caller.p99_ms

    def timeout_ms(self, caller: CallerClass) -> float:
        """The longest wait of a class in the queue, below its SLO."""
        if caller.timeout_ms is not None:
            return caller.timeout_ms
        promise_ms = self.promise_ms(caller)
        return min(NO_TIMEOUT_MS, TIMEOUT_OF_SLO * promise_ms) if promise_ms is not None else NO_TIMEOUT_MS

    @field_validator("triton")
    @classmethod
    def _no_second_word(cls, value: dict[str, Any]) -> dict[str, Any]:
        said = [key for key in value if re.sub(r"([A-Z])", r"_\1", key).lower() in SAID_ELSEWHERE]
        if said:
            raise ValueError(f"{said[0]} is said elsewhere in the service file or read from the model; remove it here")
        return value

    @model_validator(mode="after")
    def _parts_agree(self) -> Service:
        if (self.model is None) == (self.pipeline is None):
            raise ValueError("give either `model` or `pipeline`, and not both")
        _check_classes(self.classes, self.default_class)
        for c in self.classes:
            promise_ms = self.promise_ms(c)
            if promise_ms is not None and self.timeout_ms(c) >= promise_ms:
                raise ValueError(
                    f"class {c.name} may wait {self.timeout_ms(c):g} ms in the queue, but its answers are promised within "
                    f"{promise_ms:g} ms (p99_ms); set its timeout_ms below that"
                )
            if self.timeout_ms(c) * 1000 <= self.batching.queue_delay_us:
                raise ValueError(
                    f"class {c.name} may wait {self.timeout_ms(c):g} ms in the queue, no longer than the batcher waits for company "
                    f"(queue_delay_us {self.batching.queue_delay_us}); set its timeout_ms above that"
                )
        if self.classes and self.batching.max_batch_size == 0:
            raise ValueError("classes need Triton's dynamic batcher, which max_batch_size 0 switches off")
        if len({group.threads for group in self.instances}) > 1:
            raise ValueError("Triton sets threads per model: give every instance group the same `threads`")
        for size in self.warmup.batch_sizes if self.warmup else []:
            if size > max(1, self.batching.max_batch_size):
                raise ValueError(f"warmup batch size {size} is above max_batch_size {self.batching.max_batch_size}")
        if self.pipeline is not None:
            if any(step.service == self.service for step in self.pipeline.steps):
                raise ValueError(f"a step names the pipeline {self.service} itself; name another service")
            if self.warmup or self.rate_limiter:
                raise ValueError("warmup and rate_limiter belong to the steps of a pipeline")
            if self.cache is not None and self.cache.kind == "triton":
                raise ValueError("Triton does not cache the answers of a pipeline; set cache.kind to lfu, or remove it")
            if self.instances != [Instances()] and self.pipeline.driver is None:
                raise ValueError("a pipeline has no instances of its own: give each step its `instances`")
            unbatched = [s.label for s in self.pipeline.steps if s.batching and s.batching.max_batch_size == 0]
            if self.classes and unbatched:
                raise ValueError(f"classes need Triton's dynamic batcher, which step {unbatched[0]} switches off")
        return self


def _check_classes(classes: Sequence[CallerClass], default_class: str | None) -> None:
    names = [c.name for c in classes]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two classes are named {name}; give each its own name")
    for c in classes:
        if not 1 <= c.priority <= len(classes):
            raise ValueError(
                f"class {c.name} has priority {c.priority}, outside the levels 1 to {len(classes)} "
                f"(one level per class, 1 is served first)"
            )
        twin = next((other for other in classes if other.priority == c.priority and other.name != c.name), None)
        if twin:
            raise ValueError(f"classes {c.name} and {twin.name} share priority {c.priority}; give each its own level")
        if c.priority == 1 and (c.share is not None or c.max_wait_ms is not None):
            raise ValueError(f"class {c.name} is served first anyway: remove its share and max_wait_ms")
    shares = sum(c.share or 0 for c in classes)
    if shares > SHARES_MOST:
        raise ValueError(
            f"the shares of the classes add up to {shares:g}, and more than {SHARES_MOST:g} would turn the priorities around"
        )
    if default_class is not None and default_class not in names:
        raise ValueError(
            f"default_class {default_class} is not one of the classes ({', '.join(names) or 'none given'})"
        )


def load_service(path: Path) -> Service:
    """Read one service file.

    Raises SpecError when it cannot be read, is no YAML mapping, has unknown keys or values that contradict each other.
    """
    service = written.read(path, Service, "`service: NAME`")
    service._path = path
    service._written_as = service.service
    return service


def load_services(models: Path, names: Sequence[str] = ()) -> list[Service]:
    """Read the service files below `models`, sorted by service name; all, or the named ones.

    Raises SpecError when a file is wrong, a name is unknown, or two services have one name.
    """
    paths = sorted(models.glob(f"*/{SERVICE_FILE}"))
    if not paths:
        raise SpecError(
            f"There is no {SERVICE_FILE} in any folder of {models}. Nothing was changed. "
            "Run this in the project's root, or say --models DIR."
        )
    by_name: dict[str, Service] = {}
    for path in paths:
        service = load_service(path)
        if service.service in by_name:
            raise SpecError(
                f"Two services are named {service.service}: {by_name[service.service].path} and {path}. "
                "Nothing was changed. Rename one."
            )
        by_name[service.service] = service
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise SpecError(f"There is no service {unknown[0]} in {models}{written.nearest(unknown[0], list(by_name))}.")
    return [by_name[name] for name in sorted(set(names) or by_name)]


def json_schema() -> dict[str, Any]:
    """The service file as JSON Schema (draft 2020-12), for editors."""
    schema = Service.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Triton Pilot service file"}
