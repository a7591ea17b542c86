"""Which answer counts as stale, and what the two kinds of stores are worth on requests that are known."""

from __future__ import annotations

import time

import pytest

from perf.generations import Call
from perf.proofs.cache import _exact_lru, stale
from tritonpilot.entry.cache import OVERHEAD_BYTES, Store


def call(sent_s: float, *generations: int) -> Call:
    return Call("ctr", "http", sent_s, sent_s, sent_s + 0.1, "", "1", frozenset(generations))


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([call(1, 0), call(9.9, 0), call(10.1, 1), call(20.1, 2)], 0),
        ([call(9.9, 1), call(19, 2)], 0),  # earlier than was said
        ([call(10.1, 0)], 1),
        ([call(20.1, 1), call(20.2, 0)], 2),
        ([call(20.1, 2, 1)], 1),
        ([call(20.1, -1)], 1),
    ],
)
def test_an_answer_is_stale_when_a_later_generation_was_said_to_serve_before_the_question(
    calls: list[Call], found: int
) -> None:
    assert stale(calls, [(1, 10.0), (2, 20.0)]) == found


def test_lru_evicts_what_was_asked_for_longest_ago() -> None:
    assert _exact_lru(["a", "b", "a", "c", "a", "b"], 2) == pytest.approx(2 / 6, abs=1e-4)


def test_a_store_keeps_what_is_asked_most_through_a_flood_of_others() -> None:
    def hits(policy: str) -> int:
        store = Store(20 * (OVERHEAD_BYTES + 16 + 100), None, policy)  # type: ignore[arg-type]
        found = 0
        for turn in range(200):
            for key in [*(f"often{number}" for number in range(5)), *(f"once{turn}-{number}" for number in range(30))]:
                if store.get(key.encode().rjust(16)) is not None:
                    found += 1
                else:
                    store.set(key.encode().rjust(16), (1, b"." * 100, b"", 0.0))
        return found

    assert hits("lru") == 0
    assert hits("tiny_lfu") > 0.9 * 5 * 200


def test_a_store_never_holds_much_more_than_it_may() -> None:
    store = Store(100_000)
    assert not store.set(b"k", (1, b"." * 13_000, b"", 0.0)), "more than an eighth"
    most = 0
    for number in range(500):
        assert store.set(b"%04d" % number, (1, b"." * 5000, b"", 0.0))
        most = max(most, store.weight())
    assert most <= 100_000 * (1 + 1 / 32) + 5000 + OVERHEAD_BYTES + 4
    assert store.evicted > 400
    assert 15 <= len(store) <= 18


def test_a_store_forgets_what_is_too_old() -> None:
    store = Store(100_000, ttl_s=0.05)
    store.set(b"k", (1, b"answer", b"", 0.0))
    assert store.get(b"k") == (1, b"answer", b"", 0.0)
    until = time.monotonic() + 5
    while store.get(b"k") is not None:
        assert time.monotonic() < until
    store.settle()
    assert (len(store), store.evicted) == (0, 0)
