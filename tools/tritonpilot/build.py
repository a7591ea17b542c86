"""From service files to a standard Triton model repository.

    plans = plan(load_services(Path("models")), target="cpu")
    changes = publish(Path("model_repository"), folders(plans))

Planning reads and checks every service before anything is written; the same files give the same bytes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tritonpilot import backends, model_config, pins, samples
from tritonpilot.errors import DriftError, ModelError, SpecError
from tritonpilot.model_config import Target
from tritonpilot.onnx_model import Signature, external_files, read_signature
from tritonpilot.pipeline import parts, step_model
from tritonpilot.quantize.manifest import ensure_of
from tritonpilot.repository import CONFIG_FILE, Change, ModelFolder, compare, damaged, held, sha256, versions
from tritonpilot.repository import models as repository_models
from tritonpilot.spec import INT8_SUFFIX, SERVICE_FILE, Service, SpecificVersions, load_services


@dataclass(frozen=True)
class Plan:
    """One service and the model folder that it becomes."""

    service: Service
    folder: ModelFolder


def by_name(services: Sequence[Service]) -> dict[str, Service]:
    """Service name -> service."""
    return {service.service: service for service in services}


def with_members(services: Sequence[Service], others: Mapping[str, Service]) -> list[Service]:
    """The services, and those of `others` (by name) that their pipelines name."""
    found = by_name(services)
    missing = {name for service in services for name in _members(service) if name not in found and name in others}
    if not missing:
        return list(services)
    return with_members([*services, *(others[name] for name in sorted(missing))], others)


def prepare(
    services: Sequence[Service], target: Target, narrate: Callable[[str], None], others: Sequence[Service] = ()
) -> None:
    """Run the prepare scripts whose files are missing, each once; their output goes to stderr.

    Services that a pipeline names are looked up in `others` too. Raises ModelError when a script fails or does not make
    its files.
    """
    for script, wanted in missing_files(services, target, others).items():
        run_script(script, wanted, narrate)


def run_script(script: Path, wanted: Sequence[Path], narrate: Callable[[str], None]) -> None:
    """Let a prepare script make the files that are missing, if some are. Raises ModelError when it does not."""
    missing = [file for file in wanted if not file.is_file()]
    if not missing:
        return
    name = script.parent.name
    if not script.is_file():
        raise ModelError(
            f"The prepare script {script} does not exist, and neither does {missing[0]}. "
            "Nothing was changed. Correct `prepare` in the service file or put the file there."
        )
    narrate(f"{name}: making {', '.join(file.name for file in missing)} with {script} (only needed once)")
    started = time.monotonic()
    command = [sys.executable, str(script), "--output", str(missing[0].parent)]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    missing = [file for file in wanted if not file.is_file()]
    if done.returncode != 0 or missing:
        raise ModelError(
            f"`{' '.join(command)}` "
            + (f"failed with exit code {done.returncode}" if done.returncode else f"did not make {missing[0].name}")
            + f"; its messages are above. {wanted[0]} was not made, and the repository is unchanged. Repair the script's "
            "cause and repeat."
        )
    narrate(f"{name}: made them in {time.monotonic() - started:.0f} s")


def missing_files(
    services: Sequence[Service], target: Target, others: Sequence[Service] = ()
) -> dict[Path, list[Path]]:
    """Prepare script -> the files that it makes, for each script of which some are missing."""
    found = _preparations(with_members(services, by_name(others)), target)
    return {script: wanted for script, wanted in found.items() if not all(file.is_file() for file in wanted)}


def plan(services: Sequence[Service], target: Target = "auto", others: Sequence[Service] = ()) -> list[Plan]:
    """Check every service against its models and work out its model folders: one, or one for each part of a pipeline.

    Services that a pipeline names are looked up in `others` when they are not among `services`; they get no plan.
    Raises SpecError or ModelError; nothing is written.
    """
    asked = {part.service for service in services for part in parts(service)}
    everything = [part for service in with_members(services, by_name(others)) for part in parts(service)]
    _check_names(everything)
    plans = [_plan_model(service, target) for service in everything if service.model is not None]
    configs = {p.service.service: model_config.parse(p.folder.config_text, p.service.service) for p in plans}
    waiting = [service for service in everything if service.pipeline is not None]
    while waiting:
        # An ensemble may be a step of another one: those whose members are known go first.
        ready = [s for s in waiting if not {w.service for w in waiting} & _members(s)] or waiting[:1]
        for service in ready:
            signature = model_config.pipeline_signature(service)
            row = _sample_row(service, signature)
            config = model_config.generate_ensemble(service, configs)
            configs[service.service] = config
            text = model_config.to_text(config, _source(service))
            plans.append(Plan(service, ModelFolder(service.service, text, {}, _row_files(row, signature))))
            waiting.remove(service)
    return sorted((p for p in plans if p.service.service in asked), key=lambda p: p.service.service)


def folders(plans: Sequence[Plan], root: Path | None = None) -> list[ModelFolder]:
    """The model folders of the plans, and the companion's where one of them may need it (docs/adr/0010-companion.md).

    What a swap serves in the repository `root` stays, until the service's own files become others (docs/adr/0019-swap.md).
    """
    found = [item.folder for item in plans]
    if root is not None:
        found = _held(root, found)
    if any(model_config.needs_companion(model_config.parse(folder.config_text, folder.name)) for folder in found):
        found.append(ModelFolder(model_config.COMPANION, model_config.companion_text(), {}))
    return found


def check_versions(root: Path, plans: Sequence[Plan]) -> None:
    """Raise SpecError where a service pins versions that publishing would not give it."""
    for item in plans:
        policy = item.service.version_policy
        if not isinstance(policy, SpecificVersions):
            continue
        there = {*versions(root, item.folder.name), compare(root, item.folder).version}
        absent = [version for version in policy.specific if version not in there]
        if absent:
            raise SpecError(
                f"{item.service.path}: version_policy pins version {absent[0]}, but {root / item.folder.name} has "
                f"{', '.join(map(str, sorted(there)))}. Nothing was changed. Pin versions that exist."
            )


def check(root: Path, plans: Sequence[Plan]) -> list[Change]:
    """Compare the repository with the plans; raises DriftError that lists what differs."""
    changes = [compare(root, folder) for folder in folders(plans, root)]
    drift = [change.describe() for change in changes if change]
    if drift:
        raise DriftError(
            f"{root} is not what the service files say: {'; '.join(drift)}. Nothing was changed. "
            "Run `tritonpilot build` (or undo the edit of a generated file)."
        )
    return changes


def _held(root: Path, wanted: Sequence[ModelFolder]) -> list[ModelFolder]:
    """The folders as they are served since a swap of them, where it still holds."""
    found = {folder.name: held(root, folder.name) for folder in wanted}
    served = {
        folder.name: said
        for folder in wanted
        if (said := found[folder.name]) is not None
        and said.version in versions(root, folder.name)
        and not damaged(root, folder.name, said.version)
        and said.instead_of == {name: sha256(path) for name, path in folder.version_files.items()}
    }
    for name, said in list(served.items()):
        if any(member not in served or served[member].version != version for member, version in said.steps.items()):
            del served[name]  # its members that hold have one version each, which it gets without asking for it
    return [
        replace(
            folder,
            held=served[folder.name],
            config_text=pins.pinned(folder.config_text, [served[folder.name].version], served[folder.name].steps),
        )
        if folder.name in served
        else folder
        for folder in wanted
    ]


def probe_inputs(models: Path, root: Path) -> dict[str, dict[str, NDArray[Any]]]:
    """One real row per model of the repository whose service has samples: what proves that a model answers.

    A repository without service files beside it gets none; its models are probed with zeros.
    """
    if not any(models.glob(f"*/{SERVICE_FILE}")):
        return {}
    served = set(repository_models(root))
    found = {}
    for part in (part for service in load_services(models) for part in parts(service)):
        path = part.samples
        if path is not None and path.is_file() and part.service in served:
            is_batched = part.batching.max_batch_size > 0
            found[part.service] = samples.first_request(samples.read(path), is_batched=is_batched)
        if part.pipeline is not None and part.service in found:
            found.update(_probes_of_steps(part, root, found))
    return found


def _probes_of_steps(
    service: Service, root: Path, found: Mapping[str, dict[str, NDArray[Any]]]
) -> dict[str, dict[str, NDArray[Any]]]:
    """The pipeline's row for those of its steps that have no samples and read nothing but the pipeline's inputs."""
    assert service.pipeline is not None
    row = found[service.service]
    probes = {}
    for step in service.pipeline.steps:
        name = step_model(service, step)
        if name in found or not (root / name / CONFIG_FILE).is_file():
            continue
        config = model_config.parse(
            (root / name / CONFIG_FILE).read_text(encoding="utf-8"), str(root / name / CONFIG_FILE)
        )
        sources = {tensor.name: step.inputs.get(tensor.name, tensor.name) for tensor in config.input}
        if set(sources.values()) <= set(row):
            probes[name] = {tensor: row[source] for tensor, source in sources.items()}
    return probes


def _plan_model(service: Service, target: Target) -> Plan:
    model = service.model
    assert model is not None
    files = model_config.version_files(service, target)
    for path in files.values():
        if not path.is_file():
            raise ModelError(
                f"{service.path}: the model file {path} does not exist. Nothing was changed. "
                + (
                    f"Make it: `tritonpilot quantize {service.service.removesuffix('_int8')}`. Where that says that FP32 "
                    "stays, take `publish` out of the service file."
                    if path.name.endswith(INT8_SUFFIX)
                    else _how_to_prepare(service, "Put it there or correct model.file.")
                )
            )
    for path in files.values():
        if path.name.endswith(INT8_SUFFIX):
            ensure_of(path, path.with_name(path.name.removesuffix(INT8_SUFFIX) + ".onnx"))
    own = {name: path for name, path in files.items() if path.suffix != ".onnx"}  # which is read as a whole
    backends.check_files(model.backend, model_config.parameters(service), own)
    signature = _signature(service, target, files)
    for path in [*files.values()] if model.backend is None else []:
        if path.suffix == ".onnx":
            files.update({name: path.parent / name for name in external_files(path)})
    row = _sample_row(service, signature)
    config = model_config.generate(service, signature, target, row)
    text = model_config.to_text(config, _source(service))
    return Plan(service, ModelFolder(service.service, text, files, _row_files(row, signature)))


def _row_files(row: Mapping[str, NDArray[Any]] | None, signature: Signature) -> dict[str, bytes]:
    """The row for the model's warmup folder: Triton warms it up with that where the config says so, and what asks whether the model
    answers (`tritonpilot watch`, the container's health check) has real data."""
    if row is None:
        return {}
    return {model_config.warmup_file(tensor.name): samples.raw(row[tensor.name]) for tensor in signature.inputs}


def _signature(service: Service, target: Target, files: Mapping[str, Path]) -> Signature:
    """Inputs and outputs: read from an ONNX file, known of a generic backend, else as the service file states them."""
    model = service.model
    assert model is not None
    if model.backend is not None:
        stated = model.inputs and model.outputs
        known = backends.signature(
            model.backend,
            model_config.parameters(service),
            files,
            is_batched=service.batching.max_batch_size > 0,
        )
        return model_config.declared_signature(service) if stated or known is None else known
    path, model_format = model_config.model_file(service, target)
    return read_signature(path) if model_format == "onnx" else model_config.declared_signature(service)


def _sample_row(service: Service, signature: Signature) -> dict[str, NDArray[Any]] | None:
    """The first sample of each input, checked against the model; None when the service has no samples."""
    if service.samples is None:
        return None
    arrays = samples.read(service.samples)
    batched = service.batching.max_batch_size > 0
    row = {}
    for tensor in signature.inputs:
        array = arrays.get(tensor.name)
        if array is None:
            raise ModelError(
                f"{service.path}: the samples {service.samples} have no array for the input {tensor.name} "
                f"(they have {', '.join(sorted(arrays))}). Nothing was changed. Make the samples again."
            )
        shape = tensor.shape[1:] if batched else tensor.shape
        if not samples.fits(array, tensor.data_type, shape):
            raise ModelError(
                f"{service.path}: the samples of input {tensor.name} are {array.dtype} rows of {list(array.shape[1:])}, "
                f"but the model takes {tensor.data_type} {list(shape)}. Nothing was changed. Make the samples again."
            )
        row[tensor.name] = array[0] if shape else array[:1]
    return row


def _preparations(services: Sequence[Service], target: Target) -> dict[Path, list[Path]]:
    """Script -> the files that it makes, of all models that name it."""
    found: dict[Path, list[Path]] = {}
    for part in (part for service in services for part in parts(service)):
        script = part.model.prepare if part.model else part.pipeline.prepare if part.pipeline else None
        if script is None:
            continue
        files = list(model_config.version_files(part, target).values()) if part.model else []
        files += [part.samples] if part.samples else []
        is_own_code = part.model is not None and part.model.backend is not None
        wanted = found.setdefault(part.folder / script, [])
        wanted += [
            file
            for file in files
            if file not in wanted and not (is_own_code and file.suffix == ".py") and not file.name.endswith(INT8_SUFFIX)
        ]
    return found


def _check_names(services: Sequence[Service]) -> None:
    """Raise SpecError when a step's model would have the name of another service."""
    by_name: dict[str, Service] = {}
    for service in services:
        twin = by_name.setdefault(service.service, service)
        if twin is not service:
            raise SpecError(
                f"Two models would be named {service.service}: {twin.path} and {service.path} both make one. "
                "Nothing was changed. Rename the service or the step."
            )


def _members(service: Service) -> set[str]:
    """The other services that a pipeline names."""
    return {step.service for step in service.pipeline.steps if step.service} if service.pipeline else set()


def _source(service: Service) -> str:
    """The service file as the generated header names it: independent of where the project lies."""
    return "/".join(service.path.parts[-3:])


def _how_to_prepare(service: Service, otherwise: str) -> str:
    if service.model and service.model.prepare:
        return f"Run `tritonpilot build {service.written_as} --prepare`, which makes it with {service.model.prepare}."
    return otherwise[0].upper() + otherwise[1:]
