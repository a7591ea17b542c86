"""The file that a person writes for each service: `models/<service>/service.yaml`.

    service = load_service(Path("models/ctr/service.yaml"))
    services = load_services(Path("models"))

Unknown keys are refused with the nearest known key named; every message carries file and line.
`json_schema()` is the same model as JSON Schema, for editors.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from tritonpilot.errors import SpecError

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

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=128)]
INT32_MAX, INT64_MAX = 2**31 - 1, 2**63 - 1  # the types of Triton's fields
Positive = Annotated[int, Field(ge=1, le=INT32_MAX)]
Version = Annotated[int, Field(ge=1, le=INT64_MAX)]


class _Written(BaseModel):
    """Part of a file that a person writes: immutable, no unknown keys, no strings for numbers, no infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Tensor(_Written):
    """A tensor, without the batch dimension when `max_batch_size` is above 0; -1 is a variable dimension."""

    name: str
    data_type: DataType
    dims: list[Annotated[int, Field(ge=-1, le=INT64_MAX)]]


class GpuModel(_Written):
    """What changes when the repository is built with `--target gpu`."""

    file: str | None = Field(None, description="another file for the GPU, e.g. a TensorRT plan")
    format: ModelFormat | None = None
    accelerator: Literal["none", "tensorrt"] = Field(
        "none", description="TensorRT execution provider inside the onnxruntime backend"
    )
    precision: Literal["fp32", "fp16", "int8"] = Field("fp32", description="precision mode of the accelerator")


class Model(_Written):
    """The model file and what is known of it."""

    file: str = Field(description="model file, relative to the service file")
    format: ModelFormat | None = Field(None, description="default: by the file's suffix")
    prepare: str | None = Field(None, description="Python script that makes the file: run as `SCRIPT --output DIR`")
    samples: str | None = Field(None, description=".npz of real rows, one array per input: warmup and measurements")
    inputs: list[Tensor] | None = Field(None, description="checked against the model; required when it cannot be read")
    outputs: list[Tensor] | None = Field(None, description="as inputs")
    gpu: GpuModel = GpuModel()


class Slo(_Written):
    """The promise: answers within `p99_ms` for 99 of 100 requests at `rate_per_s` requests per second."""

    p99_ms: Annotated[float, Field(gt=0)]
    rate_per_s: Annotated[float, Field(gt=0)] | None = None


class Batching(_Written):
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


class CallerClass(_Written):
    """A class of callers: one priority level and its queue policy. Priority 1 is served first."""

    name: Name
    priority: int
    max_queue_size: Annotated[int, Field(ge=0, le=2**32 - 1)] = Field(1000, description="0: unlimited")
    timeout_ms: Annotated[float, Field(ge=0.001, le=NO_TIMEOUT_MS)] | None = Field(
        None, description="longest wait in the queue; a request may ask for less"
    )
    timeout_action: Literal["reject", "delay"] = "reject"


class Instances(_Written):
    """One instance group."""

    count: Annotated[int, Field(ge=1, le=256)] = 1
    kind: Literal["auto", "cpu", "gpu", "model"] = Field(
        "auto", description="auto: what the build target says (gpu, cpu, or Triton's own KIND_AUTO)"
    )
    gpus: list[Annotated[int, Field(ge=0, le=1023)]] = []
    threads: Annotated[int, Field(ge=0, le=1024)] = Field(
        1, description="CPU threads inside one run; 0: runtime's choice"
    )


class LatestVersions(_Written):
    """Serve the newest `latest` versions."""

    latest: Positive


class SpecificVersions(_Written):
    """Serve exactly these versions."""

    specific: Annotated[list[Version], Field(min_length=1)]


class Warmup(_Written):
    """Requests that each instance runs before it takes traffic; one row of the samples repeated to each batch size."""

    batch_sizes: Annotated[list[Positive], Field(min_length=1)] = [1]
    count: Positive = Field(1, description="repetitions of each")
    data: Literal["samples", "zero", "random"] = "samples"


class Resource(_Written):
    """A resource of Triton's rate limiter."""

    name: Name
    count: Positive
    is_global: bool = Field(False, description="shared by all devices (Triton's `global`)")


class RateLimiter(_Written):
    """Triton's rate limiter; takes effect when the server runs with `--rate-limit=execution_count`."""

    resources: list[Resource] = []
    priority: Annotated[int, Field(ge=0, le=INT32_MAX)] = Field(
        0, description="a weight: 2 gets half of the chances of 1"
    )


class Step(_Written):
    """One step of an ensemble. Maps go from the composing model's tensor name to the ensemble's."""

    model: Name
    version: Annotated[int, Field(ge=-1, le=INT64_MAX)] = -1
    inputs: Annotated[dict[str, str], Field(min_length=1)]
    outputs: Annotated[dict[str, str], Field(min_length=1)]


class Ensemble(_Written):
    """A pipeline of services that Triton runs as one model."""

    inputs: Annotated[list[Tensor], Field(min_length=1)]
    outputs: Annotated[list[Tensor], Field(min_length=1)]
    steps: Annotated[list[Step], Field(min_length=1)]


class Service(_Written):
    """One service. Either `model` or `ensemble` is given."""

    service: Name = Field(description="name of the service and of its model in Triton")
    description: str = ""
    model: Model | None = None
    ensemble: Ensemble | None = None
    slo: Slo | None = None
    batching: Batching
    classes: list[CallerClass] = Field([], description="none: no priorities and no limits")
    default_class: Name | None = Field(None, description="class of callers that name none; default: the first")
    instances: Annotated[list[Instances], Field(min_length=1)] = [Instances()]
    version_policy: Literal["all"] | LatestVersions | SpecificVersions = LatestVersions(latest=1)
    warmup: Warmup | None = None
    response_cache: bool = Field(False, description="Triton's own cache; costs throughput on unique inputs")
    rate_limiter: RateLimiter | None = None
    parameters: dict[str, str] = Field({}, description="extra Triton parameters, passed through as they are")
    triton: dict[str, Any] = Field(
        {}, description="extra fields of Triton's ModelConfig in its JSON form, merged last; checked by Triton's schema"
    )

    _path: Path = PrivateAttr(default=Path(SERVICE_FILE))

    @property
    def path(self) -> Path:
        """The file that this service was read from."""
        return self._path

    @property
    def folder(self) -> Path:
        """The folder that relative file names start from."""
        return self._path.parent

    @property
    def default_priority(self) -> int:
        """Priority level of callers that name no class; 0 when there are no classes."""
        if not self.classes:
            return 0
        name = self.default_class or self.classes[0].name
        return next(c.priority for c in self.classes if c.name == name)

    @field_validator("parameters")
    @classmethod
    def _no_pilot_parameters(cls, value: dict[str, str]) -> dict[str, str]:
        ours = [key for key in value if key in ("pilot_wake_priority", "pilot_classes")]
        if ours:
            raise ValueError(f"{ours[0]} is set by the build itself; remove it")
        return value

    @field_validator("triton")
    @classmethod
    def _no_second_word(cls, value: dict[str, Any]) -> dict[str, Any]:
        said = [key for key in value if re.sub(r"([A-Z])", r"_\1", key).lower() in SAID_ELSEWHERE]
        if said:
            raise ValueError(f"{said[0]} is said elsewhere in the service file or read from the model; remove it here")
        return value

    @model_validator(mode="after")
    def _parts_agree(self) -> Service:
        if (self.model is None) == (self.ensemble is None):
            raise ValueError("give either `model` or `ensemble`, and not both")
        _check_classes(self.classes, self.default_class)
        if self.classes and self.batching.max_batch_size == 0:
            raise ValueError("classes need Triton's dynamic batcher, which max_batch_size 0 switches off")
        if len({group.threads for group in self.instances}) > 1:
            raise ValueError("Triton sets threads per model: give every instance group the same `threads`")
        for size in self.warmup.batch_sizes if self.warmup else []:
            if size > max(1, self.batching.max_batch_size):
                raise ValueError(f"warmup batch size {size} is above max_batch_size {self.batching.max_batch_size}")
        if self.ensemble is not None:
            if self.classes:
                raise ValueError(
                    "an ensemble has no queue of its own: set classes on the services of its steps "
                    "(Triton passes the caller's priority on to each)"
                )
            if self.warmup or self.rate_limiter or self.response_cache:
                raise ValueError("warmup, rate_limiter and response_cache belong to the services of the steps")
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
    if default_class is not None and default_class not in names:
        raise ValueError(
            f"default_class {default_class} is not one of the classes ({', '.join(names) or 'none given'})"
        )


def load_service(path: Path) -> Service:
    """Read one service file.

    Raises SpecError when it cannot be read, is no YAML mapping, has unknown keys or values that contradict each other.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} cannot be read: {error}. Nothing was changed.") from error
    try:
        node = yaml.compose(text, Loader=_Loader)
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not valid YAML: {error}. Nothing was changed.") from error
    if not isinstance(content, dict):
        raise SpecError(f"{path} must be a mapping that starts with `service: NAME`. Nothing was changed.")
    try:
        service = Service.model_validate(content)
    except ValidationError as error:
        raise SpecError("\n".join([*_say_all(path, node, error), "Nothing was changed."])) from error
    service._path = path
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
        raise SpecError(f"There is no service {unknown[0]} in {models}{_nearest(unknown[0], list(by_name))}.")
    return [by_name[name] for name in sorted(set(names) or by_name)]


def json_schema() -> dict[str, Any]:
    """The service file as JSON Schema (draft 2020-12), for editors."""
    schema = Service.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "Triton Pilot service file"}


class _Loader(yaml.SafeLoader):
    """Safe YAML that refuses a key given twice (plain YAML lets the last one win silently)."""


def _mapping_without_twins(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        try:
            twin = key in seen
            seen.add(key)
        except TypeError as error:
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark) from error
        if twin:
            raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_twins)


def _say_all(path: Path, node: yaml.Node | None, error: ValidationError) -> list[str]:
    """Each problem as one line with file, line, what is wrong and what to do, without repetitions."""
    problems = [(tuple(p for p in e["loc"] if not _is_union_branch(p)), e) for e in error.errors()]
    # A wrong key in a field of several forms fails each form in its own way: only the key is worth telling.
    told = {loc[:-1] for loc, e in problems if e["type"] == "extra_forbidden" and loc[:-1]}
    lines = [
        f"{path}:{_line_of(node, loc)}: {_say(loc, e)}"
        for loc, e in problems
        if e["type"] == "extra_forbidden" or not (loc in told or (loc[:-1] in told and e["type"] == "missing"))
    ]
    return list(dict.fromkeys(lines))


def _say(loc: Sequence[object], problem: Any) -> str:
    where = ".".join(str(part) for part in loc)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(Service, loc[:-1])
        nearest = _nearest(str(loc[-1]), known) or f" (known here: {', '.join(known)})"
        return f"unknown key {where}{nearest}"
    if problem["type"] == "missing":
        return f"{where} is missing"
    message = re.sub(r"^Value error, ", "", str(problem["msg"]))
    given = problem.get("input")
    shown = "" if isinstance(given, (dict, list, BaseModel)) else f" (given: {given!r})"
    return f"{where}: {message}{shown}" if where else message


def _is_union_branch(part: object) -> bool:
    return isinstance(part, str) and (part[:1].isupper() or part.startswith(("literal[", "function-", "constrained-")))


def _nearest(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _known_keys(model: type[BaseModel], loc: Sequence[object]) -> list[str]:
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(str(part))
        inner = _models_in(field.annotation) if field else []
        if not inner:
            return []
        if len(inner) > 1:
            return sorted({key for m in inner for key in m.model_fields})
        model = inner[0]
    return list(model.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, list, dict, Annotated) or get_args(annotation):
        return [model for arg in get_args(annotation) for model in _models_in(arg)]
    return []


def _line_of(node: yaml.Node | None, loc: Sequence[object]) -> int:
    """Line (from 1) of the deepest part of `loc` that exists in the file."""
    line = 1
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            pair = next((p for p in node.value if p[0].value == str(part)), None)
            if pair is None:
                break
            line, node = pair[0].start_mark.line + 1, pair[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
