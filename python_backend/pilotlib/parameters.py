"""Which `parameters` of config.pbtxt does a backend read? A table (a dataclass), and the parser that types the values.

    @dataclass(frozen=True)
    class Table:
        size: int = parameter(224, "edge of the square in pixels", minimum=1)
        resample: str = parameter("bicubic", "filter", choices=("bicubic", "bilinear"))

    parse_strictly(config["parameters"], Table)  -> Table(size=224, resample="bicubic")
    parse(config["parameters"])                  -> (Parameters(...), remarks)        as Triton's onnxruntime backend

`parameters` in Triton's JSON form: {"intra_op_thread_count": {"string_value": "1"}}. `pilot_*` are common to all our
backends. A wrong value raises ParameterError. An unknown name too in backends of our own; in the stand-ins for Triton's
backends it is a remark, because those ignore it without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

COMMON_PREFIX = "pilot_"
SESSION_PREFIX = "session."  # ONNX Runtime session config entries, passed on as they are

# Read by Triton itself (core or its python backend) before a model's code sees the config.
READ_BY_TRITON = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH")

# Triton's onnxruntime backend reads these for GPU instances, which this stand-in has none of.
GPU_ONLY = ("cudnn_conv_algo_search", "gpu_mem_limit", "arena_extend_strategy", "do_copy_in_default_stream")

T = TypeVar("T")


class ParameterError(ValueError):
    """A parameter in config.pbtxt has a value that cannot be read; the model is not loaded."""


def parameter(
    default: int | float | bool | str | None,
    meaning: str,
    *,
    name: str = "",
    minimum: float | None = None,
    choices: tuple[int | float | str, ...] = (),
) -> Any:
    """A field of a table: its default, what it means, and what values it takes. `name`: when it is no Python name."""
    return field(default=default, metadata={"meaning": meaning, "name": name, "minimum": minimum, "choices": choices})


@dataclass(frozen=True)
class CommonParameters:
    """What every backend of ours reads: the waker's, and what the build tells."""

    pilot_waker: str = parameter(
        "auto", "cure for the 500 ms stall: auto = on with priorities or a queue policy", choices=("auto", "off")
    )
    pilot_wake_priority: int = parameter(
        0, "priority level that the build reserved for wake requests; 0 = none was reserved", minimum=0
    )
    pilot_wake_after_us: int = parameter(
        1000,
        "how long after an execution, with no new one begun, the waker sends its request; up to 1 ms of queue delay is added",
        minimum=100,
    )
    pilot_classes: str = parameter(
        "", "classes of callers and their priority levels, as name:level,name:level; for clients and the entry"
    )
    pilot_shares: str = parameter("", "floors of classes, as name:part of the capacity; for the entry")
    pilot_max_waits_ms: str = parameter(
        "", "waits after which classes go before better ones, as name:ms; for the entry"
    )
    pilot_slos_ms: str = parameter("", "promises to classes, as name:ms; for the entry")
    pilot_record: int = parameter(
        0,
        "rows of real requests that each instance keeps a fair sample of, to calibrate on; 0 = none is stored",
        minimum=0,
    )
    pilot_record_file: str = parameter(
        "", "where they are written, as /folder/name.npz; each instance adds its own name"
    )
    pilot_record_drop: str = parameter("", "inputs that are never stored, with commas")
    pilot_steps: str = parameter(
        "", "models that a pipeline's driver calls, with commas; who loads it loads them first"
    )
    pilot_step_versions: str = parameter(
        "", "versions of them that it calls, as name:version with commas; written by a swap"
    )
    pilot_cache: str = parameter("", "answers that the entry keeps, as max_mb:number,ttl_s:number; for the entry")
    pilot_guard: str = parameter("", "what of the answers is guarded, as JSON; for the entry")
    pilot_guard_reference: str = parameter("", "how answers are usually distributed, as JSON; for the entry")
    pilot_trace_rate: int = parameter(
        0, "one of so many requests is traced; for who starts the server. 0 = Triton's own setting holds", minimum=0
    )


@dataclass(frozen=True)
class Parameters(CommonParameters):
    """What the stand-in for Triton's onnxruntime backend reads."""

    intra_op_thread_count: int = parameter(
        0,
        "threads within an operator; 0 = the cores that the instance may use, divided by the number of instances "
        "(Triton's C++ backend gives every instance as many threads as there are cores)",
        minimum=0,
    )
    inter_op_thread_count: int = parameter(
        0, "threads across operators, only with execution_mode 1; 0 = as for intra_op_thread_count", minimum=0
    )
    execution_mode: int = parameter(
        0, "0 = operators run one after the other, 1 = branches run in parallel", choices=(0, 1)
    )
    enable_mem_arena: bool | None = parameter(
        None, "keep ONNX Runtime's CPU memory arena; unset = ONNX Runtime's default"
    )
    enable_mem_pattern: bool | None = parameter(None, "plan memory by shape; unset = ONNX Runtime's default")
    memory_arena_shrinkage: str = parameter(
        "", 'arenas to shrink after each run, for example "cpu:0"', name="memory.enable_memory_arena_shrinkage"
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
    """One line of a table as documentation shows it."""

    name: str
    type: str
    default: str
    meaning: str


def table(of: type = Parameters) -> tuple[Row, ...]:
    """Every parameter of a table, in its order."""
    return tuple(
        Row(
            name=each.metadata.get("name") or each.name,
            type=_type_name(each),
            default="" if each.default is MISSING or each.default is None else str(each.default),
            meaning=each.metadata.get("meaning", ""),
        )
        for each in fields(of)
    )


def parse(raw: Mapping[str, Any], of: type[T] = Parameters) -> tuple[T, tuple[str, ...]]:  # type: ignore[assignment]
    """Typed values and remarks on what will not be honoured, from the `parameters` of a model config in JSON form.

    A field whose name ends in "*" takes all parameters with that prefix, as text. Raises ParameterError naming the
    parameter, its value and what is allowed.
    """
    values, unknown = _values(raw, of)
    remarks = []
    for name in unknown:
        if name in GPU_ONLY:
            remarks.append(f'parameter "{name}" only acts on GPU instances and is ignored here')
        else:
            remarks.append(f'parameter "{name}" is not known to this backend and is ignored')
    return of(**values), tuple(remarks)


def parse_strictly(raw: Mapping[str, Any], of: type[T]) -> T:
    """Typed values; a name that the table lacks is refused, save the common ones (`pilot_*`) and Triton's own.

    Raises ParameterError.
    """
    values, unknown = _values(raw, of)
    strange = [name for name in unknown if not name.startswith(COMMON_PREFIX)]
    if strange:
        known = ", ".join(row.name for row in table(of)) or "none"
        raise ParameterError(
            f'parameter "{strange[0]}" in config.pbtxt is not known to this backend, which has: {known}; the model is not '
            "loaded: correct its name, or leave it out"
        )
    return of(**values)


def _values(raw: Mapping[str, Any], of: type) -> tuple[dict[str, Any], list[str]]:
    rows = {each.metadata.get("name") or each.name: each for each in fields(of)}
    prefixes = {name[:-1]: rows.pop(name).name for name in tuple(rows) if name.endswith("*")}
    values: dict[str, Any] = {}
    unknown = []
    for name, holder in raw.items():
        text = holder.get("string_value", "") if isinstance(holder, Mapping) else str(holder)
        if name in rows:
            values[rows[name].name] = _typed(name, text, rows[name])
        elif prefix := next((prefix for prefix in prefixes if name.startswith(prefix)), ""):
            values.setdefault(prefixes[prefix], {})[name] = text
        elif name not in READ_BY_TRITON:
            unknown.append(name)
    for name, row in rows.items():
        if row.default is MISSING and row.default_factory is MISSING and row.name not in values:
            raise ParameterError(
                f'parameter "{name}" is missing in config.pbtxt; the model is not loaded: add '
                f'`parameters {{ key: "{name}" value {{ string_value: ... }} }}`'
            )
    return values, unknown


def _typed(name: str, text: str, row: Any) -> int | float | bool | str:
    choices, minimum = row.metadata.get("choices", ()), row.metadata.get("minimum")
    kind = _type_name(row).partition(" ")[0]  # "bool | None" is a bool that may be left out
    value: int | float | bool | str = text
    if kind == "bool":
        truth = {"1": True, "true": True, "0": False, "false": False}.get(text.lower())
        if truth is None:
            raise ParameterError(_refusal(name, text, '"1", "true", "0" or "false"'))
        value = truth
    elif kind in ("int", "float"):
        what = "a whole number" if kind == "int" else "a number"
        try:
            value = int(text) if kind == "int" else float(text)
        except ValueError:
            raise ParameterError(_refusal(name, text, what)) from None
        if minimum is not None and not value >= minimum:  # so that nan is refused
            raise ParameterError(_refusal(name, text, f"{what} of at least {minimum}"))
    if choices and value not in choices:
        raise ParameterError(_refusal(name, text, " or ".join(f'"{choice}"' for choice in choices)))
    return value


def _type_name(row: Any) -> str:
    """The type as the table writes it, whether or not its module postpones annotations."""
    return row.type.__name__ if isinstance(row.type, type) else str(row.type)


def _refusal(name: str, text: str, allowed: str) -> str:
    return (
        f'parameter "{name}" in config.pbtxt is "{text}", but must be {allowed}; the model is not loaded: '
        f'correct `parameters {{ key: "{name}" value {{ string_value: ... }} }}`'
    )
