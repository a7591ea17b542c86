from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from pilotlib.parameters import CommonParameters, ParameterError, Parameters, parameter, parse, parse_strictly, table


@dataclass(frozen=True)
class Crop:
    size: int = parameter(224, "edge of the square in pixels", minimum=1)
    share: float = parameter(0.875, "of the shorter edge that is kept", minimum=0.1)
    mode: str = parameter("crop", "what becomes of the rest", choices=("crop", "stretch"))
    upright: bool = parameter(True, "whether EXIF rotation is honoured")


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


def test_a_table_of_ones_own_is_typed_by_its_fields() -> None:
    said = config(
        size="32", share="0.5", mode="stretch", upright="false", pilot_classes="a:1", EXECUTION_ENV_PATH="/env"
    )
    assert parse_strictly(said, Crop) == Crop(32, 0.5, "stretch", False)
    assert parse_strictly({}, Crop) == Crop()
    assert [(row.name, row.type, row.default) for row in table(Crop)][:2] == [
        ("size", "int", "224"),
        ("share", "float", "0.875"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("size", "0", "a whole number of at least 1"),
        ("size", "1.5", "a whole number"),
        ("share", "half", "a number"),
        ("share", "nan", "a number of at least 0.1"),
        ("mode", "fit", '"crop" or "stretch"'),
    ],
)
def test_a_wrong_value_in_a_table_of_ones_own_is_refused(name: str, text: str, allowed: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse_strictly(config(**{name: text}), Crop)
    assert f'"{name}" in config.pbtxt is "{text}", but must be {allowed};' in str(caught.value)


def test_an_unknown_name_in_a_table_of_ones_own_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ParameterError, match='"sise" in config.pbtxt is not known .* has: size, share, mode, upright;'):
        parse_strictly(config(sise="1"), Crop)
    assert parse(config(sise="1"), Crop)[1] == ('parameter "sise" is not known to this backend and is ignored',)


def test_a_field_without_a_default_must_be_said() -> None:
    @dataclass(frozen=True)
    class Needed:
        det: str

    with pytest.raises(ParameterError, match='"det" is missing'):
        parse_strictly({}, Needed)
    assert parse_strictly(config(det="ocr_det"), Needed) == Needed("ocr_det")


def test_the_common_parameters_are_part_of_every_table_that_inherits_them() -> None:
    common, remarks = parse(config(pilot_waker="off", pilot_new="1"), CommonParameters)
    assert common.pilot_waker == "off"
    assert "pilot_new" in remarks[0]
    assert isinstance(Parameters(), CommonParameters)
