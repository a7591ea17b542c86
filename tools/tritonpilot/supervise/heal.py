"""Give a model new stubs while Triton goes on serving.

    how = heal(control, "ctr", trouble, stubs, probe)        # "instances" or "reload"; raises ServerError

A load call alone changes nothing: neither its files nor its config have changed. So the config is given with another host policy of
its instance groups, which makes other instances of them: Triton 2.51 starts new ones in place, and the model keeps its queue. Where
that does not help the whole model is loaded beside itself. Triton cannot unload an old copy that had executions on its dead stub:
it stays, without work, until the server ends (ADR 0022).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from tritonpilot.autopilot.knobs import as_written
from tritonpilot.control import Control
from tritonpilot.model_config import ModelConfig
from tritonpilot.supervise.processes import Stub, Stubs

LOAD_TIMEOUT_S = 60.0
HEALED = "pilot_healed"

Way = Literal["instances", "reload"]


def heal(
    control: Control,
    model: str,
    *,
    is_whole: bool,
    hanging: Sequence[Stub] = (),
    stubs: Stubs | None = None,
    check: Callable[[], None],
) -> Way:
    """New instances in place, or with `is_whole` a whole new copy of the model; `check` raises unless it answers then.

    `hanging` stubs are killed first: Triton would wait for them. Raises ServerError.
    """
    for stub in hanging:
        if stubs is not None:
            stubs.kill(stub)
    config = as_written(control.config(model))
    changed = None if is_whole else with_new_instances(config)
    control.load(model, config=changed or with_new_copy(config), probe=False, timeout_s=LOAD_TIMEOUT_S)
    check()
    return "reload" if changed is None else "instances"


def with_new_instances(config: ModelConfig) -> ModelConfig | None:
    """A copy whose instance groups are others: they name another host policy, of which there is none, so that Triton takes its own
    defaults. Names and counts do not make an instance another one. None where a group names a policy already.
    """
    found = type(config)()
    found.CopyFrom(config)
    for group in found.instance_group:
        stated, number = group.host_policy.rpartition("_")[::2] if group.host_policy else (HEALED, "0")
        if stated != HEALED:
            return None
        group.host_policy = f"{HEALED}_{int(number) + 1}"
    return found if found.instance_group else None


def with_new_copy(config: ModelConfig) -> ModelConfig:
    """A copy that differs in what no backend heeds: the file for a device that there is not."""
    found = type(config)()
    found.CopyFrom(config)
    before = config.cc_model_filenames.get(HEALED, "0")
    found.cc_model_filenames[HEALED] = str(int(before) + 1 if before.isdecimal() else 1)
    return found
