"""What the proofs of swaps see in the answers of their callers."""

from __future__ import annotations

import pytest

from perf.generations import Call
from perf.proofs.swap_50 import Judged, Swapped, judge, latencies
from perf.swapping import Ran


def call(
    sent_s: float,
    generation: int,
    *others: int,
    service: str = "ctr",
    version: str = "",
    error: str = "",
    took_s: float = 0.1,
) -> Call:
    generations = frozenset({generation, *others})
    return Call(service, "http", sent_s, sent_s, sent_s + took_s, error, version or str(generation + 1), generations)


def swapped(generation: int, began_s: float, ended_s: float, service: str = "ctr") -> Swapped:
    return Swapped(service, generation, (began_s - 1, began_s), Ran(began_s, ended_s, 0, "", {}))


SWAPS = [swapped(1, 10, 12), swapped(2, 20, 22), swapped(9, 14, 16, "pair")]


def counts(found: Judged) -> tuple[int, int, int, int]:
    return found.failed, found.mixed, found.stale, found.strangers


def test_answers_of_the_generations_that_serve_are_sound() -> None:
    calls = [call(9, 0), call(10.5, 0), call(10.5, 1), call(13, 1), call(21, 1), call(21, 2), call(30, 2)]
    calls += [call(13, 0, service="pair"), call(17, 9, service="pair")]

    assert counts(judge(calls, SWAPS)) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (call(9, 1), (0, 0, 1, 0)),  # before it was there
        (call(13, 0), (0, 0, 1, 0)),  # after it was retired
        (call(11.99, 0, took_s=5), (0, 0, 0, 0)),  # asked in time
        (call(23, 0), (0, 0, 1, 0)),
        (call(11, 0, 1), (0, 1, 0, 0)),  # rows of two
        (call(11, -1), (0, 1, 0, 0)),  # of nobody
        (call(11, 1, version="1"), (0, 0, 0, 1)),  # the version says another one than the values
        (call(11, 0, error="503"), (1, 0, 0, 0)),
        (call(13, 9, service="pair"), (0, 0, 1, 0)),
    ],
)
def test_an_answer_of_another_generation_is_seen(wrong: Call, expected: tuple[int, int, int, int]) -> None:
    assert counts(judge([call(9, 0), call(30, 2), wrong], SWAPS)) == expected


def test_the_version_of_a_pipeline_may_stay() -> None:
    calls = [call(9, 0, service="pair", version="1"), call(17, 9, service="pair", version="1")]

    assert counts(judge(calls, SWAPS)) == (0, 0, 0, 0)


def test_latencies_are_of_the_calls_that_were_due_in_a_span() -> None:
    calls = [call(sent_s, 0, took_s=sent_s / 1e3) for sent_s in range(1, 9)]
    calls.append(call(3, 0, error="gone"))

    assert latencies(calls, [(2, 4), (6, 7)]) == pytest.approx([2, 3, 6])
    assert not len(latencies(calls, [(20, 30)]))
