"""What may be chosen for a service without changing what it answers: batching, instances, threads, precision, queue limits.

    now = Setting.of(service)
    other = replace(now, queue_delay_us=2000).applied(service)      # a Service again: for `build.plan`, or a Stage

One setting belongs to one Triton model; `find` names the model of a pipeline (image_net) that is meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import ValidationError

from tritonpilot.errors import SpecError
from tritonpilot.pipeline import parts
from tritonpilot.spec import Batching, CallerClass, Instances, Model, Service
from tritonpilot.written import nearest

Precision = Literal["fp32", "fp16", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Setting:
    """One choice. `instances` counts all of them; `threads` is what one run of the model uses, 0 being the runtime's choice.

    `max_queue_sizes` maps classes to their limit of waiting requests (0: unlimited); classes left out keep theirs.
    """

    queue_delay_us: int
    max_batch_size: int
    instances: int = 1
    threads: int = 1
    precision: Precision = "fp32"
    max_queue_sizes: Mapping[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, service: Service) -> Setting:
        """What the service file says. Raises SpecError for an ensemble, which has neither queue nor instances."""
        _check_has_queue(service)
        return cls(
            queue_delay_us=service.batching.queue_delay_us,
            max_batch_size=service.batching.max_batch_size,
            instances=sum(group.count for group in service.instances),
            threads=service.instances[0].threads,
            precision=_precision(service),
            max_queue_sizes={each.name: each.max_queue_size for each in service.classes},
        )

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> Setting:
        """The reverse of `as_dict`."""
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "max_queue_sizes": dict(self.max_queue_sizes)}

    def applied(self, service: Service) -> Service:
        """The service with this setting; what is above the maximum batch size in warmup and preferred sizes is cut to
        it or left out.

        Several instance groups become one when their number changes. Raises SpecError where the setting contradicts the service:
        a class that it does not have, a delay that a class's timeout does not allow, a precision that its model cannot have.
        """
        _check_has_queue(service)
        was = Setting.of(service)
        if (was.max_batch_size == 0) != (self.max_batch_size == 0):
            raise self._refused(
                service, f"its max_batch_size is {was.max_batch_size}, and 0, no batch dimension, is the model's own"
            )
        for each in service.classes:
            if service.timeout_ms(each) * 1000 <= self.queue_delay_us:
                raise self._refused(
                    service,
                    f"class {each.name} may wait {service.timeout_ms(each):g} ms, no longer than this delay; "
                    "raise its timeout_ms",
                )
        changes: dict[str, Any] = {
            "batching": self._batching(service),
            "instances": self._instances(service, was),
            "classes": self._classes(service),
            "model": self._model(service, was),
        }
        if service.warmup is not None:
            most = max(1, self.max_batch_size)
            sizes = {min(size, most) for size in service.warmup.batch_sizes}
            changes["warmup"] = service.warmup.model_copy(update={"batch_sizes": sorted(sizes)})
        return service.model_copy(update=changes)

    def describe(self) -> str:
        """In a few words: `delay 500 us, batch 256, 1 instance of 1 thread, fp32`."""
        instances = f"{self.instances} instance{'s' * (self.instances != 1)}"
        threads = f"{self.threads or 'any number of'} thread{'s' * (self.threads != 1)}"
        return (
            f"delay {self.queue_delay_us} us, batch {self.max_batch_size}, {instances} of {threads}, {self.precision}"
        )

    def _batching(self, service: Service) -> Batching:
        old = service.batching
        preferred = [size for size in old.preferred_batch_sizes if size <= self.max_batch_size]
        try:
            return Batching(
                max_batch_size=self.max_batch_size,
                queue_delay_us=self.queue_delay_us,
                preferred_batch_sizes=preferred,
                preserve_ordering=old.preserve_ordering,
            )
        except ValidationError as error:
            raise self._refused(service, error.errors()[0]["msg"]) from error

    def _instances(self, service: Service, was: Setting) -> list[Instances]:
        groups = service.instances
        counts = [group.count for group in groups] if self.instances == was.instances else [self.instances]
        try:
            return [
                Instances(count=count, kind=group.kind, gpus=group.gpus, threads=self.threads)
                for count, group in zip(counts, groups, strict=False)
            ]
        except ValidationError as error:
            raise self._refused(service, error.errors()[0]["msg"]) from error

    def _classes(self, service: Service) -> list[CallerClass]:
        known = [each.name for each in service.classes]
        unknown = [name for name in self.max_queue_sizes if name not in known]
        if unknown:
            raise self._refused(
                service, f"there is no class {unknown[0]}{nearest(unknown[0], known)} ({', '.join(known) or 'none'})"
            )
        return [
            each.model_copy(update={"max_queue_size": self.max_queue_sizes.get(each.name, each.max_queue_size)})
            for each in service.classes
        ]

    def _model(self, service: Service, was: Setting) -> Model:
        model = service.model
        assert model is not None
        if self.precision == was.precision:
            # Published beside, an INT8 twin would be a second Triton model: a setting is that of one.
            is_beside = model.quantize is not None and model.quantize.publish == "beside"
            return _published(model, None) if is_beside else model
        file = file_of(service, self.precision)
        if not file.is_file():
            how = f"tritonpilot quantize {service.service}" + (
                f" --precision {self.precision}" if self.precision != "int8" else ""
            )
            raise self._refused(
                service, f"{file} does not exist; make it with `{how}`, which says too when {was.precision} stays"
            )
        if model.quantize is not None and self.precision in ("fp32", "int8"):
            return _published(model, "instead" if self.precision == "int8" else None)
        return model.model_copy(update={"file": str(Path(str(model.file)).with_name(file.name)), "quantize": None})

    def _refused(self, service: Service, why: str) -> SpecError:
        return SpecError(
            f"{service.path}: {service.service} cannot have the setting {self.describe()}: {why}. Nothing was changed."
        )


def find(services: Sequence[Service], name: str) -> Service:
    """The service, or the model of a pipeline, of this Triton name. Raises SpecError where there is none, or it has no queue."""
    everything = {part.service: part for service in services for part in parts(service)}
    if name not in everything:
        raise SpecError(f"There is no service or model {name}{nearest(name, list(everything))}. Nothing was changed.")
    _check_has_queue(everything[name])
    return everything[name]


def file_of(service: Service, precision: Precision) -> Path:
    """Where the model of that precision lies, made by `tritonpilot quantize`, whether it is there or not.

    Raises SpecError when the service runs no ONNX file.
    """
    model = service.model
    if model is None or model.backend is not None or not str(model.file).endswith(".onnx"):
        raise SpecError(
            f"{service.path}: {service.service} runs no ONNX file, so there is no {precision} of it. Nothing was changed."
        )
    plain = service.folder / str(model.file).removesuffix(".onnx").removesuffix(f".{_of_file(str(model.file))}")
    return plain.with_name(plain.name + (".onnx" if precision == "fp32" else f".{precision}.onnx"))


def precisions(service: Service) -> tuple[Precision, ...]:
    """The precisions whose model files are there now; one, what it is, for a service without an ONNX file."""
    model = service.model
    if model is None or model.backend is not None or not str(model.file).endswith(".onnx"):
        return (_precision(service),)
    return tuple(precision for precision in PRECISIONS if file_of(service, precision).is_file())


def _published(model: Model, how: Literal["instead"] | None) -> Model:
    assert model.quantize is not None
    return model.model_copy(update={"quantize": model.quantize.model_copy(update={"publish": how})})


def _precision(service: Service) -> Precision:
    model = service.model
    if model is not None and model.quantize is not None and model.quantize.publish == "instead":
        return "int8"
    return _of_file(str(model.file) if model is not None else "")


def _of_file(file: str) -> Precision:
    return next((each for each in PRECISIONS if file.endswith(f".{each}.onnx")), "fp32")


def _check_has_queue(service: Service) -> None:
    if service.model is None:
        own = ", ".join(part.service for part in parts(service) if part.model is not None)
        raise SpecError(
            f"{service.path}: {service.service} is an ensemble, and queue, instances and threads are those of its models. "
            f"Nothing was changed. Name one of them: {own or 'the services in its steps'}."
        )
