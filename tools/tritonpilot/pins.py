"""A config that says itself which version is served, and which versions of others it calls.

    pinned(text, [3])                                    # config.pbtxt: version_policy { specific { versions: 3 } }
    pinned(text, [1], {"pair_first": 3})                 # a pipeline's: its steps ask for version 3 of pair_first

Triton gives callers that name no version the highest that is loaded; a model's candidate therefore is a model of another name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf import text_format

from tritonpilot.model_config import ModelConfig, parse
from tritonpilot.repository import CANDIDATE

STEPS, STEP_VERSIONS = "pilot_steps", "pilot_step_versions"
#: Parameters that make the entry or the build treat a model as one that callers use.
_OF_SERVED = (
    "pilot_cache",
    "pilot_guard",
    "pilot_guard_reference",
    "pilot_trace_rate",
    "pilot_record",
    "pilot_record_file",
)


def pinned(text: str, versions: Sequence[int], steps: Mapping[str, int]) -> str:
    """A config.pbtxt whose model serves exactly these versions and calls others in those versions; the comment on top stays."""
    config = parse(text, "the config of the build")
    pin(config, versions, steps)
    return with_comment(text, config)


def pin(config: ModelConfig, versions: Sequence[int], steps: Mapping[str, int]) -> None:
    """The same for a ModelConfig, in place."""
    config.version_policy.Clear()
    config.version_policy.specific.versions.extend(versions)
    for step in config.ensemble_scheduling.step:
        if step.model_name in steps:
            step.model_version = steps[step.model_name]
    if steps and STEPS in config.parameters:
        known = {**step_versions(config), **steps}
        config.parameters[STEP_VERSIONS].string_value = ",".join(f"{name}:{version}" for name, version in known.items())


def step_versions(config: ModelConfig) -> dict[str, int]:
    """The models that it calls in a version of its choice."""
    found = {
        step.model_name: int(step.model_version) for step in config.ensemble_scheduling.step if step.model_version > 0
    }
    if STEP_VERSIONS in config.parameters:
        pairs = (each.rpartition(":") for each in config.parameters[STEP_VERSIONS].string_value.split(",") if each)
        found.update({name: int(version) for name, _, version in pairs})
    return found


def called(config: ModelConfig) -> list[str]:
    """The models that an ensemble or a driver calls; none: it is no pipeline."""
    found = [step.model_name for step in config.ensemble_scheduling.step]
    if STEPS in config.parameters:
        found += [name for name in config.parameters[STEPS].string_value.split(",") if name]
    return list(dict.fromkeys(found))


def candidate(config: ModelConfig, versions: Sequence[int], names: Mapping[str, str]) -> ModelConfig:
    """The config of a model's candidate: its name, and the candidates among the models that it calls."""
    found = type(config)()
    found.CopyFrom(config)
    found.name = config.name + CANDIDATE
    pin(found, versions, {})
    found.response_cache.enable = False  # or it would not be the candidate that answers
    for key in _OF_SERVED:
        if key in found.parameters:
            del found.parameters[key]
    for step in found.ensemble_scheduling.step:
        if step.model_name in names:
            step.model_name, step.model_version = names[step.model_name], -1
    if STEPS in found.parameters:
        for value in found.parameters.values():
            if value.string_value in names:
                value.string_value = names[value.string_value]
        steps = found.parameters[STEPS].string_value.split(",")
        found.parameters[STEPS].string_value = ",".join(names.get(step, step) for step in steps)
        others = {name: version for name, version in step_versions(found).items() if name not in names}
        if STEP_VERSIONS in found.parameters:
            del found.parameters[STEP_VERSIONS]
        if others:
            pin(found, versions, others)
    return found


def with_comment(text: str, config: ModelConfig) -> str:
    """Protobuf text of the config, under the comment that begins `text`."""
    comment = "".join(line for line in text.splitlines(keepends=True)[:1] if line.startswith("#"))
    body: str = text_format.MessageToString(config, as_utf8=True)
    return comment + body
