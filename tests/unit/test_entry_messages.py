from __future__ import annotations

import json
import math

import grpc
import pytest

from tritonpilot.entry import messages
from tritonpilot.entry.messages import Denied


def test_each_kind_of_refusal_has_a_status_in_both_protocols() -> None:
    for kind, (status, code) in messages.STATUS_OF.items():
        denied = messages.refused(kind, "why", 0.5)
        assert (denied.http_status, denied.grpc_code, denied.message, denied.retry_after_s) == (
            status,
            code,
            "why",
            0.5,
        )
        assert 400 <= status < 600
        assert isinstance(grpc.StatusCode[code], grpc.StatusCode)


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("rate", 429, "RESOURCE_EXHAUSTED"),
        ("concurrency", 429, "RESOURCE_EXHAUSTED"),
        ("queue_full", 503, "UNAVAILABLE"),
        ("wait", 503, "UNAVAILABLE"),
        ("deadline", 504, "DEADLINE_EXCEEDED"),
        ("unknown_class", 400, "INVALID_ARGUMENT"),
        ("key", 401, "UNAUTHENTICATED"),
        ("forbidden", 403, "PERMISSION_DENIED"),
        ("too_large", 413, "RESOURCE_EXHAUSTED"),
        ("broken", 502, "UNAVAILABLE"),
    ],
)
def test_callers_can_tell_the_kinds_apart(kind: str, status: int, code: str) -> None:
    assert messages.STATUS_OF[kind] == (status, code)


def test_an_error_has_the_form_of_tritons_and_keeps_its_text() -> None:
    assert json.loads(messages.error_body('model "ä" \n')) == {"error": 'model "ä" \n'}
    assert b"\n" not in messages.error_body("two\nlines")


@pytest.mark.parametrize(
    ("seconds", "whole", "ms"), [(0.0, 1, 1), (0.0004, 1, 1), (0.25, 1, 250), (1.0, 1, 1000), (1.0001, 2, 1001)]
)
def test_retry_after_is_rounded_up_in_both_units(seconds: float, whole: int, ms: int) -> None:
    assert messages.retry_after(seconds) == (whole, ms)


@pytest.mark.parametrize(
    ("keys", "authorizations", "found"),
    [
        ([], [], None),
        (["tp_a"], [], "tp_a"),
        ([" tp_a "], ["Basic dXNlcg=="], "tp_a"),
        ([], ["Bearer tp_a"], "tp_a"),
        ([], ["bearer   tp_a"], "tp_a"),
        ([], ["Basic dXNlcg=="], None),
        ([""], [], ""),
        ([], ["Bearer"], ""),
    ],
)
def test_a_key_is_found_in_either_header(keys: list[str], authorizations: list[str], found: str | None) -> None:
    assert messages.api_key(keys, authorizations) == found


@pytest.mark.parametrize(
    ("keys", "authorizations"),
    [
        (["a", "a"], []),
        (["a", "b"], []),
        (["a"], ["Bearer a"]),
        ([], ["Bearer a", "Bearer a"]),
        ([], ["Bearer a", "Basic b"]),
    ],
)
def test_several_keys_are_refused_even_when_equal(keys: list[str], authorizations: list[str]) -> None:
    with pytest.raises(Denied, match="several API keys") as denied:
        messages.api_key(keys, authorizations)
    assert denied.value.http_status == 400


@pytest.mark.parametrize(("value", "priority"), [(None, None), (0, None), (1, 1), (2**32 - 1, 2**32 - 1)])
def test_a_priority_is_an_integer_and_0_the_default(value: object, priority: int | None) -> None:
    assert messages.priority_of(value) == priority


@pytest.mark.parametrize("value", ["1", -1, 1.0, True, False, 2**32, [], {}, math.nan])
def test_a_bad_priority_is_named(value: object) -> None:
    with pytest.raises(Denied) as denied:
        messages.priority_of(value)
    assert denied.value.http_status == 400
    assert "'priority'" in denied.value.message
    assert repr(value) in denied.value.message


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, None), (0, None), (1, 1e-6), (2_500_000, 2.5), (2**63 - 1, None)]
)
def test_a_timeout_is_in_microseconds_and_0_and_ages_are_none(value: object, seconds: float | None) -> None:
    assert messages.timeout_s_of(value) == seconds


@pytest.mark.parametrize("value", ["1", -1, 1.5, True, 2**63, 1e30, {}])
def test_a_bad_timeout_is_named(value: object) -> None:
    with pytest.raises(Denied, match="'timeout'") as denied:
        messages.timeout_s_of(value)
    assert denied.value.http_status == 400


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, None), ("50", 0.05), ("0.5", 0.0005), (" 1e3 ", 1.0), ("2.", 0.002)]
)
def test_a_deadline_is_in_milliseconds(text: str | None, seconds: float | None) -> None:
    assert messages.deadline_s_of(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-1",
        "nan",
        "inf",
        "1e300",
        "50ms",
        "0x10",
        "1" * 5000,
        "1_000",
        "\n1",
        "+1",
        "infinity",
        "\u0661",  # a digit, in Arabic
        ".",
        "1 0",
    ],
)
def test_a_bad_deadline_is_named_and_not_quoted_at_length(text: str) -> None:
    with pytest.raises(Denied, match="tritonpilot-deadline-ms") as denied:
        messages.deadline_s_of(text)
    assert denied.value.http_status == 400
    assert len(denied.value.message) < 250


@pytest.mark.parametrize(
    ("limits", "smallest"), [((), None), ((None,), None), ((None, 2.0), 2.0), ((3.0, None, 1.0), 1.0)]
)
def test_the_earlier_of_limits_counts(limits: tuple[float | None, ...], smallest: float | None) -> None:
    assert messages.earlier(*limits) == smallest


@pytest.mark.parametrize(
    ("encoded", "name"), [(b"ctr", "ctr"), (b"c%74r", "ctr"), (b"image_net.v2-b", "image_net.v2-b"), (b"_a", "_a")]
)
def test_a_models_name_is_decoded_once(encoded: bytes, name: str) -> None:
    assert messages.model_name(encoded) == name


@pytest.mark.parametrize(
    "encoded", [b"", b".", b"..", b"a%2Fb", b"a/b", b"a%252Fb", b"a%00", b"a%0d%0a", b"\xc3\xa4", b"a b", b"-a", b"a%"]
)
def test_other_names_are_unknown_models(encoded: bytes) -> None:
    with pytest.raises(Denied) as denied:
        messages.model_name(encoded)
    assert denied.value.http_status == 404
    assert "\n" not in denied.value.message
    assert "\0" not in denied.value.message


def test_a_version_is_a_number() -> None:
    assert messages.model_version("") == ""
    assert messages.model_version("12") == "12"
    for text in ("latest", "-1", "1.0", "1/2", "٣", "9" * 30):
        with pytest.raises(Denied) as denied:
            messages.model_version(text)
        assert denied.value.http_status == 404


PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("parent", "state", "passed"),
    [
        (PARENT, "", (PARENT, None)),
        (PARENT, "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7", (PARENT, "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7")),
        (PARENT, "fw529a3039@dt=FfAQb; \t,, a=b", (PARENT, "fw529a3039@dt=FfAQb; \t,, a=b")),
        (PARENT, "a=x\ty", (PARENT, None)),
        (PARENT, "A=b", (PARENT, None)),
        (PARENT, "a=" + "x" * 511, (PARENT, None)),
        (PARENT, "a=b\r\nx-evil: 1", (PARENT, None)),
        (PARENT, ",".join("a=b" for _ in range(33)), (PARENT, None)),
    ],
)
def test_a_sampled_trace_context_is_passed_on(parent: str, state: str, passed: tuple[str, str | None]) -> None:
    found = messages.trace_context(parent, state)
    assert (found["traceparent"], found.get("tracestate")) == passed


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT[:-1] + "0",  # not sampled
        "ff" + PARENT[2:],
        PARENT.upper(),
        PARENT + "," + PARENT,
        PARENT + "-extra",
        PARENT + "\n",
        PARENT.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32),
        PARENT.replace("00f067aa0ba902b7", "0" * 16),
    ],
)
def test_what_is_no_sampled_trace_context_is_dropped(parent: str) -> None:
    assert messages.trace_context(parent, "a=b") == {}
