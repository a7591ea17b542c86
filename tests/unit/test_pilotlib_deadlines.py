from __future__ import annotations

import json

import pytest

from pilotlib.deadlines import DeadlineParameterError, deadline_ns


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("{}", None),
        ('{"other":1}', None),
        ('{"other":"pilot_deadline_ns"}', None),
        ('{"pilot_deadline_ns_too":1}', None),
        ('{"pilot_deadline_ns":81234567890123}', 81234567890123),
        ('{"pilot_deadline_ns":9223372036854775807}', 2**63 - 1),
        ('{"pilot_deadline_ns":0}', 0),
        ('{"pilot_deadline_ns":-5}', -5),
        ('{"pilot_deadline_ns":7,"other":8}', 7),
        ('{"other":"\\"pilot_deadline_ns\\":8","pilot_deadline_ns":7}', 7),
    ],
)
def test_the_deadline_is_found_among_all_parameters(parameters: str, expected: int | None) -> None:
    assert deadline_ns(parameters) == expected


@pytest.mark.parametrize("value", ["soon", "7", "", 1.5, 1e21, True, False, None])
def test_what_is_no_integer_is_named(value: object) -> None:
    for other in ({}, {"other": 1}):
        with pytest.raises(DeadlineParameterError, match="^pilot_deadline_ns is "):
            deadline_ns(json.dumps({"pilot_deadline_ns": value, **other}, separators=(",", ":")))
