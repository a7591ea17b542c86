"""Where in a model's config are the settings that may change while it serves? Pure: read and write them, undo Triton's completion.

    knobs_of(config)                    # Knobs(queue_delay_us=500, instances=2, max_queue_sizes={"batch": 40})
    with_knobs(config, target)          # a copy of the config with them
    as_written(config)                  # what Triton was given, from what it says that it has

`config` is Triton's ModelConfig protobuf.
"""

from __future__ import annotations

from tritonpilot.autopilot.terms import Knobs
from tritonpilot.errors import ServerError
from tritonpilot.model_config import ModelConfig


def knobs_of(config: ModelConfig) -> Knobs:
    """What the config says. Classes are those of `pilot_classes`; a class without a queue policy has no limit."""
    return Knobs(
        queue_delay_us=int(config.dynamic_batching.max_queue_delay_microseconds),
        instances=sum(group.count * _devices(group) for group in config.instance_group) or 1,
        max_queue_sizes={name: int(_policy(config, level).max_queue_size) for name, level in _levels(config).items()},
    )


def with_knobs(config: ModelConfig, knobs: Knobs) -> ModelConfig:
    """A copy with these settings; classes that `knobs` does not name keep their limits.

    Raises ServerError for what the model cannot have: a delay without a batcher or as long as a class may wait, an unknown class,
    a number of instances that its groups cannot make.
    """
    found = type(config)()
    found.CopyFrom(config)
    now = knobs_of(config)
    _set_delay(found, knobs.queue_delay_us)
    if knobs.instances != now.instances:
        _set_instances(found, knobs.instances)
    levels = _levels(config)
    for name, limit in knobs.max_queue_sizes.items():
        if name not in levels:
            raise _refused(config, f"it has no class {name} ({', '.join(levels) or 'none'})")
        if limit != now.max_queue_sizes[name]:
            batching = found.dynamic_batching
            policies = batching.priority_queue_policy
            if levels[name] not in policies:
                policies[levels[name]].CopyFrom(batching.default_queue_policy)
            policies[levels[name]].max_queue_size = limit
    return found


def with_spare(config: ModelConfig) -> ModelConfig:
    """A copy with one instance more, on each device of its first group."""
    found = type(config)()
    found.CopyFrom(config)
    for group in found.instance_group[:1]:
        group.count += 1
    return found


def as_written(config: ModelConfig) -> ModelConfig:
    """A served config without what Triton completes by itself.

    Triton changes instances in place where nothing else differs from the config that it was given, and it tells the completed
    one: given back as it is, that would load the whole model again.
    """
    found = type(config)()
    found.CopyFrom(config)
    for place, group in enumerate(found.instance_group):
        if group.name in (f"{config.name}_{place}", config.name):
            group.ClearField("name")
    if list(found.dynamic_batching.preferred_batch_size) == [config.max_batch_size]:
        del found.dynamic_batching.preferred_batch_size[:]
    for pinned in ("input_pinned_memory", "output_pinned_memory"):
        if found.optimization.HasField(pinned) and getattr(found.optimization, pinned).enable:
            found.optimization.ClearField(pinned)
    if found.HasField("optimization") and not found.optimization.ByteSize():
        found.ClearField("optimization")
    if found.runtime == "model.py":
        found.ClearField("runtime")
    return found


def is_same_but_knobs(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether two configs, as they were written, differ in nothing but settings that may change."""
    return bool(_without_knobs(one) == _without_knobs(other))


def _without_knobs(config: ModelConfig) -> ModelConfig:
    found = type(config)()
    found.CopyFrom(config)
    if config.HasField("dynamic_batching"):
        found.dynamic_batching.max_queue_delay_microseconds = 0
    for group in found.instance_group:
        group.count = 1
    for level in _levels(config).values():
        policy = found.dynamic_batching.priority_queue_policy[level]
        policy.CopyFrom(_policy(config, level))
        policy.max_queue_size = 0
    return found


def _set_delay(config: ModelConfig, delay_us: int) -> None:
    if delay_us == int(config.dynamic_batching.max_queue_delay_microseconds):
        return
    if not config.HasField("dynamic_batching"):
        raise _refused(config, "it has no dynamic batching, and so no queue delay")
    for name, level in _levels(config).items():
        timeout_us = int(_policy(config, level).default_timeout_microseconds)
        if 0 < timeout_us <= delay_us:
            raise _refused(config, f"class {name} may wait {timeout_us} us, no longer than a delay of {delay_us} us")
    config.dynamic_batching.max_queue_delay_microseconds = delay_us


def _set_instances(config: ModelConfig, instances: int) -> None:
    """The first group takes the change; the others stay."""
    if config.HasField("ensemble_scheduling"):
        raise _refused(config, "it is an ensemble, which has no instances; the models of its steps have")
    if not config.instance_group:
        config.instance_group.add()
    first, *others = config.instance_group
    left = instances - sum(group.count * _devices(group) for group in others)
    count, rest = divmod(left, _devices(first))
    if count < 1 or rest:
        groups = ", ".join(f"{group.count} on each of {_devices(group)}" for group in config.instance_group)
        raise _refused(config, f"its instance groups ({groups}) cannot make {instances} instances")
    first.count = count


def _levels(config: ModelConfig) -> dict[str, int]:
    """Class -> priority level."""
    stated = config.parameters["pilot_classes"].string_value if "pilot_classes" in config.parameters else ""
    pairs = (each.rpartition(":") for each in stated.split(",") if each)
    return {name: int(level) for name, _, level in pairs if name and level.isdigit()}


def _policy(config: ModelConfig, level: int) -> ModelConfig:
    policies = config.dynamic_batching.priority_queue_policy
    return policies.get(level, config.dynamic_batching.default_queue_policy)


def _devices(group: ModelConfig) -> int:
    """A group has its count on each of its GPUs."""
    return max(1, len(group.gpus))


def _refused(config: ModelConfig, why: str) -> ServerError:
    return ServerError(
        f"Model {config.name!r} cannot have this setting: {why}. Nothing was changed. Correct the bounds."
    )
