"""From service files to a standard Triton model repository.

    plans = plan(load_services(Path("models")), target="cpu")
    changes = publish(Path("model_repository"), [p.folder for p in plans])

Planning reads and checks every service before anything is written; the same files give the same bytes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from tritonpilot import model_config, samples
from tritonpilot.errors import DriftError, ModelError, SpecError
from tritonpilot.model_config import BACKENDS, Target
from tritonpilot.onnx_model import Signature, external_files, read_signature
from tritonpilot.repository import Change, ModelFolder, compare, versions
from tritonpilot.repository import models as repository_models
from tritonpilot.spec import SERVICE_FILE, Service, SpecificVersions, load_services


@dataclass(frozen=True)
class Plan:
    """One service and the model folder that it becomes."""

    service: Service
    folder: ModelFolder


def prepare(services: Sequence[Service], target: Target, narrate: Callable[[str], None]) -> None:
    """Run the prepare script of each service whose model file or samples are missing; its output goes to stderr.

    Raises ModelError when a script fails or does not make its file.
    """
    for service in services:
        if service.model is None or service.model.prepare is None:
            continue
        path, _ = model_config.model_file(service, target)
        wanted = [path] + ([service.folder / service.model.samples] if service.model.samples else [])
        if all(file.is_file() for file in wanted):
            continue
        script = service.folder / service.model.prepare
        if not script.is_file():
            raise ModelError(
                f"{service.path}: the prepare script {script} does not exist, and neither does {path}. "
                "Nothing was changed. Correct model.prepare or put the model file there."
            )
        narrate(f"{service.service}: making {path.name} with {script} (only needed once)")
        started = time.monotonic()
        command = [sys.executable, str(script), "--output", str(path.parent)]
        done = subprocess.run(command, stdout=sys.stderr, check=False)
        if done.returncode != 0 or not all(file.is_file() for file in wanted):
            raise ModelError(
                f"`{' '.join(command)}` "
                + (f"failed with exit code {done.returncode}" if done.returncode else "did not make its files")
                + f"; its messages are above. {path} was not made, and the repository is unchanged. Repair the script's "
                "cause and repeat."
            )
        narrate(f"{service.service}: made {path.name} in {time.monotonic() - started:.0f} s")


def plan(services: Sequence[Service], target: Target = "auto", others: Sequence[Service] = ()) -> list[Plan]:
    """Check every service against its model and work out its model folder.

    Members of an ensemble are looked up in `others` when they are not among `services`; they get no plan.
    Raises SpecError or ModelError; nothing is written.
    """
    asked = {service.service for service in services}
    services = _with_members(services, {other.service: other for other in others})
    plans = [_plan_model(service, target) for service in services if service.model is not None]
    configs = {p.service.service: model_config.parse(p.folder.config_text, p.service.service) for p in plans}
    waiting = [service for service in services if service.ensemble is not None]
    while waiting:
        # An ensemble may be a step of another one: those whose members are known go first.
        ready = [s for s in waiting if not {w.service for w in waiting} & _members(s)] or waiting[:1]
        for service in ready:
            config = model_config.generate_ensemble(service, configs)
            configs[service.service] = config
            text = model_config.to_text(config, _source(service))
            plans.append(Plan(service, ModelFolder(service.service, text, {})))
            waiting.remove(service)
    return sorted((p for p in plans if p.service.service in asked), key=lambda p: p.service.service)


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
    changes = [compare(root, item.folder) for item in plans]
    drift = [change.describe() for change in changes if change]
    if drift:
        raise DriftError(
            f"{root} is not what the service files say: {'; '.join(drift)}. Nothing was changed. "
            "Run `tritonpilot build` (or undo the edit of a generated file)."
        )
    return changes


def probe_inputs(models: Path, root: Path) -> dict[str, dict[str, NDArray[Any]]]:
    """One real row per model of the repository whose service has samples: what proves that a model answers.

    A repository without service files beside it gets none; its models are probed with zeros.
    """
    if not any(models.glob(f"*/{SERVICE_FILE}")):
        return {}
    served = set(repository_models(root))
    found = {}
    for service in load_services(models):
        if service.model is None or service.model.samples is None or service.service not in served:
            continue
        path = service.folder / service.model.samples
        if path.is_file():
            is_batched = service.batching.max_batch_size > 0
            found[service.service] = samples.first_request(samples.read(path), is_batched=is_batched)
    return found


def _plan_model(service: Service, target: Target) -> Plan:
    assert service.model is not None
    path, model_format = model_config.model_file(service, target)
    if not path.is_file():
        raise ModelError(
            f"{service.path}: the model file {path} does not exist. Nothing was changed. "
            f"{_how_to_prepare(service, 'Put it there or correct model.file.')}"
        )
    filename = BACKENDS[model_format][1]
    files = {filename: path}
    if model_format == "onnx":
        signature = read_signature(path)
        files.update({name: path.parent / name for name in external_files(path)})
    else:
        signature = model_config.declared_signature(service)
    row = _sample_row(service, signature)
    config = model_config.generate(service, signature, target, row)
    warmup = {}
    if row is not None and service.warmup is not None and service.warmup.data == "samples":
        warmup = {model_config.warmup_file(t.name): samples.raw(row[t.name]) for t in signature.inputs}
    return Plan(service, ModelFolder(service.service, model_config.to_text(config, _source(service)), files, warmup))


def _sample_row(service: Service, signature: Signature) -> dict[str, NDArray[Any]] | None:
    """The first sample of each input, checked against the model; None when the service has no samples."""
    assert service.model is not None
    if service.model.samples is None:
        return None
    arrays = samples.read(service.folder / service.model.samples)
    batched = service.batching.max_batch_size > 0
    row = {}
    for tensor in signature.inputs:
        array = arrays.get(tensor.name)
        if array is None:
            raise ModelError(
                f"{service.path}: the samples {service.model.samples} have no array for the input {tensor.name} "
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


def _with_members(services: Sequence[Service], others: dict[str, Service]) -> list[Service]:
    found = {service.service: service for service in services}
    missing = {name for service in services for name in _members(service) if name not in found and name in others}
    if not missing:
        return list(services)
    return _with_members([*services, *(others[name] for name in sorted(missing))], others)


def _members(service: Service) -> set[str]:
    return {step.model for step in service.ensemble.steps} if service.ensemble else set()


def _source(service: Service) -> str:
    """The service file as the generated header names it: independent of where the project lies."""
    return "/".join(service.path.parts[-3:])


def _how_to_prepare(service: Service, otherwise: str) -> str:
    if service.model and service.model.prepare:
        return f"Run `tritonpilot build {service.service} --prepare`, which makes it with {service.model.prepare}."
    return otherwise[0].upper() + otherwise[1:]
