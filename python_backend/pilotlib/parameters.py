"""Which `parameters` of config.pbtxt do our backends read? The one table, and the parser that types it.

    parameters, remarks = parse(config["parameters"])
    parameters.intra_op_thread_count  -> 1

`parameters` in Triton's JSON form: {"intra_op_thread_count": {"string_value": "1"}}. Names without the prefix `pilot_`
are Triton's own (its onnxruntime and python backends read them); `pilot_*` are read by our backends only. A wrong value
raises ParameterError; an unknown name is a remark, because Triton's own backends ignore those without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

SESSION_PREFIX = "session."  # ONNX Runtime session config entries, passed on as they are

# Read by Triton itself (core or its python backend) before a model's code sees the config.
READ_BY_TRITON = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH")

# Triton's onnxruntime backend reads these for GPU instances, which this stand-in has none of.
GPU_ONLY = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")


class ParameterError(ValueError):
    """A parameter in config.pbtxt has a value that cannot be read; the model is not loaded."""


def _row(
    default: int | bool | str | None,
    meaning: str,
    *,
    name: str = "",
    minimum: int | None = None,
    choices: tuple[int | str, ...] = (),
) -> Any:
    return field(default=default, metadata={"meaning": meaning, "name": name, "minimum": minimum, "choices": choices})


@dataclass(frozen=True)
class Parameters:
    """The table: one field per parameter, with its type, default and meaning."""

    intra_op_thread_count: int = _row(
        0,
        "threads within an operator; 0 = the cores that the instance may use, divided by the number of instances "
        "(Triton's C++ backend gives every instance as many threads as there are cores)",
        minimum=0,
    )
    inter_op_thread_count: int = _row(
        0, "threads across operators, only with execution_mode 1; 0 = as for intra_op_thread_count", minimum=0
    )
    execution_mode: int = _row(0, "0 = operators run one after the other, 1 = branches run in parallel", choices=(0, 1))
    enable_mem_arena: bool | None = _row(None, "keep ONNX Runtime's CPU memory arena; unset = ONNX Runtime's default")
    enable_mem_pattern: bool | None = _row(None, "plan memory by shape; unset = ONNX Runtime's default")
    memory_arena_shrinkage: str = _row(
        "", 'arenas to shrink after each run, for example "cpu:0"', name="memory.enable_memory_arena_shrinkage"
    )
    pilot_waker: str = _row(
        "auto", "cure for the 500 ms stall: auto = on with priorities or a queue policy", choices=("auto", "off")
    )
    pilot_wake_priority: int = _row(
        0, "priority level that the build reserved for wake requests; 0 = none was reserved", minimum=0
    )
    pilot_wake_after_us: int = _row(
        1000, "how long after an execution, with no new one begun, the waker sends its request", minimum=100
    )
    pilot_classes: str = _row(
        "", "classes of callers and their priority levels, as name:level,name:level; for clients and metrics"
    )
    session: Mapping[str, str] = field(
        default_factory=dict,
        metadata={
            "meaning": "ONNX Runtime session entries such as session.set_denormal_as_zero, passed on as they are "
            "(Triton's C++ backend honours session.use_device_allocator_for_initializers only)",
            "name": SESSION_PREFIX + "*",
        },
    )


@dataclass(frozen=True)
class Row:
    """One line of the table as documentation shows it."""

    name: str
    type: str
    default: str
    meaning: str


def table() -> tuple[Row, ...]:
    """Every parameter that our backends read, in the order of the table."""
    return tuple(
        Row(
            name=each.metadata["name"] or each.name,
            type=str(each.type),
            default="" if each.default is MISSING or each.default is None else str(each.default),
            meaning=each.metadata["meaning"],
        )
        for each in fields(Parameters)
    )


def parse(raw: Mapping[str, Any]) -> tuple[Parameters, tuple[str, ...]]:
    """Typed values and remarks on what will not be honoured, from the `parameters` of a model config in JSON form.

    Raises ParameterError naming the parameter, its value and what is allowed.
    """
    rows = {each.metadata["name"] or each.name: each for each in fields(Parameters) if each.name != "session"}
    values: dict[str, int | bool | str] = {}
    session: dict[str, str] = {}
    remarks: list[str] = []
    for name, holder in raw.items():
        text = holder.get("string_value", "") if isinstance(holder, Mapping) else str(holder)
        if name in rows:
            values[rows[name].name] = _typed(name, text, rows[name])
        elif name.startswith(SESSION_PREFIX):
            session[name] = text
        elif name in GPU_ONLY:
            remarks.append(f'parameter "{name}" only acts on GPU instances and is ignored here')
        elif name not in READ_BY_TRITON:
            remarks.append(f'parameter "{name}" is not known to this backend and is ignored')
    return Parameters(session=session, **values), tuple(remarks)  # type: ignore[arg-type]


def _typed(name: str, text: str, row: Any) -> int | bool | str:
    choices, minimum = row.metadata["choices"], row.metadata["minimum"]
    value: int | bool | str = text
    if str(row.type).startswith("bool"):
        truth = {"1": True, "true": True, "0": False, "false": False}.get(text.lower())
        if truth is None:
            raise ParameterError(_refusal(name, text, '"1", "true", "0" or "false"'))
        value = truth
    elif row.type == "int":
        try:
            value = int(text)
        except ValueError:
            raise ParameterError(_refusal(name, text, "a whole number")) from None
        if minimum is not None and value < minimum:
            raise ParameterError(_refusal(name, text, f"a whole number of at least {minimum}"))
    if choices and value not in choices:
        raise ParameterError(_refusal(name, text, " or ".join(f'"{choice}"' for choice in choices)))
    return value


def _refusal(name: str, text: str, allowed: str) -> str:
    return (
        f'parameter "{name}" in config.pbtxt is "{text}", but must be {allowed}; the model is not loaded: '
        f'correct `parameters {{ key: "{name}" value {{ string_value: ... }} }}`'
    )
