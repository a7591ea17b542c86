from __future__ import annotations

from collections.abc import Mapping

import pytest

from pilotlib.parameters import ParameterError, Parameters, parse, table


def config(**values: str) -> Mapping[str, Mapping[str, str]]:
    return {name: {"string_value": value} for name, value in values.items()}


def test_nothing_said_gives_the_defaults_of_the_table() -> None:
    parameters, remarks = parse({})
    assert parameters == Parameters()
    assert (parameters.intra_op_thread_count, parameters.pilot_waker, remarks) == (0, "auto", ())


def test_values_are_typed() -> None:
    said = {
        **config(intra_op_thread_count="2", execution_mode="1", enable_mem_arena="TRUE", pilot_wake_priority="3"),
        "memory.enable_memory_arena_shrinkage": {"string_value": "cpu:0"},
        "session.set_denormal_as_zero": {"string_value": "1"},
    }
    parameters, remarks = parse(said)
    assert parameters == Parameters(
        intra_op_thread_count=2,
        execution_mode=1,
        enable_mem_arena=True,
        memory_arena_shrinkage="cpu:0",
        pilot_wake_priority=3,
        session={"session.set_denormal_as_zero": "1"},
    )
    assert remarks == ()


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("intra_op_thread_count", "two", "a whole number"),
        ("inter_op_thread_count", "-1", "a whole number of at least 0"),
        ("execution_mode", "2", '"0" or "1"'),
        ("enable_mem_pattern", "yes", '"1", "true", "0" or "false"'),
        ("pilot_waker", "on", '"auto" or "off"'),
    ],
)
def test_a_wrong_value_is_refused_by_name_value_and_what_is_allowed(name: str, text: str, allowed: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse(config(**{name: text}))
    assert f'"{name}" in config.pbtxt is "{text}", but must be {allowed};' in str(caught.value)


def test_what_is_not_honoured_is_remarked() -> None:
    _, remarks = parse(config(intra_op_threads="1", gpu_mem_limit="1", FORCE_CPU_ONLY_INPUT_TENSORS="no"))
    assert len(remarks) == 2
    assert '"intra_op_threads" is not known' in remarks[0]
    assert '"gpu_mem_limit" only acts on GPU instances' in remarks[1]


def test_the_table_documents_every_parameter() -> None:
    rows = {row.name: row for row in table()}
    assert {"session.*", "memory.enable_memory_arena_shrinkage", "pilot_waker"} <= set(rows)
    assert all(row.meaning for row in rows.values())
    assert (rows["execution_mode"].type, rows["execution_mode"].default) == ("int", "0")
